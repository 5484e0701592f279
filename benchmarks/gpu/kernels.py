"""Where the device's time of a round goes, by kernel."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.steps import Recorder
from benchmarks.measure import Run

MOST_TOLD = 14
NAME_CHARS = 70


def tell_kernels(recorder: Recorder, name: str, run: Callable[[], Run]) -> None:
    """Note the kernels that took most of a run: launches and µs for each of its steps. A profiler makes a step longer,
    but not its kernels."""
    activity = ProfilerActivity.CPU if recorder.device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity]) as found:
        steps = len(run().steps)
    kernels = [(event.key, event.count, _own_us(event, recorder.device)) for event in found.key_averages()]
    kernels = sorted((k for k in kernels if k[2] > 0), key=lambda k: -k[2])
    recorder.note(f"{name}: device's time of a step, µs", sum(us for *_, us in kernels) / steps)
    recorder.note(f"{name}: kernels of a step", sum(count for _, count, _ in kernels) / steps)
    for key, count, us in kernels[:MOST_TOLD]:
        recorder.note(f"{name}: {key[:NAME_CHARS]}", f"{count / steps:.1f} launches, {us / steps:.1f} µs")


def _own_us(event: Any, device: str) -> float:
    return float(event.self_cpu_time_total if device == "cpu" else event.self_device_time_total)
