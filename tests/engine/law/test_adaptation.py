"""Whatever a policy makes of past rounds, and wherever a draft model stops, what the engine emits is the target's.

As test_law.py, but nobody fixes k: it is chosen per sequence and round, by what the sequence's own drafts came to and
by costs that change from round to round; or the draft ends where the draft model is no longer sure.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.types import VERIFIERS, Verifier
from policies.config import PolicyConfig, PolicyName
from policies.cost import CostModel
from policies.observation import Floats, RoundCost, Timing
from tests.engine.law.checking import MOST, Sample, check_speculation, draw, law_of, prompt_of, refuses
from tests.engine.law.configurations import Configuration
from tests.engine.law.statistics import benjamini_hochberg, g_test
from tests.engine.law.tables import DRAFT, row_of, table_engine
from tests.examples import usual_and_proofs

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-3
PRICE = 0.1  # verification of a draft, in passes of one sequence
POLICIES: dict[PolicyName, PolicyConfig] = {
    "goodput": PolicyConfig("goodput", hysteresis=0.0),
    "confidence": PolicyConfig("confidence", threshold=0.42),
    "heuristic": PolicyConfig("heuristic", k=2),
}
Samples = dict[tuple[PolicyName, Configuration], Sample]
Layout = tuple[str, bool]  # setting, and whether its batches are mixed
LAYOUTS: tuple[Layout, ...] = (("plain", False), ("combined", True))
FEW: dict[Verifier, tuple[Layout, ...]] = dict.fromkeys(VERIFIERS, LAYOUTS[:1])
MANY: dict[Verifier, tuple[Layout, ...]] = dict.fromkeys(VERIFIERS, LAYOUTS)


class Prices(CostModel):
    """Costs that no clock has a part in, so that a run repeats. There are cheap drafts for so many of a round's
    sequences, in every round for others: those whose drafts are most likely to be accepted."""

    turn = 0

    def round_cost(self, batch: int, prefill: int) -> RoundCost:
        drafts = np.arange(1 + MOST * batch)
        cheap = 2.5 * (self.turn * 0.618 % 1) * batch  # drafts, evenly spread over the rounds
        verify: Floats = batch * np.where(drafts > cheap, 3.0, 1.0) + PRICE * drafts
        return RoundCost(0.0, 0.0, 0.0, 0.03 * batch, 0.0, verify, np.zeros(1 + MOST))

    def observe(self, timing: Timing) -> None:
        self.turn += 1


def engine_with(policy: PolicyName) -> Engine:
    engine = table_engine(policy=POLICIES[policy])
    engine.speculator.control.cost = Prices(MOST)
    return engine


def sample_of(policy: PolicyName, configuration: Configuration, draws: int) -> Sample:
    sample = draw(configuration, draws, engine=engine_with(policy), k=None)
    check_speculation(configuration, sample)
    return sample


def p_value(configuration: Configuration, sample: Sample) -> float:
    return g_test(sample.counts, law_of(configuration.params, prompt_of(configuration)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((FEW, 500, 800), id="few"),
        pytest.param((MANY, 8000, 16_000), id="many", marks=pytest.mark.proofs),
    ],
)
def samples(request: pytest.FixtureRequest) -> Samples:
    """Half as many texts under match, whose law no policy changes: they are compared one by one as well. More texts
    where a draft model's confidence has to end drafts of every length."""
    layouts, usual, with_confidence = request.param
    asked = [
        (policy, Configuration(setting, "model", verifier, MOST, mixed))
        for policy in POLICIES
        for verifier in VERIFIERS
        for setting, mixed in layouts[verifier]
    ]
    draws: dict[PolicyName, int] = dict.fromkeys(POLICIES, usual) | {"confidence": with_confidence}
    return {
        (policy, configuration): sample_of(
            policy, configuration, draws[policy] // (2 if configuration.verifier == "match" else 1)
        )
        for policy, configuration in asked
    }


@pytest.mark.slow
def test_the_law_holds_whatever_a_policy_makes_of_past_rounds(samples: Samples) -> None:
    found = {f"{policy}-{asked}": p_value(asked, sample) for (policy, asked), sample in samples.items()}
    assert {(policy, asked.verifier) for policy, asked in samples} == {*product(POLICIES, VERIFIERS)}
    assert {name: found[name] for name in benjamini_hochberg(found, LEVEL)} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "different"), [("goodput", 3), ("heuristic", 2)])
def test_k_does_vary(samples: Samples, policy: PolicyName, different: int) -> None:
    """From round to round, and between the sequences of one round, for no other reason than what the policy makes of
    them: what bounds k is left out."""
    for (name, asked), sample in samples.items():
        if name == policy:
            assert len(set().union(*sample.chosen.values())) >= different, asked
            assert max(map(len, sample.chosen.values())) > 1, asked


@pytest.mark.slow
def test_under_match_all_policies_get_the_same_texts(samples: Samples) -> None:
    """Seed by seed; under the other verifiers the drafts are part of what decides."""
    for verifier, setting in {(asked.verifier, asked.setting) for _, asked in samples}:
        found = [s.texts for (_, c), s in samples.items() if (c.verifier, c.setting) == (verifier, setting)]
        assert len(found) == len(POLICIES)
        least = min(map(len, found))
        assert all(texts[:least] == found[0][:least] for texts in found) == (verifier == "match")


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_models_confidence_ends_drafts_anywhere(samples: Samples, verifier: Verifier) -> None:
    """Before the first position too: after some texts no token has so high a probability as is asked for."""
    found = [s.lengths for (name, asked), s in samples.items() if (name, asked.verifier) == ("confidence", verifier)]
    assert found
    assert set().union(*found) == set(range(MOST + 1))
    assert all(len(lengths) > 1 for lengths in found)


# A policy that looks at the token that was drawn


def peeking(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The drafts' own probabilities in place of the largest ones: as likely a slip as any. Returns the lengths that
    drafts are cut to, as they come."""
    propose, lengths = ModelDrafter.propose, list[int]()

    def cut(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft = propose(self, replace(batch, confidences=()), ks)
        if draft.tokens is None:
            return draft
        kept = [
            _sure(sequence.tokens, tokens[:k], limit)
            for sequence, tokens, k, limit in zip(
                batch.sequences, draft.tokens.tolist(), draft.ks, batch.confidences, strict=True
            )
        ]
        lengths.extend(kept)
        return replace(draft, ks=tuple(kept))

    monkeypatch.setattr(ModelDrafter, "propose", cut)
    return lengths


def _sure(text: list[int], drafts: list[int], limit: float) -> int:
    joint = 1.0
    for j, token in enumerate(drafts):
        joint *= DRAFT[row_of(text + drafts[:j])].softmax(0)[token].item()
        if joint < limit:
            return j
    return len(drafts)


@pytest.mark.parametrize("verifier", usual_and_proofs(VERIFIERS, ("rejection", "block")))
def test_confidence_in_the_token_drawn(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused under rejection and block; under match any rule is harmless."""
    asked = Configuration("plain", "model", verifier, MOST, mixed=False)
    lengths = peeking(monkeypatch)
    if verifier == "match":
        assert p_value(asked, sample_of("confidence", asked, 800)) > LEVEL
    else:
        assert refuses(asked, 5000, engine_with("confidence"), k=None)
    assert set(lengths) == set(range(MOST + 1))
