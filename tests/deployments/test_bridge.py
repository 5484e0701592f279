"""The bridge between an event loop and the engine thread, with the embedded pair and the real HTTP application."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import processors

from app.client import Token
from app.main import create_app
from deployments.bridge import TOKENIZE_INLINE, LocalClient
from engine.config import ConfigError, EngineConfig, GenerationConfig
from engine.engine import Engine, StepResult
from engine.types import (
    EngineStopped,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    SamplingParams,
    StepStats,
)
from engine.worker import EngineWorker
from policies.config import PolicyConfig

CONFIG = EngineConfig(
    "models/demo/target",
    "models/demo/draft",
    policy=PolicyConfig(name="fixed", k=4),  # goodput may draft nothing on a busy machine
    max_running=2,
    max_waiting=1,
    max_model_len=256,
    threads=1,
    generation_config="none",
)


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    client = LocalClient(Engine.from_config(CONFIG), "demo")
    yield client
    client.close()


def within(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def make_request(name: str, max_tokens: int = 8) -> Request:
    return Request(name, (300, 301), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


async def tokens_of(client: LocalClient, request: Request) -> list[int]:
    return [t async for output in client.submit([request])[0] for t in output.token_ids]


def test_who_watches_is_told_of_every_end_and_of_all_steps(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a cancelled request, whose record covers the time until the cancellation."""
    steps: list[StepStats] = []
    ended: list[Output] = []
    calls: list[int] = []

    def stepped(new: Sequence[StepStats]) -> None:
        calls.append(len(new))
        steps.extend(new)

    monkeypatch.setattr("deployments.bridge.REPORT_EVERY_S", 0.02)
    client.watch(stepped, ended.append)
    engine, go_on = client.worker.engine, threading.Event()
    before, step = engine.steps, engine.step

    def held() -> StepResult:
        """The fourth step begins after the cancellation, however slow the event loop is."""
        if engine.steps == before + 3:
            go_on.wait(60)
        return step()

    monkeypatch.setattr(engine, "step", held)

    async def scenario() -> None:
        whole, cut = client.submit([make_request("whole", 20), make_request("cut", 200)])
        while client.stats().steps < before + 3:
            time.sleep(0.001)  # noqa: ASYNC251 - the event loop stands still, so that it is told of several steps at once
        for _ in range(2):
            await anext(cut)
        client.cancel("cut")
        go_on.set()
        tokens = [t async for output in whole for t in output.token_ids]
        assert len(tokens) == 20
        while len(ended) < 2 or not steps or steps[-1].running:  # noqa: ASYNC110 - told by the clock
            await asyncio.sleep(0.01)
        assert [stats.step for stats in steps] == list(range(before + 1, client.stats().steps + 1))

    within(scenario())
    assert {output.request_id: output.finish_reason for output in ended} == {"whole": "length", "cut": "cancelled"}
    records = {output.request_id: output.record for output in ended}
    assert records["cut"] is not None
    assert 0 < records["cut"].output_tokens < 200
    assert sum(len(stats.parts) for stats in steps) == sum(len(r.column("step")) for r in records.values() if r)
    assert max(calls) > 1  # some at once


def test_concurrent_requests_get_their_own_outputs(client: LocalClient) -> None:
    async def three() -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(client, make_request(f"r{i}", 5 + i)) for i in range(3)))

    first, second, third = within(three())
    assert [len(first), len(second), len(third)] == [5, 6, 7]
    assert third[:5] == first
    assert third[:6] == second


def test_cancelling_ends_the_iterator_and_frees_the_slot(client: LocalClient) -> None:
    async def cancel_midway() -> str | None:
        (outputs,) = client.submit([make_request("r", 200)])
        await anext(outputs)
        client.cancel("r")
        client.cancel("r")
        reasons = [o.finish_reason async for o in outputs]
        assert not client._queues
        return reasons[-1]

    assert within(cancel_midway()) == "cancelled"
    limit = time.monotonic() + 60
    while client.stats().free_slots < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_refusals_leave_nothing_behind(client: LocalClient) -> None:
    async def overfill() -> None:
        with pytest.raises(InvalidRequest):
            client.submit([make_request("long", 1000)])
        streams = client.submit([make_request(f"r{i}", 100) for i in range(3)])
        with pytest.raises(Overloaded):
            client.submit([make_request("r3")])
        assert set(client._queues) == {"r0", "r1", "r2"}
        for i in range(3):
            client.cancel(f"r{i}")
        assert [[o.finish_reason async for o in s][-1] for s in streams] == ["cancelled"] * 3

    within(overfill())


