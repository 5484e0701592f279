"""The slotted cache: the state machine on it, on caches with one fault each, and what its audit says."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache.protocol import CacheFull, KVCache
from cache.slotted import SlottedCache
from tests.cache.machine import MAX_LEN, SLOTS, CacheMachine, SlottedMachine

NORMAL = settings(max_examples=25, stateful_step_count=40, deadline=None, print_blob=True)
HUNT = settings(NORMAL, max_examples=100, derandomize=True, database=None, phases=[Phase.generate], print_blob=False)

TestSlottedCache = SlottedMachine.TestCase
TestSlottedCache.settings = NORMAL


@pytest.mark.proofs
def test_the_slotted_cache_holds_for_ten_thousand_steps() -> None:
    machine: type[CacheMachine] = type("Long", (SlottedMachine,), {"steps": 0})
    run_state_machine_as_test(machine, settings=settings(NORMAL, max_examples=500))
    assert machine.steps >= 10_000


class LeakyCache(SlottedCache):
    """Forgets the sequence but not its slot."""

    def release(self, handle: int) -> None:
        self._slots.held.pop(handle, None)
        self._lengths.pop(handle, None)


class GreedyCache(SlottedCache):
    """Gives a slot back twice."""

    def release(self, handle: int) -> None:
        slot = self._slots.held.get(handle)
        super().release(handle)
        if slot is not None:
            self._slots._free.append(slot)


class OverlongCache(SlottedCache):
    """Lets a sequence grow into its neighbour's slot."""

    def extend(self, handle: int, count: int) -> None:
        self._lengths[handle] += count


class SharingCache(SlottedCache):
    """Claims that the child has its parent's positions."""

    def fork(self, parent: int, child: int, length: int) -> int:
        self._lengths[child] = max(super().fork(parent, child, length), length)
        return self._lengths[child]


class TrustingCache(SlottedCache):
    """Gives out quarantined slots."""

    def quarantine(self, handle: int) -> None:
        self.release(handle)


@pytest.mark.parametrize("faulty", [LeakyCache, GreedyCache, OverlongCache, SharingCache, TrustingCache])
def test_the_machine_catches(faulty: type[SlottedCache]) -> None:
    def make() -> KVCache:
        return faulty(SLOTS, MAX_LEN)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(type("Faulty", (SlottedMachine,), {"make": staticmethod(make)}), settings=HUNT)


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
    with pytest.raises(AssertionError, match=f"beyond {MAX_LEN}"):
        cache.audit({1})


def test_failed_operations_change_nothing() -> None:
    cache = SlottedCache(1, 10)
    cache.allocate(0)
    cache.reserve(0, 7)
    cache.extend(0, 7)
    assert cache.room(0) == 3
    with pytest.raises(CacheFull, match="needs 11 positions, but its slot has 10"):
        cache.reserve(0, 4)
    with pytest.raises(ValueError, match="to 11: its slot has 10"):
        cache.extend(0, 4)
    with pytest.raises(CacheFull, match="all 1 slots"):
        cache.allocate(1)
    assert cache.length(0) == 7
    assert not cache.holds(1)


def test_nothing_is_shared() -> None:
    cache = SlottedCache(2, 10)
    assert cache.allocate(0, [1, 2, 3, 4]) == 0
    cache.extend(0, 4)
    cache.publish(0, [1, 2, 3, 4])
    assert cache.allocate(1, [1, 2, 3, 4]) == 0
    cache.extend(1, 1)
    assert cache.fork(0, 1, 4) == cache.length(1) == 1


def test_satisfies_the_protocol() -> None:
    cache: KVCache = SlottedCache(1, 1)  # mypy's business
    cache.audit(set())
