"""The tensors behind a KV cache: the protocol of storages, slotted memory, and what the paged storages share.

A position's row in a layer holds the keys of all kv heads, then their values, so that one copy stores both. Memory
starts as zeros: attention multiplies masked positions by probability 0, and 0 · NaN is NaN.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cache.paged import HIDDEN, PagedCache
from cache.slotted import SlottedCache
from cache.transfer import index_tensor

PIECE_POSITIONS = 64  # positions of a layer that are checked at once; the check needs memory for as many again


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size, type and device of what one model stores per position."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None  # positions that a query sees in every layer; None: some layer sees all

    @property
    def row(self) -> tuple[int, int]:
        return 2 * self.kv_heads, self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one position's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one position's K and V in all layers."""
        return self.num_layers * self.row_bytes


class KVView(Protocol):
    """The K and V that one attention group reads in one pass."""

    def __getitem__(self, layer: int, /) -> tuple[Tensor, Tensor]:
        """Return K and V [slots, kv_heads, length, head_dim]. Call it after the pass has written the layer's rows.

        They may be copies, which hold until the next call for any view of the storage.
        """
        ...


class Storage(Protocol):
    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Per layer [rows, 2·kv_heads, head_dim]. A pass writes the rows that `row_numbers` names."""
        ...

    @property
    def blocks(self) -> Sequence[Tensor]:
        """Per layer [blocks, positions, 2·kv_heads, head_dim], contiguous: the same memory."""
        ...

    def table(self, slot: int) -> Sequence[int]:
        """The numbers of a slot's blocks in `blocks`, in the order of its positions. Read only.

        A block that the sequence's window has left may have any number.
        """
        ...

    def run(self, first: int, count: int) -> Sequence[Tensor]:
        """Per layer [count, 2·kv_heads, head_dim]: the rows from number `first` on. What is written there is stored."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the rows of these numbers to the rows `targets`, in all layers. A row may be both source and target."""
        ...

    def prepare(self) -> None:
        """Bring the memory in line with the cache's bookkeeping.

        Call it before every pass: after the cache's `reserve`, before `row_numbers` and `view`.
        """
        ...

    def row_numbers(self, slot: int, start: int, end: int) -> Iterable[int]:
        """Return the row numbers of positions start … end − 1 of a slot."""
        ...

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        """Return a view of the first `length` positions of neighbouring slots.

        Positions without memory read as zeros in a slot that a sequence holds. A free slot may read anything. Raises
        OSError; then the call may be repeated.
        """
        ...

    def clear(self, handle: int, start: int = 0) -> None:
        """Zero positions from `start` on in the memory that only this sequence holds, then call `clear_withheld`.

        The next owner must not read values that are not finite. Blocks that `truncate_to` has freed are not zeroed.
        """
        ...

    def clear_withheld(self) -> None:
        """Zero the memory that the cache withholds, and restore it."""
        ...

    def is_finite(self, handle: int) -> bool:
        """Whether the memory that only this sequence holds is finite. Reads all of it and waits for the device."""
        ...

    def read(self, layer: int, handle: int, length: int) -> tuple[Tensor, Tensor]:
        """Return K and V [kv_heads, length, head_dim] of the sequence's first positions, for tests and audits.

        Positions that its window has left read as zeros.
        """
        ...


class SlotViews:
    """Views of slots whose positions follow each other in (virtual) memory, without a copy.

    memory [layers, slots, positions, 2·kv_heads, head_dim], contiguous.
    """

    def __init__(self, memory: Tensor, kv_heads: int) -> None:
        by_head = memory.transpose(2, 3)  # [layers, slots, 2·kv_heads, positions, head_dim]
        self.keys, self.values = by_head[:, :, :kv_heads], by_head[:, :, kv_heads:]

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        """As Storage.view."""
        chosen = (slice(None), slice(first_slot, first_slot + slots), slice(None), slice(length))
        return tuple(zip(self.keys[chosen].unbind(0), self.values[chosen].unbind(0), strict=True))


