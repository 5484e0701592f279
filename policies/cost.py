"""Seconds of a round, predicted: profiled when the engine starts, corrected by the rounds that it then runs.

Rounds teach ratios of measured to profiled seconds, so that rounds which were never tried keep the profile's shape.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import combinations
from math import exp, log2
from typing import NamedTuple

import numpy as np

from policies.corrections import ANY, Corrections, HostWork
from policies.observation import FEW, WINDOW, Floats, RoundCost, Timing

# What an unmeasured machine is taken to be:
PASS_S = 0.01  # seconds of the target's pass over one token
STEP_SHARE = 0.1  # seconds of a forward of the draft model, over those of the target's pass
TOKEN_SHARE = 0.01  # seconds of a further token of a pass or forward, over those of the first one

PER_OCTAVE = 2  # kinds of rounds for each doubling of sequences or tokens: each kind needs rounds of its own
FAR = 0.1  # weight of a draft's round of twice or half the batch in a fit: it shows less than the batch's own rounds
CLOSE = 0.03  # relative error of a fit: a smaller one is no better, because measurements vary as much
FIT_STEPS = 8  # steps of a fit, which settles within them
MOST_GAP_TOKENS = 4096  # a gap costs at most as much as reading so many tokens, whatever its length is


class DraftCost:
    """Seconds of the draft model as profiled: (once, per forward, per token that it reads, for a gap), by batch.

    The cost is not affine in the batch, so each profiled batch has its own fit. Rounds of other batches only separate
    the cost of a forward from that of a token where the batch's own rounds do not.
    """

    def __init__(self, timings: Sequence[Timing], pass_s: float) -> None:
        rounds = [t for t in timings if t.forwards and t.batch and t.draft_s > 0]
        self._batches = sorted({t.batch for t in rounds}) or [1]
        self._costs = np.array([[0.0, STEP_SHARE, STEP_SHARE * TOKEN_SHARE, 0.0]]) * pass_s  # [P, 4]
        if rounds:
            self._costs = np.array([_fit_draft(rounds, batch) for batch in self._batches])
        self.cost = cache(self._cost)

    def _cost(self, batch: int) -> Floats:
        """[4] seconds. Do not write to it."""
        return np.array([np.interp(batch, self._batches, column) for column in self._costs.T])


class CostModel:
    """Predicts the cost of rounds of any batch, and learns from each round that was measured."""

    def __init__(self, max_k: int, timings: Sequence[Timing] = ()) -> None:
        self._max_k = max_k
        self._known = cache(self._cost)
        self.begin(timings)

    def begin(self, timings: Sequence[Timing]) -> None:
        """Take over a profile, and forget what rounds have taught about another one."""
        self._pass_cost = PassCost(timings)
        self._score, self._host = Corrections(), HostWork()
        self._rounds, self._due = 0, FEW  # rounds learned from, and rounds at which the next refresh is due
        self.begin_draft(self.draft_cost(timings))

    def draft_cost(self, timings: Sequence[Timing]) -> DraftCost:
        """The cost of a draft model by these rounds, guessed without any. The fit takes some 10 ms, so any thread may
        ask."""
        return DraftCost(timings, float(self._pass_cost.seconds(1, np.zeros(1))[0]))

    def begin_draft(self, cost: DraftCost) -> None:
        """Another draft model has this cost: forget what rounds have taught about the old one."""
        self._draft_cost = cost
        self._draft, self._tree = Corrections(), Corrections()
        self._known.cache_clear()

    def round_cost(self, batch: int, prefill: int) -> RoundCost:
        """The cost of rounds in which `batch` ≥ 1 sequences emit beside `prefill` tokens of prompts."""
        fine = 2 * PER_OCTAVE  # a price is told apart more finely than a kind, because it needs no rounds of its own
        return self._known(batch, round(2 ** (bucket(prefill, fine) / fine)) if prefill else 0)

    def observe(self, timing: Timing) -> None:
        """Learn from a round of the engine. Prompts' tokens cost less than drafts, so a round with prompts teaches
        nothing about the target's pass."""
        if timing.batch < 1:
            return
        (self._observe_tree if timing.branched_drafts else self._observe_chains)(timing)
        self._rounds += 1
        if self._rounds >= self._due:  # twice as many as at the last one, or half of a median's rounds are new
            self._due += min(self._due, WINDOW // 2)
            self.refresh()

    def _observe_chains(self, timing: Timing) -> None:
        batch, drafts = timing.batch, timing.drafts
        if not timing.prefill:
            profiled = self._pass_cost.round_seconds(batch, drafts, timing.depth)
            self._score.observe((bucket(batch), bucket(batch + drafts)), timing.score_s, profiled)
        if timing.forwards and not timing.has_gap:
            model, step, token, _ = self._draft_cost.cost(batch)
            predicted = model + timing.forwards * step + timing.read * token
            self._draft.observe((bucket(batch),), timing.draft_s, float(predicted))
        self._host.observe(timing)
        self._tree.skip()

    def _observe_tree(self, timing: Timing) -> None:
        """A round with trees teaches only how much longer it takes than one of chains as deep, with as many drafts."""
        if not timing.prefill and timing.host_s > 0 and not timing.has_gap:
            chains = self.round_cost(timing.batch, 0)
            took_s = timing.draft_s + timing.score_s + timing.host_s
            predicted_s = chains.of_round(timing.drafts, timing.depth, timing.forwards, timing.read)
            self._tree.observe((bucket(timing.batch),), took_s, predicted_s)

    def refresh(self) -> None:
        """Use what was observed from here on. Predicting anew takes about 0.3 ms."""
        for learned in (self._score, self._draft, self._tree, self._host):
            learned.refresh()
        self._known.cache_clear()

    @property
    def knows_trees(self) -> bool:
        """Whether enough rounds with trees were run lately to tell how much longer they take."""
        return bool(self._tree.known)

    @property
    def misfit(self) -> float:
        """By how much the profile is wrong between two kinds of rounds: their corrections' largest ratio, at least 1.
        A factor that all kinds share changes no choice, so it does not count."""
        known = [f for learned in (self._score, self._draft) for key, f in learned.known.items() if key != ANY]
        return exp(max(known) - min(known)) if known else 1.0

    def _cost(self, batch: int, prefill: int) -> RoundCost:
        evenly = self._verification(batch, prefill)
        padding = self._pass_cost.padding
        drafting_factor = self._draft.factor((bucket(batch),), self._score.factor(ANY))
        model, step, token, gap = self._draft_cost.cost(batch) * drafting_factor
        token = max(token, gap / MOST_GAP_TOKENS)
        base, drafting = self._host.seconds(batch)
        return RoundCost(
            base_s=base,
            drafting_s=drafting,
            model_s=float(model),
            step_s=float(step),
            token_s=float(token),
            # A pass costs between an even one with as many tokens and an even one with the same largest k. For an even
            # pass both are the same.
            verify_s=(1 - padding) * evenly + padding * evenly[0],
            padding_s=padding * (evenly[::batch] - evenly[0]),
            tree=max(1.0, self._tree.factor((bucket(batch),))),
            gap_tokens=float(gap / token) if gap else 0.0,
        )

    def _verification(self, batch: int, prefill: int) -> Floats:
        """[1 + batch · max_k] seconds of even passes by number of drafts, non-decreasing."""
        drafts = np.arange(1 + batch * self._max_k, dtype=np.float64)
        profiled = self._pass_cost.seconds(batch, drafts, prefill)
        tokens = drafts + (batch + prefill)
        keys = [(bucket(batch), n) for n in range(bucket(tokens[0]), bucket(tokens[-1]) + 1)]
        visited = [key for key in keys if key in self._score.known]
        if not visited:
            return profiled * self._score.factor(keys[0])
        # Between the visited numbers of tokens the factor is interpolated, so that the profile keeps its shape, steps
        # included. The factors must not make a longer pass shorter.
        places = [2.0 ** (n / PER_OCTAVE) for _, n in visited]
        factors = np.interp(tokens, places, [self._score.factor(key) for key in visited])
        return np.maximum.accumulate(profiled * factors)


class Curve(NamedTuple):
    """The target's even passes over one batch."""

    batch: int
    tokens: Floats  # [P] ascending
    seconds: Floats  # [P] non-decreasing
    slope: float  # seconds per token beyond them

    def at(self, tokens: Floats) -> Floats:
        beyond = np.maximum(tokens - self.tokens[-1], 0.0)
        return np.interp(tokens, self.tokens, self.seconds) + self.slope * beyond


class PassCost:
    """Seconds of the target's pass as profiled, by batch and tokens.

    Between two profiled batches the seconds are interpolated at the same number of tokens per sequence. A curve is
    continued in parallel to the curve of the longest passes, and that one by its last slope.
    """

    def __init__(self, timings: Sequence[Timing]) -> None:
        rounds = [t for t in timings if t.batch and not t.prefill and t.score_s > 0]
        self._curves = _curves([t for t in rounds if t.drafts == t.batch * t.depth])
        self._batches = [curve.batch for curve in self._curves]
        # Share of the additional seconds of an even pass with the same largest k that an uneven one takes.
        self.padding = self._fit_padding([t for t in rounds if t.drafts < t.batch * t.depth])
        self.round_seconds = lru_cache(maxsize=1024)(self._round_seconds)

    def seconds(self, batch: int, drafts: Floats, prefill: int = 0) -> Floats:
        """Seconds of even passes, in the shape of `drafts`."""
        above = int(np.searchsorted(self._batches, batch))
        high = self._curves[min(above, len(self._curves) - 1)]
        if above == 0 or batch >= high.batch:
            return high.at(drafts + (batch + prefill))
        low, depth = self._curves[above - 1], 1 + drafts / batch
        share = (batch - low.batch) / (high.batch - low.batch)
        return (1 - share) * low.at(low.batch * depth + prefill) + share * high.at(high.batch * depth + prefill)

    def _round_seconds(self, batch: int, drafts: int, depth: int) -> float:
        """Seconds of the pass of a round that reads no prompts. depth: its largest k."""
        own, deepest = self._bounds(batch, drafts, depth)
        return (1 - self.padding) * own + self.padding * deepest

    def _bounds(self, batch: int, drafts: int, depth: int) -> list[float]:
        """[2] seconds of an even pass with as many drafts, and of one with the same largest k."""
        return self.seconds(batch, np.array([drafts, batch * depth], np.float64)).tolist()

    def _fit_padding(self, ragged: Sequence[Timing]) -> float:
        """The median over uneven rounds of where each lies between its two bounds, weighted by their distance."""
        places: list[tuple[float, float]] = []
        for timing in ragged:
            own, deepest = self._bounds(timing.batch, timing.drafts, timing.depth)
            if deepest > own:
                places.append((min(max((timing.score_s - own) / (deepest - own), 0.0), 1.0), deepest - own))
        places.sort()
        heavier = np.cumsum([weight for _, weight in places]) * 2
        return places[int(np.searchsorted(heavier, heavier[-1] / 2))][0] if places else 0.0


def _curves(even: Sequence[Timing]) -> list[Curve]:
    """Curves in ascending order of their batch; without timings, one of an unmeasured machine.

    A pass takes no longer than another of at least as many sequences and tokens. If it was measured to take longer, it
    was interrupted, and the other measurement replaces it.
    """
    points = np.array([(t.batch, t.batch + t.drafts, t.score_s) for t in even]).reshape(-1, 3)
    batches, tokens, seconds = points.T
    curves: list[tuple[int, Floats, Floats]] = []
    for batch in np.unique(batches):
        own = np.unique(tokens[batches == batch])
        least = [seconds[(batches >= batch) & (tokens >= n)].min() for n in own]
        curves.append((int(batch), own, np.array(least)))
    curves = curves or [(1, np.ones(1), np.array([PASS_S]))]
    widest, longest, takes = max(curves, key=lambda curve: float(curve[1][-1]))
    slope = TOKEN_SHARE * takes[0] / widest
    if len(longest) > 1:
        slope = np.diff(takes)[-1] / np.diff(longest)[-1]
    continued = []
    for of, places, curve in curves:
        beyond = longest > places[-1]
        more = curve[-1] + takes[beyond] - np.interp(places[-1], longest, takes)
        continued.append(Curve(of, np.append(places, longest[beyond]), np.append(curve, more), float(slope)))
    return continued


def bucket(count: float, per_octave: int = PER_OCTAVE) -> int:
    return round(log2(count) * per_octave)


def _fit_draft(rounds: Sequence[Timing], batch: int) -> Floats:
    """[4] non-negative costs with the least absolute relative errors: a few interrupted rounds change little."""
    seconds = np.array([t.draft_s for t in rounds])
    distance = np.log2(np.array([t.batch for t in rounds]) / batch)
    design = np.array([(1, t.forwards, t.read, t.has_gap) for t in rounds]) / seconds[:, None]
    near = FAR ** np.abs(distance)
    weights = np.sqrt(near)
    for _ in range(FIT_STEPS):  # iteratively reweighted least squares
        costs = _non_negative(design * weights[:, None], weights)
        weights = np.sqrt(near / np.maximum(np.abs(design @ costs - 1), CLOSE))
    return costs


def _non_negative(design: Floats, wanted: Floats) -> Floats:
    """x ≥ 0 that minimises |design · x − wanted|.

    It is the best of the least squares over each subset of the columns: the optimum's own support is one of them.
    """
    best, least = np.zeros(design.shape[1]), float(wanted @ wanted)
    for size in range(1, design.shape[1] + 1):
        for support in combinations(range(design.shape[1]), size):
            part = np.linalg.lstsq(design[:, support], wanted, rcond=None)[0]
            rest = wanted - design[:, support] @ part
            if (part >= 0).all() and rest @ rest < least:
                least, best = float(rest @ rest), np.zeros(design.shape[1])
                best[list(support)] = part
    return best
