"""Slotted cache: one run of max_len positions per sequence. Bookkeeping only; storage.py holds the tensors."""

import heapq
from collections.abc import Set

from cache.protocol import CacheFull


class SlottedCache:
    """A KVCache of `num_slots` equal slots. The lowest free slot goes first, so that running sequences stay neighbours,
    which is what lets attention batch them without copying."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots, self.max_len = num_slots, max_len
        self._free = list(range(num_slots))  # a heap
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def allocate(self, handle: int) -> None:
        if handle in self._slots:
            raise KeyError(f"sequence {handle} already holds slot {self._slots[handle]}")
        if not self._free:
            raise CacheFull(f"all {self.num_slots} slots are held")
        self._slots[handle] = heapq.heappop(self._free)
        self._lengths[handle] = 0

    def holds(self, handle: int) -> bool:
        return handle in self._slots

    def slot(self, handle: int) -> int:
        return self._slots[handle]

    def length(self, handle: int) -> int:
        return self._lengths[handle]

    def extend(self, handle: int, count: int) -> None:
        length = self._lengths[handle] + count
        if length > self.max_len:
            raise CacheFull(f"sequence {handle} needs {length} positions, its slot has {self.max_len}")
        self._lengths[handle] = length

    def truncate_to(self, handle: int, length: int) -> None:
        if not 0 <= length <= self._lengths[handle]:
            raise ValueError(f"cannot truncate sequence {handle} from {self._lengths[handle]} to {length}")
        self._lengths[handle] = length

    def release(self, handle: int) -> None:
        slot = self._slots.pop(handle, None)
        if slot is not None:
            del self._lengths[handle]
            heapq.heappush(self._free, slot)

    def audit(self, live: Set[int]) -> None:
        held = sorted([*self._slots.values(), *self._free])
        assert held == list(range(self.num_slots)), (
            f"{len(self._slots)} held + {len(self._free)} free slots do not make {self.num_slots}: {held}"
        )
        leaked = sorted(self._slots.keys() - live)
        assert not leaked, f"{len(leaked)} slots held by sequences that are gone: {leaked}"
        assert self._lengths.keys() == self._slots.keys(), "a length without a slot, or the reverse"
        assert all(0 <= n <= self.max_len for n in self._lengths.values()), f"a length beyond {self.max_len}"
