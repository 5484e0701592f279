"""How much memory the KV caches get. The activations are measured; the rest is arithmetic that the start-up log shows.

Both models' caches hold the same number of tokens, since a sequence needs its positions in both. A draft of a shorter
context than the target's never needs more than its context for each sequence. Sizes are in bytes.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from pathlib import Path

import torch
from torch.autograd.profiler import profile

from cache.gathered import BESIDE
from cache.layout import Layout
from cache.mapped import map_count, mappable
from cache.storage import KVShape
from engine.config import ConfigError, EngineConfig
from engine.device.computing import computing
from engine.memory.machine import DeviceMemory, machine_memory, read_number

BLOCK_SIZES = (32, 64, 128, 256)  # candidates while block_size is not set; mapping smaller blocks costs more
CUDA_FRACTION = 0.9  # share of a GPU's memory while memory_fraction is not set; CUDA and its libraries need the rest
COPIES_SHARE = 0.25  # most of it is for the KV cache
DEFAULT_MAX_MAP_COUNT = 65_530  # Linux's constant of this name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Budget:
    """Blocks of each model's KV cache. str() gives the arithmetic in one line."""

    block_size: int
    blocks: int  # of the target
    model_blocks: tuple[int, ...]  # blocks of each model: fewer for a draft of a shorter context
    token_bytes: tuple[int, ...]  # K and V of one position, per model
    source: str  # how the number of blocks was computed
    beside: int = 0  # further blocks of each model, which hold no sequence

    @property
    def tokens(self) -> int:
        """Positions that the target's cache has memory for."""
        return self.blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        counts = zip(self.model_blocks, self.token_bytes, strict=True)
        return self.block_size * sum((count + self.beside) * size for count, size in counts)

    def __str__(self) -> str:
        each = " + ".join(f"{n:,}" for n in self.token_bytes)
        blocks = f"{self.blocks:,} blocks of {self.block_size}"
        return f"room for {self.tokens:,} tokens ({blocks}: {self.source}, at {each} bytes per token)"


def layouts(
    config: EngineConfig,
    shapes: Sequence[KVShape],
    weights_bytes: int,
    activation_bytes: int,
    max_len: int,
    memory: DeviceMemory,
    contexts: Sequence[int] = (),
) -> list[Layout]:
    """The layout of each model's cache, target first. `memory` must be read after the weights were loaded. contexts:
    positions that each model has; without them all have max_len.

    Raises ConfigError, with the arithmetic, for a cache that does not fit or cannot hold one request of max_len tokens.
    """
    slots = config.max_running
    lengths = [min(max_len, context) for context in contexts] or [max_len] * len(shapes)
    if config.cache == "slotted":
        _check_slots(slots, lengths, shapes, memory)
        return [Layout(slots, length) for length in lengths]
    block_size = choose_block_size(config, shapes, slots, max_len)
    budget = kv_blocks(config, shapes, block_size, weights_bytes, activation_bytes, max_len, memory, lengths)
    layout = Layout(slots, max_len, block_size, budget.blocks, config.prefix_cache)
    limit = max_map_count() // 2
    layout = replace(layout, mapped=_mappings(layout, shapes) < limit)
    if not layout.mapped:
        log.warning(
            "the KV memory is gathered, which is slower for long prompts: to map it may take %s mappings, and half of "
            "vm.max_map_count is %s: raise vm.max_map_count, or lower max_running %s or max_model_len %s",
            *(f"{n:,}" for n in (_mappings(Layout(slots, max_len, BLOCK_SIZES[-1]), shapes), limit, slots, max_len)),
        )
    access = "mapped" if all(mappable(layout, shape) for shape in shapes) else "gathered"
    log.info("the KV cache has %s, %s", budget, access)
    return [
        _sliding(replace(layout, max_len=length, blocks=blocks), shape.window, config.max_step_tokens)
        for shape, length, blocks in zip(shapes, lengths, budget.model_blocks, strict=True)
    ]


