"""The edge and the engine agree on which ways to speculate there are: what the one lets in, the other serves."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from typing import Any

import pytest

from app.client import ModelCard
from app.fake_engine import FakeEngineClient
from app.openai.speculation import Drafting, Lossy, Prediction, SpeculationOptions, settle
from engine.config import EngineConfig
from engine.intake import Intake
from engine.speculation import Capabilities, SpeculationFields, resolve
from engine.types import DRAFTERS, DrafterName, InvalidRequest, Request, SamplingParams, Verifier
from policies.config import PolicyConfig

GUESSERS: tuple[DrafterName, ...] = ("ngram", "lookup", "prediction", "cascade", "suffix", "lookahead")
SERVERS: dict[str, tuple[dict[str, Any], tuple[DrafterName, ...]]] = {
    "pair": ({}, DRAFTERS),
    "rejection": ({"verifier": "rejection", "drafter": "cascade"}, DRAFTERS),
    "no draft model": ({}, GUESSERS),
    "quiet": ({"policy": PolicyConfig("off"), "verifier": "rejection"}, DRAFTERS),
    "quiet, no draft model": ({"policy": PolicyConfig("fixed", k=0)}, GUESSERS),
    "never": ({"max_spec_length": 0, "policy": PolicyConfig("off")}, DRAFTERS),
    "no drafter": ({}, ()),
}


def intake_of(name: str) -> Intake:
    config, drafters = SERVERS[name]
    anything: Any = None  # the tokenizer: no text is made here
    return Intake(EngineConfig("target", "draft", **config), anything, frozenset(), 100, 64, drafters)


def card_of(can: Capabilities) -> ModelCard:
    return replace(
        FakeEngineClient().model,
        policy="goodput" if can.policy_drafts else "off",
        max_spec_length=can.max_spec_length,
        drafters=can.drafters,
        drafter=can.drafter,
        verifier=can.verifier,
    )


def wishes() -> Iterator[tuple[SpeculationOptions, Prediction | None, Lossy | None, float]]:
    modes, ks, most = (None, "auto", "off", "fixed"), (None, 0, 2, 17), (None, 1, 17)
    drafters, verifiers = (None, "model", "lookup", "prediction", "cascade"), (None, "match", "rejection")
    for mode, k, max_k, drafter, verifier in product(modes, ks, most, drafters, verifiers):
        options: Any = {"mode": mode, "k": k, "max_k": max_k, "drafter": drafter, "verifier": verifier}
        for guess, lossy, temperature in product((None, "abc"), (None, 0.5), (0.0, 1.0)):
            yield (
                SpeculationOptions(**options),
                None if guess is None else Prediction(type="content", content=guess),
                None if lossy is None else Lossy(lenience=lossy),
                temperature,
            )
    trees: tuple[Any, ...] = ([1], [2, 1], [16], [17], [3, 2, 1], [10**9] * 9)
    trees += ({"nodes": 4, "depth": 2}, {"nodes": 17, "depth": 2}, {"nodes": 2, "depth": 3})
    for tree, mode, k, drafter, verifier in product(trees, modes, (None, 2), drafters, (*verifiers, "block")):
        options = {"mode": mode, "k": k, "tree": tree, "drafter": drafter, "verifier": verifier}
        for lossy in (None, 0.5):
            yield SpeculationOptions(**options), None, None if lossy is None else Lossy(lenience=lossy), 1.0


def request(drafting: Drafting, temperature: float) -> Request:
    fields = drafting.fields
    return Request(
        "r",
        (5, 6),
        SamplingParams(temperature=temperature, max_tokens=4),
        k=fields.k,
        max_k=fields.max_k,
        drafter=fields.drafter,
        verifier=fields.verifier,
        prediction_ids=(5,) if drafting.prediction is not None else (),
        lenience=fields.lenience,
        tree=fields.tree,
    )


def refusal(resolved: Callable[[], object]) -> InvalidRequest | None:
    try:
        resolved()
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("name", SERVERS)
def test_what_the_edge_takes_the_engine_serves(name: str) -> None:
    intake = intake_of(name)
    card = card_of(intake.capabilities)
    assert card.capabilities == intake.capabilities
    taken = [wish for wish in wishes() if refusal(partial(settle, card, *wish)) is None]
    assert taken
    for wish in taken:
        intake.check(request(settle(card, *wish), wish[3]))


@pytest.mark.parametrize("name", SERVERS)
def test_the_edge_refuses_more_than_the_engine_only_where_a_field_has_no_effect(name: str) -> None:
    can = intake_of(name).capabilities
    k, max_k = (None, -1, 0, 2, 17), (None, 1, 17)
    verifiers: tuple[Verifier | None, ...] = (None, "match", "rejection")
    for wish in starmap(
        SpeculationFields, product(k, max_k, (None, *DRAFTERS), verifiers, (False, True), (None, 0.5, 1.0))
    ):
        loose, strict = (refusal(partial(resolve, wish, can, strict=strict)) for strict in (False, True))
        assert strict is not None or loose is None
        if strict is None:
            assert resolve(wish, can) == resolve(wish, can, strict=True)
        elif loose is None:
            assert "has no effect" in str(strict) or "needs a prediction" in str(strict)
