"""Chains of a draft model on a CPU that one call of compiled code draws, behind the pass that reads the gaps.

Where one sequence needs more than that, all chains of the round are drawn operation by operation: with filters or
adjustments, with laws, and at a temperature where the vocabulary's noise is made in blocks (noise.py). Such models are
large enough for their arithmetic to count most.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.device.round_clock import Forward, mark
from engine.drafters.base import Draft, DraftBatch
from engine.models.chain_code import ChainCode, ChainDraw, ChainRows
from engine.models.runner import Runner


def draw_compiled(
    code: ChainCode, runner: Runner, batch: DraftBatch, ks: Seq[int], active: Seq[int], logits: Tensor
) -> Draft | None:
    """The chains of the active sequences, indices in the batch, and what the model reads to draw them. None: they must
    be drawn operation by operation.

    ks: drafts of each sequence of the batch. logits [active, vocab] of the first drafts. The memory for what is read is
    reserved.
    """
    depths, coupled = [ks[i] for i in active], all(batch.sequences[i].coupled for i in active)
    if len(active) > code.most_rows or any(batch.confidences) or not coupled:
        return None
    order = sorted(range(len(active)), key=lambda n: -depths[n])
    indices, depths = [active[n] for n in order], [depths[n] for n in order]
    places = [(column, s) for s, depth in enumerate(depths) for column in range(depth)]
    noise = batch.sampler.noise_keys([batch.sampler.offsets[indices[s]] + column for column, s in places])
    if noise is None:
        return None
    keys = np.zeros((depths[0], len(order)), np.uint64)
    keys[tuple(zip(*places, strict=True))] = noise
    temperatures = np.array([batch.sequences[i].params.temperature for i in indices])
    sequences = [batch.sequences[i] for i in indices]
    cache, began = runner.cache, mark(runner.device)
    rows = ChainRows([cache.slot(s.handle) for s in sequences], [cache.length(s.handle) for s in sequences], depths)
    scores = logits.float()
    if order != list(range(len(order))):
        scores = scores[order]
    tokens = code.draw(rows, ChainDraw(scores.contiguous(), keys, temperatures), runner.chain_states(sequences))
    for sequence, depth in zip(sequences, depths, strict=True):
        cache.extend(sequence.handle, depth - 1)
    read = sum(depths) - len(depths)
    runner.forwards.append(Forward(began, mark(runner.device), read))
    table = np.zeros((len(ks), depths[0]), np.int64)
    table[indices] = tokens.T
    drawn = [0] * len(ks)
    for i, depth in zip(indices, depths, strict=True):
        drawn[i] = depth
    return Draft(tuple(drawn), torch.from_numpy(table), steps=depths[0] - 1, read=read)
