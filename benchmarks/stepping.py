"""Drive an engine step by step, with the wall time of every output; and text of any length to feed it."""

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
from engine.types import DrafterName, Request, RequestRecord, SamplingParams, StepStats

Ids = list[int]


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly so many tokens, the same for everyone."""
    return SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, ignore_eos=True)


def make_engine(args: argparse.Namespace, cache: CacheKind, max_running: int, **more: Any) -> Engine:
    """An engine that can run every k of `args.spec`; `more`: EngineConfig's other fields, which go before the rest."""
    settings = common.engine_config(args, args.spec, max_running, waiting=0)
    settings |= {"cache": cache, "max_model_len": args.max_model_len} | more
    return Engine.from_config(EngineConfig(args.target, args.draft, **settings))


def block_size(engine: Engine) -> int | None:
    """Positions of a block, as configured or as the engine chose; None: its cache has none."""
    cache = engine.target.cache
    return cache.block_size if isinstance(cache, PagedCache) else None


class Text:
    """The prompts as one text, of which every `take` gives the next tokens; after its end it begins again."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._ids = itertools.cycle([token for prompt in prompts for token in prompt])

    def take(self, count: int) -> Ids:
        return list(itertools.islice(self._ids, count))


@dataclass(slots=True)
class Told:
    """What an engine said of one request, and when, in seconds of `time.perf_counter()`."""

    request_id: str
    submitted: float
    times: list[float] = field(default_factory=list)  # one per step that had tokens for it
    token_ids: Ids = field(default_factory=list)
    ended: RequestRecord | None = None

    @property
    def record(self) -> RequestRecord:
        if self.ended is None:
            raise RuntimeError(f"request {self.request_id} has not finished")
        return self.ended

    @property
    def first_token_s(self) -> float:
        """Seconds from its arrival to the end of the step that gave its first token."""
        return self.times[0] - self.submitted


class Driver:
    """Submits and steps. Unless told otherwise each request has a salt of its own, and so shares no prefix."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[StepStats] = []  # since the last `generate` began
        self._told: dict[str, Told] = {}
        self._numbers = itertools.count()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        k: int | None,
        salt: str | None = None,
        drafter: DrafterName | None = None,
    ) -> Told:
        """k None: the policy's; drafter None: the engine's own."""
        number = next(self._numbers)
        name = f"request-{number}"
        own = f"own-{number}" if salt is None else salt
        request = Request(name, tuple(prompt), params, k, drafter=drafter, cache_salt=own)
        self.engine.check(request)
        told = self._told[name] = Told(name, time.perf_counter())
        self.engine.submit(request)
        return told

    def step(self) -> StepResult:
        """Raises RuntimeError if a request ended with an error: what is measured then is not what was asked for."""
        result = self.engine.step()
        now = time.perf_counter()
        self.steps.append(result.stats)
        for output in result.outputs:
            told = self._told[output.request_id]
            if output.token_ids:
                told.times.append(now)
                told.token_ids += output.token_ids
            if output.finish_reason is not None:
                told.ended = self._told.pop(output.request_id).ended = output.record
            if output.finish_reason == "error":
                raise RuntimeError(f"{output.request_id}: {output.error}")
        return result

    def run(self) -> None:
        """Step until nothing is left."""
        while self.engine.has_work:
            self.step()

    def clear(self) -> None:
        """End what is still running."""
        self.engine.cancel_all()
        self.run()

    def generate(self, prompts: Sequence[Any], params: Any, k: Any = None) -> list[Told]:
        """All prompts at once with the same parameters, to the end: what measure.timed_run times."""
        self.steps = []
        told = [self.submit(prompt, params, k) for prompt in prompts]
        self.run()
        return told
