"""The kernels of coded products compile for GPU architectures within their shared memory and registers, and passes of
few rows are computed with one instruction, whatever their number: otherwise a row would depend on its company."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.examples import in_proofs

pytestmark = pytest.mark.slow

# Triton decides at import whether it interprets kernels, so they are compiled in a process of their own.
COMPILE = """
import json
from dataclasses import asdict

import torch

from benchmarks.compiled_kernels import compile_launch, recorded
from engine.kernels import coded_kernel

INNER = 4864
CODES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}


def launches(kind, groups, rows, out):
    codes = torch.zeros(out, INNER // (2 if kind == "int4" else 1), dtype=CODES[kind])
    steps, x = torch.zeros(groups, out), torch.zeros(rows, INNER, dtype=torch.bfloat16)
    with recorded(coded_kernel, "multiply_kernel", "join_kernel") as made:
        coded_kernel.coded_product(x, codes, steps, steps if groups > 1 else None, x[0, :out])
    return made


for kind, groups, rows, capability, out in CASES:
    for launch in launches(kind, groups, rows, out)[: 1 if groups > 1 else 2]:
        made = asdict(compile_launch(launch, capability))
        print(json.dumps(made | {"rows": rows}))
"""
# (kind, groups, rows, compute capability, output channels) of a product
Case = tuple[str, int, int, int, int]
USUAL: tuple[Case, ...] = (
    ("int4", 38, 1, 90, 896),
    ("int4", 38, 65, 90, 896),
    ("int8", 1, 17, 80, 896),
    ("fp8", 1, 129, 90, 896),
)
OTHERS: tuple[Case, ...] = (
    ("int4", 152, 1, 90, 4096),
    ("int4", 38, 17, 90, 896),
    *(("int4", 38, rows, capability, 896) for capability in (80, 86, 89) for rows in (65, 129)),
    *(("int4", 152, rows, capability, 4096) for capability in (80, 89) for rows in (1, 17)),
    *((kind, 1, 129, capability, 896) for capability in (80, 89) for kind in ("int8", "fp8")),
    ("int4", 152, 1, 89, 896),
    ("fp8", 1, 1, 90, 896),
    ("fp8", 1, 65, 90, 896),
)


@pytest.mark.parametrize("cases", [USUAL, *in_proofs(OTHERS)], ids=["usual", "others"])
def test_the_kernels_compile_within_what_a_gpu_has(cases: tuple[Case, ...]) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from benchmarks.compiled_kernels import SHARED_LIMITS

    command = [sys.executable, "-c", f"CASES = {cases}\n{COMPILE}"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in made} == {"multiply_kernel", "join_kernel"}
    assert {one["capability"] for one in made} == {capability for *_, capability, _ in cases}
    for one in made:
        assert one["shared"] <= SHARED_LIMITS[one["capability"]], one
        assert one["registers"] <= 255, one
        assert one["spilled"] == 0, one
        assert one["tensor_cores"] == (one["kernel"] == "multiply_kernel"), one
        assert not (one["warpgroup"] and one["rows"] <= 64), one
    assert any(one["warpgroup"] for one in made)  # a pass of many rows takes it, so the line above can see one
