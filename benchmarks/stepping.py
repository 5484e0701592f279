"""Drives an engine step by step and keeps the wall time of every output. Also: prompts of any length."""

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import common
from cache.paged import PagedCache
from engine.config import CacheKind, EngineConfig
from engine.engine import Engine, StepResult
from engine.memory.host import old_objects_unvisited
from engine.types import DrafterName, Request, RequestRecord, SamplingParams, StepStats

TokenList = list[int]


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy sampling of exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, ignore_eos=True)


def make_engine(args: argparse.Namespace, cache: CacheKind, max_running: int, **more: Any) -> Engine:
    """An engine that can run every k of `args.spec`. `more`: further fields of EngineConfig, which go before others."""
    settings = common.engine_config(args, args.spec, max_running, waiting=0)
    settings |= {"cache": cache, "max_model_len": args.max_model_len} | more
    return Engine.from_config(EngineConfig(args.target, args.draft, **settings))


def block_size(engine: Engine) -> int | None:
    """Positions per block of a paged cache; None for a slotted one."""
    cache = engine.target.cache
    return cache.block_size if isinstance(cache, PagedCache) else None


class Text:
    """The prompts as one endless text; each `take` gives its next tokens."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._ids = itertools.cycle([token for prompt in prompts for token in prompt])

    def take(self, count: int) -> TokenList:
        return list(itertools.islice(self._ids, count))


@dataclass(slots=True)
class DrivenRequest:
    """A request and its outputs. Times are seconds of `time.perf_counter()`."""

    request_id: str
    submitted: float
    times: list[float] = field(default_factory=list)  # one per step with tokens for it
    token_ids: TokenList = field(default_factory=list)
    ended: RequestRecord | None = None

    @property
    def record(self) -> RequestRecord:
        if self.ended is None:
            raise RuntimeError(f"request {self.request_id} has not finished: run the driver to its end first")
        return self.ended

    @property
    def first_token_s(self) -> float:
        """Seconds from its arrival to the end of the step that gave its first token."""
        return self.times[0] - self.submitted


class Driver:
    """Submits requests and steps the engine. A request without a given salt gets its own, so it shares no prefix."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[StepStats] = []  # since the last `generate` began
        self._running: dict[str, DrivenRequest] = {}
        self._numbers = itertools.count()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        k: int | None,
        salt: str | None = None,
        drafter: DrafterName | None = None,
    ) -> DrivenRequest:
        """k None: the policy chooses. salt None: one of its own. drafter None: the engine's default."""
        number = next(self._numbers)
        name = f"request-{number}"
        cache_salt = f"own-{number}" if salt is None else salt
        request = Request(name, tuple(prompt), params, k, drafter=drafter, cache_salt=cache_salt)
        self.engine.check(request)
        driven = self._running[name] = DrivenRequest(name, time.perf_counter())
        self.engine.submit(request)
        return driven

    def step(self) -> StepResult:
        """One step of the engine. Raises RuntimeError if a request ends with an error."""
        result = self.engine.step()
        now = time.perf_counter()
        self.steps.append(result.stats)
        for output in result.outputs:
            request = self._running[output.request_id]
            if output.token_ids:
                request.times.append(now)
                request.token_ids += output.token_ids
            if output.finish_reason is not None:
                request.ended = self._running.pop(output.request_id).ended = output.record
            if output.finish_reason == "error":
                raise RuntimeError(f"{output.request_id}: {output.error}")
        return result

    def run(self) -> None:
        """Step until all requests have ended."""
        with old_objects_unvisited():
            while self.engine.has_work:
                self.step()

    def clear(self) -> None:
        """Cancel all requests."""
        self.engine.cancel_all()
        self.run()

    def generate(self, prompts: Sequence[Any], params: Any, k: Any = None) -> list[DrivenRequest]:
        """Run all prompts at once with the same parameters to their end. measure.timed_run times this."""
        self.steps = []
        requests = [self.submit(prompt, params, k) for prompt in prompts]
        self.run()
        return requests