def draft_layout(config: EngineConfig, target: Layout, target_shape: KVShape, shape: KVShape, context: int) -> Layout:
    """The layout of a draft that joins a target which serves, by the rules of `layouts`: room for as many tokens.
    context: positions that the draft has."""
    length = min(target.max_len, context)
    if not target.paged:
        return Layout(target.slots, length)
    limit = _most_blocks(config, length, target.max_len, target.block_size)
    blocks = target.blocks if limit is None else min(target.blocks, limit)
    whole = replace(target, window=None, pass_tokens=0)
    mapped = _mappings(whole, [target_shape, shape]) < max_map_count() // 2
    layout = replace(whole, max_len=length, blocks=blocks, mapped=mapped)
    return _sliding(layout, shape.window, config.max_step_tokens)


def room_beside(draft: str | None, weights_bytes: int, kv_bytes: int, room: int) -> int:
    """Bytes of `room` that are left beside a draft that joins. Raises ConfigError if it does not fit."""
    left = room - weights_bytes - kv_bytes
    if left < 0:
        raise ConfigError(
            f"draft {draft} needs {_mib(weights_bytes)} of weights and {_mib(kv_bytes)} of KV memory, and "
            f"{_mib(max(0, room))} are left beside the models that serve: choose a smaller draft, or restart with it"
        )
    return left


def _most_blocks(config: EngineConfig, length: int, max_len: int, block_size: int) -> int | None:
    """The most blocks that a model whose sequences end at `length` can use; None: as many as the target."""
    return config.max_running * ceil(length / block_size) + 1 if length < max_len else None


def copies_bytes(
    config: EngineConfig, shapes: Sequence[KVShape], weights_bytes: int, max_len: int, memory: DeviceMemory
) -> int:
    """Bytes that second forms of weights may take: COPIES_SHARE of what the weights and the cache leave.

    A cache of no set size counts with twice the longest request: without memory_fraction it gets half of the rest.
    `memory` is what is available beside the weights.
    """
    room, token_bytes = memory.available, sum(shape.token_bytes for shape in shapes)
    if config.memory_fraction is not None:
        room = min(room, int(config.memory_fraction * memory.total) - weights_bytes)
    if config.cache == "slotted":
        room -= config.max_running * max_len * token_bytes
    elif config.kv_tokens is not None:
        room -= config.kv_tokens * token_bytes
    else:
        room -= 2 * max_len * token_bytes
    return max(0, int(COPIES_SHARE * room))


def _sliding(layout: Layout, window: int | None, pass_tokens: int) -> Layout:
    return layout if window is None else replace(layout, window=window, pass_tokens=pass_tokens)


def _blocks_per_sequence(config: EngineConfig, shapes: Sequence[KVShape], block_size: int, max_len: int) -> int:
    """The most blocks that one sequence of max_len tokens holds, in the model that needs more of them."""
    layout = Layout(1, max_len, block_size)
    return max(_sliding(layout, shape.window, config.max_step_tokens).held_blocks(max_len) for shape in shapes)


def choose_block_size(config: EngineConfig, shapes: Sequence[KVShape], slots: int, max_len: int) -> int:
    """Positions per block: block_size if it is set, else the smallest of BLOCK_SIZES with which the memory of every
    model can be mapped on a CPU, else the first of them.

    The mappings may take half of vm.max_map_count; the process's libraries, heaps and threads need the rest. Raises
    ConfigError for a block_size that would need more.
    """
    limit = max_map_count() // 2
    if config.block_size is None:
        for size in BLOCK_SIZES:
            layout = Layout(slots, max_len, size)
            if all(mappable(layout, shape) for shape in shapes) and _mappings(layout, shapes) < limit:
                return size
        return BLOCK_SIZES[0]
    layout = Layout(slots, max_len, config.block_size)
    if (count := _mappings(layout, shapes)) >= limit:
        table = ceil(max_len / layout.block_size)
        raise ConfigError(
            f"block_size {layout.block_size} may need {count:,} memory mappings (max_running {slots:,} × {table:,} "
            f"blocks for max_model_len {max_len:,} × {count // (slots * table)} layers), and half of vm.max_map_count "
            f"is {limit:,}: raise block_size or vm.max_map_count, or lower max_running or max_model_len"
        )
    return config.block_size


