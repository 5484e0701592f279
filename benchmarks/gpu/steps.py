"""Runs the steps of a long measurement so that what one of them breaks costs no other.

Each step is a process of its own: after a fault of a GPU its process cannot use it any longer, and a step may hang. A
step's figures count from the moment at which it tells them. Neighbours that are not timed run side by side.
"""

import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

PATIENCE = 3  # factor on the limits of a dry run: on a CPU its steps compile code, side by side


class Row(NamedTuple):
    """A figure."""

    what: str
    value: float | str
    aim: str = ""  # "": none was set
    met: bool | None = None  # None: there is no aim


@dataclass(frozen=True, slots=True)
class Recorder:
    """What a step is given: where it runs, and whom it tells its figures."""

    device: str
    dry: bool  # whether shapes and counts are tiny, for a machine without a GPU
    ends: float  # monotonic seconds at which the step must have ended
    tell: Callable[[Row], None]

    def note(self, what: str, value: float | str) -> None:
        self.tell(Row(what, value))

    def at_most(self, what: str, value: float, limit: float) -> None:
        self.tell(Row(what, value, f"≤ {limit:g}", value <= limit))

    def at_least(self, what: str, value: float, limit: float) -> None:
        self.tell(Row(what, value, f"≥ {limit:g}", value >= limit))

    @property
    def left_s(self) -> float:
        """Seconds until the step must have ended."""
        return self.ends - time.monotonic()

    def check_time(self, needed_s: float = 0.0) -> None:
        """Raise TimeoutError unless `needed_s` seconds are left. Called before each measurement."""
        if self.left_s < needed_s:
            raise TimeoutError(f"{max(0.0, self.left_s):.0f} s are left, and {needed_s:.0f} s are needed")


class Skipped(Exception):
    """This machine or this version cannot run the step. The message says why."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    run: Callable[[Recorder], None]
    limit_s: float  # the most that it may take
    must_meet: bool = False  # whether it fails if a figure misses its aim; speed does not
    is_timed: bool = True  # whether nothing else may run beside it


@dataclass(slots=True)
class Result:
    """What came of a step."""

    name: str
    status: str = "failed"  # ok, failed or skipped
    reason: str = ""  # why it is not ok
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("name", "status", "reason")}
        rows = [row._replace(value=row.value if _is_json(row.value) else str(row.value))._asdict() for row in self.rows]
        return values | {"seconds": round(self.seconds, 1), "rows": rows}


@dataclass(slots=True)
class _Running:
    """A step's process."""

    step: Step
    began: float  # monotonic seconds, as the next one
    ends: float
    result: Result
    process: Any
    told: "Connection[Any, Any]"
    ended: bool = False  # in time


def run_steps(
    steps: Sequence[Step], device: str, *, dry: bool, budget_s: float, say: Callable[[str], None] = print
) -> list[Result]:
    """Run the steps within `budget_s` seconds in all. An error of a step does not raise here."""
    deadline, results = time.monotonic() + budget_s, list[Result]()
    for is_timed, neighbours in groupby(steps, lambda step: step.is_timed):
        for together in [[step] for step in neighbours] if is_timed else [list(neighbours)]:
            results += _run_together(together, device, dry, deadline, say)
    return results


def _run_together(
    steps: Sequence[Step], device: str, dry: bool, deadline: float, say: Callable[[str], None]
) -> list[Result]:
    results, running = list[Result](), list[_Running]()
    for step in steps:
        limit_s = min(step.limit_s * (PATIENCE if dry else 1), deadline - time.monotonic())
        say(f"{step.name}: at most {max(0.0, limit_s):.0f} s")
        results.append(Result(step.name))
        if limit_s > 0:
            running.append(_start(step, device, dry, limit_s, results[-1]))
        else:
            results[-1].reason = "no time is left"
    _receive(running, say)
    for one in running:
        _finish(one)
    for result in results:
        say(f"{result.name}: {result.status} ({result.seconds:.1f} s) {result.reason}".rstrip())
    return results


def _start(step: Step, device: str, dry: bool, limit_s: float, result: Result) -> _Running:
    # CUDA cannot be used in a fork of a process that has looked for devices. On a CPU a fork saves the imports.
    processes = get_context("fork") if device == "cpu" else get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    began = time.monotonic()
    child = processes.Process(target=_child, args=(step, device, dry, began + limit_s, sender), daemon=True)
    child.start()
    sender.close()
    return _Running(step, began, began + limit_s, result, child, receiver)


def _receive(running: Sequence[_Running], say: Callable[[str], None]) -> None:
    """Take in what the steps tell, until each of them ends or its time does."""
    left = {one.told: one for one in running}
    while left:
        soonest = min(one.ends for one in left.values())
        for receiver in wait(list(left), max(0.0, soonest - time.monotonic())):
            one = left[receiver]  # type: ignore[index]
            try:
                message = one.told.recv()
            except EOFError:
                one.ended = True
                one.result.seconds = time.monotonic() - one.began
                del left[one.told]
                continue
            if isinstance(message, Row):
                one.result.rows.append(message)
                say(f"  {message.what}: {_cell(message.value)} {message.aim}".rstrip())
            else:
                one.result.status, one.result.reason = message
        for one in [one for one in left.values() if one.ends <= time.monotonic()]:
            one.process.kill()
            one.result.seconds, one.result.reason = one.ends - one.began, "it took too long, so it was ended"
            del left[one.told]


def _finish(one: _Running) -> None:
    one.process.join()
    result = one.result
    if one.ended and not result.reason and result.status == "failed":
        result.reason = f"its process ended with exit code {one.process.exitcode}"
    missed = [row.what for row in result.rows if row.met is False]
    if result.status == "ok" and one.step.must_meet and missed:
        result.status, result.reason = "failed", f"not as it must be: {', '.join(missed)}"


def _child(step: Step, device: str, dry: bool, ends: float, sender: "Connection[Any, Any]") -> None:
    try:
        # The threads of torch's pool are missing in a fork, so torch makes another pool at its next use. If two threads
        # use torch at that moment, one of them fails ("Invalid thread pool!"). Here this process has one thread. OpenMP
        # has no such way out: the parent must not have computed with more than one thread.
        torch.set_num_threads(torch.get_num_threads())
        step.run(Recorder(device, dry, ends, sender.send))
        sender.send(("ok", ""))
    except Skipped as reason:
        sender.send(("skipped", str(reason)))
    except Exception as error:
        traceback.print_exc()
        sender.send(("failed", f"{type(error).__name__}: {error}"))


def _is_json(value: float | str) -> bool:
    """JSON has no number for what is not finite."""
    return isinstance(value, str) or math.isfinite(value)


def _cell(value: float | str) -> str:
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(results: Sequence[Result]) -> str:
    """A table with a line for each figure, and one for each step without figures."""
    lines = ["| step | what | figure | aim | met |", "|---|---|---|---|---|"]
    for result in results:
        state = result.status if not result.reason else f"{result.status}: {result.reason}"
        lines.append(f"| **{result.name}** | {state} | {result.seconds:.0f} s | | |".replace("\n", " "))
        for row in result.rows:
            met = {None: "", True: "yes", False: "no"}[row.met]
            lines.append(f"| | {row.what} | {_cell(row.value)} | {row.aim} | {met} |")
    return "\n".join(lines)


def json_line(results: Sequence[Result], **more: object) -> str:
    return json.dumps({"benchmark": "gpu", **more, "steps": [result.as_json() for result in results]})
