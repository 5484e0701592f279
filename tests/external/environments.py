"""Environments of their own that scripts/setup_clients.sh installs."""

import os
from pathlib import Path

import pytest

from tests.external.conftest import ROOT

ENVIRONMENTS = Path(os.environ.get("FORETOKEN_CLIENTS", ROOT / ".cache/clients")).absolute()


def environment(name: str) -> Path:
    """The folder of an environment; the test is skipped where it could not be installed."""
    folder = ENVIRONMENTS / name
    if not (folder / ".ready").exists():
        reason = ENVIRONMENTS / f"{name}.reason"
        pytest.skip(f"{name}: {reason.read_text().strip() if reason.exists() else 'run scripts/setup_clients.sh'}")
    return folder
