"""MappedStorage's calls of the operating system. test_storage.py tests what all storages have in common."""

import ctypes
import errno
import gc
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cache import mapped
from cache.layout import Layout
from cache.mapped import MappedStorage, map_count, mappable
from cache.paged import PagedCache
from cache.storage import Blocks, KVShape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files and MAP_FIXED are Linux's")

BLOCK = mmap.PAGESIZE // 1024  # positions whose K and V of a layer are a page: 2 · 64 float64
SLOTS, MAX_LEN, BLOCKS = 3, 4 * BLOCK, 16
CPU = torch.device("cpu")


def make(dtype: torch.dtype = torch.float64, block: int = BLOCK) -> tuple[PagedCache, MappedStorage]:
    cache = PagedCache(SLOTS, 4 * block, block, BLOCKS, prefixes=True)
    return cache, MappedStorage(cache, SLOTS, 4 * block, KVShape(2, 1, 64, dtype, CPU))


def grow(cache: PagedCache, storage: MappedStorage, handle: int, count: int, value: float = 1.0) -> None:
    """Write `value` at the sequence's next positions. The sequence may be new."""
    if not cache.holds(handle):
        cache.allocate(handle)
    start = cache.length(handle)
    cache.reserve(handle, count)
    storage.prepare()
    places = storage.row_numbers(cache.slot(handle), start, start + count)
    for rows in storage.rows:
        rows[places] = value
    cache.extend(handle, count)


def map_slot(cache: PagedCache, storage: MappedStorage, handle: int) -> None:
    """Attention that multiplies matrices would look at the sequence."""
    storage.prepare()
    storage.view(cache.slot(handle), 1, MAX_LEN)


