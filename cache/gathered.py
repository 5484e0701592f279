"""Paged memory for any device. Attention's K and V are gathered from the blocks: one copy per layer and group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.paged import HIDDEN, PagedCache
from cache.storage import Blocks, KVShape, KVView, move_rows
from cache.transfer import index_tensor

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
        self._copies = memory.new_empty(0)  # of blocks, for attention
        self.spare_row = (cache.num_blocks + 1) * cache.block_size
        super().__init__(memory[:, : cache.num_blocks], cache, shape.kv_heads)

    def run(self, first: int, count: int) -> Sequence[Tensor]:
        return self._all_rows.narrow(1, first, count).unbind(0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        read, write = index_tensor([*sources, *targets], self._all_rows.device).view(2, -1).unbind(0)
        self.move_rows(read, write)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """As move(), with row numbers [n] int64 on the memory's device. The spare row may be a target several times."""
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
        """As in Storage, with HIDDEN for the blocks that no query sees."""
        return self._cache.slot_table(slot)

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        count = -(-length // self.block_size)
        tables = [self._cache.slot_table(s)[:count] for s in range(first_slot, first_slot + slots)]
        padded = [table + [self._zero_block] * (count - len(table)) for table in tables]
        blocks = torch.tensor(padded, dtype=torch.int64, device=self._all_rows.device)
        if self._cache.window is not None:
            blocks.masked_fill_(blocks == HIDDEN, self._zero_block)
        return GatheredView(self, blocks, length, self._kv_heads)

    def copied(self, layer: int, blocks: Tensor) -> Tensor:
        """The blocks [n] of a layer, [n, block_size, 2·kv_heads, head_dim], in memory that the next copy overwrites.

        A system takes longer to give such memory anew in each layer than the copy takes.
        """
        count, memory = len(blocks), self.blocks[layer]
        if len(self._copies) < count:
            self._copies = memory.new_empty(0)  # the old ones go before the new ones come
            with torch.inference_mode(False):  # a tensor of inference could be written there only
                self._copies = memory.new_empty(count, *memory.shape[1:])
        return torch.index_select(memory, 0, blocks, out=self._copies[:count])


class GatheredView:
    """A KVView that copies the blocks [slots, count]. All layers use the same block numbers."""

    def __init__(self, storage: GatheredStorage, blocks: Tensor, length: int, kv_heads: int) -> None:
        self._storage, self._kv_heads, self._length = storage, kv_heads, length
        self._shape, self._index = blocks.shape, blocks.flatten()

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        chosen = self._storage.copied(layer, self._index).unflatten(0, self._shape).flatten(1, 2)
        chosen = chosen[:, : self._length].transpose(1, 2)
        return chosen[:, : self._kv_heads], chosen[:, self._kv_heads :]
