"""Each request's estimated speedup, made from its own rounds and the steps that it shared with others."""

from dataclasses import replace
from typing import Any

import pytest
from starlette.datastructures import Headers

from app.fake_engine import FakeEngineClient, blank
from app.page.live import LivePage
from app.page.request_speedups import MAX_STEPS
from app.telemetry.exchange import Exchange
from engine.types import Output, Request, RoundRecord, StepStats
from tests.app.page.test_live import BASE

Rounds = list[tuple[int, int, int]]  # (number of the step, emitted tokens, microseconds)


class Server:
    """A live page that is told of requests and steps by hand."""

    def __init__(self) -> None:
        self.live = LivePage(FakeEngineClient(), clock=lambda: 1000.0)

    def end(self, name: str, *choices: Rounds) -> None:
        """A request ends, with one choice or several."""
        requests = [Request(f"{name}-{i}", (1,)) for i in range(len(choices))]
        outputs = {}
        for request, rounds in zip(requests, choices, strict=True):
            record = blank(request)
            record.finished = record.arrived
            for number, emitted, us in rounds:
                record.add(RoundRecord(0, -1, 0, 0, 0, emitted, -1, step=number, score_us=us, step_us=us))
            outputs[request.id] = Output(request.id, (), "", "length", record=record)
        self.live.ended(Exchange(name, Headers(), requests=requests, last_outputs=outputs, finished=1e9))

    def tell(self, *steps: StepStats) -> None:
        self.live.stepped(steps)

    def speedup(self, name: str) -> float | None:
        kept = self.live.recent.get(name)
        assert kept is not None
        value: Any = kept.summary()["speedup"]
        return value

    @property
    def settled(self) -> int:
        told: int = self.live.state()["now"]["speedups"]
        return told


def step(number: int, emitted: int, plain_us: int, *, sequences: int = 1, prompts: int = 0) -> StepStats:
    part = RoundRecord(0, -1, 0, 0, 0, emitted // sequences, -1)
    return replace(
        BASE, step=number, parts=(part,) * sequences, emitted=emitted, plain_us=plain_us, prefill_tokens=prompts
    )


def test_it_is_plain_decodings_time_for_the_tokens_over_the_time_they_took() -> None:
    server = Server()
    server.end("a", [(1, 1, 500), (2, 4, 1000), (3, 2, 1500)])
    server.tell(step(1, 1, 0, prompts=9), step(2, 4, 3200), step(3, 2, 1600))
    assert server.speedup("a") == round(4800 / 2500, 3), "the step that read the prompt counts for neither"


def test_decoding_without_drafts_is_as_fast_as_plain_decoding() -> None:
    server = Server()
    server.end("a", [(1, 1, 700), (2, 1, 900)])
    server.tell(step(1, 1, 700), step(2, 1, 900))
    assert server.speedup("a") == 1.0


def test_a_request_that_gains_more_than_its_mates_is_told_so() -> None:
    """One step of two sequences emitted 4 + 2 tokens. Plain decoding of both takes 800 µs per token of each."""
    server = Server()
    server.end("fast", [(5, 4, 2000)])
    server.end("slow", [(5, 2, 2000)])
    server.end("both", [(5, 4, 2000)], [(5, 2, 2000)])
    server.tell(step(5, 6, 2400, sequences=2))
    assert [server.speedup(name) for name in ("fast", "slow", "both")] == [1.6, 0.8, 1.2]


def test_it_waits_for_the_requests_last_step() -> None:
    server = Server()
    server.end("a", [(1, 1, 1000), (2, 1, 1000)])
    server.tell(step(1, 1, 1000))
    assert (server.speedup("a"), server.settled) == (None, 0)
    server.tell(step(2, 1, 3000))
    assert (server.speedup("a"), server.settled) == (2.0, 1)
    server.tell(step(3, 1, 1))
    assert (server.speedup("a"), server.settled) == (2.0, 1)


@pytest.mark.parametrize("rounds", [[], [(1, 1, 1000)]])
def test_a_request_that_never_decoded_has_none(rounds: Rounds) -> None:
    server = Server()
    server.end("a", rounds)
    server.tell(step(1, 1, 0, prompts=9))
    assert server.speedup("a") is None


def test_steps_that_are_too_old_are_not_mistaken_for_others() -> None:
    server = Server()
    server.tell(step(1, 1, 9000), step(1 + MAX_STEPS, 1, 1000))
    server.end("a", [(1, 1, 1000), (1 + MAX_STEPS, 1, 1000)])
    server.tell(step(2 + MAX_STEPS, 1, 1))
    assert server.speedup("a") == 1.0
