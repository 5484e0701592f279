"""The engine's thread. Other threads send it commands and never touch the engine. It never awaits and never sleeps."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import torch

from engine.engine import Engine, StepResult
from engine.intake import refuse_used_ids
from engine.loading.draft_swap import DraftLoader, NewDraft, OldDraft
from engine.types import (
    EngineStats,
    EngineStopped,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    StepStats,
)
from policies.admission import Admission, TokenCost
from policies.config import PolicyConfig

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # an idle engine updates its heartbeat this often
CALM_S = 1.0  # the first calm: clients that ask one question after the other leave less time between two
STALL_STEPS = 4.0  # the engine is stalled after the time of this many of its longest steps without progress
LONGEST_STEP_DECAY = 0.97  # what is left of the longest step after one more step: it counts half after 23 steps
MAX_FAILURES = 3  # failed steps in a row after which the engine is not healthy

Deliver = Callable[[list[Output], StepStats | None], None]  # outputs; the step's statistics, None outside a step


@dataclass(slots=True)
class _OpenRequest:
    """A request that was submitted and has not finished."""

    group: str
    kv_tokens: int  # positions of KV memory that it may need
    work_s: float  # seconds of work for its prompt and max_tokens
    output_left_s: float  # seconds of work for the rest of its output
    started: bool = False  # it has a slot and has emitted


class EngineWorker:
    """Runs an engine in its own thread. `deliver` is called on that thread after each step and must not block.

    Every submitted request gets exactly one output with a finish_reason, also when it is cancelled, when the engine
    fails, and when the worker stops. If `deliver` raises, the error is logged and those outputs are lost.

    The engine is not healthy after stalled_after_s seconds without progress, or after the time of STALL_STEPS of its
    longest steps, if that is more. The longest step is a recent one or the estimate for a full one.
    """

    def __init__(self, engine: Engine, deliver: Deliver, *, stalled_after_s: float = 30.0) -> None:
        self.engine = engine
        self._deliver = deliver
        self._stalled_after_s = stalled_after_s
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # guards _open, _open_kv_tokens, _admission and _stopping
        self._open: dict[str, _OpenRequest] = {}  # by request id
        self._open_kv_tokens = 0  # sum over the open requests
        self._work = TokenCost.measured(engine.speculator.control.timings, engine.config.max_running)
        config = engine.config
        self._admission = Admission(
            config.max_running, config.max_waiting, engine.target.layout.tokens, config.max_demand
        )
        self._stopping: bool = False
        self._progressed_at = time.monotonic()  # when a step last fed a token, or the engine was last idle
        self._longest_step_s = 0.0  # longest of the steps so far, decaying
        self._audited = True  # whether an audit has run since the last step
        self._idle_since = time.monotonic()
        self._calm_s = CALM_S  # how long the engine must have been idle before rounds are measured again
        self._failures = 0  # failed steps since the last one that fed a token
        self._drafts = DraftLoader(lambda: engine.config.draft, engine.load_draft, self._put_draft)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel all requests, deliver their last outputs, end the thread. Idempotent."""
        with self._lock:
            self._stopping = True
        self._inbox.put(_nothing)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._drafts.stop(timeout_s)

    def submit(self, *requests: Request) -> None:
        """Admit all requests or none, from any thread. Their time limits start here.

        Raises InvalidRequest (also for an id that is in use), Overloaded or EngineStopped; then none is queued.
        """
        self.engine.check(*requests)
        arrived = time.monotonic()
        kv_tokens = sum(map(self._kv_tokens, requests))
        with self._lock:
            if self._stopping:
                raise EngineStopped("the engine is shutting down, or has stopped")
            if kv_tokens > self._admission.most_tokens:
                raise InvalidRequest(
                    f"{len(requests)} choices may need {kv_tokens:,} tokens of KV memory, and no more than "
                    f"{self._admission.most_tokens:,.0f} are admitted at once",
                    "n",
                )
            refusal = self._admission.refusal(len(self._open), self._open_kv_tokens, len(requests), kv_tokens)
            if refusal is not None:
                raise Overloaded(refusal, self._retry_after())
            refuse_used_ids((request.id for request in requests), self._open)
            self._open |= {request.id: self._measure(request) for request in requests}
            self._open_kv_tokens += kv_tokens
        for request in requests:
            self._inbox.put(partial(self._start, request, arrived))

    def _kv_tokens(self, request: Request) -> int:
        """Positions of KV memory that the request may need at once."""
        return self.engine.target.layout.held(len(request.prompt_ids) + request.params.max_tokens)

    def _measure(self, request: Request) -> _OpenRequest:
        """What a new request needs of the engine."""
        work_s = self._work.seconds(len(request.prompt_ids), request.params.max_tokens)
        output_s = self._work.seconds(0, request.params.max_tokens)
        return _OpenRequest(request.group or request.id, self._kv_tokens(request), work_s, output_s)

    def _retry_after(self) -> int:
        """Seconds until a request of a new group would run, after one choice of each group that has no slot.

        The caller holds the lock.
        """
        started = [request for request in self._open.values() if request.started]
        ahead: dict[str, float] = {}
        for request in self._open.values():
            ahead.setdefault(request.group, request.work_s)
        for request in started:
            ahead.pop(request.group, None)
        scheduler = self.engine.scheduler
        slots = len(scheduler.running) if scheduler.waiting else self.engine.config.max_running
        return self._admission.retry_after([request.output_left_s for request in started], list(ahead.values()), slots)

    def cancel(self, request_id: str) -> None:
        """End a request and free its memory before the next round. From any thread; unknown ids are ignored."""
        with self._lock:
            if request_id not in self._open:
                return
        self._inbox.put(lambda: self.engine.cancel(request_id))

    def configure(self, policy: PolicyConfig) -> None:
        """Let another policy choose k from the next round on, from any thread. Raises ConfigError as Engine does."""
        self.engine.config.check_policy(policy)
        self._inbox.put(lambda: self.engine.configure(policy))

    def change_draft(self, draft: str | None) -> Future[None]:
        """Load another draft, or none, and let it draft as soon as it is loaded; see DraftLoader.want.

        Raises ConfigError for a draft that conflicts with the configuration.
        """
        if draft != self.engine.config.draft:
            self.engine.config.with_draft(draft)
        return self._drafts.want(draft)

    @property
    def loading_draft(self) -> str | None:
        """The draft that is about to serve, "none" for no draft; None: nothing changes. Any thread may read it."""
        return self._drafts.loading

    def _put_draft(self, new: NewDraft) -> OldDraft:
        """Let the engine's thread put a draft in place between two rounds, and return the old one. Raises EngineStopped
        if that thread has ended."""
        answers: SimpleQueue[OldDraft | Exception] = SimpleQueue()  # keeps no reference to what was taken out of it
        self._inbox.put(partial(self._exchange_drafts, new, answers))
        while True:
            try:
                answer = answers.get(timeout=IDLE_WAIT_S)
            except Empty:
                if not self._thread.is_alive():
                    raise EngineStopped("the engine stopped before the draft was in place") from None
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer

    def _exchange_drafts(self, new: NewDraft, answers: "SimpleQueue[OldDraft | Exception]") -> None:
        try:
            answers.put(self.engine.put_draft(new))
        except Exception as error:
            answers.put(error)
        self._audited, self._calm_s = False, CALM_S

    def stats(self) -> EngineStats:
        """A snapshot, from any thread. Healthy: the thread runs, progress is recent, and not all last steps failed."""
        age = time.monotonic() - self._progressed_at
        reason = ""
        if not self._thread.is_alive():
            reason = "the engine thread is not running"
        elif age > max(self._stalled_after_s, STALL_STEPS * max(self._longest_step_s, self.engine.full_step_s)):
            reason = f"the engine has made no progress for {age:.0f} s"
        elif self._failures >= MAX_FAILURES:
            reason = f"the engine's last {self._failures} steps failed"
        scheduler = self.engine.scheduler
        return EngineStats(
            healthy=not reason,
            reason=reason,
            steps=self.engine.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            max_running=self.engine.config.max_running,
            free_slots=self.engine.target.cache.free_slots,
            heartbeat_age_s=age,
            policy=self.engine.policy.name,
            kv_used=self.engine.target.cache.used,
        )

    def _run(self) -> None:
        if self.engine.config.threads is not None:
            torch.set_num_threads(self.engine.config.threads)  # OpenMP keeps this setting per thread
        try:
            while not self._stopping:
                self._run_commands(wait=not self.engine.has_work)
                self._step()
            self._run_commands(wait=False)
            self.engine.cancel_all()
            self._step()
        finally:
            self._end_open_requests()

    def _end_open_requests(self) -> None:
        """End all requests with an error, as the thread ends: no client may wait for it."""
        with self._lock:
            self._stopping = True
            request_ids = list(self._open)
        self._publish([Output(request_id, (), "", "error", "the engine has stopped") for request_id in request_ids])

    def _start(self, request: Request, arrived: float) -> None:
        try:
            self.engine.submit(request, arrived)
        except Exception:
            log.exception("request %s could not be started", request.id)
            self._publish([Output(request.id, (), "", "error", "this request could not be started")])

    def _run_commands(self, *, wait: bool) -> None:
        """Run the commands that have arrived. wait: up to IDLE_WAIT_S for the first."""
        try:
            command = self._inbox.get(timeout=IDLE_WAIT_S) if wait else self._inbox.get_nowait()
            while True:
                self._execute(command)
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _execute(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            log.exception("a command to the engine failed")

    def _step(self) -> None:
        """One step of the engine, or what an idle engine does."""
        if not self.engine.has_work:
            self._progressed_at = time.monotonic()
            self._idle()
            return
        began = time.monotonic()
        try:
            result = self.engine.step()
        except Exception:
            # The engine handles a failed pass itself, so this is a fault of the engine: end all requests, keep serving.
            log.exception("the engine's step failed; every running request ends")
            self._failures += 1
            self._publish(self.engine.abort("the engine failed"))
            return
        self._longest_step_s = max(time.monotonic() - began, LONGEST_STEP_DECAY * self._longest_step_s)
        unfinished = result.stats.running + result.stats.waiting
        fed = result.stats.sequences > 0 and not result.stats.failed
        if fed or not unfinished:
            self._progressed_at = time.monotonic()
        if fed:
            self._failures = 0
        elif result.stats.failed:
            self._failures += 1
        self._learn(result)
        self._publish(result.outputs, result.stats)
        self._audited = False
        if not unfinished:
            self._idle()

    def _learn(self, result: StepResult) -> None:
        """Update what admission knows: the work that is left of each request, and the speed of a full engine."""
        stats = result.stats
        with self._lock:
            for output in result.outputs:
                request = self._open[output.request_id]
                request.started = True
                request.output_left_s -= self._work.seconds(0, len(output.token_ids))
            if stats.waiting and stats.sequences:
                work_s = self._work.seconds(stats.prefill_tokens, stats.emitted)
                self._admission.slowness.add(stats.step_us / 1e6, work_s)

    def _idle(self) -> None:
        """While no command waits: audit the caches once after work, and measure rounds again where that is due.

        An audit takes half a microsecond per block. If it raises, the thread ends, health reports it, and Serve
        replaces the replica. Rounds are measured after a calm, because a request that comes meanwhile waits for the
        end of one. Each time that happens, the next calm must last twice as long.
        """
        if not self._inbox.empty():
            return
        if not self._audited:
            self.engine.audit()
            self._audited, self._idle_since = True, time.monotonic()
        calm = time.monotonic() >= self._idle_since + self._calm_s
        if calm and not self.engine.repeat_profile(interrupted=lambda: not self._inbox.empty()):
            self._calm_s *= 2

    def _publish(self, outputs: list[Output], stats: StepStats | None = None) -> None:
        """Close the finished requests, so that others can be admitted, then deliver the outputs."""
        if any(o.finish_reason for o in outputs):
            with self._lock:
                self._close(outputs)
        try:
            if outputs or stats:
                self._deliver(outputs, stats)
        except Exception:
            log.exception("%d outputs could not be delivered", len(outputs))

    def _close(self, outputs: list[Output]) -> None:
        """The caller holds the lock."""
        for output in outputs:
            if output.finish_reason:
                request = self._open.pop(output.request_id)
                self._open_kv_tokens -= request.kv_tokens
                if output.finish_reason in ("stop", "length") and output.record is not None:
                    record = output.record
                    fed = record.prompt_tokens - record.cached_tokens
                    self._admission.usage.add(self._work.seconds(fed, record.output_tokens), request.work_s)


def _nothing() -> None:
    pass
