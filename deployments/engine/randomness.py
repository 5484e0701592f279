"""Keyed randomness: every number is a hash of what it is for, so nothing depends on batching or on draw order.

There is no global generator, and the bits are the same on every device.
"""

import numpy as np
import torch
from torch import Tensor

from deployments.engine.hashing import BLOCK, BLOCKS_APART, GOLDEN, mix_int, mix_tensor, signed
from deployments.engine.race import pruned_race

# Streams of a sequence's randomness (architecture R5). Stream 0 is keyed by absolute position and token alone: draft
# and target share it, which is what makes them agree. The others also carry the committed length at the round's start,
# since block verification looks at noise of positions that it then discards.
TARGET_STREAM = 0  # the target's own sample, under `match`
DRAFT_STREAM = 1
COIN_STREAM = 2  # whether a draft is accepted
RESIDUAL_STREAM = 3  # the recovered or bonus token

DENSE = 2_000  # scores up to which the plain race is the faster one on CPU


def sequence_key(seed: int, prompt_index: int, choice_index: int) -> int:
    """The key of one sequence's noise; prompt lists and n > 1 draw apart under one seed. Signed 64-bit."""
    key = mix_int(seed)
    for index in (prompt_index, choice_index):
        key = mix_int(key + GOLDEN * (index + 1))
    return signed(key)


def stream_key(key: int, stream: int, start: int | None = None) -> int:
    """The key of one of a sequence's streams; start: committed length at the round's start. Signed 64-bit."""
    key = mix_int(key + GOLDEN * (stream + 1))
    return signed(key if start is None else mix_int(key + GOLDEN * (start + 1)))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), fp64, of the shape that int64 keys and positions broadcast to."""
    bits = _row_keys(keys, positions)
    return bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)


def race(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Token ids [R] drawn from softmax(scores / temperature): argmax(scores + temperature · gumbel_noise).

    scores [R, vocab] in fp32 or fp64, −inf for what cannot be drawn; temperatures [R] fp64, positive; keys and
    positions [R] int64. Ties take the lowest id.
    """
    if scores.device.type == "cpu" and scores.numel() > DENSE:
        return pruned_race(scores, temperatures, keys, positions)
    noise = gumbel_noise(keys, positions, scores.shape[-1])
    return argmax(noise.mul_(temperatures[:, None]).add_(scores))


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [R, vocab_size], fp64, keyed by (keys [R], positions [R], token id).

    It is −log of a token's exponential clock. The clocks of a block of 32 ids are made from the top: the earliest is
    exponential with rate 32, whose it is is uniform, and the others exceed it by exponentials of their own. (The
    exponential law has no memory, so they are independent exponentials all the same.) A token's noise does not depend
    on the vocabulary's size.
    """
    rows = _row_keys(keys, positions)[:, None]
    ids = torch.arange(vocab_size, device=keys.device)
    numbers = torch.arange(1, -(-vocab_size // BLOCK) + 1, device=keys.device) * signed(GOLDEN)
    block_bits = mix_tensor(mix_tensor(rows ^ signed(BLOCKS_APART)) + numbers)[:, ids // BLOCK]
    clocks = _clocks(mix_tensor(rows + (ids + 1) * signed(GOLDEN)))
    clocks.masked_fill_(ids % BLOCK == block_bits % BLOCK, 0.0).add_(_clocks(block_bits).div_(BLOCK))
    return _log(clocks).neg_()


def argmax(scores: Tensor) -> Tensor:
    """[R, vocab] → [R], the lowest id among equals. On CPU numpy's is a tenth of the time of torch's."""
    if scores.device.type == "cpu" and scores.dtype is not torch.bfloat16:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _row_keys(keys: Tensor, positions: Tensor) -> Tensor:
    return mix_tensor(keys + signed(GOLDEN) * (positions + 1))


def _clocks(bits: Tensor) -> Tensor:
    """Standard exponentials, from 52 bits: with 53 the largest uniform number would round to 1."""
    uniform = (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return _log(uniform).neg_()


def _log(x: Tensor) -> Tensor:
    """On CPU numpy's fp64 logarithm takes a third of the time of torch's, and the pruned race uses it too."""
    return torch.from_numpy(np.log(x.numpy())) if x.device.type == "cpu" else x.log()
