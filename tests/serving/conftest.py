"""The shipped application as operators run it: serve_config.yaml with a free port and short delays, as `make serve`
starts it or with `serve run`."""

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.launch import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 240

# fp64: there the served text must equal the offline text, without exception. Small numbers make limits reachable.
ARGS: dict[str, Any] = {
    "dtype": "float64",
    "max_running": 8,
    "max_waiting": 24,
    "max_model_len": 512,
    "body_timeout_s": 3,
}
# An option that deployments/build.py also sets: the YAML's value must win.
OPTIONS = {"graceful_shutdown_timeout_s": 61.0}
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 60,  # more than the tests have at once, except for the one that scales
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
}

# Ray and Serve look after themselves less often than by default: that takes a third of a core of an idle cluster.
SELDOM = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "500"}
METRICS = {"RAY_metrics_report_interval_ms": "2000"}  # by default ten seconds, for which tests would wait

# By its address: "auto" takes any cluster of this machine. Replicas of what it deploys get its variables.
CONNECT = """
import json, os, pathlib, ray
from ray import serve
(port,) = pathlib.Path(os.environ["RAY_TMPDIR"]).glob("ray/session_latest/gcs_server_port_*")
variables = {"env_vars": json.loads(os.environ.get("REPLICA_VARIABLES", "{}"))}
ray.init(f"{ray.util.get_node_ip_address()}:{port.read_text()}", log_to_driver=False, runtime_env=variables)
"""

_SECOND = "from deployments.build import build;"

# Runs each piece of Python that it reads, and answers with what the piece gave the name `answer`.
DRIVE = """
import sys
from ray.serve.schema import ServeDeploySchema
client = serve.context._get_global_client()
for line in sys.stdin:
    names = dict(globals())
    exec(json.loads(line), names)
    print("answer", json.dumps(names["answer"], default=str), flush=True)
"""
# As `serve deploy` does.
DEPLOY = "client.deploy_apps(ServeDeploySchema.model_validate(json.loads({!r})))\n"
PIDS = """
deployment = client.get_serve_details()['applications']['foretoken']['deployments']['Replica']
answer = sorted(replica['pid'] for replica in deployment['replicas'])
"""


@pytest.fixture(scope="module", autouse=True)
def _httpx_leaves_nothing_to_the_next_module() -> Iterator[None]:
    """httpx leaves sockets open that are cancelled while they connect. Here they are collected without a warning; later
    they would fail another module's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@dataclass(frozen=True)
class Served:
    """A running application."""

    url: str
    environment: dict[str, str]
    config: dict[str, Any]  # that it was started with
    process: "subprocess.Popen[bytes]"  # that started it
    log: Path
    driver: "Driver"

    def replicas(self) -> int:
        """Replicas that run now, as Serve counts them."""
        states = self._ask(
            "d = serve.status().applications['foretoken'].deployments['Replica'];"
            "answer = {str(getattr(k, 'value', k)): v for k, v in d.replica_states.items()}"
        )
        return int(states.get("RUNNING", 0))

    def deployment_config(self) -> dict[str, Any]:
        """The options that Serve runs the deployment with, wherever they came from."""
        options: dict[str, Any] = self._ask(
            "details = client.get_serve_details()['applications']['foretoken'];"
            "answer = details['deployments']['Replica']['deployment_config']"
        )
        return options

    @contextmanager
    def beside(self, args: dict[str, Any], variables: dict[str, str] | None = None) -> Iterator["Served"]:
        """A second application with these settings, below /second of the same server. variables: of the environment of
        its replicas, which a driver of its own then starts."""
        driver = self.driver
        if variables is not None:
            environment = self.environment | {"REPLICA_VARIABLES": json.dumps(variables)}
            driver = Driver(environment, self.log.with_name("second_driver.log"))
        second = replace(self, url=f"{self.url}/second", driver=driver)
        try:
            second._ask(_SECOND + f"serve.run(build({args!r}), name='second', route_prefix='/second'); answer = {{}}")
            yield second
        finally:
            second._ask("serve.delete('second'); answer = {}")
            if driver is not self.driver:
                driver.close()

    def failure_of(self, args: dict[str, str]) -> str:
        """Why a second application with these arguments does not start, in the words of its status."""
        answer = self._ask(f"""{_SECOND}
import contextlib
with contextlib.suppress(RuntimeError):
    serve.run(build({args!r}), name="second", route_prefix="/second")
answer = {{"message": serve.status().applications["second"].deployments["Replica"].message}}
serve.delete("second")""")
        return str(answer["message"])

    def deploy(self, config: dict[str, Any] | None) -> list[int]:
        """Deploy a configuration; None: deploy nothing. Returns the process ids of the replicas."""
        pids: list[int] = self._ask(("" if config is None else DEPLOY.format(json.dumps(config))) + PIDS)
        return pids

    def _ask(self, question: str) -> Any:
        """Run `question`, which sets `answer`, in a driver of the application's cluster."""
        return self.driver.ask(question)


class Driver:
    """A driver of the application's cluster. The first question starts its process, because its imports take seconds.
    Threads may ask."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment, self._log = environment, log
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, question: str) -> Any:
        """What `question` called `answer`."""
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(question), file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("answer "):
                    return json.loads(line.removeprefix("answer "))
        pytest.fail(f"the driver ended:\n{self._log.read_text('utf-8', 'replace')[-2000:]}")

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()

    def _start(self) -> "subprocess.Popen[str]":
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", CONNECT + DRIVE], env=self._environment, cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("serve"), ARGS, AUTOSCALING) as application:
        yield application


SERVE_RUN = (str(Path(sys.executable).with_name("serve")), "run")
LAUNCH = (sys.executable, "-m", "deployments.launch")  # `make serve`


@contextmanager
def serving(
    folder: Path, args: dict[str, Any], autoscaling: dict[str, Any], command: Sequence[str] = LAUNCH
) -> Iterator[Served]:
    """Serve the shipped configuration with these changes, in a cluster of its own; its log is below `folder`."""
    ray_folder = tempfile.mkdtemp(prefix="ft")  # short: Ray makes Unix sockets in it, whose paths are limited
    port = _free_port()
    config = folder / "serve_config.yaml"
    shortened = _shortened(port, args, autoscaling)
    config.write_text(yaml.safe_dump(shortened), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": ray_folder,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "default",
        **SELDOM,
        **METRICS,
    }
    if command == LAUNCH:  # for drivers that join its cluster
        environment |= ENVIRONMENT
    with open(folder / "log", "wb") as log:
        # A group of its own, so that an interrupt of the tests does not reach it; SIGINT ends the cluster in order.
        # RAY_ADDRESS=local: a cluster of its own, whichever the machine's environment names.
        process = subprocess.Popen(
            [*command, str(config)], cwd=ROOT, env=environment | {"RAY_ADDRESS": "local"}, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        driver = Driver(environment, folder / "driver.log")
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, folder / "log")
            yield Served(url, environment, shortened, process, folder / "log", driver)
        finally:
            driver.close()
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            shutil.rmtree(ray_folder, ignore_errors=True)


def _shortened(port: int, args: dict[str, Any], autoscaling: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] |= args
    (deployment,) = application["deployments"]
    deployment |= OPTIONS | {"autoscaling_config": autoscaling}
    return config


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if process.poll() is not None:
            break
        time.sleep(0.3)
    pytest.fail(f"the application did not start:\n{log.read_text('utf-8', 'replace')[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
