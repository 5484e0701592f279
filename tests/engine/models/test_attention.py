"""A pass stores each position's K and V in that position's memory, wherever its blocks lie."""

import pytest
import torch

from cache.layout import Layout, make_cache
from cache.memory import make_storage
from cache.paged import PagedCache
from cache.storage import KVShape
from engine.models.attention import Attention, plan_attention
from engine.models.spans import Span

SHAPE = KVShape(2, 1, 4, torch.float64, torch.device("cpu"))
BLOCK, HEADS = 4, 2


def blocks_out_of_order(cache: PagedCache) -> list[int]:
    """Let sequence 1 hold three blocks that are not in the pool's order. Returns its blocks."""
    for handle in (2, 3):
        cache.allocate(handle)
        cache.reserve(handle, BLOCK)
    cache.allocate(1)
    cache.reserve(1, BLOCK)
    for handle in (2, 3):
        cache.release(handle)
    cache.reserve(1, 3 * BLOCK)
    return list(cache.table(1))


@pytest.mark.parametrize("kind", ["slotted", "blocks in order", "blocks out of order"])
@pytest.mark.parametrize(("start", "count"), [(0, 11), (2, 9), (5, 1), (3, 2)])
def test_a_pass_stores_each_row_at_its_position(kind: str, start: int, count: int) -> None:
    layout = Layout(3, 12) if kind == "slotted" else Layout(3, 12, BLOCK, 6)
    cache = make_cache(layout)
    storage = make_storage(layout, cache, SHAPE)
    if kind == "blocks out of order":
        assert isinstance(cache, PagedCache)
        blocks = blocks_out_of_order(cache)
        assert blocks != list(range(blocks[0], blocks[0] + 3))
    else:
        cache.allocate(1)
        cache.reserve(1, 12)
    storage.prepare()
    spans = [Span.at(cache.slot(1), start, count)]
    plan = plan_attention(
        spans, storage, num_heads=HEADS, num_kv_heads=1, dtype=torch.float64, device=torch.device("cpu")
    )
    attention = Attention(plan, storage)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, count, 2, 4, generator=generator, dtype=torch.float64)
    for layer in range(2):
        attention(layer, torch.zeros(count, HEADS, 4, dtype=torch.float64), kv[layer])
    cache.extend(1, 12)
    for layer in range(2):
        keys, values = storage.read(layer, 1, 12)
        expected = torch.zeros(12, 2, 4, dtype=torch.float64)
        expected[start : start + count] = kv[layer]
        assert torch.equal(keys, expected[:, :1].transpose(0, 1))
        assert torch.equal(values, expected[:, 1:].transpose(0, 1))
