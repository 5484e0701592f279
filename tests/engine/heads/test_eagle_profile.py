"""The measurement of rounds leaves no states of its throw-away sequences behind."""

import pytest

from engine.engine import Engine
from engine.heads.eagle_runner import HeadRunner
from engine.profiling.round_profile import ProfileBench, profile
from tests.engine.driving import load, model_drafter
from tests.engine.heads.eagles import save_eagle_pair


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(save_eagle_pair(tmp_path_factory.mktemp("eagle")), max_running=6, max_spec_length=4)


def head_of(engine: Engine) -> HeadRunner:
    runner = model_drafter(engine).runner
    assert isinstance(runner, HeadRunner)
    return runner


def test_a_whole_profile(engine: Engine) -> None:
    assert len(profile(engine.target, engine.drafter, 6, 4, 60.0, kept=False)) > 6
    head_of(engine).audit(set())
    engine.audit()


@pytest.mark.parametrize("asked", range(1, 12))
def test_time_that_ends_between_the_models(engine: Engine, asked: int) -> None:
    """The target has read sequences that the head has not."""
    bench, times = ProfileBench(engine.target, engine.drafter, [head_of(engine)]), iter(range(asked))
    bench.fill(6, 4, lambda: next(times, None) is None, 6)
    bench.clear(engine.drafter)
    head_of(engine).audit(set())
    engine.audit()
