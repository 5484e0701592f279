"""The engine: takes requests, advances them step by step, returns their outputs. `Engine.step` is the whole system.

One thread calls the engine. The engine never waits and never awaits.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

from engine.commit import commit
from engine.config import EngineConfig
from engine.device.computing import computing
from engine.drafters.base import Drafter, try_forget
from engine.drafters.chain import ChainedDrafter
from engine.intake import Intake, refuse_used_ids
from engine.ledger import Ledger
from engine.loading.draft_swap import NewDraft, OldDraft, load, num_bytes
from engine.loading.load import load_models, with_threads
from engine.models.runner import Runner
from engine.models.tokenizer import Tokenizer
from engine.profiling.round_profile import profile, renewed
from engine.rescue import run_or_rescue
from engine.round import Outcome
from engine.scheduler import Plan, Scheduler, Slice
from engine.sequence import Sequence, State
from engine.speculator import Speculator
from engine.types import (
    DrafterName,
    ErrorCode,
    FinishReason,
    Output,
    Request,
    StepStats,
)
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.observation import Timing

log = logging.getLogger(__name__)

PROFILE_S = 4.0  # the most seconds of the start-up that go into measuring rounds
DISTURBED = 1.25  # a profile that misjudges one kind of rounds against another by this factor is measured again
MOST_REPEATS = 3  # a profile is repeated at most this often: unpredictable rounds must not keep an idle machine busy


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outputs of one step, at most one per request, and the step's statistics."""

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
        sampling_defaults: Mapping[str, float] = MappingProxyType({}),
        room: int = 0,
    ) -> None:
        """timings: rounds that profiling/ measured. Without them the cost model learns while the engine serves.
        sampling_defaults: for clients that leave these fields of SamplingParams out. room: bytes that are left beside
        the models and their caches, for another draft."""
        self.config = config
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults
        self.intake = Intake(config, tokenizer, eos_ids, target.vocab_size, target.cache.max_len, drafters)
        control = SpecControl(config.policy, self.intake.max_spec_length, timings)
        self.speculator = Speculator(control, drafter, target.cache, trees=not config.deterministic)
        self.scheduler = Scheduler(
            target, self.speculator.plan, config.max_running, config.max_step_tokens, config.chunk
        )
        self._profiled_s = max((t.draft_s + t.score_s for t in timings), default=0.0)
        self._repeats = 0  # how often the profile was repeated
        self._profiled = True  # whether the profile is that of the draft in force
        self._room = room
        self._sequences: dict[str, Sequence] = {}
        self._handles = itertools.count()
        self._last_outputs: list[Output] = []  # of requests that ended since the last step; filled by _finish
        self._ended_handles: list[int] = []  # of sequences that ended since the last step
        self._ledger = Ledger(control.cost)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """Load the models and measure what rounds cost. Raises ConfigError for what cannot be served."""
        config = with_threads(config)
        models = load_models(config)
        timings = profile(models.target, models.drafter, config.max_running, config.max_spec_length, PROFILE_S)
        return cls(
            config,
            models.target,
            models.drafter,
            models.tokenizer,
            models.eos_ids,
            models.drafter.names,
            timings,
            models.sampling_defaults,
            models.room,
        )

    def step(self) -> StepResult:
        """End overdue requests, plan, run one round, commit its tokens, learn from it, publish the outputs."""
        self._ledger.begin()
        self._expire()
        plan = self._plan()
        outcome = self._round(plan)
        outputs = self._commit(plan, outcome)
        self._learn(plan, outcome)
        return self._publish(plan, outcome, outputs)

    def _expire(self) -> None:
        now = time.monotonic()
        for sequence in tuple(self._sequences.values()):
            if sequence.deadline is not None and sequence.deadline <= now:
                limit_s = sequence.deadline - sequence.record.arrived
                error = f"the request was not finished within {limit_s:g} s"
                self._finish(sequence, "error", error, code="deadline_exceeded")

    def _plan(self) -> Plan:
        self.target.restore_withheld()
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            self._ledger.draft_faults += not try_forget(self.drafter, sequence)
        for sequence, cached in plan.started:
            if sequence.record.admitted is None:
                sequence.record.admitted = time.monotonic()
                sequence.record.cached_tokens = cached
        return plan

    def _round(self, plan: Plan) -> Outcome | None:
        """Run the plan's round and end the requests that make it fail (R9). None: no sequence came through a round."""
        if not plan.slices:
            return None
        with computing(self.target.device):
            outcome, failures = run_or_rescue(plan, self.target, self.drafter)
        if outcome is not None:
            failures = failures | outcome.failures
        for slice_ in plan.slices:
            if error := failures.get(slice_.sequence.handle):
                self._finish(slice_.sequence, "error", error)
        return outcome

    def _commit(self, plan: Plan, outcome: Outcome | None) -> list[Output]:
        outputs: list[Output] = []
        if outcome is None:
            return outputs
        for slice_, logprobs in outcome.prompt_logprobs:
            slice_.sequence.prompt_logprobs += logprobs
        for slice_ in plan.slices:
            if not slice_.emits and slice_.sequence.state is State.RUNNING:
                slice_.sequence.record.prefill_passes += 1
                if not self.target.publish(slice_.sequence):
                    self._end_non_finite(slice_.sequence, "keys and values")
        for i, slice_ in enumerate(outcome.slices):
            if slice_.sequence.state is State.RUNNING and (output := self._commit_one(slice_, i, outcome)):
                outputs.append(output)
        return outputs

    def _commit_one(self, slice_: Slice, i: int, outcome: Outcome) -> Output | None:
        """Commit the tokens of the round's i-th sequence. None if the sequence ended: _finish queues its output."""
        sequence, verdict = slice_.sequence, outcome.verdict
        record = sequence.record
        if verdict.non_finite[i]:
            self._end_non_finite(sequence, "logits")
            return None
        try:
            committed = commit(sequence, verdict.emitted[i])
        except Exception:
            log.exception("request %s failed while its tokens were committed", sequence.request_id)
            self._finish(sequence, "error", "the output of this request could not be processed")
            return None
        self.target.publish(sequence)
        prompt_logprobs = () if record.rounds else tuple(sequence.prompt_logprobs)
        self._ledger.note(slice_, outcome, i, len(committed.tokens))
        if record.first_token is None and committed.tokens:
            record.first_token = time.monotonic()
        output = Output(
            sequence.request_id,
            committed.tokens,
            committed.text,
            logprobs=outcome.logprobs[i][: len(committed.tokens)],
            prompt_logprobs=prompt_logprobs,
            drafts=outcome.decided_drafts(i),
            accepted=verdict.accepted[i],
        )
        if committed.finish_reason is None:
            return output
        self._finish(sequence, committed.finish_reason, None, output)
        return None

    def _end_non_finite(self, sequence: Sequence, what: str) -> None:
        log.error("request %s ends: its %s are not finite", sequence.request_id, what)
        self.target.clear_non_finite(sequence)
        self._finish(sequence, "error", "the model gave no valid distribution for this request")

    def _learn(self, plan: Plan, outcome: Outcome | None) -> None:
        if outcome is not None:
            rest_us = self._ledger.spent_us - outcome.draft_us - outcome.score_us
            committed = sum(slice_.committed for slice_ in plan.slices)
            self.speculator.observe(outcome, committed - len(outcome.slices), rest_us)
        for handle in self._ended_handles:
            self.speculator.forget(handle)
        self._ended_handles.clear()

    def _publish(self, plan: Plan, outcome: Outcome | None, outputs: list[Output]) -> StepResult:
        outputs += self._last_outputs
        stats = self._ledger.close(
            plan,
            outcome,
            emitted=sum(len(o.token_ids) for o in outputs),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            policy_us=self.speculator.spent_us(),
        )
        self._last_outputs = []  # now that nothing raises: `abort` would return them
        return StepResult(outputs, stats)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        last: Output | None = None,
        code: ErrorCode = "engine_error",
    ) -> None:
        """End a request: queue its last output and free its memory. Every request ends here. Does not raise (I5)."""
        sequence.finish(reason)
        del self._sequences[sequence.request_id]
        self._ended_handles.append(sequence.handle)
        record = sequence.record
        record.finished = time.monotonic()
        last = last or Output(sequence.request_id, (), "")
        self._last_outputs.append(last._replace(finish_reason=reason, error=error, error_code=code, record=record))
        self.scheduler.remove(sequence)
        self._ledger.draft_faults += not try_forget(self.drafter, sequence)

    def check(self, *requests: Request) -> None:
        """Raise InvalidRequest for a request that can never be served. Any thread may call it: it reads constants."""
        self.intake.check(*requests)

    def submit(self, request: Request, arrived: float | None = None) -> None:
        """Queue a request that passed `check`. arrived: monotonic seconds; None: now.

        Raises InvalidRequest if its id is in use.
        """
        refuse_used_ids([request.id], self._sequences)
        sequence = self.intake.sequence(request, next(self._handles), time.monotonic() if arrived is None else arrived)
        sequence.record.waiting_ahead = len(self.scheduler.waiting)
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request and free its memory at once. Unknown and finished ids are ignored."""
        if sequence := self._sequences.get(request_id):
            self._finish(sequence, "cancelled")

    def cancel_all(self) -> None:
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def abort(self, error: str) -> list[Output]:
        """End every request with an error, after a step that raised. Returns the last outputs of the requests."""
        self._ledger.drop()
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "error", error)
        outputs, self._last_outputs = self._last_outputs, []
        return outputs

    def audit(self) -> None:
        """Raise AssertionError unless every slot and block is accounted for (I3). Cheap enough to run when idle."""
        self.target.cache.audit({s.handle for s in self.scheduler.running})
        self.drafter.audit({s.handle for s in self._sequences.values()})
        idle = [s.request_id for s in self.scheduler.running if not self.target.cache.holds(s.handle)]
        assert not idle, f"{len(idle)} running sequences hold no cache slot: {idle}"

    def repeat_profile(self, interrupted: Callable[[], bool]) -> bool:
        """Measure rounds again if those that were served show that the profile was disturbed, or if another draft has
        come. The engine must be idle.

        interrupted: whether the measurement must end, because a request has come. Returns False if it had to.
        """
        control, config = self.speculator.control, self.config
        fits = self._profiled and control.cost.misfit < DISTURBED
        if not control.timings or self._repeats >= MOST_REPEATS or fits:
            return True
        self._repeats += 1
        try:
            timings = profile(
                *(self.target, self.drafter, config.max_running, config.max_spec_length, PROFILE_S),
                kept=False,
                interrupted=interrupted,
            )
        except Exception:
            log.exception("rounds cannot be measured again; the costs of the start stay")
            return True
        if not timings:
            self._repeats -= 1
        elif self._profiled:
            log.info("the profile was off by a factor of %.2f between two kinds of rounds", control.cost.misfit)
            control.begin(renewed(control.timings, timings))
        elif len(timings) >= len(control.timings):  # memory or time may have sufficed for fewer
            control.begin(timings)
        else:
            control.cost.begin_draft(control.cost.draft_cost(timings))
        self._profiled |= bool(timings)
        return bool(timings)

    def configure(self, policy: PolicyConfig) -> None:
        """Let another policy choose k from the next round on. Raises ConfigError if its k is too large."""
        self.config.check_policy(policy)
        self.speculator.control.configure(policy)
        self.intake.put_policy(policy, self._sequences.values())

    def load_draft(self, draft: str | None) -> NewDraft:
        """Load another draft, or none, for `put_draft`. One other thread may call it while the engine serves.

        Raises ConfigError for a draft that could not be served from the start, and for one that does not fit into the
        memory that is left.
        """
        return load(self.config.with_draft(draft), self.target, self._room, self.speculator.control.cost.draft_cost)

    def put_draft(self, new: NewDraft) -> OldDraft:
        """Let another draft model, or none, draft from the next round on. No text depends on it under `match`.

        It reads each sequence's text with its next gaps. The caller releases the old one. An error changes nothing.
        """
        assert isinstance(self.drafter, ChainedDrafter), "the engine's drafters are chained"
        old = OldDraft(self.drafter.model, tuple(self._sequences.values()), self.target.reader, self.target.look_ahead)
        freed, taken = (num_bytes(new.config, model, self.target) for model in (old.model, new.model))
        try:
            self._draft_by(self.drafter, new)
            for sequence in old.sequences:
                sequence.draft_text = None  # the tokens of the old model's tokenizer
                self.intake.adopt(sequence)
            self.speculator.control.begin_draft("model", new.cost)
        except Exception:
            self._draft_by(self.drafter, old)
            raise
        if old.graph_owner is not None:
            self.target.staging.drop(old.graph_owner)
        self._profiled, self._repeats = new.model is None, 0
        log.info("draft %s has replaced %s", new.config.draft or "none", self.config.draft or "none")
        self.config, self._room = new.config, self._room + freed - taken
        return old

    def _draft_by(self, drafter: ChainedDrafter, draft: NewDraft | OldDraft) -> None:
        drafter.put_model(draft.model)
        self.target.reader, self.target.look_ahead = draft.reader, draft.look_ahead
        self.intake.put_drafters(drafter.names)

    @property
    def policy(self) -> PolicyConfig:
        """The policy that chooses k at present."""
        return self.speculator.control.config

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._last_outputs)

    @property
    def steps(self) -> int:
        """Number of steps that have ended."""
        return self._ledger.steps

    @property
    def max_model_len(self) -> int:
        return self.target.cache.max_len

    @property
    def max_spec_length(self) -> int:
        """The largest k that a request may ask for."""
        return self.intake.max_spec_length

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        return self.intake.drafters

    @property
    def full_step_s(self) -> float:
        """Estimated seconds of a step whose pass holds max_step_tokens, from the profiled rounds and the passes so far.

        Any thread may read it.
        """
        return max(self._profiled_s, self.target.pass_s(self.config.max_step_tokens))
