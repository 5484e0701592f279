"""Every storage reads for every sequence what was written for its tokens, whatever its cache did in between."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cache.gathered import GatheredStorage
from cache.layout import Layout, make_cache
from cache.mapped import MappedStorage
from cache.memory import make_storage
from cache.paged import HIDDEN, PagedCache
from cache.protocol import KVCache
from cache.slotted import SlottedCache
from cache.storage import PIECE_POSITIONS, KVShape, SlottedStorage, Storage

SLOTS, MAX_LEN, BLOCK, BLOCKS = 3, 15, 4, 9
SHAPE = KVShape(2, 1, mmap.PAGESIZE // (BLOCK * 2 * 8), torch.float64, torch.device("cpu"))  # a block is a page
SLOTTED = Layout(SLOTS, MAX_LEN)
PAGED = Layout(SLOTS, MAX_LEN, BLOCK, BLOCKS)
WINDOW = 5
SLIDING = replace(PAGED, window=WINDOW)
HANDLES = st.integers(0, 4)
BITS = st.integers(0, 1)


def written(tokens: Sequence[int], start: int, layer: int) -> Tensor:
    """Rows [positions, 2, head_dim] for tokens[start:]: like K and V, each depends on all tokens up to its own."""
    codes = [int("1" + "".join(map(str, tokens[: i + 1])), 3) + layer / 4 for i in range(start, len(tokens))]
    keys = torch.tensor(codes, dtype=SHAPE.dtype)[:, None, None].expand(-1, 1, SHAPE.head_dim)
    return torch.cat([keys, -keys], dim=1)


class Machine(RuleBasedStateMachine):
    """A cache, its storage, and the `tokens` that each sequence's valid positions must hold."""

    layout = PAGED
    make: Any = make_storage

    def __init__(self) -> None:
        super().__init__()
        self.cache: KVCache = make_cache(self.layout)
        self.storage: Storage = type(self).make(self.layout, self.cache, SHAPE)
        self.tokens: dict[int, list[int]] = {}

    @rule(handle=HANDLES, tokens=st.lists(BITS, max_size=9))
    def allocate(self, handle: int, tokens: list[int]) -> None:
        if handle not in self.tokens and self.cache.free_slots:
            hit = self.cache.allocate(handle, tokens)
            self.tokens[handle] = tokens[:hit]
            self.check([handle])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.lists(BITS, min_size=1, max_size=4), poison=st.sampled_from([False] * 4 + [True]))
    def feed(self, data: st.DataObject, more: list[int], poison: bool) -> None:
        """A pass. As in the engine, memory that is not finite is cleared and released."""
        handle = data.draw(st.sampled_from(sorted(self.tokens)))
        start = len(self.tokens[handle])
        if self.cache.room(handle) < len(more):
            return
        self.cache.reserve(handle, len(more))
        self.storage.prepare()
        places = torch.tensor(list(self.storage.row_numbers(self.cache.slot(handle), start, start + len(more))))
        tokens = self.tokens[handle] + more
        for layer, rows in enumerate(self.storage.rows):
            rows.index_copy_(0, places, written(tokens, start, layer) * (torch.nan if poison else 1))
        self.cache.extend(handle, len(more))
        if poison:
            self.cache.discard(handle)
            self.storage.clear(handle)
            self.release(handle)
        else:
            self.tokens[handle] = tokens
        self.check(list(self.tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), parents=st.lists(st.integers(-1, 3), min_size=1, max_size=6))
    def tree(self, data: st.DataObject, parents: list[int]) -> None:
        """A pass with a tree of drafts, whose accepted path moves to the front."""
        handle = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, count = self.tokens[handle], len(parents)
        if self.cache.room(handle) < count:
            return
        self.cache.reserve(handle, count)
        self.storage.prepare()
        start = len(tokens)
        places = list(self.storage.row_numbers(self.cache.slot(handle), start, start + count))
        paths: list[list[int]] = []
        for node, place in enumerate(places):
            parent = min(parents[node], node - 1)
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            text = tokens + [n % 2 for n in paths[node]]
            for layer, rows in enumerate(self.storage.rows):
                rows[place] = written(text, len(text) - 1, layer)[0]
        self.cache.extend(handle, count)
        path = data.draw(st.sampled_from(paths))
        self.storage.move([places[node] for node in path], places[: len(path)])
        self.tokens[handle] = tokens + [n % 2 for n in path]
        self.cache.truncate_to(handle, start + len(path))
        self.check(list(self.tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.tokens)))
        length = data.draw(st.integers(0, len(self.tokens[handle])))
        if length and self.left(handle) > max(0, length - WINDOW + 1):
            return
        self.cache.truncate_to(handle, length)
        del self.tokens[handle][length:]
        self.check([handle])

    @precondition(lambda self: len(self.tokens) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.permutations(sorted(self.tokens)))[:2]
        length = data.draw(st.integers(0, len(self.tokens[parent])))
        if length > len(self.tokens[child]):
            had = len(self.tokens[child])
            has = self.cache.fork(parent, child, length)
            if has != had:
                self.tokens[child] = self.tokens[parent][:has]
            self.check([parent, child])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.publish(handle, self.tokens[handle])
        self.cache.slide(handle, len(self.tokens[handle]))
        self.check([handle])

    def left(self, handle: int) -> int:
        return self.cache.table(handle).count(HIDDEN) * BLOCK if isinstance(self.cache, PagedCache) else 0

    @rule(handle=HANDLES)
    def release(self, handle: int) -> None:
        self.cache.release(handle)
        self.tokens.pop(handle, None)

    def check(self, handles: Sequence[int]) -> None:
        self.storage.prepare()
        whole = self.storage.view(0, SLOTS, MAX_LEN)
        for handle in handles:
            slot, tokens, left = self.cache.slot(handle), self.tokens[handle], self.left(handle)
            backed = len(self.cache.table(handle)) * BLOCK if isinstance(self.cache, PagedCache) else MAX_LEN
            for layer in range(SHAPE.num_layers):
                expected = written(tokens, 0, layer).transpose(0, 1)  # [2, length, head_dim]
                expected[:, :left] = 0
                seen = torch.cat([part[slot] for part in whole[layer]])  # [2, max_len, head_dim]
                assert torch.equal(seen[:, : len(tokens)], expected)
                assert not seen[:, backed:].any()
                assert seen.isfinite().all()
                assert torch.equal(torch.cat(self.storage.read(layer, handle, len(tokens))), expected)
                alone = self.storage.view(slot, 1, len(tokens))
                assert torch.equal(torch.cat([part[0] for part in alone[layer]]), expected)


