"""A Ray cluster on this machine alone with Serve in it. launch.py uses Ray only through this module."""

import json
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray._private.node import Node
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.serve._private.api import _create_controller_and_proxy_refs
from ray.serve._private.client import ServeControllerClient
from ray.serve.config import ControllerOptions, HTTPOptions, ProxyLocation
from ray.serve.context import _set_global_client
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ProxyStatus, ServeDeploySchema

from app.proxy import DRAIN_PATH
from deployments.checks import explain
from deployments.config_file import BUILDER
from deployments.console import WorkerLines
from deployments.settings import Settings

FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
RAYS_PRINTER = "ray_print_logs"  # shows the lines of workers; ray.shutdown removes it by this name
# Methods of Ray's Node. The log monitor brings the replicas' lines; the API server is the dashboard.
LOG_MONITOR = "start_log_monitor"
HELPERS = (LOG_MONITOR, "start_api_server", "start_monitor")
STOP_LIMIT_S = 10  # for replicas to end once no request runs
PROXY_LIMIT_S = 2.0  # for the proxy to answer a drain command
# Ray warns of its own default, a secret between the cluster's processes. The warning of its absence is shown.
RAYS_NOTICE = ("ray._private.authentication.authentication_token_setup", "Token authentication is enabled")
RAYS_LOGS = "/tmp/ray/session_latest/logs"
NO_PROXY = f"the HTTP proxy does not listen yet; its log is in {RAYS_LOGS}/serve"


def read_config(document: Any) -> ServeDeploySchema:
    """Return the configuration of a YAML document. Raises ValueError if it is not valid for Serve."""
    try:
        return ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ValueError(explain(error, ServeDeploySchema)) from None


def _refusal(application: ApplicationStatusOverview) -> str | None:
    """The engine's own words, if the builder or a replica has refused what was configured."""
    messages = [deployment.message for deployment in application.deployments.values()]
    lines = [line for message in (*messages, application.message) for line in message.splitlines()]
    return next((line.partition("ConfigError: ")[2] for line in reversed(lines) if "ConfigError: " in line), None)


def _failure(application: ApplicationStatusOverview) -> str | None:
    """Why an application cannot start; None: it may. Serve tries a replica three times, but a refusal stays one.

    An application that runs is not ended by a further replica that refuses.
    """
    if application.status == ApplicationStatus.RUNNING:
        return None
    return _refusal(application) or (application.message if application.status in FAILED else None)


@contextmanager
def _postponed(*names: str) -> Iterator[dict[str, Callable[[], None]]]:
    """Let ray.init leave these methods of Node out. Yields the calls that it would have made, by name."""
    calls: dict[str, Callable[[], None]] = {}
    methods = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(
            Node, name, lambda node, name=name, **options: calls.update({name: partial(methods[name], node, **options)})
        )
    try:
        yield calls
    finally:
        for name, method in methods.items():
            setattr(Node, name, method)


