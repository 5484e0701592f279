"""The engine's thread. Other threads hand it commands and never touch the engine; it never awaits and never sleeps."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import torch

from engine.engine import Engine, StepResult
from engine.types import (
    EngineStats,
    EngineStopped,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    StepStats,
)
from policies.admission import Admission
from policies.config import PolicyConfig
from policies.token_cost import Work

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # how often an idle engine proves that it lives
STALL_STEPS = 4.0  # of the longest kind, which the engine may be without progress for
FADE = 0.97  # by which the longest step fades with each further one: it is half as long after 23 steps
MAX_FAILURES = 3  # steps that fail one after another before health says so

Deliver = Callable[[list[Output], StepStats | None], None]  # outputs, of a step: its statistics


@dataclass(slots=True)
class _OpenRequest:
    """A request that was submitted and has not finished."""

    group: str
    tokens: int  # of KV memory that it may need
    asked_s: float  # of work
    output_s: float  # of that, what is left of the output
    begun: bool = False  # it has a slot, and said something


class EngineWorker:
    """Runs an engine in its own thread. `deliver` is called on that thread after each step and must not block.

    Every submitted request gets exactly one output with a finish_reason, also when it is cancelled, when the engine
    fails, and when the worker stops. What `deliver` raises is logged and lost: it must get its outputs through itself.

    Health calls the engine stalled after stalled_after_s seconds without progress, or after the time of four of its
    longest steps, if that is more: of recent ones, or of one as large as there may be.
    """

    def __init__(self, engine: Engine, deliver: Deliver, *, stalled_after_s: float = 30.0) -> None:
        self.engine = engine
        self._deliver = deliver
        self._stalled_after_s = stalled_after_s
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # guards _open, _open_tokens, _admission and _stopping
        self._open: dict[str, _OpenRequest] = {}  # submitted and not yet finished, by id
        self._open_tokens = 0  # that they may need
        self._work = Work.of(engine.speculator.control.timings, engine.config.max_running)
        config = engine.config
        self._admission = Admission(
            config.max_running, config.max_waiting, engine.target.layout.tokens, config.max_demand
        )
        self._stopping: bool = False
        self._progress = time.monotonic()  # of the last step that fed a token or left nothing, or of the last idle turn
        self._longest_s = 0.0  # of the steps so far, fading
        self._audited = True  # since the last step
        self._failures = 0  # failed steps since the last one that fed a token
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel what runs, deliver the last outputs, end the thread. Idempotent."""
        with self._lock:
            self._stopping = True
        self._inbox.put(_nothing)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def submit(self, *requests: Request) -> None:
        """Admit them all or refuse them all, at once, from any thread. Their time starts here.

        Raises InvalidRequest (also for an id that is in use), Overloaded or EngineStopped; then nothing was queued.
        """
        for request in requests:
            self.engine.check(request)
        arrived = time.monotonic()
        tokens = sum(map(_demand, requests))
        with self._lock:
            if self._stopping:
                raise EngineStopped("the engine is shutting down, or has stopped")
            if tokens > self._admission.most_tokens:
                raise InvalidRequest(
                    f"{len(requests)} choices may need {tokens:,} tokens of KV memory, and no more than "
                    f"{self._admission.most_tokens:,.0f} are admitted at once",
                    "n",
                )
            refusal = self._admission.refusal(len(self._open), self._open_tokens, len(requests), tokens)
            if refusal is not None:
                raise Overloaded(refusal, self._retry_after())
            ids = [request.id for request in requests]
            for request_id in ids:
                if request_id in self._open or ids.count(request_id) > 1:
                    raise InvalidRequest(f"request id {request_id!r} is in use", "id")
            self._open |= {request.id: self._opened(request) for request in requests}
            self._open_tokens += tokens
        for request in requests:
            self._inbox.put(partial(self._start, request, arrived))

    def _opened(self, request: Request) -> _OpenRequest:
        asked_s = self._work.seconds(len(request.prompt_ids), request.params.max_tokens)
        output_s = self._work.seconds(0, request.params.max_tokens)
        return _OpenRequest(request.group or request.id, _demand(request), asked_s, output_s)

    def _retry_after(self) -> int:
        """Seconds until a request of a new group would run. One choice of each group that has no slot goes before it.
        The caller holds the lock."""
        begun = [request for request in self._open.values() if request.begun]
        ahead: dict[str, float] = {}
        for request in self._open.values():
            ahead.setdefault(request.group, request.asked_s)
        for request in begun:
            ahead.pop(request.group, None)
        scheduler = self.engine.scheduler
        slots = len(scheduler.running) if scheduler.waiting else self.engine.config.max_running
        return self._admission.retry_after([request.output_s for request in begun], list(ahead.values()), slots)

    def cancel(self, request_id: str) -> None:
        """Free the request's slot before the next round. From any thread; unknown and finished ids are ignored."""
        with self._lock:
            if request_id not in self._open:
                return
        self._inbox.put(lambda: self.engine.cancel(request_id))

    def configure(self, policy: PolicyConfig) -> None:
        """Let another policy choose k from the next round on. From any thread. Raises ConfigError for an unfit one."""
        self.engine.config.check_policy(policy)
        self._inbox.put(lambda: self.engine.configure(policy))

    def stats(self) -> EngineStats:
        """A snapshot from any thread. Healthy: the thread lives, its progress is recent, its steps do not all fail."""
        age = time.monotonic() - self._progress
        reason = ""
        if not self._thread.is_alive():
            reason = "the engine thread is not running"
        elif age > max(self._stalled_after_s, STALL_STEPS * max(self._longest_s, self.engine.full_step_s)):
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
            torch.set_num_threads(self.engine.config.threads)  # OpenMP keeps this per thread
        try:
            while not self._stopping:
                self._obey(wait=not self.engine.has_work)
                self._turn()
            self._obey(wait=False)
            self.engine.cancel_all()
            self._turn()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """The thread ends: nobody may wait for it any longer, whatever it ends of."""
        with self._lock:
            self._stopping = True
            left = list(self._open)
        self._publish([Output(request_id, (), "", "error", "the engine has stopped") for request_id in left])

    def _start(self, request: Request, arrived: float) -> None:
        try:
            self.engine.submit(request, arrived)
        except Exception:
            log.exception("request %s could not be started", request.id)
            self._publish([Output(request.id, (), "", "error", "this request could not be started")])

    def _obey(self, *, wait: bool) -> None:
        """Run the commands that have arrived; with nothing else to do, wait a while for the first."""
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

    def _turn(self) -> None:
        if not self.engine.has_work:
            self._progress = time.monotonic()
            self._audit()
            return
        began = time.monotonic()
        try:
            result = self.engine.step()
        except Exception:
            # Not a fault of a pass (the engine handles those) but of the engine: end what runs, keep serving.
            log.exception("the engine's step failed; every running request ends")
            self._failures += 1
            self._publish(self.engine.abort("the engine failed"))
            return
        self._longest_s = max(time.monotonic() - began, FADE * self._longest_s)
        left = result.stats.running + result.stats.waiting
        fed = result.stats.sequences > 0 and not result.stats.failed
        if fed or not left:
            self._progress = time.monotonic()
        if fed:
            self._failures = 0
        elif result.stats.failed:
            self._failures += 1
        self._learn(result)
        self._publish(result.outputs, result.stats)
        self._audited = False
        if not left:
            self._audit()

    def _learn(self, result: StepResult) -> None:
        """What admission has to know of a step: who goes on with how much, and how fast a full engine works."""
        stats = result.stats
        with self._lock:
            for output in result.outputs:
                request = self._open[output.request_id]
                request.begun = True
                request.output_s -= self._work.seconds(0, len(output.token_ids))
            if stats.waiting and stats.sequences:
                work_s = self._work.seconds(stats.prefill_tokens, stats.emitted)
                self._admission.worked(work_s, stats.step_us / 1e6)

    def _audit(self) -> None:
        """Once after work, when there is time for it: it takes half a microsecond a block. If it fails the thread ends,
        health says so, and the replica is replaced."""
        if not self._audited and self._inbox.empty():
            self.engine.audit()
            self._audited = True

    def _publish(self, outputs: list[Output], stats: StepStats | None = None) -> None:
        """Close the books on what finished, so that its places are free, then hand the outputs over."""
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
                done = self._open.pop(output.request_id)
                self._open_tokens -= done.tokens
                if output.finish_reason in ("stop", "length") and output.record is not None:
                    record = output.record
                    read = record.prompt_tokens - record.cached_tokens
                    self._admission.finished(self._work.seconds(read, record.output_tokens), done.asked_s)


def _nothing() -> None:
    pass


def _demand(request: Request) -> int:
    """Positions of KV memory that it may come to need."""
    return len(request.prompt_ids) + request.params.max_tokens
