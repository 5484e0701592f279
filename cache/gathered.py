"""Paged memory for any device. Attention's K and V are gathered from the blocks: one copy per layer and group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.paged import HIDDEN, PagedCache
from cache.storage import Blocks, KVShape, KVView, move_rows

BESIDE = 2  # blocks that a storage has beside those of its cache


class GatheredStorage(Blocks):
    """All blocks of a layer in one run of rows. One more block of zeros stands where a sequence has no block. Another
    one takes rows that belong to no sequence; nothing reads it."""

    def __init__(self, cache: PagedCache, shape: KVShape) -> None:
        self._zero_block, self.block_size = cache.num_blocks, cache.block_size
        size = (shape.num_layers, cache.num_blocks + BESIDE, cache.block_size, *shape.row)
        memory = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._all_rows = memory.flatten(1, 2)
        self.rows = self._all_rows.unbind(0)
        self.blocks = memory.unbind(0)  # per layer [blocks + BESIDE, block_size, 2·kv_heads, head_dim]
        self._offsets = torch.arange(cache.block_size, device=shape.device)  # of rows in a block
        self.spare_row = (cache.num_blocks + 1) * cache.block_size
        super().__init__(memory[:, : cache.num_blocks], cache, shape.kv_heads)

    def run(self, first: int, count: int) -> Sequence[Tensor]:
        return self._all_rows.narrow(1, first, count).unbind(0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        move_rows(self._all_rows, sources, targets)

    def prepare(self, handles: Sequence[int]) -> None:
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
        """The numbers of the slot's blocks in `blocks`, HIDDEN for those that no query sees. Read only."""
        return self._cache.slot_table(slot)

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        count = -(-length // self.block_size)
        tables = [self._cache.slot_table(s)[:count] for s in range(first_slot, first_slot + slots)]
        padded = [table + [self._zero_block] * (count - len(table)) for table in tables]
        blocks = torch.tensor(padded, dtype=torch.int64, device=self._offsets.device)[:, :, None]  # [slots, count, 1]
        if self._cache.window is not None:
            blocks.masked_fill_(blocks == HIDDEN, self._zero_block)
        index = (blocks * self.block_size + self._offsets).flatten(1)[:, :length]  # [slots, length]
        return GatheredView(self.rows, index, self._kv_heads)


class GatheredView:
    """A KVView that copies the rows of `index` [slots, length]. All layers use the same row numbers."""

    def __init__(self, rows: tuple[Tensor, ...], index: Tensor, kv_heads: int) -> None:
        self._rows, self._kv_heads = rows, kv_heads
        self._shape, self._index = index.shape, index.flatten()

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        chosen = self._rows[layer].index_select(0, self._index).unflatten(0, self._shape).transpose(1, 2)
        return chosen[:, : self._kv_heads], chosen[:, self._kv_heads :]
