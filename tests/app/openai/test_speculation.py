"""The speculation fields of a request, on servers with different drafters and policies, and the reply's fields."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.openai.request import parse
from app.openai.speculation import Drafting
from engine.speculation import SpeculationFields
from engine.trees import Growth
from engine.types import REASONS, InvalidRequest
from tests.app.harness import PROMPT, call, events

CARD = FakeEngineClient().model
NO_DRAFTER: dict[str, Any] = {"max_spec_length": 0, "drafters": (), "drafter": None}

# Servers that draft for nobody who does not ask.
QUIET: list[dict[str, Any]] = [{"policy": "off"}, {"drafter": None}]

GUESS = {"type": "content", "content": "abc"}


def settled(fields: dict[str, Any], **card: Any) -> Drafting:
    return parse(json.dumps(PROMPT | fields).encode(), replace(CARD, **card)).drafting


def test_a_tree_of_drafts_is_taken_as_it_is() -> None:
    assert settled({"speculation": {"tree": [3, 1, 1]}}, max_spec_length=9).fields.tree == (3, 1, 1)
    assert settled({"speculation": {"tree": [2], "mode": "fixed", "verifier": "rejection"}}).fields.tree == (2,)


def test_a_tree_that_grows_is_taken_as_it_is() -> None:
    assert settled({"speculation": {"tree": {"nodes": 7, "depth": 4}}}).fields.tree == Growth(7, 4)


@pytest.mark.parametrize(
    ("speculation", "message", "param"),
    [
        ({"tree": [3, 3, 3]}, "more drafts than this server's maximum, 16", "speculation.tree"),
        ({"tree": [2], "k": 2}, "leave out k", "speculation.tree"),
        ({"tree": [2], "max_k": 2}, "leave out k", "speculation.tree"),
        ({"tree": [2], "mode": "auto"}, "leave out k", "speculation.tree"),
        ({"tree": [2], "mode": "off"}, "leave out k", "speculation.tree"),
        ({"tree": [2], "verifier": "block"}, "'match' or 'rejection'", "speculation.tree"),
        ({"tree": [2], "drafter": "lookahead"}, "leave out speculation.tree, or name", "speculation.tree"),
        ({"tree": []}, "at least 1 item", "speculation.tree"),
        ({"tree": [1] * 65}, "at most 64 items", "speculation.tree"),
        ({"tree": [0]}, "greater than or equal to 1", "speculation.tree.0"),
        ({"tree": 2}, "list", "speculation.tree"),
        ({"tree": {"nodes": 4}}, "depth is required", "speculation.tree.depth"),
        ({"tree": {"nodes": 4, "depth": 5}}, "a depth between 1 and its nodes", "speculation.tree"),
        ({"tree": {"nodes": 0, "depth": 1}}, "greater than or equal to 1", "speculation.tree.nodes"),
        ({"tree": {"nodes": 17, "depth": 4}}, "more drafts than this server's maximum, 16", "speculation.tree"),
        ({"tree": {"nodes": 4, "depth": 2, "width": 3}}, "unknown field", "speculation.tree.width"),
        ({"tree": {"nodes": 4, "depth": 2}, "k": 4}, "leave out k", "speculation.tree"),
        ({"tree": {"nodes": 4, "depth": 2}, "verifier": "rejection"}, "use verifier 'match'", "speculation.tree"),
        ({"tree": {"nodes": 4, "depth": 2}, "drafter": "lookup"}, "name the drafter 'model'", "speculation.tree"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(speculation: dict[str, Any], message: str, param: str) -> None:
    error = refused({"speculation": speculation}, max_spec_length=16)
    assert message in str(error)
    assert error.param == param


def test_a_server_with_deterministic_results_has_no_trees() -> None:
    assert "deterministic" in str(refused({"speculation": {"tree": [2]}}, trees=False))


def refused(fields: dict[str, Any], **card: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        settled(fields, **card)
    return caught.value


@pytest.mark.parametrize(
    ("speculation", "k", "max_k"),
    [
        ({}, None, None),
        ({"mode": "auto"}, None, None),
        ({"mode": "auto", "max_k": 8}, None, 8),
        ({"mode": "auto", "k": None, "max_k": 1}, None, 1),
        ({"max_k": 2}, None, 2),
        ({"mode": None, "max_k": None}, None, None),
        ({"verifier": "rejection"}, None, None),
        ({"drafter": "lookup"}, None, None),
        ({"k": 0}, 0, None),
        ({"k": 8}, 8, None),
        ({"mode": "off"}, 0, None),
        ({"mode": "off", "k": 0}, 0, None),
        ({"mode": "off", "max_k": None}, 0, None),
        ({"mode": "fixed", "k": 2}, 2, None),
        ({"mode": "fixed", "k": 0}, 0, None),
        ({"mode": None, "k": 2}, 2, None),
        ({"mode": "off", "steps": True, "tokens": True}, 0, None),
        ({"k": 2, "steps": None, "tokens": None}, 2, None),
        ({"max_k": 2, "tokens": True}, None, 2),
        ({"steps": True}, None, None),
    ],
)
def test_the_forms_of_speculation(speculation: dict[str, Any], k: int | None, max_k: int | None) -> None:
    client = FakeEngineClient()
    assert call(create_app(client), PROMPT | {"speculation": speculation}).status == 200
    assert (client.submitted[0].k, client.submitted[0].max_k) == (k, max_k)


@pytest.mark.parametrize("field", ["steps", "tokens"])
@pytest.mark.parametrize("speculation", [{}, {"mode": "off"}, {"mode": "auto"}, {"k": 0}])
@pytest.mark.parametrize("card", [{}, NO_DRAFTER, *QUIET])
def test_what_rounds_did_can_be_asked_of_every_server_in_every_mode(
    card: dict[str, Any], speculation: dict[str, Any], field: str
) -> None:
    asked = {"speculation": speculation | {field: True}}
    completion = parse(json.dumps(PROMPT | asked).encode(), replace(CARD, **card))
    assert (completion.tell_steps, completion.tell_tokens) == (field == "steps", field == "tokens")
    assert completion.drafting == settled({"speculation": speculation}, **card)


@pytest.mark.parametrize("value", [1, "true", [], {}])
@pytest.mark.parametrize("field", ["steps", "tokens"])
def test_only_true_and_false_ask_for_it(field: str, value: Any) -> None:
    error = refused({"speculation": {field: value}})
    assert (error.param, str(error)) == (
        f"speculation.{field}",
        f"speculation.{field}: Input should be a valid boolean",
    )


def test_without_a_drafter_only_k_0_can_be_asked_for() -> None:
    assert settled({"speculation": {"k": 0}}, **NO_DRAFTER) == Drafting(SpeculationFields(k=0), None)
    assert settled({"speculation": {"mode": "auto"}}, **NO_DRAFTER) == Drafting(SpeculationFields(auto=True), None)
    for speculation, param in (
        ({"k": 1}, "speculation.k"),
        ({"max_k": 1}, "speculation.max_k"),
        ({"drafter": "model"}, "speculation.drafter"),
    ):
        assert refused({"speculation": speculation}, **NO_DRAFTER).param == param


def test_a_drafter_that_this_server_lacks_is_refused_with_those_it_has() -> None:
    asked = {"speculation": {"drafter": "cascade"}}
    assert settled(asked).fields.drafter == "cascade"
    error = refused(asked, drafters=("ngram", "lookup"))
    assert error.param == "speculation.drafter"
    assert "it has: ngram, lookup" in str(error)
    error = refused({"prediction": GUESS}, drafters=("ngram", "lookup"))
    assert error.param == "prediction"
    assert "no drafter for predictions" in str(error)


@pytest.mark.parametrize("card", QUIET)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": {"verifier": "block"}}, "speculation.verifier"),
        ({"speculation": {"mode": "auto", "verifier": "block"}}, "speculation.verifier"),
        ({"lossy": {"lenience": 0.5}}, "lossy"),
    ],
)
def test_where_nobody_drafts_by_default_what_needs_drafts_is_refused(
    card: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    assert refused(fields, verifier="rejection", **card).param == param
    settled(fields, verifier="rejection")


@pytest.mark.parametrize("card", QUIET)
@pytest.mark.parametrize(
    "fields",
    [
        {"speculation": {"k": 2, "verifier": "block", "drafter": "model"}},
        {"speculation": {"mode": "fixed", "k": 2, "drafter": "lookup"}},
        {"speculation": {"drafter": "lookup", "verifier": "rejection"}, "lossy": {"lenience": 0.5}},
        {"speculation": {"drafter": "lookup", "max_k": 3}},
        {"prediction": GUESS},
    ],
)
def test_where_nobody_drafts_by_default_drafts_can_be_asked_for(card: dict[str, Any], fields: dict[str, Any]) -> None:
    assert settled(fields, **card) == settled(fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": {"mode": "auto", "drafter": "lookup"}}, "speculation.drafter"),
        ({"speculation": {"mode": "auto"}, "prediction": GUESS}, "prediction"),
    ],
)
def test_mode_auto_is_the_policys_word_and_not_a_wish_for_drafts(fields: dict[str, Any], param: str) -> None:
    """With policy off, mode auto gets no drafts, and fields that need drafts are refused."""
    assert refused(fields, policy="off").param == param
    bounded = settled({"speculation": {"mode": "auto", "max_k": 3}}, policy="off")
    assert bounded == Drafting(SpeculationFields(max_k=3, auto=True), None)
    settled(fields)
    settled(fields, drafter=None)  # the policy is at work, and the request says who drafts


def test_lossy_may_rest_on_the_servers_own_verifier() -> None:
    lossy = {"lossy": {"lenience": 0.5}}
    assert settled(lossy, verifier="rejection").fields.lenience == 0.5
    error = refused(lossy | {"speculation": {"verifier": "match"}}, verifier="rejection")
    assert "'rejection'" in str(error)


def test_typical_acceptance_is_asked_for_and_told() -> None:
    typical = {"lossy": {"typical": {"epsilon": 0.09, "delta": 0.3}}}
    assert settled(typical, verifier="rejection").fields.typical == (0.09, 0.3)
    client = FakeEngineClient()
    done = call(create_app(client), PROMPT | typical | {"speculation": {"verifier": "rejection"}})
    assert json.loads(done.reply)["lossy"] == typical["lossy"]
    assert client.submitted[0].typical == (0.09, 0.3)


@pytest.mark.parametrize(
    ("lossy", "param"),
    [
        ({}, "lossy"),
        ({"lenience": 0.5, "typical": {"epsilon": 0.1, "delta": 0.3}}, "lossy"),
        ({"typical": {"epsilon": 0.1}}, "lossy.typical.delta"),
        ({"typical": {"epsilon": 1, "delta": 0.3}}, "lossy.typical.epsilon"),
        ({"typical": {"epsilon": 0.1, "delta": 2}}, "lossy.typical.delta"),
        ({"typical": {"epsilon": 0.1, "delta": 0.3, "other": 1}}, "lossy.typical.other"),
    ],
)
def test_lossy_fields_that_cannot_hold_are_refused_by_name(lossy: dict[str, Any], param: str) -> None:
    assert refused({"lossy": lossy}, verifier="rejection").param == param


def test_the_card_is_read_anew_for_every_request() -> None:
    client = FakeEngineClient()
    app = create_app(client)
    asked = PROMPT | {"speculation": {"verifier": "block"}}
    assert call(app, asked).status == 200
    client.model = replace(client.model, policy="off")
    assert call(app, asked).status == 400
    client.model = replace(client.model, policy="fixed")
    assert call(app, asked).status == 200


def told(speculation: Any, *, stream: bool = False, **fields: Any) -> Any:
    done = call(create_app(FakeEngineClient()), PROMPT | {"speculation": speculation, "stream": stream} | fields)
    assert done.status == 200, done.reply
    reply = events(done)[-2] if stream else json.loads(done.reply)
    return reply["metrics"]["speculative_decoding"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("speculation", "mode", "most", "lengths", "decisions"),
    [
        (None, "auto", 8, [0, 0, 0, 6, 0, 0, 0, 0, 0], {"policy": 6}),
        ({"mode": "auto"}, "auto", 8, [0, 0, 0, 6, 0, 0, 0, 0, 0], {"policy": 6}),
        ({"mode": "auto", "max_k": 2}, "auto", 2, [0, 0, 6], {"policy": 6}),
        ({"k": 3}, "fixed", 3, [0, 0, 0, 6], {"user": 6}),
    ],
)
def test_a_reply_says_who_chose_k_how_large_it_was_and_why(
    stream: bool, speculation: Any, mode: str, most: int, lengths: list[int], decisions: dict[str, int]
) -> None:
    reply = told(speculation, stream=stream)
    assert (reply["mode"], reply["policy"], reply["num_spec_tokens"]) == (mode, "goodput", most)
    assert (reply["draft_length_histogram"], reply["decisions"]) == (lengths, decisions)
    assert len(reply["draft_length_histogram"]) == len(reply["acceptance_histogram"])


def test_the_rounds_of_all_choices_are_told_together() -> None:
    reply = told({"max_k": 2}, n=2)
    assert (reply["draft_length_histogram"], reply["decisions"]) == ([0, 0, 12], {"policy": 12})


@pytest.mark.parametrize("speculation", [{"mode": "off"}, {"k": 0}, {"mode": "fixed", "k": 0}])
def test_a_reply_without_speculation_says_nothing_of_it(speculation: dict[str, Any]) -> None:
    assert told(speculation) is None


def test_every_decision_has_a_reason_that_the_docs_name() -> None:
    operations = (Path(__file__).parents[3] / "docs/operations.md").read_text("utf-8")
    for reason in REASONS:
        assert f"`{reason}`" in operations


def test_health_shows_the_policy_and_why_another_was_refused() -> None:
    client = FakeEngineClient()
    app = create_app(client)

    def policy() -> Any:
        done = call(app, method="GET", path="/health")
        assert done.status == 200
        return json.loads(done.reply)["policy"]

    assert policy() == {"name": "goodput", "k": 5, "refused": None}
    client.model = replace(client.model, policy="off")
    client.refused = "k: Input should be a valid integer"
    assert policy() == {"name": "off", "k": 5, "refused": "k: Input should be a valid integer"}
    client.refused = None
    assert policy()["refused"] is None
