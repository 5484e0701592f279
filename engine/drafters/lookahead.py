"""Lookahead decoding: the target's own passes guess beyond the text, and no second model is needed.

After Fu et al. 2024 (arXiv 2402.02057, sections 3.1 to 3.4). A window of guesses for the next positions takes part in
each pass as drafts. What the target draws behind them are better guesses (a Jacobi iteration), and each column of
guesses of successive passes is an n-gram that the target said itself. A pool keeps these n-grams. The n-grams that
begin with the text's last token are drafts of the next round.
"""

from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass, field

from engine.drafters.base import Draft, DraftBatch, Offer
from engine.drafters.guess import send_tokens
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence
from engine.trees import ROOT, is_chain

MOST_BRANCHES = 8  # n-grams that the pool keeps for one first token, the latest ones
MOST_HEADS = 4_096  # first tokens in a pool, some 6 MB at most
STRIDE = 7  # between the text's tokens that fill a window; prime to most lengths, so that neighbours do not repeat it


class Window:
    """Guesses for the positions behind the text. A level holds what one pass drew, and the oldest comes first.

    levels[l][i] stands i + l + 1 positions behind the text's first `end` tokens. It was drawn behind levels[l − 1][i].
    """

    def __init__(self) -> None:
        self.levels: list[list[int]] = []
        self.end = 0
        self._filled = 0  # tokens taken from the text so far

    def fit(self, text: Seq[int], columns: int, most_levels: int) -> None:
        """Move the window behind the text, to so many columns and levels. Guesses for positions that the text has
        reached go; tokens of the text fill the columns that have no guess."""
        while len(self.levels) > most_levels:
            self._drop_oldest()
        passed, self.end = len(text) - self.end, len(text)
        if not self.levels:
            self.levels.append([])
        for level in self.levels:
            del level[: max(0, passed)]
            level[:0] = [self._fill(text) for _ in range(-passed)]  # oldest levels went, faster than the text grew
            del level[columns:]
            level += [self._fill(text) for _ in range(columns - len(level))]

    def begin_with(self, gram: Seq[int]) -> None:
        """Guess these tokens for the first positions, as far as there are columns."""
        count = min(len(gram), len(self.levels[0]))
        self.levels[0][:count] = gram[:count]

    def take(self, drawn: Seq[int], most_levels: int) -> list[tuple[int, ...]]:
        """Add the level that the target drew behind the newest one. Returns the n-grams, a column each."""
        self.levels.append(list(drawn))
        grams = list(zip(*self.levels, strict=True))
        if len(self.levels) > most_levels:
            self._drop_oldest()
        return grams

    def _fill(self, text: Seq[int]) -> int:
        self._filled += 1
        return text[self._filled * STRIDE % len(text)]

    def _drop_oldest(self) -> None:
        """Each level becomes the one before it, and stands a position further."""
        del self.levels[0]
        self.end += 1


