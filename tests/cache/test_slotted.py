"""The slotted cache against a dict; its audit finds what is lost."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cache.protocol import CacheFull, KVCache
from cache.slotted import SlottedCache

SLOTS, MAX_LEN = 4, 10
HANDLES = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    """Every operation on every handle, held or not; `lengths` is what the cache ought to know."""

    make: Any = SlottedCache

    def __init__(self) -> None:
        super().__init__()
        self.cache = type(self).make(SLOTS, MAX_LEN)
        self.lengths: dict[int, int] = {}

    @rule(handle=HANDLES)
    def allocate(self, handle: int) -> None:
        if handle in self.lengths:
            with pytest.raises(KeyError):
                self.cache.allocate(handle)
        elif len(self.lengths) == SLOTS:
            with pytest.raises(CacheFull):
                self.cache.allocate(handle)
        else:
            free = set(range(SLOTS)) - {self.cache.slot(h) for h in self.lengths}
            self.cache.allocate(handle)
            assert self.cache.slot(handle) == min(free)
            self.lengths[handle] = 0

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), count=st.integers(0, MAX_LEN))
    def extend(self, data: st.DataObject, count: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.lengths)))
        if self.lengths[handle] + count > MAX_LEN:
            with pytest.raises(CacheFull):
                self.cache.extend(handle, count)
        else:
            self.cache.extend(handle, count)
            self.lengths[handle] += count

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), length=st.integers(-1, MAX_LEN + 1))
    def truncate(self, data: st.DataObject, length: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.lengths)))
        if not 0 <= length <= self.lengths[handle]:
            with pytest.raises(ValueError, match="cannot truncate"):
                self.cache.truncate_to(handle, length)
        else:
            self.cache.truncate_to(handle, length)
            self.lengths[handle] = length

    @rule(handle=HANDLES)
    def release(self, handle: int) -> None:
        self.cache.release(handle)
        self.lengths.pop(handle, None)

    @invariant()
    def agrees(self) -> None:
        self.cache.audit(self.lengths.keys())
        assert self.cache.free_slots == SLOTS - len(self.lengths)
        assert {h for h in range(8) if self.cache.holds(h)} == self.lengths.keys()
        assert {h: self.cache.length(h) for h in self.lengths} == self.lengths
        slots = [self.cache.slot(h) for h in self.lengths]
        assert len(set(slots)) == len(slots)
        assert all(0 <= s < SLOTS for s in slots)


TestSlottedCache = Machine.TestCase
TestSlottedCache.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


class LeakyCache(SlottedCache):
    """Forgets the sequence but not its slot."""

    def release(self, handle: int) -> None:
        self._slots.pop(handle, None)
        self._lengths.pop(handle, None)


class GreedyCache(SlottedCache):
    """Gives a slot back twice."""

    def release(self, handle: int) -> None:
        slot = self._slots.get(handle)
        super().release(handle)
        if slot is not None:
            self._free.append(slot)


class OverlongCache(SlottedCache):
    """Lets a sequence grow into its neighbour's slot."""

    def extend(self, handle: int, count: int) -> None:
        self._lengths[handle] += count


@pytest.mark.parametrize("broken", [LeakyCache, GreedyCache])
def test_audit_finds_lost_slots(broken: type[SlottedCache]) -> None:
    cache = broken(SLOTS, MAX_LEN)
    cache.allocate(1)
    cache.audit({1})
    cache.release(1)
    with pytest.raises(AssertionError, match="slots do not make 4"):
        cache.audit(set())


def test_audit_finds_a_slot_whose_sequence_is_gone() -> None:
    cache = SlottedCache(SLOTS, MAX_LEN)
    for handle in (7, 8, 9):
        cache.allocate(handle)
    cache.audit({7, 8, 9, 10})
    with pytest.raises(AssertionError, match=r"2 slots held by sequences that are gone: \[7, 9\]"):
        cache.audit({8})


def test_audit_finds_a_length_beyond_its_slot() -> None:
    cache = OverlongCache(SLOTS, MAX_LEN)
    cache.allocate(1)
    cache.extend(1, MAX_LEN + 1)
    with pytest.raises(AssertionError, match="beyond 10"):
        cache.audit({1})


@pytest.mark.parametrize("broken", [LeakyCache, GreedyCache, OverlongCache])
def test_negative_control(broken: type[SlottedCache]) -> None:
    """The machine above fails on each of the broken caches."""
    machine = type("Broken", (Machine,), {"make": broken})
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=settings(max_examples=100, deadline=None, database=None))


def test_failed_operations_change_nothing() -> None:
    cache = SlottedCache(1, MAX_LEN)
    cache.allocate(0)
    cache.extend(0, 7)
    with pytest.raises(CacheFull, match="needs 11 positions"):
        cache.extend(0, 4)
    with pytest.raises(CacheFull, match="all 1 slots"):
        cache.allocate(1)
    assert cache.length(0) == 7
    assert not cache.holds(1)


def test_satisfies_the_protocol() -> None:
    cache: KVCache = SlottedCache(1, 1)  # mypy's business
    cache.audit(set())
