"""Fixtures of the tests of captured rounds."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from engine.device.graphs import Graphs
from engine.loading import model_runners
from tests.engine.shadow.both import without_measurements
from tests.engine.shadow.emulator import Emulator, emulated_graphs


@pytest.fixture(scope="session", autouse=True)
def _torch_without_cuda() -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this torch was built for CUDA, and the shadow stands in for it")


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """Engines measure neither rounds nor memory at their start."""
    with without_measurements():
        yield


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Graphs are emulated, and none goes for want of room."""
    monkeypatch.setattr(model_runners, "Graphs", partial(Graphs, most=1000))
    with emulated_graphs() as emulator:
        yield emulator
