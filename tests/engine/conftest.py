"""One tiny pair for all tests of the engine."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from engine import engine
from engine.heads.eagle_files import load_eagle
from engine.loading import load
from engine.models import config_file
from engine.models.loader import load_model
from engine.models.products import Weights
from engine.sampling import noise
from policies.observation import Timing
from tests.engine.forked import Forks, forks
from tests.engine.pairs import Pair, Shape, save_checkpoint, save_pair


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _versions_read_once() -> Iterator[None]:
    """Each load asks for the version of transformers, whose metadata take as long to read as a tiny layer's weights."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(config_file, "version", cache(version))
        yield


@pytest.fixture(scope="module")
def shared_weights() -> Iterator[dict[tuple[Any, ...], Any]]:
    """The engines of a module share what is loaded of a checkpoint: for tests that change no weights. Yields what is
    shared."""
    models, real = dict[tuple[Any, ...], Any](), (load_model, load_eagle)

    def once(number: int, checkpoint: Any, *target: Any, weights: Weights, **settings: Any) -> Any:
        # The memory for second forms differs from load to load.
        form = replace(weights, copies_bytes=None)
        key = number, checkpoint.path, *map(id, target), form, *settings.values()
        if key not in models:
            models[key] = real[number](checkpoint, *target, weights=weights, **settings)
        return models[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "load_model", lambda *given, **settings: once(0, *given, **settings))
        patched.setattr(load, "load_eagle", lambda *given, **settings: once(1, *given, **settings))
        yield models


@pytest.fixture(scope="module")
def unprofiled() -> Iterator[None]:
    """Engines take a plain round's time from here: for tests that fix k and look at no time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "profile", lambda *_, **__: [Timing(1, 0, 0, 0, 0, 0, 0.0, 1e-3, 0.0)])
        yield


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
def thin(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """As pair, of one layer: for tests that are about the rounds around a model."""
    return save_pair(tmp_path_factory.mktemp("thin"), Shape(layers=1))


@pytest.fixture(scope="session")
def drafts(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two drafts for the pair's target: the pair's own, and one that errs elsewhere."""
    path = tmp_path_factory.mktemp("second") / "draft"
    return pair.draft, save_checkpoint(path, Shape(), seed=3, like=Path(pair.target), noise=0.12)


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The target as its own draft: everything is accepted."""
    return save_pair(tmp_path_factory.mktemp("twins"), Shape(), noise=0.0)
