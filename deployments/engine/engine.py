"""The engine: requests in, a step at a time, outputs out. One thread drives it; it never waits and never awaits."""

import itertools
import logging
import secrets
import time
from dataclasses import dataclass, replace

import torch

from deployments.engine.commit import commit
from deployments.engine.config import EngineConfig
from deployments.engine.detokenize import Detokenizer, TextStream
from deployments.engine.drafters.base import Drafter, try_forget
from deployments.engine.memory import keep_freed_memory
from deployments.engine.models.pair import load_pair
from deployments.engine.models.tokenizer import Tokenizer
from deployments.engine.randomness import sequence_key
from deployments.engine.round import Outcome, run_round
from deployments.engine.runner import Runner
from deployments.engine.scheduler import Plan, Scheduler
from deployments.engine.sequence import Sequence
from deployments.engine.types import (
    FinishReason,
    InvalidRequest,
    Output,
    Request,
    RequestRecord,
    StepStats,
)
from policies.spec_length import Fixed

log = logging.getLogger(__name__)

SEED_RANGE = 2**53  # of seeds drawn here: a client in JavaScript must be able to send them back


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: list[Output]
    stats: StepStats


class Engine:
    """Owns the models, the caches and every sequence. Not thread-safe: see worker.py."""

    def __init__(
        self, config: EngineConfig, target: Runner, drafter: Drafter, tokenizer: Tokenizer, eos_ids: frozenset[int]
    ) -> None:
        self.config = config
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        # Drafts per round: for requests that do not say, and the most that one may ask for.
        self.spec_length, self.max_spec_length = (
            (0, 0) if config.draft is None else (config.spec_length, config.max_spec_length)
        )
        self.scheduler = Scheduler(target, Fixed(self.spec_length), config.max_running, config.max_step_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._handles = itertools.count()
        self._finished: list[Output] = []  # of this step, filled by _finish
        self._draft_faults = 0  # since the last step's statistics, of those that no Outcome reports
        self.steps = 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """Load the pair. Raises ConfigError for anything that cannot be served."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        keep_freed_memory()
        return cls(config, *load_pair(config))

    @property
    def max_model_len(self) -> int:
        return self.target.cache.max_len

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._finished)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for what can never be served. Reads only constants, so any thread may call it."""
        prompt, limit = len(request.prompt_ids), self.max_model_len
        if not prompt:
            raise InvalidRequest("the prompt holds no tokens", "prompt")
        if bad := next((t for t in request.prompt_ids if not 0 <= t < self.target.vocab_size), None):
            raise InvalidRequest(f"prompt token id {bad} is outside the vocabulary", "prompt")
        if prompt + request.params.max_tokens > limit:
            raise InvalidRequest(
                f"the prompt's {prompt} tokens and max_tokens {request.params.max_tokens} exceed the context of "
                f"{limit} tokens",
                "max_tokens" if prompt < limit else "prompt",
                "context_length_exceeded",
            )
        if request.k is not None and not 0 <= request.k <= self.max_spec_length:
            raise InvalidRequest(f"k must lie between 0 and {self.max_spec_length}", "speculation")

    def submit(self, request: Request, arrived: float | None = None) -> None:
        """Queue a request that passed `check`; it arrived then (monotonic seconds; None: now).

        Raises InvalidRequest if its id is in use.
        """
        if request.id in self._sequences:
            raise InvalidRequest(f"request id {request.id!r} is in use", "id")
        sequence = self._make_sequence(request)
        if arrived is not None:
            sequence.record.arrived = arrived
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request now; its slot is free at once. Unknown and finished ids are ignored."""
        if sequence := self._sequences.get(request_id):
            self._finish(sequence, "cancelled")

    def cancel_all(self) -> None:
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def abort(self, error: str) -> list[Output]:
        """End every request with an error, after a failure that no step survives; returns their last outputs."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "error", error)
        outputs, self._finished = self._finished, []
        return outputs

    def step(self) -> StepResult:
        """Admit, plan, run one round, commit its tokens, publish what came of it."""
        started = time.perf_counter_ns()
        self._admit()
        plan = self.scheduler.plan()
        outcome = self._round(plan)
        outputs = self._commit(outcome)
        return self._publish(plan, outcome, outputs, started)

    def audit(self) -> None:
        """Raise AssertionError unless every slot is accounted for (I3); cheap enough to run whenever idle."""
        self.target.cache.audit({s.handle for s in self.scheduler.running})
        self.drafter.audit({s.handle for s in self._sequences.values()})
        held = self.config.max_running - self.target.cache.free_slots
        assert held == len(self.scheduler.running), f"{held} slots held by {len(self.scheduler.running)} sequences"

    def _make_sequence(self, request: Request) -> Sequence:
        params = request.params
        seed = secrets.randbelow(SEED_RANGE) if params.seed is None else params.seed
        k_max = self.spec_length if request.k is None else request.k
        prompt = list(request.prompt_ids)
        return Sequence(
            handle=next(self._handles),
            request_id=request.id,
            tokens=prompt,
            num_prompt=len(prompt),
            params=params,
            k=request.k,
            key=sequence_key(seed, request.prompt_index, request.choice_index),
            max_len=self.max_model_len,
            text=TextStream(Detokenizer(self.tokenizer.decode, prompt), params.stop),
            record=RequestRecord(request.id, seed, len(prompt), k_max, arrived=time.monotonic()),
        )

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            sequence.record.admitted = time.monotonic()

    def _round(self, plan: Plan) -> Outcome | None:
        """The round; if the pass fails it is tried once more without drafts, then its requests end (R9)."""
        if not plan.slices:
            return None
        lengths = [self.target.cache.length(s.sequence.handle) for s in plan.slices]
        for with_drafts in (True, False):
            try:
                with torch.inference_mode():
                    attempt = plan if with_drafts else plan.without_drafts()
                    outcome = run_round(attempt, self.target, self.drafter, sorted(self.eos_ids))
                return outcome if with_drafts else replace(outcome, draft=replace(outcome.draft, failed=True))
            except Exception:
                log.exception("a round over %d sequences failed", len(plan.slices))
                for part, length in zip(plan.slices, lengths, strict=True):
                    self.target.cache.truncate_to(part.sequence.handle, length)
        for part in plan.slices:
            self._finish(part.sequence, "error", "the model failed to process this request")
        return None

    def _commit(self, outcome: Outcome | None) -> list[Output]:
        outputs: list[Output] = []
        if outcome is None:
            return outputs
        verdict = outcome.verdict
        for part, k, accepted, emitted, bad in zip(
            outcome.slices, outcome.draft.ks, verdict.accepted, verdict.emitted, verdict.bad, strict=True
        ):
            sequence, record = part.sequence, part.sequence.record
            if bad:
                log.error("request %s ends: its logits are not finite", sequence.request_id)
                self.target.storage.clear(self.target.cache.slot(sequence.handle))
                self._finish(sequence, "error", "the model gave no valid distribution for this request")
                continue
            try:
                committed = commit(sequence, emitted, self.eos_ids)
            except Exception:
                log.exception("request %s failed while its tokens were committed", sequence.request_id)
                self._finish(sequence, "error", "the output of this request could not be processed")
                continue
            record.drafted.append(k)
            record.accepted.append(accepted)
            record.emitted.append(len(committed.tokens))
            if record.first_token is None:
                record.first_token = time.monotonic()
            if committed.finish_reason:
                self._finish(sequence, committed.finish_reason, None, committed.tokens, committed.text)
            else:
                outputs.append(Output(sequence.request_id, committed.tokens, committed.text))
        return outputs

    def _publish(self, plan: Plan, outcome: Outcome | None, outputs: list[Output], started: int) -> StepResult:
        self.steps += 1
        outputs += self._finished
        self._finished = []
        faults, self._draft_faults = self._draft_faults, 0
        if outcome:
            faults += outcome.draft.failed + outcome.verdict.illegal
        stats = StepStats(
            step=self.steps,
            sequences=len(plan.slices),
            prefill_tokens=plan.prefill_tokens,
            drafted=sum(outcome.draft.ks) if outcome else 0,
            accepted=sum(outcome.verdict.accepted) if outcome else 0,
            emitted=sum(len(o.token_ids) for o in outputs),
            draft_us=outcome.draft_us if outcome else 0,
            draft_steps=outcome.draft.steps if outcome else 0,
            score_us=outcome.score_us if outcome else 0,
            target_forward_us=outcome.target_forward_us if outcome else 0,
            draft_forward_us=outcome.draft.forward_us if outcome else 0,
            step_us=(time.perf_counter_ns() - started) // 1000,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            draft_faults=faults,
            failed=bool(plan.slices) and outcome is None,
        )
        return StepResult(outputs, stats)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        tokens: tuple[int, ...] = (),
        text: str = "",
    ) -> None:
        """The one way a request ends: free what it holds, and queue its last output (I5)."""
        self.scheduler.remove(sequence)
        self._draft_faults += not try_forget(self.drafter, sequence)
        sequence.finish(reason)
        del self._sequences[sequence.request_id]
        record = sequence.record
        record.finished = time.monotonic()
        record.output_tokens = sum(record.emitted)  # what reached the client, also when its last round failed
        self._finished.append(Output(sequence.request_id, tokens, text, reason, error, record))
