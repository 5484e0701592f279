"""Where the device's time of a round goes, by kernel."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.steps import Recorder
from benchmarks.measure import Run

MOST_TOLD = 14
NAME_CHARS = 70


def tell_kernels(recorder: Recorder, name: str, run: Callable[[], Run]) -> None:
    """Note the kernels that took most of a run: launches and µs for each of its steps. A profiler makes a step longer,
    but not its kernels. The time of a kernel that starts early holds its wait for the one in front of it."""
    activity = ProfilerActivity.CPU if recorder.device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity]) as found:
        steps = len(run().steps)
    kernels = [(event.key, event.count, _own_us(event, recorder.device)) for event in found.key_averages()]
    kernels = sorted((k for k in kernels if k[2] > 0), key=lambda k: -k[2])
    device_us = busy_us(_ranges(found)) if recorder.device != "cpu" else sum(us for *_, us in kernels)
    recorder.note(f"{name}: device's time of a step, µs", device_us / steps)
    recorder.note(f"{name}: kernels of a step", sum(count for _, count, _ in kernels) / steps)
    for key, count, us in kernels[:MOST_TOLD]:
        recorder.note(f"{name}: {key[:NAME_CHARS]}", f"{count / steps:.1f} launches, {us / steps:.1f} µs")


def busy_us(ranges: Iterable[tuple[float, float]]) -> float:
    """µs in which any of these ranges (begin, end) lies."""
    busy, reached = 0.0, 0.0
    for begin, end in sorted(ranges):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy


def _ranges(found: Any) -> Iterator[tuple[float, float]]:
    """When the device worked, in µs."""
    for event in found.events():
        if event.device_type.name == "CUDA":
            yield event.time_range.start, event.time_range.end


def _own_us(event: Any, device: str) -> float:
    return float(event.self_cpu_time_total if device == "cpu" else event.self_device_time_total)
