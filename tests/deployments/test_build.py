"""The deployment's options: the defaults of `serve run deployments.build:build`, and those that a YAML file changes."""

import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():  # Ray 2.60 declares its models in a way that this pydantic deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.serve import Deployment

    from deployments.build import build
from app.middleware import MAX_UNFINISHED_BODIES
from app.telemetry.tracer import TraceConfig
from deployments.settings import EdgeConfig, PolicySettings, Settings


def replica(settings: Settings) -> Deployment:
    bound: Deployment = build(settings.model_dump(exclude_unset=True))._bound_deployment
    return bound


@pytest.mark.parametrize(("running", "waiting"), [(16, 48), (2, 0), (28, 300)])
def test_the_application_refuses_before_serve_would_queue(running: int, waiting: int) -> None:
    deployment = replica(Settings(max_running=running, max_waiting=waiting))
    assert deployment.max_ongoing_requests - (running + waiting + MAX_UNFINISHED_BODIES) >= 1000
    assert deployment.max_queued_requests == -1


def test_a_bare_start_drains_and_is_watched() -> None:
    config = replica(Settings())._deployment_config
    assert (config.graceful_shutdown_timeout_s, config.graceful_shutdown_wait_loop_s) == (120, 0.5)
    assert (config.health_check_period_s, config.health_check_timeout_s) == (2, 30)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"policy": "goodput", "k": 5}),
        ({"policy": "fixed", "spec_length": "4"}, {"policy": "fixed", "k": 4}),
        ({"drafter": "off"}, {"policy": "off", "k": 5}),
    ],
)
def test_the_policy_is_an_option_that_can_change_in_place(args: dict[str, str], expected: dict[str, Any]) -> None:
    settings = Settings.model_validate(args)
    user_config = replica(settings)._deployment_config.user_config
    assert user_config == expected
    assert PolicySettings.model_validate(user_config).freeze() == settings.freeze("cpu").policy


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1)])
def test_a_replica_reserves_what_it_uses(device: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.checks.has_gpu", lambda: True)
    options = replica(Settings.model_validate({"device": device, "num_cpus": 3})).ray_actor_options
    assert options is not None
    assert (options["num_cpus"], options["num_gpus"]) == (3, gpus)


def test_what_is_around_the_engine_reaches_the_replica(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one-key\n", "utf-8")
    args = {
        "trace_level": "rounds",
        "trace_steps": "0.5",
        "api_key_file": str(keys),
        "model_name": "m",
        "body_timeout_s": 3,
    }
    arguments: Any = replica(Settings.model_validate(args)).init_args
    engine, edge = arguments
    assert edge == EdgeConfig("m", TraceConfig("rounds", 0.5), str(keys), 3)
    assert engine == Settings().freeze(engine.device)
