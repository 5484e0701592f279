"""Suffix decoding against a search of the whole text, and which outputs a request may be guessed from."""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import trees
from engine.drafters import indexed_text
from engine.drafters.finished_outputs import FinishedOutputs
from engine.drafters.indexed_text import IndexedText
from engine.drafters.suffix import Suffix, SuffixDrafter
from engine.sequence import Sequence
from engine.types import Request, SamplingParams, Verifier
from tests.engine.drafters.grown import Path, all_values, check_filled, check_grown, shapes
from tests.engine.drafters.rounds import make_batch, make_verdict, play, rows
from tests.engine.driving import drive, load, make_sequence
from tests.engine.pairs import Pair

CPU = torch.device("cpu")
TEXT = st.lists(st.integers(0, 2), max_size=30)
OUTPUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=4)


def suffix(own: Seq[int], outputs: Seq[Seq[int]]) -> Suffix:
    shared = IndexedText()
    for output in outputs:
        for token in output:
            shared.push(token)
        shared.end_document()
    guesser = Suffix(lambda: shared)
    for token in own:
        guesser.push(token)
    return guesser


class SlowSearch:
    """The promise, from the texts alone: every place and every suffix is looked at."""

    def __init__(self, own: list[int], outputs: Seq[list[int]], candidates: int) -> None:
        self.own = own
        places = [place for texts in ([own], outputs) for place in self._latest(texts, candidates)]
        self.length = max((self._agreement(*place) for place in places), default=0)
        self.places = [place for place in places if self._agreement(*place) == self.length]

    def _agreement(self, text: list[int], end: int) -> int:
        length = 0
        while length < min(end, len(self.own), 32) and text[end - 1 - length] == self.own[-1 - length]:
            length += 1
        return length

    def _latest(self, texts: Seq[list[int]], candidates: int) -> list[tuple[list[int], int]]:
        """The latest occurrences of the last three tokens or, if there are none, of the last one."""
        ends = [(text, end) for text in texts for end in range(1, len(text) + (text is not self.own))]
        for run in (3, 1):
            found = [place for place in ends if self._agreement(*place) >= run]
            if found:
                return found[::-1][:candidates]
        return []

    def next_token(self, text: list[int], end: int, path: Path) -> int | None:
        copy = [*text, *path] if text is self.own else text
        return copy[end + len(path)] if end + len(path) < len(copy) else None

    def children(self, path: Path) -> list[tuple[int, float]]:
        """The most frequent first; among equals in the order of the places."""
        if len(path) == 4 * self.length:
            return []
        places = [p for p in self.places if all(self.next_token(*p, path[:i]) == path[i] for i in range(len(path)))]
        counts = Counter(token for p in places if (token := self.next_token(*p, path)) is not None)
        return [(token, count / len(places)) for token, count in counts.most_common()]

    def chain(self, k: int) -> list[int]:
        path: Path = ()
        value = 1.0
        while len(path) < k and (children := self.children(path)):
            value *= children[0][1]
            if value < 0.05:
                break
            path = (*path, children[0][0])
        return list(path)


