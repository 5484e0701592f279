"""The reference of paged attention: the definition row by row, torch's attention, and the engine's own attention."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from cache.gathered import GatheredStorage
from cache.layout import Layout, make_cache
from cache.paged import PagedCache
from cache.storage import KVShape
from engine.kernels import paged_attention
from engine.kernels.paged_attention import attend
from engine.kernels.paged_rows import MAX_NODES, path_bits
from engine.models.attention import Attention, plan_attention
from engine.models.pass_attention import PLAIN, Scoring
from engine.models.spans import Span
from engine.trees import ROOT, chain
from tests.engine.kernels.paged_cases import (
    Case,
    Heads,
    by_hand,
    make_case,
    make_rows,
    padded,
    poisoned,
    random_scoring,
    random_spans,
)
from tests.examples import examples

DOUBLE = Heads(2, 2, 8, 5, torch.float64)
DEEP = (ROOT, 0, 1, 0, 3, ROOT)
SPANS = [Span.at(0, 12, 7, DEEP), Span.at(1, 33, 1), Span.at(2, 0, 21), Span.at(3, 0, 0), Span.at(4, 9, 4)]


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@examples(60)
@given(st.integers(0, 10**6))
def test_every_row_gets_what_its_definition_says(seed: int) -> None:
    draw = random.Random(seed)
    heads = Heads(draw.choice((1, 2)), draw.choice((1, 3)), 8, draw.choice((5, 16)), torch.float64)
    scoring = random_scoring(draw, heads.kv_heads * heads.group)
    case = make_case(random_spans(draw, 90), heads, seed, scoring.window)
    close(attend(case.queries, case.pool, case.rows, scoring), by_hand(case, scoring))


def test_one_sequence_is_torchs_attention() -> None:
    case = make_case([Span.at(0, 0, 37)], DOUBLE)
    blocks = case.rows.tables[0, : -(-37 // 5)].long()
    kv = case.pool[blocks].flatten(0, 1)[:37].transpose(0, 1)
    out = F.scaled_dot_product_attention(
        case.queries.transpose(0, 1)[None], kv[None, :2], kv[None, 2:], is_causal=True, enable_gqa=True
    )
    close(attend(case.queries, case.pool, case.rows, PLAIN), out[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize(
    "scoring",
    [
        PLAIN,
        Scoring(window=4),
        Scoring(softcap=1.0),
        Scoring(window=6, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]).double()),
    ],
    ids=["plain", "window", "softcap", "window and sinks"],
)
def test_it_agrees_with_the_engines_attention_over_the_same_blocks(scoring: Scoring) -> None:
    spans = [Span.at(0, 12, 7, DEEP), Span.at(1, 33, 1), Span.at(2, 0, 21), Span.at(3, 9, 4)]
    case, storage, tables = stored(spans)
    rows = make_rows(spans, tables, scoring.window)
    queries, kv = case.queries, torch.randn(33, 4, 8, dtype=torch.float64)
    plan = plan_attention(spans, storage, num_heads=4, num_kv_heads=2, dtype=torch.float64, device=torch.device("cpu"))
    expected = Attention(plan, storage)(0, queries, kv, scoring)
    close(attend(queries, storage.pool[0], rows, scoring), expected)


def stored(spans: Sequence[Span]) -> tuple[Case, GatheredStorage, Tensor]:
    """A pass, a storage whose memory holds random numbers, and the block tables of the slots."""
    cache = make_cache(Layout(4, 64, 5, 60, mapped=False))
    assert isinstance(cache, PagedCache)
    storage = GatheredStorage(cache, KVShape(1, 2, 8, torch.float64, torch.device("cpu")))
    for handle, span in enumerate(spans):
        cache.allocate(handle)
        cache.reserve(handle, span.end)
        assert cache.slot(handle) == span.slot
    storage.prepare()
    torch.manual_seed(0)
    storage.pool[0].normal_()
    tables = [list(cache.table(handle)) for handle in range(len(spans))]
    width = max(map(len, tables))
    filled = [table + [-1] * (width - len(table)) for table in tables]
    return make_case(spans, DOUBLE), storage, torch.tensor(filled, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_types_are_computed_in_fp32(dtype: torch.dtype) -> None:
    case = make_case(SPANS, replace(DOUBLE, dtype=dtype))
    result = attend(case.queries, case.pool, case.rows, PLAIN)
    assert result.dtype == dtype
    wide = by_hand(case)
    assert torch.equal(result, attend(case.queries.float(), case.pool.float(), case.rows, PLAIN).to(dtype))
    torch.testing.assert_close(result.double(), wide, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_parts_of_the_rows_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(SPANS, DOUBLE)
    whole = attend(case.queries, case.pool, case.rows, PLAIN)
    monkeypatch.setattr(paged_attention, "REFERENCE_SCORES", 5 * 4 * 40 * 4)  # four rows of each sequence at a time
    close(attend(case.queries, case.pool, case.rows, PLAIN), whole)


def test_nothing_that_a_row_does_not_see_reaches_it() -> None:
    case = make_case(SPANS, DOUBLE)
    expected = attend(case.queries, case.pool, case.rows, PLAIN)
    close(attend(case.queries, poisoned(case), case.rows, PLAIN), expected)


def test_padding_gives_zeros() -> None:
    """Rows of an empty sequence, rows in no sequence, rows of a strange owner, and a sequence whose blocks are gone."""
    case = make_case(SPANS, DOUBLE)
    expected = attend(case.queries, case.pool, case.rows, PLAIN)
    more = padded(case)
    result = attend(more.queries, more.pool, more.rows, PLAIN)
    count = expected.shape[0]
    close(result[:count], expected)
    assert torch.equal(result[count:], torch.zeros_like(result[count:]))


def test_bounds_above_the_true_sizes_change_nothing() -> None:
    """A captured graph keeps the bounds of its bucket."""
    case = make_case(SPANS, DOUBLE)
    expected = attend(case.queries, case.pool, case.rows, PLAIN)
    loose = replace(case.rows, max_rows=64, max_keys=1000)
    close(attend(case.queries, case.pool, loose, PLAIN), expected)


def test_no_rows_and_no_sequences_are_fine() -> None:
    none = make_case([], DOUBLE)
    assert attend(none.queries, none.pool, none.rows, PLAIN).shape == (0, 32)
    empty = make_case([Span.at(0, 0, 0)], DOUBLE)
    assert attend(empty.queries, empty.pool, empty.rows, PLAIN).shape == (0, 32)


def test_it_never_looks_at_what_the_tensors_hold() -> None:
    """Fake tensors hold nothing, so that any copy to the host and any shape that depends on contents is an error."""
    case = make_case(SPANS, DOUBLE, window=4)
    sinks = torch.zeros(4, dtype=torch.float64)
    mode = FakeTensorMode()
    fake = case.mapped(mode.from_tensor)
    with mode:
        args = fake.args(Scoring(window=4, softcap=2.0, sinks=mode.from_tensor(sinks)))
        assert paged_attention.reference(*args).shape == (33, 32)
    with pytest.raises(DataDependentOutputException), mode:
        int(fake.rows.lengths[0])


def test_it_is_one_operation_of_torch() -> None:
    case = make_case(SPANS, DOUBLE)
    rows = case.rows
    fields = [rows.tables, rows.first_rows, rows.lengths, rows.owners, rows.positions, rows.last_visible, rows.paths]
    args = (
        case.queries,
        case.pool,
        *fields,
        rows.bases,
        rows.max_rows,
        rows.split_rows,
        rows.max_keys,
        False,
        0.3,
        4,
        2.0,
        None,
    )
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.foretoken.paged_attention.default, args, test_utils=checks)


def test_path_bits_are_paths_cut_to_the_window() -> None:
    assert path_bits(DEEP) == [0b1, 0b11, 0b111, 0b1001, 0b11001, 0b100000]
    assert path_bits(DEEP, 2) == [0b1, 0b11, 0b110, 0b1001, 0b11000, 0b100000]
    assert path_bits(DEEP, 1) == [1 << node for node in range(len(DEEP))]


def test_a_tree_with_more_nodes_than_bits_is_refused() -> None:
    assert path_bits(chain(MAX_NODES))[-1] == 2**63 - 1
    with pytest.raises(ValueError, match="up to 63 nodes, not of 64"):
        path_bits(chain(64))
