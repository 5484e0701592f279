"""`make serve`: serve a configuration file on this machine alone, and end in order.

    python -m deployments.launch serve_config.yaml

The first SIGINT or SIGTERM drains: new requests get 503 with Retry-After, running ones may end within `drain_s`
seconds. A second one ends everything at once. The exit status is 0 either way, 1 if the application cannot start.
"""

import argparse
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from deployments.proxy import DRAIN_TOKEN

if TYPE_CHECKING:
    from deployments.cluster import Cluster

# Ray reads these when it is imported, here and in every process that it starts. A value that is set already stays.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The name misleads: 0 makes Ray of any system take 127.0.0.1 for the node's address, and listen there only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Serve replaces a proxy that failed three checks: this many seconds apart, 10 by default.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy:middlewares",
}
POLL_S = 0.2  # between looks at what still starts or runs


class SecondSignal(BaseException):
    """Raised in the main thread by the second signal."""


class Signals:
    """Counts SIGINT and SIGTERM: the first one is noted, the second raises SecondSignal."""

    def __init__(self) -> None:
        self.stop_requested = threading.Event()

    def listen(self) -> None:
        """Take the signals. Call it again after ray.init, which takes SIGTERM for itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested.is_set():
            raise SecondSignal
        self.stop_requested.set()


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m deployments.launch", description="Serve on this machine alone.")
    parser.add_argument("config", type=Path, help="such as serve_config.yaml")
    path = parser.parse_args(arguments).config
    signals = Signals()
    signals.listen()
    cluster = None
    try:
        token = secrets.token_urlsafe()
        os.environ |= ENVIRONMENT | os.environ | {DRAIN_TOKEN: token}
        from deployments.cluster import Cluster, read_config  # imports Ray

        try:
            cluster = Cluster(read_config(path), token)
        except (OSError, ValueError) as error:
            say(f"{path}: {error}")
            return 1
        return run(cluster, signals)
    except (SecondSignal, SystemExit):  # a SIGTERM while Ray starts is SystemExit: ray.init takes it for itself
        signals.ignore()
        say("ending at once")
        return 0
    finally:
        signals.ignore()
        if cluster is not None:
            cluster.kill()


def run(cluster: "Cluster", signals: Signals) -> int:
    """From the cluster's start to its orderly end; the exit status. Raises SecondSignal."""
    cluster.start()
    signals.listen()
    while not (signals.stop_requested.is_set() or cluster.settled):
        time.sleep(POLL_S)
    if not signals.stop_requested.is_set():
        failures = cluster.failures()
        if failures:
            say("\n".join(failures))
            return 1
        say(f"ready at {cluster.url}")
    signals.stop_requested.wait()
    drain(cluster)
    cluster.stop()
    return 0


def drain(cluster: "Cluster") -> None:
    """Wait until nothing runs, at most drain_s, then end what does. New requests are refused from the first look on."""
    deadline = time.monotonic() + cluster.drain_s
    say(f"ending: running requests have {cluster.drain_s:g} s; a second signal ends them at once")
    while cluster.drain(max(0.0, left := deadline - time.monotonic())) and left > 0:
        time.sleep(min(left, POLL_S))


def say(line: str) -> None:
    print(f"foretoken: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