@pytest.mark.parametrize("candidates", [32, 2])
def test_guesses_are_those_of_a_search_of_the_whole_text(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    monkeypatch.setattr(indexed_text, "CANDIDATES", candidates)

    @given(TEXT, OUTPUTS, st.integers(0, 12), shapes())
    @settings(deadline=None, derandomize=True, max_examples=150)
    def check(own: list[int], outputs: list[list[int]], size: int, shape: trees.Parents) -> None:
        guesser, search = suffix(own, outputs), SlowSearch(own, outputs, candidates)
        assert guesser.guess(size) == search.chain(size)
        tree = guesser.guess_tree(size)
        check_grown(tree, size, all_values(search.children))
        assert max(trees.depths(tree[1]), default=0) <= 4 * search.length
        assert bool(tree[0]) == bool(guesser.guess(size))
        check_filled(guesser.guess_tree(len(shape), shape), shape, search.children)
        assert guesser.guess_tree(size) == tree  # guessing changes nothing

    check()


def test_a_match_is_counted_up_to_32_tokens() -> None:
    own = [*range(40), 90, *range(40), 91, *range(1, 40)]
    assert suffix(own, ()).guess(1) == [91]  # the later occurrence, although the earlier one agrees as long
    assert suffix([5, *range(20), 90, 6, *range(20), 91, 5, *range(20)], ()).guess(1) == [90]  # the longer match


@pytest.mark.parametrize(
    ("own", "outputs", "tokens", "parents"),
    [
        ([1, 2, 3, 9, 1, 2, 3], (), [9, 1, 2, 3], (-1, 0, 1, 2)),
        ([7, 7, 7], (), [7] * 4, (-1, 0, 1, 2)),  # the copy goes on with the draft
        ([5, 1, 8, 1, 8, 1, 9, 4, 1], (), [8, 1, 9, 9], (-1, 0, 1, -1)),  # 8 twice, 9 once
        ([5, 1, 8], ([4, 8, 2], [4, 8, 3]), [3, 2], (-1, -1)),  # the later output first
        ([5, 1, 8], ([4, 8], [4, 8]), [], ()),  # an output ends there
        ([7] * 12, ([7], [7, 8]), [7] * 4, (-1, 0, 1, 2)),  # outputs that are shorter than the match
        ([1, 2], (), [], ()),
        ([], ([1],), [], ()),
    ],
)
def test_trees(own: list[int], outputs: Seq[list[int]], tokens: list[int], parents: trees.Parents) -> None:
    assert suffix(own, outputs).guess_tree(4) == (tokens, parents)


# --- finished outputs ------------------------------------------------------------------------------------------------


ADDED = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=7)), max_size=12)


@given(ADDED, st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=4))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_the_latest_outputs_are_held(added: list[tuple[str, list[int]]], bound: int, end: list[int]) -> None:
    outputs, kept = FinishedOutputs(bound), list[tuple[str, list[int]]]()
    for salt, output in added:
        outputs.add(salt, output)
        outputs.audit()
        kept += [(salt, output[-bound:])] if output and bound else []
        while sum(len(output) for _, output in kept) > bound:
            kept.pop(0)
    for salt in "ab":
        text = outputs.text(salt)
        expected = [token for owner, output in kept if owner == salt for token in (*output, -1)]
        assert ([] if text is None else text.tokens) == expected
        assert text is None or text.tokens  # nothing is kept for a salt without outputs
        fresh = suffix([], [output for owner, output in kept if owner == salt])._find_shared()
        assert fresh is not None
        found = [] if text is None else text.occurrences(end)
        assert found == fresh.occurrences(end)
        assert text is None or text._ends.keys() == fresh._ends.keys()


def test_an_audit_finds_a_wrong_book() -> None:
    outputs = FinishedOutputs(10)
    outputs.add("a", [1, 2])
    text = outputs.text("a")
    assert text is not None
    text.push(3)
    with pytest.raises(AssertionError, match="tokens are held"):
        outputs.audit()


def ended(drafter: SuffixDrafter, handle: int, output: Seq[int], salt: str = "") -> Sequence:
    """A request that was guessed for, and has ended with this output."""
    sequence = salted(handle, [50], salt)
    sequence.start()
    drafter.offer(sequence, 1)
    sequence.tokens += output
    sequence.finish("stop")
    drafter.forget(sequence)
    return sequence


def salted(handle: int, tokens: Seq[int], salt: str = "", verifier: Verifier = "match") -> Sequence:
    sequence = make_sequence(handle, tokens)
    sequence.cache_salt, sequence.verifier, sequence.drafter = salt, verifier, "suffix"
    return sequence


def proposed(drafter: SuffixDrafter, sequence: Sequence, k: int = 3) -> list[int]:
    return rows(drafter.propose(make_batch(sequence), [k]))[0]


def test_a_tenant_sees_its_own_outputs_only() -> None:
    drafter = SuffixDrafter(100)
    ended(drafter, 0, [1, 2, 3, 4], salt="a")
    ended(drafter, 1, [1, 2, 8, 9], salt="b")
    assert proposed(drafter, salted(2, [7, 1, 2], salt="a")) == [3, 4]
    assert proposed(drafter, salted(3, [7, 1, 2], salt="b")) == [8, 9]
    assert proposed(drafter, salted(4, [7, 1, 2], salt="c")) == []
    assert proposed(drafter, salted(5, [7, 1, 2])) == []


