"""Block pool: which of a fixed number of equal blocks are free, referenced, cached or withheld.

A block is free, referenced (by as many tables as its count says), or cached: no table refers to it, but the prefix
index still finds it. Cached blocks are memory to be had: `evict` frees the one that was let go first. A withheld block
may hold what is not finite: nobody gets it before `restore`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Set


class BlockPool:
    """Blocks 0 … num_blocks − 1. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks  # tables that refer to a block
        # The last one goes first: a fresh pool hands out 0, 1, 2, …, and later what was released last.
        self._free = OrderedDict.fromkeys(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unreferenced first
        self.withheld: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones, and cached ones after evicting them."""
        return len(self._free) + len(self._cached)

    def take(self, wish: int = -1) -> int:
        """A free block with a count of 1: the wished one if it is free, else the one released last, and what rollbacks
        freed at the very last. KeyError without one.

        A sequence wishes for what a rollback took from it: with equal tables from round to round a storage that maps
        blocks has nothing to map anew.
        """
        if wish in self._free:
            del self._free[wish]
            block = wish
        else:
            block, _ = self._free.popitem()
        self.counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table refers to a referenced or cached block."""
        if not self.counts[block]:
            del self._cached[block]
        self.counts[block] += 1

    def drop(self, block: int, *, keep: bool, rolled_back: bool = False, withhold: bool = False) -> None:
        """One table fewer refers to the block. The last one leaves it cached (`keep`), withheld (`withhold`) or
        free; if that was a rollback, it will be wished for, and others get it only after all else."""
        assert self.counts[block] > 0, f"block {block} is dropped, and nobody holds it"
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
        """Free the block that has been cached longest; KeyError without one."""
        block, _ = self._cached.popitem(last=False)
        self._free[block] = None
        return block

    def distrust(self, block: int) -> None:
        """The index finds the block no more, for it may not be finite: unless it is referenced, it is withheld."""
        if not self.counts[block]:
            del self._cached[block]
            self.withheld.add(block)

    def restore(self) -> None:
        """What is withheld was zeroed: it is free."""
        for block in sorted(self.withheld, reverse=True):
            self._free[block] = None
        self.withheld.clear()

    def audit(self, references: Mapping[int, int], indexed: Set[int]) -> None:
        """Raise AssertionError unless free + referenced + cached + withheld blocks make the total, the counts are the
        given `references` of the tables, and the cached ones are those of the `indexed` ones without a reference."""
        referenced = {block for block, count in enumerate(self.counts) if count}
        states = sorted([*self._free, *referenced, *self._cached, *self.withheld])
        assert states == list(range(self.num_blocks)), (
            f"{len(self._free)} free + {len(referenced)} referenced + {len(self._cached)} cached + "
            f"{len(self.withheld)} withheld blocks do not make {self.num_blocks}: {states}"
        )
        wrong = {b: (n, references.get(b, 0)) for b, n in enumerate(self.counts) if n != references.get(b, 0)}
        assert not wrong, f"blocks with another count than tables that hold them: {wrong}"
        unreferenced = indexed - referenced
        assert self._cached.keys() == unreferenced, (
            f"cached {sorted(self._cached)}, indexed without a reference {sorted(unreferenced)}"
        )
