"""Finds where top-p and min-p cut rows of logits (engine/sampling/candidates.py), compiled by Numba.

Nothing is sorted. The cut is the largest logit such that the tokens from it on have the mass p, and the sum over few
tokens is cheap. So it is found by halving.
"""

import math
from typing import Any

import numpy as np

from engine.kernels.cpu_code import VECTOR_BYTES, compiled
from engine.kernels.cpu_exponentials import NOTHING, weigh

# As in long_row.py. A change of other files than cpu_*.py does not compile this anew, so it has its own constants.
OPERATIONS = 3  # on the way to an exponent
EXP_ERROR = 8  # bound on the relative error of an exponential, in units of an operation's rounding
MASS_MARGIN = 1e-3  # relative margin of a mass, for rounding in fp32
NUMBERS = VECTOR_BYTES // 4  # rows of scratch memory are whole vectors of so many


@compiled
def share_error(share: float, size: float, vocab: int) -> float:
    """Bound on the error of a share of the mass, as candidates._Masses.rounding has it, with sums in fp64; in units of
    an operation's rounding. size: bound on the exponents of the best logits."""
    both = share * (1 - share)
    return both * (OPERATIONS * (2 * (size + math.log(vocab)) - math.log(both)) + 2 * EXP_ERROR)


@compiled
def in_order(bits: Any, count: int, keys: Any) -> None:
    """keys int64 [≥ count], in the order of the fp32 numbers whose bits are given."""
    for i in range(count):
        number = np.int64(bits[i])
        keys[i] = number if number >= 0 else -(number & 0x7FFFFFFF)


@compiled
def mass_of(masses: Any, count: int) -> float:
    """The sum of the first masses."""
    total = 0.0
    for i in range(count):
        total += masses[i]
    return total


@compiled
def mass_from(keys: Any, masses: Any, count: int, least: int) -> float:
    """The sum of the masses whose keys are at least `least`."""
    total = 0.0
    for i in range(count):
        total += masses[i] if keys[i] >= least else 0.0
    return total


@compiled
def hold(logits: Any, masses: Any, smallest: float, held: Any, kept: Any) -> int:
    """Move the logits with at least the smallest mass, and their masses, to held and kept. Returns how many."""
    count, least = 0, np.float32(smallest)
    for i in range(len(logits)):
        held[count], kept[count] = logits[i], masses[i]
        count += masses[i] >= least
    return count


@compiled
def cut_point(keys: Any, masses: Any, count: int, wanted: float) -> int:
    """The largest key from which on the masses have the wanted sum. All of them must have it."""
    low, high = keys[0], keys[0]
    for i in range(count):
        low, high = min(low, keys[i]), max(high, keys[i])
    high += 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if mass_from(keys, masses, count, middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


@compiled
def lowest_kept(tokens: Any, count: int, cut: int, temperature: float, floor: float) -> Any:
    """(the lowest logit from the cut on with the score `floor` or more, the mass of a token at the cut, whether no
    other logit has the cut's score). tokens: (logits, masses, keys)."""
    held, masses, keys = tokens
    best, own, lowest, mass = held[0], held[0], np.float32(np.inf), masses[0]
    for i in range(count):
        best = max(best, held[i])
        if keys[i] == cut:
            own, mass = held[i], masses[i]
    top, alone = np.float64(best), True
    score = (np.float64(own) - top) / temperature
    for i in range(count):
        other = (np.float64(held[i]) - top) / temperature
        if keys[i] != cut and other == score:
            alone = False
        if keys[i] >= cut and other >= floor:
            lowest = min(lowest, held[i])
    return lowest, mass, alone


@compiled
def cut_rows(logits: Any, cuts: Any, room: Any, rounding: float, lowest: Any) -> None:
    """lowest fp32 [F] becomes the lowest logit that each row of logits fp32 [F, vocab] keeps; NaN where that is not
    clear.

    cuts: (temperatures, top_ps, floors fp64, wanted [F]), as candidates.Cuts has them. room: (masses [1, ≥ vocab, whole
    vectors], held, kept fp32 [vocab + 1], keys int64 [vocab]). rounding: relative error of an operation in fp32.
    """
    temperatures, top_ps, floors, wanted = cuts
    masses, held, kept, keys = room
    vocab = logits.shape[1]
    for row in range(logits.shape[0]):
        lowest[row] = np.nan
        if not wanted[row]:
            continue
        inverse, p = np.float32(1 / temperatures[row]), top_ps[row]
        for i in range(vocab):
            masses[0, i] = logits[row, i] * inverse
        largest, _ = weigh(masses, 0, 0, vocab, np.float32(NOTHING))
        total = mass_of(masses[0], vocab)
        smallest = (1 - MASS_MARGIN) * (1 - p) * total / vocab
        count = hold(logits[row], masses[0], smallest, held, kept)
        if count == 0 or not np.isfinite(total):
            continue
        in_order(held.view(np.int32), count, keys)
        if not mass_of(kept, count) >= p * total:
            continue
        cut = cut_point(keys, kept, count, p * total)
        without, inside = mass_from(keys, kept, count, cut + 1), mass_from(keys, kept, count, cut)
        error = share_error(p, abs(largest), vocab) * rounding
        found, mass, alone = lowest_kept((held, kept, keys), count, cut, temperatures[row], floors[row])
        clear = without / total + error < p < inside / total - error
        if clear and alone and mass > (1 + 2 * MASS_MARGIN) * smallest:
            lowest[row] = found
