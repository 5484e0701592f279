"""From logits to tokens: the one transform (architecture R4), used alike for plain decoding, drafting and verification.

A round's rows are sequence-major: sequence i owns rows offset[i] … offset[i] + k[i], and row (i, j) draws the token at
absolute position len(tokens[i]) + j. Draft token j + 1 and the target's own token are drawn for the same row, hence
with the same parameters and the same noise.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.engine.randomness import TARGET_STREAM, gumbel_noise, stream_key
from deployments.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Filters:
    """Truncation of the law, one value per row; a neutral value keeps every token."""

    temperature: Tensor  # [R] fp64, 1 for greedy rows; no filter may decide a tie there, so their top-p is off
    top_k: Tensor  # [R] int64, vocab size: off
    top_p: Tensor  # [R] fp64, 1: off
    min_p: Tensor  # [R] fp64, 0: off

    def pick(self, rows: Tensor | None) -> "Filters":
        if rows is None:
            return self
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Sampler:
    """Per-row sampling parameters of one round. A field is None where no row needs it, and then costs nothing."""

    noise: Tensor | None  # [R, vocab] fp64: Gumbel noise times the row's temperature; None: every row is greedy
    filters: Filters | None
    banned: tuple[Tensor, Tensor] | None  # (rows, token ids) that may not be drawn: end-of-sequence under min_tokens

    @property
    def per_row(self) -> bool:
        """Whether rows differ in anything but their logits."""
        return self.noise is not None or self.banned is not None

    def sample(self, logits: Tensor, rows: Tensor | None = None) -> Tensor:
        """Token ids [R] drawn for `rows` (indices into the round's rows; None: all, in order) from logits [R, vocab].

        argmax(logits / T + noise) = argmax(logits + T · noise): temperature 0 is greedy without a case of its own.
        The logits' vocabulary may be smaller than the noise's (a draft's table). Ties take the lowest id.
        """
        if self.banned is not None:
            logits = _ban(logits, self.banned, rows)
        if self.noise is None:
            return argmax(logits)
        scores = _pick(self.noise, rows)[:, : logits.shape[-1]] + logits
        if self.filters is not None:
            scores.masked_fill_(removed(logits, self.filters.pick(rows)), -torch.inf)
        return argmax(scores)


def argmax(scores: Tensor) -> Tensor:
    """[R, vocab] → [R], the lowest id among equals. On CPU numpy's is a tenth of the time of torch's."""
    if scores.device.type == "cpu" and scores.dtype is not torch.bfloat16:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _pick(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def _ban(logits: Tensor, banned: tuple[Tensor, Tensor], rows: Tensor | None) -> Tensor:
    at, ids = banned
    if rows is not None:
        hit = rows[:, None] == at  # [R, bans]
        where, which = hit.nonzero(as_tuple=True)
        at, ids = where, ids[which]
    keep = ids < logits.shape[-1]
    return logits.index_put((at[keep], ids[keep]), logits.new_tensor(-torch.inf))


def removed(logits: Tensor, filters: Filters) -> Tensor:
    """Which tokens top-k, then top-p, then min-p remove from logits [R, vocab]; bool of that shape.

    Each works on what the one before left, renormalised, as transformers' processors do: top-k keeps ties with its k-th
    score; top-p removes the largest set of least likely tokens whose mass is at most 1 − p; min-p removes what is less
    likely than min_p times the likeliest. The likeliest token always stays.
    """
    vocab = logits.shape[-1]
    scores, order = (logits.double() / filters.temperature[:, None]).sort(dim=-1, stable=True)
    kth = scores.gather(-1, (vocab - filters.top_k.clamp(max=vocab))[:, None])
    scores = scores.masked_fill(scores < kth, -torch.inf)
    outside = scores.softmax(-1).cumsum(-1) <= (1 - filters.top_p)[:, None]
    outside[:, -1] = False
    scores = scores.masked_fill(outside & (filters.top_p < 1)[:, None], -torch.inf)
    floor = scores[:, -1:] + filters.min_p.log()[:, None]  # log 0 = −inf: off
    gone = (scores < floor) | (scores == -torch.inf)
    return torch.empty_like(gone).scatter_(-1, order, gone)


def make_sampler(
    sequences: Seq[Sequence], ks: Seq[int], vocab_size: int, eos_ids: Seq[int], device: torch.device
) -> Sampler:
    """The round's sampler; one host-to-device copy per field in use."""
    counts = [k + 1 for k in ks]
    banned = _banned_rows(sequences, counts, eos_ids, device)
    if all(s.params.temperature == 0 for s in sequences):
        return Sampler(None, None, banned)

    def per_row(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
        repeated = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
        return torch.tensor(repeated, dtype=dtype, device=device)

    params = [s.params for s in sequences]
    keys = per_row([stream_key(s.key, TARGET_STREAM) for s in sequences], torch.int64)
    positions = [len(s.tokens) + j for s, n in zip(sequences, counts, strict=True) for j in range(n)]
    noise = gumbel_noise(keys, torch.tensor(positions, device=device), vocab_size)
    noise *= per_row([p.temperature for p in params], torch.float64)[:, None]
    filters = None
    if any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params):
        filters = Filters(
            temperature=per_row([p.temperature or 1.0 for p in params], torch.float64),
            top_k=per_row([p.top_k or vocab_size for p in params], torch.int64),
            top_p=per_row([p.top_p if p.temperature else 1.0 for p in params], torch.float64),
            min_p=per_row([p.min_p for p in params], torch.float64),
        )
    return Sampler(noise, filters, banned)


def _banned_rows(
    sequences: Seq[Sequence], counts: Seq[int], eos_ids: Seq[int], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    pairs, offset = [], 0
    for sequence, count in zip(sequences, counts, strict=True):
        early = sequence.params.min_tokens - sequence.num_output  # rows that may not end the text yet
        pairs += [(offset + j, eos) for j in range(min(early, count)) for eos in eos_ids]
        offset += count
    if not pairs:
        return None
    rows, ids = torch.tensor(pairs, device=device).unbind(1)
    return rows, ids
