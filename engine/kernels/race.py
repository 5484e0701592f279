"""Gumbel races as one operation on the device: hash, noise and argmax.

On CUDA it is the Triton kernel of race_kernel.py. Elsewhere, and without Triton, it is race_reference(): a few torch
operations of fixed shapes that never wait for the device.
"""

import torch
from torch import Tensor

from engine.kernels.operations import operation
from engine.sampling.noise import DENSE_NOISE_LIMIT, argmax, gumbel_noise


def _race_shapes(
    scores: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor, blocks: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(keys), torch.empty_like(keys, dtype=torch.bool)


@operation("race_kernel.race", shapes=_race_shapes)
def race(scores: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor, blocks: bool) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(scores / temperature), as argmax(scores + temperature · noise) in fp64.

    scores [R, vocab'] in fp32, fp64, bf16 or fp16; −inf excludes a token. keys and positions [R] int64: they and the
    token's id give its Gumbel noise (engine/sampling/noise.py). temperatures [R] fp64; 0 takes the best score. blocks:
    whether the noise is made in blocks, which holds where the sampler's vocabulary exceeds DENSE_NOISE_LIMIT.

    Returns (tokens [R] int64, whether each token's score is finite [R] bool). Ties take the lowest id. A row without
    allowed tokens gives id 0; a row with NaNs gives the lowest id among them.
    """
    return race_reference(scores, keys, positions, temperatures, blocks)


def race_reference(
    scores: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor, blocks: bool
) -> tuple[Tensor, Tensor]:
    """The definition of race(), from the noise of all tokens."""
    vocab = scores.shape[1]
    # A draft model's vocabulary may be smaller than the sampler's, which decides how the noise is made.
    noise = gumbel_noise(keys, positions, max(vocab, DENSE_NOISE_LIMIT + 1) if blocks else vocab)[:, :vocab]
    tokens = argmax(noise.mul_(temperatures[:, None]).add_(scores))
    return tokens, scores.gather(1, tokens[:, None])[:, 0].abs() < torch.inf
