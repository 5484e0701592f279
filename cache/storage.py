"""The tensors behind a KV cache: what a pass writes and attention reads, and what all kinds of them have in common.

A position's row in a layer holds the kv heads' keys first, then their values, so that one copy stores both. Rows start
as zeros, not empty: masked positions are multiplied by probability 0, and 0 · NaN would be NaN.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cache.paged import PagedCache
from cache.slotted import SlottedCache

PIECE = 64  # positions of a layer that are looked at together: this takes memory for as many again, and no more


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one model stores for a position, and where."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row(self) -> tuple[int, int]:
        return 2 * self.kv_heads, self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a position's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a position's K and V in all layers."""
        return self.num_layers * self.row_bytes


class KVView(Protocol):
    """What one attention group reads in one pass."""

    def __getitem__(self, layer: int, /) -> tuple[Tensor, Tensor]:
        """K and V [slots, kv_heads, length, head_dim] as they are now: ask after the layer's rows were written."""
        ...


class Storage(Protocol):
    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Per layer [rows, 2·kv_heads, head_dim]: where a pass writes, at the rows that `places` names."""
        ...

    def prepare(self, handles: Sequence[int]) -> None:
        """Bring the memory of these sequences in line with the cache's bookkeeping: before every pass, after the cache
        reserved its positions, and before `places` and `window` are asked. Raises OSError; it may be tried again."""
        ...

    def row_numbers(self, slot: int, start: int, end: int) -> Iterable[int]:
        """Row numbers of positions start … end − 1 of a slot that was prepared."""
        ...

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        """The first `length` positions of neighbouring slots. Positions that a prepared sequence has no memory for read
        as zeros; a slot that was not prepared reads anything."""
        ...

    def clear(self, handle: int, start: int = 0) -> None:
        """Zero the memory that only this sequence holds, of positions from `start` on, and what the cache withholds,
        which is restored: the next owner must not meet what is not finite. What `truncate_to` took from blocks before
        is out of reach."""
        ...

    def clear_withheld(self) -> None:
        """Zero what the cache withholds, which is restored."""
        ...

    def is_finite(self, handle: int) -> bool:
        """Whether the memory that only this sequence holds is. Reads all of it, in pieces, and waits for the device."""
        ...

    def read(self, layer: int, handle: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, length, head_dim] of the sequence's first positions, for tests and audits."""
        ...


class Contiguous:
    """Slots whose positions follow each other in (virtual) memory, so that a window is a view.

    memory [layers, slots, positions, 2·kv_heads, head_dim], contiguous.
    """

    def __init__(self, memory: Tensor, kv_heads: int) -> None:
        self.rows = memory.flatten(1, 2).unbind(0)
        self._stride = memory.shape[2]  # rows from one slot to the next
        by_head = memory.transpose(2, 3)  # [layers, slots, 2·kv_heads, positions, head_dim]
        self._keys, self._values = by_head[:, :, :kv_heads], by_head[:, :, kv_heads:]

    def row_numbers(self, slot: int, start: int, end: int) -> range:
        return range(slot * self._stride + start, slot * self._stride + end)

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        chosen = (slice(None), slice(first_slot, first_slot + slots), slice(None), slice(length))
        return tuple(zip(self._keys[chosen].unbind(0), self._values[chosen].unbind(0), strict=True))


class SlottedStorage(Contiguous):
    """All positions of all slots, preallocated."""

    def __init__(self, cache: SlottedCache, slots: int, max_len: int, shape: KVShape) -> None:
        self._cache = cache
        size = (shape.num_layers, slots, max_len, *shape.row)
        super().__init__(torch.zeros(size, dtype=shape.dtype, device=shape.device), shape.kv_heads)

    def prepare(self, handles: Sequence[int]) -> None:
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
        return _all_finite(piece for layer in self.rows if rows for piece in layer[rows.start : rows.stop].split(PIECE))

    def read(self, layer: int, handle: int, length: int) -> tuple[Tensor, Tensor]:
        slot = self._cache.slot(handle)
        return self._keys[layer, slot, :, :length], self._values[layer, slot, :, :length]


class Blocks:
    """Blocks of positions, which the tables of a paged cache refer to.

    pool [layers, blocks, block_size, 2·kv_heads, head_dim].
    """

    def __init__(self, pool: Tensor, cache: PagedCache, kv_heads: int) -> None:
        self.pool = pool
        self._cache = cache
        self._kv_heads = kv_heads

    def copy_shared_blocks(self) -> None:
        """Copy the shared blocks that a sequence is about to write into; in order, for one's source may be another's
        copy. What fails is still to be copied, and the next call begins with it."""
        for source, copy in self._cache.take_copies():
            self.pool[:, copy] = self.pool[:, source]

    def clear(self, handle: int, start: int = 0) -> None:
        self.copy_shared_blocks()  # a copy that is still to come would bring back what is zeroed here
        own, size = set(self._cache.owned(handle)), self.pool.shape[2]
        for i, block in enumerate(self._cache.table(handle)):
            if block in own:
                self.pool[:, block, max(0, start - i * size) :].zero_()
        self.clear_withheld()

    def clear_withheld(self) -> None:
        self.copy_shared_blocks()  # a copy that is still to come may be one of what is zeroed here
        for block in self._cache.withheld:
            self.pool[:, block].zero_()
        self._cache.restore()

    def is_finite(self, handle: int) -> bool:
        return _all_finite(self.pool[:, block] for block in self._cache.owned(handle))

    def read(self, layer: int, handle: int, length: int) -> tuple[Tensor, Tensor]:
        self.copy_shared_blocks()
        table = torch.tensor(self._cache.table(handle), dtype=torch.int64, device=self.pool.device)
        rows = self.pool[layer, table].flatten(0, 1)[:length].transpose(0, 1)  # [2·kv_heads, length, head_dim]
        return rows[: self._kv_heads], rows[self._kv_heads :]


def _all_finite(pieces: Iterable[Tensor]) -> bool:
    """One copy to the host for all of them."""
    each = [piece.isfinite().all() for piece in pieces]
    return not each or bool(torch.stack(each).all())
