"""The values that enter and leave the engine: requests, outputs, records and step statistics. Standard library only.

The HTTP edge imports this module, so nothing here may import torch. Token ids are plain ints, times are seconds of
`time.monotonic()`, durations in records are integer microseconds.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import isfinite
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

from engine.trees import Growth, depths
from policies.config import REASONS as REASONS

FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorCode = Literal["engine_error", "deadline_exceeded"]
Verifier = Literal["match", "rejection", "block"]
DrafterName = Literal["model", "ngram", "lookup", "prediction", "cascade", "suffix", "lookahead", "merged"]
VERIFIERS: tuple[Verifier, ...] = get_args(Verifier)
DRAFTERS: tuple[DrafterName, ...] = get_args(DrafterName)

MAX_STOP_STRINGS = 4
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024  # tokens that one request may bias
MAX_BAD_WORDS = 64
MAX_BAD_WORD = 128  # tokens
MAX_LOGPROBS = 20  # alternatives reported per token
MAX_SEED = 2**63 - 1
SEED_RANGE = 2**53  # drawn seeds are smaller, so that a client in JavaScript can send them back
MAX_TOP_K = 2**31 - 1


class InvalidRequest(ValueError):
    """A request that cannot be served as asked. `param` names the offending field in the client's vocabulary."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(RuntimeError):
    """The engine's queue is full; `retry_after` is the suggested wait in whole seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(RuntimeError):
    """The engine takes no more requests, or ended one before it was finished: it is shutting down or has stopped."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's law p is derived from its logits, and when to stop.

    Raises InvalidRequest for a value outside its range, NaN included, because a later failure would hit a round that
    other requests share.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: every token
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one and reports it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is drawn; None: every token may be
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the output never holds one of these runs of tokens
    repetition_penalty: float = 1.0  # for tokens of prompt and output: divides positive logits, multiplies others
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the output
    max_tokens: int = 16  # 0: the prompt is read, nothing is generated
    min_tokens: int = 0  # before this many tokens no stop string ends the text, and no end token is drawn
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end the text like an end-of-sequence token
    include_stop_str_in_output: bool = False  # whether the text keeps what stopped it
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # whether the text leaves special tokens out
    logprobs: int | None = None  # alternatives to report per emitted token; 0: the token's own only; None: nothing
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    def __post_init__(self) -> None:
        for name in ("top_k", "max_tokens", "min_tokens"):
            _require(isinstance(getattr(self, name), int), name, "must be an integer")
        _require(self.seed is None or isinstance(self.seed, int), "seed", "must be an integer")
        _require(0.0 <= self.temperature <= 2.0, "temperature", "must lie between 0 and 2")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be greater than 0 and at most 1")
        _require(0 <= self.top_k <= MAX_TOP_K, "top_k", f"must lie between 0 (every token) and {MAX_TOP_K}")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must lie between 0 and 1")
        _require(self.seed is None or -MAX_SEED <= self.seed <= MAX_SEED, "seed", "must lie within ±(2⁶³ − 1)")
        _require(0.01 <= self.repetition_penalty <= 10.0, "repetition_penalty", "must lie between 0.01 and 10")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, "must lie between -2 and 2")
        self._check_logit_bias()
        self._check_exclusions()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            legal = count is None or (isinstance(count, int) and 0 <= count <= MAX_LOGPROBS)
            _require(legal, name, f"must be an integer between 0 and {MAX_LOGPROBS}")
        _require(self.max_tokens >= 0, "max_tokens", "must not be negative")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must lie between 0 and max_tokens")
        strings = isinstance(self.stop, tuple) and all(isinstance(s, str) for s in self.stop)
        _require(strings, "stop", "must be a tuple of strings")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS} strings")
        _require(all(self.stop), "stop", "must not contain an empty string")
        _require(len(self.stop_token_ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"takes at most {MAX_STOP_TOKENS} ids")
        _require(all(isinstance(t, int) for t in self.stop_token_ids), "stop_token_ids", "must hold integers")

    def _check_logit_bias(self) -> None:
        _require(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"takes at most {MAX_LOGIT_BIAS} tokens")
        ids = [token for token, _ in self.logit_bias]
        _require(all(isinstance(t, int) for t in ids), "logit_bias", "must have token ids as keys")
        _require(len(set(ids)) == len(ids), "logit_bias", "must not name a token twice")
        legal = all(isfinite(b) and -100.0 <= b <= 100.0 for _, b in self.logit_bias)
        _require(legal, "logit_bias", "must have values between -100 and 100")

    def _check_exclusions(self) -> None:
        allowed, words = self.allowed_token_ids, self.bad_word_ids
        if allowed is not None:
            _require(len(allowed) > 0, "allowed_token_ids", "must name at least one token")
            _require(all(isinstance(t, int) for t in allowed), "allowed_token_ids", "must hold integers")
        # A word of a text has two spellings: with and without a space in front.
        _require(len(words) <= 2 * MAX_BAD_WORDS, "bad_words", f"takes at most {MAX_BAD_WORDS} words")
        for word in words:
            check_bad_word(word)

    @property
    def excludes(self) -> bool:
        """Whether allowed_token_ids or bad words exclude tokens."""
        return self.allowed_token_ids is not None or bool(self.bad_word_ids)

    @property
    def penalised(self) -> bool:
        """Whether penalties make the law depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _require(condition: bool, param: str, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param} {rule}", param)


def check_bad_word(ids: tuple[int, ...]) -> None:
    """Raise InvalidRequest for a bad word without tokens or with too many."""
    _require(bool(ids), "bad_words", "must not contain a word without tokens")
    _require(len(ids) <= MAX_BAD_WORD, "bad_words", f"takes words of at most {MAX_BAD_WORD} tokens")


class Typical(NamedTuple):
    """Typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774, section 3.3.1): a draft x is kept while
    p(x) > min(ε, δ·exp(−H(p))), H in nats. It changes the law."""

    epsilon: float  # ε, between 0 and 1
    delta: float  # δ, greater than 0 and at most 1


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. The client chooses the id, which is unique among running requests."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    k: int | None = None  # drafts per round; None: the engine's policy chooses; 0: speculation off
    prompt_index: int = 0  # place in a prompt list; with choice_index it keys the request's randomness
    choice_index: int = 0
    verifier: Verifier | None = None  # None: the engine's own
    drafter: DrafterName | None = None  # None: the engine's own, or "cascade" where there is a prediction
    prediction_ids: tuple[int, ...] = ()  # the client's guess of the output
    lenience: float | None = None  # l in (0, 1): accept with min(1, p / (l·q)), which changes the law (Leviathan A.5)
    cache_salt: str = ""  # prefixes are shared between requests of one salt only
    deadline_s: float | None = (
        None  # seconds from its arrival after which it ends with an error; None: the engine's own
    )
    max_k: int | None = None  # the most that the policy may choose; None: what the engine allows
    group: str = ""  # the same for all choices of one client's request, which share one group's part; "": alone
    # Children of each draft of depth 0, 1, … in every round, or what a tree may have that grows by the draft's own
    # probabilities; None: chains
    tree: tuple[int, ...] | Growth | None = None
    typical: Typical | None = None  # another way to change the law than lenience


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability under the target's raw logits, before any sampling parameter."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token, logprob), best first; ties by lowest id


class RoundRecord(NamedTuple):
    """One sequence's part in one round, a pass that emitted tokens for it. Times in integer microseconds."""

    k: int  # drafts asked for; the drafter may have offered fewer
    reason: int  # index in REASONS of why k was no larger; -1: k was not chosen
    alpha: int  # estimated chance that the first draft is accepted, before the round, per mille
    drafted: int
    accepted: int  # accepted by the verifier, before a stop cut the text
    emitted: int  # tokens that reached the client
    proposer: int  # index in DRAFTERS of the drafter that proposed; -1: no drafts
    step: int = 0  # the engine's number of the step, see StepStats
    batch: int = 1  # sequences that emitted in the round
    began_us: int = 0  # when its step began, after the request's arrival
    draft_us: int = 0  # as in StepStats, like the next two
    score_us: int = 0
    step_us: int = 0
    tree: tuple[int, ...] = ()  # the drafts' parents, −1 for the committed text; (): a chain
    path: tuple[int, ...] = ()  # the accepted drafts of a tree

    @property
    def depth(self) -> int:
        """Positions that had a draft."""
        return max(depths(self.tree)) if self.tree else self.drafted

    @property
    def overhead_us(self) -> int:
        """The step's time without proposing and the target's pass."""
        return self.step_us - self.draft_us - self.score_us