class NgramPool:
    """The latest n-grams by their first token."""

    def __init__(self) -> None:
        self._by_head: dict[int, dict[tuple[int, ...], None]] = {}  # oldest first

    def add(self, gram: tuple[int, ...]) -> None:
        head, rest = gram[0], gram[1:]
        known = self._by_head.pop(head, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > MOST_BRANCHES:
            del known[next(iter(known))]
        self._by_head[head] = known
        if len(self._by_head) > MOST_HEADS:
            del self._by_head[next(iter(self._by_head))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed the token, latest first."""
        return list(reversed(self._by_head.get(token, {})))


@dataclass(slots=True)
class _State:
    window: Window = field(default_factory=Window)
    pool: NgramPool = field(default_factory=NgramPool)
    most_levels: int = 1  # of the window in this round


class LookaheadDrafter:
    """Keeps a window and a pool per sequence.

    Half of a sequence's k drafts are n-grams of the pool, the others are the window. Together they are a tree. Where no
    tree can be checked, the draft is a chain: a window of one level, which begins with an n-gram of the pool.

    Drafts depend on committed tokens and on past rounds only, so every verifier stays lossless. Rounds without drafts
    delay the window.
    """

    def __init__(self, *, trees: bool = True) -> None:
        """trees: whether a round may check trees."""
        self._trees = trees
        self._states: dict[int, _State] = {}  # by handle
        self._newest: dict[int, list[int]] = {}  # by handle: nodes of the window's newest level in the latest proposal

    def offer(self, sequence: Sequence, k: int) -> Offer:
        return Offer(sequence.drafter, k, 0)

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        self._newest = {}
        drafts = [self._draft(s, k) if k else ([], []) for s, k in zip(batch.sequences, ks, strict=True)]
        if not any(tokens for tokens, _ in drafts):
            return Draft.none(len(ks))
        return Draft(
            tuple(len(tokens) for tokens, _ in drafts),
            send_tokens([tokens for tokens, _ in drafts], batch.sampler.numbers.staging),
            trees={i: shape for i, (_, parents) in enumerate(drafts) if not is_chain(shape := tuple(parents))},
            wants_drawn=True,
        )

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        newest, self._newest = self._newest, {}
        if not newest or not verdict.drawn:
            return  # nothing was proposed, or the pass failed and this is the retry without drafts
        for sequence, drawn, failed in zip(batch.sequences, verdict.drawn, verdict.non_finite, strict=True):
            if sequence.handle in newest and not failed:
                state, behind = self._states[sequence.handle], [drawn[node + 1] for node in newest[sequence.handle]]
                for gram in state.window.take(behind, state.most_levels):
                    state.pool.add(gram)

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence.handle, None)
        self._newest.pop(sequence.handle, None)

    def audit(self, live: Set[int]) -> None:
        leaked = self._states.keys() - live
        assert not leaked, f"windows are held for sequences that are gone: {sorted(leaked)}"

    def _draft(self, sequence: Sequence, k: int) -> tuple[list[int], list[int]]:
        """At most k drafts and their parents."""
        state, text = self._states.setdefault(sequence.handle, _State()), sequence.tokens
        grams = state.pool.after(text[-1])
        tree = _Tree()
        if self._trees and (sequence.coupled or sequence.verifier != "block"):
            columns, state.most_levels = window_size(k)
            for gram in grams:
                tree.add_branch(gram, k - columns * state.most_levels)
            state.window.fit(text, columns, state.most_levels)
        else:
            state.most_levels = 1
            state.window.fit(text, k, 1)
            state.window.begin_with(grams[0] if grams else ())
        self._newest[sequence.handle] = tree.add_window(state.window.levels)
        return tree.tokens, tree.parents


def window_size(k: int) -> tuple[int, int]:
    """(columns, levels) of a window that takes half of k ≥ 1 drafts. A pass gives an n-gram per column, as long as the
    window has levels."""
    levels = 1 if k < 8 else 2 if k < 24 else 3
    return max(1, k // 2 // levels), levels


class _Tree:
    """Drafts in the making. Equal beginnings share their nodes, because a verifier reaches only the first of equal
    siblings."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) → node

    def add_branch(self, gram: Seq[int], most: int) -> None:
        """Add an n-gram behind the text, until the tree has `most` nodes."""
        at = ROOT
        for token in gram:
            if (at, token) not in self._children and len(self.tokens) == most:
                return
            at = self._add(at, token)

    def add_window(self, levels: Seq[Seq[int]]) -> list[int]:
        """Add a window: the oldest level is a chain behind the text, and each further level goes on from the one before
        it, column by column. Returns the nodes of the newest level."""
        at, nodes = ROOT, list[int]()
        for token in levels[0]:
            at = self._add(at, token)
            nodes.append(at)
        for level in levels[1:]:
            nodes = [self._add(node, token) for node, token in zip(nodes, level, strict=True)]
        return nodes

    def _add(self, parent: int, token: int) -> int:
        if (parent, token) not in self._children:
            self._children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return self._children[parent, token]
