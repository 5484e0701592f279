"""Programs of other projects that tests here run; scripts/setup_external.sh installs them. Without one, its tests are
skipped."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.external.browser import Browser, browsing, undisturbed

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".venv/external/usr/bin"


def program(name: str) -> str:
    """Its path; the test is skipped where it is not installed."""
    path = shutil.which(name, path=f"{UNPACKED}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if path is None:
        pytest.skip(f"{name} is not installed: `make test-external` installs it on Debian, as root")
    return path


@pytest.fixture(scope="session")
def prometheus() -> str:
    return program("prometheus")


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("promtool")


@pytest.fixture(scope="session")
def chromium() -> str:
    return program("chromium")


@pytest.fixture(scope="session")
def chromedriver() -> str:
    return program("chromedriver")


@pytest.fixture(scope="module")
def shared(chromedriver: str, chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(chromedriver, chromium, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(shared: Browser) -> Iterator[Browser]:
    yield from undisturbed(shared)
