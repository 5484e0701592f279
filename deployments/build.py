"""Builds the Serve application: `serve run deployments.build:build target=DIR draft=DIR`, or from serve_config.yaml."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.utils import read_ray_address
from ray.serve import Application

from app.middleware import MAX_UNFINISHED_BODIES
from deployments.checks import check_edge, check_models, device_here, has_gpu, read_settings
from deployments.console import PREFIX, say
from deployments.replica import Replica
from deployments.settings import Device, Settings
from engine.config import ConfigError

# Requests beyond those that the engine holds or whose bodies still arrive: refusals, /health and the live page. Serve
# passes nothing on while max_ongoing_requests are open, so they need room of their own.
MAX_OTHER_REQUESTS = 1000


def build(arguments: Mapping[str, Any]) -> Application:
    """Return one deployment that is its own ingress.

    Raises ConfigError for settings and files that cannot be served. In `serve run`, which builds before Ray starts, it
    ends the process with one line and status 1 instead.
    """
    try:
        return _deployment(*_checked(arguments))
    except (ValueError, OSError) as error:
        if ray.is_initialized():
            raise ConfigError(str(error)) from None
        raise SystemExit(f"{PREFIX}{error}") from None


def _checked(arguments: Mapping[str, Any]) -> tuple[Settings, Device]:
    """Read the settings. Check the files too, if the replicas run on this machine."""
    settings = read_settings(arguments)
    if not _replicas_run_here(settings):
        return settings, _given_device(settings)
    device = _given_device(settings) if ray.is_initialized() else device_here(settings)
    check_edge(settings)
    check_models(settings, device)
    if settings.hint is not None and not ray.is_initialized():
        say(settings.hint)
    return settings, device


def _replicas_run_here(settings: Settings) -> bool:
    """Whether replicas can only run on this machine. On others the checkpoints may lie elsewhere."""
    if ray.is_initialized():
        alone, resources = len([node for node in ray.nodes() if node["Alive"]]) == 1, ray.cluster_resources()
        gpus = 1 if settings.device == "cuda" else 0
        return alone and resources.get("CPU", 0) >= settings.num_cpus and resources.get("GPU", 0) >= gpus
    if any(argument.startswith(("-a", "--address")) for argument in sys.argv[1:]):
        return False
    # Without an address `serve run` joins the cluster that `ray start` has begun here, if there is one.
    address = os.environ.get("RAY_ADDRESS") or read_ray_address() or "local"
    return address == "local"


def _deployment(settings: Settings, device: Device) -> Application:
    """The options here are defaults. A value under `deployments` in the YAML file overrides them."""
    resources = {"num_cpus": settings.num_cpus, "num_gpus": 1 if device == "cuda" else 0}
    deployment = Replica.options(  # type: ignore[attr-defined]  # Serve's decorators are untyped
        ray_actor_options=resources,
        user_config=settings.policy_settings().model_dump(include={"policy", "k"}),
        max_ongoing_requests=settings.max_running + settings.max_waiting + MAX_UNFINISHED_BODIES + MAX_OTHER_REQUESTS,
        max_queued_requests=-1,
        graceful_shutdown_timeout_s=120,  # at least the longest generation
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        health_check_timeout_s=30,
        logging_config={"enable_access_log": False},  # it tells a route, not the path; ours tells requests
    )
    application: Application = deployment.bind(settings.freeze(device), settings.edge())
    return application


def _given_device(settings: Settings) -> Device:
    return available_device() if settings.device == "auto" else settings.device


def available_device() -> Device:
    """Return cuda if the Ray cluster has a GPU or, before Ray runs, if this machine has one."""
    if ray.is_initialized():
        return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    return "cuda" if has_gpu() else "cpu"
