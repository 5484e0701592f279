"""How many tokens to draft for each sequence in the coming round: the policies.

A policy is a pure function of what is observed and of what it remembers. Every one leaves a sequence the k that its
request fixed, and stays within the limits, of which PolicyConfig.max_k is one. Standard library and numpy only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from policies.config import PolicyConfig, PolicyName
from policies.observation import Choice, Floats, Ints, Observation, PolicyState, RoundCost
from policies.planner import Allocation, evaluate, even_plan, lone_ks, plan, seconds
from policies.reasons import Reason

Policy = Callable[[Observation, PolicyState], tuple[Choice, PolicyState]]

STANDS = 8  # rounds that a plan stands for: choosing and learning take a few percent of a round with few sequences
# What predictions leave out is in favour of no drafts, such as that passes of changing sizes find their weights farther
# away.
EDGE = 0.03  # share by which drafts must be expected to pay
UNEVEN = 0.05  # share by which different k must be expected to pay, where a pass takes longer for being uneven
PROBE_EVERY = 32  # rounds: a probe soon after the last drafts would learn what is known
PROBE_DRAFTS = 4  # in all: several outcomes for what reading costs
PROBED = (1, 2, 4)  # sequences that they may be divided among
# Once no drafts pay, the gaps may grow nearly as fast as the share does: then probes live on what was saved before, or
# on what they are advanced.
BANKED = 10.0  # rounds, or probes if they take longer, that may be saved up for
ADVANCE = 400  # rounds whose share may be spent before it is saved


def make_policy(config: PolicyConfig) -> Policy:
    """The policy that a configuration describes. Any may go on from the state that another one left."""
    policies: dict[PolicyName, Policy] = {
        "off": Off(),
        "fixed": Fixed(config.k),
        "heuristic": Heuristic(config.k),
        "optimal": Optimal(),
        "confidence": Confidence(config.threshold),
        "goodput": Goodput(config.hysteresis, config.probe_share),
    }
    return policies[config.name]


@dataclass(frozen=True, slots=True)
class Off:
    """No drafts."""

    def __call__(self, observation: Observation, state: PolicyState) -> tuple[Choice, PolicyState]:
        ks = _within(observation, np.zeros_like(observation.limits))
        reasons = tuple(
            bound if fixed >= 0 else "policy"
            for fixed, bound in zip(observation.fixed.tolist(), observation.bounds, strict=True)
        )
        return Choice(ks, reasons, stands=STANDS, joining=0), _next(observation, state, ks)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same k for everybody."""

    k: int

    def __call__(self, observation: Observation, state: PolicyState) -> tuple[Choice, PolicyState]:
        ks = _within(observation, np.full_like(observation.limits, self.k))
        return Choice(ks, _reasons(observation, ks), stands=STANDS, joining=self.k), _next(observation, state, ks)


@dataclass(frozen=True, slots=True)
class Heuristic:
    """Two more than a sequence's last drafts if all were accepted, else one less, but at least one.

    That is the schedule `heuristic` of transformers' assisted generation.
    """

    k: int  # the first

    def __call__(self, observation: Observation, state: PolicyState) -> tuple[Choice, PolicyState]:
        wanted = [self._after(observation.last.get(handle)) for handle in observation.handles]
        ks = _within(observation, np.array(wanted, np.int64))
        return Choice(ks, _reasons(observation, ks)), _next(observation, state, ks)

    def _after(self, last: tuple[int, int] | None) -> int:
        if last is None:
            return self.k
        drafted, accepted = last
        return drafted + 2 if accepted == drafted else max(1, drafted - 1)


@dataclass(frozen=True, slots=True)
class Optimal:
    """The k that Leviathan, Kalman and Matias 2023 (arXiv 2211.17192, Theorem 3.8) find for one sequence by itself.

    α is the chance that its first draft is accepted, c the seconds of a draft step over those of the target's pass
    without drafts, both with all sequences of the round: that drafts lengthen the pass is not in the theorem.
    """

    def __call__(self, observation: Observation, state: PolicyState) -> tuple[Choice, PolicyState]:
        modelled = observation.gaps > 0
        drafting = modelled & ((observation.fixed > 0) | (observation.fixed < 0) & (observation.limits > 0))
        ratio = _draft_ratio(observation.cost, int(drafting.sum()))
        ks = _within(observation, _theorem(observation, np.where(modelled, ratio, 0.0)))
        lone = _theorem(observation, np.where(modelled, _draft_ratio(observation.alone, 1), 0.0))
        return Choice(ks, _reasons(observation, ks, lone)), _next(observation, state, ks)


