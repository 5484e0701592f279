"""Faults that only a GPU would show, put into the engine one by one. Each makes a check of the shadow fail."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.gathered import GatheredStorage
from engine.drafters.base import Draft, DraftBatch
from engine.sampling import noise
from engine.sampling.acceptance import Verdict
from engine.sampling.sampler import Sampler
from engine.verification import verify
from tests.engine.pairs import Pair
from tests.engine.shadow.both import without_measurements
from tests.engine.shadow.report import KINDS, measure
from tests.engine.shadow.test_crossings import check_budget
from tests.engine.shadow.test_same_text import LIVELY, PARAMS, compare, make_requests
from tests.examples import in_proofs

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _without_measurements() -> Iterator[None]:
    with without_measurements():
        yield


def same_text(pair: Pair) -> None:
    compare(pair, make_requests(PARAMS, ["model"], "match")).check_drafts()


def same_lively_text(pair: Pair) -> None:
    compare(pair, make_requests(LIVELY, ["model"], "match")).check_drafts()


def within_budget(pair: Pair) -> None:
    check_budget("greedy", measure(pair, KINDS["greedy"]))


def a_sync(patch: Patch) -> None:
    """The round asks for a value before its one download."""

    def waiting(batch: DraftBatch, draft: Draft, logits: Tensor) -> Verdict:
        assert bool(logits.isfinite().all())
        return verify(batch, draft, logits)

    patch.setattr("engine.round.verify", waiting)


def with_logits(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    draw = Sampler.draw

    def drawing(sampler: Sampler, logits: Tensor, rows: Seq[int], *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return draw(sampler, change(logits), rows, *args, **options)

    patch.setattr(Sampler, "draw", drawing)


def a_mix_in_sampling(patch: Patch) -> None:
    with_logits(patch, lambda logits: logits + torch.zeros(logits.shape[-1], dtype=logits.dtype))


def a_cpu_index(patch: Patch) -> None:
    with_logits(patch, lambda logits: logits[torch.arange(logits.shape[0])])


def a_mix_in_gathering(patch: Patch) -> None:
    """Attention gets the cache's rows in the host's memory."""
    prepare = GatheredStorage.prepare

    def preparing(storage: GatheredStorage) -> None:
        prepare(storage)
        storage.rows = tuple(rows.cpu() for rows in storage.rows)

    patch.setattr(GatheredStorage, "prepare", preparing)


def wrong_noise(patch: Patch) -> None:
    """The remainder of a signed number, where the bits are unsigned. Only the device makes noise in this way."""
    patch.setattr(noise, "DENSE_NOISE_LIMIT", 0)
    patch.setattr(noise, "_unsigned_remainder", lambda bits, divisor: bits.abs() % divisor)


# The fault, the check that sees it, and what the check says.
FAULTS: list[tuple[Callable[[Patch], None], Callable[[Pair], None], str]] = [
    (a_sync, within_budget, r"D2H sync .*test_faults\.py"),
    (a_mix_in_sampling, same_text, r"a CPU tensor .* among CUDA tensors"),
    (a_mix_in_gathering, same_text, r"a CPU tensor .* among CUDA tensors"),
    (a_cpu_index, within_budget, r"H2D index .*test_faults\.py"),
    (wrong_noise, same_lively_text, "the texts differ"),
]


USUAL = (a_sync, a_mix_in_sampling, a_cpu_index, wrong_noise)


@pytest.mark.parametrize(
    ("fault", "check", "told"),
    [pytest.param(*fault, marks=() if fault[0] in USUAL else pytest.mark.proofs) for fault in FAULTS],
)
def test_a_fault_is_seen(
    pair: Pair, fault: Callable[[Patch], None], check: Callable[[Pair], None], told: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=told):
        check(pair)


# test_crossings.py and test_same_text.py make the other comparisons.
@pytest.mark.parametrize("check", [same_text, *in_proofs(same_lively_text, within_budget)])
def test_without_a_fault_the_checks_pass(pair: Pair, check: Callable[[Pair], None]) -> None:
    check(pair)
