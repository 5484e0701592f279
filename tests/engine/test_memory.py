"""Large blocks are kept: allocating one again costs few page faults. And errors that say that memory is out."""

import subprocess
import sys

import pytest
import torch

from deployments.engine.memory import out_of_memory

SCRIPT = """
import resource, sys, torch
from deployments.engine import memory
torch.set_num_threads(1)
if sys.argv[1] == "control":
    memory.TRIM_BYTES = memory.MMAP_BYTES = 128 * 1024  # what glibc starts with
told = memory.keep_freed_memory()
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [torch.ones(320_000) for _ in range(4)]  # 1.3 MB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(20)
print(told, faults(100))
"""


def run(mode: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    told, count = done.stdout.split()
    return told, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is tuned on Linux with glibc only")
def test_freed_blocks_fault_no_more() -> None:
    """The control, with glibc's initial thresholds, faults for every page of every block: 120,000 times."""
    told, kept = run("keep")
    if told == "False":
        pytest.skip("this C library has no mallopt")
    assert kept < 1_000
    assert run("control")[1] > 10_000


def test_an_allocation_that_is_too_large_says_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("on the GPU"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("out of ideas"))
