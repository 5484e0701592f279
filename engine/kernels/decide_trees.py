"""Rejection on draft trees as one operation on the device: from both laws to the emitted token's law.

On CUDA it is the Triton kernels of decide_trees_kernel.py. Elsewhere, and without Triton, it is the reference: torch
operations of fixed shapes that never wait for the device.
"""

import torch
from torch import Tensor

from engine.kernels.operations import operation
from engine.sampling import acceptance, noise
from engine.sampling.tree_acceptance import NONE


def _decide_trees_shapes(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    parents: Tensor,
    lenience: Tensor,
    keys: Tensor,
    positions: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = drafts.new_empty(drafts.shape[0])
    return count, torch.empty_like(count), logp.new_empty(logp.shape[0], logp.shape[2]), drafts.new_empty(drafts.shape)


@operation("decide_trees_kernel.decide", shapes=_decide_trees_shapes)
def decide_trees(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    parents: Tensor,
    lenience: Tensor,
    keys: Tensor,
    positions: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which nodes of N trees are kept by rejection, sibling by sibling (engine/sampling/tree_acceptance.py).

    logp [N, K + 1, vocab] and logq [N, K, vocab] in fp32 or fp64: log-laws of the target at each row and of each node.
    drafts [N, K] int64: ids; an id outside of the vocabulary has logq −inf everywhere. parents [N, K] int64: the row of
    each node's parent, which is at most the node's own number; NONE: no node. lenience [N] fp64. keys and positions [N,
    K] int64: they give each node's coin. width: no row has more children.

    Returns (last_rows [N] int64: see DeviceVerdict; accepted [N] int64: number of accepted drafts; weights [N, vocab]:
    log-weights of the recovered or bonus token; overlaps [N, K] int64: see acceptance.overlaps; NONE for no node).
    """
    return decide_trees_reference(logp, logq, drafts, parents, lenience, keys, positions, width)


def decide_trees_reference(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    parents: Tensor,
    lenience: Tensor,
    keys: Tensor,
    positions: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The definition of decide_trees(): a node comes behind its parent and its earlier siblings, so that one pass over
    the nodes tries them in their order."""
    count, size, vocab = logq.shape
    each, legal = torch.arange(count, device=logq.device), drafts.clamp(0, vocab - 1)
    coins, scales = noise.uniforms(keys, positions), -lenience.to(logp.dtype).log()[:, None]
    remaining = logp.clone()  # at each row the law that its next child is tried against
    last, accepted, overlaps = torch.zeros_like(each), torch.zeros_like(each), torch.full_like(drafts, NONE)
    for node in range(size):
        parent = parents[:, node]
        row, real = parent.clamp(min=0), parent != NONE
        p, q = remaining[each, row], logq[:, node]
        chances = (acceptance.log_ratios(p, q, legal[:, node]) + scales[:, 0]).clamp(max=0).exp().double()
        goes = (parent == last) & (coins[:, node] < chances)
        last, accepted = torch.where(goes, node + 1, last), accepted + goes
        overlaps[:, node] = torch.where(real, acceptance.shared_mass(p + scales, q), NONE)
        left = acceptance.law_after(p, q, scales).log_softmax(-1)
        remaining[each, row] = torch.where(real[:, None], left, p)
    return last, accepted, remaining[each, last], overlaps
