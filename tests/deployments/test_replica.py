"""A replica's reconfigure is strict at the start and tolerant while it serves. These tests need no Serve."""

import logging
import warnings
from concurrent.futures import Future
from typing import Any

import pytest

with warnings.catch_warnings():  # Ray 2.60 declares its models in a way that this pydantic deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from deployments.replica import Replica
from engine.config import ConfigError, EngineConfig
from engine.types import EngineStats
from policies.config import PolicyConfig

BAD: list[tuple[Any, str]] = [
    ({"policy": "fast"}, "policy: Input should be "),
    ({"policy": "off", "depth": 3}, "depth: Extra inputs"),
    ({"policy": "fixed", "k": 17}, "k 17 exceeds max_spec_length"),
    ({"k": -1, "max_k": -1}, "k: Input should be greater than or equal to 0; max_k: "),
    ("goodput", "dictionary"),
]


class Client:
    """A LocalClient without an engine; its drafts may be 16 long."""

    def __init__(self) -> None:
        self.policies: list[PolicyConfig] = []
        self.drafts: list[tuple[str | None, Future[None]]] = []
        self.refused: str | None = None
        self.chats_prepared = 0

    def prepare_chats(self) -> None:
        self.chats_prepared += 1

    def configure(self, policy: PolicyConfig) -> None:
        if policy.k > 16:
            raise ConfigError(f"policy fixed with k {policy.k} exceeds max_spec_length, which is 16")
        self.policies.append(policy)
        self.refused = None

    def change_draft(self, draft: str | None) -> Future[None]:
        loaded = Future[None]()
        self.drafts.append((draft, loaded))
        if draft == "/here":
            loaded.set_result(None)
        return loaded

    def refuse(self, reason: str) -> None:
        self.refused = reason

    def stats(self) -> EngineStats:
        return EngineStats(True, "", 0, 0, 0, 1, 1, 0.0)

    def close(self) -> None:
        pass


class Heart:
    """A meter that counts its beats."""

    beats = 0

    def beat(self) -> None:
        self.beats += 1


@pytest.fixture
def replica() -> Any:
    """A replica with loaded models that Serve has not started yet."""
    ours = Replica.func_or_class.__mro__[1]  # type: ignore[attr-defined]  # below what Serve's decorators made of it
    assert ours.__module__ == "deployments.replica"
    bare = ours.__new__(ours)
    bare.client, bare.meter, bare._started = Client(), Heart(), False
    bare._config = EngineConfig(target="/target", draft="/here")
    return bare


def test_a_valid_user_config_is_taken_at_the_start_and_later(replica: Any) -> None:
    replica.reconfigure({"policy": "fixed", "k": 2})
    replica.reconfigure({"policy": False})
    assert replica.client.policies == [PolicyConfig(name="fixed", k=2), PolicyConfig(name="off")]


@pytest.mark.parametrize(("user_config", "reason"), BAD)
def test_at_the_start_an_invalid_one_ends_it_with_the_reason(replica: Any, user_config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"user_config: .*{reason}"):
        replica.reconfigure(user_config)
    assert replica.client.policies == []


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("user_config", "reason"), BAD)
def test_later_an_invalid_one_is_logged_and_shown_and_changes_nothing(
    replica: Any, user_config: Any, reason: str, checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Later means after the first user_config or, without one, after the health check that ends the start."""
    if checked:
        assert not replica.client.chats_prepared
        replica.check_health()
        assert replica.client.chats_prepared
    else:
        replica.reconfigure({"policy": "goodput"})
    before = list(replica.client.policies)
    with caplog.at_level(logging.WARNING, logger="deployments.replica"):
        replica.reconfigure(user_config)
    assert replica.client.policies == before
    assert reason in replica.client.refused
    assert reason in caplog.text
    replica.reconfigure({"policy": "goodput"})
    assert replica.client.refused is None


def test_a_user_config_without_a_draft_means_that_of_the_arguments(replica: Any) -> None:
    replica.reconfigure({"policy": "goodput"})
    replica.reconfigure({"draft": "/there"})
    replica.reconfigure({"draft": "none"})
    replica.reconfigure({"policy": "off"})
    assert [draft for draft, _ in replica.client.drafts] == ["/here", "/there", None, "/here"]


def test_at_the_start_a_draft_that_cannot_be_loaded_ends_the_replica(replica: Any) -> None:
    loaded = Future[None]()
    loaded.set_exception(ConfigError("there is no directory /there"))
    replica.client.change_draft = lambda draft: loaded
    with pytest.raises(ConfigError, match="user_config: there is no directory /there"):
        replica.reconfigure({"draft": "/there"})


def test_later_such_a_draft_is_logged_and_shown(replica: Any, caplog: pytest.LogCaptureFixture) -> None:
    replica.reconfigure({"policy": "goodput"})
    replica.reconfigure({"draft": "/there"})
    assert not replica.client.refused
    with caplog.at_level(logging.WARNING, logger="deployments.replica"):
        replica.client.drafts[-1][1].set_exception(ConfigError("there is no directory /there"))
    assert replica.client.refused == "there is no directory /there"
    assert "the draft stays: there is no directory /there" in caplog.text
    replica.reconfigure({"draft": "/elsewhere"})
    assert not replica.client.refused
    replica.client.drafts[-1][1].cancel()  # another one is wanted before it is loaded
    assert not replica.client.refused


def test_several_drafts_are_not_replaced(replica: Any) -> None:
    replica.reconfigure({"policy": "goodput"})
    replica._config = EngineConfig(target="/target", drafts=("/one", "/two"))
    replica.reconfigure({"policy": "off"})
    assert not replica.client.refused
    replica.reconfigure({"policy": "goodput", "draft": "none"})
    assert "draft none cannot replace the drafts /one, /two" in replica.client.refused
    assert replica.client.policies[-1].name == "off"


def test_a_health_check_tells_the_metrics_that_the_engine_stands_still(replica: Any) -> None:
    replica.client.stats = lambda: EngineStats(False, "no step for 30 s", 0, 0, 0, 1, 1, 30.0)
    with pytest.raises(RuntimeError, match="no step"):
        replica.check_health()
    assert replica.meter.beats == 1
