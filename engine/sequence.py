"""One generating sequence and its lifecycle. Rule for editors: everything that changes a state is in this file."""

from dataclasses import dataclass, field
from enum import Enum

from engine.detokenize import TextStream
from engine.sampling.penalties import History
from engine.types import (
    DrafterName,
    FinishReason,
    RequestRecord,
    SamplingParams,
    TokenLogprob,
    Verifier,
)


class State(Enum):
    WAITING = "waiting"  # admitted, holds no cache slot; also after its memory was taken back
    RUNNING = "running"  # holds a slot; prefilling while more than one token is uncached, decoding after
    FINISHED = "finished"


TRANSITIONS: dict[State, dict[str, State]] = {
    State.WAITING: {"start": State.RUNNING, "finish": State.FINISHED},
    State.RUNNING: {"preempt": State.WAITING, "finish": State.FINISHED},
    State.FINISHED: {},
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Committed tokens and what belongs to them. Cached lengths live in the caches; the rest is derived."""

    handle: int  # the engine's number for it, the caches' key
    request_id: str
    tokens: list[int]  # prompt, then output: only committed tokens, never drafts
    num_prompt: int
    params: SamplingParams
    k: int | None  # drafts per round that its request fixed; None: the policy decides; 0: plain
    key: int  # of its randomness, see randomness.sequence_key
    max_len: int  # tokens at which the context ends
    text: TextStream  # owned by the sequence: detokeniser and stop-string state
    record: RequestRecord
    end_ids: frozenset[int] = frozenset()  # tokens that end its text
    verifier: Verifier = "match"
    drafter: DrafterName | None = None  # who drafts for it; None: nobody
    max_k: int | None = None  # most that the policy may choose for it; None: what the engine allows
    prediction: tuple[int, ...] = ()  # the client's guess of the output
    lenience: float | None = None  # None: exact
    cache_salt: str = ""  # shares prefixes with sequences of the same
    group: str = ""  # of the client's request; what is scarce is divided between groups
    deadline: float | None = None  # monotonic seconds after which it ends with an error
    history: History | None = None  # of its tokens, where bias or penalties need it; the sampler makes it
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # collected while the prompt is read
    state: State = field(default=State.WAITING)
    finish_reason: FinishReason | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return min(self.params.max_tokens - self.num_output, self.max_len - len(self.tokens))

    @property
    def coupled(self) -> bool:
        """Whether draft and target draw with the same noise. At temperature 0 every verifier comes to equality."""
        return self.verifier == "match" or self.params.temperature == 0

    def start(self) -> None:
        self._move("start")

    def preempt(self) -> None:
        """Its memory was taken back: what it emitted stays, what was read is read again."""
        self._move("preempt")
        self.record.preemptions += 1
        if not self.record.rounds:
            self.prompt_logprobs.clear()

    def finish(self, reason: FinishReason) -> None:
        self._move("finish")
        self.finish_reason = reason

    def _move(self, event: str) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise RuntimeError(f"sequence {self.request_id}: {event} in state {self.state.value}") from None
