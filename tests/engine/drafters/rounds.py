"""Rounds without an engine: batches of sequences, and verdicts on what was offered."""

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import torch

from engine.drafters.base import Draft, DraftBatch, Drafter
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence


def make_batch(*sequences: Sequence) -> DraftBatch:
    """A round of these. Only a model draws with the sampler, so it has no rows."""
    return DraftBatch(sequences, Sampler((), [], 1, torch.device("cpu")))


def make_verdict(*accepted: int) -> Any:
    """As far as drafters look at it."""
    return SimpleNamespace(accepted=list(accepted))


def rows(draft: Draft) -> list[list[int]]:
    """The tokens offered for each sequence."""
    table = [[] for _ in draft.ks] if draft.tokens is None else draft.tokens.tolist()
    return [row[:k] for row, k in zip(table, draft.ks, strict=True)]


def play(drafter: Drafter, sequence: Sequence, output: Seq[int], k: int) -> list[tuple[int, int]]:
    """Greedy rounds of one sequence whose target emits `output`: (offered, accepted) of each."""
    played: list[tuple[int, int]] = []
    done = 0
    while done < len(output):
        batch = make_batch(sequence)
        (offered,) = rows(drafter.propose(batch, [min(k, len(output) - done - 1)]))
        accepted = 0
        while accepted < len(offered) and offered[accepted] == output[done + accepted]:
            accepted += 1
        drafter.observe(batch, make_verdict(accepted))
        sequence.tokens += output[done : done + accepted + 1]
        done += accepted + 1
        played.append((len(offered), accepted))
    return played
