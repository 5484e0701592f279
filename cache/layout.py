"""How one model's KV cache is laid out: its numbers, and the bookkeeping that goes with them."""

from dataclasses import dataclass

from cache.paged import PagedCache
from cache.protocol import KVCache
from cache.slotted import SlottedCache


@dataclass(frozen=True, slots=True)
class Layout:
    """`slots` sequences of at most max_len positions. Without blocks every slot has all its memory for itself."""

    slots: int
    max_len: int
    block_size: int = 0  # positions of a block; 0: slotted
    blocks: int = 0  # that all sequences share
    prefixes: bool = True  # whether full committed blocks are kept to be found again
    mapped: bool = True  # whether its blocks may be mapped into the slots, where the machine can

    @property
    def paged(self) -> bool:
        return self.block_size > 0

    @property
    def tokens(self) -> int:
        """Positions that there is memory for."""
        return self.blocks * self.block_size if self.paged else self.slots * self.max_len


def make_cache(layout: Layout) -> KVCache:
    if not layout.paged:
        return SlottedCache(layout.slots, layout.max_len)
    return PagedCache(layout.slots, layout.max_len, layout.block_size, layout.blocks, prefixes=layout.prefixes)