def gathered(_: Layout, cache: PagedCache, shape: KVShape) -> Storage:
    return GatheredStorage(cache, shape)


def run_machine(layout: Layout, make: Callable[..., Storage], number: int | None = None, **how: Any) -> None:
    """number: the seed of the programs; None: other programs each time."""
    machine = type("Driven", (Machine,), {"layout": layout, "make": staticmethod(make)})
    chosen = settings(**{"max_examples": 8, "stateful_step_count": 30, "deadline": None, "database": None} | how)
    if number is not None:
        seed(number)(machine)
    run_state_machine_as_test(machine, settings=chosen)


every_storage = pytest.mark.parametrize(
    ("layout", "make"),
    [(SLOTTED, make_storage), (PAGED, make_storage), (PAGED, gathered), (SLIDING, make_storage), (SLIDING, gathered)],
    ids=["slotted", "mapped", "gathered", "mapped and sliding", "gathered and sliding"],
)


@every_storage
def test_every_sequence_reads_what_was_written_for_its_tokens(layout: Layout, make: Callable[..., Storage]) -> None:
    run_machine(layout, make)


@pytest.mark.proofs
@every_storage
def test_it_does_in_many_more_programs(layout: Layout, make: Callable[..., Storage]) -> None:
    run_machine(layout, make, max_examples=1000)


class KeepsTails(MappedStorage):
    """Leaves blocks mapped that the sequence has given up."""

    def _map(self, slot: int, start: int, end: int, block: int | None) -> None:
        if block is not None:
            super()._map(slot, start, end, block)


class ComparesLengths(MappedStorage):
    """Takes a table of the same length for the same table."""

    def _remap(self, slot: int, table: list[int]) -> None:
        if len(table) != len(self._tables[slot]):
            super()._remap(slot, table)


class ForgetsCopies(MappedStorage):
    def copy_shared_blocks(self) -> None:
        list(self._cache.take_copies())


class ClearsAll(MappedStorage):
    """Clears what others share."""

    def clear(self, handle: int, start: int = 0) -> None:
        for block in self._cache.table(handle):
            self.pool[:, block].zero_()


class ClearsNothing(MappedStorage):
    def clear(self, handle: int, start: int = 0) -> None:
        pass


class PadsWithBlock0(GatheredStorage):
    def __init__(self, cache: PagedCache, shape: KVShape) -> None:
        super().__init__(cache, shape)
        self._zero_block = 0


