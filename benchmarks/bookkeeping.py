"""What scheduler and cache cost per step: part `bookkeeping` of benchmarks/memory.py.

The methods of METHODS are wrapped with a timer while --sequences sequences decode; what one of them calls of the others
counts once, as the outer one's. Choosing k is called within `plan` and is not counted; `policy ms` is that, and what
the policy learns after the round. `timer ms` is what the timing itself adds within the measured time. The steps are
those with every sequence in them, drafting, and no prompt.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

from benchmarks import common
from benchmarks.interference import percentile
from benchmarks.stepping import Driver, Text, block_size, greedy, make_engine
from engine.config import CacheKind
from engine.drafters.chain import ChainedDrafter
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models.runner import Runner
from engine.types import StepStats

METHODS = {
    "scheduler": ("plan",),
    "cache": ("allocate", "room", "reserve", "extend", "truncate_to", "fork", "publish", "release"),
    "storage": ("prepare",),
}


class TimeLedger:
    """Nanoseconds by name since the last `take`; calls within timed calls are part of these."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._calls = 0
        self._within = False
        self._apart = 0  # nanoseconds of what was left out, ever

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return function(*args, **kwargs)
            self._within = True
            started, apart = perf_counter_ns(), self._apart
            try:
                return function(*args, **kwargs)
            finally:
                self._spent[name] += perf_counter_ns() - started - (self._apart - apart)
                self._calls += 1
                self._within = False

        return timed

    def leave_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """For what timed calls call and is not theirs; nothing counts that it calls in turn."""

        def apart(*args: Any, **kwargs: Any) -> Any:
            started, within, self._within = perf_counter_ns(), self._within, True
            try:
                return function(*args, **kwargs)
            finally:
                self._apart += perf_counter_ns() - started
                self._within = within

        return apart

    def take(self) -> tuple[Counter[str], int]:
        """(nanoseconds by name, timed calls) since the last time."""
        taken = self._spent, self._calls
        self._spent, self._calls = Counter(), 0
        return taken


def runners(engine: Engine) -> list[Runner]:
    """The target's and the draft model's."""
    parts = engine.drafter.drafters if isinstance(engine.drafter, ChainedDrafter) else ()
    return [engine.target, *(part.runner for part in parts if isinstance(part, ModelDrafter))]


@contextmanager
def timed_methods(engine: Engine) -> Iterator[TimeLedger]:
    """Wrapped in their classes, so both models' are timed; put back at the end. AttributeError: one is gone."""
    ledger = TimeLedger()
    owners: dict[type, tuple[str, ...]] = {type(engine.scheduler): METHODS["scheduler"]}
    for runner in runners(engine):
        owners |= {type(runner.cache): METHODS["cache"], type(runner.storage): METHODS["storage"]}
    scheduler = engine.scheduler
    with ExitStack() as stack:
        stack.enter_context(patch.object(scheduler, "_choose_k", ledger.leave_out(scheduler._choose_k)))
        for owner, names in owners.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, ledger.wrap(name, getattr(owner, name))))
        yield ledger


def timer_ns(count: int = 10_000) -> float:
    """Of the timed nanoseconds of a call, those that are the timer's own: what it says of doing nothing."""
    ledger = TimeLedger()
    nothing = ledger.wrap("nothing", lambda: None)
    for _ in range(count):
        nothing()
    return ledger.take()[0]["nothing"] / count


Step = tuple[StepStats, Counter[str], int]  # nanoseconds by name, timed calls


def watch(driver: Driver, args: argparse.Namespace, text: Text, k: int) -> list[Step]:
    """--steps steps of one batch, from the first on in which all its sequences decode and draft.

    Raises RuntimeError if a sequence ends before the last one.
    """
    prompts = [text.take(args.prompt_tokens) for _ in range(args.sequences)]
    room = greedy(driver.engine.max_model_len - args.prompt_tokens)
    sequences = [driver.submit(prompt, room, k) for prompt in prompts]
    steps: list[Step] = []
    settled = False
    with timed_methods(driver.engine) as ledger:
        while len(steps) < args.steps:
            stats = driver.step().stats
            books = ledger.take()
            if settled:
                steps.append((stats, *books))
            settled = (
                stats.sequences == args.sequences and not stats.prefill_tokens and stats.drafted == k * stats.sequences
            )
            if any(sequence.ended for sequence in sequences):
                raise RuntimeError(f"a sequence ended after {len(steps)} of {args.steps} steps: ask for fewer")
    driver.clear()
    return steps


def measure_bookkeeping(args: argparse.Namespace, text: Text) -> list[dict[str, object]]:
    """The caches have room for what the sequences may come to while they are read and timed, and no more."""
    rounds = args.sequences + 2 * args.steps
    length = min(args.max_model_len, args.prompt_tokens + rounds * (1 + max(args.spec)))
    settings: dict[CacheKind, dict[str, Any]] = {
        "slotted": {},
        "paged": {"block_size": args.block_size, "kv_tokens": args.sequences * length},
    }
    drivers = {
        name: Driver(make_engine(args, name, args.sequences, max_model_len=length, prefill_chunk=512, **more))
        for name, more in settings.items()
    }
    steps: dict[tuple[CacheKind, int], list[Step]] = {}
    for repeat, name, k in itertools.product(range(-1, args.passes), drivers, args.spec):
        watched = watch(drivers[name], args, text, k)
        if repeat >= 0:
            steps.setdefault((name, k), []).extend(watched)
    cost = timer_ns()
    called = {method for own in steps.values() for _, spent, _ in own for method in spent}
    return [
        {"cache": name, "block": block_size(drivers[name].engine)} | summarise(k, own, sorted(called), cost)
        for (name, k), own in steps.items()
    ]


def summarise(k: int, steps: list[Step], methods: list[str], timer: float) -> dict[str, object]:
    """Milliseconds per step of both models' caches together; the parts are medians, so they need not add up."""
    totals = [spent.total() / 1e6 for _, spent, _ in steps]
    calls = median(count for _, _, count in steps)
    return {
        "k": common.spec_name(k),
        "steps": len(steps),
        "bookkeeping ms": median(totals),
        "p99": percentile(totals, 0.99),
        "of a step": median(total * 1e3 / stats.step_us for total, (stats, _, _) in zip(totals, steps, strict=True)),
        "policy ms": median(stats.policy_us for stats, _, _ in steps) / 1e3,
        "calls": calls,
        "timer ms": calls * timer / 1e6,
        **{f"{method} ms": median(spent[method] for _, spent, _ in steps) / 1e6 for method in methods},
    }
