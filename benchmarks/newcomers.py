"""How one large HTTP request with many long prompts slows down short requests that come after it.

    python -m benchmarks.newcomers --threads 1
    python -m benchmarks.newcomers --url http://127.0.0.1:8000

The large request has --prompts-count prompts of --long-prompt tokens and generates nothing. --after seconds later short
streamed requests (newcomers) come, one after another, until the large one is answered. Kinds of large request: `one
plain` (one prompt per request, one request after another), `plain` (all prompts in one request) and `echo` (the same
with echo and --logprobs alternatives per token). `first` is a newcomer's time to its first token, `gap` the time
between two of its events. Without --url the engine runs in this process: `loop` is the lateness of a 5 ms timer on the
event loop, `step` the time of an engine step, and no reply is sent anywhere. With --url start the server beforehand.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from starlette.types import ASGIApp, Message

from app.main import create_app
from app.telemetry.exchange import Exchange
from benchmarks import common
from benchmarks.stepping import Text
from deployments.bridge import LocalClient
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import StepStats

DEMO = ["--target", "models/demo/target", "--draft", "models/demo/draft"]
TICK_S = 0.005  # period of the timer that shows how long the event loop is blocked
LIMIT_S = 600.0  # for one reply
KINDS = ("one plain", "plain", "echo")

RequestFields = dict[str, Any]
Post = Callable[
    [RequestFields, Callable[[bytes], None]], Awaitable[None]
]  # (request, function that takes the parts of its reply)


@dataclass
class NewcomerTimes:
    """Seconds measured beside one kind of large request."""

    firsts: list[float] = field(default_factory=list)  # to a newcomer's first token
    gaps: list[float] = field(default_factory=list)  # between two events of a newcomer
    large: list[float] = field(default_factory=list)  # until the large request was answered
    lags: list[float] = field(default_factory=list)  # of the timer
    steps: list[float] = field(default_factory=list)


class StepTimes:
    """A listener that keeps the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def began(self, exchange: Exchange) -> None: ...

    def ended(self, exchange: Exchange) -> None: ...

    def stepped(self, steps: Sequence[StepStats]) -> None:
        self.seconds += [step.step_us / 1e6 for step in steps]


def in_process(app: ASGIApp) -> Post:
    async def post(fields: RequestFields, take: Callable[[bytes], None]) -> None:
        waiting: list[Message] = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]
        statuses: list[int] = []

        async def receive() -> Message:
            if not waiting:
                await asyncio.Event().wait()
            return waiting.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif statuses == [200] and message["body"]:
                take(message["body"])

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        if statuses != [200]:
            raise RuntimeError(f"a request was answered with status {statuses}")

    return post


def over_http(client: httpx.AsyncClient) -> Post:
    async def post(fields: RequestFields, take: Callable[[bytes], None]) -> None:
        async with client.stream("POST", "/v1/completions", json=fields) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"a request was answered with status {reply.status_code}: {await reply.aread()!r}")
            async for part in reply.aiter_raw():
                take(part)

    return post


