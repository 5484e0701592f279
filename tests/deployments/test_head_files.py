"""The check before the start, where the draft is a head: its files are found good, or the setting at fault is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments import checks
from deployments.settings import Settings
from engine.config import ConfigError
from tests.engine.heads.eagles import save_head, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def head(target: str, tmp_path: Path) -> Callable[..., str]:
    """Saves a head for the target, with changes to its config.json."""
    return lambda **changes: save_head(tmp_path / "head", target, "safeailab", **changes)


def test_a_head_without_a_tokenizer_is_accepted(target: str, head: Callable[..., str]) -> None:
    checks.check_models(Settings(target=target, draft=head()), "cpu")


@pytest.mark.parametrize("config", [{"speculators_model_type": "dflash"}, {"model_type": "glm4_moe_mtp"}])
def test_the_setting_at_fault_is_named(target: str, head: Callable[..., str], config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^draft: "):
        checks.check_models(Settings(target=target, draft=head(**config)), "cpu")


def test_heads_that_do_not_draft_alone_are_refused(target: str, head: Callable[..., str]) -> None:
    directory = head()
    with pytest.raises(ConfigError, match=r"target .* is a head"):
        checks.check_models(Settings(target=directory, draft=directory), "cpu")
    with pytest.raises(ConfigError, match="one of several drafts"):
        checks.check_models(Settings(target=target, drafts=(target, directory)), "cpu")
