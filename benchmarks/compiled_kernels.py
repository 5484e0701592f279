"""Compiles the paged attention kernels for GPU architectures, on a machine without a GPU.

Prints per kernel and architecture its shared memory, registers, spilled bytes and tensor-core instructions. Run:
python -m benchmarks.compiled_kernels
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.kernels.paged_rows import PagedRows, max_split_rows

SHARED_LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes of shared memory per program
TENSOR_CORE = {torch.bfloat16: r"mma\.sync\S*\.bf16|wgmma\S*\.bf16", torch.float16: r"mma\.sync\S*\.f16|wgmma\S*\.f16"}


@dataclass(frozen=True, slots=True)
class KernelCase:
    """An attention layer and a pass over it, as far as they decide what is compiled."""

    head_dim: int
    group: int
    max_rows: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    trees: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel: the arguments by name and the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    capability: int
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    tensor_cores: bool
    waits: bool  # whether it waits for the kernel in front of it, as one that starts early must
    warpgroup: bool = False  # whether products are those of four warps together, which compute 64 rows at once


class LaunchRecorder:
    """Stands where a kernel is launched, and writes down the launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*positional: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
            options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": named.pop("launch_pdl", False)}
            arguments = dict(zip(self._kernel.arg_names, positional, strict=False)) | named
            self._launches.append(Launch(self._kernel, arguments, options))

        return record


@contextmanager
def recorded(module: Any, *kernels: str) -> Iterator[list[Launch]]:
    """The launches of a module's kernels, none of which runs."""
    launches: list[Launch] = []
    with ExitStack() as stack:
        for name in kernels:
            stack.enter_context(patch.object(module, name, LaunchRecorder(getattr(module, name), launches)))
        yield launches


@contextmanager
def starting_early(module: Any, capability: int) -> Iterator[None]:
    """A module's kernels are launched as on a GPU of this compute capability: see engine/kernels/early_start.py."""
    can = capability >= 90
    with (
        patch.object(module, "starts_early", lambda device: can),
        patch.object(module, "early_options", lambda device: {"launch_pdl": True} if can else {}),
    ):
        yield


def launches_of(case: KernelCase, capability: int) -> list[Launch]:
    """What a pass over the layer launches on a GPU of this compute capability."""
    from engine.kernels import paged_kernel, paged_launch

    queries = torch.zeros(16, 2 * case.group, case.head_dim, dtype=case.dtype)
    pool = torch.zeros(16, case.block_size, 4, case.head_dim, dtype=case.dtype)
    sinks = torch.zeros(2 * case.group, dtype=case.dtype) if case.sinks else None
    kind = patch.object(paged_launch, "has_wgmma", lambda device: capability // 10 == 9)
    with (
        kind,
        starting_early(paged_launch, capability),
        recorded(paged_kernel, "attend_keys", "join_parts") as launches,
    ):
        paged_launch.attend(queries, pool, some_rows(case), 0.1, case.window, case.softcap, sinks)
    return launches


def some_rows(case: KernelCase) -> PagedRows:
    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    rows, tree = numbers(16, dtype=torch.int64), case.trees
    return PagedRows(
        tables=numbers(16, 256),
        first_rows=numbers(17),
        lengths=numbers(16),
        owners=numbers(16),
        positions=rows,
        last_visible=rows,
        paths=rows if tree else None,
        bases=numbers(16) if tree else None,
        max_rows=case.max_rows,
        split_rows=max_split_rows([case.max_rows]),
        max_keys=4096,
    )


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Raises RuntimeError or triton's errors if the kernel cannot be compiled."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    kernel = launch.kernel
    signature, values, aligned = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], values[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = type_name(value)
        if is_aligned(parameter, value):
            aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, spilled = resources(made.asm["cubin"])
    cores = re.search("|".join(TENSOR_CORE.values()), made.asm["ptx"]) is not None
    together = "wgmma" in made.asm["ptx"]
    waits = "griddepcontrol.wait" in made.asm["ptx"]
    return Compiled(kernel.__name__, capability, made.metadata.shared, registers, spilled, cores, waits, together)


def is_aligned(parameter: Any, value: object) -> bool:
    """Whether Triton's launch would tell the compiler that the argument is a multiple of 16."""
    if isinstance(value, Tensor):
        return not parameter.do_not_specialize_on_alignment
    return isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize


def type_name(value: object) -> str:
    """Triton's name of an argument's type."""
    if isinstance(value, Tensor):
        names = {"float": "fp", "int": "i", "uint": "u"}
        kind, bits = re.fullmatch(r"torch\.(bfloat|float|uint|int)(\d+)", str(value.dtype)).groups()  # type: ignore[union-attr]
        return f"*{names.get(kind, 'bf')}{bits}"
    return "fp32" if isinstance(value, float) else "i32"


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack and local memory) of a compiled kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return resource_usage(text)


def resource_usage(text: str) -> tuple[int, int]:
    """(registers, spilled bytes) of a thread, from cuobjdump's report. Raises RuntimeError where it has none."""
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text}")
    return int(found[1]), int(found[2]) + int(found[3])


CASES = {
    "1 row, 64": KernelCase(64, 7, 1),
    "6 rows, 64": KernelCase(64, 7, 6),
    "1 row, 128": KernelCase(128, 4, 1),
    "6 rows, 128": KernelCase(128, 4, 6, block_size=64),
    "16 rows, 128, window, cap": KernelCase(128, 4, 16, window=1024, softcap=50.0),
    "tree of 32, 128, sinks": KernelCase(128, 8, 32, sinks=True, trees=True, window=128),
    "prefill, 64": KernelCase(64, 7, 2048),
    "prefill, 80": KernelCase(80, 1, 2048, dtype=torch.float16),
    "prefill, 128": KernelCase(128, 4, 2048, block_size=32),
    "1 row, 256": KernelCase(256, 2, 1),
    "6 rows, 256, window, cap": KernelCase(256, 2, 6, window=1024, softcap=50.0),
    "prefill, 256": KernelCase(256, 2, 2048),
    "1 row, 128, fp32": KernelCase(128, 4, 1, dtype=torch.float32),
    "prefill, 128, fp32": KernelCase(128, 4, 2048, dtype=torch.float32),
    "prefill, 256, fp32": KernelCase(256, 2, 2048, dtype=torch.float32),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="+", default=list(SHARED_LIMITS), choices=list(SHARED_LIMITS))
    options = parser.parse_args(arguments)
    print("| layer and pass | kernel | sm | shared, bytes | registers | spilled, bytes | tensor cores |")
    print("|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        for capability in options.capabilities:
            for launch in launches_of(case, capability):
                made = compile_launch(launch, capability)
                figures = (made.kernel, capability, made.shared, made.registers, made.spilled, made.tensor_cores)
                print("|", " | ".join(map(str, (name, *figures))), "|", flush=True)


if __name__ == "__main__":
    main()
