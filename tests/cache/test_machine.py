"""The state machine on the paged cache, and on caches with one fault each, all of which it must catch."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from cache.blocks import BlockPool
from cache.paged import NEVER, PagedCache, _Held
from cache.protocol import CacheFull, KVCache
from tests.cache.machine import BLOCK, BLOCKS, MAX_LEN, SLOTS, WINDOW, CacheMachine, PagedMachine, SlidingMachine
from tests.examples import in_proofs, usual_and_proofs

# A failing program is shrunk and printed as Python that reproduces it; print_blob adds the line that repeats it.
NORMAL = settings(max_examples=15, stateful_step_count=40, deadline=None, print_blob=True)
LONG = settings(NORMAL, max_examples=900, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])
# Repeats the same programs every time, so a fault that is caught stays caught; shrinking it would only take time.
HUNT = settings(NORMAL, max_examples=2000, derandomize=True, database=None, phases=[Phase.generate], print_blob=False)

TestPagedCache = PagedMachine.TestCase
TestPagedCache.settings = NORMAL
TestSlidingCache = SlidingMachine.TestCase
TestSlidingCache.settings = NORMAL


class WithoutPrefixes(PagedMachine):
    """The cache never finds a prefix; everything else works."""

    @staticmethod
    def make() -> KVCache:
        return PagedCache(SLOTS, MAX_LEN, BLOCK, BLOCKS, prefixes=False)

    def publish(self, handle: int, count: int, beyond: list[int]) -> None:
        self.closed.add(handle)
        super().publish(handle, count, beyond)


TestPagedCacheWithoutPrefixes = WithoutPrefixes.TestCase
TestPagedCacheWithoutPrefixes.settings = settings(NORMAL, max_examples=8)


@pytest.mark.proofs
@pytest.mark.parametrize("kind", [PagedMachine, SlidingMachine])
def test_the_paged_cache_holds_for_many_more_steps(kind: type[CacheMachine]) -> None:
    machine: type[CacheMachine] = type("Long", (kind,), {"steps": 0})
    run_state_machine_as_test(machine, settings=LONG)
    assert machine.steps >= 25_000


# One fault each.


class ForkLosesACount(PagedCache):
    def fork(self, parent: int, child: int, length: int) -> int:
        before = self.length(child)
        after = super().fork(parent, child, length)
        if after > before:
            self._pool.counts[self.table(child)[-1]] -= 1
        return after


class TruncateFreesSharedBlocks(PagedCache):
    def truncate_to(self, handle: int, length: int) -> None:
        for block in self.table(handle)[-(-length // self.block_size) :] if length >= 0 else []:
            self._pool.counts[block] = 1
        super().truncate_to(handle, length)


class TruncateFreesThePartialBlock(PagedCache):
    def truncate_to(self, handle: int, length: int) -> None:
        super().truncate_to(handle, length)
        self._drop(self._held[handle], length // self.block_size)


class IndexesDrafts(PagedCache):
    """Indexes valid positions instead of committed ones, so it indexes drafts under wrong tokens."""

    def publish(self, handle: int, tokens: Any) -> None:
        super().publish(handle, [*tokens, *[0] * (self.length(handle) - len(tokens))])


class PublishesBeforeRollback(PagedMachine):
    """The fault is the caller's: it publishes drafts as if they were committed."""

    def publish(self, handle: int, count: int, beyond: list[int]) -> None:
        if handle not in self.closed:
            self.cache.publish(handle, self.held[handle])
        super().publish(handle, count, beyond)


class WritesWithoutCopying(PagedCache):
    def _must_copy(self, held: _Held) -> bool:
        return False


class CopiesNothing(PagedCache):
    def take_copies(self) -> Iterator[tuple[int, int]]:
        list(super().take_copies())
        return iter(())


class EvictsReferencedBlocks(PagedCache):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool = ForgetfulPool(self.num_blocks)


