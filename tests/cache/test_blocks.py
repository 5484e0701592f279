"""The block pool: the order in which blocks are given out, and the defects that its audit finds."""

from collections.abc import Callable

import pytest

from cache.blocks import BlockPool


def test_a_fresh_pool_gives_neighbours_in_ascending_order() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    assert pool.free == pool.available == 0
    with pytest.raises(KeyError):
        pool.take()


def test_what_was_freed_last_is_given_first() -> None:
    pool = BlockPool(5)
    for _ in range(4):
        pool.take()
    for block in (1, 3, 0):
        pool.drop(block, keep=False)
    assert [pool.take() for _ in range(4)] == [0, 3, 1, 4]


def test_a_wish_is_granted_while_the_block_is_free() -> None:
    pool = BlockPool(4)
    assert pool.take(2) == 2
    assert pool.take(2) == 0  # not free any more
    pool.drop(2, keep=False)
    pool.drop(0, keep=True)
    assert pool.take(0) == 2  # cached is not free


def test_a_block_is_free_when_its_last_table_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.drop(block, keep=False)
    assert (pool.counts[block], pool.free) == (1, 1)
    pool.drop(block, keep=False)
    assert (pool.counts[block], pool.free) == (0, 2)


def test_cached_blocks_are_evicted_in_the_order_they_were_let_go() -> None:
    pool = BlockPool(4)
    for block in (0, 1, 2, 3):
        assert pool.take() == block
    for block in (2, 0, 3, 1):
        pool.drop(block, keep=True)
    assert (pool.free, pool.available) == (0, 4)
    pool.share(0)  # found again, and let go again: the last in the order now
    pool.drop(0, keep=True)
    pool.withhold_cached(3)  # withheld, and so out of it
    assert (pool.free, pool.available) == (0, 3)
    assert [pool.evict() for _ in range(3)] == [2, 1, 0]
    with pytest.raises(KeyError):
        pool.evict()
    assert pool.free == 3


def test_a_referenced_block_that_is_distrusted_stays_with_its_table() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.withhold_cached(block)
    assert (pool.counts[block], pool.free, pool.withheld) == (1, 1, set())


def test_a_withheld_block_is_nobodys_until_it_is_restored() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.drop(block, keep=False, withhold=True)
    assert pool.withheld == set()  # another table refers to it
    pool.drop(block, keep=False, withhold=True)
    assert (pool.withheld, pool.available) == ({block}, 1)
    pool.audit({}, set())
    assert pool.take(block) != block
    with pytest.raises(KeyError):
        pool.take()
    pool.restore()
    assert (pool.take(), pool.withheld) == (block, set())


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block, keep=False)
    with pytest.raises(AssertionError, match="block 0 is dropped, but no table refers to it"):
        pool.drop(block, keep=False)


def _both_states(pool: BlockPool) -> None:
    pool._free[0] = None


def _lost(pool: BlockPool) -> None:
    pool._free.popitem()


def _count_too_high(pool: BlockPool) -> None:
    pool.counts[0] += 1


def _cached_without_node(pool: BlockPool) -> None:
    pool._cached[pool._free.popitem()[0]] = None


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_both_states, r"4 free \+ 1 referenced \+ 1 cached \+ 0 withheld blocks do not make 5: \[0, 0,"),
        (_lost, r"2 free \+ 1 referenced \+ 1 cached \+ 0 withheld blocks do not make 5"),
        (_count_too_high, r"wrong counts, block: \(count, tables that refer to it\): \{0: \(3, 2\)\}"),
        (_cached_without_node, r"cached blocks \[1, 2\] differ from indexed ones without a reference \[1\]"),
    ],
)
def test_the_audit_finds(damage: Callable[[BlockPool], None], says: str) -> None:
    pool = BlockPool(5)
    pool.share(pool.take())
    pool.drop(pool.take(), keep=True)
    pool.audit({0: 2}, {0, 1})
    damage(pool)
    with pytest.raises(AssertionError, match=says):
        pool.audit({0: 2}, {0, 1})
