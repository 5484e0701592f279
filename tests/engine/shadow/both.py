"""Runs the same requests on an engine on the CPU and on one on the shadow device, and compares what they say."""

import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from engine import engine as engine_module
from engine.drafters.base import DraftBatch
from engine.engine import Engine
from engine.loading import load as load_module
from engine.sampling.acceptance import OVERLAP_SCALE, Verdict
from engine.types import Request, TokenLogprob
from tests.engine.driving import Drive, drive
from tests.engine.sampling.test_logprobs import equal
from tests.engine.shadow.counting import Counts
from tests.engine.shadow.cuda import shadow_cuda

Arrivals = Seq[Request] | Mapping[int, Seq[Request]]


@dataclass(slots=True)
class Told:
    """What one engine said, and what was logged meanwhile."""

    run: Drive = field(default_factory=Drive)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)  # of prompt and output, by request
    drafts: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by request and tokens of its text
    overlaps: dict[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)  # by the same
    warnings: list[str] = field(default_factory=list)

    def drafted(self, name: str) -> int:
        return self._sum(name, "drafted")

    def accepted(self, name: str) -> int:
        return self._sum(name, "accepted")

    def _sum(self, name: str, column: str) -> int:
        record = self.run.received[name].record
        assert record is not None
        return sum(record.column(column))


@dataclass(frozen=True, slots=True)
class Both:
    cpu: Told
    shadow: Told
    counts: Counts  # of the shadow device, from the first step on

    def check(self) -> None:
        """Raise AssertionError unless both say the same, no request ended with an error, and nothing failed on the way:
        a round that fails is tried again without drafts, which hides the reason."""
        for told in (self.cpu, self.shadow):
            assert not told.warnings, "\n".join(told.warnings)
            assert not any(step.draft_faults or step.failed for step in told.run.steps)
            assert {r.error for r in told.run.received.values()} == {None}
        assert self.shadow.run.tokens == self.cpu.run.tokens, "the texts differ"
        assert self.shadow.logprobs.keys() == self.cpu.logprobs.keys()
        for name, entries in self.cpu.logprobs.items():
            assert equal(self.shadow.logprobs[name], entries), name
        assert self.shadow.drafts == self.cpu.drafts, "the drafts differ"
        for place, overlaps in self.cpu.overlaps.items():
            assert self.shadow.overlaps[place] == pytest.approx(overlaps, abs=2 / OVERLAP_SCALE), place
        assert self.shadow.run.accepted == self.cpu.run.accepted
        read = [[step.draft_tokens for step in told.run.steps] for told in (self.cpu, self.shadow)]
        assert read[0] == read[1], "the drafts read other tokens"

    def check_drafts(self, *groups: Seq[str]) -> None:
        """Raise AssertionError unless each group of requests got drafts, and some of them were accepted. No group: all
        requests together."""
        for names in groups or [tuple(self.shadow.run.received)]:
            assert sum(map(self.shadow.drafted, names)), f"nothing was drafted for {names}"
            assert sum(map(self.shadow.accepted, names)), f"no draft was accepted for {names}"


def run_both(
    make: Callable[[str], Engine], arrivals: Arrivals, act: Callable[[Engine, int], None] = lambda engine, step: None
) -> Both:
    """make: an engine on the device of this name. act is called after each step with its number, from 0 on."""
    cpu = _listen(make("cpu"), arrivals, act)
    with shadow_cuda() as device, logged() as said:
        engine = make("cuda")
        before = device.counts.copy()
        shadow = _listen(engine, arrivals, act)
        shadow.warnings = said
        return Both(cpu, shadow, device.counts.since(before))


@contextmanager
def without_measurements() -> Iterator[None]:
    """Engines that measure at their start neither what rounds cost nor how much memory the largest ones take."""
    with (
        patch.object(engine_module, "profile", lambda *args, **options: []),
        patch.object(load_module, "measure_largest_rounds", lambda *args: 0),
    ):
        yield


def _listen(engine: Engine, arrivals: Arrivals, act: Callable[[Engine, int], None]) -> Told:
    told, steps, step, observe = Told(), [0], engine.step, engine.drafter.observe

    def observing(batch: DraftBatch, verdict: Verdict) -> None:
        for i, sequence in enumerate(batch.sequences):
            name = sequence.request_id, len(sequence.tokens)
            told.drafts[name], told.overlaps[name] = verdict.drafts[i], verdict.overlaps[i]
        observe(batch, verdict)

    def listening() -> engine_module.StepResult:
        result = step()
        for output in result.outputs:
            if entries := [*output.prompt_logprobs, *output.logprobs]:
                told.logprobs.setdefault(output.request_id, []).extend(entries)
        return result

    def after_step() -> None:
        act(engine, steps[0])
        steps[0] += 1

    listeners = patch.object(engine, "step", listening), patch.object(engine.drafter, "observe", observing)
    with logged() as told.warnings, listeners[0], listeners[1]:
        told.run = drive(engine, arrivals, after_step=after_step)
    return told


@contextmanager
def logged() -> Iterator[list[str]]:
    """Fills with what is logged as a warning or worse."""
    found: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    keeper = Keeper(logging.WARNING)
    logging.getLogger().addHandler(keeper)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(keeper)
