"""The Serve deployment: one engine on one device, its own HTTP ingress. All Ray Serve calls of a replica are here."""

import gc
import logging
import socket
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve._private import replica as serve_replica
from starlette.applications import Starlette

from app.keys import Keys
from app.main import create_app
from app.page.live import Live
from app.telemetry import export, names
from app.telemetry.tracer import Tracer
from deployments.bridge import LocalClient
from deployments.metrics import Meter
from deployments.settings import EdgeConfig, PolicySettings
from engine.config import ConfigError, EngineConfig
from engine.engine import Engine

LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


@serve.deployment
@serve.ingress()
class Replica:
    """Hosts the target, the drafter and the HTTP application; there is no handle hop between a token and its socket."""

    def __init__(self, config: EngineConfig, edge: EdgeConfig) -> None:
        """Loads the pair; an error here is the deployment's start-up error, so its message names what to change."""
        _show_logs()
        _keep_to_loopback()
        self._edge = edge
        self._keys = None if edge.api_key_file is None else Keys.read(Path(edge.api_key_file))
        self._spans = export.provider(_resource()) if edge.traces.level != "off" else None
        self._text = self._spans is not None and export.captures_text()
        log.info("traces: %s", "none" if self._spans is None else edge.traces)
        gpus = ray.get_gpu_ids()
        log.info("loading %s on %s (GPUs given by Ray: %s)", config.target, config.device, gpus or "none")
        engine = Engine.from_config(config)
        self.client = LocalClient(engine, edge.model_name)
        self.meter = Meter(self.client, edge.model_name)
        self._serving = False  # whether Serve has started it, with a user_config if there is one
        gc.collect()
        gc.freeze()  # what is loaded by now stays: a full collection that walks over it takes a tenth of a second

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve after __init__; its handlers are closures over this replica's engine."""
        tracers = [] if self._spans is None else [Tracer(self.client, self._spans, self._edge.traces, text=self._text)]
        return create_app(
            self.client,
            [*tracers, self.meter],
            live=Live(self.client),
            keys=self._keys,
            body_timeout_s=self._edge.body_timeout_s,
        )

    def reconfigure(self, user_config: Any) -> None:
        """Take a deployment's `user_config`, a PolicySettings, at the start and whenever it changes.

        At the start an invalid one ends it, with the reason. Later it changes nothing but /health, which says why: a
        running replica whose reconfigure raises is drained, no other starts, and then nobody serves (Ray 2.60).
        """
        try:
            self.client.configure(PolicySettings.model_validate(user_config).freeze())
        except (ValidationError, ConfigError) as error:
            reason = _reason(error)
            if not self._serving:
                raise ConfigError(f"user_config: {reason}") from None
            self.client.refuse(reason)
            log.warning("this user_config is not taken, and the policy stays as it is: %s", reason)
        else:
            log.info("policy: %s", user_config)
        self._serving = True

    def check_health(self) -> None:
        """Raise unless the engine progresses; after three failures Serve replaces the replica."""
        self._serving = True
        self.meter.beat()
        stats = self.client.stats()
        if not stats.healthy:
            raise RuntimeError(stats.reason)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What a custom autoscaling policy may read."""
        stats = self.client.stats()
        return {
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "slots_used": 1 - stats.free_slots / stats.max_running,
            "kv_used": stats.kv_used,
        }

    def __del__(self) -> None:
        client: Any = getattr(self, "client", None)  # absent when loading failed
        if client is not None:
            client.close()
        spans: Any = getattr(self, "_spans", None)
        if spans is not None:
            spans.shutdown()  # Serve kills the process next


def _resource() -> dict[str, str]:
    """What spans say of where they are from."""
    context = serve.get_replica_context()
    return {
        "service.name": names.SCOPE,
        "service.version": names.VERSION,
        "service.instance.id": context.replica_id.unique_id,
        "ray.serve.application": context.app_name,
        "ray.serve.deployment": context.deployment,
        "host.name": socket.gethostname(),
    }


def _reason(error: ValidationError | ConfigError) -> str:
    """On one line, with every field at fault, and without the input, which may be anything."""
    if isinstance(error, ConfigError):
        return str(error)
    faults = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(": ".join(filter(None, (".".join(map(str, f["loc"])), f["msg"]))) for f in faults)


def _keep_to_loopback() -> None:
    """Where Ray keeps to the loopback interface, let the server for calls between replicas do so too. Serve starts it
    after __init__, on every interface, and it takes pickles (Ray 2.60)."""
    serve_module: Any = serve_replica
    listen = serve_module.add_port_to_grpc_server
    if ray.util.get_node_ip_address() == LOOPBACK:
        serve_module.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", LOOPBACK))


def _show_logs() -> None:
    """Let what this project logs, INFO too, go where Serve's own log of the replica goes."""
    for name in ("app", "deployments", "engine"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = logging.getLogger("ray.serve").handlers
        logger.propagate = False