def _mappings(layout: Layout, shapes: Sequence[KVShape]) -> int:
    """Memory mappings that all models with mapped memory may need together."""
    return sum(map_count(layout, shape.num_layers) for shape in shapes if mappable(layout, shape))


def kv_blocks(
    config: EngineConfig,
    shapes: Sequence[KVShape],
    block_size: int,
    weights_bytes: int,
    activation_bytes: int,
    max_len: int,
    memory: DeviceMemory,
    lengths: Sequence[int] = (),
) -> Budget:
    """The number of blocks, from kv_tokens or memory_fraction. lengths: as `contexts` of `layouts`, at most max_len.

    If neither is set: on CUDA from CUDA_FRACTION; on a CPU as many as max_running sequences of max_len tokens need, but
    at most half of the available memory. Both are limited to what is available beside the activations. Raises
    ConfigError as `layouts` does.
    """
    token_bytes = tuple(shape.token_bytes for shape in shapes)
    limits = [_most_blocks(config, n, max_len, block_size) for n in lengths]
    beside = blocks_beside(shapes[0].device)
    usage = _Usage(block_size, token_bytes, tuple(limits) or (None,) * len(shapes), beside)
    table = _blocks_per_sequence(config, shapes, block_size, max_len)
    if config.kv_tokens is not None:
        blocks, source = config.kv_tokens // block_size, f"kv_tokens {config.kv_tokens:,}"
    else:
        fraction = config.memory_fraction
        if fraction is not None:
            room, source = _share(fraction, memory.total, weights_bytes, activation_bytes)
        elif shapes[0].device.type == "cuda":
            room, source = _share(CUDA_FRACTION, memory.total, weights_bytes, activation_bytes)
        else:
            room, source = _demand(config.max_running, table, usage, memory.available)
        free = memory.available - activation_bytes
        if fraction is None and free < room:
            room, source = free, f"{_mib(memory.available)} available − {_mib(activation_bytes)} activations"
        blocks, source = usage.blocks_in(room), f"{source} = {_mib(room)}"
    blocks = max(blocks, 0)
    budget = Budget(block_size, blocks, usage.of_models(blocks), token_bytes, source, beside)
    _check_room(budget, table + 1, max_len, config)
    _check_fits(budget, activation_bytes, memory, config)
    return budget


def blocks_beside(device: torch.device) -> int:
    """Blocks of each paged cache that hold no sequence. On a CPU most memory is mapped, which needs none."""
    return 0 if device.type == "cpu" else BESIDE


def kv_bytes(layout: Layout, token_bytes: int, device: torch.device) -> int:
    """Bytes of a model's whole KV memory. token_bytes: K and V of one position."""
    return (layout.tokens + blocks_beside(device) * layout.block_size) * token_bytes


@dataclass(frozen=True, slots=True)
class _Usage:
    """What a number of the target's blocks takes in all models."""

    block_size: int
    token_bytes: tuple[int, ...]
    # Blocks that each model needs at most; None: as many as the target. Only a draft of a shorter context needs fewer.
    limits: tuple[int | None, ...]
    beside: int  # further blocks of each model

    def of_models(self, blocks: int) -> tuple[int, ...]:
        return tuple(blocks if limit is None else min(blocks, limit) for limit in self.limits)

    def bytes_of(self, blocks: int) -> int:
        counts = zip(self.of_models(blocks), self.token_bytes, strict=True)
        return self.block_size * sum((count + self.beside) * size for count, size in counts)

    def blocks_in(self, room: int) -> int:
        """The most blocks that `room` bytes hold."""
        more_than_fit = max(room, 0) // (self.block_size * self.token_bytes[0]) + 1  # of the target alone
        return bisect_right(range(more_than_fit + 1), room, key=self.bytes_of) - 1


