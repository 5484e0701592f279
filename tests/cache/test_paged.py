"""The paged cache's rules by example; test_machine.py tries them in any order."""

from collections.abc import Sequence

import pytest

from cache.paged import HIDDEN, PagedCache
from cache.protocol import CacheFull, KVCache

TEXT = list(range(100, 140))


def paged(
    blocks: int = 16, *, slots: int = 4, max_len: int = 32, prefixes: bool = True, window: int | None = None
) -> PagedCache:
    return PagedCache(slots, max_len, 4, blocks, prefixes=prefixes, window=window)


def grow(cache: PagedCache, handle: int, count: int) -> None:
    cache.reserve(handle, count)
    cache.extend(handle, count)


def serve(cache: PagedCache, handle: int, tokens: Sequence[int], salt: str = "") -> int:
    """Allocate, read all tokens, publish; returns the length of the hit."""
    hit = cache.allocate(handle, tokens, salt)
    grow(cache, handle, len(tokens) - hit)
    cache.publish(handle, tokens)
    cache.audit(set(range(10)))
    return hit


def test_blocks_come_as_positions_are_reserved() -> None:
    cache = paged()
    assert cache.allocate(7) == 0
    assert (cache.slot_table(0), cache.slot_table(1), cache.used_blocks) == ([], [], 0)
    cache.reserve(7, 5)
    assert cache.slot_table(0) == cache.table(7) == [0, 1]
    assert cache.length(7) == 0
    cache.extend(7, 5)
    cache.reserve(7, 3)  # the rest of the second block
    assert cache.table(7) == [0, 1]
    cache.reserve(7, 4)
    assert cache.table(7) == [0, 1, 2]
    assert cache.used_blocks == 3
    with pytest.raises(ValueError, match="cannot extend sequence 7 to 10: 9 positions are reserved"):
        cache.extend(7, 5)
    cache.release(7)
    assert (cache.slot_table(0), cache.used_blocks) == ([], 0)


def test_truncation_frees_whole_blocks_and_keeps_the_partial_last_one() -> None:
    cache = paged()
    cache.allocate(0)
    grow(cache, 0, 10)
    cache.reserve(0, 6)  # a block that no valid position lies in
    assert cache.table(0) == [0, 1, 2, 3]
    cache.truncate_to(0, 10)
    assert cache.table(0) == [0, 1, 2]
    cache.truncate_to(0, 9)
    assert cache.table(0) == [0, 1, 2]
    cache.truncate_to(0, 8)
    assert cache.table(0) == [0, 1]
    cache.truncate_to(0, 1)
    assert cache.table(0) == [0]
    cache.truncate_to(0, 0)
    assert cache.table(0) == []
    cache.audit({0})


def test_sequences_get_their_own_blocks_back_after_a_rollback() -> None:
    cache = paged()
    for handle in (0, 1, 2):
        cache.allocate(handle)
        grow(cache, handle, 7)
    for handle in (0, 1, 2):
        cache.reserve(handle, 6)
    tables = [list(cache.table(handle)) for handle in (0, 1, 2)]
    assert all(len(table) == 4 for table in tables)
    for _ in range(3):
        for handle in (0, 1, 2):
            cache.truncate_to(handle, 7)
        assert cache.used_blocks == 6
        for handle in (0, 1, 2):
            cache.reserve(handle, 6)
        assert [cache.table(handle) for handle in (0, 1, 2)] == tables


def test_a_block_that_a_rollback_freed_is_given_to_others_last() -> None:
    cache = paged(4)
    cache.allocate(0)
    cache.allocate(1)
    grow(cache, 0, 3)
    cache.reserve(0, 2)
    cache.truncate_to(0, 3)
    grow(cache, 1, 4)
    assert (cache.table(0), cache.table(1)) == ([0], [2])
    cache.reserve(0, 2)
    assert cache.table(0) == [0, 1]
    cache.truncate_to(0, 3)
    grow(cache, 1, 8)
    assert cache.table(1) == [2, 3, 1]  # but before anybody goes without


