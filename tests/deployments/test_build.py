"""The topology's serving options: those of a bare `serve run deployments.build:build`, and what a YAML file changes."""

import warnings

import pytest

with warnings.catch_warnings():  # Ray 2.60 declares its models in a way that this pydantic deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.serve import Deployment

    from deployments.build import build
from deployments.settings import Settings


def replica(settings: Settings) -> Deployment:
    bound: Deployment = build(settings)._bound_deployment
    return bound


@pytest.mark.parametrize(("running", "waiting"), [(16, 48), (2, 0), (28, 300)])
def test_the_application_refuses_before_serve_would_queue(running: int, waiting: int) -> None:
    deployment = replica(Settings(max_running=running, max_waiting=waiting))
    assert deployment.max_ongoing_requests == running + waiting + 32
    assert deployment.max_queued_requests == -1


def test_a_bare_start_drains_and_is_watched() -> None:
    config = replica(Settings())._deployment_config
    assert (config.graceful_shutdown_timeout_s, config.graceful_shutdown_wait_loop_s) == (120, 0.5)
    assert (config.health_check_period_s, config.health_check_timeout_s) == (2, 30)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1)])
def test_a_replica_reserves_what_it_uses(device: str, gpus: int) -> None:
    options = replica(Settings.model_validate({"device": device, "num_cpus": 3})).ray_actor_options
    assert options is not None
    assert (options["num_cpus"], options["num_gpus"]) == (3, gpus)
