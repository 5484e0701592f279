"""Draws of rows whose filters keep few tokens, on the CPU: no scores are made for the others."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.device.staging import RoundNumbers
from engine.kernels.decide import decide_chains
from engine.kernels.laws import draft_laws, log_law
from engine.sampling.adjustments import take
from engine.sampling.candidates import LONG_ROW, NO_TOKENS, CutRows, Cuts, cut_rows, removed_up_to
from engine.sampling.filters import SHORT_ROW, Filters, cuts_of, truncated_rows
from engine.sampling.noise import GumbelRace, are_finite
from engine.types import SamplingParams

TOKENS = 2 * SHORT_ROW  # of a row that is not sorted whole


def draw_kept(
    logits: Tensor,
    cuts: Cuts,
    filters: Callable[[], Filters],
    race: GumbelRace,
    runners: Seq[int],
    numbers: RoundNumbers,
) -> tuple[Tensor, Tensor]:
    """(token ids [R], whether each one's score is finite), from logits [R, vocab].

    filters: of these rows, for those whose cut is not clear; only these get scores. runners: the number of each row in
    the race.
    """
    if logits.shape[1] > LONG_ROW:
        logits = logits.contiguous()
        cut = cut_rows(logits, cuts)
    else:
        lasts = removed_up_to(logits, cuts)
        if not np.isnan(lasts).any():
            return race.run(logits, runners, lasts), torch.ones(len(runners), dtype=torch.bool)
        cut = CutRows.of(lasts)
    drawn, finite = race.run_kept(cut.kept, runners), torch.ones(len(runners), dtype=torch.bool)
    if cut.last_removed:
        picked, last = list(cut.last_removed), list(cut.last_removed.values())
        drawn[picked] = race.run(take(logits, picked, numbers), [runners[n] for n in picked], last)
    if cut.left:
        index = torch.tensor(cut.left)
        found = CutRows(NO_TOKENS, {}, list(range(len(cut.left))))
        scores = truncated_rows(logits[index], filters().pick(index), found)
        drawn[index] = race.run(scores, [runners[n] for n in cut.left])
        finite[index] = are_finite(scores, drawn[index])
    return drawn, finite


def compile_draws() -> None:
    """Compile what draws on the CPU use, so that no request waits for it."""
    logits, one, warm = torch.zeros(1, TOKENS), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    GumbelRace(one, one, warm, TOKENS).run(logits, [0])
    laws = log_law(logits, warm)[None]
    decide_chains(laws.expand(1, 2, -1), draft_laws(laws, None, one[None], laws), one[None], one, warm, one, one)
    removed_up_to(logits, cuts_of(Filters.make([SamplingParams(top_p=0.5)], TOKENS, logits.device), TOKENS))
