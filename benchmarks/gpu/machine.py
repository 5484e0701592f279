"""The machine and its versions, and how fast it copies: what byte floors are made of."""

import gc
import os
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter

import torch

from benchmarks.common import describe_machine
from benchmarks.gpu.steps import Recorder
from engine.kernels.triton_modules import triton_reason

COPIED_BYTES = 2**32
RUNS = 10
PACKAGES = ("transformers", "tokenizers", "safetensors", "numpy", "triton")


def describe(recorder: Recorder) -> None:
    for name, value in describe_machine(recorder.device).items():
        recorder.note(name, str(value))
    recorder.note("platform", platform.platform())
    for package in PACKAGES:
        recorder.note(package, _version(package))
    if recorder.device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(recorder.device)
        recorder.note("CUDA", str(torch.version.cuda))
        recorder.note("compute capability", f"{properties.major}.{properties.minor}")
        recorder.note("device memory, GB", properties.total_memory / 1e9)
        recorder.note("C compiler", _compiler() or "none: triton needs one for the GPU's driver")
        recorder.note("kernels", triton_reason() or "triton can run them")
    recorder.note("copy bandwidth, GB/s", bandwidth(recorder.device) / 1e9)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _compiler() -> str | None:
    """The one that triton takes."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def bandwidth(device: str) -> float:
    """Bytes per second of a copy within the device's memory, read and written bytes together."""
    size = 2**24 if device == "cpu" else min(COPIED_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    place = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: place.copy_(source), device)


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Median seconds that the device takes for one run, after a first one."""
    run()
    return median(_time_one(run, device) for _ in range(RUNS))


def _time_one(run: Callable[[], object], device: str) -> float:
    wait(device)
    began = perf_counter()
    run()
    wait(device)
    return perf_counter() - began


def give_back() -> None:
    """Give the memory of objects that nobody uses back to the device. An engine refers to itself."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