class MovesNothing(GatheredStorage):
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass


class MovesTheFirstLayer(GatheredStorage):
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.rows[0][list(targets)] = self.rows[0][list(sources)]


# The same programs every time, and no search for the shortest one that fails.
CONTROL: dict[str, Any] = {"derandomize": True, "phases": [Phase.generate], "max_examples": 1000}


# A seed whose first programs meet the fault. Where the machine changes, others may be better.
@pytest.mark.parametrize(
    ("broken", "number"),
    [(KeepsTails, 0), (ComparesLengths, 1), (ForgetsCopies, 2), (ClearsAll, 11), (ClearsNothing, 0)],
)
def test_negative_control_mapped(broken: type[MappedStorage], number: int) -> None:
    with pytest.raises(AssertionError):
        run_machine(PAGED, lambda _, cache, shape: broken(cache, SLOTS, MAX_LEN, shape), number, **CONTROL)


class KeepsWhatWasLeft(MappedStorage):
    """Leaves blocks mapped that the sequence's window has left."""

    def _map(self, slot: int, start: int, end: int, block: int | None) -> None:
        if block is not None or end > len(self._cache.slot_table(slot)):
            super()._map(slot, start, end, block)


def test_negative_control_mapped_and_sliding() -> None:
    with pytest.raises(AssertionError):
        run_machine(SLIDING, lambda _, cache, shape: KeepsWhatWasLeft(cache, SLOTS, MAX_LEN, shape), 0, **CONTROL)


@pytest.mark.parametrize("broken", [PadsWithBlock0, MovesNothing, MovesTheFirstLayer])
def test_negative_control_gathered(broken: type[GatheredStorage]) -> None:
    with pytest.raises(AssertionError):
        run_machine(PAGED, lambda _, cache, shape: broken(cache, shape), 0, **CONTROL)


def slotted(dtype: torch.dtype = torch.float64) -> tuple[SlottedCache, SlottedStorage]:
    """Two layers, two kv heads of dimension 4, three slots of five positions; handle 10 + s holds slot s."""
    cache = SlottedCache(3, 5)
    for handle in (10, 11, 12):
        cache.allocate(handle)
    return cache, SlottedStorage(cache, 3, 5, KVShape(2, 2, 4, dtype, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_written_are_keys_and_values_read(dtype: torch.dtype) -> None:
    _, storage = slotted(dtype)
    rows = torch.randn(3, 4, 4).to(dtype)  # [positions, 2 kv heads of keys then of values, head_dim]
    storage.rows[1].index_copy_(0, torch.tensor(storage.row_numbers(1, 0, 3)), rows)
    keys, values = storage.read(1, 11, 3)
    assert torch.equal(keys, rows[:, :2].transpose(0, 1))
    assert torch.equal(values, rows[:, 2:].transpose(0, 1))
    assert not storage.rows[0].any()
    assert storage.rows[1].count_nonzero() == rows.count_nonzero()  # what is not written is zero


def test_a_cleared_slot_is_zero_and_its_neighbours_are_not() -> None:
    _, storage = slotted()
    for rows in storage.rows:
        rows.fill_(1.0)[5:10] = torch.nan
    storage.clear(11)
    for layer, rows in enumerate(storage.rows):
        assert all(not part.any() for part in storage.read(layer, 11, 5))
        assert rows.sum() == 2 * 5 * 4 * 4  # of the two others


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that was made, views aside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.elements = max(self.elements, out.numel())
        return out


STORAGES = pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(2, 400), SlottedStorage),
        (Layout(2, 400, 4, 200), MappedStorage),
        (Layout(2, 400, 5, 160), GatheredStorage),
    ],
    ids=["slotted", "mapped", "gathered"],
)


def filled(layout: Layout, kind: type[Storage]) -> tuple[KVCache, Storage, list[int]]:
    """Two sequences of 390 positions; the rows of the second."""
    cache = make_cache(layout)
    storage = make_storage(layout, cache, SHAPE)
    assert type(storage) is kind
    for handle in (0, 1):
        cache.allocate(handle)
        cache.reserve(handle, 390)
        cache.extend(handle, 390)
    storage.prepare()
    return cache, storage, list(storage.row_numbers(cache.slot(1), 0, 390))


