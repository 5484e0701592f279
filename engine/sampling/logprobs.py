"""Log-probabilities to tell the client: of the target's raw logits, before any sampling parameter (vLLM's default)."""

import logging
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from engine.host_memory import out_of_memory
from engine.types import TokenLogprob

log = logging.getLogger(__name__)

Told = tuple[TokenLogprob, ...]


class Wanted(NamedTuple):
    """What one request wants to be told: of these rows of the logits, what their tokens and `others` more got."""

    rows: range
    tokens: Seq[int]
    others: int


class Failure(NamedTuple):
    """One request could not be told what it wanted."""

    reason: str  # safe to show to its client


def tell_all(logits: Tensor, wanted: Seq[Wanted]) -> list[Told | Failure]:
    """What each request wants, of logits [R, vocab]: together, and if that fails one request after the other (R9)."""
    try:
        return _tell(logits, wanted)
    except Exception:
        log.exception("the log-probabilities of %d requests failed; each is tried alone", len(wanted))
    return [tell_one(logits, one) for one in wanted]


def tell_one(logits: Tensor, wanted: Wanted) -> Told | Failure:
    try:
        return _tell(logits, [wanted])[0]
    except Exception as error:
        log.exception("the log-probabilities of one request failed")
        if out_of_memory(error):
            return Failure("there was not enough memory for the log-probabilities of this request")
        return Failure("the log-probabilities of this request could not be computed")


def _tell(logits: Tensor, wanted: Seq[Wanted]) -> list[Told | Failure]:
    rows = [row for one in wanted for row in one.rows]
    tokens = [token for one in wanted for token in one.tokens]
    counts = [one.others for one in wanted for _ in one.rows]
    whole = rows == list(range(logits.shape[0]))
    told = iter(token_logprobs(logits if whole else logits[torch.tensor(rows, device=logits.device)], tokens, counts))
    return [tuple(next(told) for _ in one.rows) for one in wanted]


def token_logprobs(logits: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """What each row of logits [R, vocab] gives its token, and its `counts[i]` likeliest, equals by their ids."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logp.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = _likeliest(logp, min(max(counts), logits.shape[-1]))
    return [
        TokenLogprob(token, value, tuple(sorted(top, key=lambda pair: (-pair[1], pair[0]))[:count]))
        for token, value, top, count in zip(tokens, own, best, counts, strict=True)
    ]


def _likeliest(logp: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` best (id, logprob) of each row in any order, and all that equal the last of them."""
    best: list[list[tuple[int, float]]] = [[] for _ in logp]
    if count:
        rows, ids = (logp >= logp.topk(count).values[:, -1:]).nonzero(as_tuple=True)
        for row, token, value in zip(rows.tolist(), ids.tolist(), logp[rows, ids].tolist(), strict=True):
            best[row].append((token, value))
    return best