def test_a_hit_is_full_blocks_and_never_the_last_token() -> None:
    cache = paged()
    assert serve(cache, 0, TEXT[:13]) == 0
    for tokens, hit in ((TEXT[:20], 12), (TEXT[:13], 12), (TEXT[:12], 8), (TEXT[:4], 0), (TEXT[1:9], 0), ([], 0)):
        assert cache.allocate(1, tokens) == cache.length(1) == hit
        assert cache.table(1) == cache.table(0)[: hit // 4]
        cache.release(1)
    cache.release(0)
    assert cache.used_blocks == 0
    assert cache.allocate(2, TEXT[:13]) == 12  # also of one that has gone
    cache.audit({2})


def test_nothing_is_found_under_another_salt_or_without_prefixes() -> None:
    cache = paged()
    serve(cache, 0, TEXT[:9], "one")
    assert cache.allocate(1, TEXT[:9], "two") == 0
    assert cache.allocate(2, TEXT[:9], "one") == 8
    cache = paged(prefixes=False)
    serve(cache, 0, TEXT[:9])
    assert cache.allocate(1, TEXT[:9]) == 0
    cache.release(0)
    assert cache.used_blocks == 0


def test_only_committed_full_blocks_are_indexed() -> None:
    cache = paged()
    cache.allocate(0)
    grow(cache, 0, 8)
    cache.publish(0, TEXT[:7])  # the eighth position holds a draft
    assert cache.allocate(1, TEXT[:9]) == 4
    cache.release(1)
    cache.publish(0, TEXT[:20])  # committed beyond what is valid
    assert cache.allocate(1, TEXT[:20]) == 8


def test_whoever_writes_into_a_shared_block_copies_it_first() -> None:
    cache = paged()
    cache.allocate(0)
    cache.allocate(1)
    grow(cache, 0, 6)
    assert cache.fork(0, 1, 6) == cache.length(1) == 6
    assert cache.table(1) == cache.table(0) == [0, 1]
    assert cache.owned(0) == cache.owned(1) == []
    cache.reserve(1, 1)
    assert (cache.table(0), cache.table(1), list(cache.take_copies())) == ([0, 1], [0, 2], [(1, 2)])
    assert list(cache.take_copies()) == []
    assert (cache.owned(0), cache.owned(1)) == ([1], [2])
    cache.reserve(0, 1)  # it is the only one left in block 1
    assert (cache.table(0), list(cache.take_copies())) == ([0, 1], [])
    cache.audit({0, 1})


def test_a_parent_must_reserve_anew_what_it_shares_after_reserving() -> None:
    cache = paged()
    cache.allocate(0)
    cache.allocate(1)
    grow(cache, 0, 5)
    cache.reserve(0, 1)
    cache.fork(0, 1, 5)
    with pytest.raises(ValueError, match="cannot extend"):
        cache.extend(0, 1)
    cache.reserve(0, 1)
    assert list(cache.take_copies()) == [(1, 2)]
    cache.extend(0, 1)


def test_blocks_reserved_behind_a_shared_one_do_not_pay_for_its_copy() -> None:
    cache = paged(3)
    cache.allocate(0)
    cache.allocate(1)
    grow(cache, 0, 2)
    cache.reserve(0, 9)
    cache.fork(0, 1, 2)
    assert cache.table(0) == [0, 1, 2]
    assert cache.room(0) == 0
    with pytest.raises(CacheFull, match="needs 1 blocks, but 0 are available"):
        cache.reserve(0, 1)
    cache.audit({0, 1})


def test_a_fork_replaces_less_and_keeps_more() -> None:
    cache = paged()
    for handle in (0, 1, 2):
        cache.allocate(handle, salt="other" if handle == 2 else "")
    grow(cache, 0, 9)
    grow(cache, 1, 6)
    assert cache.fork(0, 1, 6) == cache.fork(0, 1, 3) == 6
    assert cache.table(1) == [3, 4]
    assert cache.fork(0, 1, 7) == 7
    assert cache.table(1) == [0, 1]
    assert cache.used_blocks == 3
    assert cache.fork(0, 2, 9) == 0  # nothing is shared across salts
    with pytest.raises(ValueError, match="cannot fork 10 positions of sequence 0: it has 9"):
        cache.fork(0, 1, 10)
    cache.audit({0, 1, 2})


def test_truncation_leaves_to_others_what_they_share() -> None:
    cache = paged()
    cache.allocate(0)
    cache.allocate(1)
    grow(cache, 0, 12)
    cache.fork(0, 1, 12)
    cache.truncate_to(0, 2)
    assert (cache.table(0), cache.table(1), cache.used_blocks) == ([0], [0, 1, 2], 3)
    cache.release(1)
    assert cache.used_blocks == 1
    cache.audit({0})


def test_an_indexed_block_is_copied_before_its_owner_writes_over_it() -> None:
    cache = paged()
    serve(cache, 0, TEXT[:9])
    cache.truncate_to(0, 6)
    grow(cache, 0, 3)
    ((source, own),) = cache.take_copies()
    assert source == 1
    assert cache.table(0)[:2] == [0, own]
    cache.publish(0, [*TEXT[:6], 1, 2])
    assert cache.allocate(1, TEXT[:9]) == 8
    assert cache.table(1) == [0, 1]
    assert cache.allocate(2, [*TEXT[:6], 1, 2, 3]) == 8
    assert cache.table(2) == [0, own]
    cache.audit({0, 1, 2})


def test_a_copy_of_a_copy_that_is_not_done_yet_has_the_first_source() -> None:
    cache = paged()
    for handle in (0, 1, 2):
        cache.allocate(handle)
    grow(cache, 0, 2)
    cache.fork(0, 1, 2)
    cache.reserve(1, 1)
    cache.fork(1, 2, 2)
    cache.reserve(2, 1)
    assert list(cache.take_copies()) == [(0, 1), (0, 2)]


def test_a_copy_nobody_needs_any_more_is_not_told() -> None:
    cache = paged()
    cache.allocate(0)
    cache.allocate(1)
    grow(cache, 0, 2)
    cache.fork(0, 1, 2)
    cache.reserve(1, 1)
    cache.release(1)
    assert list(cache.take_copies()) == []


def test_of_two_who_computed_the_same_the_second_gives_its_blocks_back() -> None:
    cache = paged()
    cache.allocate(0, TEXT[:9])
    cache.allocate(1, TEXT[:9])
    grow(cache, 0, 9)
    grow(cache, 1, 9)
    cache.publish(0, TEXT[:9])
    used = cache.used_blocks
    cache.publish(1, TEXT[:9])
    assert (cache.table(0), cache.table(1)) == ([0, 1, 2], [0, 1, 5])
    assert cache.used_blocks == used - 2
    grow(cache, 1, 3)
    cache.publish(1, TEXT[:12])  # and indexes what it computes below them
    cache.release(0)
    cache.release(1)
    assert cache.allocate(2, TEXT[:13]) == 12
    assert cache.table(2) == [0, 1, 5]
    cache.audit({2})


def test_a_block_that_others_share_is_not_given_back() -> None:
    """The other sequences would later index blocks below one that they do not hold."""
    cache = paged()
    for handle in (0, 1, 2):
        cache.allocate(handle, TEXT[:9])
    grow(cache, 0, 9)
    grow(cache, 1, 9)
    cache.fork(1, 2, 9)
    cache.publish(0, TEXT[:9])
    cache.publish(1, TEXT[:9])
    assert cache.table(1) == cache.table(2) == [3, 4, 5]
    grow(cache, 1, 3)
    cache.publish(1, TEXT[:12])
    cache.audit({0, 1, 2})
    assert cache.allocate(3, TEXT[:13]) == 8  # it indexes nothing from there on


def test_who_was_not_found_for_longest_is_evicted_first_and_children_before_parents() -> None:
    cache = paged(6)
    a, b = [1] * 9, [2] * 9
    for handle, tokens in ((0, a), (1, b)):
        serve(cache, handle, tokens)
        cache.release(handle)
    serve(cache, 2, a)  # found again: now b is the older one
    cache.release(2)

    def hits() -> tuple[int, ...]:
        return tuple(4 * len(cache._index.match(tokens, "", 2)) for tokens in (a, b))

    assert (cache._pool.available, hits()) == (6, (8, 8))
    cache.allocate(3)
    seen = []
    for _ in range(6):
        grow(cache, 3, 4)
        cache.audit({3})
        seen.append(hits())
    assert seen == [(8, 8), (8, 8), (8, 4), (8, 0), (4, 0), (0, 0)]


def test_what_cannot_be_reserved_changes_nothing() -> None:
    cache = paged(3)
    serve(cache, 0, TEXT[:5])
    cache.release(0)
    cache.allocate(1)
    grow(cache, 1, 5)
    assert cache.room(1) == 7
    with pytest.raises(CacheFull, match="needs 2 blocks, but 1 are available"):
        cache.reserve(1, 8)
    assert (cache.table(1), cache.room(1), cache._pool.available) == ([1, 2], 7, 1)
    assert len(cache._index.match(TEXT, "", 9)) == 1  # nothing was evicted for it
    cache.reserve(1, 7)
    assert cache.room(1) == 7
    cache.extend(1, 7)
    assert cache.room(1) == 0


def test_room_counts_the_copy_that_a_write_needs() -> None:
    cache = paged(3)
    cache.allocate(0)
    cache.allocate(1)
    grow(cache, 0, 6)
    cache.fork(0, 1, 6)
    assert cache.room(1) == 2  # the rest of the copy, for which the last block goes
    with pytest.raises(CacheFull, match="needs 2 blocks, but 1 are available"):
        cache.reserve(1, 3)
    assert list(cache.take_copies()) == []
    cache.allocate(2)
    grow(cache, 2, 1)
    assert cache.room(1) == 0
    with pytest.raises(CacheFull, match="needs 1 blocks, but 0 are available"):
        cache.reserve(1, 1)
    cache.audit({0, 1, 2})


def test_nobody_grows_beyond_max_len() -> None:
    cache = paged(max_len=6)
    cache.allocate(0)
    grow(cache, 0, 5)
    assert cache.room(0) == 1
    with pytest.raises(CacheFull, match="needs 7 positions, but may have at most 6"):
        cache.reserve(0, 2)
    grow(cache, 0, 1)


def test_what_was_discarded_is_not_found_nor_what_others_computed_on_top_of_it() -> None:
    cache = paged()
    serve(cache, 0, TEXT[:9])
    serve(cache, 1, TEXT[:13])
    serve(cache, 2, [5] * 9)
    cache.discard(0)
    cache.audit({0, 1, 2})
    assert cache.holds(0)
    assert cache.length(1) == 13
    grow(cache, 1, 7)
    cache.publish(1, TEXT[:20])
    assert cache.allocate(3, TEXT[:20]) == 0
    cache.release(3)
    assert cache.allocate(3, [5] * 9) == 8  # of no concern to this one
    cache.truncate_to(0, 0)
    grow(cache, 0, 9)
    cache.publish(0, TEXT[:9])  # computed anew
    cache.release(3)
    assert cache.allocate(3, TEXT[:9]) == 8
    cache.audit({0, 1, 2, 3})


def test_unreferenced_blocks_below_what_was_discarded_are_withheld() -> None:
    cache = paged(4)
    serve(cache, 0, TEXT[:13])
    cache.truncate_to(0, 4)
    assert (cache._pool.available, cache._pool.free) == (3, 1)
    cache.discard(0)
    assert (cache._pool.available, cache.withheld) == (1, {1, 2})
    cache.audit({0})
    cache.restore()
    assert (cache._pool.available, cache._pool.free) == (3, 3)
    cache.audit({0})


def read_on(cache: PagedCache, handle: int, tokens: Sequence[int]) -> None:
    """Read and commit the tokens that are left, four at a time; the window moves on each time."""
    while (length := cache.length(handle)) < len(tokens):
        grow(cache, handle, min(4, len(tokens) - length))
        cache.publish(handle, tokens)
        cache.slide(handle, cache.length(handle))
        cache.audit(set(range(10)))


def test_a_sliding_sequence_holds_what_its_window_sees() -> None:
    cache = paged(blocks=4, window=6)
    cache.allocate(0)
    read_on(cache, 0, TEXT[:31])  # in 4 blocks instead of 8
    assert cache.table(0)[:6] == [HIDDEN] * 6  # the next query, at 31, sees 26 … 31
    assert cache.used_blocks == 2
    with pytest.raises(ValueError, match="to 28 positions: its window has left the first 24"):
        cache.truncate_to(0, 28)
    cache.truncate_to(0, 29)
    cache.truncate_to(0, 0)
    cache.audit({0})
    assert cache.used_blocks == 0
    read_on(cache, 0, TEXT[:8])


def test_a_text_is_found_behind_its_window() -> None:
    cache = paged(window=6)
    cache.allocate(0)
    read_on(cache, 0, TEXT[:16])
    table = list(cache.table(0))
    read_on(cache, 0, TEXT[:20])
    assert cache.allocate(1, TEXT[:17]) == 16
    assert cache.table(1) == [HIDDEN, HIDDEN, table[2], table[3]]  # the query at 16 sees 11 … 16
    cache.release(0)
    cache.audit({1})
    assert cache.used_blocks == 2


def test_evicting_a_block_takes_what_is_below_it_out_of_the_index() -> None:
    cache = paged(blocks=6, window=4)
    cache.allocate(0)
    read_on(cache, 0, TEXT[:12])
    cache.allocate(1)
    cache.reserve(1, 15)  # the last of its four blocks was the text's first one
    cache.audit({0, 1})
    assert cache.used_blocks == 5
    assert cache.allocate(2, TEXT) == 0
    read_on(cache, 0, TEXT[:16])  # indexes nothing below what is gone
    cache.release(2)
    assert cache.allocate(2, TEXT) == 0


def test_nobody_indexes_below_an_evicted_block_that_it_has_left() -> None:
    cache = paged(blocks=3, window=1)
    cache.allocate(0)
    read_on(cache, 0, TEXT[:4])
    cache.reserve(0, 4)
    cache.allocate(1)
    cache.reserve(1, 8)  # evicts the indexed block, which nobody refers to
    cache.extend(0, 4)
    cache.publish(0, TEXT[:8])
    cache.audit({0, 1})
    cache.release(0)
    cache.audit({1})
    assert cache._pool.available == 1


def test_a_finished_text_loses_its_end_first() -> None:
    cache = paged(blocks=6, window=4)
    cache.allocate(0)
    read_on(cache, 0, TEXT[:16])
    cache.release(0)
    cache.allocate(1)
    cache.reserve(1, 12)  # two free blocks, then one of the text's four
    assert cache.allocate(2, TEXT) == 12


def test_what_was_left_before_it_was_indexed_is_not_indexed() -> None:
    cache = paged(window=6)
    cache.allocate(0)
    grow(cache, 0, 16)
    cache.slide(0, 16)
    cache.publish(0, TEXT)
    cache.audit({0})
    assert cache.allocate(1, TEXT) == 0


def test_a_fork_needs_what_its_next_query_sees() -> None:
    cache = paged(window=6)
    cache.allocate(0)
    read_on(cache, 0, TEXT[:20])  # has left its first 12
    cache.allocate(1)
    assert cache.fork(0, 1, 16) == 0
    assert cache.fork(0, 1, 17) == 17
    cache.audit({0, 1})
    cache.release(0)
    cache.release(1)
    assert cache.used_blocks == 0


def test_salts_leave_nothing_behind() -> None:
    cache = paged(4)
    for n in range(50):
        serve(cache, 0, TEXT[:13], f"salt {n}")
        cache.release(0)
    assert len(cache._index._roots) == len(cache._index._salts) == 1


def test_the_audit_finds_a_sequence_that_is_gone() -> None:
    cache = paged()
    serve(cache, 0, TEXT[:5])
    with pytest.raises(AssertionError, match=r"1 slots held by sequences that are gone: \[0\]"):
        cache.audit({1})


def test_satisfies_the_protocol() -> None:
    cache: KVCache = paged()  # mypy's business
    cache.audit(set())
