"""The lines that an operator reads on the console. Imports neither torch nor Ray.

A replica is another process: Ray brings what it writes to stderr to the console of whoever started it.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any

PREFIX = "foretoken: "
PACKAGES = ("app", "deployments", "engine")  # whose loggers are shown


class ShortFormat(logging.Formatter):
    """`foretoken: MESSAGE`, with the level if it is above INFO."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{PREFIX}{level}{record.message}"


def say(line: str) -> None:
    print(f"{PREFIX}{line}", flush=True)


def show_logs(*others: logging.Handler) -> None:
    """Write this project's log from INFO on to stderr, and to the other handlers."""
    handler = logging.StreamHandler(sys.__stderr__)  # Serve may have redirected sys.stderr to its own log
    handler.setFormatter(ShortFormat())
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler, *others]
        logger.propagate = False


class WorkerLines:
    """Prints what the processes of a cluster write to stdout and stderr, in place of Ray's own printer.

    The first replica's lines stand as they are. All others begin with the process that wrote them.
    """

    def __init__(self) -> None:
        self._replica: Any = None  # process id of the first replica

    def show(self, data: Mapping[str, Any]) -> None:
        """data: a message of Ray's log monitor."""
        pid = data.get("pid")
        if pid == "autoscaler":  # it has no machine to add
            return
        for line in data.get("lines", ()):
            if line.startswith(PREFIX) and self._replica is None:
                self._replica = pid
            ours = pid == self._replica
            print(line if ours else f"{data.get('actor_name') or 'process'} {pid}: {line}", flush=True)
