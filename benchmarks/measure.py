"""One timed `generate` call of the engine, and what can be derived from its records."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Protocol

from benchmarks.stats import acceptance_rate, decode_steps
from engine.types import RequestRecord, RoundRecord, SamplingParams, StepStats, acceptance_of


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
    def busy_tokens_per_s(self) -> float:
        """Emitted tokens per second, prefill included, up to the last step in which all places were taken.

        Behind it requests end and none is left to take their places, so that batches get smaller than what is to be
        measured: the sooner, the more their speeds differ. Of a single call only.
        """
        full = max(step.sequences for step in self.steps)
        last = max(i for i, step in enumerate(self.steps) if step.sequences == full)
        window = self.steps[: last + 1]
        return sum(step.emitted for step in window) / sum(step.step_us for step in window) * 1e6

    @property
    def alpha(self) -> float | None:
        return acceptance_rate(*self._drafts)

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens emitted per sequence and speculative round; None without drafts."""
        emitted = [part.emitted for part in self._rounds if part.drafted]
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

    @property
    def mean_k(self) -> float | None:
        """Drafts per round of a sequence, of rounds in which its k was chosen; None: there was none."""
        rounds = [part.drafted for part in self._rounds if part.reason >= 0]
        return sum(rounds) / len(rounds) if rounds else None

    @property
    def reasons(self) -> Counter[str]:
        """Rounds of a sequence by why its k was what it was."""
        return Counter(acceptance_of(*self.records).decisions)

    @property
    def predicted_over_real(self) -> tuple[float, float] | None:
        """Sums of predicted over those of realised (seconds, tokens) of the steps in which k was chosen and no prompt
        was read; None: there was none."""
        known = self._predicted
        if not known:
            return None
        seconds = sum(step.predicted_us for step in known) / sum(step.step_us for step in known)
        return seconds, sum(step.predicted_tokens for step in known) / sum(step.emitted for step in known)

    @property
    def time_error(self) -> float | None:
        """Median of |predicted − realised| over realised seconds, of the same steps."""
        errors = [abs(step.predicted_us - step.step_us) / step.step_us for step in self._predicted]
        return median(errors) if errors else None

    @property
    def policy_s(self) -> float:
        """Median seconds that choosing k, and learning, took of a step in which k was chosen; 0.0 without any."""
        spent = [step.policy_us for step in self.steps if step.decoding]
        return median(spent) / 1e6 if spent else 0.0

    @cached_property
    def _predicted(self) -> list[StepStats]:
        return [step for step in self.steps if step.predicted_us and not step.prefill_tokens]

    @cached_property
    def _decode(self) -> list[StepStats]:
        return decode_steps(self.steps)

    @property
    def _rounds(self) -> list[RoundRecord]:
        return [part for record in self.records for part in record.rounds]

    @property
    def _drafts(self) -> tuple[list[int], list[int]]:
        return [part.drafted for part in self._rounds], [part.accepted for part in self._rounds]


def merge(runs: Sequence[Run]) -> Run:
    """Several calls as one. Each call begins with a prompt, so decode_steps never pairs steps across calls."""
    return Run(
        seconds=sum(run.seconds for run in runs),
        outputs=[tokens for run in runs for tokens in run.outputs],
        records=[record for run in runs for record in run.records],
        steps=[step for run in runs for step in run.steps],
    )


Params = SamplingParams | Sequence[SamplingParams]  # of all prompts, or of each
Generate = Callable[[Sequence[Sequence[int]], Params, int | None], Sequence[Generated]]


def timed_run(
    llm: Generator,
    prompts: Sequence[Sequence[int]],
    params: Params,
    k: int | None,
    generate: Generate | None = None,
) -> Run:
    """Generate for all prompts at k drafts per round (None: the policy's); `generate`: llm's own with more arguments
    bound.

    Raises RuntimeError when a request emitted another number of tokens than asked, since rates would not compare.
    """
    start = time.perf_counter()
    completions = (generate or llm.generate)(prompts, params, k)
    seconds = time.perf_counter() - start
    outputs = [list(c.token_ids) for c in completions]
    lengths = [len(tokens) for tokens in outputs]
    asked = [p.max_tokens for p in ([params] * len(prompts) if isinstance(params, SamplingParams) else params)]
    if lengths != asked:
        raise RuntimeError(f"outputs of {sorted({*lengths})} tokens where {sorted({*asked})} were asked for")
    return Run(seconds, outputs, [c.record for c in completions], list(llm.steps))