class Cluster:
    """Starts with `start` and ends with `kill`, which may be called at any time. `stop` ends the applications first."""

    def __init__(self, config: ServeDeploySchema, drain_token: str) -> None:
        """Raises ValueError for settings that cannot be served."""
        self._config = config
        self._drain_token = drain_token
        self._helpers: dict[str, Callable[[], None]] = {}
        self._seen: dict[str, ApplicationStatusOverview] = {}
        self._listens = False  # whether a proxy does; Serve replaces one that is slow to start
        ours = [application for application in config.applications if application.import_path == BUILDER]
        # Seconds that running requests get at the end: the longest of all our applications.
        self.drain_s = max((Settings.model_validate(application.args).drain_s for application in ours), default=0.0)

    def start(self) -> None:
        """Start a new cluster, even if this machine has one already, and deploy the applications without waiting.

        Raises OSError if Ray cannot start.
        """
        logger, notice = RAYS_NOTICE
        logging.getLogger(logger).addFilter(lambda record: not record.getMessage().startswith(notice))
        try:
            with _postponed(*HELPERS) as self._helpers:  # ray.init would wait for them
                ray.init(address="local", namespace="serve", logging_level=logging.WARNING)
        except Exception as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise OSError(f"Ray could not start: {reason} Its logs are in {RAYS_LOGS}") from error
        self._start_helpers(LOG_MONITOR)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        global_worker_stdstream_dispatcher.remove_handler(RAYS_PRINTER)
        global_worker_stdstream_dispatcher.add_handler(RAYS_PRINTER, WorkerLines().show)
        self._deploy()

    def _deploy(self) -> None:
        """As serve.start and deploy_apps do, but the applications are built while the proxy starts.

        Does not wait for that proxy: it may be replaced.
        """
        controller, _ = _create_controller_and_proxy_refs(
            HTTPOptions.model_validate(self._config.http_options.model_dump()),
            grpc_options=None,
            global_logging_config=None,
            global_tracing_config=None,
            controller_options=ControllerOptions(),
            proxy_location=self._config.proxy_location,
        )
        client = ServeControllerClient(controller)
        _set_global_client(client)
        client.deploy_apps(self._config, _blocking=False)

    def look(self) -> None:
        """Ask Serve how the applications and the proxy are. The three below tell what it said."""
        status = serve.status()
        self._seen = status.applications
        disabled = self._config.proxy_location is ProxyLocation.Disabled
        self._listens = disabled or ProxyStatus.HEALTHY in status.proxies.values()

    @property
    def settled(self) -> bool:
        """Whether every application runs and can be reached, or one has failed."""
        return bool(self.failures) or (self._run and self._listens)

    @property
    def _run(self) -> bool:
        states = [application.status for application in self._seen.values()]
        return bool(states) and all(state is ApplicationStatus.RUNNING for state in states)

    @property
    def failures(self) -> list[str]:
        reasons = {name: _failure(application) for name, application in self._seen.items()}
        return [f"application {name}: {reason}" for name, reason in reasons.items() if reason is not None]

    @property
    def troubles(self) -> list[str]:
        """What Serve says of deployments that cannot start yet, and whether only the proxy is missing."""
        messages = [deployment.message for a in self._seen.values() for deployment in a.deployments.values()]
        lines = [message.splitlines()[0] for message in messages if message.strip()]
        return [*lines, NO_PROXY] if self._run and not self._listens else lines

    def start_helpers(self) -> None:
        """Start Ray's dashboard and autoscaler once every application is built; before, does nothing.

        They take six seconds of processor time, and no replica needs them to start. Replicas load on one core each, so
        another one is free here.
        """
        if self._seen and all(application.deployments for application in self._seen.values()):
            self._start_helpers(*HELPERS)

    def _start_helpers(self, *names: str) -> None:
        """Start each of these helpers of Ray's that has not started yet."""
        for name in names:
            start = self._helpers.pop(name, None)
            if start is not None:
                start()

    @property
    def url(self) -> str:
        scheme = "https" if self._config.http_options.ssl_certfile else "http"
        return f"{scheme}://{self._host}:{self._config.http_options.port}"

    def drain(self, seconds: float) -> int:
        """Let this machine's proxy refuse new requests because it ends in `seconds`. Returns how many still run.

        0 seconds cancels the running requests. Returns 0 without a proxy, because then nothing runs, and 1 if something
        else answers, because then the number is unknown.
        """
        headers = {"authorization": f"Bearer {self._drain_token}"}
        connection = self._connect()
        try:
            connection.request("POST", f"{DRAIN_PATH}?seconds={seconds:.3f}", headers=headers)
            return int(json.loads(connection.getresponse().read())["open"])
        except ConnectionRefusedError:
            return 0
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return 1
        finally:
            connection.close()

    def stop(self) -> None:
        """End the applications in order, so that replicas export their last spans. Takes at most STOP_LIMIT_S."""
        for name in serve.status().applications:
            serve.delete(name, _blocking=False)
        deadline = time.monotonic() + STOP_LIMIT_S
        while serve.status().applications and time.monotonic() < deadline:
            time.sleep(0.2)

    def kill(self) -> None:
        ray.shutdown()

    @property
    def _host(self) -> str:
        host = self._config.http_options.host
        return "127.0.0.1" if host in ("0.0.0.0", "::") else host

    def _connect(self) -> HTTPConnection:
        port = self._config.http_options.port
        if self._config.http_options.ssl_certfile:  # the certificate names the public host, not the loopback address
            insecure = ssl._create_unverified_context()
            return HTTPSConnection(self._host, port, timeout=PROXY_LIMIT_S, context=insecure)
        return HTTPConnection(self._host, port, timeout=PROXY_LIMIT_S)
