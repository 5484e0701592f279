"""Block pool: knows the state of each of a fixed number of equal blocks. A block is in one of four states:

free        any sequence may take it
referenced  as many tables refer to it as its count says
cached      no table refers to it, but the prefix index still finds it; `evict` frees the block cached longest
withheld    it may hold values that are not finite; nobody gets it before `restore`
"""

from collections import OrderedDict
from collections.abc import Mapping, Set


class BlockPool:
    """Blocks 0 … num_blocks − 1. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks  # number of tables that refer to each block
        # Taken from the end: a new pool gives out 0, 1, 2, …, later the block that was released last.
        self._free = OrderedDict.fromkeys(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unreferenced first
        self.withheld: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Number of blocks that sequences can still take: free ones, and cached ones after `evict`."""
        return len(self._free) + len(self._cached)

    def take(self, wish: int = -1) -> int:
        """Take a free block: the wished one if it is free, else the one released last. Its count becomes 1.

        Blocks that a rollback freed are given out last. A sequence wishes for the blocks that a rollback took from it:
        while its table stays the same from round to round, a storage that maps blocks need not map again. Raises
        KeyError if no block is free.
        """
        if wish in self._free:
            del self._free[wish]
            block = wish
        else:
            block, _ = self._free.popitem()
        self.counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more table that refers to a referenced or cached block."""
        if not self.counts[block]:
            del self._cached[block]
        self.counts[block] += 1

    def drop(self, block: int, *, keep: bool, rolled_back: bool = False, withhold: bool = False) -> None:
        """Count one table less that refers to the block. Without a table it becomes cached (`keep`), withheld
        (`withhold`) or free. With `rolled_back` other sequences get it only after all other free blocks."""
        assert self.counts[block] > 0, f"block {block} is dropped, but no table refers to it"
        self.counts[block] -= 1
        if not self.counts[block]:
            if keep:
                self._cached[block] = None
            elif withhold:
                self.withheld.add(block)
            else:
                self._free[block] = None
                if rolled_back:
                    self._free.move_to_end(block, last=False)

    def evict(self) -> int:
        """Free the block that has been cached longest. Raises KeyError if no block is cached."""
        block, _ = self._cached.popitem(last=False)
        self._free[block] = None
        return block

    def touch(self, block: int) -> None:
        """Let the block be evicted after all other cached blocks, if it is cached."""
        if not self.counts[block]:
            self._cached.move_to_end(block)

    def forget(self, block: int) -> None:
        """Free the block if it is cached: the index has dropped it."""
        if not self.counts[block]:
            del self._cached[block]
            self._free[block] = None

    def withhold_cached(self, block: int) -> None:
        """Withhold the block if it is cached: the index has dropped it, and it may hold values that are not finite."""
        if not self.counts[block]:
            del self._cached[block]
            self.withheld.add(block)

    def restore(self) -> None:
        """Free the withheld blocks. The caller has zeroed them."""
        for block in sorted(self.withheld, reverse=True):
            self._free[block] = None
        self.withheld.clear()

    def audit(self, references: Mapping[int, int], indexed: Set[int]) -> None:
        """Check the pool; raise AssertionError for a defect.

        Free + referenced + cached + withheld blocks must make the total. Counts must equal `references`, which the
        tables hold per block. The cached blocks must be the `indexed` ones without a reference.
        """
        referenced = {block for block, count in enumerate(self.counts) if count}
        states = sorted([*self._free, *referenced, *self._cached, *self.withheld])
        assert states == list(range(self.num_blocks)), (
            f"{len(self._free)} free + {len(referenced)} referenced + {len(self._cached)} cached + "
            f"{len(self.withheld)} withheld blocks do not make {self.num_blocks}: {states}"
        )
        wrong = {b: (n, references.get(b, 0)) for b, n in enumerate(self.counts) if n != references.get(b, 0)}
        assert not wrong, f"blocks with wrong counts, block: (count, tables that refer to it): {wrong}"
        unreferenced = indexed - referenced
        assert self._cached.keys() == unreferenced, (
            f"cached blocks {sorted(self._cached)} differ from indexed ones without a reference {sorted(unreferenced)}"
        )
