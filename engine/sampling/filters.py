"""Truncation of a law: top-k, top-p and min-p (the last part of the one transform, R4)."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from engine.sampling.candidates import CutRows, Cuts, cut_rows
from engine.sampling.cuts import SERIAL_LIMIT, SORT_LIMIT, LogitsRow
from engine.types import SamplingParams

SHORT_ROW = 256  # rows of at most this many logits are sorted whole


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of F rows that truncate their law. A neutral value keeps every token."""

    temperature: Tensor  # [F] fp64, positive
    top_k: Tensor  # [F] int64, vocab size: off
    top_p: Tensor  # [F] fp64, 1: off
    min_p: Tensor  # [F] fp64, 0: off
    any_top_p: bool  # whether any row has top_p < 1; known on the host

    @classmethod
    def make(cls, params: Seq[SamplingParams], vocab_size: int, device: torch.device) -> "Filters":
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        return cls(
            temperature=column([p.temperature for p in params]),
            top_k=torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=device),
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
            any_top_p=any(p.top_p < 1 for p in params),
        )

    def pick(self, rows: Tensor) -> "Filters":
        """The parameters of some of the rows."""
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.any_top_p)


def truncates(params: SamplingParams) -> bool:
    """Whether these parameters truncate the law. At temperature 0 none does: filters keep the likeliest token."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def truncated(logits: Tensor, filters: Filters) -> Tensor:
    """Logits [F, vocab] in fp32 or fp64, with −inf for the tokens that top-k, then top-p, then min-p remove.

    Each filter works on the renormalised rest of the one before, as transformers' processors do. top-k keeps the k
    best. top-p removes the largest set of least likely tokens whose mass is at most 1 − p. min-p removes tokens less
    likely than min_p times the likeliest. Each filter is a threshold, so equal logits stay or go together, and the
    likeliest tokens always stay.
    """
    if not cuts_without_sorting(logits):
        return logits.masked_fill(removed(logits, filters), -torch.inf)
    logits = logits.contiguous()
    return truncated_rows(logits, filters, cut_rows(logits, cuts_of(filters, logits.shape[-1])))


def cuts_without_sorting(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.shape[-1] > SHORT_ROW


def cuts_of(filters: Filters, vocab_size: int) -> Cuts:
    """What cuts rows of so many logits. Filters on the CPU."""
    by_mass, no_top_k = filters.top_p < 1, filters.top_k >= vocab_size
    columns = (filters.temperature, filters.top_p, filters.min_p.log(), by_mass & no_top_k, ~by_mass & no_top_k)
    return Cuts(*(column.numpy() for column in columns))


def truncated_rows(logits: Tensor, filters: Filters, cut: CutRows) -> Tensor:
    """As truncated(), after cut_rows()."""
    short = logits.shape[-1] <= SORT_LIMIT
    if short and len(cut.left) == len(logits):
        return _truncated_whole(logits, filters)
    result = torch.empty(logits.shape, dtype=logits.dtype)
    cut.write(logits, result)
    if cut.left and short:
        rows = torch.tensor(cut.left)
        result[rows] = _truncated_whole(logits[rows], filters.pick(rows))
    elif cut.left:
        _search_rows(logits, filters, cut.left, result)
    return result


def _truncated_whole(logits: Tensor, filters: Filters) -> Tensor:
    """As truncated(), by passes over whole rows."""
    gone = removed(logits, filters)
    # By numpy: torch takes three times as long where the mask is irregular.
    values = logits.numpy()
    return torch.from_numpy(np.where(gone.numpy(), np.array(-np.inf, values.dtype), values))


def _search_rows(logits: Tensor, filters: Filters, chosen: Seq[int], result: Tensor) -> None:
    """Truncate the chosen rows, which are long: finds each row's threshold without sorting the row."""
    masses = np.empty(logits.shape[-1])  # the masses of one row at a time, so that they stay in the processor's cache
    coldest = filters.temperature.clamp(min=torch.finfo(torch.float64).tiny)
    bests = [float(logits[i].amax()) for i in chosen]
    columns = (coldest, filters.top_k, filters.top_p, filters.min_p.log())
    rows = zip(chosen, bests, *(column[list(chosen)].tolist() for column in columns), strict=True)
    for i, best, temperature, top_k, top_p, floor in rows:
        row = LogitsRow(logits[i], best, temperature)
        if not isfinite(best):
            result[i] = logits[i]  # unchanged, so that the verifier sees that it is not finite
        elif (threshold := row.threshold(top_k, top_p, floor, masses)) is None:
            mask = removed(logits[i : i + 1], filters.pick(torch.tensor([i])))
            result[i] = logits[i].masked_fill(mask[0], -torch.inf)
        else:
            last_removed = row.last_below(threshold)
            for part, kept in zip(logits[i].split(SERIAL_LIMIT), result[i].split(SERIAL_LIMIT), strict=True):
                torch.threshold(part, last_removed, -torch.inf, out=kept)


def removed(logits: Tensor, filters: Filters) -> Tensor:
    """Which tokens the filters remove, bool [F, vocab]. This is their definition; it sorts each row."""
    vocab = logits.shape[-1]
    ordered = _sorted(logits)
    ascending = apply_temperature(ordered.double(), filters.temperature)
    kth = ascending.gather(-1, (vocab - filters.top_k.clamp(max=vocab))[:, None])
    floor = ascending[:, -1:] + filters.min_p.log()[:, None]  # log 0 = −inf: off
    threshold = torch.maximum(kth, floor)
    if filters.any_top_p:
        mass = ascending.masked_fill(ascending < kth, -torch.inf).softmax(-1).cumsum(-1)
        outside = (mass <= (1 - filters.top_p)[:, None]).sum(-1, keepdim=True).clamp_(max=vocab - 1)
        first_kept = ascending.gather(-1, outside)
        threshold = torch.where(filters.top_p[:, None] < 1, torch.maximum(threshold, first_kept), threshold)
    lowest_kept = ordered.gather(-1, (ascending < threshold).sum(-1, keepdim=True).clamp_(max=vocab - 1))
    return logits < lowest_kept


def apply_temperature(scores: Tensor, temperatures: Tensor) -> Tensor:
    """(scores − best) / temperature, for scores [R, vocab] and temperatures [R]. The best becomes 0, which is finite
    however low the temperature is."""
    least = torch.finfo(scores.dtype).tiny
    best = scores.amax(-1, keepdim=True)
    return (scores - best).div_(temperatures.to(scores.dtype).clamp(min=least)[:, None])


def _sorted(scores: Tensor) -> Tensor:
    """Scores in ascending order. On the CPU numpy takes a tenth of the time of torch, which also tracks indices."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(dim=-1).values
