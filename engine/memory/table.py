"""The memory of an engine as a table for the log: what the weights, the KV caches and the largest round take."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cache.layout import Layout
from engine.memory.budget import kv_bytes
from engine.memory.machine import DeviceMemory

LENGTHS = (512, 2048)  # tokens of a request, beside the longest that is served

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """One model's share."""

    role: str  # target or draft
    path: str
    form: str  # how its weights are kept
    weight_bytes: int
    token_bytes: int  # K and V of one position


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """str() is the table."""

    device: str
    models: tuple[ModelMemory, ...]
    layouts: tuple[Layout, ...]  # by model
    activation_bytes: int | None  # None: not measured
    memory: DeviceMemory  # beside the weights
    graph_bytes: int = 0  # that captured graphs may take

    @property
    def kv_bytes(self) -> int:
        models, device = zip(self.layouts, self.models, strict=True), torch.device(self.device)
        return sum(kv_bytes(layout, model.token_bytes, device) for layout, model in models)

    @property
    def room(self) -> int:
        """Bytes that are left on the device once all of this is used."""
        return self.memory.available - self.kv_bytes - (self.activation_bytes or 0) - self.graph_bytes

    def fitting(self, length: int) -> int:
        """How many requests of `length` tokens have memory at once, and a slot."""
        target = self.layouts[0]
        if not target.paged:
            return target.slots
        return min(target.slots, target.blocks // target.held_blocks(length))

    def tell(self) -> None:
        log.info("memory:\n%s", self)

    def __str__(self) -> str:
        return "\n".join(f"  {name:<12} {size:>12}  {note}".rstrip() for name, size, note in self._rows())

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield self.device, _mib(self.memory.total), "in all"
        for model in self.models:
            yield model.role, _mib(model.weight_bytes), f"{model.form} weights of {model.path}"
        yield "KV", _mib(self.kv_bytes), f"{self.layouts[0].tokens:,} tokens"
        if self.activation_bytes is None:
            yield "activations", "?", "not measured: only on CUDA or with memory_fraction, and when weights are loaded"
        else:
            yield "activations", _mib(self.activation_bytes), "of the largest round"
        if self.graph_bytes:
            yield "graphs", _mib(self.graph_bytes), "at most, of captured rounds"
        yield "room left", _mib(self.room), ""
        longest = self.layouts[0].max_len
        fits = [f"{self.fitting(n):,} of {n:,}" for n in (*(n for n in LENGTHS if n < longest), longest)]
        yield "requests", "", f"at once: {', '.join(fits)} tokens (max_running {self.layouts[0].slots:,})"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
