"""Which nodes of draft trees are kept (engine/trees.py). Pure functions, vectorised over a ragged batch.

Shapes: N sequences, K the largest number of nodes among them. A sequence has a row for its root, 0, and one for each of
its nodes: node v has row v + 1. logp [N, K + 1, vocab]: row r is the log of the target's law p for the token after the
drafts on the row's path. logq [N, K, vocab]: entry v is the log of the law q that node v was drawn from, given its
siblings before it. drafts [N, K]: ids within the vocabulary. Entries beyond a sequence's nodes are ignored.

A round walks from the root down. At each row it tries the row's children in their order and goes on at the first one
that passes.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staged
from engine.sampling import acceptance
from engine.trees import Parents, depths, ranks

NONE = -1


@dataclass(frozen=True, slots=True)
class TreeTable:
    """The shapes of N trees. Tensors are int64, on the device."""

    parent_rows: Tensor  # [N, K] row of each node's parent; NONE: no node
    depths: Tensor  # [N, K + 1] number of drafts on each row's path
    last_children: Tensor  # [N, K + 1] each row's last child; NONE: it has none
    by_rank: tuple[Tensor, ...]  # entry r [3, M]: all nodes of rank r, as (sequence, node, sibling before it)
    height: int  # the largest depth

    @classmethod
    def put(cls, trees: Seq[Parents], numbers: RoundNumbers) -> Staged:
        """The numbers of the table, on their way to the device."""
        return numbers.ints(("trees", tuple(trees)), lambda: [x for part in _numbers(trees) for x in part])

    @classmethod
    def of(cls, trees: Seq[Parents], numbers: RoundNumbers) -> "TreeTable":
        size = max(map(len, trees))
        nodes_of_rank = Counter(rank for parents in trees for rank in ranks(parents))
        parts = [len(trees) * (3 * size + 2), *(3 * nodes_of_rank[rank] for rank in sorted(nodes_of_rank))]
        first, *of_ranks = cls.put(trees, numbers).tensor.split(parts)
        parent_rows, row_depths, last_children = first.view(len(trees), -1).split([size, size + 1, size + 1], 1)
        found = tuple(nodes.view(-1, 3).t() for nodes in of_ranks)
        height = max(max(depths(parents), default=0) for parents in trees)
        return cls(parent_rows, row_depths, last_children, found, height)


def _numbers(trees: Seq[Parents]) -> list[list[int]]:
    """The first three tensors side by side, then each entry of by_rank, transposed."""
    size = max(map(len, trees))
    rows, by_rank = list[int](), list[list[int]]()
    for n, parents in enumerate(trees):
        last = [NONE] * (size + 1)
        for node, (parent, rank) in enumerate(zip(parents, ranks(parents), strict=True)):
            by_rank += [[]] if rank == len(by_rank) else []
            by_rank[rank] += (n, node, last[parent + 1])
            last[parent + 1] = node
        rest = [NONE] * (size - len(parents))
        rows += [*(parent + 1 for parent in parents), *rest, 0, *depths(parents), *rest, *last]
    return [rows, *by_rank]


@dataclass(frozen=True, slots=True)
class TreeLaw:
    """What rejection computes from p, q and the drafts. The coins then decide."""

    chances: Tensor  # [N, K] fp64: probability that a uniform number accepts the node once it is tried; 0 for no node
    overlaps: Tensor  # [N, K] int64: see acceptance.overlaps; NONE for no node
    # [N, K + 1, vocab]: the log of the law that the row's last child is tried against, p if it has at most one child
    remaining: Tensor
    log_scales: Tensor  # [N] the emitted token follows max(scale · remaining − q, 0) if all children are rejected


def rejection(logp: Tensor, logq: Tensor, drafts: Tensor, table: TreeTable, lenience: Tensor) -> TreeLaw:
    """As acceptance.rejection at every row: sibling r is accepted with probability min(1, P_r / (l·q_r)), where P_0 = p
    and P_{r+1} = norm(max(P_r − l·q_r, 0)).

    SpecInfer (Miao et al. 2023, arXiv 2305.09781, Algorithm 2), for siblings drawn independently of each other, also
    from several draft models. RSD (Jeon et al. 2024, arXiv 2402.14160), for siblings drawn without replacement. With
    l = 1 the emitted tokens follow p exactly. With l < 1 no token gets more than p / l: by induction from the last
    sibling back, trying r and what follows gives a token at most P_r / l.
    """
    log_scales = -lenience.to(logp.dtype).log()
    chances = logp.new_zeros(drafts.shape, dtype=torch.float64)
    overlaps = torch.full(drafts.shape, NONE, device=logp.device)
    remaining = logp.clone() if len(table.by_rank) > 1 else logp
    for rank, (n, node, before) in enumerate(table.by_rank):
        rows = table.parent_rows[n, node]
        p, scales = remaining[n, rows], log_scales[n, None]
        if rank:
            p = acceptance.law_after(p, logq[n, before], scales).log_softmax(-1)
            remaining[n, rows] = p
        q = logq[n, node]
        ratios = acceptance.log_ratios(p, q, drafts[n, node])
        chances[n, node] = (ratios + scales[:, 0]).clamp(max=0).exp().double()
        overlaps[n, node] = acceptance.shared_mass(p + scales, q)
    return TreeLaw(chances, overlaps, remaining, log_scales)


def typical(logp: Tensor, drafts: Tensor, legal: Tensor, table: TreeTable, limits: Tensor) -> Tensor:
    """The last row [N] of the longest path on which every draft x is typical: p(x) > min(ε, δ·exp(−H(p))), where p is
    the law behind the drafts before it and H(p) its entropy in nats. If paths are equally long, the first one counts.

    Medusa (Cai et al. 2024, arXiv 2401.10774, section 3.3.1). legal [N, K] bool: whether the id is in the vocabulary.
    limits [N, 2]: ε and δ. The emitted tokens do not follow p: a typical draft is kept whatever its chance was.
    """
    entropies = -(logp.exp() * logp).nan_to_num(0.0).sum(-1)  # 0·log 0 is 0
    epsilon, delta = limits.to(logp.dtype).log()[..., None].unbind(1)
    thresholds = torch.minimum(epsilon, delta - entropies)  # [N, K + 1]
    parents = table.parent_rows.clamp(min=0)
    rows = logp.gather(1, parents[..., None].expand(-1, -1, logp.shape[2]))
    chances = rows.gather(2, drafts[..., None])[..., 0]
    kept = (chances > thresholds.gather(1, parents)) & legal & (table.parent_rows != NONE)
    reached = torch.cat([torch.ones_like(kept[:, :1]), torch.zeros_like(kept)], 1)  # [N, K + 1]
    for _ in range(table.height):
        reached[:, 1:] = kept & reached.gather(1, parents)
    return torch.where(reached, table.depths, NONE).argmax(1)  # argmax: the first of its maxima


def walk(passes: Tensor, table: TreeTable) -> Tensor:
    """The rows [N, height + 1] that a round visits, given whether each node passes once it is tried [N, K] bool. The
    last row is repeated."""
    row = torch.zeros(len(passes), dtype=torch.int64, device=passes.device)
    visited = [row]
    for _ in range(table.height):
        goes = passes & (table.parent_rows == row[:, None])
        row = torch.where(goes.any(1), goes.byte().argmax(1) + 1, row)  # argmax: the first of its maxima
        visited.append(row)
    return torch.stack(visited, 1)


def emitted_law(law: TreeLaw, logq: Tensor, table: TreeTable, last: Tensor) -> Tensor:
    """Log-weights [N, vocab] of the token behind the last visited row [N]: the residual after all of its children, or p
    if it has none."""
    n = torch.arange(len(last), device=last.device)
    child = table.last_children[n, last]
    leaf = (child == NONE)[:, None]
    q = logq[n, child.clamp(min=0)].masked_fill(leaf, -torch.inf)
    return acceptance.law_after(law.remaining[n, last], q, law.log_scales[:, None].masked_fill(leaf, 0))
