"""A Ray cluster on this machine alone with Serve in it. launch.py uses Ray only through this module."""

import json
import logging
import ssl
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema

from app.proxy import DRAIN_PATH
from deployments.checks import explain
from deployments.config_file import BUILDER
from deployments.console import WorkerLines
from deployments.settings import Settings

FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
RAYS_PRINTER = "ray_print_logs"  # shows the lines of workers; ray.shutdown removes it by this name
STOP_LIMIT_S = 10  # for replicas to end once no request runs
PROXY_LIMIT_S = 2.0  # for the proxy to answer a drain command


def read_config(document: Any) -> ServeDeploySchema:
    """Return the configuration of a YAML document. Raises ValueError if it is not valid for Serve."""
    try:
        return ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ValueError(explain(error, ServeDeploySchema)) from None


def _reason(application: ApplicationStatusOverview) -> str:
    """Why an application failed: the engine's own words, if the builder or a replica refused, else Serve's."""
    messages = [deployment.message for deployment in application.deployments.values()]
    lines = [line for message in (*messages, application.message) for line in message.splitlines()]
    reasons = [line.partition("ConfigError: ")[2] for line in lines if "ConfigError: " in line]
    return reasons[-1] if reasons else application.message


class Cluster:
    """Starts with `start` and ends with `kill`, which may be called at any time. `stop` ends the applications first."""

    def __init__(self, config: ServeDeploySchema, drain_token: str) -> None:
        """Raises ValueError for settings that cannot be served."""
        self._config = config
        self._drain_token = drain_token
        ours = [application for application in config.applications if application.import_path == BUILDER]
        # Seconds that running requests get at the end: the longest of all our applications.
        self.drain_s = max((Settings.model_validate(application.args).drain_s for application in ours), default=0.0)

    def start(self) -> None:
        """Start a new cluster, even if this machine has one already, and deploy the applications without waiting."""
        ray.init(address="local", namespace="serve", logging_level=logging.WARNING)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        global_worker_stdstream_dispatcher.remove_handler(RAYS_PRINTER)
        global_worker_stdstream_dispatcher.add_handler(RAYS_PRINTER, WorkerLines().show)
        options = self._config.http_options.model_dump()
        serve.start(self._config.proxy_location, http_options=options)
        client = serve.context._get_global_client()
        assert client is not None, "Serve has started"
        client.deploy_apps(self._config, _blocking=False)

    @property
    def settled(self) -> bool:
        """Whether every application runs or one has failed."""
        states = [application.status for application in serve.status().applications.values()]
        return any(s in FAILED for s in states) or (
            bool(states) and all(s is ApplicationStatus.RUNNING for s in states)
        )

    def failures(self) -> list[str]:
        applications = serve.status().applications.items()
        return [f"application {name}: {_reason(app)}" for name, app in applications if app.status in FAILED]

    def troubles(self) -> list[str]:
        """What Serve says of deployments that cannot start yet."""
        applications = serve.status().applications.values()
        messages = [deployment.message for a in applications for deployment in a.deployments.values()]
        return [message.splitlines()[0] for message in messages if message.strip()]

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
