"""One generating sequence and its lifecycle. Rule for editors: every change of `state` is in this file."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from engine.detokenize import Detokenizer, TextStream
from engine.drafters.translation import DraftText
from engine.sampling.device_bias import DeviceBias
from engine.sampling.device_penalties import DeviceText
from engine.sampling.exclusions import Exclusions
from engine.sampling.penalties import History
from engine.trees import Parents
from engine.types import (
    DrafterName,
    FinishReason,
    RequestRecord,
    SamplingParams,
    TokenLogprob,
    Typical,
    Verifier,
)


class State(Enum):
    WAITING = "waiting"  # holds no cache slot: not started yet, or preempted
    RUNNING = "running"  # holds a slot; prefilling while more than one token is uncached, then decoding
    FINISHED = "finished"


TRANSITIONS: dict[State, dict[str, State]] = {
    State.WAITING: {"start": State.RUNNING, "finish": State.FINISHED},
    State.RUNNING: {"preempt": State.WAITING, "finish": State.FINISHED},
    State.FINISHED: {},
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Committed tokens and what belongs to them. The caches know the cached lengths; all other lengths are derived."""

    handle: int  # the engine's number for it, by which the caches know it
    request_id: str
    tokens: list[int]  # prompt, then output: only committed tokens, never drafts
    num_prompt: int
    params: SamplingParams
    k: int | None  # drafts per round, if its request fixes them; None: the policy decides; 0: plain decoding
    key: int  # of its randomness, see noise.sequence_key
    max_len: int  # tokens of prompt and output that the context holds
    text: TextStream  # the sequence's own detokeniser and stop-string state
    record: RequestRecord
    end_ids: frozenset[int] = frozenset()  # tokens that end its text
    verifier: Verifier = "match"
    drafter: DrafterName | None = None  # None: nothing is drafted for it
    max_k: int | None = None  # the largest k that the policy may choose; None: the engine's limit
    policy_drafts: bool = True  # whether the policy in force ever drafts
    prediction: tuple[int, ...] = ()  # the client's guess of the output
    lenience: float | None = None  # None: exact, unless it has a typical acceptance
    typical: Typical | None = None
    tree: Parents | None = None  # the shape of its drafts, if its request fixes it; None: chains
    tree_depth: int = 0  # its trees grow by the draft's own probabilities, this deep and to k drafts; 0: they do not
    takes_drafts: bool = False  # its request leaves to the server whether and who drafts for it
    cache_salt: str = ""  # prefixes are shared between sequences of the same salt only
    group: str = ""  # all choices of one client's request; the scheduler treats groups alike
    deadline: float | None = None  # monotonic seconds after which it ends with an error
    history: History | None = None  # its token counts, if penalties need them on the CPU; the sampler makes it
    device_text: DeviceText | None = None  # the same on another device
    device_bias: DeviceBias | None = None  # what its request adds to logits there; the sampler makes it
    exclusions: Exclusions | None = None  # if its request excludes tokens, on the CPU; the sampler makes them
    draft_text: DraftText | None = None  # its tokens as a draft model with another tokenizer reads them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # collected while the prompt is read
    state: State = field(default=State.WAITING)
    finish_reason: FinishReason | None = None

    @property
    def may_draft(self) -> bool:
        """Whether anything may be drafted for it, unless the policy is replaced."""
        return self.policy_drafts if self.k is None else self.k > 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Number of tokens that it may still emit."""
        return min(self.params.max_tokens - self.num_output, self.max_len - len(self.tokens))

    @property
    def coupled(self) -> bool:
        """Whether draft and target draw with the same noise. At temperature 0 all verifiers decide as `match` does."""
        return self.verifier == "match" or self.params.temperature == 0

    def start(self) -> None:
        self._move("start")

    def preempt(self) -> None:
        """Its memory was taken back: it keeps its tokens, and they will be fed again."""
        self._move("preempt")
        self.device_text = self.device_bias = None
        self.record.preemptions += 1
        if not self.record.rounds:
            self.prompt_logprobs.clear()

    def finish(self, reason: FinishReason) -> None:
        self._move("finish")
        self.device_text = self.device_bias = None
        self.finish_reason = reason

    def _move(self, event: str) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise RuntimeError(f"sequence {self.request_id}: {event} in state {self.state.value}") from None


def scratch_sequence(name: str, handle: int, tokens: list[int], params: SamplingParams, **fields: Any) -> Sequence:
    """A sequence that no request owns and nobody reads. fields: what differs from a request without speculation."""
    return Sequence(
        handle=handle,
        request_id=name,
        tokens=tokens,
        num_prompt=len(tokens),
        params=params,
        k=None,
        key=0,
        max_len=len(tokens) + params.max_tokens,
        text=TextStream(Detokenizer(lambda ids: ""), ()),
        record=RequestRecord(name, 0, len(tokens), 0, arrived=0.0),
        **fields,
    )


# Fills up a captured round: nothing of it is read.
PADDING = scratch_sequence("padding", -1, [0], SamplingParams(temperature=0.0, max_tokens=1))
