"""Trees that the policy chooses, through the whole engine: the text stays, and who may branch."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine import trees
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.types import Request, RoundRecord, SamplingParams, Verifier
from policies.acceptance import Estimator
from policies.config import REASONS, PolicyConfig
from policies.cost import CostModel
from policies.observation import Candidate, Drafted, Floats, RoundCost, Timing
from tests.engine.driving import Drive, drive, load
from tests.engine.pairs import Pair

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=32, ignore_eos=True)
PROMPTS = ((5, 6, 7), (8, 9), (10, 11, 12, 13))
GOODPUT = PolicyConfig("goodput", probe_share=0.0, trees=True)


class Hopeful(Estimator):
    """Expects as much of every sequence, whatever came of its drafts."""

    def survival(self, candidates: Seq[Candidate]) -> Floats:
        return np.tile(np.cumprod(np.full(16, 0.6)), (len(candidates), 1))

    def sibling_chances(self, candidates: Seq[Candidate], free: bool) -> Floats:
        return np.where(super().sibling_chances(candidates, free) > 0, 0.5, 0.0)


class DearForwards(CostModel):
    """A pass takes 2 ms, however many its rows are, and a forward of the draft model 1 ms: trees pay."""

    def round_cost(self, batch: int, prefill: int) -> RoundCost:
        verify = 2e-3 + 1e-6 * np.arange(1.0 + batch * 16)
        return RoundCost(0.0, 0.0, 0.0, 1e-3, 0.0, verify, np.zeros(17))

    def observe(self, timing: Timing) -> None:
        pass


def run(pair: Pair, policy: PolicyConfig = GOODPUT, verifier: Verifier = "match", **config: Any) -> Drive:
    """Choices do not depend on the clock."""
    engine = load(pair, policy=policy, **config)
    control = engine.speculator.control
    control.cost, control.estimator, observe = DearForwards(16), Hopeful(16), control.observe

    def timeless(timing: Timing | None, drafted: Seq[Drafted], idle: Iterable[int] = ()) -> None:
        assert timing is not None
        observe(replace(timing, draft_s=0.0, score_s=2e-3, host_s=0.0), drafted, idle)

    control.observe, control.spent = timeless, lambda policy_s: None  # type: ignore[method-assign]
    k = 0 if policy.name == "off" else None
    return drive(engine, [Request(f"r{n}", p, PARAMS, k=k, verifier=verifier) for n, p in enumerate(PROMPTS)])


def rounds(driven: Drive) -> list[RoundRecord]:
    return [part for told in driven.received.values() if told.record is not None for part in told.record.rounds]


def test_the_text_is_the_same_with_chosen_trees(pair: Pair) -> None:
    plain, chains, branched = (run(pair, c) for c in (PolicyConfig("off"), replace(GOODPUT, trees=False), GOODPUT))
    assert plain.tokens == chains.tokens == branched.tokens
    assert not any(part.tree for part in rounds(chains))
    found = [part for part in rounds(branched) if part.tree]
    assert len(found) > 5
    assert any(node not in trees.trunk(part.tree) for part in found for node in part.path)  # a sibling was accepted
    for part in found:
        assert len(part.tree) == part.drafted == part.k
        trees.check(part.tree)


@pytest.mark.parametrize(("verifier", "branches"), [("rejection", True), ("block", False)])
def test_who_may_branch(pair: Pair, verifier: Verifier, branches: bool) -> None:
    driven = run(pair, verifier=verifier)
    assert driven.drafted > 0
    assert any(part.tree for part in rounds(driven)) == branches


def test_trees_are_cut_where_memory_is_short(pair: Pair) -> None:
    """A tree needs memory for all of its nodes."""
    plain = run(pair, PolicyConfig("off"))
    tight = run(pair, cache="paged", kv_tokens=100, block_size=4, max_running=3)
    assert tight.tokens == plain.tokens
    cut = [part for part in rounds(tight) if part.tree and REASONS[part.reason] == "cache"]
    assert len({part.k for part in cut}) > 2
    assert all(len(part.tree) == part.k for part in cut)


def test_a_drafter_that_branches_by_itself_is_priced_as_it_always_drafts(pair: Pair) -> None:
    """Trees cost more than chains, but its chains are never seen."""
    engine, told = load(pair, policy=PolicyConfig("off"), max_spec_length=16), list[Timing]()
    observe = engine.speculator.control.observe

    def spy(timing: Timing | None, drafted: Seq[Drafted], idle: Iterable[int] = ()) -> None:
        assert timing is not None
        told.append(timing)
        observe(timing, drafted, idle)

    engine.speculator.control.observe = spy  # type: ignore[method-assign]
    driven = drive(engine, [Request("r", (5, 6), replace(PARAMS, temperature=0), k=12, drafter="lookahead")])
    assert any(part.tree for part in rounds(driven))
    assert any(timing.drafts for timing in told)
    assert not any(timing.branched_drafts for timing in told)


def test_a_drafter_that_fails_says_nothing_of_siblings(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        raise RuntimeError("injected")

    monkeypatch.setattr(ModelDrafter, "propose", failing)
    engine, told = load(pair, policy=PolicyConfig("off")), list[Drafted]()
    monkeypatch.setattr(engine.speculator.control, "observe", lambda timing, drafted, idle: told.extend(drafted))
    drive(engine, [Request("r", (5, 6), replace(PARAMS, max_tokens=20), tree=(3, 2))])
    assert told
    for outcome in told:
        assert outcome.drafted > outcome.accepted == 0
        assert outcome.sibling_counts == ()


def test_what_was_tried_is_told_to_the_policy(pair: Pair) -> None:
    told = list[Drafted]()
    engine: Engine = load(pair, policy=PolicyConfig("off"))
    observe = engine.speculator.control.observe

    def spy(timing: Timing | None, drafted: Seq[Drafted], idle: Iterable[int] = ()) -> None:
        assert timing is not None
        told.extend(drafted)
        assert timing.depth != 9 or timing.branched_drafts == 9 - 4  # four nodes have children, or are the root
        observe(timing, drafted, idle)

    engine.speculator.control.observe = spy  # type: ignore[method-assign]
    driven = drive(engine, [Request("r", (5, 6), replace(PARAMS, max_tokens=40), tree=(3, 2))])
    parts = [part for part in rounds(driven) if part.drafted == 9]
    whole = [outcome for outcome in told if outcome.drafted == 9]
    assert len(whole) == len(parts) > 5
    for outcome, part in zip(whole, parts, strict=True):
        fates = trees.fates(part.tree, part.path)
        assert outcome.accepted == part.accepted == len(part.path)
        assert outcome.overlaps == tuple(float(fate[0]) for fate in fates)
        assert sum(accepted for _, accepted in outcome.sibling_counts) + sum(outcome.overlaps) == len(part.path)
        assert sum(tried for tried, _ in outcome.sibling_counts) == sum(len(fate) - 1 for fate in fates)