class ForgetfulPool(BlockPool):
    """A cached block that is found again can still be evicted."""

    def share(self, block: int) -> None:
        self.counts[block] += 1


class EvictsWhatWasUsedLast(PagedCache):
    def _take(self, wish: int = -1) -> int:
        if not self._pool.free:
            self._pool._cached.move_to_end(next(reversed(self._pool._cached)), last=False)
        return super()._take(wish)


class LetsGoOfTheFirstBlockFirst(PagedCache):
    def release(self, handle: int) -> None:
        if self.holds(handle):
            self.table(handle).reverse()
        super().release(handle)


class IgnoresSalt(PagedCache):
    def allocate(self, handle: int, tokens: Any = (), salt: str = "") -> int:
        return super().allocate(handle, tokens)


class LosesSlots(PagedCache):
    def release(self, handle: int) -> None:
        held = self._held.pop(handle, None)
        if held is not None:
            self._drop(held, 0)


class FreesTwice(PagedCache):
    def release(self, handle: int) -> None:
        if self.holds(handle) and self.table(handle):
            self._pool.drop(self.table(handle)[-1], keep=False)
        super().release(handle)


class HitsTheLastToken(PagedCache):
    def allocate(self, handle: int, tokens: Any = (), salt: str = "") -> int:
        return super().allocate(handle, [*tokens, 0], salt)


class KeepsWhatWasDiscarded(PagedCache):
    def discard(self, handle: int) -> None:
        pass


class TrustsOthersAfterDiscard(PagedCache):
    """Sequences that share discarded blocks index them again."""

    def discard(self, handle: int) -> None:
        table = self.table(handle)
        sharing = [h for h in self._held.values() if table and h.table[:1] == table[:1] and h.next_index_at != NEVER]
        super().discard(handle)
        for held in sharing:
            held.next_index_at = self.block_size


class GivesAwayWhatWasQuarantined(PagedCache):
    def quarantine(self, handle: int) -> None:
        self.release(handle)


class GivesAwayWhatWasDiscarded(PagedCache):
    def discard(self, handle: int) -> None:
        super().discard(handle)
        self.restore()


class RestoresNothing(PagedCache):
    def restore(self) -> None:
        pass


class CallsEverythingWritable(PagedCache):
    def writable(self, handle: int, start: int) -> bool:
        return True


class ReservesHalf(PagedCache):
    """Takes the available blocks before it notices that there are too few."""

    def reserve(self, handle: int, count: int) -> None:
        room = self.room(handle)
        super().reserve(handle, min(count, room))
        if count > room:
            raise CacheFull("too late")


FAULTS = [
    ForkLosesACount,
    TruncateFreesSharedBlocks,
    TruncateFreesThePartialBlock,
    IndexesDrafts,
    WritesWithoutCopying,
    CopiesNothing,
    EvictsReferencedBlocks,
    EvictsWhatWasUsedLast,
    LetsGoOfTheFirstBlockFirst,
    IgnoresSalt,
    LosesSlots,
    FreesTwice,
    HitsTheLastToken,
    KeepsWhatWasDiscarded,
    TrustsOthersAfterDiscard,
    GivesAwayWhatWasQuarantined,
    GivesAwayWhatWasDiscarded,
    RestoresNothing,
    CallsEverythingWritable,
    ReservesHalf,
]
# Their first programs meet the fault, and each is in another operation.
USUAL = [
    ForkLosesACount,
    TruncateFreesThePartialBlock,
    IndexesDrafts,
    WritesWithoutCopying,
    EvictsReferencedBlocks,
    IgnoresSalt,
    FreesTwice,
    KeepsWhatWasDiscarded,
    GivesAwayWhatWasQuarantined,
]


