"""Builds the Serve application: `serve run deployments.build:build target=DIR draft=DIR`, or from serve_config.yaml.

This module must not use `from __future__ import annotations`: Serve reads the builder's annotation to validate its
arguments.
"""

import ray
import torch
from ray.serve import Application

from app.middleware import MAX_UNFINISHED_BODIES
from deployments.replica import Replica
from deployments.settings import Device, Settings

# Requests beyond those that the engine holds or whose bodies still arrive: refusals, /health and the live page. Serve
# passes nothing on while max_ongoing_requests are open, so they need room of their own.
MAX_OTHER_REQUESTS = 1000


def build(settings: Settings) -> Application:
    """Return one deployment that is its own ingress. Raises ValueError for settings that cannot be served.

    The options here are defaults. A value under `deployments` in the YAML file overrides them.
    """
    device = available_device() if settings.device == "auto" else settings.device
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
    )
    application: Application = deployment.bind(settings.freeze(device), settings.edge())
    return application


def available_device() -> Device:
    """Return cuda if the Ray cluster has a GPU or, before Ray runs, if this machine has one."""
    if ray.is_initialized():
        return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"
