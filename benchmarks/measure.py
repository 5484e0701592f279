"""One timed `generate` call of the engine, and what can be derived from its records."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from benchmarks.stats import acceptance_rate, decode_steps
from deployments.engine.types import RequestRecord, SamplingParams, StepStats


class Generated(Protocol):
    """The part of a Completion that is measured."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def record(self) -> RequestRecord: ...


class Generator(Protocol):
    """The part of LLM that is measured."""

    @property
    def steps(self) -> list[StepStats]: ...
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        k: int | Sequence[int | None] | None = None,
    ) -> Sequence[Generated]: ...


@dataclass(frozen=True)
class Run:
    """The facts of one call, or of several merged; every rate is derived."""

    seconds: float
    outputs: list[list[int]]
    records: list[RequestRecord]
    steps: list[StepStats]

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens over the wall time of the call, prefill included."""
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def alpha(self) -> float | None:
        return acceptance_rate(*self._drafts)

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens emitted per sequence and speculative round; None without drafts."""
        emitted = [e for r in self.records for d, e in zip(r.drafted, r.emitted, strict=True) if d]
        return sum(emitted) / len(emitted) if emitted else None

    @property
    def draft_step_s(self) -> float | None:
        """Mean seconds of one forward of the draft in decode steps; None without drafts."""
        count = sum(step.draft_steps for step in self._decode)
        return sum(step.draft_forward_us for step in self._decode) / count / 1e6 if count else None

    @property
    def target_s(self) -> float:
        """Mean seconds of the target's forward in a decode step: verification, or one plain token when k = 0."""
        return sum(step.target_forward_us for step in self._decode) / len(self._decode) / 1e6

    @property
    def overhead(self) -> float:
        """A decode step's wall time over that of its forwards alone."""
        forwards = sum(step.draft_forward_us + step.target_forward_us for step in self._decode)
        return sum(step.step_us for step in self._decode) / forwards

    @property
    def decode_tokens_per_s(self) -> float:
        """Emitted tokens per second of the decode steps alone."""
        return sum(step.emitted for step in self._decode) / sum(step.step_us for step in self._decode) * 1e6

    @cached_property
    def _decode(self) -> list[StepStats]:
        return decode_steps(self.steps)

    @property
    def _drafts(self) -> tuple[list[int], list[int]]:
        return [d for r in self.records for d in r.drafted], [a for r in self.records for a in r.accepted]


def merge(runs: Sequence[Run]) -> Run:
    """Several calls as one. Each call begins with a prompt, so decode_steps never pairs steps across calls."""
    return Run(
        seconds=sum(run.seconds for run in runs),
        outputs=[tokens for run in runs for tokens in run.outputs],
        records=[record for run in runs for record in run.records],
        steps=[step for run in runs for step in run.steps],
    )


Generate = Callable[[Sequence[Sequence[int]], SamplingParams, int], Sequence[Generated]]


def timed_run(
    llm: Generator,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    k: int,
    generate: Generate | None = None,
) -> Run:
    """Generate for all prompts at k drafts per round; `generate`: llm's own with more arguments bound.

    Raises RuntimeError when a request emitted another number of tokens than asked, since rates would not compare.
    """
    start = time.perf_counter()
    completions = (generate or llm.generate)(prompts, params, k)
    seconds = time.perf_counter() - start
    outputs = [list(c.token_ids) for c in completions]
    lengths = {len(tokens) for tokens in outputs}
    if lengths != {params.max_tokens}:
        raise RuntimeError(f"outputs of {sorted(lengths)} tokens where {params.max_tokens} were asked for")
    return Run(seconds, outputs, [c.record for c in completions], list(llm.steps))
