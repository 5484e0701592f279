"""Knows which sequence holds which slot. Both caches keep their slots here."""

import heapq
from collections.abc import Set

from cache.protocol import CacheFull


class Slots:
    """`count` slots. The lowest free slot is given out first, so that running sequences have neighbouring slots:
    attention then batches them without copies."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: dict[int, int] = {}  # handle → slot
        self._free = list(range(count))  # a heap
        self.withheld: set[int] = set()  # slots that no sequence gets before `restore`

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, handle: int) -> int:
        """Give the sequence a slot. Raises KeyError if it already holds one, CacheFull if none is free."""
        if handle in self.held:
            raise KeyError(f"sequence {handle} already holds slot {self.held[handle]}")
        if not self._free:
            raise CacheFull(f"all {self.count} slots are held")
        slot = self.held[handle] = heapq.heappop(self._free)
        return slot

    def give_back(self, handle: int) -> None:
        heapq.heappush(self._free, self.held.pop(handle))

    def withhold(self, handle: int) -> None:
        self.withheld.add(self.held.pop(handle))

    def restore(self) -> None:
        self._free = sorted([*self._free, *self.withheld])
        self.withheld.clear()

    def audit(self, handles: Set[int]) -> None:
        """Raise AssertionError unless every slot is free, withheld, or held by one of `handles`, each exactly once."""
        slots = sorted([*self.held.values(), *self._free, *self.withheld])
        assert slots == list(range(self.count)), (
            f"{len(self.held)} held + {len(self._free)} free + {len(self.withheld)} withheld slots do not make "
            f"{self.count}: {slots}"
        )
        leaked = sorted(self.held.keys() - handles)
        assert not leaked, f"{len(leaked)} slots held by sequences that are gone: {leaked}"
