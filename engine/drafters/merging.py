"""Joins the drafts of different sequences into one batch."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.transfer import index_tensor
from engine.drafters.base import Draft


def merge_drafts(drafts: Seq[Draft], count: int) -> Draft:
    """Merge drafts into one. At most one of them has tokens for any one sequence. Empty drafts add their steps, fed
    tokens, time and failure. If only one draft has tokens, its tensors are used without a copy."""
    with_tokens = [d for d in drafts if any(d.ks)]
    if not with_tokens:
        merged = Draft.none(count)
    elif len(with_tokens) == 1:
        merged = with_tokens[0]
    else:
        merged = _merge_tensors(with_tokens, count)
    return with_costs_of(merged, drafts)


def with_costs_of(draft: Draft, drafts: Seq[Draft]) -> Draft:
    """The draft with the steps, fed tokens, time and failure of all these together."""
    return replace(
        draft,
        steps=sum(d.steps for d in drafts),
        read=sum(d.read for d in drafts),
        forwards=tuple(forward for d in drafts for forward in d.forwards),
        failed=any(d.failed for d in drafts),
        wants_drawn=any(d.wants_drawn for d in drafts),
    )


def _merge_tensors(drafts: Seq[Draft], count: int) -> Draft:
    owners = [next((d for d in drafts if d.ks[i]), drafts[0]) for i in range(count)]
    ks = tuple(owner.ks[i] for i, owner in enumerate(owners))
    logq, logq_rows = _merge_laws(drafts, max(ks))
    proposers = tuple(owner.proposers[i] if owner.proposers else None for i, owner in enumerate(owners))
    trees = {i: parents for draft in drafts for i, parents in draft.trees.items() if draft.ks[i]}
    return Draft(ks, _merge_tokens(drafts, owners, max(ks)), logq, logq_rows, proposers, trees=trees)


def _merge_tokens(drafts: Seq[Draft], owners: Seq[Draft], depth: int) -> Tensor:
    """[B, depth]: row i comes from the tokens of owners[i]."""
    tables = torch.cat([_resize(d.tokens, depth, 0) for d in drafts if d.tokens is not None])
    start = {id(d): n * len(owners) for n, d in enumerate(drafts)}
    rows = [start[id(owner)] + i for i, owner in enumerate(owners)]
    return tables.index_select(0, index_tensor(rows, tables.device))


def _merge_laws(drafts: Seq[Draft], depth: int) -> tuple[Tensor | None, dict[int, int]]:
    """(logq [n, depth, vocab], logq_rows) of all drafts together."""
    laws: list[Tensor] = []
    rows: dict[int, int] = {}
    first = 0
    for draft in drafts:
        if draft.logq is not None:
            laws.append(_resize(draft.logq.transpose(1, 2), depth, -torch.inf).transpose(1, 2))
            rows |= {i: first + row for i, row in draft.logq_rows.items() if draft.ks[i]}
            first += len(draft.logq)
    return (laws[0] if len(laws) == 1 else torch.cat(laws) if laws else None), rows


def _resize(values: Tensor, depth: int, fill: float) -> Tensor:
    """Cut or fill up the last dimension to `depth` entries."""
    missing = depth - values.shape[-1]
    return F.pad(values, (0, missing), value=fill) if missing > 0 else values[..., :depth]