@dataclass(frozen=True, slots=True)
class Confidence:
    """As many as the limits allow: the drafter stops where its own law says that the drafts will be rejected."""

    threshold: float

    def __call__(self, observation: Observation, state: PolicyState) -> tuple[Choice, PolicyState]:
        ks = _within(observation, observation.limits)
        most = observation.survival.shape[1]
        choice = Choice(ks, _reasons(observation, ks), self.threshold, STANDS, joining=most)
        return choice, _next(observation, state, ks)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The planner's ks.

    None at all, unless some pay clearly; once they do, a little less is enough. The last plan is kept while another one
    would be better by less than `hysteresis`: estimates are noisy, and a sequence that is left out and taken in again
    has a gap to read.

    The same k for everybody is preferred where uneven passes cost more: then so does changing their size all the time.

    A plan without any draft teaches nothing, and the drafts may be better by now. Therefore a share of all time is
    saved up, and spent on a few drafts as soon as it covers them, all that must be read for them included, provided
    that they could change the plan.

    A choice stands for a few rounds, but for one if it gives drafts to sequences that had none, for they tell most, or
    at most half of the last one's: a drafter that goes bad is then left alone sooner.
    """

    hysteresis: float
    probe_share: float

    def __call__(self, observation: Observation, state: PolicyState) -> tuple[Choice, PolicyState]:
        ks = self._plan(observation, state)
        lone = lone_ks(observation) if len(ks) > 1 else ks
        reasons = _reasons(observation, ks, lone)
        probe, credit_s = self._probe(observation, state, ks)
        after = replace(_next(observation, state, ks), credit_s=credit_s)
        if ks[observation.free].any():
            after = replace(after, probed=after.rounds)
        if probe is None:
            joining = _common(observation, ks)
            unknown = 0 if joining is None else None  # newcomers got what everybody gets, if there is such a k
            begun = not state.ks or any(k and state.ks.get(handle, unknown) == 0 for handle, k in after.ks.items())
            before = sum(state.ks.values())
            fewer = 0 < before >= 2 * sum(after.ks.values())
            # Who guesses has something else to offer in the next round.
            guessed = bool((observation.gaps[observation.free] == 0).any())
            stands = 1 if begun or guessed or fewer else STANDS
            return Choice(ks, reasons, stands=stands, joining=joining), after
        more = (probe > ks).tolist()
        probed = tuple("probe" if new else reason for new, reason in zip(more, reasons, strict=True))
        return Choice(probe, probed), replace(after, probed=after.rounds)

    def _plan(self, observation: Observation, state: PolicyState) -> Ints:
        margin = 1 + _unevenness(observation.cost)
        best, even = plan(observation), even_plan(observation)
        if even.goodput * margin >= best.goodput:
            best = even
        if state.ks.keys() == set(observation.handles):
            ks = _within(observation, np.array([state.ks[handle] for handle in observation.handles]))
            last = evaluate(observation, ks)
            worth = last.goodput / (1.0 if _is_even(observation, ks) else margin)
            best = last if best.goodput < (1 + self.hysteresis) * worth else best
        edge = max(0.0, EDGE - self.hysteresis) if any(state.ks.values()) else EDGE
        without = _without(observation)
        return without.ks if best.goodput < (1 + edge) * without.goodput else best.ks

    def _probe(self, observation: Observation, state: PolicyState, ks: Ints) -> tuple[Ints | None, float]:
        """(ks with the drafts of a probe, if it is time for one; seconds saved up after it)."""
        credit_s = state.credit_s + self.probe_share * observation.round_s * observation.rounds
        if ks[observation.free].any() or not observation.free.size:
            return None, min(credit_s, BANKED * observation.round_s) if observation.rounds else credit_s
        if state.rounds + observation.rounds - state.probed < PROBE_EVERY:
            return None, credit_s
        probe, cost_s = _cheapest_probe(observation)
        credit_s = min(credit_s, BANKED * max(cost_s, observation.round_s))
        if cost_s > credit_s + ADVANCE * self.probe_share * observation.round_s or not _may_pay(observation):
            return None, credit_s
        return probe, credit_s - max(cost_s, 0.0)


def _common(observation: Observation, ks: Ints) -> int | None:
    """The k that everybody gets, as far as the limits allow; None: there are several, or none gets any."""
    return int(ks[observation.free].max(initial=0)) or None if _is_even(observation, ks) else None


def _is_even(observation: Observation, ks: Ints) -> bool:
    """Whether everybody gets the same k, as far as the limits allow."""
    free = observation.free
    return bool((ks[free] == np.minimum(ks[free].max(initial=0), observation.limits[free])).all())


def _without(observation: Observation) -> Allocation:
    """The plan without drafts but for those that requests fixed."""
    return evaluate(observation, _within(observation, np.zeros_like(observation.limits)))


def _unevenness(cost: RoundCost) -> float:
    """By which a plan that is not even must be better than one that is."""
    return UNEVEN if cost.padding_s[-1] > UNEVEN * cost.verify_s[0] else 0.0


def _cheapest_probe(observation: Observation) -> tuple[Ints, float]:
    """(ks, seconds that they add to the round): of a few probes, the one that takes least time for each draft.

    Sequences with the smallest gaps are in it, for which the draft model reads least, and all at once: the draft
    model's forwards and a longer pass cost nearly as much for one sequence as for some.
    """
    nothing = _within(observation, np.zeros_like(observation.limits))
    plain_s = seconds(observation, nothing, amortised=False)
    free = observation.free
    nearest = free[np.argsort(observation.gaps[free], kind="stable")]
    probes = []
    for sequences in PROBED:
        ks = nothing.copy()
        places = nearest[:sequences]
        ks[places] = np.minimum(observation.limits[places], PROBE_DRAFTS // sequences)
        probes.append((ks, seconds(observation, ks, amortised=False) - plain_s))
    return min(probes, key=lambda probe: probe[1] / int(probe[0].sum() - nothing.sum()))


def _may_pay(observation: Observation) -> bool:
    """Whether there would be drafts if all were sure to be accepted: if not, nothing that a probe shows matters."""
    certain = replace(observation, survival=np.ones_like(observation.survival))
    return plan(certain).goodput >= (1 + EDGE) * _without(certain).goodput


def _theorem(observation: Observation, ratio: Floats) -> Ints:
    """[B] k with the greatest walltime factor of benchmarks.lab.analysis within the limits; ratio: [B] its c."""
    k = np.arange(observation.survival.shape[1] + 1)
    alpha = observation.survival[:, :1] if k.size > 1 else np.zeros((len(ratio), 1))
    factor = np.cumsum(alpha**k, axis=1) / (1 + k * ratio[:, None])
    return np.where(k <= observation.limits[:, None], factor, 0.0).argmax(1)


def _draft_ratio(cost: RoundCost, sequences: int) -> float:
    return (cost.step_s + sequences * cost.token_s) / float(cost.verify_s[0])


def _within(observation: Observation, wanted: Ints) -> Ints:
    return np.where(observation.fixed >= 0, observation.fixed, np.minimum(wanted, observation.limits))


def _reasons(observation: Observation, ks: Ints, lone: Ints | None = None) -> tuple[Reason, ...]:
    """[B] why. lone: k that each would get in a round of its own; None: the policy does not look at what drafts cost.

    A fixed k is a limit by itself, and its bound says what is in the way of more.
    """
    short: list[Reason]
    if lone is None:
        short = ["policy"] * len(ks)
    else:
        short = ["load" if more else "acceptance" for more in (lone > ks).tolist()]
    bound = ((ks >= observation.limits) | (observation.fixed >= 0)).tolist()
    return tuple(
        limit if binds else reason for binds, limit, reason in zip(bound, observation.bounds, short, strict=True)
    )


def _next(observation: Observation, state: PolicyState, ks: Ints) -> PolicyState:
    planned = dict(zip(observation.handles, ks.tolist(), strict=True))
    return replace(state, ks=planned, rounds=state.rounds + observation.rounds)
