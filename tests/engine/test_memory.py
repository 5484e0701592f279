"""Large blocks are kept: allocating one again costs few page faults."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from deployments.engine.memory import keep_freed_memory
torch.set_num_threads(1)
told = keep_freed_memory() if sys.argv[1] == "keep" else None
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [torch.ones(2_000_000) for _ in range(3)]  # 8 MB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(2)
print(told, faults(10))
"""


def run(mode: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    told, count = done.stdout.split()
    return told, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is tuned on Linux with glibc only")
def test_freed_blocks_fault_no_more() -> None:
    """The control, without the call, faults for most pages of every block (40,000 times here against 8,000)."""
    told, kept = run("keep")
    if told == "False":
        pytest.skip("this C library has no mallopt")
    assert kept * 3 < run("control")[1]
