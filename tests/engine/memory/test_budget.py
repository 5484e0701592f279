"""The caches get the memory that the configuration gives them: all of it, no more, never too little for a request."""

import logging
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cache.layout import Layout
from cache.storage import KVShape
from engine.config import ConfigError, EngineConfig
from engine.memory import budget as memory_budget
from engine.memory.budget import (
    Budget,
    choose_block_size,
    copies_bytes,
    device_memory,
    kv_blocks,
    layouts,
    max_map_count,
    measure_activations,
)
from engine.memory.machine import DeviceMemory, machine_memory

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TARGET = KVShape(num_layers=16, kv_heads=1, head_dim=64, dtype=torch.float32, device=CPU)  # 8,192 bytes per token
DRAFT = KVShape(num_layers=2, kv_heads=1, head_dim=64, dtype=torch.float32, device=CPU)  # 1,024
ODD = KVShape(num_layers=3, kv_heads=1, head_dim=20, dtype=torch.float32, device=CPU)  # 160 bytes a row: 32 · 5
PAIR = (TARGET, DRAFT)
PLENTY = DeviceMemory(2**50, 2**50)
linux = pytest.mark.skipif(sys.platform != "linux" or mmap.PAGESIZE != 4096, reason="blocks are mapped on Linux only")


@pytest.mark.parametrize(
    ("settings", "room"),
    [
        ({}, 80 * MIB - 2 * 512 * 9216),
        ({"memory_fraction": 0.5}, 50 * MIB - 10 * MIB - 2 * 512 * 9216),
        ({"memory_fraction": 1.0}, 80 * MIB - 2 * 512 * 9216),
        ({"memory_fraction": 0.05}, 0),
        ({"kv_tokens": 1024}, 80 * MIB - 1024 * 9216),
        ({"kv_tokens": 1 << 20}, 0),
        ({"cache": "slotted", "max_running": 4}, 80 * MIB - 4 * 512 * 9216),
    ],
)
def test_second_forms_get_a_quarter_of_what_weights_and_a_given_cache_leave(
    settings: dict[str, Any], room: int
) -> None:
    memory = DeviceMemory(100 * MIB, 80 * MIB)
    assert copies_bytes(EngineConfig("target", **settings), PAIR, 10 * MIB, 512, memory) == room // 4


