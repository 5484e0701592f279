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
    illegal: int  # sequences whose draft held an id outside the vocabulary


def match(drawn: Tensor, drafts: Tensor | None, ks: Seq[int], vocab_size: int) -> Verdict:
    """Accept drafts while they equal what the target itself drew for their position (architecture R6).

    drawn [R]: the target's draws, sequence-major, k + 1 per sequence. drafts [B, max k]: row i holds k[i] ids, then
    anything; None when every k is 0. The emitted tokens are the target's own draws whatever was drafted; so the text
    cannot depend on the drafts, and an illegal id costs its own sequence's draft and nothing else.

    Example: drawn (7, 3, 9, 4), drafts (7, 3, 5), k = 3: two accepted, emitted (7, 3, 9).
    """
    if drafts is None:
        return Verdict([0] * len(ks), [[token] for token in drawn.tolist()], 0)
    depth = drafts.shape[1]
    table = _padded(drawn, ks, depth)  # [B, depth + 1]
    proposed = torch.arange(depth, device=drawn.device) < torch.tensor(ks, device=drawn.device)[:, None]
    agrees = (drafts == table[:, :-1]) & proposed
    accepted = agrees.cumprod(1).sum(1)
    illegal = (((drafts < 0) | (drafts >= vocab_size)) & proposed).any(1)
    # The round's one device-to-host copy.
    rows = torch.cat([accepted[:, None], illegal[:, None], table], 1).tolist()
    return Verdict(
        accepted=[row[0] for row in rows],
        emitted=[row[2 : 3 + row[0]] for row in rows],
        illegal=sum(row[1] for row in rows),
    )


def _padded(drawn: Tensor, ks: Seq[int], depth: int) -> Tensor:
    """[R] sequence-major → [B, depth + 1], the last row repeated where a sequence has fewer."""
    if all(k == depth for k in ks):
        return drawn.view(len(ks), depth + 1)
    index, offset = [], 0
    for k in ks:
        index.append([offset + min(j, k) for j in range(depth + 1)])
        offset += k + 1
    return drawn[torch.tensor(index, device=drawn.device)]
