"""Trees that the policy chooses: whatever it makes of past rounds, what the engine emits is the target's law.

As test_adaptation.py: nobody fixes a tree. The goodput policy chooses one per sequence and round, by what its
own drafts came to and by costs that change from round to round. `block` checks no trees.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.trees import Parents
from engine.types import Verifier
from policies.config import PolicyConfig
from policies.cost import CostModel
from policies.observation import Floats, RoundCost, Timing
from tests.engine.law.checking import Sample, check_speculation, draw, law_of, refuses
from tests.engine.law.configurations import Configuration
from tests.engine.law.statistics import benjamini_hochberg, g_test
from tests.engine.law.tables import table_engine
from tests.engine.sampling.test_exact_trees import (
    Fault,
    skip_the_residual_between_siblings,
    try_the_last_sibling_first,
)

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-3
MOST = 5  # nodes
TOKENS = MOST + 2  # of a text: its first round with drafts has room for MOST of them
LAYOUTS = (("plain", False), ("top_k", True))  # setting, and whether its batches are mixed
EXACT: tuple[Verifier, ...] = ("match", "rejection")


class Prices(CostModel):
    """Costs that no clock has a part in, so that a run repeats. Forwards of the draft model are cheap in some rounds,
    where chains pay, and dear in others, where broad trees do. Beyond some number of drafts in a round, which changes
    too, drafts do not pay."""

    turn = 0

    def round_cost(self, batch: int, prefill: int) -> RoundCost:
        drafts = np.arange(1 + MOST * batch)
        cheap = (1 + 4 * (self.turn * 0.618 % 1)) * batch  # drafts
        verify: Floats = batch * np.where(drafts > cheap, 3.0, 1.0) + 0.01 * drafts
        step = (0.05 + 0.4 * (self.turn * 0.382 % 1)) * batch
        return RoundCost(0.0, 0.0, 0.0, step, 0.0, verify, np.zeros(1 + MOST))

    def observe(self, timing: Timing) -> None:
        self.turn += 1


def choosing_engine() -> Engine:
    policy = PolicyConfig("goodput", hysteresis=0.0, probe_share=0.0, trees=True)
    engine = table_engine(policy=policy, max_spec_length=MOST, max_running=24)  # small batches: more choices
    engine.speculator.control.cost = Prices(MOST)
    return engine


def asked(verifier: Verifier, setting: str = "plain", mixed: bool = False) -> Configuration:
    return Configuration(setting, "model", verifier, MOST, mixed)


FEW = (asked("match"), asked("rejection"), asked("rejection", *LAYOUTS[1]))
MANY = tuple(asked(verifier, *layout) for verifier in EXACT for layout in LAYOUTS)


def params_of(configuration: Configuration) -> dict[str, Any]:
    """What replaces fields of the configuration's requests."""
    return {"k": None, "params": replace(configuration.params, max_tokens=TOKENS)}


def sample_of(configuration: Configuration, draws: int) -> Sample:
    sample = draw(configuration, draws, engine=choosing_engine(), **params_of(configuration))
    check_speculation(configuration, sample)
    return sample


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((FEW, 400), id="few"),
        pytest.param((MANY, 16_000), id="many", marks=pytest.mark.proofs),
    ],
)
def samples(request: pytest.FixtureRequest) -> dict[Configuration, Sample]:
    """Half as many texts under match, whose law no tree changes."""
    found, (asked_for, draws) = {}, request.param
    for configuration in asked_for:
        found[configuration] = sample_of(configuration, draws // (1 + (configuration.verifier == "match")))
    return found


def test_the_law_holds_whatever_trees_a_policy_makes_of_past_rounds(samples: dict[Configuration, Sample]) -> None:
    found = {str(which): g_test(sample.counts, law_of(which.params)) for which, sample in samples.items()}
    assert len(found) == len(samples) >= len(FEW)
    assert {name: found[name] for name in benjamini_hochberg(found, LEVEL)} == {}


def test_trees_do_vary(samples: dict[Configuration, Sample]) -> None:
    """From round to round, and between the sequences of one round; and siblings decide."""
    for which, sample in samples.items():
        shapes = set().union(*sample.trees.values())
        assert len(shapes) > 2, which
        assert max(map(len, sample.trees.values())) > 1, which
        assert sample.beside > len(sample.texts) / 50, which


def peeking(monkeypatch: pytest.MonkeyPatch) -> set[Parents]:
    """A tree ends before the first node that is token 0: a shape that depends on tokens of its own round. Returns what
    is left of the trees that were cut."""
    propose, left = ModelDrafter.propose, set[Parents]()

    def cut(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft = propose(self, batch, ks)
        if draft.tokens is None:
            return draft
        kept = list(draft.ks)
        for i in draft.trees:
            kept[i] = [*draft.tokens[i, : kept[i]].tolist(), 0].index(0)
        shapes = {i: parents[: kept[i]] for i, parents in draft.trees.items()}
        left.update(shape for i, shape in shapes.items() if kept[i] < draft.ks[i])
        return replace(draft, ks=tuple(kept), trees={i: shape for i, shape in shapes.items() if shape})

    monkeypatch.setattr(ModelDrafter, "propose", cut)
    return left


@pytest.mark.proofs
@pytest.mark.parametrize("verifier", EXACT)
def test_a_shape_that_depends_on_the_token_drawn(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused under rejection; under match any rule is harmless."""
    left, configuration = peeking(monkeypatch), asked(verifier)
    if verifier == "match":
        assert g_test(sample_of(configuration, 300).counts, law_of(configuration.params)) > LEVEL
    else:
        assert refuses(configuration, 6000, choosing_engine(), **params_of(configuration))
    assert len(left) > 3


@pytest.mark.parametrize(
    "fault", [try_the_last_sibling_first, pytest.param(skip_the_residual_between_siblings, marks=pytest.mark.proofs)]
)
def test_a_sibling_that_is_tried_wrongly(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert refuses(asked("rejection"), 6000, choosing_engine(), **params_of(asked("rejection")))
