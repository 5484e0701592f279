"""The latest exchanges, as numbers and without text, in bounded memory."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient, spell
from app.main import create_app
from app.page import recent_requests
from app.page.live import LivePage, percentiles
from engine.types import DRAFTERS, REASONS, Output, Request, RoundRecord
from tests.app.harness import PROMPT, Exchange, call


class Kept:
    """A server with its live page's data on requests."""

    def __init__(self, script: Any = spell) -> None:
        self.client = FakeEngineClient(script)
        self.live = LivePage(self.client)
        self.app = create_app(self.client, live_page=self.live)

    def requests(self) -> list[dict[str, Any]]:
        return [kept.summary() for kept in self.live.recent.latest()]

    @property
    def told(self) -> dict[str, Any]:
        now: dict[str, Any] = self.live.state()["now"]
        return now


def with_columns(request: Request) -> Iterator[Output]:
    """The default script, with a record as the engine fills it."""
    for output in spell(request):
        record = output.record
        if record is not None:
            record.rounds = [
                RoundRecord(
                    k=3,
                    reason=REASONS.index("load") if i else -1,
                    alpha=750,
                    drafted=3,
                    accepted=2,
                    emitted=part.emitted,
                    proposer=DRAFTERS.index("model") if i else -1,
                    step=7 + i,
                    batch=2,
                    began_us=10 * i,
                    draft_us=100,
                    score_us=200,
                    step_us=350,
                )
                for i, part in enumerate(record.rounds)
            ]
            record.arrived, record.admitted, record.first_token, record.finished = 50.0, 50.001, 50.01, 50.05
        yield output


def test_an_exchange_is_kept_round_by_round() -> None:
    server = Kept(with_columns)
    asked = PROMPT | {"max_tokens": 6, "speculation": {"mode": "fixed", "k": 3}}
    reply = json.loads(call(server.app, asked).reply)
    kept = server.live.recent.get(reply["id"])
    assert kept is not None
    whole = kept.whole()
    assert {name: whole[name] for name in ("id", "trace_id", "status", "error", "model")} == {
        "id": reply["id"],
        "trace_id": None,
        "status": "ok",
        "error": None,
        "model": "fake",
    }
    assert (whole["prompt_tokens"], whole["output_tokens"]) == (3, 6)
    assert (whole["queue_ms"], whole["ttft_ms"]) == (1.0, 10.0)
    (choice,) = whole["choices"]
    assert choice.pop("rounds") == {
        "step": [7, 8],
        "k": [3, 3],
        "reason": [None, "load"],
        "alpha": [750, 750],
        "drafted": [3, 3],
        "accepted": [2, 2],
        "emitted": [3, 3],
        "drafter": [None, "model"],
        "batch": [2, 2],
        "began_us": [0, 10],
        "draft_us": [100, 100],
        "verify_us": [200, 200],
        "overhead_us": [50, 50],
    }
    assert choice == {
        "index": 0,
        "finish_reason": "length",
        "drafter": "model",
        "verifier": "match",
        "policy": "goodput",
        "fixed_k": 3,
        "k_max": 3,
    }


def test_trees_are_kept_by_round() -> None:
    def script(request: Request) -> Iterator[Output]:
        for output in with_columns(request):
            if output.record is not None:
                output.record.rounds[1] = output.record.rounds[1]._replace(tree=(-1, 0, -1), path=(2,))
            yield output

    for server, trees in (
        (Kept(script), [None, {"parents": [-1, 0, -1], "accepted": [2]}]),
        (Kept(with_columns), None),
    ):
        name = json.loads(call(server.app, PROMPT | {"max_tokens": 6}).reply)["id"]
        kept = server.live.recent.get(name)
        assert kept is not None
        assert kept.whole()["choices"][0].get("trees") == trees
        assert "trees" not in kept.summary()["choices"][0]


class Tracer:
    """This listener hears of an exchange before the page does, as the Tracer does."""

    def began(self, exchange: Any) -> None:
        exchange.trace_id = "ab" * 16

    def ended(self, exchange: Any) -> None:
        pass

    def stepped(self, steps: Any) -> None:
        pass


def test_an_exchange_is_kept_with_its_trace() -> None:
    client = FakeEngineClient()
    live = LivePage(client)
    call(create_app(client, [Tracer()], live_page=live), PROMPT)
    (kept,) = live.recent.latest()
    assert kept.whole()["trace_id"] == "ab" * 16


def test_an_exchange_is_dated_and_timed() -> None:
    server = Kept()
    begun = time.time()
    call(server.app, PROMPT)
    took = 1000 * (time.time() - begun)
    (row,) = server.requests()
    assert -1 <= row["began_unix_ms"] - 1000 * begun <= took + 1
    assert 0 < row["total_ms"] <= took + 1


def test_an_exchange_is_open_until_it_has_ended() -> None:
    server = Kept()
    call(server.app, PROMPT)
    call(server.app, {})
    assert server.live.open == set()


def test_a_request_is_found_by_its_replys_id_and_by_its_own() -> None:
    server = Kept()
    done = call(server.app, PROMPT)
    name = done.reply_headers["x-request-id"]
    assert server.live.recent.get(name) is server.live.recent.get(f"cmpl-{name}") is not None
    assert server.live.recent.get("x") is None
    messages = [{"role": "user", "content": "abc"}]
    done = call(server.app, {"model": "fake", "messages": messages}, path="/v1/chat/completions")
    name = done.reply_headers["x-request-id"]
    assert server.live.recent.get(name) is server.live.recent.get(f"chatcmpl-{name}") is not None


