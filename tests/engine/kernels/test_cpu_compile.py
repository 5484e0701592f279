"""Compiled code is made once for all processes that start together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import cpu_compile

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
