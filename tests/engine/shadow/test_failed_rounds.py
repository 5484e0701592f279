"""Faults within a round on a device: a draft's cost drafts, a pass is tried again, and no text changes (R9)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from engine.drafters.draft_columns import DraftColumns
from engine.kernels.penalise import record_texts
from engine.models.runner import Runner
from engine.sampling import device_penalties
from engine.types import Request
from tests.engine.driving import Drive, drive
from tests.engine.pairs import Pair
from tests.engine.shadow.both import without_measurements
from tests.engine.shadow.cuda import shadow_cuda
from tests.engine.shadow.test_same_text import PARAMS, PROMPT, start

PENALISED = replace(PARAMS, max_tokens=20, top_p=0.9, repetition_penalty=3.0, frequency_penalty=2.0, min_tokens=8)
REQUESTS = [Request(f"r{i}", PROMPT[i:], replace(PENALISED, seed=i)) for i in range(4)]


@pytest.fixture(autouse=True)
def _without_measurements() -> Iterator[None]:
    with without_measurements():
        yield


@pytest.fixture(scope="module")
def texts(pair: Pair) -> dict[str, list[int]]:
    """What an engine on the CPU says, in which nothing fails."""
    with without_measurements():
        return drive(start(pair, "cpu"), REQUESTS).tokens


def run_on_device(pair: Pair) -> Drive:
    with shadow_cuda():
        return drive(start(pair, "cuda"), REQUESTS)


def sometimes_failing(work: Callable[..., Any], often: float) -> Callable[..., Any]:
    """work, which raises before or after it is done."""
    random = Random(1)

    def failing(*args: Any) -> Any:
        fails = random.random() < often
        if fails and random.random() < 0.5:
            raise RuntimeError("before")
        result = work(*args)
        if fails:
            raise RuntimeError("after")
        return result

    return failing


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (DraftColumns, "draw"),
        pytest.param(Runner, "prepare", marks=pytest.mark.proofs),
        (Runner, "compute"),
        pytest.param(Runner, "step", marks=pytest.mark.proofs),
    ],
)
def test_faults_change_no_text(
    pair: Pair, texts: dict[str, list[int]], where: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, sometimes_failing(getattr(where, name), 0.2))
    faulty = run_on_device(pair)
    assert sum(step.draft_faults + step.failed for step in faulty.steps) > 1
    assert faulty.tokens == texts
    assert faulty.drafted > 0
    assert {received.error for received in faulty.received.values()} == {None}


def test_texts_that_a_failed_round_could_not_record(
    pair: Pair, texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(1)

    def failing(*args: Any) -> None:
        if random.random() < 0.3:
            raise RuntimeError
        record_texts(*args)

    monkeypatch.setattr(device_penalties, "record_texts", failing)
    faulty = run_on_device(pair)
    assert sum(step.draft_faults + step.failed for step in faulty.steps) > 1
    assert faulty.tokens == texts
