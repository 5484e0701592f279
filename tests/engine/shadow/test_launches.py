"""Every kernel that a round launches passes Triton's own launch path, short of the compiler, and then the compiler.

The interpreter and the tests of compiled kernels call kernels by other ways: neither binds arguments as a launch does.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.engine.shadow.report import KINDS
from tests.examples import in_proofs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "engine" / "kernels"
# Triton decides at import whether it interprets kernels, so they are launched in a process of their own.
PROBE = """
import json, sys, tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from transformers.utils import logging

from tests.engine.driving import drive
from tests.engine.shadow.both import logged, without_measurements
from tests.engine.shadow.cuda import launching, shadow_cuda
from tests.engine.shadow.emulator import emulated_graphs
from tests.engine.shadow.launches import GPU
from tests.engine.shadow.report import KINDS, pair_of, requests, start

torch.set_num_threads(1)
logging.disable_progress_bar()
seen = set()
with tempfile.TemporaryDirectory() as folder, logged() as said:
    for kind, graphs, dtype, weights in ROUNDS:
        with shadow_cuda() as device, without_measurements(), emulated_graphs() as emulator, launching(device) as found:
            config = {"dtype": dtype, "target_weights": weights, "draft_weights": weights, "graphs": graphs}
            engine = start(pair_of(KINDS[kind], Path(folder)), **config)
            run = drive(engine, requests(KINDS[kind]))
        faults = sum(step.draft_faults + step.failed for step in run.steps)
        errors = [received.error for received in run.received.values() if received.error]
        kernels = sorted({variant.name for variant in found})
        print(json.dumps({"kernels": kernels, "faults": faults, "errors": errors, "captured": len(emulator.tapes)}))
        for variant in found:
            key = variant.name, str(variant.signature), str(variant.values), str(variant.attributes)
            if COMPILED and key not in seen:
                seen.add(key)
                triton.compile(variant.source(), target=GPU, options=variant.options.__dict__)
print(json.dumps(said))
"""
# A kernel whose argument has a name of the function that binds arguments.
FAULT = """
import importlib.util, json, sys

import torch

from engine.kernels import penalise_kernel
from tests.engine.shadow.launches import launched

text = open(penalise_kernel.__file__).read()
open(FILE, "w").write(text.replace("strengths", "params"))
spec = importlib.util.spec_from_file_location("renamed_kernel", FILE)
sys.modules["renamed_kernel"] = renamed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(renamed)
index, strengths = torch.zeros(4, 3, dtype=torch.int64), torch.ones(3, 4, dtype=torch.float64)
for module in penalise_kernel, renamed:
    with launched(lambda name: None):
        try:
            module.penalise(torch.zeros(4, 99), torch.zeros(2, 99, dtype=torch.int32), index, strengths, index)
            print("launched")
        except TypeError as error:
            print(error)
"""
Round = tuple[str, bool, str, str]  # kind, graphs, type, form of the weights
TYPES = ("float16", "float32", "float64")
# Together they launch all kernels. With graphs rounds are launched as they are first, and captured later.
USUAL: list[Round] = [
    *((kind, True, "bfloat16", "as_is") for kind in ("block, top-p, penalties", "tree, rejection")),
    ("match", False, "bfloat16", "int4"),
]
OTHERS: list[Round] = [
    *((kind, graphs, "bfloat16", "as_is") for kind, graphs in product(KINDS, (False, True))),
    *((kind, False, dtype, "as_is") for kind, dtype in product(("block, top-p, penalties", "tree, rejection"), TYPES)),
    *(("match", False, "bfloat16", form) for form in ("int8", "int4", "fp8")),
]


@dataclass(frozen=True, slots=True)
class Probed:
    rounds: list[dict[str, Any]]
    said: list[str]  # warnings


@dataclass(frozen=True, slots=True)
class Usual:
    probed: Probed
    sound: str  # what the launch of a sound kernel printed
    renamed: str  # what the launch of a faulty kernel printed


def probe(rounds: list[Round]) -> Probed:
    """Run the rounds, and compile all kernels that they launch."""
    *found, said = map(json.loads, run(f"ROUNDS, COMPILED = {rounds}, True\n{PROBE}"))
    return Probed(found, said)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Usual:
    """The control runs in the same process, because a process takes seconds to import what it needs."""
    file = tmp_path_factory.mktemp("renamed") / "renamed_kernel.py"
    program = f"ROUNDS, COMPILED, FILE = {USUAL}, False, {str(file)!r}\n{PROBE}{FAULT}"
    *lines, sound, renamed = run(program)
    *found, said = map(json.loads, lines)
    return Usual(Probed(found, said), sound, renamed)


def run(program: str) -> list[str]:
    """The lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def launched_kernels(path: Path) -> set[str]:
    """The kernels that a module of engine/kernels launches: what is called as kernel[grid](…)."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    names = {ast.unparse(function.value) for function in calls if isinstance(function, ast.Subscript)}
    return {name if "." in name else f"{path.stem}.{name}" for name in names}


LAUNCHED = set[str]().union(*map(launched_kernels, sorted(KERNELS.glob("*.py"))))
# Longer texts and wider models need them: tests/engine/kernels/test_compiled_once.py launches them.
LONG = {"paged_kernel.join_parts", "coded_kernel.join_kernel"}


@pytest.mark.parametrize("compiled", [False, *in_proofs(True)], ids=["launched", "compiled"])
def test_all_kernels_of_all_rounds_can_be_launched(compiled: bool, request: pytest.FixtureRequest) -> None:
    rounds = OTHERS if compiled else USUAL
    probed = probe(rounds) if compiled else request.getfixturevalue("usual").probed
    assert probed.said == []
    for name, found in zip(rounds, probed.rounds, strict=True):
        kind, graphs = KINDS[name[0]], name[1]
        assert (found["faults"], found["errors"]) == (0, []), name
        draws_siblings = kind.tree is not None and kind.verifier == "rejection"  # their rounds are launched as they are
        assert (found["captured"] > 0) == (graphs and not draws_siblings), name
    assert {kernel for found in probed.rounds for kernel in found["kernels"]} == LAUNCHED - LONG


def test_a_kernel_that_cannot_be_launched_is_seen(usual: Usual) -> None:
    """The control: an argument has a name of the function that binds arguments."""
    assert usual.sound == "launched"
    assert usual.renamed != "launched"


# What the function that binds arguments names itself, what a launch takes beside arguments, and what Triton refuses.
BINDER = {"params", "specialization", "options", "specialize_impl", "backend", "JITCallable"}
LAUNCH = {"self", "grid", "warmup", "debug", "instrumentation_mode", "device", "device_type", "stream"}


def names_of_arguments(path: Path) -> dict[str, set[str]]:
    """By Triton function of a module."""
    functions = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef))
    return {
        f"{path.stem}.{function.name}": {argument.arg for argument in function.args.args}
        for function in functions
        if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    }


def test_no_argument_of_a_kernel_has_a_name_of_the_launch() -> None:
    from triton.backends.nvidia.compiler import CUDAOptions  # type: ignore[import-untyped]

    taken = BINDER | LAUNCH | set(CUDAOptions.__dataclass_fields__)
    found = {name: args for path in sorted(KERNELS.glob("*.py")) for name, args in names_of_arguments(path).items()}
    assert found.keys() >= LAUNCHED
    assert {name: args & taken for name, args in found.items() if args & taken} == {}