@pytest.mark.parametrize(("verifier", "guess"), [("match", [3, 4]), ("rejection", []), ("block", [])])
def test_a_text_that_depends_on_its_drafts_gets_none_from_other_requests(verifier: Verifier, guess: list[int]) -> None:
    drafter = SuffixDrafter(100)
    ended(drafter, 0, [1, 2, 3, 4])
    assert proposed(drafter, salted(1, [7, 1, 2], verifier=verifier)) == guess
    assert proposed(drafter, salted(2, [1, 2, 5, 1, 2], verifier=verifier), 1) == [5]  # the longer match is its own


def test_prompts_are_not_kept() -> None:
    drafter = SuffixDrafter(100)
    ended(drafter, 0, [1, 2])
    assert proposed(drafter, salted(1, [7, 50])) == []


def test_an_output_counts_once_and_only_when_it_has_ended() -> None:
    drafter = SuffixDrafter(100)
    sequence = salted(0, [50])
    sequence.start()
    drafter.offer(sequence, 1)
    sequence.tokens += [1, 2]
    sequence.preempt()
    drafter.forget(sequence)
    drafter.audit(set())
    assert drafter._outputs.text("") is None
    sequence.start()
    drafter.offer(sequence, 1)
    sequence.tokens += [3]
    sequence.finish("length")
    for _ in range(2):
        drafter.forget(sequence)
        text = drafter._outputs.text("")
        assert text is not None
        assert text.tokens == [1, 2, 3, -1]
    drafter.audit(set())


def test_a_request_with_another_drafter_leaves_nothing() -> None:
    drafter = SuffixDrafter(100)
    sequence = salted(0, [50])
    sequence.start()
    sequence.tokens += [1, 2]
    sequence.finish("stop")
    drafter.forget(sequence)
    assert drafter._outputs.text("") is None


# --- rounds ----------------------------------------------------------------------------------------------------------


def test_a_repeated_output_is_known_from_its_first_tokens() -> None:
    drafter, output = SuffixDrafter(100), [*range(60, 90)]
    ended(drafter, 0, output)
    played = play(drafter, salted(1, [50, 51]), output, k=8)
    assert sum(accepted for _, accepted in played) >= 24
    assert len(played) <= 6
    assert not any(accepted for _, accepted in play(SuffixDrafter(0), salted(1, [50, 51]), output, k=8))


def test_misleading_text_is_soon_left_alone() -> None:
    """Every fourth token is new, so that each match is wrong about what comes next."""
    output = [token for i in range(100) for token in (1, 2, 3, 100 + i)]
    played = play(SuffixDrafter(100), salted(0, [1, 2, 3, 9]), output, k=1)
    wrong = [i for i, (offered, accepted) in enumerate(played) if offered and not accepted]
    assert 2 <= len(wrong) < len(played) / 2


def test_only_a_longer_match_than_the_wrong_one_is_tried_in_a_pause() -> None:
    drafter, sequence = SuffixDrafter(100), salted(0, [1, 2, 3, 4, 5, 6, 20, 1])
    # Each time what is proposed and what the target says instead: it is always wrong.
    told = [([2], 4), ([], 30), ([], 5), ([6], 1), ([], 4), ([30], 40)]
    for offered, token in told:
        batch = make_batch(sequence)
        assert rows(drafter.propose(batch, [1])) == [offered]
        drafter.observe(batch, make_verdict(0))
        sequence.tokens.append(token)


@pytest.mark.parametrize(("bound", "salt", "helped"), [(1000, "a", True), (0, "a", False), (1000, "b", False)])
def test_an_engine_drafts_from_earlier_outputs(pair: Pair, bound: int, salt: str, helped: bool) -> None:
    engine = load(pair, suffix_tokens=bound)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    first = Request("first", (3, 1, 4, 1, 5), params, k=4, drafter="suffix", cache_salt="a")
    runs = [drive(engine, [request]) for request in (first, replace(first, id="second", cache_salt=salt))]
    assert runs[0].tokens["first"] == runs[1].tokens["second"]
    records = [run.received[name].record for run, name in zip(runs, ("first", "second"), strict=True)]
    accepted = [sum(record.column("accepted")) for record in records if record is not None]
    assert (accepted[1] >= accepted[0] + 8) == helped
    engine.drafter.audit(set())
