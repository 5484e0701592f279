"""Compiled code is made once for all processes that start together, and each function gets its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.kernels import cpu_compile
from engine.kernels.cpu_addresses import call, callee_of
from engine.kernels.cpu_compile import compiled_exactly
from engine.kernels.cpu_products import NUMBERS_PRODUCTS

ROOT = Path(__file__).resolve().parents[3]
# Slow to compile: the processes meet before, so that each would do it if none waited.
FUNCTION = "\n".join(
    [
        "from engine.kernels.cpu_compile import compiled",
        "@compiled",
        "def inner(x, total):",
        *(f"    for i in range({n}, len(x)): total += x[i] * x[i - {n}] / (1 + x[{n}])" for n in range(8)),
        "    return total",
        "@compiled",
        "def outer(x):",
        "    return inner(x, x[0]) + 1",
    ]
)
PROCESS = """
import sys, numpy
from made_up import inner, outer
print("ready", flush=True)
sys.stdin.readline()
outer(numpy.ones(50))
print(sum(sum(f.stats.cache_misses.values()) for f in (inner, outer)))
"""


def test_of_two_processes_one_compiles_and_the_other_reads_its_code(tmp_path: Path) -> None:
    (tmp_path / "made_up.py").write_text(FUNCTION, "utf-8")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    compiled = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert sum(compiled) == 2  # functions, by both


def test_a_process_that_waits_for_another_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And compiles by itself in the end: the other may hang."""
    monkeypatch.setattr(cpu_compile, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu_compile, "LONGEST_S", 0.1)
    monkeypatch.setattr(cpu_compile, "TOLD_S", 0.1)
    caplog.set_level("INFO", cpu_compile.log.name)
    with cpu_compile._by_one_process("module.function (int64,)"), cpu_compile._by_one_process("module.other ()"):
        assert not caplog.messages
        with cpu_compile._by_one_process("module.function (int64,)"):
            pass
    assert caplog.messages == ["another process compiles module.function; this one waits for its code"]


def test_functions_for_numbers_of_different_types_have_different_names() -> None:
    """LLVM would take one's code for another's."""
    functions = NUMBERS_PRODUCTS.values()
    assert len({function.py_func.__qualname__ for function in functions}) == len(functions) == 8


@compiled_exactly
def add(x: Any, to: Any) -> None:
    for i in range(len(x)):
        to[i] += x[i]


@compiled_exactly
def call_twice(callee: Any, given: Any) -> None:
    call(callee, given)
    call(callee, given)


def test_a_callee_refuses_arguments_of_other_types() -> None:
    x, wide = np.ones(3, np.float32), np.ones(3)
    callee = callee_of(add, x, x)
    call_twice(callee, (x, sums := np.zeros(3, np.float32)))
    assert sums.tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="arguments of other types than"):
        call_twice(callee, (wide, wide))
    assert callee == callee_of(add, sums, sums) != callee_of(add, wide, wide)


PRODUCT = """
import sys, numpy
from engine.kernels.cpu_products import NUMBERS_PRODUCTS, PANEL, callee_of, product
from engine.kernels.cpu_compile import compiled_exactly

@compiled_exactly
def multiply(x, given, out):
    product(x, given, 0, out.shape[1], out)

x, none = numpy.ones((1, 4), numpy.float32), numpy.empty(0, numpy.float32)
bias, out = numpy.zeros(PANEL, numpy.float32), numpy.empty((1, PANEL), numpy.float32)
for name in sys.argv[1:]:
    panels = numpy.full((1, 4 * PANEL), {"float32": 2, "uint16": 0x4000}[name], name)  # bf16 lies in uint16
    weight = panels.view(numpy.uint8), none, none.view(numpy.int32), bias
    callee = callee_of(NUMBERS_PRODUCTS[panels.dtype.type, False], x, weight, 0, 0, x)
    multiply(x, (callee, weight), out)
    print(out[0, 0])
"""


@pytest.mark.proofs
def test_code_that_other_processes_kept_is_not_taken_for_another_function_s(tmp_path: Path) -> None:
    """Each process compiles the code for one type of numbers. The last one reads all of it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    (tmp_path / "program.py").write_text(PRODUCT, "utf-8")
    for names in (["float32"], ["uint16"], ["uint16", "float32", "uint16"]):
        command = [sys.executable, str(tmp_path / "program.py"), *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout.split() == ["8.0"] * len(names)
