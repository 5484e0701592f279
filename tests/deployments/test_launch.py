"""How `make serve` ends: drained by the first signal, at once by the second, and with which status."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from ray._private.node import Node
from ray.serve.schema import ApplicationStatus, ProxyStatus

from deployments import launch
from deployments.cluster import HELPERS, NO_PROXY, RAYS_LOGS, Cluster, read_config
from deployments.config_file import read_document
from deployments.launch import SecondSignal, Signals, main, run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
http_options: {host: 0.0.0.0, port: %d}
applications: [{import_path: deployments.build:build, args: {drain_s: 7}}]
"""


class FakeCluster:
    """A cluster that is settled at once. `loads`: the running requests at each poll of the drain."""

    url = "http://127.0.0.1:1"
    settled = True

    def __init__(self, loads: list[int], drain_s: float = 30.0, failures: list[str] | None = None) -> None:
        self.loads, self.drain_s = loads, drain_s
        self.did: list[str] = []
        self.failures = failures or []
        self.troubles: list[str] = []
        self.on_drain: Callable[[], None] = lambda: None
        self.on_helpers: Callable[[], None] = lambda: None

    def start(self) -> None:
        self.did.append("start")

    def look(self) -> None:
        pass

    def start_helpers(self) -> None:
        self.on_helpers()

    def drain(self, seconds: float) -> int:
        assert 0 <= seconds <= self.drain_s
        self.did.append("drain" if seconds else "cut")
        self.on_drain()
        return self.loads.pop(0) if self.loads else 0

    def stop(self) -> None:
        self.did.append("stop")

    def kill(self) -> None:
        self.did.append("kill")


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    monkeypatch.setattr(launch, "POLL_S", 0.001)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(cluster: Any, signals: Signals, number: int) -> int:
    """Run the cluster, with one signal: as soon as it is ready, or while it starts if it never is.

    A signal by the clock would end the test's own process where it came before the handlers.
    """

    def first() -> None:
        if not signals.stop_requested.is_set():
            os.kill(os.getpid(), number)

    cluster.on_helpers = first
    return run(cluster, signals, time.monotonic())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_then_stops(signals: Signals, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster([2, 1])
    assert interrupted(cluster, signals, number) == 0
    assert cluster.did == ["start", "drain", "drain", "drain", "stop"]
    assert "foretoken: ready: http://127.0.0.1:1/ui (" in capsys.readouterr().out


def test_the_drain_lasts_no_longer_than_it_may(signals: Signals) -> None:
    cluster = FakeCluster([1] * 10_000, drain_s=0.05)
    assert interrupted(cluster, signals, signal.SIGTERM) == 0
    assert cluster.loads, "it did not wait for the last request"
    assert cluster.did[1] == "drain"
    assert cluster.did[-2:] == ["cut", "stop"]


def test_no_time_to_drain_is_none(signals: Signals) -> None:
    cluster = FakeCluster([1], drain_s=0.0)
    assert interrupted(cluster, signals, signal.SIGTERM) == 0
    assert cluster.did == ["start", "cut", "stop"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_drain_at_once(signals: Signals, number: int) -> None:
    cluster = FakeCluster([1] * 10_000)

    def second() -> None:
        """Only once: a busy process may take it late, and a third signal would end the test itself."""
        if cluster.did.count("drain") == 1:
            os.kill(os.getpid(), number)

    cluster.on_drain = second
    with pytest.raises(SecondSignal):
        interrupted(cluster, signals, signal.SIGTERM)
    assert cluster.did[:2] == ["start", "drain"]
    assert not {"cut", "stop"} & set(cluster.did)
    assert cluster.loads, "it waited for the last request"


def test_a_signal_during_the_start_ends_it_without_a_word_of_ready(
    signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = FakeCluster([])
    cluster.settled = False
    assert interrupted(cluster, signals, signal.SIGINT) == 0
    assert "ready" not in capsys.readouterr().out
    assert cluster.did[-1] == "stop"


def test_an_application_that_fails_is_told_and_is_status_1(
    signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(FakeCluster([], failures=["application a: no such directory"]), signals, 0.0) == 1  # type: ignore[arg-type]
    assert "application a: no such directory" in capsys.readouterr().out


@pytest.mark.parametrize("raised", [SecondSignal(), SystemExit(signal.SIGTERM)])
def test_signals_while_it_starts_end_it_with_status_0(
    signals: Signals, raised: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During ray.init Ray turns SIGTERM into SystemExit. A second signal raises SecondSignal at any time."""
    cluster = FakeCluster([])
    monkeypatch.setattr(cluster, "start", Mock(side_effect=raised))
    monkeypatch.setattr("deployments.cluster.Cluster", lambda *_: cluster)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG % 1, encoding="utf-8")
    assert main([str(file)]) == 0
    assert cluster.did == ["kill"]


def test_where_ray_cannot_start_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signals: Signals
) -> None:
    """On a machine that is too busy Ray gives up after 30 s."""
    monkeypatch.setattr("deployments.launch.check", lambda document, port_too: None)
    monkeypatch.setattr("deployments.cluster.ray.init", Mock(side_effect=Exception("The node timed out.\nMore")))
    monkeypatch.setattr("deployments.cluster.ray.shutdown", Mock())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG % 1, encoding="utf-8")
    assert main([str(file)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"foretoken: Ray could not start: The node timed out. Its logs are in {RAYS_LOGS}"


def test_signals_are_ignored_once_it_kills(signals: Signals) -> None:
    signals.listen()
    signals.ignore()
    os.kill(os.getpid(), signal.SIGTERM)
    assert not signals.stop_requested.is_set()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("applications: 4", "valid list"),
        ("applications: [{import_path: deployments.build:build, args: {drain_s: soon}}]", "drain_s"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        Cluster(read_config(read_document(file)), "token")


def test_a_start_without_a_configuration_says_so_and_is_status_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deployments.launch", str(tmp_path / "none.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[1].startswith(f"foretoken: {tmp_path / 'none.yaml'}: ")


class Proxy(BaseHTTPRequestHandler):
    """Answers a drain as the class says."""

    reply = b""
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_POST(self) -> None:
        self.asked.append((self.path, self.headers["authorization"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("reply", "unfinished"), [(b'{"open": 3}', 3), (b'{"open": 0}', 0), (b"<html>", 1), (b"{}", 1), (b"[]", 1)]
)
def test_the_proxy_is_asked_what_still_runs(tmp_path: Path, reply: bytes, unfinished: int) -> None:
    Proxy.reply = reply
    Proxy.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        file = tmp_path / "serve.yaml"
        file.write_text(CONFIG % server.server_port, encoding="utf-8")
        cluster = Cluster(read_config(read_document(file)), "token")
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        assert cluster.drain(2.5) == unfinished
        answering.join()
    assert Proxy.asked == [("/-/drain?seconds=2.500", "Bearer token")]
    assert cluster.drain(2.5) == 0, "nobody listens there any more"
    assert cluster.drain_s == 7


def test_a_dry_run_prints_the_memory_and_serves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signals: Signals
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(Cluster, "__init__", lambda *_: pytest.fail("a cluster was made"))
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG % 1, encoding="utf-8")
    assert main([str(file), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith(": demo, one replica:")
    assert [line.split()[0] for line in lines[4:7]] == ["target", "draft", "KV"]


def test_a_dry_run_of_what_cannot_be_served_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signals: Signals
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = tmp_path / "serve.yaml"
    file.write_text((CONFIG % 1).replace("drain_s: 7", f"target: {tmp_path}/none"), encoding="utf-8")
    assert main([str(file), "--dry-run"]) == 1
    assert f"there is no directory {tmp_path}/none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (
            "DEPLOY_FAILED",
            "It failed 3 times.\nTraceback:\nengine.config.ConfigError: no weights in /a",
            "no weights in /a",
        ),
        ("DEPLOY_FAILED", "It failed 3 times.\nRuntimeError: other", "Failed to update the deployments ['Replica']."),
        # Serve would start the replica again, which would refuse again.
        (
            "DEPLOYING",
            "Retrying 2 more time(s).\nTraceback:\nengine.config.ConfigError: no weights in /a",
            "no weights in /a",
        ),
        ("DEPLOYING", "Retrying 2 more time(s).\nRuntimeError: other", None),
        # One of its replicas serves.
        ("RUNNING", "Retrying.\nTraceback:\nengine.config.ConfigError: the weights do not fit", None),
    ],
)
def test_a_failure_is_told_in_the_words_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, message: str, reason: str | None
) -> None:
    deployment = Mock(message=message)
    told = "Failed to update the deployments ['Replica']." if status == "DEPLOY_FAILED" else ""
    states = {
        "bad": Mock(status=status, message=told, deployments={"Replica": deployment}),
        "good": Mock(status="RUNNING", message="", deployments={}),
    }
    monkeypatch.setattr("deployments.cluster.serve.status", lambda: Mock(applications=states, proxies={}))
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG % 1, encoding="utf-8")
    cluster = Cluster(read_config(read_document(file)), "token")
    cluster.look()
    assert cluster.failures == ([] if reason is None else [f"application bad: {reason}"])
    assert cluster.settled == (reason is not None)


def test_it_is_ready_once_a_proxy_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve replaces a proxy that is slow to start, so the first one's end is not the start's."""
    seen = Mock(applications={"good": Mock(status=ApplicationStatus.RUNNING, message="", deployments={})}, proxies={})
    monkeypatch.setattr("deployments.cluster.serve.status", lambda: seen)
    file = tmp_path / "serve.yaml"
    for location, settles in (("HeadOnly", False), ("Disabled", True)):
        file.write_text(f"proxy_location: {location}\n{CONFIG % 1}", encoding="utf-8")
        cluster = Cluster(read_config(read_document(file)), "token")
        for status in (None, ProxyStatus.STARTING, ProxyStatus.UNHEALTHY):
            seen.proxies = {} if status is None else {"node": status}
            cluster.look()
            assert cluster.settled is settles
            assert cluster.troubles == ([] if settles else [NO_PROXY])
        seen.proxies = {"node": ProxyStatus.HEALTHY}
        cluster.look()
        assert cluster.settled
        assert not cluster.troubles


def test_rays_helpers_start_once_the_applications_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, they would take processor time from the builders. `serve status` needs them."""
    started: list[str] = []

    def init(**_: Any) -> None:
        node: Any = Mock(spec=Node)
        Node.start_log_monitor(node)
        Node.start_api_server(node, include_dashboard=None, raise_on_failure=False)
        assert not started, "ray.init waits for no dashboard"

    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG % 1, encoding="utf-8")
    cluster = Cluster(read_config(read_document(file)), "token")
    for name in HELPERS:
        monkeypatch.setattr(Node, name, lambda node, name=name, **_: started.append(name))
    monkeypatch.setattr("deployments.cluster.ray.init", init)
    monkeypatch.setattr(Cluster, "_deploy", lambda cluster: started.append("Serve"))
    monkeypatch.setattr("deployments.cluster.global_worker_stdstream_dispatcher", Mock())
    cluster.start()
    assert started == ["start_log_monitor", "Serve"]
    for deployments, expected in (({}, []), ({"Replica": Mock()}, ["start_api_server"]), ({"Replica": Mock()}, [])):
        started.clear()
        monkeypatch.setattr(cluster, "_seen", {"default": Mock(deployments=deployments)})
        cluster.start_helpers()
        assert started == expected
    Node.start_monitor(Mock(spec=Node))
    assert started == ["start_monitor"], "outside of ray.init Node is itself"
