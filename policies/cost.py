"""Seconds of a round, predicted: profiled when the engine starts, corrected by the rounds that it then runs.

Rounds teach ratios of measured to profiled seconds, so that rounds which were never tried keep the profile's shape.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import exp, log2
from typing import NamedTuple

import numpy as np

from policies.corrections import ANY, Corrections, HostWork
from policies.draft_cost import STEP_SHARE, DraftCost
from policies.observation import FEW, UNREAD, WINDOW, Floats, RoundCost, Timing

PASS_S = 0.01  # seconds of the target's pass over one token on an unmeasured machine


class CostModel:
    """Predicts the cost of rounds of any batch, and learns from each round that was measured."""

    def __init__(self, depth: int, timings: Sequence[Timing] = ()) -> None:
        self._depth = depth
        self._known = cache(self._cost)
        self.begin(timings)

    def begin(self, timings: Sequence[Timing]) -> None:
        """Take over a profile, and forget what rounds have taught about another one."""
        self._pass_cost = PassCost(timings)
        self._score, self._host = Corrections(), HostWork()
        self._rounds = 0  # learned from
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
        return self._known(batch, round(2 ** (bucket(prefill, 4) / 4)) if prefill else 0)

    def observe(self, timing: Timing) -> None:
        """Learn from a round of the engine. Prompts' tokens cost less than drafts, so a round with prompts teaches
        nothing about the target's pass."""
        if timing.batch < 1:
            return
        if timing.siblings:
            self._observe_tree(timing)
        else:
            self._observe_chains(timing)
        self._rounds += 1
        if self._rounds % (WINDOW // 2) == 0 or self._rounds in (FEW, 2 * FEW):
            self.refresh()

    def _observe_chains(self, timing: Timing) -> None:
        batch, drafts = timing.batch, timing.drafts
        if not timing.prefill:
            profiled = self._pass_cost.round_seconds(batch, drafts, timing.depth)
            self._score.observe((bucket(batch), bucket(batch + drafts)), timing.score_s, profiled)
        if timing.forwards and timing.read <= UNREAD * drafts:  # otherwise it shows how the model reads a prompt
            model, step, token = self._draft_cost.cost(batch)
            predicted = model + timing.forwards * step + timing.read * token
            self._draft.observe((bucket(batch),), timing.draft_s, float(predicted))
        self._host.observe(timing)
        self._tree.add(0.0)  # a round of another kind

    def _observe_tree(self, timing: Timing) -> None:
        """A round with trees teaches only how much longer it takes than one of chains as deep, with as many drafts."""
        if not timing.prefill and timing.rest_s > 0 and timing.read <= UNREAD * timing.drafts:
            chains = self.round_cost(timing.batch, 0)
            took_s = timing.draft_s + timing.score_s + timing.rest_s
            predicted_s = chains.seconds(timing.drafts, timing.depth, timing.forwards, timing.read)
            self._tree.observe((bucket(timing.batch),), took_s, predicted_s)

    def refresh(self) -> None:
        """Use what was observed from here on. Predicting anew takes about 0.3 ms."""
        for learned in (self._score, self._draft, self._tree, self._host):
            learned.refresh()
        self._known.cache_clear()

    @property
    def misfit(self) -> float:
        """How many times dearer than another kind of round the profile has taken one, wrongly, at least 1. A factor
        that all kinds share does not count: it changes no choice."""
        known = [f for learned in (self._score, self._draft) for key, f in learned.known.items() if key != ANY]
        return exp(max(known) - min(known)) if known else 1.0

    def _cost(self, batch: int, prefill: int) -> RoundCost:
        evenly = self._verification(batch, prefill)
        padding = self._pass_cost.padding
        drafting_factor = self._draft.factor((bucket(batch),), self._score.factor(ANY))
        model, step, token = self._draft_cost.cost(batch) * drafting_factor
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
        )

    def _verification(self, batch: int, prefill: int) -> Floats:
        """[1 + batch · depth] seconds of even passes by number of drafts, non-decreasing."""
        drafts = np.arange(1 + batch * self._depth, dtype=np.float64)
        profiled = self._pass_cost.seconds(batch, drafts, prefill)
        tokens = drafts + (batch + prefill)
        keys = [(bucket(batch), n) for n in range(bucket(tokens[0]), bucket(tokens[-1]) + 1)]
        visited = [key for key in keys if key in self._score.known]
        if not visited:
            return profiled * self._score.factor(keys[0])
        # Between the visited numbers of tokens the factor is interpolated, so that the profile keeps its shape, steps
        # included. The factors must not make a longer pass shorter.
        places = [2.0 ** (n / 2) for _, n in visited]
        factors = np.interp(tokens, places, [self._score.factor(key) for key in visited])
        return np.maximum.accumulate(profiled * factors)


class Curve(NamedTuple):
    """The target's even passes over one batch, and beyond the measured ones as far as any pass may go."""

    batch: int
    tokens: Floats  # [P] ascending
    seconds: Floats  # [P] non-decreasing

    def at(self, tokens: Floats) -> Floats:
        return np.interp(tokens, self.tokens, self.seconds)


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
        self.padding = 0.0
        self.padding = self._fit_padding([t for t in rounds if t.drafts < t.batch * t.depth])
        self.round_seconds = lru_cache(WINDOW**2)(self._round_seconds)

    def seconds(self, batch: int, drafts: Floats, prefill: int = 0) -> Floats:
        """Seconds of even passes, in the shape of `drafts`."""
        above = int(np.searchsorted(self._batches, batch))
        if above in (0, len(self._curves)) and batch not in self._batches:
            return self._curves[min(above, len(self._curves) - 1)].at(drafts + (batch + prefill))
        high = self._curves[above]
        depth = 1 + drafts / batch
        at_high = high.at(high.batch * depth + prefill)
        if high.batch == batch:
            return at_high
        low = self._curves[above - 1]
        share = (batch - low.batch) / (high.batch - low.batch)
        return (1 - share) * low.at(low.batch * depth + prefill) + share * at_high

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
    curves = []
    for batch in np.unique(batches):
        own = np.unique(tokens[batches == batch])
        least = [seconds[(batches >= batch) & (tokens >= n)].min() for n in own]
        curves.append(Curve(int(batch), own, np.array(least)))
    curves = curves or [Curve(1, np.ones(1), np.array([PASS_S]))]
    longest = max(curves, key=lambda curve: float(curve.tokens[-1]))
    slope = STEP_SHARE**2 * longest.seconds[0] / longest.batch
    if len(longest.tokens) > 1:
        slope = np.diff(longest.seconds)[-1] / np.diff(longest.tokens)[-1]
    tokens = np.append(longest.tokens, longest.tokens[-1] + 1e6)
    longest = Curve(longest.batch, tokens, np.append(longest.seconds, longest.seconds[-1] + 1e6 * slope))
    return [_continued(curve, longest) for curve in curves]


def _continued(curve: Curve, longest: Curve) -> Curve:
    """A curve that goes on in parallel to the one of the longest passes."""
    beyond = longest.tokens > curve.tokens[-1]
    more = curve.seconds[-1] + longest.seconds[beyond] - longest.at(curve.tokens[-1:])
    return Curve(curve.batch, np.append(curve.tokens, longest.tokens[beyond]), np.append(curve.seconds, more))


def bucket(count: float, per_octave: int = 2) -> int:
    return round(log2(count) * per_octave)
