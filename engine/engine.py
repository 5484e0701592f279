"""The engine: requests in, a step at a time, outputs out. One thread drives it; it never waits and never awaits."""

import itertools
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from engine.commit import commit
from engine.config import EngineConfig
from engine.drafters.base import Drafter, try_forget
from engine.host_memory import keep_freed_memory, limit_compiled_products
from engine.intake import Intake
from engine.ledger import Ledger
from engine.load import load_pair
from engine.models.runner import Runner
from engine.models.tokenizer import Tokenizer
from engine.profiling import profile
from engine.rescue import run_or_rescue
from engine.round import Outcome
from engine.scheduler import Plan, Scheduler, Slice
from engine.sequence import Sequence, State
from engine.speculator import Speculator
from engine.types import (
    DrafterName,
    ErrorCode,
    FinishReason,
    InvalidRequest,
    Output,
    Request,
    StepStats,
)
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.observation import Timing

log = logging.getLogger(__name__)

PROFILE_S = 4.0  # of the start, at most, spent on measuring rounds


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: list[Output]
    stats: StepStats


class Engine:
    """Owns the models, the caches and every sequence. Not thread-safe: see worker.py."""

    def __init__(
        self,
        config: EngineConfig,
        target: Runner,
        drafter: Drafter,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        drafters: tuple[DrafterName, ...] = (),
        timings: Seq[Timing] = (),
    ) -> None:
        """timings: rounds measured before, see profiling.py; without them the costs are learned while it runs."""
        self.config = config
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.intake = Intake(config, tokenizer, eos_ids, target.vocab_size, target.cache.max_len, drafters)
        control = SpecControl(config.policy, self.intake.max_spec_length, timings)
        self.speculator = Speculator(control, drafter, target.cache)
        self.scheduler = Scheduler(
            target, self.speculator.plan, config.max_running, config.max_step_tokens, config.chunk
        )
        self._profiled_s = max((t.draft_s + t.score_s for t in timings), default=0.0)
        self._sequences: dict[str, Sequence] = {}
        self._handles = itertools.count()
        self._finished: list[Output] = []  # of this step, filled by _finish
        self._gone: list[int] = []  # handles of sequences that ended since the last step's end
        self._ledger = Ledger(control.cost)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """Load the pair. Raises ConfigError for anything that cannot be served."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        keep_freed_memory()
        limit_compiled_products()
        pair = load_pair(config)
        timings = profile(pair.target, pair.drafter, config.max_running, config.max_spec_length, PROFILE_S)
        return cls(config, pair.target, pair.drafter, pair.tokenizer, pair.eos_ids, pair.drafter.names, timings)

    @property
    def max_model_len(self) -> int:
        return self.target.cache.max_len

    @property
    def max_spec_length(self) -> int:
        """The most drafts per round that a request may ask for."""
        return self.intake.max_spec_length

    @property
    def policy(self) -> PolicyConfig:
        """In force."""
        return self.speculator.control.config

    def configure(self, policy: PolicyConfig) -> None:
        """Let another policy choose k from the next round on. Raises ConfigError for one that does not fit."""
        self.config.check_policy(policy)
        self.speculator.control.configure(policy)
        self.intake.policy = policy

    @property
    def steps(self) -> int:
        """Ended so far."""
        return self._ledger.steps

    @property
    def full_step_s(self) -> float:
        """Seconds that a step may take whose pass is as large as it can be, as far as passes so far tell. At the start
        these are the ones that were profiled. From any thread."""
        return max(self._profiled_s, self.target.pass_s(self.config.max_step_tokens))

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        return self.intake.drafters

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._finished)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for what can never be served. Reads only constants, so any thread may call it."""
        self.intake.check(request)

    def submit(self, request: Request, arrived: float | None = None) -> None:
        """Queue a request that passed `check`; it arrived then (monotonic seconds; None: now).

        Raises InvalidRequest if its id is in use.
        """
        if request.id in self._sequences:
            raise InvalidRequest(f"request id {request.id!r} is in use", "id")
        sequence = self.intake.sequence(request, next(self._handles), time.monotonic() if arrived is None else arrived)
        sequence.record.waiting_ahead = len(self.scheduler.waiting)
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
        self._ledger.drop()
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "error", error)
        outputs, self._finished = self._finished, []
        return outputs

    def step(self) -> StepResult:
        """End what is overdue, plan, run one round, commit its tokens, learn from it, publish what came of it."""
        self._ledger.begin()
        self._expire()
        plan = self._plan()
        outcome = self._round(plan)
        outputs = self._commit(plan, outcome)
        self._learn(plan, outcome)
        return self._publish(plan, outcome, outputs)

    def audit(self) -> None:
        """Raise AssertionError unless every slot is accounted for (I3); cheap enough to run whenever idle."""
        self.target.cache.audit({s.handle for s in self.scheduler.running})
        self.drafter.audit({s.handle for s in self._sequences.values()})
        idle = [s.request_id for s in self.scheduler.running if not self.target.cache.holds(s.handle)]
        assert not idle, f"{len(idle)} sequences run without a slot: {idle}"

    def _expire(self) -> None:
        now = time.monotonic()
        for sequence in tuple(self._sequences.values()):
            if sequence.deadline is not None and sequence.deadline <= now:
                error = f"the request was not finished within {sequence.deadline - sequence.record.arrived:g} s"
                self._finish(sequence, "error", error, code="deadline_exceeded")

    def _plan(self) -> Plan:
        self.target.reclaim()
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            self._ledger.draft_faults += not try_forget(self.drafter, sequence)
        for sequence, cached in plan.started:
            if sequence.record.admitted is None:
                sequence.record.admitted = time.monotonic()
                sequence.record.cached_tokens = cached
        return plan

    def _round(self, plan: Plan) -> Outcome | None:
        """The round; requests that make it fail end (R9)."""
        if not plan.slices:
            return None
        with torch.inference_mode():
            outcome, failures = run_or_rescue(plan, self.target, self.drafter)
        if outcome is not None:
            failures = failures | outcome.failures
        for part in plan.slices:
            if error := failures.get(part.sequence.handle):
                self._finish(part.sequence, "error", error)
        return outcome

    def _commit(self, plan: Plan, outcome: Outcome | None) -> list[Output]:
        outputs: list[Output] = []
        if outcome is None:
            return outputs
        for part, told in outcome.prompt_logprobs:
            part.sequence.prompt_logprobs += told
        for part in plan.slices:
            if not part.emits and part.sequence.state is State.RUNNING:
                self.target.cache.publish(part.sequence.handle, part.sequence.tokens)
                part.sequence.record.prefill_passes += 1
        for i, part in enumerate(outcome.slices):
            output = self._commit_one(part, i, outcome) if part.sequence.state is State.RUNNING else None
            if output is not None:
                outputs.append(output)
        return outputs

    def _commit_one(self, part: Slice, i: int, outcome: Outcome) -> Output | None:
        """What the i-th sequence of the round adds to its text; None if that ended it."""
        sequence, verdict = part.sequence, outcome.verdict
        record = sequence.record
        if verdict.bad[i]:
            log.error("request %s ends: its logits are not finite", sequence.request_id)
            self.target.spoil(sequence)
            self._finish(sequence, "error", "the model gave no valid distribution for this request")
            return None
        try:
            committed = commit(sequence, verdict.emitted[i])
        except Exception:
            log.exception("request %s failed while its tokens were committed", sequence.request_id)
            self._finish(sequence, "error", "the output of this request could not be processed")
            return None
        self.target.cache.publish(sequence.handle, sequence.tokens)
        prompt_logprobs = () if record.rounds else tuple(sequence.prompt_logprobs)
        self._ledger.note(part, outcome, i, len(committed.tokens))
        if record.first_token is None and committed.tokens:
            record.first_token = time.monotonic()
        output = Output(
            sequence.request_id,
            committed.tokens,
            committed.text,
            logprobs=outcome.logprobs[i][: len(committed.tokens)],
            prompt_logprobs=prompt_logprobs,
            drafts=tuple(verdict.drafts[i]),
            accepted=verdict.accepted[i],
        )
        if committed.finish_reason is None:
            return output
        self._finish(sequence, committed.finish_reason, None, output)
        return None

    def _learn(self, plan: Plan, outcome: Outcome | None) -> None:
        if outcome is not None:
            rest_us = self._ledger.spent_us - outcome.draft_us - outcome.score_us
            committed = sum(part.committed for part in plan.slices)
            self.speculator.observe(outcome, committed - len(outcome.slices), rest_us)
        for handle in self._gone:
            self.speculator.forget(handle)
        self._gone.clear()

    def _publish(self, plan: Plan, outcome: Outcome | None, outputs: list[Output]) -> StepResult:
        outputs += self._finished
        self._finished = []
        stats = self._ledger.close(
            plan,
            outcome,
            emitted=sum(len(o.token_ids) for o in outputs),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            policy_us=self.speculator.spent_us(),
        )
        return StepResult(outputs, stats)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        last: Output | None = None,
        code: ErrorCode = "engine_error",
    ) -> None:
        """The one way a request ends: queue its last output, and free what it holds, neither of which may fail (I5)."""
        sequence.finish(reason)
        del self._sequences[sequence.request_id]
        self._gone.append(sequence.handle)
        record = sequence.record
        record.finished = time.monotonic()
        last = last or Output(sequence.request_id, (), "")
        self._finished.append(replace(last, finish_reason=reason, error=error, error_code=code, record=record))
        self.scheduler.remove(sequence)
        self._ledger.draft_faults += not try_forget(self.drafter, sequence)
