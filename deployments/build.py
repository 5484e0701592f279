"""The topology: `serve run deployments.build:build target=DIR draft=DIR`, or from serve_config.yaml.

No `from __future__ import annotations` here: Serve reads the builder's annotation to validate its arguments.
"""

import ray
import torch
from ray.serve import Application

from deployments.replica import Replica
from deployments.settings import Device, Settings


def build(settings: Settings) -> Application:
    """Settings → one deployment that is its own ingress. Raises ValueError for settings that cannot be served."""
    device = _available_device() if settings.device == "auto" else settings.device
    resources = {"num_cpus": settings.num_cpus, "num_gpus": 1 if device == "cuda" else 0}
    deployment = Replica.options(ray_actor_options=resources)  # type: ignore[attr-defined]  # Serve's decorators are untyped
    application: Application = deployment.bind(settings.freeze(device), settings.name)
    return application


def _available_device() -> Device:
    """cuda if Ray has a GPU to give, or, where Ray does not run yet, if this machine has one."""
    if ray.is_initialized():
        return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"
