"""GatheredStorage's own behaviour. test_storage.py tests what all storages have in common."""

import pytest
import torch

from cache.gathered import GatheredStorage
from cache.paged import PagedCache
from cache.storage import KVShape


def scattered(dtype: torch.dtype = torch.float32) -> tuple[PagedCache, GatheredStorage]:
    """Blocks of 3 positions; two sequences that grew in turns, so that neither's blocks are neighbours."""
    cache = PagedCache(4, 12, 3, 8, prefixes=True)
    for handle in (0, 1):
        cache.allocate(handle)
    for _ in range(3):
        for handle in (0, 1):
            cache.reserve(handle, 3)
            cache.extend(handle, 3)
    return cache, GatheredStorage(cache, KVShape(2, 2, 4, dtype, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_window_is_read_anew_in_every_layer(dtype: torch.dtype) -> None:
    cache, storage = scattered(dtype)
    window = storage.view(0, 3, 8)
    rows = torch.randn(5, 4, 4).to(dtype)
    storage.rows[1].index_copy_(0, torch.tensor(list(storage.row_numbers(cache.slot(1), 2, 7))), rows)
    keys, values = window[1]
    assert keys.shape == values.shape == (3, 2, 8, 4)
    assert torch.equal(keys[cache.slot(1), :, 2:7], rows[:, :2].transpose(0, 1))
    assert torch.equal(values[cache.slot(1), :, 2:7], rows[:, 2:].transpose(0, 1))
    assert keys.count_nonzero() + values.count_nonzero() == rows.count_nonzero()
    assert not window[0][0].any()


def test_all_layers_and_views_are_copied_to_the_same_memory() -> None:
    """Memory that is given anew in each layer takes longer than the copy. A larger view gets larger memory."""
    _, storage = scattered()
    large, small = storage.view(0, 4, 12), storage.view(1, 1, 5)
    places = {small[0][0].data_ptr(), small[1][0].data_ptr()}
    assert len(places) == 1
    places = {view[layer][0].data_ptr() for view in (large, small) for layer in (0, 1)}
    assert len(places) == 1
    with torch.inference_mode():
        larger = storage.view(0, 4, 15)
        assert larger[0][0].data_ptr() == larger[1][0].data_ptr()
    assert not larger[0][0][2:].any()  # also outside of inference


def test_places_follow_the_table() -> None:
    cache, storage = scattered()
    for slot in (0, 1):
        table = cache.slot_table(slot)
        assert sorted(table) != list(range(table[0], table[0] + 3))  # or the next line would say little
        for start in range(10):
            for end in range(start, 10):
                expected = [table[i // 3] * 3 + i % 3 for i in range(start, end)]
                assert list(storage.row_numbers(slot, start, end)) == expected


def test_what_has_no_memory_reads_as_zeros_even_where_all_memory_is_nan() -> None:
    _, storage = scattered()
    storage.pool.fill_(torch.nan)
    keys, values = storage.view(0, 4, 12)[0]
    for part in (keys, values):
        assert part[:2, :, :9].isnan().all()
        assert not part[:2, :, 9:].any()
        assert not part[2:].any()  # idle slots


def test_positions_without_memory_have_no_place() -> None:
    cache, storage = scattered()
    with pytest.raises(ValueError, match="slot 0 has memory for 9 positions, not for 10"):
        storage.row_numbers(0, 8, 10)
    cache.truncate_to(0, 4)
    with pytest.raises(ValueError, match="for 6 positions, not for 7"):
        storage.row_numbers(0, 4, 7)
