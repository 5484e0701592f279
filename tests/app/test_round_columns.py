"""A reply's metrics list every round if the client asks for it, in vLLM's lists and in our own columns."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from app import round_columns
from app.fake_engine import FakeEngineClient, Script, spell
from app.main import create_app
from engine.types import DRAFTERS, REASONS, Output, Request, RequestRecord, RoundRecord
from tests.app.harness import PROMPT, call, events
from tests.app.openai.test_completions import record

STEPS = {"speculation": {"steps": True}}

COLUMNS = ["step", "k", "reason", "alpha", "drafted", "accepted", "emitted", "drafter", "batch"]
TIMES = ["began_us", "draft_us", "verify_us", "overhead_us"]


def told(script: Script = spell, *, stream: bool = False, **fields: Any) -> Any:
    done = call(create_app(FakeEngineClient(script)), PROMPT | STEPS | fields | {"stream": stream})
    assert done.status == 200, done.reply
    reply = events(done)[-2] if stream else json.loads(done.reply)
    return reply["metrics"]["speculative_decoding"]


def four_rounds(request: Request, **columns: Any) -> RequestRecord:
    """Four rounds: the prompt's, one with drafts, a plain one, and one with drafts of another drafter."""
    facts: dict[str, Any] = {
        "k": [0, 4, 0, 4],
        "reason": [-1, *(REASONS.index(reason) for reason in ("cap", "load", "policy"))],
        "alpha": [0, 800, 650, 640],
        "drafted": [0, 4, 0, 3],
        "accepted": [0, 2, 0, 3],
        "emitted": [1, 3, 1, 1],
        "proposer": [-1, DRAFTERS.index("lookup"), -1, DRAFTERS.index("model")],
        "step": [7, 8, 9, 12],
        "batch": [3, 3, 2, 1],
        "began_us": [10_000, 30_000, 31_000, 32_500],
        "draft_us": [0, 200, 0, 400],
        "score_us": [900, 700, 600, 500],
        "step_us": [1000, 1000, 650, 1000],
    }
    facts |= columns
    rounds = [RoundRecord(**dict(zip(facts, row, strict=True))) for row in zip(*facts.values(), strict=True)]
    return record(request, rounds=rounds)


def scripted(request: Request) -> Iterator[Output]:
    yield Output(request.id, (97,), "a", "stop", record=four_rounds(request))


@pytest.mark.parametrize("stream", [False, True])
def test_the_lists_of_one_choice(stream: bool) -> None:
    """vLLM's have one entry per round that verified a draft; our columns have one per round."""
    plain = told(scripted, stream=stream, speculation=None)
    assert told(scripted, stream=stream) == plain | {
        "per_step_accepted": [2, 3],
        "per_step_drafted": [4, 3],
        "rounds": {
            "step": [7, 8, 9, 12],
            "k": [0, 4, 0, 4],
            "reason": [None, "cap", "load", "policy"],
            "alpha": [0, 800, 650, 640],
            "drafted": [0, 4, 0, 3],
            "accepted": [0, 2, 0, 3],
            "emitted": [1, 3, 1, 1],
            "drafter": [None, "lookup", None, "model"],
            "batch": [3, 3, 2, 1],
            "began_us": [10_000, 30_000, 31_000, 32_500],
            "draft_us": [0, 200, 0, 400],
            "verify_us": [900, 700, 600, 500],
            "overhead_us": [100, 100, 50, 100],
        },
    }
    assert "rounds" not in plain
    assert not any(name.startswith("per_step") for name in plain)


def test_the_docstring_names_every_column() -> None:
    made = round_columns.public_columns(round_columns.raw_columns(four_rounds(Request("r", (1,))).rounds))
    assert list(made) == COLUMNS + TIMES
    words = (round_columns.public_columns.__doc__ or "").replace(",", " ").split()
    assert set(made) <= set(words)


def test_the_lists_add_up_as_vllms_readers_require() -> None:
    reply = told(max_tokens=7)
    accepted, drafted = reply["per_step_accepted"], reply["per_step_drafted"]
    assert len(accepted) == len(drafted) == reply["num_spec_steps"] == sum(reply["acceptance_histogram"])
    assert sum(accepted) == reply["num_accepted_draft_tokens"] > 0
    assert sum(drafted) == reply["num_draft_tokens"]
    assert all(a <= d <= reply["num_spec_tokens"] for a, d in zip(accepted, drafted, strict=True))
    assert reply["acceptance_histogram"] == [accepted.count(n) for n in range(reply["num_spec_tokens"] + 1)]
    assert reply["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)
    assert reply["draft_acceptance_rate"] == sum(accepted) / sum(drafted)
    assert all(type(n) is int for n in (*accepted, *drafted, *reply["acceptance_histogram"]))


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_have_lists_of_their_own(stream: bool) -> None:
    """vLLM's lists belong to one sequence, so with several choices they are not at the top level."""

    def script(request: Request) -> Iterator[Output]:
        first = request.choice_index == 0
        made = four_rounds(request) if first else four_rounds(request, accepted=[0, 1, 0, 0])
        yield Output(request.id, (97,), "a", "stop", record=made)

    reply = told(script, n=2, stream=stream)
    assert "per_step_accepted" not in reply
    assert "rounds" not in reply
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["per_step_accepted"] for choice in reply["choices"]] == [[2, 3], [1, 0]]
    assert [choice["rounds"]["accepted"] for choice in reply["choices"]] == [[0, 2, 0, 3], [0, 1, 0, 0]]
    assert reply["num_accepted_draft_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speculation", [{"mode": "off"}, {"k": 0}])
def test_a_request_without_speculation_is_told_its_plain_rounds(speculation: dict[str, Any], stream: bool) -> None:
    reply = told(max_tokens=2, speculation=speculation | {"steps": True}, stream=stream)
    assert (reply["mode"], reply["drafter"], reply["num_spec_tokens"]) == ("off", None, 0)
    assert (reply["per_step_accepted"], reply["per_step_drafted"]) == ([], [])
    assert (reply["acceptance_histogram"], reply["mean_acceptance_length"]) == ([0], 1.0)
    assert (reply["draft_acceptance_rate"], reply["num_spec_steps"]) == (0.0, 0)
    assert reply["rounds"]["emitted"] == [1, 1]
    assert reply["rounds"]["drafter"] == [None, None]
    assert told(max_tokens=2, speculation=speculation | {"steps": False}, stream=stream) is None
