"""One tiny pair for all tests of the engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from engine.sampling import noise
from tests.engine.forked import Forks, forks
from tests.engine.pairs import Pair, Shape, save_checkpoint, save_pair


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def fresh_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("forks")) as found:
        yield found


@pytest.fixture(scope="module")
def pruned_races() -> Iterator[None]:
    """Draw as the CPU does with real vocabularies, not as with tiny ones; test_race.py ties the two together."""
    before, noise.DENSE_NOISE_LIMIT = noise.DENSE_NOISE_LIMIT, 0
    yield
    noise.DENSE_NOISE_LIMIT = before


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """llama, two layers, untied; about a third of the draft's tokens agree."""
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def drafts(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two drafts for the pair's target: the pair's own, and one that errs elsewhere."""
    path = tmp_path_factory.mktemp("second") / "draft"
    return pair.draft, save_checkpoint(path, Shape(), seed=3, like=Path(pair.target), noise=0.12)


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The target as its own draft: everything is accepted."""
    return save_pair(tmp_path_factory.mktemp("twins"), Shape(), noise=0.0)