def test_tokenizing_is_the_same_on_and_off_the_loop(client: LocalClient) -> None:
    short = "def f():\n"
    long = short * (TOKENIZE_INLINE // len(short) + 1)
    assert within(client.tokenize(long)) == client._tokenizer.encode(long)
    assert within(client.tokenize(short)) == client._tokenizer.encode(short)


def test_special_tokens_are_added_on_and_off_the_loop_alike(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy of the tokenizer that puts token 0 first, as those of checkpoints with a BOS token do."""
    copy = type(client._tokenizer)(CONFIG.target)
    token = min(copy.vocab, key=copy.vocab.__getitem__)
    copy._backend.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 0)])
    monkeypatch.setattr(client, "_tokenizer", copy)
    short, long = "é = '日本' ", "é = '日本' " * (TOKENIZE_INLINE // 9 + 1)
    assert within(client.tokenize(short)) == copy.encode(short)
    assert within(client.tokenize(long)) == copy.encode(long)
    assert copy.encode(short)[0] == copy.encode_long(long)[0] == 0
    for text in (short, long):
        assert [0, *within(client.tokenize(text, add_special_tokens=False))] == copy.encode(text)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = client.model.max_model_len * max(len(token) for token in client._tokenizer.vocab)
    assert limit > TOKENIZE_INLINE
    assert within(client.tokenize("a" * limit))
    monkeypatch.setattr(client._tokenizer, "encode", None)
    monkeypatch.setattr(client._tokenizer, "encode_long", None)
    with pytest.raises(InvalidRequest, match=str(client.model.max_model_len)) as refused:
        within(client.tokenize("a" * (limit + 1)))
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")


def test_no_tokenization_is_shorter_than_the_bound_allows(client: LocalClient) -> None:
    """A text of the longest tokens reaches the bound exactly; no text that fits exceeds it."""
    vocab = client._tokenizer.vocab
    for token_id in sorted(vocab.values(), key=lambda i: -len(client._tokenizer.decode([i])))[:20]:
        text = client._tokenizer.decode([token_id]) * 50
        assert len(text) <= len(client._tokenizer.encode(text)) * max(map(len, vocab))


def test_a_closed_client_says_that_it_has_stopped() -> None:
    closed = LocalClient(Engine.from_config(CONFIG), "demo")
    closed.close()

    async def ask() -> int:
        transport = httpx.ASGITransport(app=create_app(closed))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return (await http.post("/v1/completions", json={"model": "demo", "prompt": "x"})).status_code

    async def submit() -> None:
        with pytest.raises(EngineStopped):
            closed.submit([make_request("late")])

    within(submit())
    assert within(ask()) == 503


def test_a_prediction_is_tokenized_without_special_tokens(client: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = type(client._tokenizer)(CONFIG.target)
    token = min(copy.vocab, key=copy.vocab.__getitem__)
    copy._backend.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 0)])
    monkeypatch.setattr(client, "_tokenizer", copy)
    for text in ("def f", "def f():\n" * (TOKENIZE_INLINE // 8)):
        assert [0, *within(client.tokenize(text, "prediction"))] == copy.encode(text)
    with pytest.raises(InvalidRequest, match="characters of prediction") as refused:
        within(client.tokenize("a" * (client._max_characters + 1), "prediction"))
    assert refused.value.param == "prediction"


def test_tokens_are_shown_by_text_bytes_name_or_number(client: LocalClient) -> None:
    tokenizer = client._tokenizer
    ids = tokenizer.encode("naïve 🙂")
    assert b"".join(client.token(i).data for i in ids).decode() == client.detokenize(ids) == "naïve 🙂"
    assert client.token(min(tokenizer.special_ids)).data == b""
    assert client.token(min(tokenizer.special_ids)).text == tokenizer.name(min(tokenizer.special_ids))
    assert client.token(99_999) == Token("token_id:99999", b"")


@pytest.mark.parametrize(
    ("changes", "policy", "drafter", "verifier"),
    [
        ({"policy": PolicyConfig()}, "goodput", "model", "match"),
        ({"draft": None}, "fixed", None, "match"),
        ({"draft": None, "drafter": "lookup"}, "fixed", "lookup", "match"),
        ({"policy": PolicyConfig(name="off"), "verifier": "block"}, "off", "model", "block"),
        ({"policy": PolicyConfig(name="fixed", k=0)}, "off", "model", "match"),
        ({"policy": PolicyConfig(max_k=0)}, "off", "model", "match"),
    ],
)
def test_the_card_says_what_the_engine_has(
    changes: dict[str, Any], policy: str, drafter: str | None, verifier: str
) -> None:
    engine = Engine.from_config(replace(CONFIG, **changes))
    client = LocalClient(engine, "demo")
    client.close()
    card = client.model
    assert (card.policy, card.drafter, card.verifier, card.max_choices) == (policy, drafter, verifier, 3)
    assert card.drafters == engine.drafters
    assert ("model" in card.drafters) == ("draft" not in changes)
    assert card.sampling_defaults == {}


def test_the_card_tells_the_checkpoints_sampling_defaults(tmp_path: Path) -> None:
    target = tmp_path / "tuned"
    shutil.copytree(CONFIG.target, target)
    (target / "generation_config.json").write_text(json.dumps({"top_k": 20, "eos_token_id": 1}))
    settings: tuple[tuple[GenerationConfig, dict[str, float]], ...] = (("auto", {"top_k": 20}), ("none", {}))
    for setting, expected in settings:
        config = replace(CONFIG, target=str(target), draft=None, generation_config=setting)
        client = LocalClient(Engine.from_config(config), "demo")
        client.close()
        assert client.model.sampling_defaults == expected


def configured(client: LocalClient, policy: PolicyConfig) -> None:
    """Configure the policy in a thread of its own and wait until the engine uses it."""
    client.configure(policy)
    limit = time.monotonic() + 60
    while client.policy_status()["name"] != policy.name or client.policy_status()["k"] != policy.k:
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def live(client: LocalClient) -> Iterator[LocalClient]:
    """Yield the client and restore its policy at the end."""
    yield client
    configured(client, CONFIG.policy)


def test_a_policy_can_be_replaced_and_is_shown_at_once(live: LocalClient) -> None:
    configured(live, PolicyConfig(name="fixed", k=2))
    assert live.model.policy == live.stats().policy == "fixed"
    expected = {
        "name": "fixed",
        "k": 2,
        "max_k": None,
        "threshold": 0.4,
        "hysteresis": 0.02,
        "probe_share": 0.01,
        "trees": False,
    }
    shown = {"draft": "draft", "loading": None, "refused": None}
    assert live.policy_status() == expected | shown
    told = within(completion(live))["metrics"]["speculative_decoding"]
    assert (told["mode"], told["policy"]) == ("auto", "fixed")
    assert told["draft_length_histogram"][2] > 0
    assert sum(told["draft_length_histogram"][3:]) == 0


def test_a_draft_that_arrives_meanwhile_is_not_shown_as_missing(
    live: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loading may end between two looks. Nobody may see the old draft and that nothing changes."""
    engine = live.worker.engine
    arrived = engine.config.with_draft(None)

    def look(worker: EngineWorker) -> None:
        monkeypatch.setattr(engine, "config", arrived)

    monkeypatch.setattr(EngineWorker, "loading_draft", property(look))
    shown = live.policy_status()
    assert (shown["draft"], shown["loading"]) == (None, None)


def test_a_policy_that_the_engine_cannot_have_leaves_the_old_one(live: LocalClient) -> None:
    configured(live, PolicyConfig(name="fixed", k=2))
    for unfit in (PolicyConfig(name="fixed", k=17), PolicyConfig(max_k=17)):
        with pytest.raises(ConfigError, match="max_spec_length"):
            live.configure(unfit)
    live.refuse("because")
    assert (live.model.policy, live.policy_status()["k"], live.policy_status()["refused"]) == ("fixed", 2, "because")
    configured(live, PolicyConfig(name="fixed", k=3))
    assert live.policy_status()["refused"] is None


def test_with_the_policy_off_only_those_who_ask_are_drafted_for(live: LocalClient) -> None:
    plain = within(completion(live))
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    configured(live, PolicyConfig(name="off"))
    for speculation in (None, {"mode": "auto"}, {"max_k": 3}):
        reply = within(completion(live, speculation=speculation))
        told = reply["metrics"]["speculative_decoding"]
        assert (told["mode"], told["policy"], told["num_draft_tokens"]) == ("auto", "off", 0)
        assert reply["choices"] == plain["choices"]
    asking: list[tuple[dict[str, Any], int]] = [
        ({"k": 2}, 2),
        ({"drafter": "model"}, 5),
        ({"drafter": "model", "max_k": 3}, 3),
    ]
    for wish, most in asking:
        reply = within(completion(live, speculation=wish))
        told = reply["metrics"]["speculative_decoding"]
        assert told["mode"] == "fixed"
        assert told["num_draft_tokens"] > 0
        assert told["num_spec_tokens"] == most == len(told["draft_length_histogram"]) - 1
        assert reply["choices"] == plain["choices"]


def test_max_k_bounds_what_the_policy_chooses(live: LocalClient) -> None:
    configured(live, PolicyConfig(name="fixed", k=5))
    told = within(completion(live, speculation={"max_k": 2}))["metrics"]["speculative_decoding"]
    assert (told["mode"], told["num_spec_tokens"], len(told["draft_length_histogram"])) == ("auto", 2, 3)
    assert told["draft_length_histogram"][2] > 0
    assert told["decisions"]["user"] > 0


async def completion(client: LocalClient, **fields: Any) -> dict[str, Any]:
    transport = httpx.ASGITransport(app=create_app(client))
    body = {"model": "demo", "prompt": "import os\n", "max_tokens": 24, "temperature": 0.7, "seed": 3}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = (await http.post("/v1/completions", json=body | fields)).json()
    assert "choices" in reply, reply
    return dict(reply)


def test_choices_of_a_real_engine_differ_and_repeat_with_their_seed(client: LocalClient) -> None:
    """The first choice has the text of a request with n = 1, whatever the drafter."""
    first = within(completion(client, n=2))
    texts = [c["text"] for c in first["choices"]]
    assert texts[0] != texts[1]
    assert [c["text"] for c in within(completion(client, n=2))["choices"]] == texts
    again = within(completion(client, speculation={"drafter": "lookup"}))
    assert again["choices"][0]["text"] == texts[0]
    assert again["metrics"]["speculative_decoding"]["drafter"] == "lookup"


def test_logprobs_of_a_real_engine_with_echo_point_into_the_text(client: LocalClient) -> None:
    prompt = "naïve = '🙂日本'\n"
    reply = within(completion(client, prompt=prompt, echo=True, logprobs=2, temperature=0))
    (choice,) = reply["choices"]
    told, text = choice["logprobs"], choice["text"]
    assert text.startswith(prompt)
    assert len({len(column) for column in told.values()}) == 1
    assert len(told["tokens"]) == reply["usage"]["total_tokens"]
    assert told["token_logprobs"][0] is None
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text.startswith(token, offset)
    for token, logprob, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[1:]:
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
    generated = told["top_logprobs"][reply["usage"]["prompt_tokens"] :]
    chosen = told["token_logprobs"][reply["usage"]["prompt_tokens"] :]
    assert [max(top.values()) for top in generated] == chosen  # greedy


def test_a_prompt_alone_can_be_scored_by_a_real_engine(client: LocalClient) -> None:
    reply = within(completion(client, echo=True, logprobs=0, max_tokens=0))
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("import os\n", "length")
    assert len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"]


def test_a_prediction_that_comes_true_is_counted(client: LocalClient) -> None:
    told = within(completion(client, temperature=0))
    guess = {"type": "content", "content": told["choices"][0]["text"]}
    again = within(completion(client, temperature=0, prediction=guess))
    assert again["choices"][0]["text"] == told["choices"][0]["text"]
    details = again["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert again["metrics"]["speculative_decoding"]["drafter"] == "cascade"


def test_lossy_reaches_a_real_engine_and_comes_back(client: LocalClient) -> None:
    lossy = {"lossy": {"lenience": 0.5}, "speculation": {"verifier": "rejection"}}
    assert within(completion(client, **lossy))["lossy"] == {"lenience": 0.5}


def test_the_http_application_over_a_real_engine(client: LocalClient) -> None:
    """Streamed and whole text agree, and the acceptance record reaches the response."""

    async def ask() -> tuple[dict[str, Any], str]:
        transport = httpx.ASGITransport(app=create_app(client))
        body = {"model": "demo", "prompt": "import os\n", "max_tokens": 32, "temperature": 0.7, "seed": 3}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            whole = (await http.post("/v1/completions", json=body)).json()
            streamed = (await http.post("/v1/completions", json=body | {"stream": True})).text
        return whole, streamed

    whole, streamed = within(ask())
    events = [json.loads(x[6:]) for x in streamed.splitlines() if x.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
    assert len(events) < 32
    told = whole["metrics"]["speculative_decoding"]
    assert whole["seed"] == 3
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] > 0
    assert sum(j * n for j, n in enumerate(told["acceptance_histogram"])) == told["num_accepted_draft_tokens"]


# --- vLLM's fields and endpoints on a real tokenizer -----------------------------------------------------------------


def posted(client: LocalClient, path: str, fields: dict[str, Any]) -> Any:
    async def post() -> Any:
        transport = httpx.ASGITransport(create_app(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            reply = await http.post(path, json=fields)
            assert reply.status_code == 200, reply.text
            return reply.json()

    return within(post())


def written(client: LocalClient, k: int, **fields: Any) -> Any:
    asked = {"model": "demo", "prompt": "def main(", "max_tokens": 24, "seed": 5, "return_token_ids": True}
    body = posted(
        client, "/v1/completions", asked | {"speculation": {"mode": "fixed", "k": k} if k else {"mode": "off"}} | fields
    )
    if k:
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    (choice,) = body["choices"]
    return {name: choice[name] for name in ("text", "token_ids", "finish_reason")}


def test_excluded_tokens_stay_out_of_the_text_whatever_the_speculation(client: LocalClient) -> None:
    free = written(client, 0)
    ids = free["token_ids"]
    words = [word for word in free["text"].split() if word.isalpha()][:2]
    assert words
    without = written(client, 0, bad_words=words)
    assert without != free
    allowed = sorted({*ids, *range(300, 340)})[2:]
    only = written(client, 0, allowed_token_ids=allowed)
    assert {*only["token_ids"]} <= {*allowed}
    for k in (1, 4):
        assert written(client, k, bad_words=words) == without
        assert written(client, k, allowed_token_ids=allowed) == only


def test_special_tokens_are_shown_if_asked(client: LocalClient) -> None:
    tokenizer = client.worker.engine.tokenizer
    (end, *_) = sorted(client.worker.engine.intake.eos_ids)
    name = tokenizer.name(end)
    assert name is not None
    forced = {"allowed_token_ids": [end], "ignore_eos": True}
    hidden, shown = (written(client, 4, skip_special_tokens=skip, **forced) for skip in (True, False))
    assert hidden["token_ids"] == shown["token_ids"] == [end] * 24
    assert (hidden["text"], shown["text"]) == ("", name * 24)


def test_the_tokenizers_endpoints(client: LocalClient) -> None:
    text = "def main():\n    return 'naïve'\n" * 400
    told = posted(client, "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert told["count"] == len(told["tokens"]) > told["max_model_len"] == 256
    assert posted(client, "/detokenize", {"tokens": told["tokens"]}) == {"prompt": text}
    kept = posted(
        client,
        "/v1/completions",
        {"model": "demo", "prompt": text, "truncate_prompt_tokens": 100, "return_token_ids": True},
    )["choices"][0]["prompt_token_ids"]
    assert len(kept) == 100
    assert kept[-50:] == told["tokens"][-50:]
