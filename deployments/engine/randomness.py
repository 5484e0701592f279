"""Keyed randomness: every number is a hash of what it is for, so nothing depends on batching or on draw order.

splitmix64's finaliser over signed 64-bit integers (Steele, Lea, Flood 2014), in plain int64 operations: the same bits
on every device. There is no global generator.
"""

import numpy as np
import torch
from torch import Tensor

# Streams of a sequence's randomness (architecture R5). Stream 0 is keyed by absolute position and token alone: draft
# and target share it, which is what makes them agree. The others also carry the committed length at the round's start,
# since block verification looks at noise of positions that it then discards.
TARGET_STREAM = 0  # the target's own sample, under `match`
DRAFT_STREAM = 1
COIN_STREAM = 2  # whether a draft is accepted
RESIDUAL_STREAM = 3  # the recovered or bonus token

BLOCK = 32  # neighbouring token ids whose earliest clock has a hash of its own
DENSE = 16_384  # scores up to which the plain race is the faster one
FAVOURITES = 8  # blocks of a row that are run at once; the winner is nearly always among them

_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = 0x9E3779B97F4A7C15
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCKS_APART = _signed(0x6A09E667F3BCC909)  # turns a row's key into that of its blocks


def sequence_key(seed: int, prompt_index: int, choice_index: int) -> int:
    """The key of one sequence's noise; prompt lists and n > 1 draw apart under one seed. Signed 64-bit."""
    key = _mix_int(seed)
    for index in (prompt_index, choice_index):
        key = _mix_int(key + _GOLDEN * (index + 1))
    return _signed(key)


def stream_key(key: int, stream: int, start: int | None = None) -> int:
    """The key of one of a sequence's streams; start: committed length at the round's start. Signed 64-bit."""
    key = _mix_int(key + _GOLDEN * (stream + 1))
    return _signed(key if start is None else _mix_int(key + _GOLDEN * (start + 1)))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), fp64, of the shape that int64 keys and positions broadcast to."""
    bits = _mix_(keys + _signed(_GOLDEN) * (positions + 1))
    return bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)


def race(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Token ids [R] drawn from softmax(scores / temperature): argmax(scores + temperature · gumbel_noise).

    scores [R, vocab] in fp32 or fp64, −inf for what cannot be drawn; temperatures [R] fp64, positive. Ties take the
    lowest id. On CPU only the blocks of tokens that can win get their noise: a third of the work, a tenth for 128,000
    tokens, and the same draws.
    """
    if scores.device.type == "cpu" and scores.numel() > DENSE:
        return _pruned_race(scores, temperatures, keys, positions)
    noise = gumbel_noise(keys, positions, scores.shape[-1])
    return noise.mul_(temperatures[:, None]).add_(scores).argmax(-1)


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [R, vocab_size], fp64, keyed by (keys [R], positions [R], token id).

    It is −log of a token's exponential clock. The clocks of a block of 32 ids are made from the top: the earliest is
    exponential with rate 32, whose it is is uniform, and the others exceed it by exponentials of their own. (The
    exponential law has no memory, so they are independent exponentials all the same.) A token's noise does not depend
    on the vocabulary's size.
    """
    rows = _row_keys(keys, positions)
    earliest, first = _block_clocks(rows, -(-vocab_size // BLOCK))
    ids = torch.arange(vocab_size, device=keys.device)
    return _token_noise(rows[:, None], ids, earliest[:, ids // BLOCK], first[:, ids // BLOCK])


def _pruned_race(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The race run block by block: no token of a block beats the block's best score with the block's earliest clock."""
    rows, vocab = _row_keys(keys, positions), scores.shape[-1]
    best = _block_maxima(scores)
    earliest, first = _block_clocks(rows, best.shape[-1])
    bounds = best - temperatures[:, None] * _log(earliest)

    def run(row: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        """(winning score, its token id) of each block [n] of each row [n]."""
        ids = block[:, None] * BLOCK + torch.arange(BLOCK)
        noise = _token_noise(rows[row][:, None], ids, earliest[row, block][:, None], first[row, block][:, None])
        finals = noise.mul_(temperatures[row][:, None]).add_(scores[row[:, None], ids.clamp(max=vocab - 1)])
        places = argmax(finals.masked_fill_(ids >= vocab, -torch.inf))[:, None]
        return finals.gather(1, places)[:, 0], ids.gather(1, places)[:, 0]

    count = min(FAVOURITES, best.shape[-1])
    favourites = bounds.topk(count).indices.sort().values  # by id, so that a tie takes the lowest
    every = torch.arange(len(rows)).repeat_interleave(count)
    finals, ids = (part.view(-1, count) for part in run(every, favourites.flatten()))
    winner = argmax(finals)[:, None]
    finals, ids = finals.gather(1, winner)[:, 0], ids.gather(1, winner)[:, 0]
    row, block = (bounds >= finals[:, None]).scatter_(1, favourites, False).nonzero(as_tuple=True)
    if len(row):
        for r, final, token in zip(row.tolist(), *(part.tolist() for part in run(row, block)), strict=True):
            if final > finals[r] or (final == finals[r] and token < ids[r]):
                finals[r], ids[r] = final, token
    return ids


def _block_maxima(scores: Tensor) -> Tensor:
    """[R, vocab] → [R, blocks], fp64."""
    whole = scores.shape[-1] // BLOCK * BLOCK
    parts = [scores[:, :whole].reshape(len(scores), -1, BLOCK).amax(-1)] if whole else []
    if whole < scores.shape[-1]:
        parts.append(scores[:, whole:].amax(-1, keepdim=True))
    return torch.cat(parts, 1).double()


def _row_keys(keys: Tensor, positions: Tensor) -> Tensor:
    return _mix_(keys + _signed(_GOLDEN) * (positions + 1))


def _block_clocks(rows: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """(earliest clock, fp64; which of the block's ids has it), each [R, blocks]."""
    numbers = torch.arange(1, blocks + 1, device=rows.device) * _signed(_GOLDEN)
    bits = _mix_(_mix_(rows ^ _BLOCKS_APART)[:, None] + numbers)
    return _clocks(bits).div_(BLOCK), bits.bitwise_and_(BLOCK - 1)


def _token_noise(rows: Tensor, ids: Tensor, earliest: Tensor, first: Tensor) -> Tensor:
    """Gumbel noise of ids, given their rows' keys and their blocks' clocks, in shapes that broadcast."""
    clocks = _clocks(_mix_(rows + (ids + 1) * _signed(_GOLDEN)))
    clocks = clocks.masked_fill_(ids % BLOCK == first, 0.0).add_(earliest)
    return _log(clocks).neg_()


def _clocks(bits: Tensor) -> Tensor:
    """Standard exponentials from the upper 52 bits."""
    uniform = (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)  # in (0, 1): 53 would reach 1
    return _log(uniform).neg_()


def argmax(scores: Tensor) -> Tensor:
    """[R, vocab] → [R], the lowest id among equals. On CPU numpy's is a tenth of the time of torch's."""
    if scores.device.type == "cpu" and scores.dtype is not torch.bfloat16:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def _log(x: Tensor) -> Tensor:
    """On CPU numpy's fp64 logarithm takes a third of the time of torch's."""
    return torch.from_numpy(np.log(x.numpy())) if x.device.type == "cpu" else x.log()


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
