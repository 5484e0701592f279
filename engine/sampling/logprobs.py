"""Log-probabilities for the client. They are those of the target's raw logits, before any sampling parameter (vLLM's
default)."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from cache.transfer import index_tensor
from engine.memory.errors import out_of_memory
from engine.types import TokenLogprob

log = logging.getLogger(__name__)

TokenLogprobs = tuple[TokenLogprob, ...]

SLICE_BYTES = 2**26
LOGIT_BYTES = 16  # that one logit takes at most: itself, in fp32, its log-probability, and what finds the likeliest


class LogprobRequest(NamedTuple):
    """The log-probabilities that one request asks for."""

    rows: Seq[int]  # of the logits
    tokens: Seq[int]  # one per row
    top_count: int  # alternatives per row: the likeliest tokens


class LogprobFailure(NamedTuple):
    """The log-probabilities of one request could not be computed."""

    reason: str  # safe to show to its client


class LogitRows(NamedTuple):
    """Rows of logits, which exist only as long as they are needed."""

    take: Callable[[Tensor], Tensor]  # row numbers [n] → logits [n, vocab]
    vocab_size: int
    device: torch.device

    @classmethod
    def of(cls, logits: Tensor) -> "LogitRows":
        return cls(lambda rows: logits[rows], logits.shape[-1], logits.device)


def compute_logprobs(logits: LogitRows, requests: Seq[LogprobRequest]) -> list[TokenLogprobs | LogprobFailure]:
    """Answer all requests together or, if that raises, one by one (R9)."""
    try:
        return _compute(logits, requests)
    except Exception:
        log.exception("the log-probabilities of %d requests failed; each is tried alone", len(requests))
    return [compute_logprobs_alone(logits, request) for request in requests]


def compute_logprobs_alone(logits: LogitRows, request: LogprobRequest) -> TokenLogprobs | LogprobFailure:
    """Answer one request. Does not raise."""
    try:
        return _compute(logits, [request])[0]
    except Exception as error:
        log.exception("the log-probabilities of one request failed")
        if out_of_memory(error):
            return LogprobFailure("there was not enough memory for the log-probabilities of this request")
        return LogprobFailure("the log-probabilities of this request could not be computed")


def _compute(logits: LogitRows, requests: Seq[LogprobRequest]) -> list[TokenLogprobs | LogprobFailure]:
    """Take as many rows at a time as need at most SLICE_BYTES. Each row's result depends on the row alone."""
    rows = [row for request in requests for row in request.rows]
    tokens = [token for request in requests for token in request.tokens]
    top_counts = [request.top_count for request in requests for _ in request.rows]
    step = max(1, SLICE_BYTES // (LOGIT_BYTES * logits.vocab_size))
    found: list[TokenLogprob] = []
    for part in (slice(first, first + step) for first in range(0, len(rows), step)):
        index, ids = index_tensor([*rows[part], *tokens[part]], logits.device).view(2, -1).unbind(0)
        found += token_logprobs(logits.take(index), ids, tokens[part], top_counts[part])
    entries = iter(found)
    return [tuple(next(entries) for _ in request.rows) for request in requests]


def token_logprobs(logits: Tensor, ids: Tensor, tokens: Seq[int], top_counts: Seq[int]) -> list[TokenLogprob]:
    """The log-probability, for each row of logits [R, vocab], of its token and of its top_counts[i] likeliest tokens.

    ids [R]: the tokens, on the device. Among equal log-probabilities the lower id comes first.
    """
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    count = min(max(top_counts), logits.shape[-1])
    likeliest = _likeliest if logits.device.type == "cpu" else _likeliest_on_device
    of_tokens, best = likeliest(logp, logp.gather(1, ids[:, None]), count)
    return [
        TokenLogprob(token, value, tuple(sorted(top, key=lambda pair: (-pair[1], pair[0]))[:count]))
        for token, value, top, count in zip(tokens, of_tokens, best, top_counts, strict=True)
    ]


Likeliest = tuple[list[float], list[list[tuple[int, float]]]]


def _likeliest(logp: Tensor, of_tokens: Tensor, count: int) -> Likeliest:
    """(of_tokens [R, 1] as a list, the `count` best (id, logprob) of each row and all that equal the last of these, in
    any order)."""
    best: list[list[tuple[int, float]]] = [[] for _ in logp]
    if count:
        rows, ids = (logp >= logp.topk(count).values[:, -1:]).nonzero(as_tuple=True)
        for row, token, value in zip(rows.tolist(), ids.tolist(), logp[rows, ids].tolist(), strict=True):
            best[row].append((token, value))
    return of_tokens[:, 0].tolist(), best


def _likeliest_on_device(logp: Tensor, of_tokens: Tensor, count: int) -> Likeliest:
    """As _likeliest, in one copy to the host. If several tokens equal the last one, the lowest ids are taken."""
    if not count:
        return of_tokens[:, 0].tolist(), [[] for _ in logp]
    values, ids = logp.topk(count)
    numbers, nobody = torch.arange(logp.shape[-1], device=logp.device), logp.shape[-1]
    equal = torch.where(logp == values[:, -1:], numbers, nobody).topk(count, largest=False).values
    rows = torch.cat([of_tokens.double(), values.double(), ids.double(), equal.double()], 1).tolist()
    best = []
    for _, *numbers_of_row in rows:
        row_values, row_ids, row_equal = (numbers_of_row[n * count : (n + 1) * count] for n in range(3))
        last = row_values[-1]
        above = [(int(token), value) for token, value in zip(row_ids, row_values, strict=True) if value > last]
        best.append(above + [(int(token), last) for token in row_equal if token < nobody])
    return [row[0] for row in rows], best
