"""The engine's thread. Other threads hand it commands and never touch the engine; it never awaits and never sleeps."""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from deployments.engine.engine import Engine
from deployments.engine.types import EngineStats, Output, Overloaded, Request
from policies.admission import Admission

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # how often an idle engine proves that it lives

Deliver = Callable[[list[Output]], None]


class EngineWorker:
    """Runs an engine in its own thread. `deliver` is called on that thread with each step's outputs and must not block.

    Every submitted request gets exactly one output with a finish_reason, also when it is cancelled, when the engine
    fails, and when the worker stops.
    """

    def __init__(self, engine: Engine, deliver: Deliver, *, stalled_after_s: float = 30.0) -> None:
        self.engine = engine
        self._deliver = deliver
        self._stalled_after_s = stalled_after_s
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # guards _open, _admission and _stopping
        self._open: dict[str, float] = {}  # submitted and not yet finished: id → when
        self._admission = Admission(engine.config.max_running, engine.config.max_waiting)
        self._stopping: bool = False
        self._progress = time.monotonic()  # of the last step that fed a token, or of the last idle turn
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

    def submit(self, request: Request) -> None:
        """Admit or refuse, at once, from any thread. Raises InvalidRequest or Overloaded; then nothing was queued."""
        self.engine.check(request)
        with self._lock:
            if self._stopping:
                raise Overloaded("the server is shutting down")
            retry_after = self._admission.refusal(len(self._open))
            if retry_after is not None:
                raise Overloaded(f"{len(self._open)} requests are running or waiting", retry_after)
            if request.id in self._open:
                raise ValueError(f"request id {request.id!r} is in use")
            self._open[request.id] = time.monotonic()
        self._inbox.put(lambda: self._start(request))

    def cancel(self, request_id: str) -> None:
        """Free the request's slot before the next round. From any thread; unknown and finished ids are ignored."""
        with self._lock:
            if request_id not in self._open:
                return
        self._inbox.put(lambda: self.engine.cancel(request_id))

    def stats(self) -> EngineStats:
        """A snapshot from any thread. Healthy means: the thread lives and its last progress is recent."""
        age = time.monotonic() - self._progress
        reason = ""
        if not self._thread.is_alive():
            reason = "the engine thread is not running"
        elif age > self._stalled_after_s:
            reason = f"the engine has made no progress for {age:.0f} s"
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

    def _start(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except Exception:
            log.exception("request %s could not be started", request.id)
            self._publish([Output(request.id, (), "", "error", "this request could not be started")])

    def _obey(self, *, wait: bool) -> None:
        """Run the commands that have arrived; with nothing else to do, wait a while for the first."""
        try:
            command = self._inbox.get(timeout=IDLE_WAIT_S) if wait else self._inbox.get_nowait()
            while True:
                command()
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _turn(self) -> None:
        if not self.engine.has_work:
            self._progress = time.monotonic()
            return
        try:
            result = self.engine.step()
        except Exception:
            # Not a fault of a pass (the engine handles those) but of the engine: end what runs, keep serving.
            log.exception("the engine's step failed; every running request ends")
            self._publish(self.engine.abort("the engine failed"))
            return
        left = result.stats.running + result.stats.waiting
        if result.stats.sequences or not left:
            self._progress = time.monotonic()
        self._publish(result.outputs)
        if not left:
            self.engine.audit()  # if it fails the thread ends, health says so, and the replica is replaced

    def _publish(self, outputs: list[Output]) -> None:
        finished = [o.request_id for o in outputs if o.finish_reason]
        if finished:
            with self._lock:
                for request_id in finished:
                    self._admission.finished(time.monotonic() - self._open.pop(request_id))
        if outputs:
            self._deliver(outputs)


def _nothing() -> None:
    pass
