"""How many tokens to draft for each sequence in the coming round: the policies.

A policy is a pure function of an observation and of the time saved up for probes. Every policy gives a sequence the k
that its request fixed and stays within the limits, which include PolicyConfig.max_k. Standard library and numpy only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from sys import maxsize

import numpy as np

from policies.config import PolicyConfig, PolicyName, Reason
from policies.observation import FEW, SETTLING, STALE, Choice, Floats, Ints, Observation, RoundCost
from policies.planner import Allocation, evaluate, fixed_drafts_only, lone_ks, plan, seconds
from policies.trees import depths_of

HOLDS = 8  # rounds that a choice is used for at least
LONGEST_HOLD = 2 * HOLDS  # and at most: acceptance changes meanwhile
CHOICE_SHARE = 0.025  # of all time that choices may take. With a small model one takes as long as a plain step
LASTING = 2 * HOLDS  # rounds with drafts over which the cost of the next change to plain ones is spread
PROBE_EVERY = 32  # rounds from the last drafts to a probe: an earlier one would learn what is known
LONGEST_REST = 4 * PROBE_EVERY  # rounds until the next choice at most: loads and prices change unseen meanwhile
PROBE_K = 4  # drafts of a probe in a round: its first ones say most
PROBE_ROUNDS = 2  # of a probe: what the draft model has to read first is read once, and costs the most


@dataclass(frozen=True, slots=True)
class ProbeBudget:
    """What a policy remembers. Probes are drafts that are not expected to pay, made to learn whether they would."""

    saved_s: float = 0.0  # time saved up for probes
    drafts: int = 0  # of the last plan
    drafting: bool = False  # whether it had any that no request had fixed
    rounds: int = 0  # since the last of these
    unmeasured: int = STALE - PROBE_EVERY  # rounds since plain ones were last measured: at first the profile holds


Policy = Callable[[Observation, ProbeBudget], tuple[Choice, ProbeBudget]]


def make_policy(config: PolicyConfig) -> Policy:
    """The policy that a configuration describes. Each may follow any other one."""
    policies: dict[PolicyName, Policy] = {
        "off": partial(_fixed, 0),
        "fixed": partial(_fixed, config.k),
        "heuristic": partial(_heuristic, config.k),
        "optimal": _optimal,
        "confidence": partial(_confidence, config.threshold),
        "goodput": Goodput(config.hysteresis, config.probe_share),
    }
    return policies[config.name]


def _fixed(k: int, observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
    """The same k for every sequence. With none, no policy is asked until a request wants drafts."""
    ks = _within(observation, np.full_like(observation.limits, k))
    reasons = _reasons(observation, ks)
    if not k:
        reasons = _for_free(observation, "policy", reasons)
    return Choice(ks, reasons, observation.trees, holds=HOLDS, newcomer_k=k, rests=0 if k else maxsize), budget


def _heuristic(k: int, observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
    """Two more than a sequence's last drafts if all were accepted, else one less, but at least one; k at first.

    This is the schedule `heuristic` of transformers' assisted generation.
    """
    after = [
        k if found is None else found[0] + 2 if found[0] == found[1] else max(1, found[0] - 1)
        for found in observation.last
    ]
    ks = _within(observation, np.array(after, np.int64))
    return Choice(ks, _reasons(observation, ks), observation.trees), budget


def _optimal(observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
    """The k that Leviathan, Kalman and Matias 2023 (arXiv 2211.17192, Theorem 3.8) find for one sequence by itself.

    α is the chance that its first draft is accepted, c the seconds of a draft step over those of the target's pass
    without drafts, both with all sequences of the round. The theorem leaves out that drafts lengthen the pass.
    """
    by_model = observation.gaps > 0
    drafting = int((by_model & (observation.limits > 0)).sum())
    ks = _within(observation, _theorem(observation, np.where(by_model, _draft_ratio(observation.cost, drafting), 0.0)))
    lone = _theorem(observation, np.where(by_model, _draft_ratio(observation.alone, 1), 0.0))
    return Choice(ks, _reasons(observation, ks, lone), observation.trees), budget


def _confidence(threshold: float, observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
    """As many drafts as the limits allow: the drafter stops where its own law says that the drafts will be rejected."""
    ks, most = _within(observation, observation.limits), observation.survival.shape[1]
    return Choice(ks, _reasons(observation, ks), observation.trees, threshold, HOLDS, newcomer_k=most), budget


@dataclass(frozen=True, slots=True)
class Goodput:
    """The planner's drafts, if they are better than the last ones and than none by the share `hysteresis`. Drafts after
    none must also pay for what they cost the next rounds without any.

    Estimates are noisy, and a sequence that is left out and taken in again has a gap to read. What the predictions
    leave out makes drafts look better than they are.

    Rounds without drafts do not show what drafts would bring by now. So the share `probe_share` of all time is saved
    up, and spent on a few drafts for one sequence as soon as it covers them and their reading. Between these probes the
    engine rests: it asks for no choice. Rounds with drafts do not show what others take by now. So a few rounds have
    none once the last measurement is too old, where `probe_share` covers this.
    """

    hysteresis: float
    probe_share: float

    def __call__(self, observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
        best = self._plan(observation)
        ks, free = best.ks, observation.free
        alone = len(ks) == 1 and (observation.horizon == observation.left).all()
        reasons = _reasons(observation, ks, ks if alone else lone_ks(observation))
        drafting = bool(ks[free].any())
        before, budget = budget, self._saved(observation, budget, best, drafting)
        compares = SETTLING + FEW  # rounds: the first ones are not measured
        may_compare = compares <= self.probe_share * STALE and not (observation.fixed > 0).any()
        if drafting and budget.unmeasured >= STALE and may_compare:
            none, why = np.maximum(observation.fixed, 0), _for_free(observation, "probe", reasons)
            budget = replace(budget, drafts=0, drafting=False, unmeasured=0)
            return Choice(none, why, observation.trees, holds=compares), budget
        wait = 0.0  # rounds until a probe may come
        if free.size and budget.rounds >= HOLDS:
            place = free[observation.gaps[free].argmin()]
            probe, cost_s = self._probe(observation, best, int(place))
            if cost_s > budget.saved_s:
                saved_s = self.probe_share * observation.round_s  # in a round
                wait = (cost_s - budget.saved_s) / saved_s if saved_s else inf
            elif not self._may_pay(observation):
                wait = inf
            elif budget.rounds >= PROBE_EVERY:
                why = tuple("probe" if n == place else reason for n, reason in enumerate(reasons))
                budget = replace(budget, saved_s=budget.saved_s - cost_s, rounds=0)
                return Choice(probe, why, best.shapes, holds=PROBE_ROUNDS), budget
        depths = np.array(depths_of(ks.tolist(), best.shapes))
        newcomer_k = int(np.median(depths[free])) if free.size else 0  # a chain, until the next choice
        rests = 0
        if not drafting and budget.rounds >= HOLDS:
            rests = int(min(max(wait, PROBE_EVERY), LONGEST_REST)) - HOLDS
        halved, resumed = before.drafts > 0 and before.drafts >= 2 * ks.sum(), drafting and before.rounds > 0
        holds = 1 if halved or resumed else _holds(observation)  # a drafter that fails is left alone sooner
        return Choice(ks, reasons, best.shapes, holds=holds, surprises=True, newcomer_k=newcomer_k, rests=rests), budget

    def _probe(self, observation: Observation, best: Allocation, place: int) -> tuple[Ints, float]:
        """([B] drafts of a probe with this sequence in each round, the seconds by which they lengthen the rounds)."""
        probe = best.ks.copy()
        probe[place] = min(PROBE_K, int(observation.limits[place]))

        def longer(amortised: bool) -> float:
            without = seconds(observation, best.ks, best.shapes, amortised)
            return max(0.0, seconds(observation, probe, best.shapes, amortised) - without)

        cost_s = longer(amortised=False) + (PROBE_ROUNDS - 1) * longer(amortised=True)
        return probe, cost_s + (0.0 if best.ks.any() else observation.change_s)

    def _plan(self, observation: Observation) -> Allocation:
        last = fixed_drafts_only(observation)
        best = plan(observation, last, self.hysteresis)
        if observation.held is not None:
            last = max(last, evaluate(observation, *observation.held), key=lambda plan: plan.goodput)
        margin = self.hysteresis
        if best.ks.any() and not last.ks.any():
            margin += observation.change_s * last.goodput / (last.tokens * LASTING)
        return best if best.goodput >= (1 + margin) * last.goodput else last

    def _may_pay(self, observation: Observation) -> bool:
        """Whether drafts would pay if all were sure to be accepted. If not, a probe shows nothing that matters."""
        chances = np.zeros_like(observation.sibling_chances)
        certain = replace(observation, survival=np.ones_like(observation.survival), sibling_chances=chances, held=None)
        return bool(self._plan(certain).ks[observation.free].any())

    def _saved(self, observation: Observation, budget: ProbeBudget, best: Allocation, drafting: bool) -> ProbeBudget:
        """The budget after the rounds since the last choice."""
        rounds = observation.rounds
        saved_s = budget.saved_s + self.probe_share * observation.round_s * rounds
        if observation.round_s:  # a probe that takes longer than the rounds up to it has too much to read
            saved_s = min(saved_s, PROBE_EVERY * observation.round_s)
        measured = rounds >= SETTLING + FEW and not budget.drafts
        unmeasured = 0 if measured else budget.unmeasured + rounds
        without = 0 if drafting or budget.drafting else budget.rounds + rounds
        return ProbeBudget(saved_s, int(best.ks.sum()), drafting, without, unmeasured)


def _holds(observation: Observation) -> int:
    """Rounds that a choice is used for: as many as it takes to make its time a share CHOICE_SHARE of theirs."""
    if not observation.round_s:
        return HOLDS
    return int(min(max(observation.choice_s / (CHOICE_SHARE * observation.round_s), HOLDS), LONGEST_HOLD))


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


def _for_free(observation: Observation, reason: Reason, others: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """One reason for all sequences but those whose request fixed k."""
    return tuple(reason if k < 0 else other for k, other in zip(observation.fixed.tolist(), others, strict=True))


def _reasons(observation: Observation, ks: Ints, lone: Ints | None = None) -> tuple[Reason, ...]:
    """[B] why each k is what it is.

    lone: k that each sequence would get in a round of its own; None: the policy ignores what drafts cost. A fixed k is
    a limit by itself, and its bound says what prevents more.
    """
    names: tuple[Reason, Reason] = ("policy", "policy") if lone is None else ("acceptance", "load")
    at_limit = ((ks >= observation.limits) | (observation.fixed >= 0)).tolist()
    more = (np.zeros_like(ks) if lone is None else lone > ks).tolist()
    columns = zip(at_limit, observation.bounds, more, strict=True)
    return tuple(bound if limited else names[longer] for limited, bound, longer in columns)
