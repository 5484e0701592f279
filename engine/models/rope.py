"""Rotary position embedding tables (Su et al. 2021, arXiv 2104.09864), with Llama 3.1's frequency scaling."""

import math
from typing import Any

import torch
from torch import Tensor

from engine.config import ConfigError


def rotation_table(
    raw: dict[str, Any], head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """e^(i·position·frequency), complex [max_len, 1, head_dim / 2], from a checkpoint's config.

    Angles, cosines and sines are computed in fp32 for every dtype, as in training and in transformers. fp64 models hold
    the fp32 values.
    Raises ConfigError for a kind of scaling that is not supported.
    """
    frequencies = _frequencies(raw, head_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    real = torch.float64 if dtype is torch.float64 else torch.float32
    table = torch.complex(angles.cos().to(real), angles.sin().to(real))
    return table[:, None].to(device)


def _frequencies(raw: dict[str, Any], head_dim: int) -> Tensor:
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10000.0),
        **(raw.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        return _llama3(frequencies, rope)
    raise ConfigError(f"rope type {kind!r} is not supported; default, linear and llama3 are")


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, blend those between linearly in 1/wavelength."""
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = context * frequencies / (2 * math.pi)  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor
