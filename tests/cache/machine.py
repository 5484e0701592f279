"""Both caches against a dict, as a Hypothesis state machine.

The machine keeps the memory itself: what a position holds is all tokens up to it, as keys and values depend on all that
was attended to. Every sequence must read its own text back through its table, and every indexed block must hold what it
is found under. What the index holds is read from the cache's own nodes; everything else goes through its interface.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.paged import HIDDEN, PagedCache
from cache.prefix import PrefixNode
from cache.protocol import CacheFull, KVCache
from cache.slotted import SlottedCache

SLOTS, MAX_LEN, BLOCK, BLOCKS = 4, 9, 2, 10  # all slots at max_len would need 20 blocks, the last of each not full
WINDOW = 4  # of a cache that slides; its edge lies within a block or between two
HANDLES = st.integers(0, 5)
TOKENS = st.lists(st.integers(0, 1), max_size=MAX_LEN)
# So few that two sequences often compute the same, and go apart after it.
PROMPTS = st.builds(
    lambda zeros, length: ([0] * zeros + [1] * MAX_LEN)[:length],
    st.integers(0, 6),
    st.integers(MAX_LEN // 2, MAX_LEN),
)
SHAPES = st.lists(st.integers(-1, 3), max_size=MAX_LEN)  # of trees: parents, where they are before their node
SALTS = st.sampled_from(["", "", "", "other"])

Text = tuple[int, ...]
Place = tuple[int, int]  # (block, offset), or (slot, position)


class CacheMachine(RuleBasedStateMachine):
    """Every operation on any handle in any order, legal or not. The class counts the `steps` of all runs."""

    make: Callable[[], Any]
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.cache: KVCache = type(self).make()
        self.paged = self.cache if isinstance(self.cache, PagedCache) else None
        self.held: dict[int, list[int]] = {}  # tokens at the valid positions
        self.salts: dict[int, str] = {}
        self.committed: dict[int, int] = {}  # of the held tokens; those behind them are drafts
        self.reserved: dict[int, int] = {}  # positions that may be written
        self.window = self.cache.window
        self.left: dict[int, int] = {}  # positions that the sequence's window has left
        self.indexed: dict[int, int] = {}  # positions whose blocks it published or found, while the index has them all
        # Sequences that met their text in a block of another's, were discarded, or lost a block above theirs.
        self.closed: set[int] = set()
        self.memory: dict[Place, Text] = {}
        self.distrusted: set[Place] = set()
        self.withheld: set[int] = set()  # blocks, or slots
        self.published: set[tuple[str, Text]] = set()  # what may be found at all

    # What the cache shows of itself.

    def place(self, handle: int, position: int) -> Place:
        if self.paged is None:
            return self.cache.slot(handle), position
        block = self.paged.table(handle)[position // BLOCK]
        return block, position % BLOCK

    def read(self, place: Place) -> Text:
        """Return what a pass would read there, as if all waiting copies were done."""
        pending = self.paged._copies if self.paged else {}
        return self.memory.get((pending.get(place[0], place[0]), place[1]), ())

    def index(self) -> dict[tuple[str, Text], int]:
        """Return the indexed blocks by salt and by the text that ends with them."""
        found: dict[tuple[str, Text], int] = {}
        if self.paged is not None:
            roots = self.paged._index._roots
            paths: list[tuple[str, Text, PrefixNode]] = [(salt, (), root) for salt, root in roots.items()]
            for salt, text, node in paths:  # grows while it is read
                paths += [(salt, text + key, child) for key, child in node.children.items()]
                if text:
                    found[salt, text] = node.block
        return found

    def findable(self, tokens: list[int], salt: str) -> int:
        index = self.index()
        length = 0
        while (salt, tuple(tokens[: length + BLOCK])) in index and length + BLOCK < len(tokens):
            length += BLOCK
        return length

    def expected_room(self, handle: int) -> int:
        length = len(self.held[handle])
        if self.paged is None:
            return MAX_LEN - length
        references = self.references()
        blocks, table = BLOCKS - len(references) - len(self.withheld), self.paged.table(handle)
        if length % BLOCK:
            last = table[length // BLOCK]
            blocks -= references[last] > 1 or last in self.index().values()
        return 0 if blocks < 0 else min(MAX_LEN, (len(table) + blocks) * BLOCK) - length

    def references(self) -> Counter[int]:
        assert self.paged is not None
        return Counter(block for h in self.held for block in self.paged.table(h) if block != HIDDEN)

    def first_seen(self, length: int) -> int:
        """The first position of the first block that a query at `length` sees."""
        return 0 if self.window is None else max(0, length - self.window + 1) // BLOCK * BLOCK

    @property
    def free_slots(self) -> int:
        return SLOTS - len(self.held) - (len(self.withheld) if self.paged is None else 0)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.held)), label="handle")

    # What can be done.

    @rule(handle=HANDLES, prompt=TOKENS, salt=SALTS)
    def allocate(self, handle: int, prompt: list[int], salt: str) -> None:
        if handle in self.held:
            with pytest.raises(KeyError):
                self.cache.allocate(handle, prompt, salt)
        elif not self.free_slots:
            with pytest.raises(CacheFull):
                self.cache.allocate(handle, prompt, salt)
        else:
            self.admit(handle, prompt, salt)

    def admit(self, handle: int, prompt: list[int], salt: str) -> None:
        taken = {self.cache.slot(h) for h in self.held} | (self.withheld if self.paged is None else set())
        slot = min(set(range(SLOTS)) - taken)
        expected = self.findable(prompt, salt)
        assert self.cache.allocate(handle, prompt, salt) == expected, "not the longest prefix that is there"
        assert self.cache.slot(handle) == slot
        self.held[handle], self.salts[handle] = prompt[:expected], salt
        self.committed[handle] = self.reserved[handle] = self.indexed[handle] = expected
        self.left[handle] = self.first_seen(expected)

    @precondition(lambda self: self.free_slots)
    @rule(prompt=PROMPTS, salt=SALTS, commit=st.booleans())
    def begin(self, prompt: list[int], salt: str, commit: bool) -> None:
        """A prompt arrives and is read as far as there is memory. This fills the cache."""
        handle = min(set(range(6)) - self.held.keys())
        self.admit(handle, prompt, salt)
        self.feed(handle, prompt[len(self.held[handle]) :])
        if commit:
            self.publish(handle, len(self.held[handle]), [])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, MAX_LEN))
    def reserve(self, data: st.DataObject, count: int) -> None:
        handle = self.pick(data)
        room = self.cache.room(handle)
        assert room == self.expected_room(handle)
        if count > room:
            before = self.index(), [self.cache.room(h) for h in self.held], self.paged and dict(self.paged._copies)
            with pytest.raises(CacheFull):
                self.cache.reserve(handle, count)
            after = self.index(), [self.cache.room(h) for h in self.held], self.paged and dict(self.paged._copies)
            assert before == after, "a refusal changed something"
        else:
            self.cache.reserve(handle, count)
            self.reserved[handle] = max(self.reserved[handle], len(self.held[handle]) + count)
            self.note_evictions()

    def note_evictions(self) -> None:
        """Without a window no sequence loses a block above its own."""
        index = self.index()
        for handle, indexed in self.indexed.items():
            chain = [(self.salts[handle], tuple(self.held[handle][:n])) for n in range(BLOCK, indexed + 1, BLOCK)]
            if not index.keys() >= set(chain):
                assert self.window is not None, f"{chain} was evicted while sequence {handle} held it"
                self.closed.add(handle)
                self.indexed[handle] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=TOKENS, commit=st.booleans())
    def grow(self, data: st.DataObject, tokens: list[int], commit: bool) -> None:
        """A pass writes reserved positions, or as many as there is room for. They are drafts unless `commit`."""
        handle = self.pick(data)
        self.feed(handle, tokens)
        if commit:
            self.publish(handle, len(self.held[handle]), [])

    def feed(self, handle: int, tokens: list[int]) -> None:
        text = self.held[handle]
        if self.reserved[handle] == len(text):
            count = min(len(tokens), self.cache.room(handle))
            self.cache.reserve(handle, count)
            self.reserved[handle] += count
            self.note_evictions()
        self.do_copies()
        for token in tokens[: self.reserved[handle] - len(text)]:
            text.append(token)
            place = self.place(handle, len(text) - 1)
            self.memory[place] = tuple(text)
            self.distrusted.discard(place)
            self.cache.extend(handle, 1)

    def do_copies(self) -> None:
        if self.paged is None:
            return
        copies = list(self.paged.take_copies())
        at_once = {(new, i): self.memory.get((old, i), ()) for old, new in copies for i in range(BLOCK)}
        for old, new in copies:
            for i in range(BLOCK):
                self.memory[new, i] = self.memory.get((old, i), ())
                (self.distrusted.add if (old, i) in self.distrusted else self.distrusted.discard)((new, i))
        assert {place: self.memory[place] for place in at_once} == at_once, "copies depend on their order"
        assert not list(self.paged.take_copies())

    @precondition(lambda self: self.held)
    @rule(data=st.data(), parents=SHAPES, tokens=TOKENS, commit=st.booleans())
    def tree(self, data: st.DataObject, parents: list[int], tokens: list[int], commit: bool) -> None:
        """A pass writes a tree of drafts. One path stays, and moves to the front."""
        handle = self.pick(data)
        text = self.held[handle]
        count = min(len(parents), len(tokens), self.cache.room(handle))
        self.cache.reserve(handle, count)
        self.note_evictions()
        self.do_copies()
        places = [self.place(handle, len(text) + node) for node in range(count)]
        paths: list[list[int]] = []
        for node, place in enumerate(places):
            parent = min(parents[node], node - 1)
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            self.memory[place] = (*text, *(tokens[n] for n in paths[node]))
            self.distrusted.discard(place)
        self.cache.extend(handle, count)
        path = data.draw(st.sampled_from([[], *paths]), label="accepted")
        assert not count or self.cache.writable(handle, len(text)), "what others can read would be written"
        self.memory |= {places[i]: self.memory[places[node]] for i, node in enumerate(path)}
        text += [tokens[node] for node in path]
        self.cache.truncate_to(handle, len(text))
        self.reserved[handle] = len(text)
        if not text:
            self.closed.discard(handle)
        if commit:
            self.publish(handle, len(text), [])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ask_for_what_is_not_there(self, data: st.DataObject) -> None:
        handle, other = self.pick(data), self.pick(data)
        length = len(self.held[handle])
        limit = self.reserved[handle] if self.paged else MAX_LEN
        with pytest.raises(ValueError, match="cannot extend"):
            self.cache.extend(handle, limit - length + 1)
        for wrong in (-1, length + 1):
            with pytest.raises(ValueError, match="cannot truncate"):
                self.cache.truncate_to(handle, wrong)
            with pytest.raises(ValueError, match="cannot fork"):
                self.cache.fork(handle, other, wrong)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        length = len(self.held[handle]) - data.draw(st.integers(0, len(self.held[handle])), label="fewer")
        if length and self.first_seen(length) < self.left[handle]:
            with pytest.raises(ValueError, match="its window has left"):
                self.cache.truncate_to(handle, length)
            return
        self.cache.truncate_to(handle, length)
        del self.held[handle][length:]
        self.indexed[handle] = min(self.indexed[handle], length // BLOCK * BLOCK)
        self.reserved[handle] = length
        self.committed[handle] = min(self.committed[handle], length)
        if not length:
            self.closed.discard(handle)
            self.left[handle] = 0

    @precondition(lambda self: self.held and self.window)
    @rule(data=st.data(), tokens=TOKENS)
    def go_on(self, data: st.DataObject, tokens: list[int]) -> None:
        """A sequence commits one token after the other, and its window moves on."""
        handle = self.pick(data)
        for token in tokens:
            self.feed(handle, [token])
            self.publish(handle, len(self.held[handle]), [])
            self.slide_to(handle, len(self.held[handle]))

    @precondition(lambda self: self.held and self.window)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        self.slide_to(handle, data.draw(st.integers(0, self.committed[handle]), label="length"))

    def slide_to(self, handle: int, length: int) -> None:
        """The memory that no query behind the committed tokens sees is freed."""
        left = max(self.left[handle], self.first_seen(length))
        assert self.cache.unseen(handle, length) == left - self.left[handle]
        self.cache.slide(handle, length)
        self.left[handle] = left
        if left > self.indexed[handle]:
            self.closed.add(handle)

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.permutations(sorted(self.held)), label="parent, child, …")[:2]
        length = len(self.held[parent]) - data.draw(st.integers(0, len(self.held[parent])), label="fewer")
        before = len(self.held[child])
        shared = self.paged is not None and length > before and self.salts[parent] == self.salts[child]
        shared = shared and self.first_seen(length) >= self.left[parent]
        assert self.cache.fork(parent, child, length) == (length if shared else before)
        if shared:
            self.held[child] = self.held[parent][:length]
            self.committed[child] = min(self.committed[parent], length)
            self.left[child] = self.left[parent]
            self.indexed[child] = min(self.indexed[parent], length // BLOCK * BLOCK)
            self.reserved[child], self.reserved[parent] = length, len(self.held[parent])
            (self.closed.add if parent in self.closed else self.closed.discard)(child)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), beyond=TOKENS)
    def commit(self, data: st.DataObject, beyond: list[int]) -> None:
        """Commit the first drafts. After all drafts there may be tokens without a position."""
        handle = self.pick(data)
        count = data.draw(st.integers(self.committed[handle], len(self.held[handle])), label="committed")
        self.publish(handle, count, beyond if count == len(self.held[handle]) else [])

    def publish(self, handle: int, count: int, beyond: list[int]) -> None:
        self.committed[handle] = count
        text, salt, index = tuple(self.held[handle][:count]), self.salts[handle], self.index()
        prefixes = [text[:n] for n in range(BLOCK, count + 1, BLOCK)]
        self.cache.publish(handle, [*text, *beyond])
        if self.paged is None or handle in self.closed:
            assert self.index() == index
            return
        self.published |= {(salt, prefix) for prefix in prefixes}
        for prefix, block in zip(prefixes, self.paged.table(handle), strict=False):
            if block == HIDDEN:
                assert (salt, prefix) in index
                continue
            if index.get((salt, prefix), block) != block:
                self.closed.add(handle)
                return
            assert self.index().get((salt, prefix)) == block, "a full committed block is not indexed"
            self.indexed[handle] = max(self.indexed[handle], len(prefix))

    @rule(handle=HANDLES)
    def release(self, handle: int) -> None:
        self.cache.release(handle)
        self.gone(handle)

    def gone(self, handle: int) -> None:
        for facts in (self.held, self.salts, self.committed, self.reserved, self.left, self.indexed):
            facts.pop(handle, None)
        self.closed.discard(handle)
        self.cache.audit(self.held.keys())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """A sequence that leaves and comes back finds what it indexed."""
        handle = self.pick(data)
        text, salt, index = self.held[handle][: self.committed[handle]], self.salts[handle], self.index()
        self.publish(handle, len(text), [])
        own = 0 if self.paged is None or handle in self.closed else max(0, len(text) - 1) // BLOCK * BLOCK
        self.release(handle)
        assert self.index().items() >= index.items()
        self.admit(handle, text, salt)
        assert len(self.held[handle]) >= own

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.distrust(self.pick(data))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """No sequence gets the memory that only this sequence held before `restore`."""
        handle = self.pick(data)
        self.distrust(handle)
        self.withheld |= {self.cache.slot(handle)} if self.paged is None else set(self.paged.owned(handle))
        self.cache.quarantine(handle)
        self.gone(handle)

    @rule()
    def restore(self) -> None:
        self.cache.restore()
        self.withheld.clear()

    def distrust(self, handle: int) -> None:
        found = set(self.index().values())
        related = {h for h in self.held if self.paged is not None and self.related(handle, h)}
        self.cache.discard(handle)
        if self.paged is not None and self.paged.table(handle):
            self.withheld |= found - set(self.index().values()) - self.references().keys()
            self.closed |= related
            self.indexed |= dict.fromkeys(related, 0)
            self.distrusted |= {self.place(handle, n) for n in range(self.left[handle], len(self.held[handle]))}

    def related(self, one: int, other: int) -> bool:
        """Whether two sequences share a block, or began with the same indexed block."""
        assert self.paged is not None
        blocks = set(self.paged.table(one)) - {HIDDEN}
        beginning = self.beginning(one)
        return not blocks.isdisjoint(self.paged.table(other)) or bool(beginning and beginning == self.beginning(other))

    def beginning(self, handle: int) -> tuple[str, Text] | None:
        """The first indexed block that the sequence computed from, by what it is found under. A rollback into that
        block leaves it in the table, though the sequence has no full block then."""
        assert self.paged is not None
        seen = [block for block in self.paged.table(handle) if block != HIDDEN][:1]
        for (salt, text), block in self.index().items():
            if block in seen:
                return salt, text[:BLOCK]
        return (self.salts[handle], tuple(self.held[handle][:BLOCK])) if self.indexed[handle] else None

    # What must hold.

    @invariant()
    def holds(self) -> None:
        type(self).steps += 1
        self.adds_up()
        self.everyone_reads_its_own_text()
        self.what_is_found_is_what_was_published()

    def adds_up(self) -> None:
        self.cache.audit(self.held.keys())
        assert self.cache.free_slots == self.free_slots
        assert self.cache.withheld == self.withheld
        assert {h for h in range(6) if self.cache.holds(h)} == self.held.keys()
        assert {h: self.cache.length(h) for h in self.held} == {h: len(text) for h, text in self.held.items()}
        slots = [self.cache.slot(h) for h in self.held]
        assert len(set(slots)) == len(slots)
        assert all(0 <= s < SLOTS for s in slots)
        if self.paged is not None:
            references, indexed = self.references(), set(self.index().values())
            assert self.paged.used_blocks == len(references) + len(self.withheld)
            for h in self.held:
                assert self.paged.slot_table(self.cache.slot(h)) == self.paged.table(h)
                assert self.paged.owned(h) == [b for b in self.paged.table(h) if references[b] == 1]
                for start in {self.left[h], len(self.held[h])}:
                    written = self.paged.table(h)[start // BLOCK :]
                    alone = all(references[b] == 1 and b not in indexed for b in written)
                    assert self.cache.writable(h, start) == alone
                entries = self.left[h] // BLOCK
                assert [b == HIDDEN for b in self.paged.table(h)[:entries]] == [True] * entries
                assert HIDDEN not in self.paged.table(h)[entries:]
            assert all(self.paged.slot_table(s) == [] for s in set(range(SLOTS)) - set(slots))

    def everyone_reads_its_own_text(self) -> None:
        for handle, text in self.held.items():
            seen = range(self.left[handle], len(text))
            read = [self.read(self.place(handle, n)) for n in seen]
            assert read == [tuple(text[: n + 1]) for n in seen], f"sequence {handle} reads another's memory"

    def what_is_found_is_what_was_published(self) -> None:
        for (salt, text), block in self.index().items():
            assert (salt, text) in self.published, f"{text} was not committed under {salt!r}"
            places = [(block, n) for n in range(BLOCK)]
            assert [self.memory.get(p, ()) for p in places] == [
                text[:n] for n in range(len(text) - BLOCK + 1, len(text) + 1)
            ]
            assert not self.distrusted.intersection(places), f"{text} is found, and was discarded"


class SlottedMachine(CacheMachine):
    @staticmethod
    def make() -> KVCache:
        return SlottedCache(SLOTS, MAX_LEN)


class PagedMachine(CacheMachine):
    @staticmethod
    def make() -> KVCache:
        return PagedCache(SLOTS, MAX_LEN, BLOCK, BLOCKS, prefixes=True)


class SlidingMachine(CacheMachine):
    @staticmethod
    def make() -> KVCache:
        return PagedCache(SLOTS, MAX_LEN, BLOCK, BLOCKS, prefixes=True, window=WINDOW)
