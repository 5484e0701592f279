"""The kernels of sampling, and of a layer's work on rows, compile for GPU architectures within their shared memory,
on a machine without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.examples import in_proofs

# Triton decides at import whether it interprets kernels, so they are compiled in a process of their own.
COMPILE = """
import json, sys
from dataclasses import replace

import torch

from benchmarks.compiled_kernels import compile_launch, recorded
from engine.kernels import decide_kernel, decide_trees_kernel, laws_kernel, path_rows_kernel, penalise_kernel
from engine.kernels import race_kernel, row_kernel, truncate_kernel, verdict_kernel

ROWS, VOCAB = 40, 151_936
DECIDING = "mass_kernel", "coin_kernel", "weight_kernel", "fallback_kernel"


def launches():
    number, real = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.float64)
    with recorded(race_kernel, "part_kernel", "join_kernel") as raced:
        for dtype, blocks in ((torch.float32, True), (torch.float64, False)):
            race_kernel.race(torch.zeros(ROWS, VOCAB, dtype=dtype), number, number, real, blocks)
    with recorded(truncate_kernel, "top_kernel", "search_kernel", "write_kernel") as cut:
        truncate_kernel.truncate(torch.zeros(ROWS, VOCAB), real, number, real, real)
    with recorded(verdict_kernel, "verdict_kernel") as decided:
        finite = torch.zeros(ROWS, dtype=torch.bool)
        verdict_kernel.match_verdict(number, finite, number.view(8, 5), torch.zeros(9, dtype=torch.int32))
    with recorded(penalise_kernel, "penalise_kernel", "record_kernel") as penalised:
        uses, params = torch.zeros(8, VOCAB, dtype=torch.int32), real.new_zeros(3, ROWS)
        for dtype in (torch.float32, torch.float64):
            logits, index = torch.zeros(ROWS, VOCAB, dtype=dtype), number.new_zeros(ROWS, 6)
            penalise_kernel.penalise(logits, uses, index, params, number.view(8, 5))
        penalise_kernel.record(uses, number.new_zeros(300))
    return [*raced, *decided, *penalised, *of_laws(number, real), *of_trees(number, real), *of_rows()], cut


def of_rows():
    with recorded(row_kernel, "norm_kernel", "rotate_kernel", "gate_kernel") as made:
        x, weight = torch.zeros(ROWS, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
        for added in (x, None):
            row_kernel.normalise(x, weight, 1e-6, 0.0, added)
        row_kernel.normalise_heads_(x.view(ROWS, 32, 128), weight.view(32, 128), 1e-6, 0.0)
        heads = x.view(ROWS, 32, 128)
        factors, stored = torch.zeros(ROWS, 2048, dtype=torch.complex64), heads.new_zeros(99, 16, 128)
        row_kernel.rotate_and_store(heads[:, :16], heads[:, 16:], factors, stored, torch.zeros(ROWS, dtype=torch.int64))
        row_kernel.silu_gate(x)
    return made


def of_laws(number, real):
    names = "mass_kernel", "law_kernel", "draft_kernel", "mark_kernel"
    with recorded(laws_kernel, *names) as made:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            laws_kernel.log_law(torch.zeros(ROWS, VOCAB, dtype=dtype), real)
            laws_kernel.mark_non_finite(number[:, None], torch.zeros(ROWS, VOCAB, dtype=dtype), -1)
    few = number[:2]
    with recorded(laws_kernel, *names) as filled, recorded(decide_kernel, *DECIDING) as decided:
        for dtype, lenience in ((torch.float32, None), (torch.float64, None), (torch.float32, real[:2])):
            p, q = torch.zeros(2, 5, VOCAB, dtype=dtype), torch.zeros(2, 4, VOCAB, dtype=dtype)
            laws_kernel.draft_laws(q, few, few.new_zeros(2, 4), p)
            decide_kernel.decide(p, q, few.new_zeros(2, 4), few, lenience, few, few)
    return [*made, *filled, *decided]


def of_trees(number, real):
    nodes = number.view(5, 8)
    with recorded(decide_trees_kernel, "sibling_kernel", "walk_kernel", "weight_kernel") as decided:
        for dtype in (torch.float32, torch.float64):
            p, q = (torch.zeros(5, n, VOCAB, dtype=dtype) for n in (9, 8))
            decide_trees_kernel.decide(p, q, nodes, nodes, real[:5], nodes, nodes, 2)
    with recorded(path_rows_kernel, "path_kernel") as moved:
        path_rows_kernel.path_rows(number, number[:5], nodes, nodes, nodes)
    return [*decided, *moved]


def variants(launches):
    found = {}
    for launch in launches:
        arguments = {
            name: value.to(torch.int8) if isinstance(value, torch.Tensor) and value.dtype is torch.bool else value
            for name, value in launch.arguments.items()
        }
        types = [x.dtype if isinstance(x, torch.Tensor) else x for x in arguments.values()]
        found.setdefault((launch.kernel.__name__, str(types)), replace(launch, arguments=arguments))
    return list(found.values())


others, cut = map(variants, launches())
largest = [others[0], *(x for x in cut if x.arguments.get("MASS") and not x.arguments["FIRST"])]
every = [*others, *cut]
first = {(launch.kernel.module, launch.kernel.__name__): launch for launch in reversed(every)}  # of each kernel
for capability, chosen in CHOSEN.items():
    for launch in {"all": every, "first": first.values(), "largest": largest[:2]}[chosen]:
        made = compile_launch(launch, capability)
        print(json.dumps([made.kernel, capability, made.shared, made.registers, made.spilled]))
"""
ALL = "part join top search write verdict penalise record mass law draft mark coin weight fallback"
ALL += " sibling walk path norm rotate gate"


@pytest.mark.parametrize(
    "chosen",
    [{90: "first"}, *in_proofs(dict.fromkeys((80, 86, 89), "largest") | {90: "all"})],
    ids=["usual", "all"],
)
def test_the_kernels_compile_within_what_a_gpu_has(chosen: dict[int, str]) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from benchmarks.compiled_kernels import SHARED_LIMITS

    done = subprocess.run(
        [sys.executable, "-c", f"CHOSEN = {chosen}\n{COMPILE}"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    for capability, which in chosen.items():
        names = {name for name, found, *_ in made if found == capability}
        assert names == (
            {f"{part}_kernel" for part in ALL.split()} if which != "largest" else {"part_kernel", "search_kernel"}
        )
    for name, capability, shared, registers, spilled in made:
        assert shared <= SHARED_LIMITS[capability], name
        assert registers <= 255, name
        assert spilled <= 16, name
