"""Collects the laws that a round's drafts were drawn from, for the sequences that share a verifier."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.device.staging import Staged
from engine.drafters.base import Draft, DraftBatch
from engine.kernels import laws as law_kernels
from engine.trees import Parents


def draft_laws(batch: DraftBatch, draft: Draft, indices: Seq[int], drafts: Tensor, logp: Tensor) -> Tensor:
    """log q [N, K, vocab] of the drafts [N, K] of these sequences, in the dtype and vocabulary of logp.

    A draft without a law gets a one-hot one: see acceptance.fill_one_hot().
    """
    if draft.logq is None:
        return law_kernels.draft_laws(None, None, drafts, logp)
    rows = [draft.logq_rows.get(i, law_kernels.NO_LAW) for i in indices]
    if rows == list(range(len(draft.logq))):
        return law_kernels.draft_laws(draft.logq, None, drafts, logp)
    return law_kernels.draft_laws(draft.logq, put_law_rows(batch, rows).tensor, drafts, logp)


def put_law_rows(batch: DraftBatch, rows: Seq[int]) -> Staged:
    """The row of each sequence's law in the drafter's table; NO_LAW: it has none."""
    return batch.sampler.numbers.index(rows)


def expected_law_rows(batch: DraftBatch, ks: Seq[int], trees: Mapping[int, Parents], indices: Seq[int]) -> list[int]:
    """The rows that a draft model's laws of these sequences will have. Beside trees those of chains with a confidence
    come first (joining_chains). The rows of another drafter's laws differ, and take a copy of their own."""
    with_law = [i for i, k in enumerate(ks) if k and not batch.sequences[i].coupled]
    if trees and batch.confidences:
        with_law.sort(key=lambda i: i in trees or not batch.confidences[i])
    rows = {i: row for row, i in enumerate(with_law)}
    return [rows.get(i, law_kernels.NO_LAW) for i in indices]
