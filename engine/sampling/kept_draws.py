"""Draws of rows whose filters keep few tokens, on the CPU: no scores are made for the others."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.device.staging import RoundNumbers
from engine.kernels.decide import decide_chains
from engine.kernels.laws import draft_laws, log_law
from engine.sampling.adjustments import take
from engine.sampling.candidates import NO_TOKENS, CutRows
from engine.sampling.filters import SHORT_ROW, Filters, cut_without_sorting, truncated_rows
from engine.sampling.noise import GumbelRace, are_finite
from engine.types import SamplingParams

TOKENS = 2 * SHORT_ROW  # of a row that is not sorted whole


def draw_kept(
    logits: Tensor, filters: Filters, race: GumbelRace, runners: Seq[int], numbers: RoundNumbers
) -> tuple[Tensor, Tensor]:
    """(token ids [R], whether each one's score is finite), from contiguous logits [R, vocab]. runners: the number of
    each row in the race. Rows that keep many tokens get scores."""
    cut = cut_without_sorting(logits, filters)
    drawn, finite = race.run_kept(cut.kept, runners), torch.ones(len(runners), dtype=torch.bool)
    if cut.last_removed:
        picked, last = list(cut.last_removed), list(cut.last_removed.values())
        drawn[picked] = race.run(take(logits, picked, numbers), [runners[n] for n in picked], last)
    if cut.left:
        index = torch.tensor(cut.left)
        found = CutRows(NO_TOKENS, {}, list(range(len(cut.left))))
        scores = truncated_rows(logits[index], filters.pick(index), found)
        drawn[index] = race.run(scores, [runners[n] for n in cut.left])
        finite[index] = are_finite(scores, drawn[index])
    return drawn, finite


def compile_draws() -> None:
    """Compile what draws on the CPU use, so that no request waits for it."""
    logits, one, warm = torch.zeros(1, TOKENS), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    GumbelRace(one, one, warm, TOKENS).run(logits, [0])
    laws = log_law(logits, warm)[None]
    decide_chains(laws.expand(1, 2, -1), draft_laws(laws, None, one[None], laws), one[None], one, warm, one, one)
    cut_without_sorting(logits, Filters.make([SamplingParams(top_p=0.5)], TOKENS, logits.device))
