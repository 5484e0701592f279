"""The kernels of few rows compile for compute capability 9.0, the only one that they are used on, within its shared
memory and registers. Several rows are computed by tensor cores, and one row is not."""

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

from benchmarks.compiled_kernels import compile_launch, recorded, starting_early
from engine.kernels import row_kernel, row_product_kernel as kernels


def launches(rows, inner, out):
    x, weight = torch.zeros(rows, inner, dtype=torch.bfloat16), torch.zeros(out, inner, dtype=torch.bfloat16)
    bias, stored = torch.zeros(out, dtype=torch.bfloat16), torch.zeros(64, 2, 64, dtype=torch.bfloat16)
    factors, places = torch.zeros(rows, out // 2, dtype=torch.complex64), torch.zeros(rows, dtype=torch.int64)
    norm = (x[0] if rows == 1 else None), 1e-6, 0.0
    with starting_early(kernels, 90), recorded(kernels, "sum_kernel", "dot_kernel") as made:
        kernels.project_and_store(x, weight, bias, factors, stored, places, out - 128, *norm)
        kernels.gated_product(x, weight, *norm)
        if rows == 1:
            kernels.add_product_(bias[None], x, weight)
        else:
            kernels.product_parts(x, weight)
    return made


def beside(inner):
    # The kernels that start early beside the products.
    rows, pairs = torch.zeros(4, inner, dtype=torch.bfloat16), torch.zeros(4, 64, dtype=torch.complex64)
    heads, places = torch.zeros(4, 2, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    with starting_early(row_kernel, 90), recorded(row_kernel, "norm_kernel", "rotate_kernel") as made:
        row_kernel.normalise(rows, rows[0], 1e-6, 0.0, torch.zeros(2, *rows.shape))
        row_kernel.rotate_and_store(heads[:, :1], heads[:, 1:], pairs, heads[:, 1:].clone(), places)
    return made


for rows, inner, out in CASES:
    for launch in launches(rows, inner, out):
        print(json.dumps(asdict(compile_launch(launch, 90)) | {"rows": rows}))
for launch in beside(896):
    print(json.dumps(asdict(compile_launch(launch, 90)) | {"rows": 1}))
"""
Case = tuple[int, int, int]  # rows, input channels, output channels
USUAL: tuple[Case, ...] = ((1, 896, 1152), (6, 3584, 4608))
OTHERS: tuple[Case, ...] = (
    (48, 896, 1152),
    *((rows, inner, out) for rows in (1, 8, 16, 32) for inner, out in ((896, 1152), (2048, 3072), (4096, 6144))),
    *((rows, 18944, 3584) for rows in (1, 8, 16, 32, 64)),
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
    assert len(made) == 3 * len(cases) + 2
    for one in made:
        assert one["waits"], f"it may start early: {one}"
        assert one["shared"] <= SHARED_LIMITS[90], one
        assert one["registers"] <= 255, one
        assert one["spilled"] == 0, one
        assert one["tensor_cores"] == (one["kernel"] == "dot_kernel") == (one["rows"] > 1), one