@dataclass(slots=True)
class RequestRecord:
    """Raw facts of one request, which grow while it runs. Its first round ends the prompt and emits the first token."""

    request_id: str
    seed: int
    prompt_tokens: int
    k_max: int  # the largest k this request may get
    arrived: float
    verifier: Verifier = "match"
    drafter: DrafterName | None = None  # None: speculation is off
    lenience: float | None = None
    typical: Typical | None = None
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0  # of the prompt, found in the target's cache when it was first admitted
    preemptions: int = 0  # how often it lost its memory and had to be computed again
    output_tokens: int = 0
    policy: str = ""  # the policy in force when it was submitted
    fixed_k: int | None = None  # the k that it asked for; None: the policy chose
    rounds: list[RoundRecord] = field(default_factory=list)
    waiting_ahead: int = 0  # requests that were waiting when it arrived
    prefill_passes: int = 0  # passes that read a part of its prompt other than the last, also after a preemption
    prediction_tokens: int = 0  # of the client's guess of the output
    prediction_accepted: int = 0  # those that the output followed

    def column(self, name: str) -> list[int]:
        """Return one field of every round, in the order of the rounds."""
        return list(map(attrgetter(name), self.rounds))

    def add(self, part: RoundRecord) -> None:
        self.rounds.append(part)
        self.output_tokens += part.emitted


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over the rounds of one request or several. A round counts once for each of its sequences."""

    plain_rounds: int  # without drafts
    rounds: int  # in which at least one draft was verified (vLLM's num_spec_steps)
    full_rounds: int  # in which every draft was accepted
    drafted: int
    accepted: int
    emitted: int  # tokens that reached the client
    histogram: tuple[int, ...]  # rounds by accepted drafts. Its sum is `rounds`; Σ j·histogram[j] is `accepted` (I8)
    decisions: dict[str, int]  # all rounds by why k was no larger, in the order of REASONS; only reasons that occurred

    @property
    def rate(self) -> float | None:
        """The share of drafts that was accepted; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_length(self) -> float | None:
        """Mean of 1 + accepted drafts over the rounds with drafts; None without any."""
        return 1 + self.accepted / self.rounds if self.rounds else None