class NewcomersBench:
    def __init__(self, args: argparse.Namespace, text: Text, post: Post, model: str) -> None:
        self._args, self._text, self._post, self._model = args, text, post, model
        self._salts = (f"{random.random()}-{i}" for i in itertools.count())  # no prompt is found in the cache

    async def turn(self, kind: str, seen: NewcomerTimes) -> None:
        """One large request, or one request per prompt for `one plain`, and the newcomers beside it."""
        prompts = [self._text.take(self._args.long_prompt) for _ in range(self._args.prompts_count)]
        if kind == "one plain":
            work = self._one_by_one(prompts)
        else:
            extra = {"echo": True, "logprobs": self._args.logprobs} if kind == "echo" else {}
            work = self._ask({"prompt": prompts, "max_tokens": 0} | extra, _ignore)
        began = time.perf_counter()
        large = asyncio.create_task(work)
        ticking = asyncio.create_task(_tick(seen.lags))
        await asyncio.sleep(self._args.after)
        while not large.done():
            await self._newcomer(seen)
        await large
        ticking.cancel()
        seen.large.append(time.perf_counter() - began)

    async def _one_by_one(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            await self._ask({"prompt": list(prompt), "max_tokens": 0}, _ignore)

    async def _newcomer(self, seen: NewcomerTimes) -> None:
        times: list[float] = []
        asked = time.perf_counter()
        fields = {"prompt": self._text.take(self._args.prompt_tokens), "max_tokens": self._args.max_tokens}
        await self._ask(fields | {"stream": True, "ignore_eos": True}, lambda _: times.append(time.perf_counter()))
        seen.firsts.append(times[0] - asked)
        seen.gaps += [after - before for before, after in itertools.pairwise(times[:-1])]  # the last is [DONE]

    async def _ask(self, fields: RequestFields, take: Callable[[bytes], None]) -> None:
        common_fields = {"model": self._model, "temperature": 0, "cache_salt": next(self._salts)}
        async with asyncio.timeout(LIMIT_S):
            await self._post(fields | common_fields, take)


def _ignore(part: bytes) -> None: ...


async def _tick(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - due)


@asynccontextmanager
async def server(args: argparse.Namespace) -> AsyncIterator[tuple[Post, str, StepTimes | None]]:
    """(function that posts, the model's name, the engine's steps; None: the engine is in another process)."""
    if args.url is not None:
        async with httpx.AsyncClient(base_url=args.url, timeout=LIMIT_S) as client:
            models = (await client.get("/v1/models")).json()
            yield over_http(client), models["data"][0]["id"], None
        return
    settings = common.engine_config(args, ["goodput"], max_running=16, waiting=48)
    settings |= {"max_model_len": args.max_model_len}
    client_here, steps = (
        LocalClient(Engine.from_config(EngineConfig(args.target, args.draft, **settings)), "demo"),
        StepTimes(),
    )
    try:
        yield in_process(create_app(client_here, [steps])), "demo", steps
    finally:
        client_here.close()


async def measure(args: argparse.Namespace, text: Text) -> dict[str, NewcomerTimes]:
    seen = {kind: NewcomerTimes() for kind in args.kinds}
    async with server(args) as (post, model, steps):
        bench = NewcomersBench(args, text, post, model)
        for repeat in range(args.repeats):
            for kind, own in seen.items():
                print(f"repeat {repeat + 1} of {args.repeats}: {kind}", file=sys.stderr, flush=True)
                await bench.turn(kind, own)
                if steps is not None:
                    await asyncio.sleep(1.0)  # until the listener has the last steps
                    own.steps, steps.seconds = own.steps + steps.seconds, []
    return seen


def summarise(kind: str, seen: NewcomerTimes, here: bool) -> dict[str, object]:
    """A row: milliseconds, except `large s`."""

    def ms(values: Sequence[float], share: float) -> float | None:
        return float(np.percentile(values, 100 * share)) * 1e3 if values else None

    row: dict[str, object] = {"large": kind, "newcomers": len(seen.firsts), "large s": float(np.median(seen.large))}
    row |= {"first ms": ms(seen.firsts, 0.5), "first max": ms(seen.firsts, 1)}
    row |= {"gap ms": ms(seen.gaps, 0.5), "gap p99": ms(seen.gaps, 0.99), "gap max": ms(seen.gaps, 1)}
    if here:
        row |= {"loop p99": ms(seen.lags, 0.99), "loop max": ms(seen.lags, 1), "step max": ms(seen.steps, 1)}
    return row


def kind_list(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(KINDS)}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.set_defaults(prompts_count=60, max_tokens=32)
    p.add_argument("--url", help="of a server that runs; default: an engine of this process")
    p.add_argument("--kinds", type=kind_list, default=list(KINDS), help=f"of {', '.join(KINDS)}; default: all")
    p.add_argument("--repeats", type=common.positive, default=1)
    p.add_argument("--long-prompt", type=common.positive, default=1900, help="tokens of the large request's prompts")
    p.add_argument("--prompt-tokens", type=common.positive, default=16, help="of a newcomer's prompt")
    p.add_argument("--logprobs", type=int, default=20)
    p.add_argument("--after", type=float, default=0.5, help="seconds from the large request to the first newcomer")
    p.add_argument("--max-model-len", type=common.positive, default=2048)
    args = p.parse_args([*DEMO, *(sys.argv[1:] if argv is None else argv)])
    workload = common.prepare(args)
    settings = {name: getattr(args, name) for name in ("long_prompt", "prompt_tokens", "logprobs", "after", "repeats")}
    report = common.describe_run(args, "newcomers", workload.describe(max_tokens=args.max_tokens, **settings))
    seen = asyncio.run(measure(args, Text(workload.prompts)))
    rows = [summarise(kind, own, args.url is None) for kind, own in seen.items()]
    report["results"] = rows
    common.print_report(report, [rows], args.json)


if __name__ == "__main__":
    main()
