"""Python in processes of their own, in which torch is imported and nothing has been computed.

They are forks of one process, because the imports take seconds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import json, os, sys, traceback
import torch
from engine.memory import host as host_memory
from engine.loading import load
for line in sys.stdin:
    script, environment, output, errors = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.environ.update(environment)
    for path, number in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    break
"""


@dataclass(frozen=True)
class Done:
    """What a process said, and its exit status."""

    stdout: str
    stderr: str
    returncode: int


class Forks:
    def __init__(self, parent: "subprocess.Popen[str]", folder: Path) -> None:
        self._parent = parent
        self._folder = folder

    def run(self, script: str, environment: Mapping[str, str] | None = None) -> Done:
        """Run a script to its end. `environment` is added to that of the tests."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        output, errors = self._folder / "stdout", self._folder / "stderr"
        request = [script, dict(environment or {}), str(output), str(errors)]
        print(json.dumps(request), file=self._parent.stdin, flush=True)
        status = int(self._parent.stdout.readline())
        return Done(output.read_text(), errors.read_text(), status)


@contextmanager
def forks(folder: Path) -> Iterator[Forks]:
    """Their outputs go to files in `folder`. Settings of oneDNN in the environment of the tests do not reach them."""
    environment = {name: value for name, value in os.environ.items() if "DNN" not in name}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        yield Forks(parent, folder)
