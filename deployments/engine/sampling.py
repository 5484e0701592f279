"""From logits to tokens: the one transform (architecture R4), used alike for plain decoding, drafting and verification.

A round's rows are sequence-major: sequence i owns rows offset[i] … offset[i] + k[i], and row (i, j) draws the token at
absolute position len(tokens[i]) + j. Draft token j + 1 and the target's own token are drawn for the same row, hence
with the same parameters and the same noise.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deployments.engine.randomness import TARGET_STREAM, gumbel_noise, stream_key
from deployments.engine.sequence import Sequence

Places = dict[int, int]  # row of the round → row of a tensor that holds only the rows concerned


@dataclass(frozen=True, slots=True)
class Filters:
    """Truncation of the law, for the rows that ask for it; a neutral value keeps every token."""

    temperature: Tensor  # [F] fp64, positive
    top_k: Tensor  # [F] int64, vocab size: off
    top_p: Tensor  # [F] fp64, 1: off
    min_p: Tensor  # [F] fp64, 0: off
    nucleus: bool  # whether any row has a top-p: known on the host

    def pick(self, rows: Tensor) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.nucleus)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A round's sampling parameters. Greedy rows cost an argmax; noise and filters exist for the rows that use them."""

    noise: Tensor | None  # [S, vocab] fp64: Gumbel noise times the row's temperature
    noisy: Places  # rows with a temperature → rows of noise
    filters: Filters | None
    filtered: Places  # rows → rows of filters
    banned: frozenset[int]  # rows that may not draw an end-of-sequence token
    eos_ids: tuple[int, ...]

    @property
    def greedy(self) -> bool:
        """Whether every row is its logits' argmax and nothing else."""
        return not self.noisy and not self.banned

    def sample(self, logits: Tensor, rows: Seq[int]) -> Tensor:
        """Token ids [R] drawn for these rows of the round from logits [R, vocab]. Ties take the lowest id.

        argmax(logits / T + noise) = argmax(logits + T · noise): no division, and no case of its own for temperature 0.
        The logits' vocabulary may be smaller than the noise's (a draft's table).
        """
        if self.greedy:
            return argmax(logits)
        logits = self._without_eos(logits, rows)
        at = [i for i, row in enumerate(rows) if row in self.noisy]
        if not at or self.noise is None:
            return argmax(logits)
        noise = _rows(self.noise, [self.noisy[rows[i]] for i in at])
        drawn = argmax(self._scores(_rows(logits, at), noise, [rows[i] for i in at]))
        if len(at) == len(rows):
            return drawn
        tokens = argmax(logits)
        tokens[_index(at, tokens.device)] = drawn
        return tokens

    def _scores(self, logits: Tensor, noise: Tensor, rows: Seq[int]) -> Tensor:
        scores = noise[:, : logits.shape[-1]] + logits
        at = [i for i, row in enumerate(rows) if row in self.filtered]
        if not at or self.filters is None:
            return scores
        filters = self.filters.pick(_index([self.filtered[rows[i]] for i in at], scores.device))
        gone = removed(_rows(logits, at), filters)
        if len(at) == len(rows):
            return scores.masked_fill_(gone, -torch.inf)
        where = _index(at, scores.device)
        scores[where] = scores[where].masked_fill_(gone, -torch.inf)
        return scores

    def _without_eos(self, logits: Tensor, rows: Seq[int]) -> Tensor:
        at = [i for i, row in enumerate(rows) if row in self.banned]
        ids = [eos for eos in self.eos_ids if eos < logits.shape[-1]]
        if not at or not ids:
            return logits
        where, which = _index(at, logits.device)[:, None], _index(ids, logits.device)
        return logits.index_put((where, which), logits.new_tensor(-torch.inf))


