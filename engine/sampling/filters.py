"""Truncation of a law: top-k, top-p and min-p (the last part of the one transform, R4)."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from engine.sampling.cuts import SERIAL_LIMIT, SORT_LIMIT, LogitsRow
from engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Filters:
    """Truncation for the rows that ask for it; a neutral value keeps every token."""

    temperature: Tensor  # [F] fp64, positive
    top_k: Tensor  # [F] int64, vocab size: off
    top_p: Tensor  # [F] fp64, 1: off
    min_p: Tensor  # [F] fp64, 0: off
    nucleus: bool  # whether any row has a top-p: known on the host

    @classmethod
    def make(cls, params: Seq[SamplingParams], vocab_size: int, device: torch.device) -> "Filters":
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        return cls(
            temperature=column([p.temperature for p in params]),
            top_k=torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=device),
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
            nucleus=any(p.top_p < 1 for p in params),
        )

    def pick(self, rows: Tensor) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.nucleus)


def truncates(params: SamplingParams) -> bool:
    """Whether these parameters truncate the law. A greedy token is the likeliest, which no filter removes."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def truncated(logits: Tensor, filters: Filters) -> Tensor:
    """Logits [F, vocab] in fp32 or fp64, with −inf for what top-k, then top-p, then min-p remove.

    Each works on what the one before left, renormalised, as transformers' processors do: top-k keeps the k best; top-p
    removes the largest set of least likely tokens whose mass is at most 1 − p; min-p removes what is less likely than
    min_p times the likeliest. Each comes to a threshold, so equals stay or go together, and the likeliest always stay.
    """
    if logits.device.type == "cpu" and logits.shape[-1] > SORT_LIMIT:
        return _cut(logits, filters)
    return logits.masked_fill(removed(logits, filters), -torch.inf)


def _cut(logits: Tensor, filters: Filters) -> Tensor:
    """truncated(), where rows are long: each is cut below one logit, which is found without sorting the row."""
    result = torch.empty(logits.shape, dtype=logits.dtype)
    masses = np.empty(logits.shape[-1])  # of one row at a time, which stay in a cache
    coldest = filters.temperature.clamp(min=torch.finfo(torch.float64).tiny)
    columns = (logits.amax(-1), coldest, filters.top_k, filters.top_p, filters.min_p.log())
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (best, temperature, top_k, top_p, floor) in enumerate(rows):
        row = LogitsRow(logits[i], best, temperature)
        if not isfinite(best):
            result[i] = logits[i]  # it has no law: nothing is removed, so that it is seen
        elif (threshold := row.threshold(top_k, top_p, floor, masses)) is None:
            gone = removed(logits[i : i + 1], filters.pick(torch.tensor([i])))
            result[i] = logits[i].masked_fill(gone[0], -torch.inf)
        else:
            last_removed = row.last_below(threshold)
            for part, kept in zip(logits[i].split(SERIAL_LIMIT), result[i].split(SERIAL_LIMIT), strict=True):
                torch.threshold(part, last_removed, -torch.inf, out=kept)
    return result


def removed(logits: Tensor, filters: Filters) -> Tensor:
    """Which tokens go, bool [F, vocab], by the definition: each row is sorted."""
    vocab = logits.shape[-1]
    scores = apply_temperature(logits.double(), filters.temperature)
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


def apply_temperature(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Scores [R, vocab] over temperatures [R], the best at 0, where it is finite however low the temperature."""
    least = torch.finfo(scores.dtype).tiny
    best = scores.amax(-1, keepdim=True)
    return (scores - best).div_(temperatures.to(scores.dtype).clamp(min=least)[:, None])


def _sorted(scores: Tensor) -> Tensor:
    """Ascending. On CPU numpy's sort takes a tenth of the time of torch's, which also tracks indices."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(dim=-1).values
