"""What scheduler and cache cost per step: part `bookkeeping` of benchmarks/memory.py.

The methods in METHODS are timed while --sequences sequences decode. A timed call within another one counts as part of
the outer one. The choice of k, which `plan` calls, is not counted; `policy ms` is its time, with that of learning after
the round. `timer ms` is what the timing adds to the measured time. Only steps in which every sequence drafts and no
prompt is read are counted.
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
    """Nanoseconds by method since the last `take`. Calls within a timed call are part of it."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._calls = 0
        self._within = False  # a timed call
        self._excluded_ns = 0  # of all excluded calls

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return function(*args, **kwargs)
            self._within = True
            started, excluded_ns = perf_counter_ns(), self._excluded_ns
            try:
                return function(*args, **kwargs)
            finally:
                self._spent[name] += perf_counter_ns() - started - (self._excluded_ns - excluded_ns)
                self._calls += 1
                self._within = False

        return timed

    def exclude(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time taken out of the timed call that calls it."""

        def excluded(*args: Any, **kwargs: Any) -> Any:
            started, within, self._within = perf_counter_ns(), self._within, True
            try:
                return function(*args, **kwargs)
            finally:
                self._excluded_ns += perf_counter_ns() - started
                self._within = within

        return excluded

    def take(self) -> tuple[Counter[str], int]:
        """(nanoseconds by method, number of timed calls) since the last `take`."""
        taken = self._spent, self._calls
        self._spent, self._calls = Counter(), 0
        return taken


def runners(engine: Engine) -> list[Runner]:
    """The target's and the draft model's."""
    drafters = engine.drafter.drafters if isinstance(engine.drafter, ChainedDrafter) else ()
    return [engine.target, *(drafter.runner for drafter in drafters if isinstance(drafter, ModelDrafter))]


@contextmanager
def timed_methods(engine: Engine) -> Iterator[TimeLedger]:
    """Time METHODS of both models by wrapping them in their classes, until the block ends.

    Raises AttributeError for a method that does not exist.
    """
    ledger = TimeLedger()
    owners: dict[type, tuple[str, ...]] = {type(engine.scheduler): METHODS["scheduler"]}
    for runner in runners(engine):
        owners |= {type(runner.cache): METHODS["cache"], type(runner.storage): METHODS["storage"]}
    scheduler = engine.scheduler
    with ExitStack() as stack:
        stack.enter_context(patch.object(scheduler, "_choose_k", ledger.exclude(scheduler._choose_k)))
        for owner, names in owners.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, ledger.wrap(name, getattr(owner, name))))
        yield ledger


def timer_ns(count: int = 10_000) -> float:
    """Nanoseconds that the timer itself adds to each timed call: measured on a function that does nothing."""
    ledger = TimeLedger()
    nothing = ledger.wrap("nothing", lambda: None)
    for _ in range(count):
        nothing()
    return ledger.take()[0]["nothing"] / count


TimedStep = tuple[StepStats, Counter[str], int]  # nanoseconds by name, timed calls


def watch(driver: Driver, args: argparse.Namespace, text: Text, k: int) -> list[TimedStep]:
    """--steps steps of one batch, after the first step in which all its sequences decode and draft.

    Raises RuntimeError if a sequence ends before the last step.
    """
    prompts = [text.take(args.prompt_tokens) for _ in range(args.sequences)]
    room = greedy(driver.engine.max_model_len - args.prompt_tokens)
    sequences = [driver.submit(prompt, room, k) for prompt in prompts]
    steps: list[TimedStep] = []
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
                raise RuntimeError(f"a sequence ended after {len(steps)} of {args.steps} steps: lower --steps")
    driver.clear()
    return steps


def measure_bookkeeping(args: argparse.Namespace, text: Text) -> list[dict[str, object]]:
    """The rows. The caches are just large enough for the sequences at the end of the timed steps."""
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
    steps: dict[tuple[CacheKind, int], list[TimedStep]] = {}
    for repeat, name, k in itertools.product(range(-1, args.passes), drivers, args.spec):
        watched = watch(drivers[name], args, text, k)
        if repeat >= 0:
            steps.setdefault((name, k), []).extend(watched)
    cost = timer_ns()
    called = {method for timed in steps.values() for _, spent, _ in timed for method in spent}
    return [
        {"cache": name, "block": block_size(drivers[name].engine)} | summarise(k, timed, sorted(called), cost)
        for (name, k), timed in steps.items()
    ]


def summarise(k: int, steps: list[TimedStep], methods: list[str], timer: float) -> dict[str, object]:
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
