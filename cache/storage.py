"""The tensors behind a slotted KV cache; the only module of cache/ that imports torch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerStorage:
    """Views of one layer's memory: one row per position, the kv heads' keys first, then their values."""

    rows: Tensor  # [slots·max_len, 2·kv_heads, head_dim], for writing
    keys: Tensor  # [slots, kv_heads, max_len, head_dim], for reading
    values: Tensor  # [slots, kv_heads, max_len, head_dim]


class SlottedStorage:
    """K and V of every layer, preallocated: slot s holds positions 0 … max_len − 1 of the sequence that owns it."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_len = max_len
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 · NaN would be NaN.
        memory = torch.zeros(num_layers, num_slots, max_len, 2 * kv_heads, head_dim, dtype=dtype, device=device)
        self.layers = [_views(layer, kv_heads) for layer in memory]

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, length, head_dim] of a slot's first positions, for tests and audits."""
        storage = self.layers[layer]
        return storage.keys[slot, :, :length], storage.values[slot, :, :length]


def _views(memory: Tensor, kv_heads: int) -> LayerStorage:
    by_head = memory.transpose(1, 2)  # [slots, 2·kv_heads, max_len, head_dim]
    return LayerStorage(memory.flatten(0, 1), by_head[:, :kv_heads], by_head[:, kv_heads:])