@pytest.mark.parametrize("settings", [{}, {"memory_fraction": 1.0}])
def test_second_forms_leave_the_cache_memory_for_the_longest_request(settings: dict[str, Any]) -> None:
    """Where one request fits without second forms, it fits beside them."""
    config = EngineConfig("target", max_running=1, **settings)
    free = next(free for free in range(9 * MIB, 40 * MIB, MIB // 4) if fits(config, free))
    assert fits(config, free - copies_bytes(config, PAIR, 0, 1024, DeviceMemory(free, free)))


def fits(config: EngineConfig, free: int) -> bool:
    try:
        layouts(config, PAIR, 0, 0, 1024, DeviceMemory(free, free))
    except ConfigError:
        return False
    return True


def on(device: torch.device, *shapes: KVShape) -> tuple[KVShape, ...]:
    return tuple(replace(shape, device=device) for shape in shapes)


def configured(
    *,
    kv_tokens: int | None = None,
    memory_fraction: float | None = None,
    block_size: int | None = None,
    max_running: int = 16,
) -> EngineConfig:
    return EngineConfig(
        "target",
        kv_tokens=kv_tokens,
        memory_fraction=memory_fraction,
        block_size=block_size,
        max_running=max_running,
        max_step_tokens=max(512, 17 * max_running),
    )


# --- how many blocks


def test_kv_tokens_are_rounded_down_to_blocks() -> None:
    got = kv_blocks(configured(kv_tokens=1_000), PAIR, 16, 0, 0, 128, PLENTY)
    assert (got.blocks, got.tokens, got.kv_bytes) == (62, 992, 992 * 9_216)


def test_a_fraction_leaves_room_for_weights_and_activations() -> None:
    """0.5 · 128 − 51.2 − 3.1 = 9.7 MiB hold 1,103 positions of 9,216 bytes: 68 blocks of 16."""
    config, memory = configured(memory_fraction=0.5), DeviceMemory(128 * MIB, 100 * MIB)
    weights, activations = int(51.2 * MIB), int(3.1 * MIB)
    got = kv_blocks(config, PAIR, 16, weights, activations, 1_024, memory)
    assert (got.blocks, got.tokens) == (68, 1_088)
    assert str(got) == (
        "room for 1,088 tokens (68 blocks of 16: 0.5 × 128.0 MiB − 51.2 MiB weights − 3.1 MiB activations = 9.7 MiB, "
        "at 8,192 + 1,024 bytes per token)"
    )
    alone = kv_blocks(config, (TARGET,), 16, weights, activations, 1_024, memory)
    assert alone.blocks == 77  # 9.7 MiB at 131,072 bytes


def test_a_draft_of_a_shorter_context_is_charged_for_its_own() -> None:
    """2 sequences of 32 positions take 4 of the draft's blocks, and one is to copy into: 5 blocks of 16 KiB. The target
    has 128 KiB per block."""
    config, room = configured(memory_fraction=0.5, max_running=2), 80 * 2**10 + 7 * 128 * 2**10
    got = kv_blocks(config, PAIR, 16, 0, 0, 64, DeviceMemory(2 * room, 2 * room), (64, 32))
    assert got.model_blocks == (7, 5)
    assert got.kv_bytes == room
    less = kv_blocks(config, PAIR, 16, 0, 0, 64, DeviceMemory(2 * room - 2, 2 * room), (64, 32))
    assert less.model_blocks == (6, 5)
    few = kv_blocks(
        configured(memory_fraction=0.5, max_running=8), PAIR, 16, 0, 0, 64, DeviceMemory(2 * room, 2 * room)
    )
    assert few.model_blocks == (6, 6)
    made = layouts(config, PAIR, 0, 0, 64, DeviceMemory(2**50, 2**50), (4_096, 32))
    assert [(layout.max_len, layout.blocks) for layout in made][1] == (32, 2 * ceil(32 / made[1].block_size) + 1)
    slotted = replace(config, cache="slotted", memory_fraction=None)
    needed = 2 * (64 * 8_192 + 32 * 1_024)
    assert layouts(slotted, PAIR, 0, 0, 64, DeviceMemory(needed, needed), (64, 32)) == [Layout(2, 64), Layout(2, 32)]
    with pytest.raises(ConfigError, match="slotted KV cache"):
        layouts(slotted, PAIR, 0, 0, 64, DeviceMemory(needed, needed - 1), (64, 32))


def test_a_cpu_gets_what_its_sequences_can_need() -> None:
    """4 sequences of 100 positions take 7 blocks each, and one more is to copy into."""
    got = kv_blocks(configured(max_running=4), PAIR, 16, 0, 0, 100, PLENTY)
    assert got.blocks == 29
    assert got.source == "max_running 4 × 7 blocks for max_model_len + 1 = 4.1 MiB"


def test_a_cpu_gets_at_most_half_of_what_is_available() -> None:
    memory = DeviceMemory(2**50, 29 * 16 * 9_216 * 2)
    assert kv_blocks(configured(max_running=4), PAIR, 16, 0, 0, 100, memory).blocks == 29
    less = DeviceMemory(memory.total, memory.available - 2)
    assert kv_blocks(configured(max_running=4), PAIR, 16, 0, 0, 100, less).blocks == 28


def test_a_gpu_gets_nine_tenths_unless_less_is_free() -> None:
    config, shapes = configured(), on(CUDA, *PAIR)
    free = kv_blocks(config, shapes, 16, 100 * MIB, 10 * MIB, 128, DeviceMemory(1_000 * MIB, 900 * MIB))
    beside = 2  # blocks of zeros, and for rows of no sequence
    assert free.blocks == 790 * MIB // (16 * 9_216) - beside
    assert free.kv_bytes == (free.blocks + beside) * 16 * 9_216
    shared = kv_blocks(config, shapes, 16, 100 * MIB, 10 * MIB, 128, DeviceMemory(1_000 * MIB, 500 * MIB))
    assert shared.blocks == 490 * MIB // (16 * 9_216) - beside
    assert shared.source == "500.0 MiB available − 10.0 MiB activations = 490.0 MiB"


def test_the_refusal_shows_its_arithmetic() -> None:
    memory = DeviceMemory(128 * MIB, 100 * MIB)
    with pytest.raises(ConfigError) as refused:
        kv_blocks(configured(memory_fraction=0.5), PAIR, 16, int(51.2 * MIB), int(3.1 * MIB), 2_048, memory)
    assert str(refused.value) == (
        "the KV cache has room for 1,088 tokens (68 blocks of 16: 0.5 × 128.0 MiB − 51.2 MiB weights − 3.1 MiB "
        "activations = 9.7 MiB, at 8,192 + 1,024 bytes per token), and one request of max_model_len 2,048 needs 2,064, "
        "with one block to copy a shared one into: raise memory_fraction, or lower max_model_len or max_step_tokens"
    )


def test_one_request_and_a_spare_block_are_enough_and_no_less() -> None:
    assert kv_blocks(configured(kv_tokens=144), PAIR, 16, 0, 0, 128, PLENTY).blocks == 9
    with pytest.raises(ConfigError, match=r"raise kv_tokens, or lower max_model_len$"):
        kv_blocks(configured(kv_tokens=143), PAIR, 16, 0, 0, 128, PLENTY)


def test_a_machine_with_too_little_memory_is_told_what_to_set() -> None:
    with pytest.raises(
        ConfigError, match=r"0\.5 × 2\.0 MiB available = 1\.0 MiB, .*: set kv_tokens or memory_fraction, or"
    ):
        kv_blocks(configured(), PAIR, 16, 0, 0, 128, DeviceMemory(4 * MIB, 2 * MIB))


def test_weights_beyond_the_fraction_leave_no_blocks() -> None:
    with pytest.raises(ConfigError, match=r"room for 0 tokens .* = −60\.0 MiB"):
        kv_blocks(configured(memory_fraction=0.1), PAIR, 16, 70 * MIB, 0, 128, DeviceMemory(100 * MIB, 100 * MIB))


@pytest.mark.parametrize(
    ("config", "setting"),
    [(configured(kv_tokens=4_096), "kv_tokens"), (configured(memory_fraction=0.9), "memory_fraction")],
)
def test_more_than_is_available_is_refused(config: EngineConfig, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"than the 30\.0 MiB available: lower {setting}$"):
        kv_blocks(config, PAIR, 16, 0, MIB, 128, DeviceMemory(64 * MIB, 30 * MIB))


@st.composite
def situations(draw: st.DrawFn) -> tuple[EngineConfig, tuple[KVShape, ...], int, int, int, DeviceMemory]:
    device = draw(st.sampled_from([CPU, CUDA]))
    shapes = draw(st.sampled_from([PAIR, (TARGET,), (TARGET, ODD)]))
    sizing = draw(st.sampled_from(["default", "kv_tokens", "memory_fraction"]))
    config = configured(
        kv_tokens=draw(st.integers(1, 10_000)) if sizing == "kv_tokens" else None,
        memory_fraction=draw(st.floats(0.01, 1)) if sizing == "memory_fraction" else None,
        block_size=draw(st.one_of(st.none(), st.integers(1, 512))),
        max_running=draw(st.integers(1, 20)),
    )
    total = draw(st.integers(1, 200 * MIB))
    weights, activations = draw(st.integers(0, total // 2)), draw(st.integers(0, total // 2))
    memory = DeviceMemory(total, draw(st.integers(0, total - weights)))
    return config, on(device, *shapes), weights, activations, draw(st.integers(2, 2_000)), memory


def bytes_of(blocks: int, size: int, shapes: tuple[KVShape, ...]) -> int:
    """A model on CUDA also has two blocks that hold no sequence."""
    beside = 2 if shapes[0].device.type == "cuda" else 0
    return (blocks + beside) * size * sum(s.token_bytes for s in shapes)


def allowed(config: EngineConfig, shapes: tuple[KVShape, ...], weights: int, activations: int) -> Callable[..., float]:
    """(blocks, their size, memory, blocks of a request) → how far beyond what is allowed that is; the law restated."""

    def excess(blocks: int, size: int, memory: DeviceMemory, table: int) -> float:
        used = bytes_of(blocks, size, shapes)
        if config.kv_tokens is not None:
            return blocks * size - config.kv_tokens
        if config.memory_fraction is not None:
            return used + weights + activations - int(config.memory_fraction * memory.total)
        beyond_free = used + activations - memory.available
        if shapes[0].device.type == "cuda":
            return max(beyond_free, used + weights + activations - int(0.9 * memory.total))
        return max(beyond_free, 2 * used - memory.available, blocks - (config.max_running * table + 1))

    return excess


@given(situations())
def test_the_budget_is_used_up_and_never_exceeded(
    situation: tuple[EngineConfig, tuple[KVShape, ...], int, int, int, DeviceMemory],
) -> None:
    """And it is refused exactly where it cannot hold a request, or what is asked for is not there."""
    config, shapes, weights, activations, max_len, memory = situation
    size = choose_block_size(config, shapes, config.max_running, max_len)
    table = ceil(max_len / size)
    excess = allowed(config, shapes, weights, activations)

    def there(blocks: int) -> bool:
        return bytes_of(blocks, size, shapes) + activations <= memory.available

    most = next(n for n in range(100_000) if excess(n + 1, size, memory, table) > 0)
    if most < table + 1 or not there(most):
        with pytest.raises(ConfigError):
            layouts(config, shapes, weights, activations, max_len, memory)
        return
    made = layouts(config, shapes, weights, activations, max_len, memory)
    assert made == [Layout(config.max_running, max_len, size, most)] * len(shapes)


# --- layouts


def test_a_slotted_cache_has_no_blocks() -> None:
    config = EngineConfig("target", cache="slotted", max_running=3)
    assert layouts(config, PAIR, 0, 0, 128, PLENTY) == [Layout(3, 128)] * 2


def test_slots_that_do_not_fit_are_refused() -> None:
    config = EngineConfig("target", cache="slotted", max_running=3)
    needed = 3 * 128 * sum(shape.token_bytes for shape in PAIR)
    layouts(config, PAIR, 0, 0, 128, DeviceMemory(needed, needed))
    with pytest.raises(ConfigError, match=r"max_running 3 × max_model_len 128 takes 3\.4 MiB, and 3\.4 MiB are"):
        layouts(config, PAIR, 0, 0, 128, DeviceMemory(needed, needed - 1))


def test_the_arithmetic_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=memory_budget.__name__):
        made = layouts(configured(kv_tokens=1_000), PAIR, 0, 0, 128, PLENTY)
    assert made == [Layout(16, 128, 32, 31)] * 2
    explained = Budget(32, 31, (31, 31), (8_192, 1_024), "kv_tokens 1,000")
    assert caplog.messages == [f"the KV cache has {explained}, mapped"]


def test_the_prefix_cache_can_be_off() -> None:
    config = replace(configured(kv_tokens=1_000), prefix_cache=False)
    assert not any(layout.prefixes for layout in layouts(config, PAIR, 0, 0, 128, PLENTY))


# --- block sizes


@linux
def test_blocks_are_whole_pages_of_every_model() -> None:
    """A row of the odd model has 160 bytes: 128 of them are the first power of two that fills pages of 4,096."""
    assert choose_block_size(configured(), PAIR, 16, 1_024) == 32
    assert choose_block_size(configured(), (TARGET, ODD), 16, 1_024) == 128
    never = replace(ODD, head_dim=1)  # 8 bytes: 512 rows
    assert choose_block_size(configured(), (TARGET, never), 16, 1_024) == 32


@linux
def test_blocks_grow_until_their_mappings_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 slots of 1,024 positions in 18 layers are 9,216 blocks of 32, 4,608 of 64."""
    for limit, size in [(2 * 9_217 + 1, 32), (2 * 9_216, 64), (2 * 4_609, 64), (2 * 4_608, 128)]:
        monkeypatch.setattr(memory_budget, "max_map_count", lambda limit=limit: limit)
        assert choose_block_size(configured(), PAIR, 16, 1_024) == size
        (first, *_) = layouts(configured(kv_tokens=4_096), PAIR, 0, 0, 1_024, PLENTY)
        assert (first.block_size, first.mapped) == (size, True)


@linux
def test_too_many_mappings_of_any_size_are_not_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 256 positions there are 1,152 blocks."""
    monkeypatch.setattr(memory_budget, "max_map_count", lambda: 2 * 1_152)
    made = layouts(configured(kv_tokens=4_096), PAIR, 0, 0, 1_024, PLENTY)
    assert [(m.block_size, m.mapped) for m in made] == [(32, False)] * 2
    assert caplog.messages == [
        "the KV memory is gathered, which is slower for long prompts: to map it may take 1,152 mappings, and half of "
        "vm.max_map_count is 1,152: raise vm.max_map_count, or lower max_running 16 or max_model_len 1,024"
    ]


def test_a_gpu_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "max_map_count", lambda: 2)
    assert choose_block_size(configured(), on(CUDA, *PAIR), 16, 1_024) == 32
    assert choose_block_size(configured(block_size=16), on(CUDA, *PAIR), 16, 1_024) == 16


@linux
def test_a_block_size_with_too_many_mappings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "max_map_count", lambda: 20_000)
    with pytest.raises(ConfigError) as refused:
        choose_block_size(configured(block_size=16), PAIR, 16, 1_024)
    assert str(refused.value) == (
        "block_size 16 may need 18,432 memory mappings (max_running 16 × 64 blocks for max_model_len 1,024 × 18 "
        "layers), and half of vm.max_map_count is 10,000: raise block_size or vm.max_map_count, or lower max_running "
        "or max_model_len"
    )
    assert choose_block_size(configured(block_size=32), PAIR, 16, 1_024) == 32
    # Blocks that are no whole pages are gathered, whatever their number.
    assert choose_block_size(configured(block_size=3), PAIR, 16, 1_024) == 3


@linux
def test_the_limit_is_the_kernels() -> None:
    assert max_map_count() == int(Path("/proc/sys/vm/max_map_count").read_text("utf-8"))


# --- measuring


def ones(mib: int) -> Tensor:
    return torch.ones(mib * MIB // 4)


def test_a_temporary_counts_as_long_as_it_lives() -> None:
    def together() -> object:
        return [ones(8), ones(4)]

    def apart() -> object:
        del_me = ones(8)
        del del_me
        return ones(4)

    assert 8 * MIB <= measure_activations(lambda: ones(8), CPU) < 9 * MIB
    assert 12 * MIB <= measure_activations(together, CPU) < 13 * MIB
    assert 8 * MIB <= measure_activations(apart, CPU) < 9 * MIB


def test_what_was_there_before_does_not_count() -> None:
    kept = ones(32)
    assert measure_activations(lambda: kept.add_(1), CPU) < MIB
    assert measure_activations(lambda: kept + 1, CPU) >= 32 * MIB


def test_measuring_twice_gives_the_same() -> None:
    weight = torch.ones(256, 256)

    def run() -> object:
        return torch.nn.functional.silu(torch.ones(512, 256) @ weight)

    first = measure_activations(run, CPU)
    assert first == measure_activations(run, CPU) >= 2 * 512 * 256 * 4


def test_nothing_is_recorded_for_a_backward_pass() -> None:
    """The square root keeps its result for one; in inference, all but two of the eight results are gone at any time."""
    x = torch.ones(MIB // 4, requires_grad=True)

    def run() -> Tensor:
        y = x
        for _ in range(8):
            y = y.sqrt()
        return y

    assert measure_activations(run, CPU) < 3 * MIB


def test_a_gpus_numbers_come_from_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 bytes before, 350 at the peak; the peak before the run, 900, was forgotten."""
    state = SimpleNamespace(allocated=100, peak=900)

    def forget(_: torch.device) -> None:
        state.peak = state.allocated

    def run() -> None:
        state.peak = max(state.peak, 350)

    fakes = {
        "synchronize": lambda _: None,
        "device": lambda _: nullcontext(),
        "reset_peak_memory_stats": forget,
        "memory_allocated": lambda _: state.allocated,
        "max_memory_allocated": lambda _: state.peak,
        "memory_reserved": lambda _: 130,
        "mem_get_info": lambda _: (1_000, 4_000),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert measure_activations(run, CUDA) == 250
    assert device_memory(CUDA) == DeviceMemory(4_000, 1_030)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpus_temporary_is_measured() -> None:
    def run() -> Tensor:
        return torch.ones(8 * MIB // 4, device=CUDA)

    assert 8 * MIB <= measure_activations(run, CUDA) < 16 * MIB
    total, available = device_memory(CUDA)
    assert 0 < available <= total


# --- memory of the host


def machine(root: Path, files: dict[str, str]) -> DeviceMemory:
    """A host of 8,000 kB, 6,000 of them available, and further files."""
    files = {
        "proc/meminfo": "MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  6000 kB\nHugePages_Total: 0\n"
    } | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return machine_memory(root)


WHOLE = DeviceMemory(8_000 * 1024, 6_000 * 1024)
V1_UNLIMITED = "9223372036854771712"


def test_a_machine_without_limits_has_all_its_memory(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) == WHOLE


def test_a_cgroup_limits_and_its_page_cache_can_be_dropped(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "3000000\n",
        "sys/fs/cgroup/a/b/memory.current": "1000000\n",
        "sys/fs/cgroup/a/b/memory.stat": "anon 600000\ninactive_file 400000\ntotal_inactive_file 7\n",
    }
    assert machine(tmp_path, files) == (3_000_000, 2_400_000)


def test_a_parents_limit_holds_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "1000000\n",
        "sys/fs/cgroup/a/memory.max": "2000000\n",
        "sys/fs/cgroup/a/memory.current": "1500000\n",
    }
    assert machine(tmp_path, files) == (2_000_000, 500_000)


def test_a_container_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    """Version 1, whose path names folders that are not there inside; the second line's controller is another."""
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu,cpuacct:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 200000\n",
    }
    assert machine(tmp_path, files) == (5_000_000, 4_200_000)


def test_what_limits_nothing_is_not_seen(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
        "sys/fs/cgroup/other/memory.max": "1\n",
        "sys/fs/cgroup/other/memory.current": "1\n",
    }
    assert machine(tmp_path, files) == WHOLE


def test_an_overdrawn_group_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000000\n",
        "sys/fs/cgroup/memory.current": "1000001\n",
    }
    assert machine(tmp_path, files) == (1_000_000, 0)


def test_elsewhere_the_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"SC_PAGE_SIZE": 16_384, "SC_PHYS_PAGES": 1_000, "SC_AVPHYS_PAGES": 300}
    monkeypatch.setattr(os, "sysconf", values.__getitem__)
    monkeypatch.setattr(os, "sysconf_names", values)
    assert machine_memory(tmp_path) == (16_384_000, 4_915_200)
    del values["SC_AVPHYS_PAGES"]  # macOS does not know what is free
    assert machine_memory(tmp_path) == (16_384_000, 16_384_000)


def test_this_machine_has_memory() -> None:
    total, available = device_memory(CPU)
    assert 0 < available <= total
