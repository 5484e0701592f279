"""The sizes of one model's KV cache, and the cache that belongs to them."""

from dataclasses import dataclass

from cache.paged import PagedCache
from cache.protocol import KVCache
from cache.slotted import SlottedCache


@dataclass(frozen=True, slots=True)
class Layout:
    """Room for `slots` sequences of at most max_len positions. In a slotted layout every slot has its own memory."""

    slots: int
    max_len: int
    block_size: int = 0  # positions per block; 0: slotted
    blocks: int = 0  # shared by all sequences
    prefixes: bool = True  # whether full committed blocks are kept so that later sequences find them
    mapped: bool = True  # whether blocks may be mapped into the slots if the machine supports it

    @property
    def paged(self) -> bool:
        return self.block_size > 0

    @property
    def tokens(self) -> int:
        """Number of positions that have memory."""
        return self.blocks * self.block_size if self.paged else self.slots * self.max_len


def make_cache(layout: Layout) -> KVCache:
    if not layout.paged:
        return SlottedCache(layout.slots, layout.max_len)
    return PagedCache(layout.slots, layout.max_len, layout.block_size, layout.blocks, prefixes=layout.prefixes)
