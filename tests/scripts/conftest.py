"""Engines compile nothing in tests of scripts."""

from collections.abc import Iterator

import pytest

from tests.benchmarks.torch_alone import torch_alone


@pytest.fixture(scope="module", autouse=True)
def _torch_alone() -> Iterator[None]:
    with torch_alone():
        yield
