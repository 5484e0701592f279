"""The tensors behind a slotted KV cache; the only module of cache/ that imports torch."""

import torch
from torch import Tensor


class SlottedStorage:
    """K and V of every layer, preallocated: slot s holds positions 0 … max_len − 1 of the sequence that owns it.

    A position's row in a layer holds the kv heads' keys first, then their values, so that one copy stores both.
    """

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
        self.kv_heads = kv_heads
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 · NaN would be NaN.
        memory = torch.zeros(num_layers, num_slots, max_len, 2 * kv_heads, head_dim, dtype=dtype, device=device)
        self.rows = memory.flatten(1, 2).unbind(0)  # per layer [slots·max_len, 2·kv_heads, head_dim], for writing
        by_head = memory.transpose(2, 3)  # [layers, slots, 2·kv_heads, max_len, head_dim]
        self._keys, self._values = by_head[:, :, :kv_heads], by_head[:, :, kv_heads:]

    def window(self, first_slot: int, slots: int, length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Views of K and V, per layer [slots, kv_heads, length, head_dim]: what an attention group reads."""
        chosen = (slice(None), slice(first_slot, first_slot + slots), slice(None), slice(length))
        return self._keys[chosen].unbind(0), self._values[chosen].unbind(0)

    def clear(self, slot: int) -> None:
        """Zero a slot, whose next owner must not meet what is not finite."""
        rows = slice(slot * self.max_len, (slot + 1) * self.max_len)
        for layer in self.rows:
            layer[rows].zero_()

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, length, head_dim] of a slot's first positions, for tests and audits."""
        return self._keys[layer, slot, :, :length], self._values[layer, slot, :, :length]