def _share(fraction: float, total: int, weights_bytes: int, activation_bytes: int) -> tuple[int, str]:
    """(bytes that weights and activations leave of a fraction of the device's memory, the arithmetic as text)."""
    room = int(fraction * total) - weights_bytes - activation_bytes
    rest = f"{_mib(weights_bytes)} weights − {_mib(activation_bytes)} activations"
    return room, f"{fraction:g} × {_mib(total)} − {rest}"


def _demand(slots: int, table: int, usage: _Usage, available: int) -> tuple[int, str]:
    """(bytes for `slots` sequences of `table` blocks, at most half of the available ones; the arithmetic as text).

    One block is added, because a single sequence may have to copy a block that it shares with the prefix index.
    """
    needed, half = usage.bytes_of(slots * table + 1), available // 2
    if needed <= half:
        return needed, f"max_running {slots:,} × {table:,} blocks for max_model_len + 1"
    return half, f"0.5 × {_mib(available)} available"


def _check_room(budget: Budget, needed: int, max_len: int, config: EngineConfig) -> None:
    """needed: in blocks."""
    if budget.blocks >= needed:
        return
    if config.kv_tokens is not None:
        advice = "raise kv_tokens, or lower max_model_len"
    else:
        get_more = "set kv_tokens or memory_fraction" if config.memory_fraction is None else "raise memory_fraction"
        advice = f"{get_more}, or lower max_model_len or max_step_tokens"
    raise ConfigError(
        f"the KV cache has {budget}, and one request of max_model_len {max_len:,} needs "
        f"{needed * budget.block_size:,}, with one block to copy a shared one into: {advice}"
    )


def _check_fits(budget: Budget, activation_bytes: int, memory: DeviceMemory, config: EngineConfig) -> None:
    if budget.kv_bytes + activation_bytes > memory.available:
        raise ConfigError(
            f"the KV cache has {budget}, which is {_mib(budget.kv_bytes)}"
            f"{f' and {_mib(activation_bytes)} activations' if activation_bytes else ''}, more than the "
            f"{_mib(memory.available)} available: "
            f"lower {'memory_fraction' if config.kv_tokens is None else 'kv_tokens'}"
        )


def _check_slots(slots: int, lengths: Sequence[int], shapes: Sequence[KVShape], memory: DeviceMemory) -> None:
    size = slots * sum(length * shape.token_bytes for length, shape in zip(lengths, shapes, strict=True))
    if size > memory.available:
        cache = f"a slotted KV cache of max_running {slots:,} × max_model_len {max(lengths):,} takes {_mib(size)}"
        raise ConfigError(f"{cache}, and {_mib(memory.available)} are available: lower one of them")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB".replace("-", "−")


def measure_activations(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that `run`, the largest pass, allocates beyond what was allocated before it.

    On a CPU the profiler's allocation events are added up. The sum is exact and repeatable. The peak of the
    resident set (VmHWM) is neither, because the heap keeps freed pages: a second pass of the same size hardly raises
    it. Memory that libraries allocate without torch, a few MB, is not counted. Compiled layers count what they allocate
    (counted_memory).
    """
    with computing(device):
        return _cuda_peak(run, device) if device.type == "cuda" else _cpu_peak(run)


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(run: Callable[[], object]) -> int:
    # torch.profiler's own class would also turn every event into an object, which takes several times as long as `run`.
    with profile(profile_memory=True) as profiler:
        run()
    assert profiler.kineto_results is not None
    events = profiler.kineto_results.events()
    # sorted() is stable: events of the same nanosecond keep the order in which they were recorded.
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0])
    return max(accumulate((size for _, size in changes), initial=0))


def device_memory(device: torch.device) -> DeviceMemory:
    """A GPU's memory, or the machine's within the limits of this process's cgroups."""
    if device.type != "cuda":
        return machine_memory()
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # free memory that torch keeps
    return DeviceMemory(total, free + cached)


def max_map_count() -> int:
    """Memory mappings that Linux allows this process."""
    return read_number(Path("/proc/sys/vm/max_map_count")) or DEFAULT_MAX_MAP_COUNT
