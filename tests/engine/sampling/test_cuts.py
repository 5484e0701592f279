"""Filters of long rows: what is cut without sorting is what the definition removes, token for token."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.compiled import compiled_module
from engine.sampling import candidates, cuts, filters, long_row
from engine.sampling.filters import Filters, removed, truncated
from engine.types import SamplingParams
from tests.engine.kernels.faults import with_fault
from tests.examples import in_proofs

Floats = NDArray[np.float64]
CPU = torch.device("cpu")
SHAPES = [(40, vocab) for vocab in (1, 2, 31, 100, 1000)] + [(12, 5000), (4, 20_000)]


def normal(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """From nearly flat to as peaked as a model that is sure."""
    spread = torch.tensor([0.01, 1.0, 3.0, 5.0, 30.0])[torch.arange(shape[0]) % 5]
    return torch.randn(shape, generator=g, dtype=torch.float64) * spread[:, None]


def ties(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return normal(shape, g).round()


def all_equal(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.full(shape, 3.7, dtype=torch.float64)


def forbidden(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    logits = normal(shape, g)
    logits[torch.rand(shape, generator=g) < 0.9] = -inf
    return logits


def only_one(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    logits = torch.full(shape, -inf, dtype=torch.float64)
    return logits.scatter_(1, torch.randint(shape[1], (shape[0], 1), generator=g), -2.0)


def huge(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return normal(shape, g) * 1e30


def close_to_zero(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """Logits that differ, whose scores are equal: 1e-20 is lost against a best of 1."""
    logits = normal(shape, g) * 1e-20
    logits[:, shape[1] // 2] = 1.0
    return logits


def no_law(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    logits = normal(shape, g)
    for row, worst in zip(logits, (nan, inf, -inf) * shape[0], strict=False):
        row[0 if worst != -inf else slice(None)] = worst
    return logits


Kind = Callable[[tuple[int, int], torch.Generator], Tensor]
KINDS: list[Kind] = [
    normal,
    ties,
    all_equal,
    forbidden,
    only_one,
    huge,
    close_to_zero,
    no_law,
]


def some_params(rows: int, vocab: int, g: torch.Generator) -> list[SamplingParams]:
    def choose(*values: float) -> float:
        return values[int(torch.randint(len(values), (), generator=g))]

    return [
        replace(
            SamplingParams(),
            temperature=choose(1e-300, 1e-6, 0.3, 1.0, 1.0, 2.0),
            top_k=int(choose(0, 0, 1, 7, vocab // 2, vocab - 1)),
            top_p=choose(1e-12, 0.1, 0.5, 0.9, 0.9, 0.999, 1 - 1e-12, 1 - 1e-14, 1 - 2**-53, 1.0),
            min_p=choose(0.0, 0.0, 1e-300, 0.05, 0.5, 1.0),
        )
        for _ in range(rows)
    ]


def wrong_rows(kind: Kind, dtype: torch.dtype) -> int:
    """Rows of all shapes that the definition would have truncated otherwise."""
    wrong = 0
    for seed, shape in enumerate(SHAPES):
        g = torch.Generator().manual_seed(seed)
        logits = kind(shape, g).to(dtype)
        before = logits.clone()
        chosen = Filters.make(some_params(*shape, g), shape[1], CPU)
        expected = logits.masked_fill(removed(logits, chosen), -inf)
        same = torch.isclose(truncated(logits, chosen), expected, rtol=0, atol=0, equal_nan=True)
        wrong += int((~same).any(1).sum())
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return wrong


@pytest.fixture
def every_row_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "SHORT_ROW", 0)
    monkeypatch.setattr(filters, "SORT_LIMIT", 0)
    monkeypatch.setattr(cuts, "SORT_LIMIT", 0)


@pytest.mark.usefixtures("every_row_is_long")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_cut_removes_what_the_definition_removes(kind: Kind, dtype: torch.dtype) -> None:
    assert wrong_rows(kind, dtype) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [normal, ties, all_equal, forbidden, only_one, huge], ids=lambda kind: kind.__name__)
def test_rows_with_min_p_alone_are_not_sorted(kind: Kind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    for shape in ((9, 300), (9, 4096)):
        params = [replace(p, top_k=0, top_p=1.0) for p in some_params(*shape, g)]
        logits, chosen = kind(shape, g).to(dtype), Filters.make(params, shape[1], CPU)
        expected = logits.masked_fill(removed(logits, chosen), -inf)
        with monkeypatch.context() as patch:
            patch.setattr(filters, "_sorted", lambda scores: pytest.fail("rows were sorted"))
            found = truncated(logits, chosen)
        assert torch.isclose(found, expected, rtol=0, atol=0, equal_nan=True).all()


@pytest.mark.parametrize("kind", [normal, ties, forbidden], ids=lambda kind: kind.__name__)
def test_rows_as_long_as_they_come(kind: Kind) -> None:
    assert wrong_rows(kind, torch.float32) == 0


def decided_by_rounding() -> int:
    """Rows, of 300, that the definition would have truncated otherwise. The scores differ in their last bits only, so
    that the definition cuts between two of them, and each row's top-p is the mass of some of them but for rounding."""
    g = torch.Generator().manual_seed(0)
    scores = -1 - torch.randperm(1000, generator=g).double() * 2.0**-52
    scores[7] = 0.0
    masses = scores.exp().sort(descending=True).values.cumsum(0)[1:900:3] / scores.exp().sum()
    near = masses * (1 + (torch.arange(300) % 9 - 4) * 2.0**-51)
    chosen = Filters.make([SamplingParams(top_p=share) for share in near.tolist()], 1000, CPU)
    logits = scores.expand(300, -1)
    expected = logits.masked_fill(removed(logits, chosen), -inf)
    assert expected.unique(dim=0).shape[0] > 250
    return int((truncated(logits, chosen) != expected).any(1).sum())