# Whose first programs meet the fault; for the other faults it is 0. Where the machine changes, others may be better.
SEEDS = {
    "TruncateFreesSharedBlocks": 4,
    "CopiesNothing": 12,
    "EvictsReferencedBlocks": 2,
    "EvictsWhatWasUsedLast": 2,
    "LetsGoOfTheFirstBlockFirst": 2,
    "IgnoresSalt": 2,
    "HitsTheLastToken": 2,
    "GivesAwayWhatWasDiscarded": 1,
    "ForksWhatIsGone": 5,
    "DiscardsOnlyWhatItSees": 1,
}


def hunt(machine: type[CacheMachine], number: int, programs: settings = HUNT) -> None:
    seed(number)(machine)
    run_state_machine_as_test(machine, settings=programs)


@pytest.mark.parametrize("faulty", usual_and_proofs(FAULTS, USUAL))
def test_the_machine_catches(faulty: type[PagedCache]) -> None:
    def make() -> KVCache:
        return faulty(SLOTS, MAX_LEN, BLOCK, BLOCKS, prefixes=True)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        hunt(type("Faulty", (PagedMachine,), {"make": staticmethod(make)}), SEEDS.get(faulty.__name__, 0))


class SlidesTooFar(PagedCache):
    def _first_seen(self, length: int) -> int:
        return super()._first_seen(length + 1)


class SlidesTooLittle(PagedCache):
    def _first_seen(self, length: int) -> int:
        return super()._first_seen(length - 1)


class TruncatesIntoWhatItLeft(PagedCache):
    def truncate_to(self, handle: int, length: int) -> None:
        window, self.window = self.window, None
        super().truncate_to(handle, length)
        self.window = window


class ForksWhatIsGone(PagedCache):
    def fork(self, parent: int, child: int, length: int) -> int:
        hidden, self._held[parent].hidden = self._held[parent].hidden, 0
        try:
            return super().fork(parent, child, length)
        finally:
            self._held[parent].hidden = hidden


class IndexesBelowWhatIsGone(PagedCache):
    """A sequence that loses a block above its own goes on to index below it."""

    def _forget(self, blocks: Any) -> None:
        for block in blocks:
            self._pool.forget(block)


class DiscardsOnlyWhatItSees(PagedCache):
    """Blocks that a discarded sequence has left are still found."""

    def discard(self, handle: int) -> None:
        if not self._held[handle].hidden:
            super().discard(handle)


SLIDING_FAULTS = [
    SlidesTooFar,
    SlidesTooLittle,
    TruncatesIntoWhatItLeft,
    ForksWhatIsGone,
    IndexesBelowWhatIsGone,
    DiscardsOnlyWhatItSees,
]


@pytest.mark.parametrize("faulty", usual_and_proofs(SLIDING_FAULTS, [SlidesTooFar, TruncatesIntoWhatItLeft]))
def test_the_machine_catches_in_a_sliding_cache(faulty: type[PagedCache]) -> None:
    def make() -> KVCache:
        return faulty(SLOTS, MAX_LEN, BLOCK, BLOCKS, prefixes=True, window=WINDOW)

    with pytest.raises((AssertionError, KeyError, IndexError, pytest.fail.Exception)):
        hunt(type("Faulty", (SlidingMachine,), {"make": staticmethod(make)}), SEEDS.get(faulty.__name__, 0))


def test_the_machine_catches_drafts_that_are_handed_over() -> None:
    with pytest.raises(AssertionError, match="was not committed"):
        hunt(PublishesBeforeRollback, 0)


@pytest.mark.parametrize("kind", [PagedMachine, SlidingMachine])
@pytest.mark.parametrize("faults", [USUAL, *in_proofs([*FAULTS, *SLIDING_FAULTS])], ids=["usual", "all"])
def test_programs_that_meet_the_faults_find_nothing_without_one(
    faults: list[type[PagedCache]], kind: type[CacheMachine]
) -> None:
    machine: type[CacheMachine] = type("Sound", (kind,), {"steps": 0})
    seeds = {SEEDS.get(fault.__name__, 0) for fault in faults}
    for number in sorted(seeds):
        hunt(machine, number, settings(HUNT, max_examples=8))
    assert machine.steps > 100 * len(seeds)
