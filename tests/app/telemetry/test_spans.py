"""All attributes of a finished exchange's spans. A test fails if a name goes missing."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.fake_engine import Script
from app.telemetry.spans import Piece, choice_pieces
from engine.types import Output, Request
from tests.app.harness import PROMPT, call
from tests.app.telemetry.tracing import ROUNDS, STEPS, Traced, record_of, recorded, step, sticking_out, told

# What each kind of span always has, in words and not by app/telemetry/names.py's constants: a viewer reads words.
ASKED = {
    "gen_ai.request.model", "gen_ai.request.stream", "gen_ai.request.max_tokens", "gen_ai.request.temperature",
    "gen_ai.request.top_p", "gen_ai.request.frequency_penalty", "gen_ai.request.presence_penalty",
}  # fmt: skip
KIND = {"openinference.span.kind"}
ANY = KIND | {
    "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.model", "gen_ai.response.id",
    "specdec.request.id", "llm.model_name",
}  # fmt: skip
USED = {
    "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
    "gen_ai.usage.cache_read.input_tokens", "llm.token_count.prompt", "llm.token_count.completion",
    "llm.token_count.total", "llm.token_count.prompt_details.cache_read",
}  # fmt: skip
SPECULATED = {
    "specdec.enabled", "specdec.policy", "specdec.k.max", "specdec.verifier", "specdec.seed", "specdec.preemptions",
    "specdec.rounds.count", "specdec.steps.plain", "specdec.tokens.drafted", "specdec.tokens.accepted",
    "specdec.tokens.rolled_back", "specdec.tokens.recovered", "specdec.tokens.bonus", "specdec.tokens.emitted",
    "specdec.tokens.truncated", "specdec.time.queue_us", "specdec.time.prefill_us", "specdec.time.decode_us",
    "specdec.time.draft_us", "specdec.time.verify_us", "specdec.rounds.table",
}  # fmt: skip
DRAFTED = {
    "specdec.drafter", "specdec.acceptance.rate", "specdec.acceptance.length", "specdec.acceptance.histogram",
}  # fmt: skip
COLUMNS = {
    f"specdec.rounds.{column}"
    for column in (
        "step", "k", "reason", "alpha_permille", "drafted", "accepted", "drafter", "batch_size", "began_us",
        "draft_us", "verify_us", "overhead_us",
    )
}  # fmt: skip
DECODE = KIND | COLUMNS | {
    "specdec.choice.index", "specdec.drafters", "specdec.reasons", "specdec.rounds.total", "specdec.rounds.strip",
    "output.value", "output.mime_type",
}  # fmt: skip
ROUND = {
    f"specdec.round.{fact}" for fact in ("index", "k", "drafted", "accepted", "emitted", "draft_us", "verify_us")
} | {"specdec.step.index", "specdec.alpha.estimate", "specdec.batch.size", *KIND}
STEP = KIND | {
    f"specdec.step.{fact}"
    for fact in (
        "index", "batch_size", "prefill_tokens", "drafted", "accepted", "emitted", "draft_us", "verify_us",
        "policy_us", "running", "waiting", "preempted", "failed", "trace_ids",
    )
}  # fmt: skip


def plain(request: Request) -> Iterator[Output]:
    record = record_of(request, [ROUNDS[0], ROUNDS[3]])
    record.k_max, record.drafter, record.fixed_k = 0, None, 0
    yield Output(request.id, (1, 2), "x", "length", record=record)


@pytest.mark.parametrize(
    ("fields", "script", "more"),
    [
        ({}, recorded, DRAFTED),
        ({"stream": True}, recorded, DRAFTED),
        ({"speculation": {"mode": "off"}}, plain, {"specdec.disabled_reason", "specdec.k.fixed"}),
        ({"speculation": {"k": 4}}, recorded, DRAFTED | {"specdec.k.fixed"}),
        ({"n": 2}, recorded, DRAFTED | {"gen_ai.request.choice.count"}),
        ({"top_k": 5, "seed": 9}, recorded, DRAFTED | {"gen_ai.request.top_k", "gen_ai.request.seed"}),
        (
            {"lossy": {"lenience": 0.5}, "speculation": {"verifier": "rejection"}},
            recorded,
            DRAFTED | {"specdec.lenience"},
        ),
        (
            {"prediction": {"type": "content", "content": "abcdef"}},
            recorded,
            DRAFTED | {f"specdec.prediction.{word}" for word in ("tokens", "accepted", "rejected")},
        ),
    ],
)
def test_a_request_span_has_exactly_these_attributes(fields: dict[str, Any], script: Script, more: set[str]) -> None:
    traced = Traced(script)
    assert call(traced.app, PROMPT | fields).status == 200
    assert traced.attributes().keys() == ANY | ASKED | USED | SPECULATED | more


def test_every_other_span_has_exactly_these_attributes() -> None:
    traced = Traced(level="rounds")
    call(traced.app, PROMPT)
    traced.client.stepped([step(requests=(traced.client.submitted[0].id,))])
    assert traced.attributes("specdec.queue").keys() == KIND | {"specdec.choice.index", "specdec.queue.ahead"}
    assert traced.attributes("specdec.prefill").keys() == KIND | {
        "specdec.choice.index", "specdec.prefill.tokens", "specdec.prefill.cached_tokens", "specdec.prefill.passes",
    }  # fmt: skip
    assert traced.attributes("specdec.decode").keys() == DECODE | {"specdec.rounds.spans_omitted"}
    rounds = [told(span).keys() - ROUND for span in traced.spans("specdec.round")]
    both = {"specdec.policy.reason", "specdec.drafter.name"}
    assert rounds == [set(), both, both, {"specdec.policy.reason"}, both]
    assert all(told(span).keys() >= ROUND for span in traced.spans("specdec.round"))
    assert traced.attributes("specdec.engine_step").keys() == STEP


@pytest.mark.parametrize(
    ("path", "asked", "operation"),
    [
        ("/v1/completions", PROMPT | {"n": 2}, "text_completion"),
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "abc"}], "n": 2}, "chat"),
    ],
)
def test_viewers_of_either_convention_read_the_same_facts(path: str, asked: dict[str, Any], operation: str) -> None:
    """OpenInference's names, which Phoenix reads, beside OpenTelemetry's. Only the request is an LLM's span: a viewer
    adds up the tokens of all such spans."""
    traced = Traced(level="rounds")
    assert call(traced.app, asked, path=path).status == 200
    traced.client.stepped([step(requests=(traced.client.submitted[0].id,))])
    said = traced.attributes()
    assert said["gen_ai.operation.name"] == operation
    assert said["llm.model_name"] == said["gen_ai.response.model"] == "fake"
    assert said["llm.token_count.prompt"] == said["gen_ai.usage.input_tokens"] == 3
    assert said["llm.token_count.completion"] == said["gen_ai.usage.output_tokens"] == 18
    assert said["llm.token_count.total"] == 21
    assert said["llm.token_count.prompt_details.cache_read"] == said["gen_ai.usage.cache_read.input_tokens"] == 2
    spans = traced.exporter.get_finished_spans()
    kinds = {span.name: told(span)["openinference.span.kind"] for span in spans}
    assert kinds.pop(f"{operation} fake") == "LLM"
    assert set(kinds.values()) == {"CHAIN"}
    assert len(kinds) == 5
    counted = [span.name for span in spans if any(key.startswith("llm.token_count.") for key in told(span))]
    assert counted == [f"{operation} fake"]


def test_what_a_chats_span_says() -> None:
    traced = Traced(text=True)
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
    chat = {"model": "fake", "messages": messages}
    reply = call(traced.app, chat, path="/v1/chat/completions")
    said = traced.attributes()
    assert (traced.span().name, said["gen_ai.operation.name"]) == ("chat fake", "chat")
    assert said["gen_ai.response.id"] == json.loads(reply.reply)["id"] == "chatcmpl-" + said["specdec.request.id"]
    assert said["specdec.request.id"] == reply.reply_headers["x-request-id"]
    told_messages = [(m["role"], m["parts"][0]["content"]) for m in json.loads(said["gen_ai.input.messages"])]
    assert told_messages == [("system", "ab"), ("user", "c")]
    assert "gen_ai.request.max_tokens" not in said, "the context is the limit"
    assert "gen_ai.request.choice.count" not in said


def test_what_a_request_span_says() -> None:
    traced = Traced()
    reply = call(traced.app, PROMPT | {"temperature": 0, "max_tokens": 9})
    said = traced.attributes()
    assert traced.span().name == "text_completion fake"
    assert said["gen_ai.response.id"] == json.loads(reply.reply)["id"] == "cmpl-" + said["specdec.request.id"]
    assert said["gen_ai.request.temperature"] == 0.0  # vLLM's spans lose it
    assert type(said["gen_ai.request.temperature"]) is float
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (3, 9)
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    expected = {
        "enabled": True, "policy": "goodput", "k.max": 8, "drafter": "cascade", "verifier": "match", "seed": 5,
        "preemptions": 1, "rounds.count": 3, "steps.plain": 2, "tokens.drafted": 9, "tokens.accepted": 5,
        "tokens.rolled_back": 4, "tokens.recovered": 2, "tokens.bonus": 1, "tokens.emitted": 9, "tokens.truncated": 1,
        "acceptance.rate": 5 / 9, "acceptance.length": 1 + 5 / 3, "acceptance.histogram": (1, 1, 0, 0, 1, 0, 0, 0, 0),
        "time.queue_us": 10_000, "time.prefill_us": 20_000, "time.decode_us": 70_000, "time.draft_us": 900,
        "time.verify_us": 4_500,
    }  # fmt: skip
    assert {key: said[f"specdec.{key}"] for key in expected} == expected
    assert all(type(said[f"specdec.{key}"]) is type(value) for key, value in expected.items())


def test_the_rounds_in_columns() -> None:
    traced = Traced()
    call(traced.app, PROMPT)
    said = traced.attributes("specdec.decode")
    assert said["specdec.drafters"] == (
        "none",
        "model",
        "ngram",
        "lookup",
        "prediction",
        "cascade",
        "suffix",
        "lookahead",
        "merged",
    )
    assert said["specdec.reasons"] == ("none", "policy", "user", "cap", "cache", "acceptance", "load", "probe")
    columns = list(zip(*ROUNDS, strict=True))
    named = {
        "step": STEPS, "k": columns[0], "alpha_permille": columns[2], "drafted": columns[3], "accepted": columns[4],
        "batch_size": columns[7], "began_us": columns[8], "draft_us": columns[9], "verify_us": columns[10],
        "overhead_us": [100, 100, 200, 200, 300],
    }  # fmt: skip
    assert {name: list(said[f"specdec.rounds.{name}"]) for name in named} == {k: list(v) for k, v in named.items()}
    assert traced.attributes("specdec.prefill")["specdec.prefill.passes"] == 3  # two, and the one that ended it
    assert [said["specdec.drafters"][i] for i in said["specdec.rounds.drafter"]] == [c or "none" for c in columns[6]]
    assert [said["specdec.reasons"][i] for i in said["specdec.rounds.reason"]] == [c or "none" for c in columns[1]]
    assert said["specdec.rounds.strip"] == ".40.1"
    assert said["specdec.rounds.total"] == 5
    assert all(type(value) is int and value >= 0 for name in COLUMNS for value in said[name])


def test_spans_lie_where_the_engine_was() -> None:
    traced = Traced(level="rounds")
    before = time.time_ns()
    call(traced.app, PROMPT)
    assert sticking_out(traced.exporter.get_finished_spans()) == []
    request = traced.span()
    queue, prefill, decode = (traced.span(f"specdec.{phase}") for phase in ("queue", "prefill", "decode"))
    assert all(span.parent == request.context for span in (queue, prefill, decode))
    assert before <= request.start_time <= queue.start_time <= time.time_ns()  # type: ignore[operator]
    assert request.end_time == decode.end_time  # as the exchange says, and not when somebody wrote it down
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    lengths = [span.end_time - span.start_time for span in (queue, prefill, decode)]  # type: ignore[operator]
    assert lengths == pytest.approx([10e6, 20e6, 70e6], abs=1e3)
    first, *others = traced.spans("specdec.round")
    assert first.parent == prefill.context  # it ended the prompt
    assert all(span.parent == decode.context for span in others)
    begins = [span.start_time - queue.start_time for span in (first, *others)]  # type: ignore[operator]
    assert begins == pytest.approx([1e3 * row[8] for row in ROUNDS], abs=1e3)
    lasts = [span.end_time - span.start_time for span in (first, *others)]  # type: ignore[operator]
    assert lasts == pytest.approx([1e3 * row[11] for row in ROUNDS], abs=1e3)


def test_each_choice_has_its_own_spans() -> None:
    traced = Traced()
    call(traced.app, PROMPT | {"prompt": ["ab", "c"], "n": 2})
    for phase in ("queue", "prefill", "decode"):
        spans = traced.spans(f"specdec.{phase}")
        assert [told(span)["specdec.choice.index"] for span in spans] == [0, 1, 2, 3]
        assert all(span.parent == traced.span().context for span in spans)
    said = traced.attributes()
    assert said["gen_ai.request.choice.count"] == 4
    assert said["gen_ai.response.finish_reasons"] == ("stop",) * 4
    assert said["gen_ai.usage.input_tokens"] == 3  # each prompt once
    assert said["gen_ai.usage.cache_read.input_tokens"] == 4  # what the first choice of each found
    assert (said["specdec.tokens.drafted"], said["specdec.rounds.count"]) == (36, 12)
    assert said["specdec.time.draft_us"] == 900  # they shared the steps


@pytest.mark.parametrize("choices", [16, 17, 20])
def test_of_many_choices_the_first_ones_have_spans(choices: int) -> None:
    traced = Traced()
    call(traced.app, PROMPT | {"n": choices})
    for phase in ("queue", "prefill", "decode"):
        indices = [told(span)["specdec.choice.index"] for span in traced.spans(f"specdec.{phase}")]
        assert indices == list(range(16))
    omitted = choices - 16
    assert traced.attributes().get("specdec.choices.omitted") == (omitted or None)
    assert traced.attributes()["specdec.rounds.count"] == 3 * choices  # of all of them


def test_spans_lie_within_their_parents() -> None:
    """The step of the first round began before it admitted the request and ended after its first token, that of the
    last one after the request's end; what they say of the steps' times stays whole."""
    rounds = [(*ROUNDS[0][:8], 9_000, 0, 900, 25_000), (*ROUNDS[1][:8], 99_000, 400, 1_000, 1_500)]

    def long(request: Request) -> Iterator[Output]:
        yield Output(request.id, (1,), "a", "stop", record=record_of(request, rounds))

    traced = Traced(long, level="rounds")
    call(traced.app, PROMPT)
    spans = traced.exporter.get_finished_spans()
    assert len(spans) == 6
    assert sticking_out(spans) == []
    times = {span.name: (span.start_time, span.end_time) for span in spans}
    queue, prefill, decode = (times[f"specdec.{phase}"] for phase in ("queue", "prefill", "decode"))
    assert [end - begin for begin, end in (queue, prefill, decode)] == pytest.approx([9e6, 21e6, 70e6], abs=1e3)  # type: ignore[operator]
    assert (queue[1], prefill[1]) == (prefill[0], decode[0])
    first, last = ((span.start_time, span.end_time) for span in traced.spans("specdec.round"))
    assert (first, last[1]) == (prefill, decode[1])
    assert traced.attributes("specdec.decode")["specdec.rounds.began_us"] == (9_000, 99_000)


def test_a_piece_within_another() -> None:
    part = Piece("part", 2.0, 9.0, {})
    whole = Piece("whole", 1.0, 5.0, {"a": 1}, (part,))
    assert whole.within(0.0, 10.0) == replace(whole, parts=(replace(part, ended=5.0),))
    assert whole.within(3.0, 4.0) == replace(whole, began=3.0, ended=4.0, parts=(replace(part, began=3.0, ended=4.0),))
    beside = whole.within(6.0, 7.0)  # nothing of it lies there
    assert (beside.began, beside.ended) == (6.0, 6.0)
    assert (whole.within(-2.0, 0.5).began, whole.within(-2.0, 0.5).ended) == (0.5, 0.5)


def test_a_first_round_never_begins_before_the_request_came() -> None:
    record = record_of(Request("r", (1,)))
    record.rounds[0] = record.rounds[0]._replace(began_us=-4_000)
    queue, prefill, _ = choice_pieces(0, record, rounds=False)
    assert queue.began == queue.ended == prefill.began == record.arrived


def test_a_request_that_did_not_come_so_far_has_no_later_spans() -> None:
    def waited(request: Request) -> Iterator[Output]:
        record = record_of(request, [])
        record.admitted = None
        yield Output(request.id, (), "", "length", record=record)

    def read(request: Request) -> Iterator[Output]:
        yield Output(request.id, (), "", "length", record=record_of(request, []))

    for script, phases in ((waited, {"specdec.queue"}), (read, {"specdec.queue", "specdec.prefill"})):
        traced = Traced(script, level="rounds")
        call(traced.app, PROMPT)
        spans = [span for span in traced.exporter.get_finished_spans() if span.name.startswith("specdec.")]
        assert {span.name for span in spans} == phases
        assert [told(s)["specdec.prefill.passes"] for s in traced.spans("specdec.prefill")] == [2] * (len(phases) - 1)
        assert spans[-1].end_time - spans[0].start_time == pytest.approx(100e6, abs=1e3)  # type: ignore[operator]


def test_a_draft_that_came_while_some_choices_ran_was_possible() -> None:
    def script(request: Request) -> Iterator[Output]:
        return recorded(request) if request.choice_index else plain(request)

    traced = Traced(script)
    call(traced.app, PROMPT | {"n": 2})
    said = traced.attributes()
    assert (said["specdec.enabled"], said["specdec.k.max"]) == (True, 8)
    assert "specdec.disabled_reason" not in said


@pytest.mark.parametrize(
    ("fields", "k_max", "policy", "reason"),
    [
        ({"speculation": {"mode": "off"}}, 0, "goodput", "user"),
        ({}, 0, "goodput", "no_drafter"),
        ({}, 8, "off", "policy"),
        ({"speculation": {"k": 4}}, 8, "off", None),
        ({}, 8, "goodput", None),
    ],
)
def test_why_nothing_was_drafted(fields: dict[str, Any], k_max: int, policy: str, reason: str | None) -> None:
    def script(request: Request) -> Iterator[Output]:
        record = record_of(request, [ROUNDS[0], ROUNDS[3]])
        record.k_max, record.policy = k_max, policy
        yield Output(request.id, (1, 2), "x", "length", record=record)

    traced = Traced(script)
    call(traced.app, PROMPT | fields)
    said = traced.attributes()
    assert said["specdec.enabled"] is (reason is None)
    assert said.get("specdec.disabled_reason") == reason
