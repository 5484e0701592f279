"""The Triton kernels of paged attention against the reference, and the bits of a row alone and in company."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.paged_attention import reference
from engine.models.pass_attention import PLAIN, Scoring
from engine.models.spans import Span
from engine.trees import ROOT, branching
from tests.engine.kernels.faults import with_fault
from tests.engine.kernels.paged_cases import (
    Case,
    Heads,
    make_case,
    padded,
    poisoned,
    random_scoring,
    random_spans,
)
from tests.examples import in_proofs, usual_and_proofs

pytestmark = pytest.mark.slow

LENGTHS = (0, 1, 31, 32, 33, 64, 255, 256, 257, 513, 1000)
BUSHY = branching([2, 1, 2])
DEEP = (ROOT, 0, 1, 2, 3, 1, 5, ROOT)
MIXED = (
    Span.at(0, 40, 1),
    Span.at(1, 298, 9, (*DEEP, 4)),
    Span.at(2, 0, 2),
    Span.at(3, 0, 0),
    Span.at(4, 600, 1),
    Span.at(5, 256, 3, (ROOT, 0, ROOT)),
)


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import paged_launch

    return paged_launch


@pytest.fixture
def wide_tiles(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time is that of its tiles, whatever their size."""
    monkeypatch.setattr(kernels, "choose_tile", lambda *_: kernels.Tile(16, 128, 4, 1))


def attend(kernels: ModuleType, case: Case, scoring: Scoring = PLAIN) -> Tensor:
    """What the kernels give, on the device that runs them."""
    device = torch.device("cpu" if kernels.paged_kernel.INTERPRETED.value else "cuda")
    sinks = None if scoring.sinks is None else scoring.sinks.to(device)
    result: Tensor = kernels.attend(*case.to(device).args(replace(scoring, sinks=sinks))).cpu()
    return result


def error(kernels: ModuleType, case: Case, scoring: Scoring = PLAIN) -> float:
    """The greatest difference between the kernels' results and the reference's in fp64, over what rounding allows."""
    sinks = None if scoring.sinks is None else scoring.sinks.to(case.queries.dtype)
    scoring = replace(scoring, sinks=sinks)
    expected = reference(*case.double().args(scoring))
    result = attend(kernels, case, scoring)
    assert result.dtype == case.queries.dtype
    assert result.shape == expected.shape
    short = case.queries.dtype.itemsize == 2
    allowed = 2 * torch.finfo(result.dtype).eps if short else 4e-6  # the interpreter cuts off where a GPU rounds
    allowed *= max(1.0, scoring.scale or 0.0)  # scores, and so their rounding, grow with it: the fp32 reference's too
    return float(((result.double() - expected).abs() / (allowed * (1 + expected.abs()))).nan_to_num(torch.inf).max())


@pytest.mark.parametrize("block_size", [5, *in_proofs(16, 32)])
def test_lengths_from_none_to_a_thousand(kernels: ModuleType, block_size: int) -> None:
    spans = [Span.at(n, max(0, length - n % 4), min(length, n % 4)) for n, length in enumerate(LENGTHS)]
    assert error(kernels, make_case(spans, Heads(block_size=block_size))) < 1


@pytest.mark.proofs
@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("window", [None, 2000])
@pytest.mark.parametrize("block_size", [32, 16])
def test_a_length_of_three_thousand(kernels: ModuleType, block_size: int, window: int | None) -> None:
    """A row, the drafts of a round, and a tree: twelve segments of keys in as many parts."""
    spans = [Span.at(0, 2999, 1), Span.at(1, 2995, 5), Span.at(2, 2990, 3, (ROOT, 0, ROOT)), Span.at(3, 0, 0)]
    case = make_case(spans, Heads(block_size=block_size), window=window)
    assert kernels.count_parts(case.rows) == 12
    assert error(kernels, case, Scoring(window=window)) < 1


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("group", [*in_proofs(1, 2, 3, 4), 5, *in_proofs(6, 7, 8)])
def test_any_number_of_heads_shares_a_kv_head(kernels: ModuleType, group: int) -> None:
    spans = [Span.at(0, 300, 1), Span.at(1, 17, 4)]  # four rows of five heads are more than a tile of 16
    assert error(kernels, make_case(spans, Heads(2, group))) < 1


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("head_dim", [*in_proofs(8, 16, 64), 80, *in_proofs(96, 128, 256)])
def test_head_sizes(kernels: ModuleType, head_dim: int) -> None:
    spans = [Span.at(0, 300, 3), Span.at(1, 17, 1)]
    assert error(kernels, make_case(spans, Heads(2, 2, head_dim))) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_proofs(torch.float16)])
