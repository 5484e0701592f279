"""What the fake engine says by itself, with the records of it: made-up figures, the same every time."""

import codecs
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

from engine.types import DRAFTERS, REASONS, DrafterName, Output, Request, RequestRecord, RoundRecord, TokenLogprob

Script = Callable[[Request], Iterable[Output]]

POLICY = "goodput"  # of the fake, and the largest k that it allows
MAX_K = 8

# Microseconds of a step: proposing one draft, the target's pass, and the rest.
DRAFT_US, SCORE_US, REST_US = 100, 600, 100


def spell(request: Request) -> Iterator[Output]:
    """The default script: the prompt's ids again as text. In every round three drafts where there may be so many, the
    first two right and the third wrong: three tokens. The last round is cut where max_tokens says."""
    params, prompt = request.params, request.prompt_ids
    ids = [prompt[i % len(prompt)] for i in range(params.max_tokens + MAX_K)]
    record = blank(request, ids[: params.max_tokens])
    before = (
        tuple(_logprob(t, params.prompt_logprobs) for t in prompt[1:]) if params.prompt_logprobs is not None else ()
    )
    k = min(3, record.k_max) if params.max_tokens else 0
    accepted = min(2, k)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    for start in range(0, max(1, params.max_tokens), accepted + 1):
        part = tuple(ids[start : min(start + accepted + 1, params.max_tokens)])
        note(record, k, accepted, len(part))
        last = record.output_tokens == params.max_tokens
        record.finished = time.monotonic() if last else None
        yield Output(
            request.id,
            part,
            utf8.decode(bytes(part), last),
            "length" if last else None,
            record=record if last else None,
            logprobs=tuple(_logprob(t, params.logprobs) for t in part) if params.logprobs is not None else (),
            prompt_logprobs=() if start else before,
            drafts=_drafts(ids[start:], k),
            accepted=accepted,
        )


def _drafts(right: Sequence[int], k: int) -> tuple[int, ...]:
    """k of them, of which the third is not the token that comes."""
    return tuple((token + (i == 2)) % 256 for i, token in enumerate(right[:k]))


def blank(request: Request, ids: Sequence[int] = ()) -> RequestRecord:
    """The record of a request that runs from now on, without rounds; ids: what it will say."""
    now = time.monotonic()
    most = MAX_K if request.max_k is None else request.max_k
    k = most if request.k is None else request.k
    guess = request.prediction_ids
    return RequestRecord(
        request.id,
        request.params.seed or 0,
        len(request.prompt_ids),
        k,
        arrived=now,
        admitted=now,
        verifier=request.verifier or "match",
        drafter=(request.drafter or ("cascade" if guess else "model")) if k else None,
        lenience=request.lenience,
        policy=POLICY,
        fixed_k=request.k,
        prediction_tokens=len(guess),
        prediction_accepted=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guess, ids, strict=False))),
    )


def note(record: RequestRecord, k: int, accepted: int, emitted: int) -> None:
    """Add a round with k drafts, which ran alone."""
    part = RoundRecord(
        k=k,
        reason=REASONS.index("policy" if record.fixed_k is None else "user"),
        alpha=750,
        drafted=k,
        accepted=accepted,
        emitted=emitted,
        proposer=DRAFTERS.index(_proposer(record)) if k else -1,
        step=len(record.rounds),
        batch=1,
        began_us=sum(record.column("step_us")),
        draft_us=k * DRAFT_US,
        score_us=SCORE_US,
        step_us=k * DRAFT_US + SCORE_US + REST_US,
    )
    record.add(part)
    if record.first_token is None and emitted:
        record.first_token = time.monotonic()


def _proposer(record: RequestRecord) -> DrafterName:
    """A cascade's drafts come from one of those it consists of."""
    return "model" if record.drafter in ("cascade", None) else record.drafter


def _logprob(token: int, count: int | None) -> TokenLogprob:
    """Every second token is the likeliest of all, the others are none of the likeliest."""
    top = tuple(((token + rank + token % 2) % 256, -0.5 * (rank + 1)) for rank in range(count or 0))
    return TokenLogprob(token, -9.5 if token % 2 else -0.5, top)