def test_the_list_has_totals_and_no_rounds() -> None:
    server = Kept(with_columns)
    call(server.app, PROMPT | {"max_tokens": 6, "n": 2})
    (row,) = server.requests()
    assert [(c["index"], c["rounds"], c["drafted"], c["accepted"]) for c in row["choices"]] == [
        (0, 2, 6, 4),
        (1, 2, 6, 4),
    ]
    assert (row["prompt_tokens"], row["output_tokens"]) == (3, 12)


def test_the_list_begins_with_the_newest() -> None:
    server = Kept()
    names = [json.loads(call(server.app, PROMPT).reply)["id"] for _ in range(3)]
    assert [row["id"] for row in server.requests()] == names[::-1]


def failing(code: str) -> Any:
    return lambda request: [Output(request.id, (97,), "a"), Output(request.id, (), "", "error", "broken", code)]  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["engine_error", "deadline_exceeded"])
def test_an_error_is_told_by_its_code_also_within_a_stream(code: str, stream: bool) -> None:
    server = Kept(failing(code))
    call(server.app, PROMPT | {"stream": stream})
    (row,) = server.requests()
    assert (row["status"], row["error"]) == ("error", code)


def test_a_server_that_shuts_down_within_a_stream_is_told() -> None:
    server = Kept(lambda request: [Output(request.id, (97,), "a"), Output(request.id, (), "", "cancelled")])
    call(server.app, PROMPT | {"stream": True})
    (row,) = server.requests()
    assert (row["status"], row["error"]) == ("error", "engine_stopped")


def test_a_refused_request_is_kept_without_what_its_client_wrote() -> None:
    server = Kept()
    call(server.app, PROMPT | {"model": "my secret"})
    call(server.app, {"prompt": "my secret", "my secret": 1})
    rows = server.requests()
    assert [(row["status"], row["error"]) for row in rows] == [("error", "unknown_field"), ("error", "model_not_found")]
    assert "secret" not in json.dumps(rows)
    assert [row["output_tokens"] for row in rows] == [0, 0]


def until_it_streams(server: Kept, end: Callable[[Exchange, asyncio.Task[Exchange]], object]) -> dict[str, Any]:
    """The row of a request that ends so once its stream has begun."""

    async def go() -> None:
        exchange = Exchange(server.app, json.dumps(PROMPT | {"stream": True}).encode())
        running = asyncio.create_task(exchange.run())
        while not exchange.sent:  # noqa: ASYNC110 - counts turns of the event loop
            await asyncio.sleep(0)
        end(exchange, running)
        await asyncio.wait([running])

    asyncio.run(asyncio.wait_for(go(), 30))
    (row,) = server.requests()
    return row


@pytest.mark.parametrize("cancels", [False, True])
def test_a_client_that_leaves_is_told(cancels: bool) -> None:
    """Serve tells the app that the client left, or cancels the task first."""
    server = Kept(lambda request: [Output(request.id, (97,), "a")])
    row = until_it_streams(server, lambda exchange, running: running.cancel() if cancels else exchange.leave())
    assert (row["status"], row["error"]) == ("disconnected", None)


def test_no_text_is_kept() -> None:
    server = Kept()
    call(server.app, PROMPT | {"prompt": "my secret", "max_tokens": 9})
    (kept,) = server.live.recent.latest()
    assert "secret" not in json.dumps(kept.whole())
    assert "secret" not in repr(kept)
    chat = {"model": "fake", "messages": [{"role": "user", "content": "my secret"}], "max_tokens": 9}
    call(server.app, chat, path="/v1/chat/completions")
    (kept, _) = server.live.recent.latest()
    assert kept.row["id"].startswith("chatcmpl-")
    assert "secret" not in repr(kept) + json.dumps(server.live.state()) + json.dumps(kept.whole())


def test_the_oldest_exchange_makes_room() -> None:
    server = Kept()
    first = json.loads(call(server.app, PROMPT).reply)["id"]
    for _ in range(recent_requests.MAX_REQUESTS):
        call(server.app, {})
    assert server.live.recent.get(first) is None
    assert (len(server.requests()), server.told["requests"]) == (
        recent_requests.MAX_REQUESTS,
        recent_requests.MAX_REQUESTS + 1,
    )


def test_rounds_are_bounded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_requests, "MAX_ROUNDS", 10)
    server = Kept()
    for tokens in (12, 9, 9):  # 4, 3 and 3 rounds
        call(server.app, PROMPT | {"max_tokens": tokens})
    assert [row["output_tokens"] for row in server.requests()] == [9, 9, 12]
    call(server.app, PROMPT | {"max_tokens": 3})
    assert [row["output_tokens"] for row in server.requests()] == [3, 9, 9]
    call(server.app, PROMPT | {"max_tokens": 90})
    assert [row["output_tokens"] for row in server.requests()] == [90], "the latest stays, however long"


def test_latencies_are_those_of_the_kept_exchanges() -> None:
    server = Kept(with_columns)
    call(server.app, PROMPT | {"max_tokens": 5})
    now = server.told
    assert now["ttft_ms"] == {"p50": 10.0, "p95": 10.0}
    assert now["tpot_ms"] == {"p50": 10.0, "p95": 10.0}
    server.client.outputs_of = spell
    call(server.app, PROMPT | {"max_tokens": 1})
    assert server.told["ttft_ms"]["p50"] < server.told["ttft_ms"]["p95"] == 10.0
    assert server.told["tpot_ms"] == {"p50": 10.0, "p95": 10.0}, "one token has no time per further token"


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0}
    assert percentiles([float(i) for i in range(100, 0, -1)]) == {"p50": 50.0, "p95": 95.0}