def argmax(scores: Tensor) -> Tensor:
    """[R, vocab] → [R], the lowest id among equals. On CPU numpy's is a tenth of the time of torch's."""
    if scores.device.type == "cpu" and scores.dtype is not torch.bfloat16:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _index(values: Seq[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _rows(values: Tensor, at: Seq[int]) -> Tensor:
    """values[at], without a copy where that is all of them in order."""
    return values if list(at) == list(range(values.shape[0])) else values[_index(at, values.device)]


def removed(logits: Tensor, filters: Filters) -> Tensor:
    """Which tokens top-k, then top-p, then min-p remove from logits [F, vocab]; bool of that shape.

    Each works on what the one before left, renormalised, as transformers' processors do: top-k keeps the k best; top-p
    removes the largest set of least likely tokens whose mass is at most 1 − p; min-p removes what is less likely than
    min_p times the likeliest. Each comes to a threshold, so equals stay or go together, and the likeliest always stay.
    """
    vocab = logits.shape[-1]
    scores = logits.double() / filters.temperature[:, None]
    ascending = _sorted(scores)
    kth = ascending.gather(-1, (vocab - filters.top_k.clamp(max=vocab))[:, None])
    floor = ascending[:, -1:] + filters.min_p.log()[:, None]  # log 0 = −inf: off
    threshold = torch.maximum(kth, floor)
    if filters.nucleus:
        mass = ascending.masked_fill(ascending < kth, -torch.inf).softmax(-1).cumsum(-1)
        outside = (mass <= (1 - filters.top_p)[:, None]).sum(-1, keepdim=True).clamp_(max=vocab - 1)
        first_kept = ascending.gather(-1, outside)
        threshold = torch.where(filters.top_p[:, None] < 1, torch.maximum(threshold, first_kept), threshold)
    return scores < threshold


def _sorted(scores: Tensor) -> Tensor:
    """Ascending. On CPU numpy's sort takes a tenth of the time of torch's, which also tracks indices."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(dim=-1).values


def make_sampler(
    sequences: Seq[Sequence], ks: Seq[int], vocab_size: int, eos_ids: Seq[int], device: torch.device
) -> Sampler:
    """The round's sampler. Every tensor is made once, on the device; nothing is made for rows that do not need it."""
    rows = [(s, len(s.tokens) + j) for s, k in zip(sequences, ks, strict=True) for j in range(k + 1)]
    noisy = [i for i, (s, _) in enumerate(rows) if s.params.temperature]
    filtered = [i for i in noisy if _filters(rows[i][0])]
    banned = frozenset(i for i, (s, position) in enumerate(rows) if _may_not_end(s, position))
    return Sampler(
        noise=_noise([rows[i] for i in noisy], vocab_size, device) if noisy else None,
        noisy={row: i for i, row in enumerate(noisy)},
        filters=_make_filters([rows[i][0] for i in filtered], vocab_size, device) if filtered else None,
        filtered={row: i for i, row in enumerate(filtered)},
        banned=banned,
        eos_ids=tuple(eos_ids),
    )


def _filters(sequence: Sequence) -> bool:
    params = sequence.params
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _may_not_end(sequence: Sequence, position: int) -> bool:
    params = sequence.params
    return position - sequence.num_prompt < params.min_tokens and not params.ignore_eos


def _noise(rows: Seq[tuple[Sequence, int]], vocab_size: int, device: torch.device) -> Tensor:
    keys = _index([stream_key(s.key, TARGET_STREAM) for s, _ in rows], device)
    temperatures = torch.tensor([s.params.temperature for s, _ in rows], dtype=torch.float64, device=device)
    noise = gumbel_noise(keys, _index([position for _, position in rows], device), vocab_size)
    return noise.mul_(temperatures[:, None])


def _make_filters(sequences: Seq[Sequence], vocab_size: int, device: torch.device) -> Filters:
    params = [s.params for s in sequences]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    return Filters(
        temperature=column([p.temperature for p in params]),
        top_k=_index([min(p.top_k, vocab_size) or vocab_size for p in params], device),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
        nucleus=any(p.top_p < 1 for p in params),
    )
