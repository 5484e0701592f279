"""A peer in a process of its own, which answers one JSON request per line. It stands still between requests."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "@@"  # begins the lines of the protocol; what else a worker prints is ignored
LOG_LINES = 12  # of a failed worker's log


class WorkerError(RuntimeError):
    """A worker ended without an answer. The message has the end of its log."""


class Worker:
    """Requests and replies are objects. The first reply says that the models are loaded.

    The worker's processes are stopped (SIGSTOP) from each reply to the next request: threads that spin while they wait
    would take a core from the system being timed.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """log: where the worker's stderr goes. Raises WorkerError, also for a program that does not exist."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("w") as stderr:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env={**os.environ, **environment},
                    start_new_session=True,  # so that a signal to the group reaches the worker's children
                )
        except OSError as error:
            raise WorkerError(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            self.first_reply = self._reply()
        except WorkerError:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Raises WorkerError."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._reply()

    def close(self) -> None:
        """End the worker's processes, whatever they do."""
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._signal(signal.SIGSTOP)
                reply: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return reply
        raise self._failure()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _failure(self) -> WorkerError:
        status = self._process.wait()
        lines = self._log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
        return WorkerError("\n".join([f"{self._log.stem} ended with status {status}:", *lines]))
