"""Runs the steps of a long measurement one after the other, so that what one of them breaks costs no other.

Each step is a process of its own: after a fault of a GPU its process cannot use it any longer, and a step may hang. A
step's figures count from the moment at which it tells them.
"""

import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


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


def run_steps(
    steps: Sequence[Step], device: str, *, dry: bool, budget_s: float, say: Callable[[str], None] = print
) -> list[Result]:
    """Run the steps within `budget_s` seconds in all. An error of a step does not raise here."""
    deadline = time.monotonic() + budget_s
    results = []
    for step in steps:
        began = time.monotonic()
        limit_s = min(step.limit_s, deadline - began)
        say(f"{step.name}: at most {max(0.0, limit_s):.0f} s")
        result = Result(step.name)
        if limit_s > 0:
            _run_step(step, device, dry, began + limit_s, result, say)
        else:
            result.reason = "no time is left"
        result.seconds = time.monotonic() - began
        say(f"{step.name}: {result.status} ({result.seconds:.1f} s) {result.reason}".rstrip())
        results.append(result)
    return results


def _run_step(step: Step, device: str, dry: bool, ends: float, result: Result, say: Callable[[str], None]) -> None:
    # CUDA cannot be used in a fork of a process that has looked for devices. On a CPU a fork saves the imports.
    processes = get_context("fork") if device == "cpu" else get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(target=_child, args=(step, device, dry, ends, sender), daemon=True)
    child.start()
    sender.close()
    ended = _receive(receiver, ends, result, say)
    if not ended:
        child.kill()
        result.reason = "it took too long, so it was ended"
    child.join()
    if ended and not result.reason and result.status == "failed":
        result.reason = f"its process ended with exit code {child.exitcode}"
    missed = [row.what for row in result.rows if row.met is False]
    if result.status == "ok" and step.must_meet and missed:
        result.status, result.reason = "failed", f"not as it must be: {', '.join(missed)}"


def _receive(receiver: "Connection[Any, Any]", ends: float, result: Result, say: Callable[[str], None]) -> bool:
    """Take in what the step tells. Whether its process came to its end in time."""
    while receiver.poll(max(0.0, ends - time.monotonic())):
        try:
            message = receiver.recv()
        except EOFError:
            return True
        if isinstance(message, Row):
            result.rows.append(message)
            say(f"  {message.what}: {_cell(message.value)} {message.aim}".rstrip())
        else:
            result.status, result.reason = message
    return False


def _child(step: Step, device: str, dry: bool, ends: float, sender: "Connection[Any, Any]") -> None:
    try:
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