class RowMemory:
    """The rows of a memory [layers, blocks, positions, 2·kv_heads, head_dim], contiguous."""

    def __init__(self, memory: Tensor) -> None:
        self._all_rows = memory.flatten(1, 2)
        self.rows = self._all_rows.unbind(0)
        self.blocks = memory.unbind(0)

    def run(self, first: int, count: int) -> Sequence[Tensor]:
        return self._all_rows.narrow(1, first, count).unbind(0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        read, write = index_tensor([*sources, *targets], self._all_rows.device).view(2, -1).unbind(0)
        self.move_rows(read, write)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """As move(), with row numbers [n] int64 on the memory's device. All sources are read before any target is
        written. A row that nobody reads may be a target several times."""
        self._all_rows.index_copy_(1, targets, self._all_rows.index_select(1, sources))


class SlottedStorage(RowMemory):
    """Slotted memory: all positions of all slots are allocated at the start. A slot is a block."""

    def __init__(self, cache: SlottedCache, slots: int, max_len: int, shape: KVShape) -> None:
        self._cache, self._stride = cache, max_len
        memory = torch.zeros((shape.num_layers, slots, max_len, *shape.row), dtype=shape.dtype, device=shape.device)
        super().__init__(memory)
        self._views = SlotViews(memory, shape.kv_heads)

    def table(self, slot: int) -> Sequence[int]:
        return (slot,)

    def row_numbers(self, slot: int, start: int, end: int) -> range:
        return range(slot * self._stride + start, slot * self._stride + end)

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        return self._views.view(first_slot, slots, length)

    def prepare(self) -> None:
        pass

    def clear(self, handle: int, start: int = 0) -> None:
        self._zero(self._cache.slot(handle), start)
        self.clear_withheld()

    def clear_withheld(self) -> None:
        for slot in self._cache.withheld:
            self._zero(slot, 0)
        self._cache.restore()

    def _zero(self, slot: int, start: int) -> None:
        rows = self.row_numbers(slot, start, self._stride)
        for layer in self.rows:
            layer[rows.start : rows.stop].zero_()

    def is_finite(self, handle: int) -> bool:
        rows = self.row_numbers(self._cache.slot(handle), 0, self._cache.reached(handle))
        return _all_finite(
            piece for layer in self.rows if rows for piece in layer[rows.start : rows.stop].split(PIECE_POSITIONS)
        )

    def read(self, layer: int, handle: int, length: int) -> tuple[Tensor, Tensor]:
        slot = self._cache.slot(handle)
        return self._views.keys[layer, slot, :, :length], self._views.values[layer, slot, :, :length]


class Blocks(RowMemory):
    """The memory of a paged cache's blocks; the cache's tables refer to them.

    memory [layers, ≥ blocks, block_size, 2·kv_heads, head_dim], contiguous; pool: the part that the cache has.
    """

    def __init__(self, memory: Tensor, cache: PagedCache, kv_heads: int) -> None:
        self.pool, self.block_size = memory[:, : cache.num_blocks], cache.block_size
        super().__init__(memory)
        self._cache = cache
        self._kv_heads = kv_heads

    def prepare(self) -> None:
        self.copy_shared_blocks()

    def row_numbers(self, slot: int, start: int, end: int) -> list[int]:
        """As in Storage. Raises ValueError for positions beyond the slot's table."""
        size, table = self.block_size, self._cache.slot_table(slot)
        if end > len(table) * size:
            raise ValueError(f"slot {slot} has memory for {len(table) * size} positions, not for {end}: reserve them")
        rows: list[int] = []
        while start < end:
            stop = min(end, start - start % size + size)
            first = table[start // size] * size + start % size
            rows += range(first, first + stop - start)
            start = stop
        return rows

    def table(self, slot: int) -> list[int]:
        """As in Storage, with HIDDEN for the blocks that no query sees."""
        return self._cache.slot_table(slot)

    def copy_shared_blocks(self) -> None:
        """Copy the shared blocks that a sequence is about to write.

        The copies are done in order, because one's source may be the other's destination. After a failure the next call
        begins with the copy that failed.
        """
        for source, copy in self._cache.take_copies():
            self.pool[:, copy] = self.pool[:, source]

    def clear(self, handle: int, start: int = 0) -> None:
        self.copy_shared_blocks()  # a later copy would overwrite the zeros
        own, size = set(self._cache.owned(handle)), self.pool.shape[2]
        for i, block in enumerate(self._cache.table(handle)):
            if block in own:
                self.pool[:, block, max(0, start - i * size) :].zero_()
        self.clear_withheld()

    def clear_withheld(self) -> None:
        self.copy_shared_blocks()  # a later copy might read a block that is zeroed here
        for block in self._cache.withheld:
            self.pool[:, block].zero_()
        self._cache.restore()

    def is_finite(self, handle: int) -> bool:
        return _all_finite(self.pool[:, block] for block in self._cache.owned(handle))

    def read(self, layer: int, handle: int, length: int) -> tuple[Tensor, Tensor]:
        self.copy_shared_blocks()
        table = index_tensor(self._cache.table(handle), self.pool.device)
        blocks = self.pool[layer, table]  # a copy
        blocks[table == HIDDEN] = 0
        rows = blocks.flatten(0, 1)[:length].transpose(0, 1)  # [2·kv_heads, length, head_dim]
        return rows[: self._kv_heads], rows[self._kv_heads :]


def _all_finite(pieces: Iterable[Tensor]) -> bool:
    """Whether all pieces are finite, with one copy to the host."""
    results = [piece.isfinite().all() for piece in pieces]
    return not results or bool(torch.stack(results).all())
