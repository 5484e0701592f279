"""Traces: the decisions of an engine in every round and their results, as JSON lines, and texts made from them.

First line: {"trace": 1, "policy", "verifier", "depth", "max_running", "timings", …}; the timings are what the engine
measured at its start, rows of policies.observation.Timing. Then, in any order:
  {"request", "source", "prompt_tokens", "max_tokens", "arrived_s", "fixed_k", "max_k", "rounds"}, whose rounds
      are rows of TraceRow. The first row is the prompt's pass, which read prompt_tokens and emitted one token.
  {"step", "sequences", "prefill_tokens", "emitted", "predicted_us", "predicted_tokens", "draft_us", "score_us",
      "step_us"}: a pass of the engine, and the predictions for it; 0: there was none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lab.simulator import Job, make_job
from policies.observation import Timing

VERSION = 1
UNKNOWN_RATE = 0.5  # of drafts that are right, where a whole trace has none
STEP_FIELDS = (
    "step",
    "sequences",
    "prefill_tokens",
    "emitted",
    "predicted_us",
    "predicted_tokens",
    "draft_us",
    "score_us",
    "step_us",
)


class TraceRow(NamedTuple):
    """One round of one request. The fields are those of RoundRecord with the same names."""

    step: int
    k: int
    drafted: int  # at most k
    accepted: int
    emitted: int
    alpha: int  # estimated chance that the first draft is accepted, before the round, per mille
    reason: int  # index in REASONS of why k was no larger; -1: k was not chosen


@dataclass(frozen=True, slots=True)
class Traced:
    """A recorded request."""

    name: str
    source: str | None
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    fixed_k: int | None
    max_k: int | None
    rows: list[TraceRow]

    @property
    def length(self) -> int:
        return sum(row.emitted for row in self.rows)

    @property
    def reached(self) -> int:
        """The number of drafts at positions that the verification reached."""
        return sum(min(row.accepted + 1, row.drafted) for row in self.rows)

    @property
    def accepted(self) -> int:
        return sum(row.accepted for row in self.rows)

    def check(self, depth: int) -> None:
        """Raise ValueError for rounds that are impossible."""
        if not self.rows or self.rows[0].drafted or self.rows[0].emitted != 1:
            raise ValueError("its first round must be the prompt's pass, which emits one token without drafts")
        for row in self.rows:
            if not (0 <= row.accepted <= row.drafted <= depth and 1 <= row.emitted <= row.accepted + 1):
                raise ValueError(f"{row} is impossible with at most {depth} drafts")
        if any(row.emitted <= row.accepted for row in self.rows[:-1]):
            raise ValueError("only its last round may have been cut")
        if not self.length <= self.max_tokens or self.prompt_tokens < 1:
            raise ValueError(f"{self.length} tokens of at most {self.max_tokens}, after {self.prompt_tokens}")


@dataclass(frozen=True, slots=True)
class Trace:
    """The content of a file. The requests are in the order in which they started."""

    head: dict[str, Any]
    depth: int
    max_running: int
    timings: list[Timing]
    requests: list[Traced]
    steps: list[dict[str, float]]

    @property
    def tokens(self) -> int:
        return sum(request.length for request in self.requests)

    @property
    def seconds(self) -> float:
        """The seconds of all steps; 0 without steps."""
        return sum(step["step_us"] for step in self.steps) / 1e6


def save(path: Path, head: Mapping[str, Any], timings: Sequence[Timing], lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a trace. head: policy, verifier, depth, max_running and any further facts."""
    first = {"trace": VERSION, **head, "timings": [astuple(timing) for timing in timings]}
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (first, *lines)), "utf-8")


def load(path: Path) -> Trace:
    """Read a trace. Raises ValueError, with the line's number, for a file that cannot be replayed."""
    lines = path.read_text("utf-8").splitlines()
    if not lines:
        raise ValueError(f"{path.name} is empty")
    head, requests, steps = _line(path, 1, lines[0], _head), [], []
    for number, text in enumerate(lines[1:], 2):
        parsed = _line(path, number, text, lambda line: _entry(line, head["depth"]))
        if isinstance(parsed, Traced):
            requests.append(parsed)
        else:
            steps.append(parsed)
    if not requests:
        raise ValueError(f"{path.name} holds no request")
    requests.sort(key=lambda request: request.rows[0].step)
    return Trace(head, head["depth"], head["max_running"], head.pop("timings"), requests, steps)


def _line(path: Path, number: int, text: str, parse: Any) -> Any:
    try:
        return parse(json.loads(text))
    except KeyError as error:
        raise ValueError(f"{path.name}, line {number}: {error} is missing") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path.name}, line {number}: {error}") from error


def _head(line: dict[str, Any]) -> dict[str, Any]:
    if line.get("trace") != VERSION:
        raise ValueError(f"not the head of a trace of version {VERSION}")
    if line["verifier"] != "match":
        raise ValueError(f"under verifier {line['verifier']} a draft's fate is its round's; only match can be replayed")
    if line["depth"] < 1 or line["max_running"] < 1:
        raise ValueError("depth and max_running must be at least 1")
    width = len(fields(Timing))
    if any(len(row) != width for row in line["timings"]):
        raise ValueError(f"a timing must have {width} entries")
    return {**line, "timings": [Timing(*row) for row in line["timings"]]}


def _entry(line: dict[str, Any], depth: int) -> Traced | dict[str, float]:
    if "request" not in line:
        return {name: float(line[name]) for name in STEP_FIELDS}
    rows = [TraceRow(*map(int, row)) for row in line["rounds"]]
    request = Traced(
        line["request"],
        line["source"],
        line["prompt_tokens"],
        line["max_tokens"],
        float(line["arrived_s"]),
        line["fixed_k"],
        line["max_k"],
        rows,
    )
    request.check(depth)
    return request


def jobs(trace: Trace, seed: int = 0) -> tuple[list[Job], float]:
    """Return (the requests as texts, share of their bits that are known). The same seed gives the same texts.

    A bit says whether a draft at that position is right. It is unknown where no draft was made, behind a rejection, and
    in place of a bonus token. Unknown bits are drawn with the acceptance rate of their request, or of the whole trace
    if it has no drafts. The same rate is the request's chance at every position.
    """
    reached = sum(request.reached for request in trace.requests)
    pooled = sum(request.accepted for request in trace.requests) / reached if reached else UNKNOWN_RATE
    made, known = [], 0
    for index, request in enumerate(trace.requests):
        job, count = _job(request, trace, pooled, np.random.default_rng([seed, index]))
        made.append(job)
        known += count
    return made, known / max(1, sum(request.length - 1 for request in trace.requests))


def _job(request: Traced, trace: Trace, pooled: float, rng: np.random.Generator) -> tuple[Job, int]:
    """Return (the text, number of known bits from position 1 on). Bits past its end decide drafts that were cut."""
    size = request.length + trace.depth
    rate = request.accepted / request.reached if request.reached else pooled
    bits = rng.random(size) < rate
    known = np.zeros(size, bool)
    at = 0
    for row in request.rows:
        reached = min(row.accepted + 1, row.drafted)
        bits[at : at + reached] = np.arange(reached) < row.accepted
        known[at : at + reached] = True
        at += row.emitted
    job = make_job(
        bits,
        np.full(size, rate),
        request.length,
        allowed=request.max_tokens,
        prompt=request.prompt_tokens,
        source=request.source,
        fixed=request.fixed_k,
        max_k=request.max_k,
        arrived_s=request.arrived_s,
        beside=trace.max_running,
    )
    return job, int(known[1 : request.length].sum())
