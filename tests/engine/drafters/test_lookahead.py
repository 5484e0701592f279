"""Lookahead decoding against windows that are kept by absolute position, and its texts in an engine."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import trees
from engine.drafters import lookahead
from engine.drafters.base import Draft
from engine.drafters.lookahead import LookaheadDrafter, NgramPool, Window, window_size
from engine.sequence import Sequence
from engine.types import VERIFIERS, Request, SamplingParams
from tests.engine.drafters.rounds import make_batch, rows
from tests.engine.driving import drive, load, make_sequence
from tests.engine.pairs import Pair

CPU = torch.device("cpu")
FEW = ((5, 9.0), (60, 9.0), (200, 9.0))  # a bias that makes texts repeat themselves
Path = tuple[int, ...]  # tokens from the text's end to a draft


def target(text: Seq[int]) -> int:
    """A target's own token: it depends on the last two."""
    return (3 * text[-1] + text[-2] ** 2 + 1) % 5


def paths(draft: Draft) -> list[Path]:
    tokens = rows(draft)[0]
    parents = draft.trees.get(0, trees.chain(len(tokens)))
    return [tuple(tokens[n] for n in trees.path(parents, node)) for node in range(len(tokens))]


def make_verdict(*drawn: list[int]) -> Any:
    """As far as this drafter looks at it."""
    return SimpleNamespace(drawn=list(drawn), non_finite=[False] * len(drawn))


def end_round(drafter: LookaheadDrafter, batch: Any, draft: Draft, text: Seq[int]) -> list[int]:
    """Observe a greedy round; returns the tokens that it emits."""
    found = paths(draft)
    emitted = [target(text)]
    while tuple(emitted) in found:
        emitted.append(target([*text, *emitted]))
    drawn = [target(text), *(target([*text, *path]) for path in found)]
    drafter.observe(batch, make_verdict(drawn))
    return emitted


