"""splitmix64's finaliser (Steele, Lea, Flood 2014): the same bits for Python integers, tensors and numpy arrays."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio: its multiples are well spread
STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # (shift, factor)

FEW_ROWS = 32  # that are hashed in Python: NumPy's ten operations take 19 µs, and behind a model's weights 100
BLOCK = 32  # neighbouring token ids whose two earliest clocks have hashes of their own, see noise.py
# They make three independent hashes from one key: digits of √2, √3 and √5.
FIRST_CLOCK_SALT, SECOND_CLOCK_SALT, SECOND_TOKEN_SALT = 0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B


def signed(x: int) -> int:
    """The low 64 bits as a signed integer, as tensors hold them."""
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def mix_int(z: int) -> int:
    """The hash of a Python integer."""
    z &= MASK
    for shift, factor in STEPS:
        z = ((z ^ (z >> shift)) * factor) & MASK
    return z


def mix_tensor(z: Tensor) -> Tensor:
    """The hashes of an int64 tensor, in place: at [40, 4096] new memory would cost more than the arithmetic."""
    shifted = torch.empty_like(z)
    for shift, factor in STEPS:
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(signed(factor))
    return z


def mix_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hashes of an array."""
    bits = z.copy()
    mix_in_place(bits, np.empty_like(bits), STEPS)
    return bits


def row_keys(keys: Tensor, positions: Tensor) -> NDArray[np.uint64]:
    """The hash [R] of each row's key and position, int64 [R] on the CPU: the key of the hashes of its tokens."""
    if len(keys) <= FEW_ROWS:
        numbers = zip(keys.numpy().tolist(), positions.numpy().tolist(), strict=True)
        return np.array([mix_int(key + (position + 1) * GOLDEN) for key, position in numbers], np.uint64)
    return mix_array(keys.numpy().view(np.uint64) + (positions.numpy() + 1).view(np.uint64) * np.uint64(GOLDEN))


def mix_in_place(bits: NDArray[np.uint64], shifted: NDArray[np.uint64], steps: Seq[tuple[int, int]]) -> None:
    """Take these of the STEPS. shifted: scratch memory of the same shape."""
    for shift, factor in steps:
        np.right_shift(bits, np.uint64(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        if factor != 1:
            np.multiply(bits, np.uint64(factor), out=bits)
