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
    window: int | None = None  # positions that a query sees in every layer; None: some layer sees all
    pass_tokens: int = 0  # most positions that one pass writes for one sequence

    @property
    def paged(self) -> bool:
        return self.block_size > 0

    @property
    def tokens(self) -> int:
        """Number of positions that have memory."""
        return self.blocks * self.block_size if self.paged else self.slots * self.max_len

    def held(self, length: int) -> int:
        """Return how many positions need memory at once, at most, for a sequence of `length`.

        With a window: those that the next query sees, those that a pass writes, and the rest of a block.
        """
        if self.window is None or not self.paged:
            return length
        return min(length, self.window + self.pass_tokens + self.block_size)

    def needed(self, length: int, cached: int) -> int:
        """Return how many more positions need memory at once, at most, for a sequence of `length` whose first `cached`
        are in the cache. With a window, it holds those that the next query sees."""
        seen = cached if self.window is None or not self.paged else min(cached, self.window)
        return min(length - cached, self.held(length) - seen)

    def held_blocks(self, length: int) -> int:
        return -(-self.held(length) // self.block_size)


def make_cache(layout: Layout) -> KVCache:
    if not layout.paged:
        return SlottedCache(layout.slots, layout.max_len)
    return PagedCache(
        layout.slots,
        layout.max_len,
        layout.block_size,
        layout.blocks,
        prefixes=layout.prefixes,
        window=layout.window,
    )
