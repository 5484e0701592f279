"""Fitted heads of each kind for one tiny target."""

from pathlib import Path

import pytest

from tests.engine.heads.fitted import Fitted, ReferenceTarget, fit_medusa, fit_mlp, mlp_config, save_heads, written
from tests.engine.pairs import Pair
from tests.examples import in_proofs


@pytest.fixture(scope="session")
def texts(pair: Pair) -> list[list[int]]:
    return written(pair)


@pytest.fixture(scope="session")
def medusa(pair: Pair, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    target = ReferenceTarget(pair.target)
    heads = fit_medusa(target, texts)
    directory = save_heads(tmp_path_factory.mktemp("medusa"), heads.tensors, medusa_num_heads=2)
    return Fitted(pair.target, directory, target, heads)


@pytest.fixture(scope="session")
def mlp(pair: Pair, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    target = ReferenceTarget(pair.target)
    heads = fit_mlp(target, texts)
    directory: Path = save_heads(tmp_path_factory.mktemp("mlp"), heads.tensors, **mlp_config())
    return Fitted(pair.target, directory, target, heads)


@pytest.fixture(params=["medusa", "mlp"])
def each_fitted(request: pytest.FixtureRequest) -> Fitted:
    found: Fitted = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=[*in_proofs("medusa"), "mlp"])
def fitted(request: pytest.FixtureRequest) -> Fitted:
    """An MLP speculator depends on all that Medusa heads depend on, and on the drafts before it."""
    found: Fitted = request.getfixturevalue(request.param)
    return found