def test_short_types(kernels: ModuleType, dtype: torch.dtype) -> None:
    spans = [Span.at(0, 300, 1), Span.at(1, 0, 33)]
    assert error(kernels, make_case(spans, Heads(dtype=dtype)), Scoring(sinks=torch.tensor([0.5, -1.0]))) < 1


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("window", [*in_proofs(1, 2), 31, *in_proofs(32, 250, 600)])
def test_windows(kernels: ModuleType, window: int) -> None:
    spans = [*MIXED, Span.at(6, 1000, 2)]
    assert error(kernels, make_case(spans, Heads(), window=window), Scoring(window=window)) < 1


RULES = list(product((None, 4.0), (None, 0.5, 30.0), (False, True)))  # scale, soft cap, sinks or none


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("rule", usual_and_proofs(RULES, ((None, 30.0, True),)), ids=str)
def test_soft_caps_and_sinks(kernels: ModuleType, rule: tuple[float | None, float | None, bool]) -> None:
    scale, softcap, sinks = rule
    scoring = Scoring(scale=scale, softcap=softcap, sinks=torch.tensor([3.0, -2.0]) if sinks else None)
    assert error(kernels, make_case(MIXED[1:4], Heads()), scoring) < 1


MANY = (Span.at(0, 200, 65), Span.at(1, 33, 1), Span.at(2, 0, 20))


def test_a_pass_with_many_rows_of_a_sequence(kernels: ModuleType) -> None:
    case = make_case(MANY, Heads(1, 3))
    assert (case.rows.split_rows, kernels.count_parts(case.rows)) == (20, 2)
    assert error(kernels, case, Scoring(window=40, sinks=torch.arange(3.0))) < 1


