"""Paged cache: sequences take memory in blocks, share the blocks of equal prefixes, and copy them before they write.

Bookkeeping only. Storages read the tables (block_size positions per block, as in PagedAttention, Kwon et al. 2023,
arXiv:2309.06180, section 4) and copy the blocks. Three rules make sharing safe:

- A pass writes only reserved positions from `length` on. `reserve` makes sure that no other sequence reads their
  blocks.
- Full blocks of committed tokens are indexed. An indexed block is never written again.
- A sequence indexes a block only below nodes whose blocks it holds itself. If another sequence has indexed the same
  text first, the sequence takes that block and drops its own, or it stops indexing. So a sequence that holds a node's
  block also holds the blocks of all nodes above it (prefix.py needs this).

With a window, no query sees the blocks that lie before it, so `slide` frees them: their table entries become HIDDEN.
Freed blocks that are indexed stay so until their memory is needed. A text is found only while the index holds all its
blocks, seen or not. When a block is evicted, all blocks below it leave the index, and the sequences that hold them
index no more.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from cache.blocks import BlockPool
from cache.prefix import PrefixIndex, PrefixNode
from cache.protocol import CacheFull
from cache.slots import Slots

NEVER = sys.maxsize
HIDDEN = -1  # the table's entry for a block that no query sees any more


@dataclass(slots=True)
class _Held:
    """The memory of one sequence. Lengths are positions."""

    slot: int
    salt: str
    table: list[int]  # the slot's table: the blocks of positions 0 …, in order, the first `hidden` of them HIDDEN
    next_index_at: int  # length at which the next block is full and can be indexed; NEVER: it indexes no more blocks
    length: int = 0
    reserved: int = 0  # positions length … reserved − 1 lie in blocks that no other sequence reads
    indexed: int = 0  # positions 0 … indexed − 1 lie in blocks that it indexed or found
    hidden: int = 0
    node: PrefixNode | None = None  # the index's node of the last of these blocks
    wishes: list[int] = field(default_factory=list)  # blocks that rollbacks took; the last one comes next in the table


class PagedCache:
    """A KVCache of `num_blocks` blocks that at most `slots` sequences share."""

    def __init__(
        self,
        slots: int,
        max_len: int,
        block_size: int,
        num_blocks: int,
        *,
        prefixes: bool,
        window: int | None = None,
    ) -> None:
        self.max_len, self.window = max_len, window
        self.block_size, self.num_blocks, self.shares = block_size, num_blocks, prefixes
        self._slots, self._pool = Slots(slots), BlockPool(num_blocks)
        self._index = PrefixIndex(block_size)
        self._held: dict[int, _Held] = {}
        self._tables: list[list[int]] = [[] for _ in range(slots)]
        self._copies: dict[int, int] = {}  # destination → source of the copies that are not done yet

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def withheld(self) -> Set[int]:
        return self._pool.withheld

    @property
    def used_blocks(self) -> int:
        """Blocks that a sequence refers to, and withheld ones."""
        return self.num_blocks - self._pool.available

    @property
    def used(self) -> float:
        return self.used_blocks / self.num_blocks

    @property
    def empty(self) -> int:
        return self._pool.free * self.block_size

    def allocate(self, handle: int, tokens: Sequence[int] = (), salt: str = "") -> int:
        slot = self._slots.take(handle)
        held = self._held[handle] = _Held(slot, salt, self._tables[slot], self.block_size if self.shares else NEVER)
        for node in self._index.match(tokens, salt, (len(tokens) - 1) // self.block_size):
            self._pool.share(node.block)
            held.table.append(node.block)
            held.node = node
        held.length = held.reserved = held.indexed = len(held.table) * self.block_size
        if self.shares:
            held.next_index_at = held.indexed + self.block_size
        self._hide(held, held.length)
        return held.length

    def holds(self, handle: int) -> bool:
        return handle in self._held

    def slot(self, handle: int) -> int:
        return self._held[handle].slot

    def length(self, handle: int) -> int:
        return self._held[handle].length

    def held(self, handle: int) -> int:
        held = self._held.get(handle)
        return 0 if held is None else held.length

    def room(self, handle: int) -> int:
        held, blocks = self._held[handle], self._pool.available
        if (len(held.table) + blocks - 1) * self.block_size >= self.max_len:  # whether or not it must copy a block
            return self.max_len - held.length
        blocks -= self._must_copy(held)
        return 0 if blocks < 0 else min((len(held.table) + blocks) * self.block_size, self.max_len) - held.length

    def reserve(self, handle: int, count: int) -> None:
        held = self._held[handle]
        end = held.length + count
        if end <= held.reserved:
            return
        if end > self.max_len:
            raise CacheFull(f"sequence {handle} needs {end} positions, but may have at most {self.max_len}")
        missing = max(0, -(-end // self.block_size) - len(held.table))
        copy = self._must_copy(held)
        if missing + copy > (available := self._pool.available):
            raise CacheFull(f"sequence {handle} needs {missing + copy} blocks, but {available} are available")
        if copy:
            self._copy(held)
        for _ in range(missing):
            held.table.append(self._take(held.wishes.pop() if held.wishes else -1))
        held.reserved = end

    def extend(self, handle: int, count: int) -> None:
        held = self._held[handle]
        length = held.length + count
        if length > held.reserved:
            raise ValueError(f"cannot extend sequence {handle} to {length}: {held.reserved} positions are reserved")
        held.length = length

    def writable(self, handle: int, start: int) -> bool:
        return not any(map(self._exposed, self._held[handle].table[start // self.block_size :]))

    def truncate_to(self, handle: int, length: int) -> None:
        held = self._held[handle]
        if not 0 <= length <= held.length:
            raise ValueError(f"cannot truncate sequence {handle} to {length} positions: it has {held.length}")
        if length and self._first_seen(length) < held.hidden:
            raise ValueError(
                f"cannot truncate sequence {handle} to {length} positions: its window has left the first "
                f"{held.hidden * self.block_size}"
            )
        held.length = held.reserved = length
        self._drop(held, -(-length // self.block_size), rolled_back=True)
        if length < held.indexed:
            self._back_to_indexed(held)
        if not length and self.shares:
            held.next_index_at = self.block_size  # an empty sequence may index again

    def unseen(self, handle: int, length: int) -> int:
        held = self._held[handle]
        return max(0, self._first_seen(min(length, held.length)) - held.hidden) * self.block_size

    def slide(self, handle: int, length: int) -> None:
        held = self._held[handle]
        self._hide(held, min(length, held.length))

    def fork(self, parent: int, child: int, length: int) -> int:
        source, held = self._held[parent], self._held[child]
        if not 0 <= length <= source.length:
            raise ValueError(f"cannot fork {length} positions of sequence {parent}: it has {source.length}")
        if length <= held.length or source.salt != held.salt or self._first_seen(length) < source.hidden:
            return held.length
        self._drop(held, 0)
        held.wishes.clear()
        for block in source.table[: -(-length // self.block_size)]:
            if block != HIDDEN:
                self._pool.share(block)
            held.table.append(block)
        held.hidden = source.hidden
        held.length = held.reserved = length
        source.reserved = source.length  # the parent's last block may be shared now, so it must reserve again
        held.node, held.indexed, held.next_index_at = source.node, source.indexed, source.next_index_at
        if length < held.indexed:
            self._back_to_indexed(held)
        return length

    def publish(self, handle: int, tokens: Sequence[int]) -> None:
        held = self._held[handle]
        if held.length < held.next_index_at or len(tokens) < held.next_index_at:
            return
        full = min(held.length, len(tokens))
        while held.next_index_at <= full:
            block = held.table[held.indexed // self.block_size]
            node = self._index.insert(held.node, held.salt, tuple(tokens[held.indexed : held.next_index_at]), block)
            if node.block != block and not self._replace_by_indexed(held, block, node.block):
                held.next_index_at = NEVER
                return
            held.node, held.indexed = node, held.next_index_at
            held.next_index_at += self.block_size

    def release(self, handle: int) -> None:
        held = self._held.pop(handle, None)
        if held is not None:
            self._drop(held, 0)
            self._slots.give_back(handle)

    def discard(self, handle: int) -> None:
        """As in KVCache. Sequences that share a block with it, or began with the same indexed block, have computed from
        the same memory: their blocks are no longer found either, and they index nothing until they are empty again.
        Copies of its blocks stay as they are.
        """
        source = self._held[handle]
        blocks, top = set(source.table) - {HIDDEN}, self._top(source)
        for held in self._held.values():
            if not blocks.isdisjoint(held.table) or (top is not None and self._top(held) is top):
                _stop_indexing(held)
        if top is not None:
            for block in self._index.remove(top.block):
                self._pool.withhold_cached(block)

    def quarantine(self, handle: int) -> None:
        held = self._held.pop(handle)
        self._drop(held, 0, withhold=True)
        self._slots.give_back(handle)

    def restore(self) -> None:
        self._pool.restore()

    def table(self, handle: int) -> list[int]:
        """Return the blocks of all its positions, reserved ones included. This is the cache's own list: read only."""
        return self._held[handle].table

    def slot_table(self, slot: int) -> list[int]:
        """Return the table of the sequence that holds the slot, empty for a free slot. Read only."""
        return self._tables[slot]

    def owned(self, handle: int) -> list[int]:
        """Return the blocks that only this sequence refers to, indexed ones included."""
        held = self._held[handle]
        return [block for block in held.table[held.hidden :] if self._pool.counts[block] == 1]

    def take_copies(self) -> Iterator[tuple[int, int]]:
        """Yield (source, destination) of the block copies that must be done before the next pass, in order.

        A copy counts as done when the caller asks for the next one. So a copy that fails comes again, with all after
        it. No block is a destination twice, or a source after it was a destination. A source may become a destination
        later, so a copy that was done must not be repeated.
        """
        while self._copies:
            block, source = next(iter(self._copies.items()))
            yield source, block
            del self._copies[block]

    def _must_copy(self, held: _Held) -> bool:
        """Whether other sequences can read or find the block of the next position."""
        return held.length % self.block_size > 0 and self._exposed(held.table[held.length // self.block_size])

    def _exposed(self, block: int) -> bool:
        return self._pool.counts[block] > 1 or block in self._index.nodes

    def _copy(self, held: _Held) -> None:
        entry = held.length // self.block_size
        source = held.table[entry]
        block = held.table[entry] = self._take()
        # If the source itself waits for a copy, that copy's source holds the data.
        self._copies[block] = self._copies.get(source, source)
        self._pool.drop(source, keep=source in self._index.nodes)

    def _take(self, wish: int = -1) -> int:
        if not self._pool.free:
            block = self._pool.evict()
            below = self._index.remove(block)[:-1]
            assert not below or self.window, f"block {block} is evicted before the blocks {below} below it"
            if self.window is not None:
                self._forget(below)  # without a window, nobody indexes below a block that no table refers to
        return self._pool.take(wish)

    def _forget(self, blocks: Sequence[int]) -> None:
        """The index has dropped these blocks."""
        for block in blocks:
            self._pool.forget(block)
        for held in self._held.values():
            if held.node is not None and self._index.nodes.get(held.node.block) is not held.node:
                _stop_indexing(held)

    def _first_seen(self, length: int) -> int:
        """The first entry of a table that a query at position `length` or behind it sees."""
        return 0 if self.window is None else max(0, length - self.window + 1) // self.block_size

    def _top(self, held: _Held) -> PrefixNode | None:
        """The node of the first block that the sequence indexed or found; None if the index has none of its blocks."""
        first = held.table[held.hidden] if len(held.table) > held.hidden else HIDDEN
        node = self._index.nodes.get(first, held.node)
        while node is not None and node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return node

    def _hide(self, held: _Held, length: int) -> None:
        """Drop the blocks that no query at `length` or behind it sees, the last one first."""
        first = self._first_seen(length)
        for entry in reversed(range(held.hidden, first)):
            self._let_go(held.table[entry])
            held.table[entry] = HIDDEN
        held.hidden = max(held.hidden, first)
        if held.hidden * self.block_size > held.indexed:
            held.next_index_at = NEVER  # it does not hold the block that it would index next

    def _drop(self, held: _Held, blocks: int, *, rolled_back: bool = False, withhold: bool = False) -> None:
        """Drop all but the table's first `blocks`, the last one first (prefix.py needs this order)."""
        while len(held.table) > max(blocks, held.hidden):
            block = held.table.pop()
            held.wishes.append(block)
            self._let_go(block, rolled_back=rolled_back, withhold=withhold)
        if blocks < held.hidden:
            self._drop_hidden(held)

    def _drop_hidden(self, held: _Held) -> None:
        """Empty the table of a sequence that holds no block. The blocks that it indexed or found and then left are
        evicted in the order of tables without a window: the last one first."""
        held.table.clear()
        held.hidden = 0
        node = held.node
        while node is not None and node.parent is not None:
            self._pool.touch(node.block)
            node = node.parent

    def _let_go(self, block: int, *, rolled_back: bool = False, withhold: bool = False) -> None:
        self._pool.drop(block, keep=block in self._index.nodes, rolled_back=rolled_back, withhold=withhold)
        if self._copies and not self._pool.counts[block]:
            self._copies.pop(block, None)

    def _replace_by_indexed(self, held: _Held, own: int, indexed: int) -> bool:
        """Replace the sequence's own block by the indexed block with the same text.

        Returns False if other sequences share the own block: they would later index blocks below one that they do not
        hold.
        """
        if self._pool.counts[own] > 1:
            return False
        self._pool.share(indexed)
        held.table[held.indexed // self.block_size] = indexed
        self._pool.drop(own, keep=False)
        self._copies.pop(own, None)
        return True

    def _back_to_indexed(self, held: _Held) -> None:
        """Go back to the node of the last block that is full and indexed."""
        full = held.length - held.length % self.block_size
        while held.indexed > full:
            assert held.node is not None, "positions are indexed without a node"
            held.indexed -= self.block_size
            held.node = held.node.parent if held.indexed else None
        if held.next_index_at != NEVER:
            held.next_index_at = held.indexed + self.block_size

    def audit(self, handles: Set[int]) -> None:
        self._slots.audit(handles)
        assert self._held.keys() == self._slots.held.keys(), "the sequences with tables are not those with slots"
        self._index.audit(self._pool.counts, slides=self.window is not None)
        references = Counter(block for table in self._tables for block in table if block != HIDDEN)
        self._pool.audit(references, self._index.nodes.keys())
        idle = sorted(block for block in self._copies if not references[block])
        assert not idle, f"copies into blocks that no table refers to: {idle}"
        for handle, held in self._held.items():
            assert held.table is self._tables[held.slot], f"sequence {handle} has the table of another slot"
            assert 0 <= held.length <= held.reserved <= min(self.max_len, len(held.table) * self.block_size), (
                f"sequence {handle}: length {held.length}, reserved {held.reserved}, {len(held.table)} blocks"
            )
            assert [i for i, block in enumerate(held.table) if block == HIDDEN] == list(range(held.hidden)), (
                f"sequence {handle} has left its first {held.hidden} blocks, and its table is {held.table}"
            )
            assert not held.length or held.hidden <= self._first_seen(held.length), (
                f"sequence {handle} of length {held.length} sees blocks that it has left, the first {held.hidden}"
            )
            written = range(held.length // self.block_size, -(-held.reserved // self.block_size))
            for block in [held.table[i] for i in written if held.reserved > held.length]:
                assert references[block] == 1, f"sequence {handle} will write block {block}, which others hold too"
                assert block not in self._index.nodes, f"sequence {handle} will write block {block}, which is indexed"
            seen = held.table[held.hidden :]
            path = [self._index.nodes[block] for block in seen if block in self._index.nodes]
            above = [-1, *seen][: len(path)]
            if path and held.hidden:
                above[0] = path[0].parent.block if path[0].parent else -1  # a block that it has left
            assert [node.parent and node.parent.block for node in path] == above, (
                f"sequence {handle} with table {held.table} holds indexed blocks {[node.block for node in path]}, "
                "but not all that are above them"
            )


def _stop_indexing(held: _Held) -> None:
    held.next_index_at, held.indexed, held.node = NEVER, 0, None
