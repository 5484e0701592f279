"""Rejection and block verification of chains as one operation on the device: from both laws to the emitted token's law.

On CUDA they are the Triton kernels of decide_kernel.py, on a CPU for fp32 the compiled code of cpu_laws.py. Elsewhere,
without Triton or without Numba, they are the references: torch operations of fixed shapes that never wait for the
device.
"""

import numpy as np
import torch
from torch import Tensor

from engine.kernels.operations import operation
from engine.models.compiled import compiled_module
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


def _compiled_decide_chains(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    lenience: Tensor | None,
    keys: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor] | None:
    kernels = compiled_module("cpu_laws")
    if kernels is None or not logp.dtype == logq.dtype == torch.float32:
        return None
    (count, depth), vocab = drafts.shape, logp.shape[2]
    laws = (np.ascontiguousarray(law.numpy()).reshape(-1, vocab) for law in (logp, logq))
    scales = np.zeros(count, np.float32) if lenience is None else -np.log(lenience.numpy().astype(np.float32))
    accepted, overlaps = np.empty(count, np.int64), np.empty((count, depth), np.int64)
    out = accepted, np.empty((count, vocab), np.float32), overlaps
    coins = _coins(drafts, keys, ends).numpy()
    kernels.decide(*laws, np.ascontiguousarray(drafts.numpy()), lengths.numpy(), scales, coins, lenience is None, out)
    made = tuple(map(torch.from_numpy, out))
    return made[0], made[1], made[2]


@operation("decide_kernel.decide", compiled=_compiled_decide_chains, shapes=_decide_chains_shapes)
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
    token; overlaps [N, K] int64, in millionths: see acceptance.overlaps; 0 or the overlap for drafts that were not
    tried).
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
    coins = _coins(drafts, keys, ends)
    if lenience is None:
        law = acceptance.block(logp, logq, legal, lengths)
        accepted = acceptance.last_success(law.chances, coins)
    else:
        law = acceptance.rejection(logp, logq, legal, lengths, lenience)
        accepted = acceptance.first_failure(law.chances, coins)
    weights = acceptance.emitted_law(logp, logq, law.log_scales, accepted, lengths)
    return accepted, weights, acceptance.overlaps(logp, logq, lenience)


def _coins(drafts: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
    return noise.uniforms(keys[:, None], ends[:, None] + torch.arange(drafts.shape[1], device=drafts.device))