@pytest.mark.usefixtures("every_row_is_long")
def test_where_rounding_decides_the_definition_does() -> None:
    assert decided_by_rounding() == 0


@pytest.mark.usefixtures("every_row_is_long")
def test_a_cut_that_trusts_its_rounding_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "ROUNDING_PER_TOKEN", 0.0)
    assert decided_by_rounding() > 10


def decided_by_rounding_in_fp32() -> int:
    """The same for fp32 logits, of which few have each row's top-p: this is the mass of some of them, but for 1e-10."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 20_000, generator=g) * 5
    exact = logits[0].double().sort(descending=True).values.softmax(0).cumsum(0)[:100]
    near = exact * (1 + (torch.arange(100).double() % 2 * 2 - 1) * 1e-10)
    chosen = Filters.make([SamplingParams(top_p=share) for share in near.tolist()], 20_000, CPU)
    rows = logits.expand(100, -1)
    expected = rows.masked_fill(removed(rows, chosen), -inf)
    return int((truncated(rows, chosen) != expected).any(1).sum())


def test_where_rounding_in_fp32_decides_the_sum_in_fp64_does() -> None:
    assert decided_by_rounding_in_fp32() == 0


def test_a_cut_that_trusts_its_sum_in_fp32_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_row, "FP32_ROUNDING", 0.0)
    assert decided_by_rounding_in_fp32() > 10


@pytest.fixture(params=["compiled", "together", "one by one"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length are cut without a sort: by compiled code, a group of rows in the same passes, or one by one
    from a sample."""
    if request.param != "compiled":
        monkeypatch.setattr(candidates, "compiled_module", lambda name: None)
    monkeypatch.setattr(filters, "SHORT_ROW", 0)
    monkeypatch.setattr(candidates, "LONG_ROW", 0 if request.param == "one by one" else 10**9)
    monkeypatch.setattr(long_row, "FEWEST_SAMPLED", 1)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("few", "dtype"),
    [
        pytest.param(0, torch.float32, id="near the cut-float32"),
        pytest.param(4096, torch.float64, id="all that are kept-float64"),
        pytest.param(0, torch.float64, id="near the cut-float64", marks=pytest.mark.proofs),
        pytest.param(4096, torch.float32, id="all that are kept-float32", marks=pytest.mark.proofs),
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_either_way_removes_what_the_definition_removes(
    kind: Kind, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_row, "MOST_CANDIDATES", few or long_row.MOST_CANDIDATES)
    assert wrong_rows(kind, dtype) == 0


def answers_without_scores(kind: Kind) -> tuple[int, int, int]:
    """(rows for which removed_up_to() has an answer, wrong ones among them, rows)."""
    answered, wrong, rows = 0, 0, 0
    for seed, shape in enumerate(SHAPES[:-1]):
        g = torch.Generator().manual_seed(seed)
        logits = kind(shape, g).float()
        for row, params in zip(logits[:, None], some_params(*shape, g), strict=True):
            chosen = Filters.make([replace(params, top_k=0)], shape[1], CPU)
            lasts = candidates.removed_up_to(row, filters.cuts_of(chosen, shape[1]))
            rows += 1
            if not np.isnan(lasts).any():
                answered += 1
                is_cut = (row <= torch.from_numpy(lasts)[:, None]) & (row > -inf)
                wrong += not torch.equal(is_cut, removed(row, chosen) & (row > -inf))
    return answered, wrong, rows


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_removed_is_known_without_scores(kind: Kind) -> None:
    """removed_up_to() answers for most rows with a usual law. Every answer is right."""
    answered, wrong, rows = answers_without_scores(kind)
    assert not wrong
    if kind is normal:
        assert answered > rows / 2


@pytest.mark.parametrize("name", ["_last_below_floor", "_compiled_cuts"])
def test_an_answer_one_number_too_high_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(candidates, name)
    monkeypatch.setattr(candidates, name, lambda *args: np.nextafter(real(*args), np.float32(inf)))
    assert answers_without_scores(normal)[1]


def test_rows_with_and_without_top_p_are_known_together() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(top_p=0.8), SamplingParams(min_p=0.05), SamplingParams(top_p=0.9, min_p=0.1)]
    chosen = Filters.make(params, 500, CPU)
    lasts = candidates.removed_up_to(logits, filters.cuts_of(chosen, 500))
    assert torch.equal(logits <= torch.from_numpy(lasts)[:, None], removed(logits, chosen))
    with_top_k = filters.cuts_of(Filters.make([*params[:2], SamplingParams(top_k=5)], 500, CPU), 500)
    assert np.isnan(candidates.removed_up_to(logits, with_top_k)).tolist() == [False, False, True]