@STORAGES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_whatever_position_is_not_finite_is_found(layout: Layout, kind: type[Storage], value: float) -> None:
    """Also for a value beyond the sequence's end, which a pass wrote before it failed."""
    cache, storage, rows = filled(layout, kind)
    assert storage.is_finite(1)
    for n in (0, 63, 64, 200, 389):
        storage.rows[1][rows[n], -1, -1] = value
        assert (storage.is_finite(0), storage.is_finite(1)) == (True, False)
        storage.rows[1][rows[n]] = 0
    if isinstance(cache, SlottedCache):
        cache.truncate_to(1, 3)
        storage.rows[1][rows[389]] = value
        assert not storage.is_finite(1)


@STORAGES
@pytest.mark.parametrize("start", [0, 3, 8, 10, 389, 390])
def test_what_is_cleared_begins_where_it_is_told(layout: Layout, kind: type[Storage], start: int) -> None:
    _, storage, rows = filled(layout, kind)
    for layer in storage.rows:
        layer.fill_(1)
    storage.clear(1, start)
    for layer in storage.rows:
        assert (layer[rows[:start]] == 1).all()
        assert not layer[rows[start:]].any()


@STORAGES
def test_looking_for_what_is_not_finite_takes_little_memory(layout: Layout, kind: type[Storage]) -> None:
    _, storage, _ = filled(layout, kind)
    row = 2 * SHAPE.kv_heads * SHAPE.head_dim
    piece = SHAPE.num_layers * layout.block_size if layout.paged else PIECE_POSITIONS
    with Largest() as largest:
        assert storage.is_finite(1)
    assert 0 < largest.elements <= piece * row


@STORAGES
def test_what_is_withheld_is_zeroed_with_the_next_that_is(layout: Layout, kind: type[Storage]) -> None:
    cache, storage, rows = filled(layout, kind)
    for layer in storage.rows:
        layer[rows] = torch.nan
    cache.discard(1)
    cache.quarantine(1)
    assert cache.withheld
    cache.audit({0})
    storage.clear(0)
    assert not cache.withheld
    assert all(not layer[rows].any() for layer in storage.rows)
    cache.audit({0})


class Fails(TorchDispatchMode):
    """The copy of that number, the first is 0, raises before it is done."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("no copy")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block", [4, 5], ids=["mapped", "gathered"])
@pytest.mark.parametrize("number", range(3))
def test_copies_that_failed_are_made_when_the_pass_is_tried_again(block: int, number: int) -> None:
    """Each sequence goes on from a copy of a shared block. The first copy's source is the second copy's destination."""
    cache = PagedCache(6, 20, block, 20, prefixes=False)
    storage = make_storage(Layout(6, 20, block, 20), cache, SHAPE)
    for parent, child in ((0, 3), (1, 4), (2, 5)):
        cache.allocate(parent)
        cache.reserve(parent, 2)
        storage.prepare()
        for layer in storage.rows:
            layer[list(storage.row_numbers(cache.slot(parent), 0, 2))] = parent + 1.0
        cache.extend(parent, 2)
        cache.allocate(child)
        cache.fork(parent, child, 2)
    source = cache.table(0)[0]
    cache.reserve(0, 1)
    cache.release(3)
    for parent in (1, 2):
        cache.reserve(parent, 1)
    assert cache.table(1) == [source]
    with Fails(number), pytest.raises(torch.OutOfMemoryError):
        storage.prepare()
    storage.prepare()
    for handle in range(3):
        for n in range(SHAPE.num_layers):
            assert (storage.read(n, handle, 2)[0] == handle + 1).all()


def test_a_slotted_window_is_a_view_of_neighbouring_slots() -> None:
    _, storage = slotted()
    for layer, rows in enumerate(storage.rows):
        rows.copy_(torch.arange(rows.numel(), dtype=torch.float64).view(rows.shape) + 1000 * layer)
    window = storage.view(1, 2, 3)
    for layer in range(2):
        keys, values = window[layer]
        assert keys.shape == values.shape == (2, 2, 3, 4)
        for i, handle in enumerate((11, 12)):
            expected_keys, expected_values = storage.read(layer, handle, 3)
            assert torch.equal(keys[i], expected_keys)
            assert torch.equal(values[i], expected_values)
    storage.rows[0].zero_()
    assert not window[0][0].any()


def test_the_layout_decides_which_storage() -> None:
    unaligned = Layout(SLOTS, MAX_LEN, 3, BLOCKS)
    for layout, kind in ((SLOTTED, SlottedStorage), (PAGED, MappedStorage), (unaligned, GatheredStorage)):
        assert type(make_storage(layout, make_cache(layout), SHAPE)) is kind


def test_bytes_of_a_token() -> None:
    assert KVShape(14, 1, 64, torch.bfloat16, torch.device("cpu")).token_bytes == 14 * 2 * 64 * 2
