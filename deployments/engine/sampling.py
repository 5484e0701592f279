"""From logits to tokens: the one transform (architecture R4), used alike for plain decoding, drafting and verification.

A round's rows are sequence-major: sequence i owns rows offset[i] … offset[i] + k[i], and row (i, j) draws the token at
absolute position len(tokens[i]) + j. Draft token j + 1 and the target's own token are drawn for the same row, hence
with the same parameters and the same noise.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.engine.randomness import TARGET_STREAM, exponential_noise, stream_key
from deployments.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Filters:
    """Truncation of the law, one value per row; a neutral value keeps every token."""

    top_k: Tensor  # [R] int64, vocab size: off
    top_p: Tensor  # [R] fp64, 1: off
    min_p: Tensor  # [R] fp64, 0: off


@dataclass(frozen=True, slots=True)
class Sampler:
    """Per-row sampling parameters of one round. A field is None where no row needs it, and then costs nothing."""

    temperature: Tensor | None  # [R] fp64; None: every row is greedy
    greedy: Tensor | None  # [R] bool, where a sampled batch holds greedy rows
    noise: Tensor | None  # [R, vocab] fp64 Exp(1)
    filters: Filters | None
    banned: tuple[Tensor, Tensor] | None  # (rows, token ids) that may not be drawn: end-of-sequence under min_tokens

    @property
    def per_row(self) -> bool:
        """Whether rows differ in anything but their logits."""
        return self.temperature is not None or self.banned is not None

    def sample(self, logits: Tensor, rows: Tensor | None = None) -> Tensor:
        """Token ids [R] drawn for `rows` (indices into the round's rows; None: all, in order) from logits [R, vocab].

        The logits' vocabulary may be smaller than the noise's (a draft's table). Ties take the lowest id.
        """
        if self.banned is not None:
            logits = _ban(logits, self.banned, rows)
        if self.temperature is None or self.noise is None:
            return logits.argmax(-1)
        scores = logits.double() / _pick(self.temperature, rows)[:, None]
        if self.filters is not None:
            f = self.filters
            scores = truncate(scores, Filters(_pick(f.top_k, rows), _pick(f.top_p, rows), _pick(f.min_p, rows)))
        noise = _pick(self.noise, rows)[:, : logits.shape[-1]]
        drawn = (scores - noise.log()).argmax(-1)
        if self.greedy is None:
            return drawn
        return torch.where(_pick(self.greedy, rows), logits.argmax(-1), drawn)


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


def truncate(scores: Tensor, filters: Filters) -> Tensor:
    """Set to −inf what top-k, then top-p, then min-p remove from scores [R, vocab] (log p up to a constant).

    Each works on what the one before left, renormalised, as transformers' processors do: top-k keeps ties with its k-th
    score; top-p removes the largest set of least likely tokens whose mass is at most 1 − p; min-p removes what is less
    likely than min_p times the likeliest. The likeliest token always stays.
    """
    vocab = scores.shape[-1]
    ascending, order = scores.sort(dim=-1, stable=True)
    kth = ascending.gather(-1, (vocab - filters.top_k.clamp(max=vocab))[:, None])
    ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    tail = ascending.softmax(-1).cumsum(-1)
    removed = tail <= (1 - filters.top_p)[:, None]
    removed[:, -1] = False
    ascending = ascending.masked_fill(removed & (filters.top_p < 1)[:, None], -torch.inf)
    floor = ascending[:, -1:] + filters.min_p.log()[:, None]  # log 0 = −inf: off
    ascending = ascending.masked_fill(ascending < floor, -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ascending)


def make_sampler(
    sequences: Seq[Sequence], ks: Seq[int], vocab_size: int, eos_ids: Seq[int], device: torch.device
) -> Sampler:
    """The round's sampler; one host-to-device copy per field in use."""
    counts = [k + 1 for k in ks]
    banned = _banned_rows(sequences, counts, eos_ids, device)
    if not any(s.params.temperature for s in sequences):
        return Sampler(None, None, None, None, banned)

    def per_row(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
        repeated = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
        return torch.tensor(repeated, dtype=dtype, device=device)

    params = [s.params for s in sequences]
    keys = per_row([stream_key(s.key, TARGET_STREAM) for s in sequences], torch.int64)
    positions = [len(s.tokens) + j for s, n in zip(sequences, counts, strict=True) for j in range(n)]
    filters = None
    if any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params):
        filters = Filters(
            per_row([p.top_k or vocab_size for p in params], torch.int64),
            per_row([p.top_p for p in params], torch.float64),
            per_row([p.min_p for p in params], torch.float64),
        )
    greedy = [p.temperature == 0 for p in params]
    return Sampler(
        temperature=per_row([p.temperature or 1.0 for p in params], torch.float64),
        greedy=per_row(greedy, torch.bool) if any(greedy) else None,
        noise=exponential_noise(keys, torch.tensor(positions, device=device), vocab_size),
        filters=filters,
        banned=banned,
    )


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
