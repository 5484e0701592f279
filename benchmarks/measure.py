"""One timed `generate` call of the engine, and the rates that follow from its records."""

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
    """What is measured of a Completion."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def record(self) -> RequestRecord: ...


class Generator(Protocol):
    """What is measured of LLM."""

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
        """Emitted tokens per second, with prefill, as if the batch stayed full to the end.

        After the last step with the fullest batch requests end and none takes their places. All prompts have been read
        then, and what is left to emit counts at the speed of decode steps. Otherwise a run would look slow that has
        more left to emit. Only for a Run of a single call.
        """
        full = max(step.sequences for step in self.steps)
        last = max(i for i, step in enumerate(self.steps) if step.sequences == full)
        seconds = sum(step.step_us for step in self.steps[: last + 1]) / 1e6
        if left := sum(step.emitted for step in self.steps[last + 1 :]):
            seconds += left / self.decode_tokens_per_s
        return sum(step.emitted for step in self.steps) / seconds

    @property
    def alpha(self) -> float | None:
        return acceptance_rate(*self._drafts)

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens emitted per sequence and speculative round; None without drafts."""
        emitted = [round_.emitted for round_ in self._rounds if round_.drafted]
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
        """Wall time of the decode steps over that of their forwards."""
        forwards = sum(step.draft_forward_us + step.target_forward_us for step in self._decode)
        return sum(step.step_us for step in self._decode) / forwards

    @property
    def decode_tokens_per_s(self) -> float:
        """Emitted tokens per second in decode steps."""
        return sum(step.emitted for step in self._decode) / sum(step.step_us for step in self._decode) * 1e6

    @property
    def mean_k(self) -> float | None:
        """Drafts per sequence and round, over rounds in which the policy chose k; None if there were none."""
        rounds = [round_.drafted for round_ in self._rounds if round_.reason >= 0]
        return sum(rounds) / len(rounds) if rounds else None

    @property
    def reasons(self) -> Counter[str]:
        """Number of rounds by the reason for k, summed over sequences."""
        return Counter(acceptance_of(*self.records).decisions)

    @property
    def predicted_over_real(self) -> tuple[float, float] | None:
        """(seconds, tokens): sum predicted over sum realised, in steps where the policy chose k and no prompt was read.
        None if there were none."""
        known = self._predicted
        if not known:
            return None
        seconds = sum(step.predicted_us for step in known) / sum(step.step_us for step in known)
        return seconds, sum(step.predicted_tokens for step in known) / sum(step.emitted for step in known)

    @property
    def time_error(self) -> float | None:
        """Median of |predicted − realised| / realised seconds, over the same steps."""
        errors = [abs(step.predicted_us - step.step_us) / step.step_us for step in self._predicted]
        return median(errors) if errors else None

    @property
    def policy_s(self) -> float:
        """Median seconds in the policy's code per step in which k was chosen; 0.0 if there were none."""
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
        return [round_ for record in self.records for round_ in record.rounds]

    @property
    def _drafts(self) -> tuple[list[int], list[int]]:
        return [round_.drafted for round_ in self._rounds], [round_.accepted for round_ in self._rounds]


def merge(runs: Sequence[Run]) -> Run:
    """Several calls as one. Each call begins with a prompt, so decode_steps never pairs steps across calls."""
    return Run(
        seconds=sum(run.seconds for run in runs),
        outputs=[tokens for run in runs for tokens in run.outputs],
        records=[record for run in runs for record in run.records],
        steps=[step for run in runs for step in run.steps],
    )


Params = SamplingParams | Sequence[SamplingParams]  # one for all prompts, or one per prompt
RunPrompts = Callable[[Sequence[Sequence[int]], Params, int | None], Sequence[Generated]]


def timed_run(
    llm: Generator,
    prompts: Sequence[Sequence[int]],
    params: Params,
    k: int | None,
    generate: RunPrompts | None = None,
) -> Run:
    """Generate for all prompts at k drafts per round; None: the policy chooses. generate: in place of llm.generate.

    Raises RuntimeError if an output does not have max_tokens tokens: rates would not compare.
    """
    start = time.perf_counter()
    completions = (generate or llm.generate)(prompts, params, k)
    seconds = time.perf_counter() - start
    outputs = [list(c.token_ids) for c in completions]
    lengths = [len(tokens) for tokens in outputs]
    expected = [p.max_tokens for p in ([params] * len(prompts) if isinstance(params, SamplingParams) else params)]
    if lengths != expected:
        raise RuntimeError(f"outputs have {sorted({*lengths})} tokens, not {sorted({*expected})}")
    return Run(seconds, outputs, [c.record for c in completions], list(llm.steps))
