"""Replaces the draft while the engine serves: loads another one beside it in a thread, then puts it in its place.

The engine's thread only exchanges references between two rounds. Reading files, laying out weights and freeing the old
draft's memory are the loading thread's work.
"""

import logging
import threading
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.config import ConfigError, EngineConfig
from engine.drafters.base import Drafter, try_forget
from engine.drafters.model import ModelDrafter
from engine.heads.captured_heads import owner_of
from engine.heads.eagle_runner import HeadPass
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_loading import readers_of, waiting_bytes
from engine.loading.load import load_draft
from engine.loading.model_runners import reader_of, states_bytes
from engine.memory.budget import device_memory, kv_bytes
from engine.memory.errors import out_of_memory
from engine.models.feeds import StateReader
from engine.models.look_ahead import LookAhead
from engine.models.runner import Runner, kv_shape
from engine.profiling.profile_cache import ProfileFile
from engine.sequence import Sequence
from policies.cost import DraftCost
from policies.observation import Timing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewDraft:
    """A draft that is loaded, and that no sequence uses yet."""

    config: EngineConfig  # the engine's, with this draft
    model: Drafter | None  # None: no draft
    cost: DraftCost  # by a profile of an earlier start, which is not confirmed; else a guess
    reader: StateReader | None = None  # reads the target's states, for a head
    look_ahead: LookAhead | None = None  # what rides in the target's passes, for look-ahead embeddings


@dataclass(frozen=True, slots=True)
class OldDraft:
    """A draft that is out of use. The thread that drops it frees its memory."""

    model: Drafter | None
    sequences: tuple[Sequence, ...]  # those that may hold its memory
    reader: StateReader | None = None  # as in NewDraft
    look_ahead: LookAhead | None = None

    @property
    def graph_owner(self) -> int | None:
        """The owners of the captured graphs that draw its drafts (graphs.Key)."""
        if isinstance(self.model, StateDrafter):
            return owner_of(self.model.states)
        return self.model.runner.number if isinstance(self.model, ModelDrafter) else None

    def release(self) -> None:
        """Free what it holds for its sequences, and audit it. Any thread may call it, once. Does not raise."""
        if self.model is None:
            return
        for sequence in self.sequences:
            try_forget(self.model, sequence)
        try:
            self.model.audit(set())
        except AssertionError:
            log.exception("the memory of the old draft is not accounted for; it is freed all the same")


def load(config: EngineConfig, target: Runner, room: int, cost: Callable[[Seq[Timing]], DraftCost]) -> NewDraft:
    """Load the configuration's draft for a target that goes on serving. Any thread may call it.

    room: bytes that it may take; the device may have less. cost: gives its cost by rounds: by the profile that an
    earlier start kept, or by no rounds. Raises ConfigError for a draft that cannot serve.
    """
    if config.draft is None:
        return NewDraft(config, None, cost(()))
    try:
        model = load_draft(config, target, min(room, device_memory(target.device).available))
    except (RuntimeError, MemoryError, OSError) as error:
        if not out_of_memory(error) and not isinstance(error, OSError):
            raise
        raise ConfigError(f"draft {config.draft} cannot be loaded beside the models that serve: {error}") from error
    runners, heads = [target], None
    reader: StateReader | None
    look_ahead: LookAhead | None = None
    if isinstance(model, StateDrafter):
        heads, (reader, look_ahead) = model.describe(), readers_of(model)
    else:
        runners, reader = [target, model.runner], reader_of(model.runner)
    timings = ProfileFile(runners, config.max_running, config.max_spec_length, heads).read()
    return NewDraft(config, model, cost(timings), reader, look_ahead)


def num_bytes(config: EngineConfig, model: Drafter | None, target: Runner) -> int:
    """Bytes of a draft's weights, of all its KV memory, and of the target's states that wait for it; 0 for no draft."""
    if isinstance(model, StateDrafter):
        return model.heads.weight_bytes + waiting_bytes(config, model.heads, target.decoder)
    if not isinstance(model, ModelDrafter):
        return 0
    decoder, runner = model.runner.decoder, model.runner
    token_bytes = kv_shape(decoder.config, decoder.dtype, runner.device).token_bytes
    states = states_bytes(config, [decoder.head]) if isinstance(decoder, HeadPass) else 0
    return decoder.weight_bytes + kv_bytes(runner.layout, token_bytes, runner.device) + states


@dataclass(frozen=True, slots=True)
class _Wish:
    """A draft that was asked for. The future ends when it serves."""

    draft: str | None
    future: Future[None] = field(default_factory=Future)


class DraftLoader:
    """Loads one draft after the other, in a thread that lives while there is something to load."""

    def __init__(
        self,
        current: Callable[[], str | None],
        load: Callable[[str | None], NewDraft],
        put: Callable[[NewDraft], OldDraft],
    ) -> None:
        """current: the draft in force. load: loads a draft, on the loader's thread. put: waits until the engine has put
        a draft in place, and returns the old one."""
        self._current, self._load, self._put = current, load, put
        self._lock = threading.Lock()  # guards the rest
        self._wish: _Wish | None = None  # the latest one, until its future has ended
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def loading(self) -> str | None:
        """The draft that is about to serve, "none" for no draft; None: nothing changes. Any thread may read it."""
        wish = self._wish
        return None if wish is None else wish.draft or "none"

    def want(self, draft: str | None) -> Future[None]:
        """Let this draft serve as soon as it is loaded. The future has the error if the draft cannot serve; the old one
        then stays. It is cancelled if another draft is wanted before this one serves. Any thread may call it."""
        with self._lock:
            if self._wish is not None and self._wish.draft == draft:
                return self._wish.future
            if self._wish is not None:
                self._wish.future.cancel()  # without effect once the engine puts it in place
            wish = _Wish(draft)
            if self._stopped:
                wish.future.cancel()
                return wish.future
            self._wish = wish
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="draft", daemon=True)
                self._thread.start()
        return wish.future

    def stop(self, timeout_s: float) -> None:
        """Cancel what does not serve yet, and wait for the thread. Idempotent."""
        with self._lock:
            self._stopped, thread = True, self._thread
            if self._wish is not None:
                self._wish.future.cancel()
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (wish := self._next()) is not None:
            error = self._serve(wish)
            with self._lock:
                if self._wish is wish:
                    self._wish = None
            if wish.future.cancelled():
                continue
            if error is None:
                wish.future.set_result(None)
            else:
                _clear_frames(error)
                wish.future.set_exception(error)

    def _next(self) -> _Wish | None:
        with self._lock:
            if self._wish is None or self._stopped:
                self._thread = None
                return None
            return self._wish

    def _serve(self, wish: _Wish) -> Exception | None:
        """Load the draft and let it be put in place, unless the wish is cancelled. Returns what went wrong."""
        new, error = None, None
        try:
            new = None if wish.draft == self._current() else self._load(wish.draft)
        except Exception as raised:
            error = raised
        if not wish.future.set_running_or_notify_cancel():
            return None
        try:
            if new is not None:
                self._put(new).release()
        except Exception as raised:
            error = raised
        return error


def _clear_frames(error: BaseException | None) -> None:
    """Drop the local variables that the tracebacks of an error and of its causes hold: weights may be among them. Only
    the garbage collector would free these, because the frames hold the error too."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
