"""Paged memory for any device. Attention's K and V are gathered from the blocks: one copy per layer and group."""

import torch
from torch import Tensor

from cache.paged import HIDDEN, PagedCache
from cache.storage import Blocks, KVShape, KVView

BESIDE = 2  # blocks that a storage has beside those of its cache


class GatheredStorage(Blocks):
    """All blocks of a layer in one run of rows. One more block of zeros stands where a sequence has no block. Another
    one takes rows that belong to no sequence; nothing reads it."""

    def __init__(self, cache: PagedCache, shape: KVShape) -> None:
        self._zero_block = cache.num_blocks
        size = (shape.num_layers, cache.num_blocks + BESIDE, cache.block_size, *shape.row)
        memory = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._copies = memory.new_empty(0)  # of blocks, for attention
        self.spare_row = (cache.num_blocks + 1) * cache.block_size
        super().__init__(memory, cache, shape.kv_heads)

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