def keys_of(cache: PagedCache, storage: MappedStorage, handle: int, length: int = MAX_LEN) -> torch.Tensor:
    """The last layer's keys [length, head_dim] of this sequence."""
    storage.prepare()
    return storage.view(cache.slot(handle), 1, length)[1][0][0, 0]


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name this module's memory files. An engine of another test in this process may still hold files of its own."""
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name: create(f"mapped-{name}"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mapped-kv-cache")


def open_files() -> int:
    return sum("memfd:mapped-kv-cache" in os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_window_is_a_view_of_what_is_written(dtype: torch.dtype) -> None:
    block = mmap.PAGESIZE // (128 * dtype.itemsize)
    cache, storage = make(dtype, block)
    for handle in (0, 1, 0, 1):  # in turns, so that neither's blocks are neighbours
        grow(cache, storage, handle, block)
    rows = torch.randn(block, 2, 64).to(dtype)
    window = storage.view(0, 2, 2 * block)
    storage.rows[1].index_copy_(0, torch.tensor(storage.row_numbers(1, block - 2, 2 * block - 2)), rows)
    keys, values = window[1]
    assert torch.equal(keys[1, :, block - 2 : -2], rows[:, :1].transpose(0, 1))
    assert torch.equal(values[1, :, block - 2 : -2], rows[:, 1:].transpose(0, 1))
    assert torch.equal(storage.read(1, 1, 2 * block)[0], keys[1])
    assert (keys[0] == 1).all()
    assert (window[0][0] == 1).all()


def test_a_shared_block_is_one_memory() -> None:
    cache, storage = make()
    grow(cache, storage, 0, 2 * BLOCK)
    cache.allocate(1)
    assert cache.fork(0, 1, 2 * BLOCK) == 2 * BLOCK
    assert (keys_of(cache, storage, 1, 2 * BLOCK) == 1).all()
    storage.pool[:, cache.table(1)[0]] = 7.0
    for handle in (0, 1):
        assert (keys_of(cache, storage, handle, BLOCK) == 7).all()


def test_what_a_sequence_gave_back_is_read_as_zeros_whoever_writes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked position has probability 0, and 0 · NaN is NaN."""

    def seen_after_rollback() -> torch.Tensor:
        cache, storage = make()
        grow(cache, storage, 0, 3 * BLOCK)
        map_slot(cache, storage, 0)
        given_back = cache.table(0)[1:]
        cache.truncate_to(0, BLOCK)
        storage.pool[:, given_back] = torch.nan
        return keys_of(cache, storage, 0)

    seen = seen_after_rollback()
    assert (seen[:BLOCK] == 1).all()
    assert not seen[BLOCK:].any()

    real = MappedStorage._map
    monkeypatch.setattr(MappedStorage, "_map", lambda self, s, a, b, block: block is None or real(self, s, a, b, block))
    assert seen_after_rollback()[BLOCK : 3 * BLOCK].isnan().all()  # negative control


def test_clear_reaches_only_what_the_sequence_has_alone() -> None:
    cache, storage = make()
    grow(cache, storage, 0, BLOCK)
    cache.allocate(1)
    cache.fork(0, 1, BLOCK)
    grow(cache, storage, 1, BLOCK, torch.nan)
    storage.clear(1)
    assert (keys_of(cache, storage, 1)[:BLOCK] == 1).all()
    assert not keys_of(cache, storage, 1)[BLOCK:].any()
    assert (keys_of(cache, storage, 0, BLOCK) == 1).all()


def test_a_copy_that_is_due_comes_before_what_is_read_or_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    def after_clear_and_read() -> tuple[torch.Tensor, torch.Tensor]:
        cache, storage = make()
        grow(cache, storage, 0, 2)
        cache.allocate(1)
        cache.fork(0, 1, 2)
        cache.reserve(0, 1)  # now each has a block of its own, and one of them still has to be filled
        read = storage.read(1, 0, 2)[0].clone()
        cache.allocate(2)
        cache.fork(0, 2, 2)
        cache.reserve(0, 1)
        storage.clear(0)
        return read, keys_of(cache, storage, 0)

    read, cleared = after_clear_and_read()
    assert (read == 1).all()
    assert not cleared.any()

    monkeypatch.setattr(MappedStorage, "copy_shared_blocks", lambda _: None)
    monkeypatch.setattr(MappedStorage, "prepare", _settles_itself)
    read, cleared = after_clear_and_read()  # negative control: copies only before a pass
    assert not read.any()
    assert cleared[:2].all()


def _settles_itself(storage: MappedStorage, real: Any = MappedStorage.prepare) -> None:
    Blocks.copy_shared_blocks(storage)
    real(storage)


def test_an_unchanged_table_is_not_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, storage = make()
    calls: list[tuple[int, int, int | None]] = []
    real = MappedStorage._map

    def spy(self: MappedStorage, slot: int, start: int, end: int, block: int | None) -> None:
        calls.append((start, end, block))
        real(self, slot, start, end, block)

    monkeypatch.setattr(MappedStorage, "_map", spy)
    grow(cache, storage, 0, 2 * BLOCK)
    assert not calls  # nobody has looked
    map_slot(cache, storage, 0)
    first = cache.table(0)[0]
    assert calls == [(0, 2, first)]  # neighbours at once
    map_slot(cache, storage, 0)
    assert len(calls) == 1
    grow(cache, storage, 0, 1)
    map_slot(cache, storage, 0)
    assert calls[1:] == [(2, 3, cache.table(0)[2])]
    cache.truncate_to(0, BLOCK)
    map_slot(cache, storage, 0)
    assert calls[2:] == [(1, 3, None)]


def test_positions_without_memory_have_no_place() -> None:
    cache, storage = make()
    cache.allocate(0)
    with pytest.raises(ValueError, match=f"slot 0 has memory for 0 positions, not for {BLOCK}"):
        storage.row_numbers(0, 0, BLOCK)  # not reserved yet
    cache.reserve(0, 1)
    assert list(storage.row_numbers(0, 0, BLOCK)) == list(range(BLOCK))
    with pytest.raises(ValueError, match=f"not for {BLOCK + 1}"):
        storage.row_numbers(0, 0, BLOCK + 1)


class FullKernel:
    """Stands in for libc: mmap fails with this error after `left` calls."""

    def __init__(self, code: int, left: int) -> None:
        self.code, self.left, self.real = code, left, mapped._libc.mmap

    def mmap(self, *args: int) -> int:
        self.left -= 1
        if self.left >= 0:
            return int(self.real(*args))
        ctypes.set_errno(self.code)
        return 2**64 - 1


@pytest.mark.parametrize(
    ("code", "says"), [(errno.ENOMEM, "raise vm.max_map_count or lower kv_tokens"), (errno.EINVAL, "Invalid argument")]
)
def test_a_failed_mapping_names_its_reason(monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    monkeypatch.setattr(mapped, "_libc", FullKernel(code, 0))
    with pytest.raises(OSError, match=says) as raised:
        make()
    assert raised.value.errno == code
    del raised
    gc.collect()
    assert open_files() == 0


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_view_that_failed_may_be_tried_again(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """With two layers, mmap fails before the first block, between a block's layers, and before the zeros at the end."""

    def attempt() -> tuple[PagedCache, MappedStorage]:
        cache, storage = make()
        grow(cache, storage, 0, 3 * BLOCK)
        grow(cache, storage, 1, 2 * BLOCK, 2.0)
        map_slot(cache, storage, 0)
        cache.release(0)
        cache.allocate(2)  # takes the slot, and with it stale mappings
        assert cache.slot(2) == 0
        cache.fork(1, 2, 2 * BLOCK)
        with monkeypatch.context() as patch:
            patch.setattr(mapped, "_libc", FullKernel(errno.ENOMEM, calls))
            with pytest.raises(OSError, match="cannot map"):
                map_slot(cache, storage, 2)
        return cache, storage

    cache, storage = attempt()
    seen = keys_of(cache, storage, 2)
    assert (seen[: 2 * BLOCK] == 2).all()
    assert not seen[2 * BLOCK :].any()

    cache, storage = attempt()
    storage._tables[0] = list(cache.table(2))  # negative control: what failed is taken for done
    assert keys_of(cache, storage, 2)[: 3 * BLOCK].tolist() != seen[: 3 * BLOCK].tolist()


def test_a_table_that_comes_back_after_a_failure_is_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, storage = make()
    grow(cache, storage, 0, BLOCK)
    grow(cache, storage, 1, BLOCK, 2.0)
    map_slot(cache, storage, 0)
    with monkeypatch.context() as patch:
        others = list(cache.slot_table(1))
        patch.setattr(cache, "slot_table", lambda _: others)
        patch.setattr(mapped, "_libc", FullKernel(errno.ENOMEM, 1))  # the first layer is mapped, the second is not
        with pytest.raises(OSError, match="cannot map"):
            map_slot(cache, storage, 0)
    assert (storage._views.view(0, 1, BLOCK)[0][0] == 2).all()
    for layer in range(2):
        assert (storage.view(0, 1, BLOCK)[layer][0] == 1).all()


def test_scattered_blocks_are_mapped_at_once() -> None:
    cache, storage = make()
    for value in (1.0, 2.0, 3.0):
        grow(cache, storage, 0, BLOCK, value)
        grow(cache, storage, 1, BLOCK, -value)
    for parent, sign in ((0, 1), (1, -1)):
        cache.allocate(2)
        cache.fork(parent, 2, 3 * BLOCK)
        assert keys_of(cache, storage, 2, 3 * BLOCK)[::BLOCK, 0].tolist() == [sign, 2 * sign, 3 * sign]
        cache.release(2)


def test_all_is_given_back_when_the_last_tensor_goes() -> None:
    cache, storage = make()
    grow(cache, storage, 0, 2 * BLOCK)
    assert mappings() > 0
    assert open_files() == 1
    keys = keys_of(cache, storage, 0, BLOCK)
    del storage
    gc.collect()
    assert open_files() == 0
    assert (keys == 1).all()  # still mapped
    assert mappings() > 0
    del keys
    gc.collect()
    assert mappings() == 0


def test_closed_it_maps_nothing_more() -> None:
    cache, storage = make()
    grow(cache, storage, 0, BLOCK)
    map_slot(cache, storage, 0)
    number = storage._file
    storage.close()
    storage.close()
    assert open_files() == 0
    other = os.memfd_create("another file that gets the number")
    if other != number:
        os.dup2(other, number)
    assert (keys_of(cache, storage, 0, BLOCK) == 1).all()
    cache.reserve(0, BLOCK)
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_slot(cache, storage, 0)
    for file in {other, number}:
        os.close(file)


def test_memory_is_used_for_the_blocks_that_were_needed() -> None:
    cache, storage = make()
    assert os.fstat(storage._file).st_size == 2 * BLOCKS * mmap.PAGESIZE
    assert os.fstat(storage._file).st_blocks == 0
    grow(cache, storage, 0, BLOCK)
    assert os.fstat(storage._file).st_blocks * 512 == 2 * mmap.PAGESIZE  # one block of two layers


def test_map_count_is_what_scattered_blocks_need() -> None:
    """Two sequences that grow in turns use every block, and no two neighbouring blocks can share a mapping."""
    cache, storage = make()
    layout = Layout(SLOTS, MAX_LEN, BLOCK, BLOCKS)
    for _ in range(4):
        for handle in range(SLOTS):
            grow(cache, storage, handle, BLOCK)
    assert mappings() == 1  # the pool itself
    for handle in range(SLOTS):
        map_slot(cache, storage, handle)
    assert mappings() - 1 == map_count(layout, 2) == SLOTS * 4 * 2


@pytest.mark.parametrize(
    ("layout", "shape", "can"),
    [
        (Layout(3, 64, BLOCK, 16), KVShape(2, 1, 64, torch.float64, CPU), True),
        (Layout(3, 64, 2 * BLOCK, 16), KVShape(2, 1, 64, torch.float32, CPU), True),
        (Layout(3, 64, BLOCK, 16), KVShape(2, 1, 64, torch.float32, CPU), False),  # half a page
        (Layout(3, 64, BLOCK + 1, 16), KVShape(2, 1, 64, torch.float64, CPU), False),
        (Layout(3, 64, BLOCK, 16), KVShape(2, 1, 64, torch.float64, torch.device("cuda")), False),
        (Layout(3, 64), KVShape(2, 1, 64, torch.float64, CPU), False),
    ],
)
def test_mappable(layout: Layout, shape: KVShape, can: bool) -> None:
    assert mappable(layout, shape) is can


def test_nothing_is_mappable_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not mappable(Layout(3, 64, BLOCK, 16), KVShape(2, 1, 64, torch.float64, CPU))