_FATE = attrgetter("drafted", "accepted", "emitted", "reason")


def acceptance_of(*records: RequestRecord) -> Acceptance:
    """Sum up the rounds of these requests. The histogram has 1 + largest k_max entries."""
    fates = Counter(fate for record in records for fate in map(_FATE, record.rounds))
    histogram = [0] * (1 + max((record.k_max for record in records), default=0))
    reasons = Counter[int]()
    for (drafted, accepted, _, reason), count in fates.items():
        histogram[accepted] += count if drafted else 0
        reasons[reason] += count
    verified = [(drafted, accepted, count) for (drafted, accepted, _, _), count in fates.items() if drafted]
    rounds = sum(histogram)
    return Acceptance(
        plain_rounds=fates.total() - rounds,
        rounds=rounds,
        full_rounds=sum(count for drafted, accepted, count in verified if accepted == drafted),
        drafted=sum(drafted * count for drafted, _, count in verified),
        accepted=sum(accepted * count for _, accepted, count in verified),
        emitted=sum(emitted * count for (_, _, emitted, _), count in fates.items()),
        histogram=tuple(histogram),
        decisions={name: reasons[code] for code, name in enumerate(REASONS) if reasons[code]},
    )


def leading_record(*records: RequestRecord) -> RequestRecord:
    """Return the record that says how a request's choices are drafted for: the first with the largest k_max. Choices
    differ where a draft model has come while some of them ran: those that had finished got no drafts."""
    return max(records, key=attrgetter("k_max"))


class Output(NamedTuple):
    """What one step adds to one request. The last output of a request carries finish_reason and record."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None  # safe to show to the client; only with finish_reason "error"
    error_code: ErrorCode = "engine_error"  # the kind of `error`
    record: RequestRecord | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token id, if the request wants them
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens from the second on, with the first output
    drafts: tuple[int, ...] = ()  # ids proposed in this round; a tree's only on the accepted path and behind it
    accepted: int = 0  # how many of the first drafts were accepted, before a stop cut the text


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did. Times in microseconds of wall clock."""

    step: int
    sequences: int  # in this step's round
    prefill_tokens: int
    drafted: int
    accepted: int
    emitted: int
    draft_us: int  # proposing, all drafts of the round
    draft_steps: int  # sequential forwards of the draft
    draft_tokens: int  # tokens that these forwards fed
    score_us: int  # the target's pass: input, forward, sampling, acceptance
    target_forward_us: int  # part of score_us: the forward from token ids to logits, with positions and mask
    draft_forward_us: int  # part of draft_us: the forwards
    step_us: int  # the whole step, host work included
    running: int
    waiting: int
    draft_faults: int = 0  # failures of the drafter, and of passes that were tried again without drafts
    failed: bool = False  # every attempt at its pass failed; all its requests ended with an error
    preempted: int = 0  # sequences whose memory was taken back
    cached_tokens: int = 0  # prompt tokens of newly admitted sequences that the target's cache held
    decoding: int = 0  # sequences whose k was chosen in this step
    predicted_us: int = 0  # the cost model's prediction for the step; 0: there was none
    predicted_tokens: float = 0.0  # the estimator's prediction of tokens that these sequences emit
    policy_us: int = 0  # part of step_us: choosing k and learning from the round
    plain_us: int = 0  # estimated time of plain decoding for its tokens, see baseline.py; 0: not `decode_only`
    began: float = 0.0  # monotonic seconds
    parts: tuple[RoundRecord, ...] = ()  # one per sequence that emitted
    requests: tuple[str, ...] = ()  # ids of the requests in the round

    @property
    def decode_only(self) -> bool:
        """Whether it emitted tokens and read no prompts. The speedup is estimated over these steps."""
        return bool(self.parts) and not self.prefill_tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for health checks, autoscaling and tests."""

    healthy: bool
    reason: str  # why it is not healthy; "" when it is
    steps: int
    running: int
    waiting: int
    max_running: int
    free_slots: int
    heartbeat_age_s: float
    policy: str = ""  # name of the policy that chooses k
    kv_used: float = 0.0  # share of the target's KV memory that running sequences hold, 0 … 1
