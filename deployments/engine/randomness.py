"""Keyed randomness: every number is a hash of what it is for, so nothing depends on batching or on draw order.

splitmix64's finaliser over signed 64-bit integers (Steele, Lea, Flood 2014), in plain int64 tensor operations: the same
bits on every device. There is no global generator.
"""

import numpy as np
import torch
from torch import Tensor

TARGET_STREAM = 0  # the target's own sample; the draft uses the same noise, which is what makes it agree (match)

_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def sequence_key(seed: int, prompt_index: int, choice_index: int) -> int:
    """The key of one sequence's noise; prompt lists and n > 1 draw apart under one seed. Signed 64-bit."""
    key = _mix_int(seed)
    for index in (prompt_index, choice_index):
        key = _mix_int(key + _GOLDEN * (index + 1))
    return _signed(key)


def stream_key(key: int, stream: int) -> int:
    """The key of one of a sequence's streams. Signed 64-bit."""
    return _signed(_mix_int(key + _GOLDEN * (stream + 1)))


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [R, vocab_size], fp64, keyed by (keys [R], positions [R], token id).

    argmax(log p + noise) is a draw from p (the Gumbel-max trick; −log of the exponential race's clock). A token's noise
    does not depend on the vocabulary's size. Works in place: at [40, 4096] fresh memory would cost more than the sums.
    """
    rows = _mix_(keys + _signed(_GOLDEN) * (positions + 1))  # [R]
    ids = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GOLDEN)  # [V]
    bits = _mix_(rows[:, None] + ids)  # [R, V]
    bits = bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    uniform = bits.double().add_(0.5).mul_(2.0**-52)  # in (0, 1); with 53 bits the largest would round to 1
    return _log_(_log_(uniform).neg_()).neg_()


def _log_(x: Tensor) -> Tensor:
    """In place. On CPU numpy's fp64 logarithm takes a third of the time of torch's."""
    if x.device.type == "cpu":
        np.log(x.numpy(), out=x.numpy())
        return x
    return x.log_()


def _mix_(z: Tensor) -> Tensor:
    """splitmix64's finaliser in place, with logical shifts."""
    shifted = torch.empty_like(z)
    for shift, factor in ((30, _A), (27, _B), (31, None)):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            z.mul_(_signed(factor))
    return z


def _mix_int(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _A) & _MASK
    z = ((z ^ (z >> 27)) * _B) & _MASK
    return z ^ (z >> 31)
