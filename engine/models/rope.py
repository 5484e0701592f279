"""Rotary position embedding tables (Su et al. 2021, arXiv 2104.09864) and the ways to stretch them.

A rotated K in the cache cannot be rotated again, so a sequence keeps the frequencies it began with. `dynamic` and
`longrope` change theirs with the length of a text; here the longest text that is served, max_len, decides for all:
  - longrope: the short factors where max_len ≤ original_max_position_embeddings, as in transformers for every text;
    else the long factors, as in transformers for a text longer than that;
  - dynamic: unscaled where max_len ≤ max_position_embeddings, as in transformers for every text; else as in
    transformers for a text of max_len tokens read in one pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.traits import RopeParameters


@dataclass(frozen=True, slots=True)
class RopeSize:
    """The lengths that frequencies depend on."""

    rotary_dim: int  # how many of each head's numbers are rotated
    max_len: int  # tokens of the longest text that is served
    max_positions: int  # config.json's max_position_embeddings


def rotation_table(rope: RopeParameters, size: RopeSize, dtype: torch.dtype, device: torch.device) -> Tensor:
    """attention_factor · e^(i·position·frequency), complex [max_len, 1, rotary_dim / 2].

    Angles, cosines and sines are computed in fp32 for every dtype, as in training and in transformers. fp64 models hold
    the fp32 values. Raises ConfigError for an unknown kind of scaling and for a field that is missing or no number.
    """
    kind = rope.get("rope_type", "default")
    if kind not in KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; {', '.join(KINDS)} are")
    try:
        frequencies, factor = KINDS[kind](rope, size)
    except KeyError as error:
        raise ConfigError(f"rope_parameters of type {kind!r} lack {error}") from None
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"rope_parameters of type {kind!r} are malformed: {error}") from error
    if frequencies.shape != (size.rotary_dim // 2,):
        raise ConfigError(
            f"rope_parameters of type {kind!r} give {frequencies.numel()} frequencies; "
            f"{size.rotary_dim} rotated numbers per head need {size.rotary_dim // 2}"
        )
    angles = torch.outer(torch.arange(size.max_len, dtype=torch.float32), frequencies)
    real = torch.float64 if dtype is torch.float64 else torch.float32
    table = torch.complex((angles.cos() * factor).to(real), (angles.sin() * factor).to(real))
    return table[:, None].to(device)


def row_rotations(table: Tensor, positions: Tensor, heads: tuple[int, int, int]) -> Tensor:
    """The factors of the packed q, k and v of rows at positions [N]: [N, (heads + 2·kv_heads)·head_dim / 2], 1 for what
    is not rotated. heads: (heads, kv_heads, head_dim)."""
    rotations, (count, stored, size) = table.index_select(0, positions), heads  # [N, 1, rotary_dim / 2]
    factors = rotations.new_ones((positions.shape[0], count + 2 * stored, size // 2))
    factors[:, : count + stored, : rotations.shape[-1]] = rotations
    return factors.view(positions.shape[0], -1)


def uses_long_factors(rope: RopeParameters, size: RopeSize) -> bool:
    """Whether a table of type `longrope` holds the long factors."""
    return rope.get("rope_type") == "longrope" and size.max_len > rope["original_max_position_embeddings"]


def _exponents(size: RopeSize) -> Tensor:
    return torch.arange(0, size.rotary_dim, 2, dtype=torch.int64).float() / size.rotary_dim


def _default(rope: RopeParameters, size: RopeSize) -> tuple[Tensor, float]:
    return 1.0 / rope["rope_theta"] ** _exponents(size), 1.0


def _linear(rope: RopeParameters, size: RopeSize) -> tuple[Tensor, float]:
    return _default(rope, size)[0] / rope["factor"], 1.0


def _dynamic(rope: RopeParameters, size: RopeSize) -> tuple[Tensor, float]:
    """NTK scaling: a larger theta, so that the longest wavelength is stretched by the ratio of the lengths."""
    theta, factor, context, dim = rope["rope_theta"], rope["factor"], size.max_positions, size.rotary_dim
    length: Any = context
    if size.max_len > context:
        length = torch.tensor(size.max_len)  # as in transformers, which computes theta in fp32 then
    theta = theta * ((factor * length / context) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / theta ** _exponents(size), 1.0


def _llama3(rope: RopeParameters, size: RopeSize) -> tuple[Tensor, float]:
    """Stretch long wavelengths by `factor`, keep short ones, blend those between linearly in 1/wavelength."""
    frequencies, _ = _default(rope, size)
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = context * frequencies / (2 * math.pi)  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor, 1.0


def _yarn(rope: RopeParameters, size: RopeSize) -> tuple[Tensor, float]:
    """Stretch slow rotations by `factor`, keep fast ones, blend between (Peng et al. 2023, arXiv 2309.00071)."""
    theta, context, dim = rope["rope_theta"], rope["original_max_position_embeddings"], size.rotary_dim
    factor = rope["factor"] if rope["factor"] is not None else size.max_positions / context

    def place(turns: float) -> float:
        """The index of the pair that rotates this many times over the original context."""
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - stretched
    powers = theta ** _exponents(size)
    frequencies = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeParameters, factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def _longrope(rope: RopeParameters, size: RopeSize) -> tuple[Tensor, float]:
    """A searched factor for each frequency (Ding et al. 2024, arXiv 2402.13753)."""
    context = rope["original_max_position_embeddings"]
    factors = rope["long_factor"] if uses_long_factors(rope, size) else rope["short_factor"]
    frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope["rope_theta"] ** _exponents(size))
    if (given := rope.get("attention_factor")) is not None:
        return frequencies, float(given)
    factor = rope.get("factor")
    factor = size.max_positions / context if factor is None else factor
    return frequencies, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))


KINDS: dict[str, Callable[[RopeParameters, RopeSize], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
# What transformers reads of the kinds above. `finetuned` says how a checkpoint was made.
FIELDS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "finetuned"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    )
)
