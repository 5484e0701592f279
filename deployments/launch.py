"""`make serve`: serve a configuration file on this machine alone, and end in order.

    python -m deployments.launch serve_config.yaml

The first SIGINT or SIGTERM drains: new requests get 503 with Retry-After, and running ones have `drain_s` seconds to
finish. A second signal ends everything at once. The exit status is 0 in both cases, and 1 if the application cannot
start. With --dry-run nothing is served: the memory that each application would take is printed.
"""

import argparse
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from deployments.checks import check_edge, check_models, check_port, device_here, read_settings
from deployments.config_file import listen_address, our_applications, read_document
from deployments.console import say
from deployments.proxy import DRAIN_TOKEN

if TYPE_CHECKING:
    from deployments.cluster import Cluster

# Ray reads these variables at import, here and in every process that it starts. A variable that is already set stays.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # On every system 0 makes Ray use 127.0.0.1 as the node's address and listen there only. The name misleads.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Seconds between two health checks of the proxy (10 by default). Serve replaces it after three failures.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Seconds in which a proxy must start (5 by default). Serve replaces a slower one, and on a busy machine the next is
    # no faster.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy:middlewares",
    # The proxy asks replicas by gRPC and from its own event loop, not by Ray's streaming calls from another thread: a
    # third of its processor time per event of a stream, and half per request.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # As long as gRPC allows: what is ready of a reply is one message.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    # Serve's own log goes to its files only; the console has our lines.
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
POLL_S = 0.2


class SecondSignal(BaseException):
    """The second signal raises this in the main thread."""


class Signals:
    """Handles SIGINT and SIGTERM: the first one sets `stop_requested`, the second raises SecondSignal."""

    def __init__(self) -> None:
        self.stop_requested = threading.Event()

    def listen(self) -> None:
        """Install the handlers. Call it again after ray.init, which installs its own handler for SIGTERM."""
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
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deployments.launch", description="Serve on this machine alone.")
    parser.add_argument("config", type=Path, help="a Serve configuration file, such as serve_config.yaml")
    parser.add_argument("--dry-run", action="store_true", help="print the memory that it would take, and end")
    parsed = parser.parse_args(arguments)
    return serve(lambda: read_document(parsed.config), str(parsed.config), dry_run=parsed.dry_run)


def serve(read: Callable[[], Any], source: str, *, dry_run: bool = False) -> int:
    """Serve a configuration on this machine alone until a signal. Returns the exit status.

    read: gives the configuration's document. source: what to call it.
    """
    began, signals = time.monotonic(), Signals()
    signals.listen()
    cluster = None
    try:
        say(f"starting {source}")
        token = secrets.token_urlsafe()
        os.environ |= ENVIRONMENT | os.environ | {DRAIN_TOKEN: token}
        try:
            document = read()
            check(document, port_too=not dry_run)
            say(f"settings, files and tokenizers are valid ({time.monotonic() - began:.1f} s)")
            from deployments.cluster import Cluster, read_config  # imports Ray

            if dry_run:
                from deployments.dry_run import dry_run as memory_tables  # imports torch

                say("\n".join(memory_tables(read_config(document))))
                return 0
            cluster = Cluster(read_config(document), token)
        except (OSError, ValueError) as error:
            say(f"{source}: {error}")
            return 1
        return run(cluster, signals, began)
    except (SecondSignal, SystemExit):  # while Ray starts, its own handler turns SIGTERM into SystemExit
        signals.ignore()
        say("ending at once")
        return 0
    finally:
        signals.ignore()
        if cluster is not None:
            cluster.kill()


def check(document: Any, *, port_too: bool = True) -> None:
    """Check what can be checked before Ray starts. Raises OSError or ValueError; says what an operator may want to
    change."""
    for application in our_applications(document):
        settings = read_settings(application.args, application.user_config)
        check_edge(settings)
        check_models(settings, device_here(settings), application.user_config)
        if settings.hint is not None:
            say(settings.hint)
    host, port = listen_address(document)
    if port_too and port is not None:
        check_port(host, port)


def run(cluster: "Cluster", signals: Signals, began: float) -> int:
    """Serve from the cluster's start to its orderly end. Returns the exit status. Raises SecondSignal.

    began: monotonic seconds, when the start began.
    """
    try:
        cluster.start()
    except OSError as error:
        say(str(error))
        return 1
    say(f"Ray and Serve run ({time.monotonic() - began:.1f} s); a replica starts")
    signals.listen()
    known_troubles: set[str] = set()
    cluster.look()
    while not (signals.stop_requested.is_set() or cluster.settled):
        for trouble in set(cluster.troubles) - known_troubles:
            known_troubles.add(trouble)
            say(f"waiting: {trouble}")
        cluster.start_helpers()
        time.sleep(POLL_S)
        cluster.look()
    if not signals.stop_requested.is_set():
        if cluster.failures:
            say("\n".join(cluster.failures))
            return 1
        say(f"ready: {cluster.url}/ui ({time.monotonic() - began:.1f} s)")
        cluster.start_helpers()
    signals.stop_requested.wait()
    drain(cluster)
    cluster.stop()
    return 0


def drain(cluster: "Cluster") -> None:
    """Refuse new requests and wait up to drain_s until none runs, then cancel the rest."""
    deadline = time.monotonic() + cluster.drain_s
    say(f"ending: running requests have {cluster.drain_s:g} s; a second signal ends them at once")
    while cluster.drain(max(0.0, left_s := deadline - time.monotonic())) and left_s > 0:
        time.sleep(min(left_s, POLL_S))


if __name__ == "__main__":
    sys.exit(main())