@pytest.mark.proofs
def test_larger_passes_with_many_rows_of_a_sequence(kernels: ModuleType) -> None:
    case = make_case([Span.at(0, 300, 70), *MANY[1:2], Span.at(2, 0, 40)], Heads(2, 3))
    for scoring in (PLAIN, Scoring(window=40, sinks=torch.arange(6.0))):
        assert error(kernels, case, scoring) < 1


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("window", [*in_proofs(None, 5), 400, *in_proofs(800)])
def test_sequences_with_more_segments_than_parts(
    kernels: ModuleType, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_PARTS", 3)
    spans = [Span.at(0, 1800, 1), Span.at(1, 767, 1), Span.at(2, 1030, 3, (ROOT, 0, ROOT))]
    assert error(kernels, make_case(spans, Heads(), window=window), Scoring(window=window)) < 1


# Together they have one part or two, a tree, a sequence without rows, sinks, a window, a soft cap, and a head size that
# is no power of two.
USUAL_SEEDS = (12, 14)


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("seed", usual_and_proofs(range(16), USUAL_SEEDS))
def test_random_passes(kernels: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    heads = Heads(draw.choice((1, 2)), draw.randint(1, 4), draw.choice((8, 16, 20)), draw.choice((5, 16, 32)))
    scoring = random_scoring(draw, heads.kv_heads * heads.group)
    case = make_case(random_spans(draw, draw.choice((40, 700))), heads, seed, scoring.window)
    assert error(kernels, case, scoring) < 1


@pytest.mark.usefixtures("wide_tiles")
def test_nothing_that_a_row_does_not_see_reaches_it(kernels: ModuleType) -> None:
    case = make_case(MIXED, Heads())
    assert torch.equal(attend(kernels, case), attend(kernels, replace(case, pool=poisoned(case))))


SPANS = {
    "split": MIXED,
    "short": (Span.at(0, 100, 2),),
    "many": (Span.at(0, 0, 65),),
    "mixed": (*MIXED[:2], Span.at(2, 0, 65)),
}
PADDED = list(product(SPANS, (False, True)))  # with sinks or without
# The kernel that joins parts divides by nothing where there is no sink.
USUAL_PADDED = (("split", False), ("mixed", True))


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("kind", usual_and_proofs(PADDED, USUAL_PADDED), ids=str)
def test_padding_gives_zeros(kernels: ModuleType, kind: tuple[str, bool]) -> None:
    name, sinks = kind
    case = padded(make_case(SPANS[name], Heads()))
    assert error(kernels, case, Scoring(sinks=torch.tensor([1.0, -1.0]) if sinks else None)) < 1


@contextmanager
def filled_memory() -> Iterator[None]:
    """Memory that torch gives out holds NaN."""
    torch.use_deterministic_algorithms(True)  # which fills it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("name", usual_and_proofs(SPANS, ("split", "short")))
def test_rows_that_all_are_in_a_sequence_are_all_written(kernels: ModuleType, name: str) -> None:
    """Two sequences without keys included. The control: three rows behind them are in none."""
    case = padded(make_case(SPANS[name], Heads()))
    known = len(case.queries) - 3
    fields = ("owners", "positions", "last_visible", "paths")
    cut: dict[str, Any] = {f: None if (of := getattr(case.rows, f)) is None else of[:known] for f in fields}
    covered = replace(case, queries=case.queries[:known], rows=replace(case.rows, covered=True, **cut))
    wrong = replace(case, rows=replace(case.rows, covered=True))
    with filled_memory():
        assert error(kernels, covered) < 1
        assert name in ("split", "mixed") or error(kernels, wrong) > 1, "parts are joined for each row"


@pytest.mark.usefixtures("wide_tiles")
def test_bounds_above_the_true_sizes_change_no_bit(kernels: ModuleType) -> None:
    """A captured graph keeps the bounds of its bucket."""
    case = make_case(MIXED[:2], Heads())
    tight = attend(kernels, case)
    loose = replace(case.rows, max_keys=5000)
    assert torch.equal(attend(kernels, replace(case, rows=loose)), tight)


@pytest.mark.usefixtures("wide_tiles")
def test_queries_may_lie_beside_keys_and_values(kernels: ModuleType) -> None:
    """As one product gives them: they are read where they lie."""
    case = make_case(MIXED[:2], Heads())
    wide = torch.cat([case.queries, torch.full_like(case.queries, torch.nan)], 1)[:, : case.queries.shape[1]]
    assert not wide.is_contiguous()
    beside = attend(kernels, replace(case, queries=wide))
    assert torch.equal(beside, attend(kernels, case))


SPREAD = (Span.at(0, 0, 2), Span.at(1, 254, 4), Span.at(2, 790, 2), Span.at(3, 500, 8, BUSHY))


def differing(kernels: ModuleType, case: Case, scoring: Scoring) -> int:
    """Rows whose bits alone, with a bound on the keys of their own, are not those in company."""
    company = attend(kernels, case, scoring)
    firsts, found = case.rows.first_rows.tolist(), 0
    for sequence, span in enumerate(case.spans):
        for row in sorted({0, span.size - 1}):
            alone = attend(kernels, case.alone(sequence, row), scoring)
            found += not torch.equal(alone[0], company[firsts[sequence] + row])
    return found


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize(
    "scoring",
    [*in_proofs(PLAIN), Scoring(window=300, softcap=5.0, sinks=torch.tensor([1.0, -1.0]))],
    ids=["plain", "everything"],
)
def test_a_row_alone_has_the_bits_that_it_has_in_company(kernels: ModuleType, scoring: Scoring) -> None:
    assert differing(kernels, make_case(SPREAD, Heads(), window=scoring.window), scoring) == 0


def test_a_row_beside_a_prompt_has_the_bits_that_it_has_without_it(kernels: ModuleType) -> None:
    """A decoding sequence keeps its parts and its tiles, whatever chunk of a prompt is in the pass."""
    case = make_case([Span.at(0, 520, 2), Span.at(1, 0, 65), Span.at(2, 0, 1)], Heads(1, 2))
    company = attend(kernels, case)
    for sequence, row in ((0, 0), (0, 1), (2, 0)):
        alone = case.alone(sequence, row)
        assert torch.equal(attend(kernels, alone)[0], company[{0: row, 2: 67}[sequence]])
    crowded = replace(case.rows, split_rows=0)  # then the sequence has one part, and the chunk's tile
    assert not torch.equal(attend(kernels, replace(case, rows=crowded))[:2], company[:2])


@pytest.mark.usefixtures("wide_tiles")
def test_keys_that_are_split_otherwise_give_other_bits(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above sees a split that depends on the company."""
    case = make_case(SPREAD, Heads())
    split = attend(kernels, case)
    monkeypatch.setattr(kernels, "MAX_PARTS", 2)
    assert not torch.equal(attend(kernels, case), split)


MUTANTS = {
    "a row misses its last place": ("place[None, :] <= last[:, None]", "place[None, :] < last[:, None]"),
    "a row sees one place more": ("place[None, :] <= last[:, None]", "place[None, :] <= last[:, None] + 1"),
    "paths are ignored": ("node[None, :] & (on_path == 1)", "node[None, :] & (on_path == 2)"),
    "a path begins one place late": ("bit = place - base", "bit = place - base - 1"),
    "the window is one longer": ("> (position - WINDOW)", ">= (position - WINDOW)"),
    "tiles before the window are cut too far": ("- WINDOW + 1, 0)", "- WINDOW + 40, 0)"),
    "the last tile is left out": ("_tile_number(end + KEYS - 1,", "_tile_number(end - 1,"),
    "tables are read with a wrong stride": ("sequence * table_stride", "sequence * (table_stride - 1)"),
    "all rows have the same query": ("queries + row.to(tl.int64) * query_stride", "queries + row.to(tl.int64) * 0"),
    "values of another head": ("keys + KV_HEADS * HEAD_DIM", "keys + (KV_HEADS - 1) * HEAD_DIM"),
    "a part is not joined": ("tl.minimum(tl.cdiv(length, SEGMENT), parts)", "tl.minimum(length // SEGMENT, parts)"),
    "parts are not weighed": ("weight = tl.exp2(top - ", "weight = tl.exp2(0 * "),
    "sinks of the first head": ("sinks + head", "sinks + head * 0"),
    "another sequence's parts": ("(owner.to(tl.int64) * most", "(owner.to(tl.int64) * 0"),
    "soft caps are too high": ("(SOFTCAP * LOG2_E)", "(SOFTCAP * LOG2_E * 1.01)"),
}


@pytest.fixture
def mutant(
    request: pytest.FixtureRequest, kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The launches of kernels that have a fault."""
    before, after = MUTANTS[request.param]
    with with_fault(kernels.paged_kernel, before, after, tmp_path) as module:
        monkeypatch.setattr(kernels, "paged_kernel", module)
        yield kernels


# Two faults of each kernel.
USUAL_MUTANTS = ("paths are ignored", "the window is one longer", "a part is not joined", "parts are not weighed")


@pytest.mark.parametrize("mutant", usual_and_proofs(MUTANTS, USUAL_MUTANTS), indirect=True)
def test_a_kernel_with_a_fault_is_seen(mutant: ModuleType) -> None:
    assert any(found > 1 for found in errors(mutant))


def test_a_kernel_without_a_fault_passes_the_same_comparison(kernels: ModuleType) -> None:
    assert all(found < 1 for found in errors(kernels))


def errors(kernels: ModuleType) -> Iterator[float]:
    spans = [Span.at(0, 37, 9, (*DEEP, 4)), Span.at(1, 0, 5), Span.at(2, 270, 1)]
    for scoring in (PLAIN, Scoring(window=3), Scoring(softcap=1.0, sinks=torch.tensor([2.0, 1.0]))):
        yield error(kernels, make_case(spans, Heads(), window=scoring.window), scoring)
    yield error(kernels, make_case([Span.at(0, 300, 2), Span.at(1, 0, 66)], Heads()))
