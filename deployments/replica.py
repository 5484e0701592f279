"""The Serve deployment: one engine on one device with its own HTTP ingress. Serve calls a replica only through this."""

import gc
import logging
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve._private import replica as serve_replica
from starlette.applications import Starlette

from app.keys import ApiKeys
from app.main import create_app
from app.metrics.meter import Meter
from app.page.live import LivePage
from app.telemetry import export, names
from app.telemetry.exchange import Listener
from app.telemetry.request_log import RequestLog
from app.telemetry.tracer import Tracer
from deployments.console import show_logs
from deployments.ray_metrics import RayMetrics
from deployments.settings import EdgeConfig, PolicySettings
from engine.config import ConfigError, EngineConfig

LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


@serve.deployment
@serve.ingress()
class Replica:
    """Hosts the engine and the HTTP application in one process, so a token reaches its socket without a remote call."""

    def __init__(self, config: EngineConfig, edge: EdgeConfig) -> None:
        """Loads the models. Its errors are the deployment's start-up errors, so their messages say what to change."""
        # Here, because the process that builds the application imports this module too and needs no torch.
        from deployments.bridge import LocalClient
        from engine.engine import Engine

        _show_logs()
        _keep_to_loopback()
        self._config = config
        self._edge = edge
        self._keys = None if edge.api_key_file is None else ApiKeys.read(Path(edge.api_key_file))
        self._tracing = export.provider(_resource()) if edge.traces.level != "off" else None
        self._traces_text = self._tracing is not None and export.captures_text()
        if self._tracing is not None:
            log.info("traces: %s", edge.traces)
        device = f"{config.device} {ray.get_gpu_ids()}" if config.device != "cpu" else "cpu"
        drafts = " and ".join(config.draft_models) or "none"
        log.info("loading target %s and draft %s on %s", config.target, drafts, device)
        engine = Engine.from_config(config)
        self.client = LocalClient(engine, edge.model_name, edge.chat)
        self.meter = Meter(self.client, RayMetrics(edge.model_name))
        self._started = False  # whether Serve has started the replica and sent the first user_config
        gc.collect()
        gc.freeze()  # loaded objects stay for good; a full collection that visits them takes 0.1 s

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the HTTP application over this replica's engine. Serve calls this after __init__."""
        listeners: list[Listener] = [RequestLog()]
        if self._tracing is not None:
            listeners.append(Tracer(self.client, self._tracing, self._edge.traces, text=self._traces_text))
        return create_app(
            self.client,
            listeners,
            live_page=LivePage(self.client, trace_viewer_url=self._edge.trace_viewer_url),
            meter=self.meter,
            keys=self._keys,
            body_timeout_s=self._edge.body_timeout_s,
            allowed_origins=self._edge.allowed_origins,
        )

    def reconfigure(self, user_config: Any) -> None:
        """Apply the deployment's `user_config`, a PolicySettings. Serve calls this at the start and at every change.

        At the start an invalid user_config raises ConfigError and ends the replica. Later an invalid one changes only
        /health, which gives the reason. Serve drains a running replica whose reconfigure raises and starts no other, so
        none would be left (Ray 2.60). Later this returns before another draft is loaded, and the old one serves until
        then.
        """
        try:
            settings = PolicySettings.model_validate(user_config)
            draft = settings.draft_of(self._config)
            self.client.configure(settings.freeze())
            loaded = self.client.change_draft(draft)
            if not self._started:
                loaded.result()
        except (ValidationError, ConfigError) as error:
            reason = _reason(error)
            if not self._started:
                raise ConfigError(f"user_config: {reason}") from None
            self.client.refuse(reason)
            log.warning("the user_config is refused, and the policy stays: %s", reason)
        else:
            log.info("policy: %s", ", ".join(f"{name} {value}" for name, value in user_config.items()))
            if self._started:
                loaded.add_done_callback(self._tell_of_draft)
        self._started = True

    def _tell_of_draft(self, loaded: "Future[None]") -> None:
        """Tell why a draft cannot serve. Runs on the thread that loads drafts."""
        if loaded.cancelled() or (error := loaded.exception()) is None:
            return
        self.client.refuse(str(error))
        log.warning("the draft stays: %s", error, exc_info=None if isinstance(error, ConfigError) else error)

    def check_health(self) -> None:
        """Raise RuntimeError if the engine makes no progress. After three failures Serve replaces the replica.

        Serve calls this last in a replica's start, and then periodically.
        """
        self._started = True
        self.client.prepare_chats()
        self.meter.beat()
        stats = self.client.stats()
        if not stats.healthy:
            raise RuntimeError(stats.reason)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures that a custom autoscaling policy may read."""
        stats = self.client.stats()
        return {
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "slots_used": 1 - stats.free_slots / stats.max_running,
            "kv_used": stats.kv_used,
        }

    def __del__(self) -> None:
        client: Any = getattr(self, "client", None)  # missing if loading failed
        if client is not None:
            client.close()
        tracing: Any = getattr(self, "_tracing", None)
        if tracing is not None:
            tracing.shutdown()  # exports the last spans: Serve kills the process next


def _resource() -> dict[str, str]:
    """Return the resource attributes of spans: the service and the replica that they come from."""
    context = serve.get_replica_context()
    return {
        "service.name": names.SCOPE,
        names.PROJECT: names.SCOPE,
        "service.version": names.VERSION,
        "service.instance.id": context.replica_id.unique_id,
        "ray.serve.application": context.app_name,
        "ray.serve.deployment": context.deployment,
        "host.name": socket.gethostname(),
    }


def _reason(error: ValidationError | ConfigError) -> str:
    """Return the error on one line, with every wrong field. Leaves out the input, which may hold anything."""
    if isinstance(error, ConfigError):
        return str(error)
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in errors)


def _keep_to_loopback() -> None:
    """If Ray listens on the loopback interface only, let Serve's server for calls between replicas do the same.

    Serve starts that server after __init__, on every interface, and it accepts pickles (Ray 2.60).
    """
    serve_module: Any = serve_replica
    listen = serve_module.add_port_to_grpc_server
    if ray.util.get_node_ip_address() == LOOPBACK:
        serve_module.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", LOOPBACK))


def _show_logs() -> None:
    """Send this project's log, from INFO on, to the console in short lines, and to the replica's log file of Serve."""
    handlers = logging.getLogger("ray.serve").handlers
    show_logs(*(handler for handler in handlers if not isinstance(handler, logging.StreamHandler)))
