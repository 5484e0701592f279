"""Which drafts are kept. Pure functions of the drafts and the target's own draws; vectorised over a ragged batch.

Vocabulary: accepted (drafts kept), recovered (the target's token after the first rejection), bonus (its token after k
acceptances), emitted (all of them).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided, on the host: one entry per sequence, in the round's order."""

    accepted: list[int]
    emitted: list[list[int]]  # accepted drafts, then the recovered or bonus token
    bad: list[bool]  # a token of `emitted` was drawn from logits that are not finite: the sequence cannot go on
    illegal: int  # sequences whose draft held an id outside the vocabulary


def match(drawn: Tensor, finite: Tensor, drafts: Tensor | None, ks: Seq[int], vocab_size: int) -> Verdict:
    """Accept drafts while they equal what the target itself drew for their position (architecture R6).

    drawn [R]: the target's draws, sequence-major, k + 1 per sequence; finite [R] bool: whether each came from a finite
    score. drafts [B, max k]: row i holds k[i] ids, then anything; None when every k is 0. The emitted tokens are the
    target's own draws whatever was drafted; so the text cannot depend on the drafts, and an illegal id costs its own
    sequence's draft and nothing else.

    Example: drawn (7, 3, 9, 4), drafts (7, 3, 5), k = 3: two accepted, emitted (7, 3, 9).
    """
    if drafts is None:
        tokens, good = torch.stack([drawn, finite]).tolist()
        return Verdict([0] * len(ks), [[token] for token in tokens], [not g for g in good], 0)
    depth = drafts.shape[1]
    tables = _padded(torch.stack([drawn, finite]), ks, depth)  # [2, B, depth + 1]
    agrees = drafts == tables[0, :, :-1]
    outside = drafts.clamp(0, vocab_size - 1) != drafts
    if min(ks) < depth:
        proposed = torch.arange(depth, device=drawn.device) < torch.tensor(ks, device=drawn.device)[:, None]
        agrees, outside = agrees & proposed, outside & proposed
    accepted = agrees.cumprod(1).sum(1, keepdim=True)
    illegal = outside.any(1, keepdim=True)
    # The round's one device-to-host copy.
    rows = torch.cat([accepted, illegal, tables[0], tables[1]], 1).tolist()
    return Verdict(
        accepted=[row[0] for row in rows],
        emitted=[row[2 : 3 + row[0]] for row in rows],
        bad=[not all(row[3 + depth : 4 + depth + row[0]]) for row in rows],
        illegal=sum(row[1] for row in rows),
    )


def _padded(values: Tensor, ks: Seq[int], depth: int) -> Tensor:
    """[2, R] sequence-major → [2, B, depth + 1], the last row repeated where a sequence has fewer."""
    if all(k == depth for k in ks):
        return values.view(2, len(ks), depth + 1)
    index, offset = [], 0
    for k in ks:
        index.append([offset + min(j, k) for j in range(depth + 1)])
        offset += k + 1
    return values[:, torch.tensor(index, device=values.device)]
