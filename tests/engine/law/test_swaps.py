"""Texts follow the target's law while drafts are exchanged between the rounds that write them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.drafters.base import Draft, Drafter
from engine.drafters.chain import ChainedDrafter
from engine.drafters.model import ModelDrafter
from engine.engine import Engine, StepResult
from engine.loading.draft_swap import NewDraft
from engine.types import VERIFIERS, Verifier
from tests.engine.law.checking import check_speculation, draw, law_of, prompt_of, refuses
from tests.engine.law.configurations import Configuration
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import SECOND_DRAFT, table_engine
from tests.examples import usual_and_proofs

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-4


def swapping_engine(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[Drafter]]:
    """An engine that exchanges two drafts after every other step, and these drafts."""
    engine, spare = table_engine(second=None), table_engine(draft=SECOND_DRAFT, second=None)
    assert isinstance(spare.drafter, ChainedDrafter)
    assert isinstance(engine.drafter, ChainedDrafter)
    models = [model for model in (engine.drafter.model, spare.drafter.model) if model is not None]
    step, served, cost = engine.step, [0], engine.speculator.control.cost.draft_cost(())

    def and_swap() -> StepResult:
        result = step()
        served[0] += 1
        if served[0] % 2:
            engine.put_draft(NewDraft(engine.config, models[served[0] // 2 % 2], cost)).release()
        return result

    monkeypatch.setattr(engine, "step", and_swap)
    return engine, models


@pytest.mark.parametrize("verifier", usual_and_proofs(VERIFIERS, ("rejection",)))
def test_texts_follow_the_law_of_the_target(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, models = swapping_engine(monkeypatch)
    asked: list[ModelDrafter] = []
    propose = ModelDrafter.propose

    def noted(self: ModelDrafter, *arguments: Any) -> Draft:
        asked.append(self)
        return propose(self, *arguments)

    monkeypatch.setattr(ModelDrafter, "propose", noted)
    configuration = Configuration("plain", "model", verifier, 3, mixed=False)
    sample = draw(configuration, 800, engine=engine)
    check_speculation(configuration, sample)
    assert g_test(sample.counts, law_of(configuration.params, prompt_of(configuration))) > LEVEL
    assert set(map(id, asked)) == set(map(id, models))


def test_negative_control_the_laws_of_another_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds whose drafts are judged by the laws of a draft that did not draw them write another law."""
    engine, models = swapping_engine(monkeypatch)
    latest: list[Any] = []
    propose = ModelDrafter.propose

    def mixed(self: ModelDrafter, *arguments: Any) -> Draft:
        draft = propose(self, *arguments)
        if draft.logq is None:
            return draft
        flat = torch.full_like(draft.logq, -float(torch.log(torch.tensor(draft.logq.shape[-1]))))
        latest.append(self)
        return replace(draft, logq=flat)

    monkeypatch.setattr(ModelDrafter, "propose", mixed)
    assert refuses(Configuration("plain", "model", "rejection", 3, mixed=False), engine=engine)
    assert set(map(id, latest)) == set(map(id, models))