def most_are_cut(spread: float) -> int:
    """Rows of 20 that need no other way than candidates.py."""
    logits = torch.randn(20, 20_000, generator=torch.Generator().manual_seed(0)) * spread
    chosen = Filters.make([SamplingParams(top_p=0.9, temperature=0.8)] * 20, 20_000, CPU)
    return 20 - len(candidates.cut_rows(logits, filters.cuts_of(chosen, 20_000)).left)


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0, 5.0, 8.0])
def test_most_rows_are_cut_by_masses_in_fp32(spread: float) -> None:
    """Flat or peaked. Else every row would pay for a sum in fp64."""
    assert most_are_cut(spread) >= 14


@pytest.mark.parametrize("temperature", [0.01, 0.8])
def test_of_a_cold_row_few_tokens_are_sorted(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masses of most vanish, and so do those of most of the sample."""
    lowest, sorted_tokens = long_row.LongRow._lowest, list[int]()

    def watched(row: long_row.LongRow, values: long_row.Numbers, *args: Any) -> Any:
        sorted_tokens.append(len(values))
        return lowest(row, values, *args)

    monkeypatch.setattr(long_row.LongRow, "_lowest", watched)
    logits = torch.randn(20, 20_000, generator=torch.Generator().manual_seed(0)) * 5
    chosen = Filters.make([SamplingParams(top_p=0.9, temperature=temperature)] * 20, 20_000, CPU)
    assert torch.equal(truncated(logits, chosen), logits.masked_fill(removed(logits, chosen), -inf))
    assert len(sorted_tokens) == 20
    assert max(sorted_tokens) < 5000


@pytest.mark.usefixtures("each_way")
def test_either_way_shows_if_it_trusts_its_sum_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided_by_rounding_in_fp32() == 0
    monkeypatch.setattr(candidates, "FP32_ROUNDING", 0.0)
    monkeypatch.setattr(long_row, "FP32_ROUNDING", 0.0)
    assert decided_by_rounding_in_fp32() > 10


@pytest.mark.usefixtures("each_way")
def test_a_cut_one_token_too_high_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, together, alone = candidates._compiled_cuts, candidates._cut_together, long_row.LongRow._lowest

    def higher(logits: Tensor, found: long_row.Numbers) -> long_row.Numbers:
        kept = logits.masked_fill(~(logits > torch.from_numpy(found)[:, None]), inf)
        return np.where(np.isnan(found), found, kept.amin(1).numpy())

    def one_higher(logits: Tensor, *args: Any) -> long_row.Numbers:
        return higher(logits, together(logits, *args))

    def one_higher_compiled(kernel: ModuleType, logits: Tensor, *args: Any) -> long_row.Numbers:
        return higher(logits, compiled(kernel, logits, *args))

    def one_higher_alone(row: long_row.LongRow, *args: Any) -> tuple[float, long_row.Numbers, Floats] | None:
        found = alone(row, *args)
        if found is None:
            return None
        lowest, descending, scores = found
        return float(scores[max(0, int((scores > lowest).sum()) - 1)]), descending, scores

    monkeypatch.setattr(candidates, "_compiled_cuts", one_higher_compiled)
    monkeypatch.setattr(candidates, "_cut_together", one_higher)
    monkeypatch.setattr(long_row.LongRow, "_lowest", one_higher_alone)
    assert wrong_rows(normal, torch.float32) > 3


@pytest.mark.parametrize(
    "fault",
    [
        ("p * total - above)", "p * total)"),
        *in_proofs(  # each compiles for some seconds
            ("if floors[row] == -np.inf:", "if True:"),
            ("abs(mass - wanted) < margin", "False"),
            ("above + mass_from(keys, kept[0], count, cut)", "mass_from(keys, kept[0], count, cut)"),
            ("vocab * ROUNDING_PER_TOKEN", "0"),
            ("if mass > wanted:", "if mass < wanted:"),
        ),
    ],
    ids=itemgetter(0),
)
def test_a_fault_in_compiled_cuts_shows(
    fault: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wrong answers, or other rows that have one."""
    kinds, kernels = (normal, ties, all_equal), compiled_module("cpu_cuts")
    right = [answers_without_scores(kind) for kind in kinds]
    assert kernels is not None
    with with_fault(kernels, *fault, tmp_path) as faulty:
        monkeypatch.setattr(candidates, "compiled_module", lambda name: faulty)
        assert [answers_without_scores(kind) for kind in kinds] != right


@pytest.mark.usefixtures("every_row_is_long")
def test_a_cut_that_takes_scores_for_logits_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are equal stay together, though their logits differ."""
    monkeypatch.setattr(
        cuts.LogitsRow, "last_below", lambda self, threshold: self._best + threshold * self._temperature
    )
    assert wrong_rows(close_to_zero, torch.float64) > 0


def test_peaked_laws_are_cut_by_the_sum_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponentials in fp64 of a whole row take longer than all the rest."""
    monkeypatch.setattr(cuts, "ROUNDING_PER_TOKEN", inf)  # a sum in fp64 decides nothing
    monkeypatch.setattr(filters, "removed", lambda logits, filters: pytest.fail("the sum in fp32 did not decide"))
    logits = torch.randn(10, 20_000, generator=torch.Generator().manual_seed(0)) * 8
    chosen = Filters.make([SamplingParams(top_p=0.9)] * 10, 20_000, CPU)
    assert (truncated(logits, chosen) > -inf).any(1).all()


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0, 5.0])
@pytest.mark.parametrize("knobs", [{"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}])
def test_common_laws_are_not_sorted(spread: float, knobs: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat ones neither: sorting a row takes longer than all the rest."""
    monkeypatch.setattr(filters, "removed", lambda logits, filters: pytest.fail("a row was sorted"))
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 20_000, generator=g) * spread
    chosen = Filters.make([SamplingParams(**knobs)] * 10, 20_000, CPU)  # type: ignore[arg-type]
    kept = truncated(logits, chosen) > -inf
    assert (kept.sum(1) < 20_000).all()
    assert kept.gather(1, logits.argmax(1, keepdim=True)).all()
