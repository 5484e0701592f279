"""Rejection and block verification of chains as one operation on the device: from both laws to the emitted token's law.

On CUDA they are the Triton kernels of decide_kernel.py. Elsewhere, and without Triton, they are the references: torch
operations of fixed shapes that never wait for the device.
"""

import torch
from torch import Tensor

from engine.kernels.operations import operation
from engine.sampling import acceptance, noise


def _decide_chains_shapes(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    lenience: Tensor | None,
    keys: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(lengths), logp.new_empty(logp.shape[0], logp.shape[2]), drafts.new_empty(drafts.shape)


@operation("decide_kernel.decide", shapes=_decide_chains_shapes)
def decide_chains(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    lenience: Tensor | None,
    keys: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which drafts of N chains are kept, by rejection or block verification (engine/sampling/acceptance.py).

    logp [N, K + 1, vocab] and logq [N, K, vocab] in fp32 or fp64: log-laws of the target and of the drafts. drafts [N,
    K] int64: ids; an id outside of the vocabulary has logq −inf everywhere. lengths [N] int64: k of each sequence.
    lenience [N] fp64: of rejection; None: block verification. keys and ends [N] int64: key and position of each
    sequence's first coin.

    Returns (accepted [N] int64: number of accepted drafts; weights [N, vocab]: log-weights of the recovered or bonus
    token; overlaps [N, K] int64, in millionths: see acceptance.overlaps).
    """
    return decide_reference(logp, logq, drafts, lengths, lenience, keys, ends)


def decide_reference(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    lenience: Tensor | None,
    keys: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of decide_chains()."""
    legal = drafts.clamp(0, logp.shape[-1] - 1)
    coins = noise.uniforms(keys[:, None], ends[:, None] + torch.arange(drafts.shape[1], device=drafts.device))
    if lenience is None:
        law = acceptance.block(logp, logq, legal, lengths)
        accepted = acceptance.last_success(law.chances, coins)
    else:
        law = acceptance.rejection(logp, logq, legal, lengths, lenience)
        accepted = acceptance.first_failure(law.chances, coins)
    weights = acceptance.emitted_law(logp, logq, law.log_scales, accepted, lengths)
    return accepted, weights, acceptance.overlaps(logp, logq, lenience)