class SlowLookahead:
    """Levels are kept by absolute position, so that nothing has to move when the text grows."""

    def __init__(self) -> None:
        self.levels: list[dict[int, int]] = []  # oldest first: position → guess
        self.grams: list[Path] = []  # oldest first
        self.filled = 0

    def draft(self, text: list[int], k: int, *, tree: bool) -> set[Path]:
        """The drafts of a round by their paths, which no two drafts share."""
        columns, most = window_size(k) if tree else (k, 1)
        self.levels = self.levels[-most:] or [{}]
        known = [gram[1:] for gram in reversed(self.grams) if gram[0] == text[-1]]
        for depth, level in enumerate(self.levels):
            for i in range(columns):
                position = len(text) + depth + i
                if position not in level:
                    self.filled += 1
                    level[position] = text[7 * self.filled % len(text)]
            for position in [p for p in level if not 0 <= p - len(text) - depth < columns]:
                del level[position]
        branches: dict[Path, None] = {}
        if tree:
            for gram in known:
                for path in (gram[:n] for n in range(1, len(gram) + 1)):
                    if path not in branches and len(branches) == k - columns * most:
                        break
                    branches[path] = None
        else:
            self.levels[0] |= {len(text) + i: token for i, token in enumerate(known[0] if known else ()) if i < columns}
        window = [self._path(len(text), i, depth) for depth in range(len(self.levels)) for i in range(columns)]
        return {*branches, *window}

    def learn(self, text: list[int], k: int, *, tree: bool) -> None:
        """What the target draws behind the newest level makes a new one."""
        columns, most = window_size(k) if tree else (k, 1)
        depth = len(self.levels) - 1
        new = [target([*text, *self._path(len(text), i, depth)]) for i in range(columns)]
        self.levels.append({len(text) + depth + 1 + i: token for i, token in enumerate(new)})
        for i in range(columns):
            gram = tuple(level[len(text) + n + i] for n, level in enumerate(self.levels))
            self.grams = [other for other in self.grams if other != gram] + [gram]
        self.levels = self.levels[-most:]

    def _path(self, end: int, i: int, depth: int) -> Path:
        """Down the first level to column i, then through the levels of that column."""
        first = [self.levels[0][end + n] for n in range(i + 1)]
        return (*first, *(self.levels[n][end + n + i] for n in range(1, depth + 1)))


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_those_of_a_slow_reference(seed: int, tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MOST_BRANCHES", 1000)  # the reference forgets nothing
    draw = random.Random(seed)
    drafter, slow = LookaheadDrafter(), SlowLookahead()
    sequence = make_sequence(0, [draw.randrange(5) for _ in range(draw.randint(2, 9))])
    sequence.params, sequence.verifier = SamplingParams(temperature=1.0), "match" if tree else "block"
    accepted, k = 0, 0
    for _ in range(60):
        k = draw.choice([k, draw.randint(0, 30)])  # a window changes its size, and rests
        batch = make_batch(sequence)
        draft = drafter.propose(batch, [k])
        emitted = [target(sequence.tokens)]
        if k:
            assert sorted(paths(draft)) == sorted(slow.draft(sequence.tokens, k, tree=tree))
            assert draft.ks[0] <= k
            assert tree or 0 not in draft.trees
            slow.learn(sequence.tokens, k, tree=tree)
            emitted = end_round(drafter, batch, draft, sequence.tokens)
        sequence.tokens += emitted
        accepted += len(emitted) - 1
    assert accepted > 30


def test_the_pool_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MOST_BRANCHES", 2)
    monkeypatch.setattr(lookahead, "MOST_HEADS", 2)
    pool = NgramPool()
    for gram in ((1, 5), (1, 6), (1, 5), (1, 7), (2, 8)):
        pool.add(gram)
    assert (pool.after(1), pool.after(2), pool.after(3)) == ([(7,), (5,)], [(8,)], [])
    pool.add((3, 9))
    assert (pool.after(1), pool.after(3)) == ([], [(9,)])


def drafts_of(drafter: LookaheadDrafter, sequence: Sequence, rounds: int = 4) -> list[list[Path]]:
    found = []
    for _ in range(rounds):
        batch = make_batch(sequence)
        draft = drafter.propose(batch, [8])
        found.append(paths(draft))
        sequence.tokens += end_round(drafter, batch, draft, sequence.tokens)
    return found


def test_a_sequence_that_lost_its_memory_begins_anew() -> None:
    drafter, sequence = LookaheadDrafter(), make_sequence(0, [1, 2, 3])
    first = drafts_of(drafter, sequence)
    drafter.forget(sequence)
    drafter.forget(sequence)
    drafter.audit(set())
    sequence.tokens = [1, 2, 3]
    assert drafts_of(drafter, sequence) == first
    with pytest.raises(AssertionError, match=r"\[0\]"):
        drafter.audit({1})


def test_a_round_that_is_tried_again_without_drafts_teaches_nothing() -> None:
    """Nor does the next round of others: its rows are not those of the failed round's drafts."""
    drafter, sequence, other = LookaheadDrafter(), make_sequence(0, [1, 2, 3]), make_sequence(1, [1, 2, 3])
    draft = drafter.propose(make_batch(sequence, other), [8, 8])
    drafter.observe(make_batch(sequence, other), make_verdict())
    of_others = make_batch(sequence, other)
    assert drafter.propose(of_others, [0, 1]).ks == (0, 1)
    drafter.observe(of_others, make_verdict([4, 4], [4, 4]))
    assert paths(drafter.propose(make_batch(sequence), [8])) == paths(draft)


@pytest.mark.parametrize("deterministic", [False, True])
def test_in_an_engine_texts_are_those_without_drafts(pair: Pair, deterministic: bool) -> None:
    """Every verifier in one batch: the exact texts."""
    engine = load(pair, deterministic=deterministic)
    asked = [
        Request(
            f"{verifier} at {temperature}",
            (3, 1, 4),
            SamplingParams(temperature, seed=3, max_tokens=40, ignore_eos=True, logit_bias=FEW),
            k=12,
            verifier=verifier,
            drafter="lookahead",
        )
        for verifier in VERIFIERS
        for temperature in (0.0, 0.8)
    ]
    plain = drive(engine, [replace(request, k=0, drafter=None) for request in asked])
    drafted = drive(engine, asked)
    exact = [r.id for r in asked if r.verifier == "match" or not r.params.temperature]
    assert {name: drafted.tokens[name] for name in exact} == {name: plain.tokens[name] for name in exact}
    assert drafted.accepted > 20
    assert any(part.tree for step in drafted.steps for part in step.parts) is not deterministic


def test_negative_control_a_window_that_reads_the_wrong_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are no guesses of the target are hardly ever accepted."""

    def accepted() -> int:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias=FEW)
        request = Request("r", (3, 1, 4), params, k=12, drafter="lookahead")
        return drive(load(pair), [request]).accepted

    right = accepted()
    take = Window.take
    monkeypatch.setattr(Window, "take", lambda self, drawn, most: take(self, [token + 1 for token in drawn], most))
    assert accepted() < right / 2
