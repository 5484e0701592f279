"""Keyed randomness: every random number is a hash of its purpose, so none depends on batching or on the order of draws.

There is no global generator. The bits are the same on every device.
"""

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.candidates import KeptTokens
from engine.sampling.hashing import (
    BLOCK,
    FIRST_CLOCK_SALT,
    GOLDEN,
    SECOND_CLOCK_SALT,
    SECOND_TOKEN_SALT,
    mix_int,
    mix_tensor,
    signed,
)
from engine.sampling.long_row import Numbers
from engine.sampling.race import BlockNoise
from engine.sampling.token_race import TokenNoise

# Streams of a sequence's randomness (architecture R5). Stream 0 is keyed by absolute position and token: draft and
# target share it, and therefore agree. The other keys also contain the committed length at the round's start, because
# block verification uses the noise of positions that it then discards.
TARGET_STREAM = 0  # the target's own sample, under `match`
DRAFT_STREAM = 1
COIN_STREAM = 2  # whether a draft is accepted
RESIDUAL_STREAM = 3  # the recovered or bonus token
SIBLING_STREAMS = 4  # and up: two streams for each rank of siblings behind the first, a draft's and a coin's

DENSE_NOISE_LIMIT = 16_384  # tokens; for a larger vocabulary the noise is made in blocks, and most of it never


def sequence_key(seed: int, prompt_index: int, choice_index: int) -> int:
    """The key of one sequence's randomness, signed 64-bit. The prompts and choices of one seed get different keys."""
    key = mix_int(seed)
    for index in (prompt_index, choice_index):
        key = mix_int(key + GOLDEN * (index + 1))
    return signed(key)


def stream_key(key: int, stream: int, start: int | None = None) -> int:
    """The key of one stream of a sequence, signed 64-bit. start: committed length at the round's start."""
    key = mix_int(key + GOLDEN * (stream + 1))
    return signed(key if start is None else mix_int(key + GOLDEN * (start + 1)))


@lru_cache(maxsize=4096)
def target_key(key: int) -> int:
    """The key of TARGET_STREAM, which is the same in all rounds of a sequence."""
    return stream_key(key, TARGET_STREAM)


def sibling_stream(stream: int, rank: int) -> int:
    """The stream in place of DRAFT_STREAM or COIN_STREAM for drafts that have `rank` siblings before them."""
    return SIBLING_STREAMS + 2 * (rank - 1) + (stream == COIN_STREAM) if rank else stream


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), fp64. int64 keys and positions are broadcast to the result's shape."""
    bits = _row_keys(keys, positions)
    return bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)


class Race(Protocol):
    """Draws tokens by adding Gumbel noise to scores. The same noise serves several draws for the same rows."""

    def run(self, scores: Tensor, rows: Seq[int]) -> Tensor:
        """Ids [n] for `rows` [n], drawn from softmax(scores / temperature) as argmax(scores + temperature · noise).

        scores [n, vocab'] in fp32 or fp64, −inf for excluded tokens; vocab' ≤ vocab_size. Ties take the lowest id.
        """
        ...


