"""Slotted cache: each sequence has a run of max_len positions. Bookkeeping only; storage.py holds the tensors."""

from collections.abc import Sequence, Set

from cache.protocol import CacheFull
from cache.slots import Slots


class SlottedCache:
    """A KVCache of `num_slots` equal slots. Sequences share nothing and find no prefixes."""

    shares = False
    window: int | None = None

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots, self.max_len = num_slots, max_len
        self._slots = Slots(num_slots)
        self._lengths: dict[int, int] = {}
        self._reached: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def withheld(self) -> Set[int]:
        return self._slots.withheld

    @property
    def used(self) -> float:
        return 1 - self.free_slots / self.num_slots

    @property
    def empty(self) -> int:
        return self.free_slots * self.max_len

    def allocate(self, handle: int, tokens: Sequence[int] = (), salt: str = "") -> int:
        self._slots.take(handle)
        self._lengths[handle] = self._reached[handle] = 0
        return 0

    def holds(self, handle: int) -> bool:
        return handle in self._lengths

    def slot(self, handle: int) -> int:
        return self._slots.held[handle]

    def length(self, handle: int) -> int:
        return self._lengths[handle]

    def held(self, handle: int) -> int:
        return self._lengths.get(handle, 0)

    def reached(self, handle: int) -> int:
        """Return the most positions that were reserved since `allocate`. No pass has written beyond them."""
        return self._reached[handle]

    def room(self, handle: int) -> int:
        return self.max_len - self._lengths[handle]

    def reserve(self, handle: int, count: int) -> None:
        length = self._lengths[handle] + count
        if length > self.max_len:
            raise CacheFull(f"sequence {handle} needs {length} positions, but its slot has {self.max_len}")
        self._reached[handle] = max(self._reached[handle], length)

    def extend(self, handle: int, count: int) -> None:
        length = self._lengths[handle] + count
        if length > self.max_len:
            raise ValueError(f"cannot extend sequence {handle} to {length}: its slot has {self.max_len} positions")
        self._lengths[handle] = length

    def writable(self, handle: int, start: int) -> bool:
        return True  # no other sequence can read a slot

    def truncate_to(self, handle: int, length: int) -> None:
        if not 0 <= length <= self._lengths[handle]:
            raise ValueError(f"cannot truncate sequence {handle} to {length} positions: it has {self._lengths[handle]}")
        self._lengths[handle] = length

    def unseen(self, handle: int, length: int) -> int:
        return 0

    def slide(self, handle: int, length: int) -> None:
        pass  # a slot is one piece

    def fork(self, parent: int, child: int, length: int) -> int:
        if not 0 <= length <= self._lengths[parent]:
            raise ValueError(f"cannot fork {length} positions of sequence {parent}: it has {self._lengths[parent]}")
        return self._lengths[child]

    def publish(self, handle: int, tokens: Sequence[int]) -> None:
        pass  # no other sequence can read a slot

    def release(self, handle: int) -> None:
        if self._lengths.pop(handle, None) is not None:
            del self._reached[handle]
            self._slots.give_back(handle)

    def discard(self, handle: int) -> None:
        pass

    def quarantine(self, handle: int) -> None:
        del self._lengths[handle], self._reached[handle]
        self._slots.withhold(handle)

    def restore(self) -> None:
        self._slots.restore()

    def audit(self, handles: Set[int]) -> None:
        self._slots.audit(handles)
        assert self._lengths.keys() == self._slots.held.keys(), "the sequences with lengths are not those with slots"
        assert all(0 <= n <= self.max_len for n in self._lengths.values()), f"a length beyond {self.max_len}"
