"""Paged cache: sequences take memory in blocks, share what their texts have in common, and copy before they write.

Bookkeeping only; storages read the tables (block_size positions per block, as in PagedAttention, Kwon et al. 2023,
arXiv:2309.06180, section 4) and do the copies. Three rules carry the sharing:

- Only positions from `length` on are written, and only as far as they were reserved; `reserve` sees to it that nobody
  else can read the blocks they lie in.
- Full blocks of committed tokens are indexed, and an indexed block is never written again.
- A sequence indexes a block only below nodes whose blocks it holds itself. Where another sequence was first with the
  same text, it takes that one's block and gives its own back, or indexes nothing from there on; so whoever holds a
  node's block holds those above it (see prefix.py).
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from cache.blocks import BlockPool
from cache.prefix import Node, PrefixIndex
from cache.protocol import CacheFull
from cache.slots import Slots

NEVER = sys.maxsize


@dataclass(slots=True)
class _Held:
    """What one sequence holds."""

    slot: int
    salt: str
    table: list[int]  # the slot's: the blocks of positions 0 …, in order
    due: int  # positions at which there is a block to index; NEVER: it indexes nothing any more
    length: int = 0
    reserved: int = 0  # positions length … reserved − 1 lie in blocks that nobody else can read
    indexed: int = 0  # its first positions that lie in indexed blocks, as far as it indexed or found them
    node: Node | None = None  # of the last of these blocks
    wished: list[int] = field(default_factory=list)  # what rollbacks took from it; the last belongs next in the table


class PagedCache:
    """A KVCache of `num_blocks` blocks that at most `slots` sequences share."""

    def __init__(self, slots: int, max_len: int, block_size: int, num_blocks: int, *, prefixes: bool) -> None:
        self.max_len = max_len
        self.block_size, self.num_blocks, self.shares = block_size, num_blocks, prefixes
        self._slots = Slots(slots)
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(block_size)
        self._held: dict[int, _Held] = {}
        self._tables: list[list[int]] = [[] for _ in range(slots)]
        self._copies: dict[int, int] = {}  # destination → source, not done yet

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def withheld(self) -> Set[int]:
        return self._pool.withheld

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence refers to, findable ones included: they are evicted when needed."""
        return self._pool.available

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self._pool.available

    @property
    def used(self) -> float:
        return self.used_blocks / self.num_blocks

    def allocate(self, handle: int, tokens: Sequence[int] = (), salt: str = "") -> int:
        slot = self._slots.take(handle)
        held = self._held[handle] = _Held(slot, salt, self._tables[slot], self.block_size if self.shares else NEVER)
        for node in self._index.match(tokens, salt, (len(tokens) - 1) // self.block_size):
            self._pool.share(node.block)
            held.table.append(node.block)
            held.node = node
        held.length = held.reserved = held.indexed = len(held.table) * self.block_size
        if self.shares:
            held.due = held.indexed + self.block_size
        return held.length

    def holds(self, handle: int) -> bool:
        return handle in self._held

    def slot(self, handle: int) -> int:
        return self._held[handle].slot

    def length(self, handle: int) -> int:
        return self._held[handle].length

    def room(self, handle: int) -> int:
        held = self._held[handle]
        blocks = self._pool.available - self._must_copy(held)
        if blocks < 0:
            return 0
        backed = (len(held.table) + blocks) * self.block_size
        return min(backed, self.max_len) - held.length

    def reserve(self, handle: int, count: int) -> None:
        held = self._held[handle]
        end = held.length + count
        if end <= held.reserved:
            return
        if end > self.max_len:
            raise CacheFull(f"sequence {handle} needs {end} positions, and may have {self.max_len}")
        missing = max(0, -(-end // self.block_size) - len(held.table))
        copy = self._must_copy(held)
        if missing + copy > self._pool.available:
            raise CacheFull(f"sequence {handle} needs {missing + copy} blocks, {self._pool.available} can be had")
        if copy:
            self._copy(held)
        for _ in range(missing):
            held.table.append(self._take(held.wished.pop() if held.wished else -1))
        held.reserved = end

    def extend(self, handle: int, count: int) -> None:
        held = self._held[handle]
        length = held.length + count
        if length > held.reserved:
            raise ValueError(f"cannot extend sequence {handle} to {length}, {held.reserved} positions are reserved")
        held.length = length

    def truncate_to(self, handle: int, length: int) -> None:
        held = self._held[handle]
        if not 0 <= length <= held.length:
            raise ValueError(f"cannot truncate sequence {handle} from {held.length} to {length}")
        held.length = held.reserved = length
        blocks = -(-length // self.block_size)
        if blocks < len(held.table):
            self._drop(held, blocks, rolled_back=True)
        if length < held.indexed:
            self._climb(held)
        if not length and self.shares:
            held.due = self.block_size  # nothing is left of why it may have indexed nothing

    def fork(self, parent: int, child: int, length: int) -> int:
        """As the protocol says; nothing is shared across salts."""
        source, held = self._held[parent], self._held[child]
        if not 0 <= length <= source.length:
            raise ValueError(f"cannot fork {length} of the {source.length} positions of sequence {parent}")
        if length <= held.length or source.salt != held.salt:
            return held.length
        self._drop(held, 0)
        held.wished.clear()
        for block in source.table[: -(-length // self.block_size)]:
            self._pool.share(block)
            held.table.append(block)
        held.length = held.reserved = length
        source.reserved = source.length  # the parent's last block may be shared now: it must reserve anew
        held.node, held.indexed, held.due = source.node, source.indexed, source.due
        if length < held.indexed:
            self._climb(held)
        return length

    def publish(self, handle: int, tokens: Sequence[int]) -> None:
        held = self._held[handle]
        if held.length < held.due or len(tokens) < held.due:
            return
        full = min(held.length, len(tokens))
        while held.due <= full:
            block = held.table[held.indexed // self.block_size]
            node = self._index.insert(held.node, held.salt, tuple(tokens[held.indexed : held.due]), block)
            if node.block != block and not self._exchange(held, block, node.block):
                held.due = NEVER
                return
            held.node, held.indexed = node, held.due
            held.due += self.block_size

    def release(self, handle: int) -> None:
        held = self._held.pop(handle, None)
        if held is not None:
            self._drop(held, 0)
            self._slots.give_back(handle)

    def discard(self, handle: int) -> None:
        """As the protocol says. What others computed on top of its first block is as little to be trusted: it is not
        found any more either, and they index nothing until they begin anew. Blocks that it copied stay as they are."""
        table = self._held[handle].table
        if not table:
            return
        for held in self._held.values():
            if held.table and held.table[0] == table[0]:
                held.due, held.indexed, held.node = NEVER, 0, None
        if table[0] in self._index.nodes:
            for block in self._index.remove(table[0]):
                self._pool.distrust(block)

    def quarantine(self, handle: int) -> None:
        held = self._held.pop(handle)
        self._drop(held, 0, withhold=True)
        self._slots.give_back(handle)

    def restore(self) -> None:
        self._pool.restore()

    def table(self, handle: int) -> list[int]:
        """The blocks of its positions, reserved ones included: the cache's own list, which changes; read only."""
        return self._held[handle].table

    def slot_table(self, slot: int) -> list[int]:
        """The table of whoever holds the slot, empty for an idle one; to be read only."""
        return self._tables[slot]

    def owned(self, handle: int) -> list[int]:
        """The blocks that only this sequence refers to, findable ones included."""
        return [block for block in self._held[handle].table if self._pool.counts[block] == 1]

    def take_copies(self) -> Iterator[tuple[int, int]]:
        """(source, destination) of the block copies that must be done before the next pass, in their order. A copy is
        taken when the next one is asked for: one that fails, and those behind it, are told again.

        No block is a destination twice or a source after it was a destination. A source may become a destination, so
        a copy that was done must not be done again behind later ones.
        """
        while self._copies:
            block, source = next(iter(self._copies.items()))
            yield source, block
            del self._copies[block]

    def _must_copy(self, held: _Held) -> bool:
        """Whether the block of the position to be written next can be read by others, or found by them."""
        place, used = divmod(held.length, self.block_size)
        if not used:
            return False
        block = held.table[place]
        return self._pool.counts[block] > 1 or block in self._index.nodes

    def _copy(self, held: _Held) -> None:
        place = held.length // self.block_size
        source = held.table[place]
        block = held.table[place] = self._take()
        # A source that is itself still to be filled is as good as what fills it.
        self._copies[block] = self._copies.get(source, source)
        self._pool.drop(source, keep=source in self._index.nodes)

    def _take(self, wish: int = -1) -> int:
        if not self._pool.free:
            block = self._pool.evict()
            below = self._index.remove(block)[:-1]
            assert not below, f"block {block} is evicted, and {below} below it are not"
        return self._pool.take(wish)

    def _drop(self, held: _Held, blocks: int, *, rolled_back: bool = False, withhold: bool = False) -> None:
        """Let go of all but the table's first `blocks`, the deepest first (prefix.py relies on it)."""
        while len(held.table) > blocks:
            block = held.table.pop()
            held.wished.append(block)
            self._pool.drop(block, keep=block in self._index.nodes, rolled_back=rolled_back, withhold=withhold)
            if self._copies and not self._pool.counts[block]:
                self._copies.pop(block, None)

    def _exchange(self, held: _Held, own: int, indexed: int) -> bool:
        """Two sequences have computed the same text: let the block that was indexed first serve both from now on.

        False for a block that others share: what they hold below it would be indexed below a block that they do not.
        """
        if self._pool.counts[own] > 1:
            return False
        self._pool.share(indexed)
        held.table[held.indexed // self.block_size] = indexed
        self._pool.drop(own, keep=False)
        self._copies.pop(own, None)
        return True

    def _climb(self, held: _Held) -> None:
        """Go back to the node of its last full block that is indexed."""
        full = held.length - held.length % self.block_size
        while held.indexed > full:
            assert held.node is not None, "positions are indexed without a node"
            held.indexed -= self.block_size
            held.node = held.node.parent if held.indexed else None
        if held.due != NEVER:
            held.due = held.indexed + self.block_size

    def audit(self, live: Set[int]) -> None:
        self._slots.audit(live)
        assert self._held.keys() == self._slots.held.keys(), "a table without a slot, or the reverse"
        self._index.audit(self._pool.counts)
        references = Counter(block for table in self._tables for block in table)
        self._pool.audit(references, self._index.nodes.keys())
        idle = sorted(block for block in self._copies if not references[block])
        assert not idle, f"blocks to be copied into that nobody holds: {idle}"
        for handle, held in self._held.items():
            assert held.table is self._tables[held.slot], f"sequence {handle} has the table of another slot"
            assert 0 <= held.length <= held.reserved <= min(self.max_len, len(held.table) * self.block_size), (
                f"sequence {handle}: length {held.length}, reserved {held.reserved}, {len(held.table)} blocks"
            )
            written = range(held.length // self.block_size, -(-held.reserved // self.block_size))
            for block in [held.table[i] for i in written if held.reserved > held.length]:
                assert references[block] == 1, f"sequence {handle} is to write block {block}, which others hold"
                assert block not in self._index.nodes, f"sequence {handle} is to write block {block}, which is indexed"
            path = [self._index.nodes[block] for block in held.table if block in self._index.nodes]
            above = [-1, *held.table][: len(path)]
            assert [node.parent and node.parent.block for node in path] == above, (
                f"sequence {handle} with table {held.table} holds indexed blocks {[node.block for node in path]}, "
                "but not all that are above them"
            )