class GumbelRace:
    """A race on the CPU. Keys and positions [R] int64, temperatures [R] fp64, positive.

    The noise is made once and used for several draws: by the draft and by the target for the same row.
    """

    def __init__(self, keys: Tensor, positions: Tensor, temperatures: Tensor, vocab_size: int) -> None:
        kind = BlockNoise if vocab_size > DENSE_NOISE_LIMIT else TokenNoise
        self._noise: BlockNoise | TokenNoise = kind(keys, positions, temperatures, vocab_size)

    def run(self, scores: Tensor, rows: Seq[int], above: Seq[float] | Numbers | None = None) -> Tensor:
        """As Race.run. above [n]: only tokens with higher scores run."""
        limits = None if above is None else np.array(above, scores.numpy().dtype)
        return torch.from_numpy(self._noise.race(scores, np.array(rows), limits))

    def run_kept(self, kept: KeptTokens, rows: Seq[int]) -> Tensor:
        """As run(), where only the kept tokens are left. Token 0 for a row without any."""
        if not kept.rows.size:
            return torch.zeros(len(rows), dtype=torch.int64)
        return torch.from_numpy(self._noise.race_few(np.array(rows)[kept.rows], kept, len(rows)))

    def keys(self, rows: Seq[int]) -> NDArray[np.uint64] | None:
        """The key [n] that each row's hashes are made of. None: the noise is made in blocks."""
        return self._noise.keys[np.array(rows)] if isinstance(self._noise, TokenNoise) else None

    def noise(self, tokens: Tensor, rows: Seq[int]) -> Tensor:
        """What run() adds to the scores of tokens [n, m], fp64."""
        places = np.repeat(np.array(rows), tokens.shape[1])
        return torch.from_numpy(self._noise.noise(places, tokens.flatten().numpy())).view(tokens.shape)


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [R, vocab_size], fp64, keyed by (keys [R], positions [R], token id).

    The noise is −log of a token's exponential clock. In a small vocabulary each clock is a hash of its own. In a large
    one the earliest clocks of each block of tokens are made first (_block_clocks), so that a race need not make the
    others. Within each of the two ways a token's noise does not depend on the vocabulary's size.
    """
    rows = _row_keys(keys, positions)[:, None]
    if vocab_size > DENSE_NOISE_LIMIT:
        return _log_(_block_clocks(rows, vocab_size)).neg_()
    ids = torch.arange(1, vocab_size + 1, device=keys.device) * signed(GOLDEN)
    return _log_(_clocks(mix_tensor(rows + ids))).neg_()


def _block_clocks(rows: Tensor, vocab_size: int) -> Tensor:
    """Clocks [R, vocab_size] of rows [R, 1], made per block of 32 tokens.

    The earliest clock is exponential with rate 32, and each token has it with equal chance. The second exceeds it by an
    exponential with rate 31, and each other token has it with equal chance. The rest exceed the second by exponentials
    of their own. The exponential law has no memory, so together they are 32 independent exponentials.
    """
    ids = torch.arange(vocab_size, device=rows.device)
    numbers = torch.arange(1, -(-vocab_size // BLOCK) + 1, device=rows.device) * signed(GOLDEN)
    bits = mix_tensor(mix_tensor(rows ^ signed(FIRST_CLOCK_SALT)) + numbers)  # [R, blocks]
    first = _clocks(bits.clone()).div_(BLOCK)
    second = first + _clocks(mix_tensor(bits + signed(SECOND_CLOCK_SALT))).div_(BLOCK - 1)
    first_offset = bits % BLOCK  # within the block
    second_offset = (
        first_offset + 1 + _unsigned_remainder(mix_tensor(bits + signed(SECOND_TOKEN_SALT)), BLOCK - 1)
    ) % BLOCK
    block, offset = ids // BLOCK, ids % BLOCK
    clocks = _clocks(mix_tensor(rows + (ids + 1) * signed(GOLDEN)))
    clocks.masked_fill_(offset == second_offset[:, block], 0.0).add_(second[:, block])
    return torch.where(offset == first_offset[:, block], first[:, block], clocks)


def _unsigned_remainder(bits: Tensor, divisor: int) -> Tensor:
    """The remainder of the 64 bits, read as an unsigned number."""
    return (bits % divisor + (bits < 0) * (2**64 % divisor)) % divisor


def argmax(scores: Tensor) -> Tensor:
    """[R, vocab] → [R], the lowest id among equals. On the CPU numpy takes a tenth of the time of torch."""
    if scores.device.type == "cpu" and scores.dtype is not torch.bfloat16:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def are_finite(scores: Tensor, tokens: Tensor) -> Tensor:
    """[R] bool: whether each row's score [R, vocab] of its token [R] is finite. On the CPU."""
    return torch.from_numpy(np.isfinite(scores.numpy()[np.arange(len(tokens)), tokens.numpy()]))


def _row_keys(keys: Tensor, positions: Tensor) -> Tensor:
    return mix_tensor(keys + signed(GOLDEN) * (positions + 1))


def _clocks(bits: Tensor) -> Tensor:
    """Standard exponentials from the upper 52 bits, in place. With 53 bits a uniform number could round to 1."""
    uniform = bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return _log_(uniform).neg_()


def _log_(x: Tensor) -> Tensor:
    """The logarithm, in place. On the CPU numpy takes a third of the time of torch, and BlockNoise uses it too."""
    if x.device.type == "cpu":
        np.log(x.numpy(), out=x.numpy())
        return x
    return x.log_()
