"""Freed blocks are kept, so that allocating again costs few page faults. The number of compiled products is bounded.
Old objects are kept out of collections."""

import gc
import sys
import weakref

import pytest
import torch

from engine.memory import host
from engine.memory.errors import out_of_memory
from tests.engine.forked import Forks

SCRIPT = """
import resource, torch
from engine.memory import host as host_memory
torch.set_num_threads(1)
if CONTROL:
    host_memory.TRIM_BYTES = host_memory.MMAP_BYTES = 128 * 1024  # what glibc starts with
kept = host_memory.keep_freed_memory()
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [torch.ones(320_000) for _ in range(4)]  # 1.3 MB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(20)
print(kept, faults(100))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is tuned on Linux with glibc only")
def test_freed_blocks_fault_no_more(fresh_processes: Forks) -> None:
    """The control, with glibc's initial thresholds, faults for every page of every block: 120,000 times."""
    (supported, kept), (_, control) = (
        fresh_processes.run(f"CONTROL = {control}{SCRIPT}").stdout.split() for control in (False, True)
    )
    if supported == "False":
        pytest.skip("this C library has no mallopt")
    assert int(kept) < 1_000
    assert int(control) > 10_000


# The weights lie in the first thread's heap, their layouts in those of two others. ProductMaker.choose_forms gives
# freed memory back when all are laid out.
LAYOUTS = """
import torch
from engine.memory import host as host_memory
from engine.models.linear import Linear
from engine.models.product_choice import choose_forms
host_memory.keep_freed_memory()
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
products = [Linear(torch.ones(512, 512), None, ()) for _ in range(64)]
choose_forms(products[:1])  # what libraries take at their first call
before = resident()
choose_forms(products[1:], copies_bytes=0, timed=lambda shape, form, *_: 1e-6 if form == "transposed" else 9e-6)
host_memory.give_back_freed_memory()
print(resident() - before, 63 * 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is asked on Linux with glibc only")
def test_weights_that_were_laid_out_leave_no_holes_in_the_heap(fresh_processes: Forks) -> None:
    done = fresh_processes.run(LAYOUTS)
    assert done.returncode == 0, done.stderr
    grown, weights = map(int, done.stdout.split())
    assert grown < weights / 4


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("frozen_before", [False, True])
def test_objects_that_were_there_before_are_not_visited(frozen_before: bool) -> None:
    ours = gc.get_freeze_count() > 0  # tests/conftest.py froze what it imported
    gc.unfreeze()
    gc.collect()
    if frozen_before:
        gc.freeze()
    old = weakref.ref(Knot())
    try:
        with host.old_objects_unvisited():
            new = weakref.ref(Knot())
            gc.collect()
            assert old() is not None
            assert new() is None
        gc.collect()
        assert (old() is not None) is (gc.get_freeze_count() > 0) is frozen_before
    finally:
        gc.unfreeze()
        gc.collect()
        if ours:
            gc.freeze()


def test_an_allocation_that_is_too_large_says_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("on the GPU"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("out of ideas"))


# In place of opening a checkpoint, twelve products of different row counts are computed twice. oneDNN logs for each
# product of the second time whether it is compiled again.
PRODUCTS = """
import torch
from engine.memory import host as host_memory
from engine.loading import load
from engine.config import EngineConfig
host_memory.MAX_COMPILED_PRODUCTS = 8
def multiply():
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(512, 192))
    for rows in range(40, 52):
        torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 192), weight, None, "none", [], "")
def multiply_twice(path):
    multiply()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        multiply()
    raise SystemExit
load.open_checkpoint = multiply_twice
load.load_models(EngineConfig("none", threads=1))
"""


def compiled(processes: Forks, environment: dict[str, str]) -> tuple[int, int]:
    """(products that oneDNN found compiled, products that it compiled)."""
    done = processes.run(PRODUCTS, environment)
    assert done.returncode == 0, done.stderr
    made = [line for line in done.stdout.splitlines() if ",inner_product," in line or ",matmul," in line]
    hits, misses = (sum(f",create:cache_{what}," in line for line in made) for what in ("hit", "miss"))
    return hits, misses


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_compiled_products_are_bounded_from_the_start(fresh_processes: Forks) -> None:
    """A cache of 8 never holds the next of twelve products in turn. The operator's capacity goes before ours."""
    assert compiled(fresh_processes, {}) == (0, 12)
    assert compiled(fresh_processes, {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "100"}) == (12, 0)
