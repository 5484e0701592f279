"""The compiled attention of CPUs against the reference of paged attention, bit for bit in parts and in company."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.models.attention_choice as attention_choice
import engine.models.compiled as compiled
from cache.gathered import GatheredStorage
from cache.layout import Layout, make_cache
from cache.mapped import MappedStorage
from cache.memory import make_storage
from cache.slotted import SlottedCache
from cache.storage import KVShape, SlottedStorage
from engine.kernels import cpu_attention as kernel
from engine.kernels.paged_attention import reference
from engine.models.attention import plan_attention
from engine.models.attention_choice import ROWS, SampleSweeps, rows_that_pay, spans_of
from engine.models.compiled import compiled_module
from engine.models.cpu_attention import BlockGroup, BlockReader
from engine.models.pass_attention import PLAIN, Scoring
from engine.models.spans import Span
from engine.trees import ROOT, branching
from tests.engine.kernels.paged_cases import Case, Heads, make_case, poisoned, random_scoring, random_spans
from tests.examples import in_proofs, usual_and_proofs

CPU = torch.device("cpu")
DEEP = (ROOT, 0, 1, 2, 3, 1, 5, ROOT)
MIXED = (
    Span.at(0, 40, 1),
    Span.at(1, 298, 9, (*DEEP, 4)),
    Span.at(2, 0, 2),
    Span.at(3, 600, 1),
    Span.at(4, 256, 3, (ROOT, 0, ROOT)),
    Span.at(5, 63, 1),
    Span.at(6, 64, 5),
)
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 500)


class _Blocks:
    """A storage of one layer over a case's memory."""

    def __init__(self, case: Case) -> None:
        self.blocks = [case.pool]
        self._tables = case.rows.tables.tolist()

    def table(self, slot: int) -> list[int]:
        return self._tables[slot]


def group_of(case: Case) -> BlockGroup:
    """All spans, in the order of the case's tables."""
    spans = [span._replace(slot=number) for number, span in enumerate(case.spans)]
    positions, last = (torch.tensor([n for s in spans for n in of(s)]) for of in (Span.positions, Span.last_visible))
    shared = 2 * case.queries.shape[1] // case.pool.shape[2]  # queries of a position that share a key
    return BlockGroup.of(slice(None), spans, shared, _Blocks(case), positions, last)  # type: ignore[arg-type]


def attend(case: Case, scoring: Scoring = PLAIN) -> Tensor:
    """What the compiled code gives."""
    reader = BlockReader.over(_Blocks(case))  # type: ignore[arg-type]
    assert reader is not None
    return reader.attend(group_of(case), 0, case.queries, scoring)


def expected(case: Case, scoring: Scoring = PLAIN) -> Tensor:
    """The reference in fp64, for the numbers that the case holds."""
    return reference(*case.double().args(scoring))


def error(case: Case, scoring: Scoring = PLAIN) -> float:
    return (attend(case, scoring).double() - expected(case, scoring)).abs().max().item()


GROUPS = (2, kernel.SHARING + 1)  # both ways to score
USUAL = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", usual_and_proofs(TOLERANCE, USUAL))
@pytest.mark.parametrize("head_dim", [5, 16, 64, 80, 96, 128])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 1), (1, 8)])
def test_rows_chains_and_trees(dtype: torch.dtype, head_dim: int, kv_heads: int, group: int) -> None:
    case = make_case(MIXED, Heads(kv_heads, group, head_dim, 16, dtype))
    assert error(case) < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(30))
def test_random_passes(seed: int) -> None:
    """Windows, soft caps, sinks and scales, over blocks of any size."""
    draw, group = random.Random(seed), 3 if seed % 2 else kernel.SHARING
    scoring = random_scoring(draw, 2 * group)
    spans = [span for span in random_spans(draw, 200) if span.size] or [Span.at(0, 3, 1)]
    case = make_case(spans, Heads(2, group, 16, (4, 5, 16)[seed % 3], torch.float64), seed, scoring.window)
    assert error(case, scoring) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize("group", GROUPS)
def test_tiles_that_end_anywhere(length: int, window: int | None, group: int) -> None:
    spans = [Span.at(0, length - 1, 1), Span.at(1, max(0, length - 3), min(length, 3))]
    assert (
        error(make_case(spans, Heads(2, group, dtype=torch.float64)), Scoring(window=window)) < TOLERANCE[torch.float64]
    )


@pytest.mark.parametrize("window", [None, *in_proofs(20)])
@pytest.mark.parametrize(("group", "sizes"), [(1, [32, 32, 32, 4]), (8, [16] * 6 + [4]), (200, [1] * 100)])
def test_long_spans_are_computed_in_pieces(group: int, sizes: list[int], window: int | None) -> None:
    """A piece ends with its own last key. Trees stay whole."""
    spans = [Span.at(0, 0, 100), Span.at(1, 298, 9, (*DEEP, 4)), Span.at(2, 50, 100), Span.at(3, 7, 1)]
    case = make_case(spans, Heads(2, group, 16, 16, torch.float64))
    pieces = group_of(case)
    assert [s.size for s in pieces.spans if s.slot == 0] == sizes
    assert [s.size for s in pieces.spans if s.slot in (1, 3)] == [9, 1]
    assert [s.end for s in pieces.spans if s.slot == 2][:2] == [50 + sizes[0], 50 + sum(sizes[:2])]
    assert error(case, Scoring(window=window)) < TOLERANCE[torch.float64]


def test_more_scores_are_worth_more_threads() -> None:
    """A few rows take the time to read their keys, more rows the time to compute."""
    heads = Heads(1, 2, 64)
    reader = BlockReader.over(_Blocks(make_case([Span.at(0, 0, 1)], heads)))  # type: ignore[arg-type]
    assert reader is not None
    work = [reader.read_bytes(group_of(make_case([Span.at(0, 200 - n, n)], heads))) for n in (1, 4, 8, 16)]
    assert work == [200 * 2 * 64 * 4] * 2 + [200 * 2 * 64 * n for n in (8, 16)]


@pytest.mark.parametrize("parts", [2, 3, 5, 16])
@pytest.mark.parametrize("group", GROUPS)
def test_parts_of_the_work_give_the_same_bits(parts: int, group: int) -> None:
    case = make_case(MIXED, Heads(3, group, 64))
    whole = attend(case)
    out, no_sinks = np.full((len(case.queries), 3 * group, 64), np.nan, np.float32), np.zeros(0, np.float32)
    spans = group_of(case)
    given = case.queries.numpy(), case.pool.numpy(), spans.tables, spans.first_rows, spans.rows_within(None)
    for part in reversed(range(parts)):
        before = np.isnan(out).sum()
        kernel.attend(*given, 0.125, 0.0, no_sinks, out, part, parts)
        assert parts > 3 or np.isnan(out).sum() < before, "a part has nothing to do"
    assert np.array_equal(out.reshape(len(out), -1), whole.numpy())


def test_threads_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(MIXED, Heads(3, 2, 16))
    alone, called = attend(case), []

    def counted(*args: object) -> None:
        called.append(args[-2:])
        real(*args)

    real = kernel.attend
    monkeypatch.setattr(kernel, "attend", counted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(attend(case), alone)
    assert called == [(0, 1)], "there is too little to read for another thread"
    called.clear()
    monkeypatch.setattr(compiled, "PART_BYTES", 1)
    assert torch.equal(attend(case), alone)
    assert sorted(called) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("group", GROUPS)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, window: int | None, group: int) -> None:
    """`deterministic` rests on it: lanes are computed in the same order alone and together, and hidden keys add 0."""
    case = make_case([Span.at(0, 61, 9), Span.at(1, 300, 4), Span.at(2, 0, 70)], Heads(2, group, 64, 16, dtype))
    scoring = Scoring(window=window)
    together, row = attend(case, scoring), 0
    for number, span in enumerate(case.spans):
        for i in range(span.size):
            one = replace(case.alone(number, i), spans=(Span.at(0, span.start + i, 1),))
            assert torch.equal(attend(one, scoring)[0], together[row])
            row += 1


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_that_a_row_does_not_see_reaches_it(group: int) -> None:
    case = make_case(MIXED, Heads(2, group, 64, dtype=torch.float64))
    assert torch.equal(attend(replace(case, pool=poisoned(case))), attend(case))
    window = Scoring(window=7)
    spans = [Span.at(0, 200, 1), Span.at(1, 90, 4)]
    case = make_case(spans, Heads(2, group, 64, dtype=torch.float64))
    pool = case.pool.clone()
    for table, span in zip(case.rows.tables.tolist(), spans, strict=True):
        for place in range(span.start - 6):
            pool[table[place // 16], place % 16] = torch.nan
    hidden = replace(case, pool=pool)
    assert torch.equal(attend(hidden, window), attend(case, window))
    assert attend(hidden).isnan().all()


@pytest.mark.parametrize("dtype", usual_and_proofs(TOLERANCE, USUAL))
@pytest.mark.parametrize("part", ["key", "value", "query"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_finite_shows(dtype: torch.dtype, part: str, number: float, group: int) -> None:
    """The engine finds faults by scores that are not finite, so none may be lost."""
    case = make_case([Span.at(0, 100, 1)], Heads(1, group, 64, dtype=dtype))
    pool, queries = case.pool.clone(), case.queries.clone()
    if part == "query":
        queries[0, 0, 3] = number
    else:
        pool[int(case.rows.tables[0, 2]), 5, 0 if part == "key" else 1] = number
    assert not attend(replace(case, pool=pool, queries=queries)).isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    case = make_case(MIXED, Heads(1, 2, 64))
    case = replace(case, queries=case.queries * 300)
    assert error(case) < 1e-4


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(2, 128), SlottedStorage),
        (Layout(2, 128, 16, 16), GatheredStorage),  # a block is no whole page
        (Layout(2, 128, 64, 4), MappedStorage),
    ],
)
def test_storages_show_their_blocks(layout: Layout, kind: type) -> None:
    """`blocks` and `table` lead to the rows that `row_numbers` names."""
    cache = make_cache(layout)
    storage = make_storage(layout, cache, KVShape(2, 1, 4, torch.float64, CPU))
    assert type(storage) is kind
    for handle in (7, 8):
        cache.allocate(handle)
        cache.reserve(handle, 90)
        storage.prepare()
        slot = cache.slot(handle)
        for layer in range(2):
            for place, row in enumerate(storage.row_numbers(slot, 0, 90)):
                storage.rows[layer][row] = handle * 1000 + place
            table, size = storage.table(slot), storage.blocks[layer].shape[1]
            found = [storage.blocks[layer][table[p // size], p % size, 0, 0].item() for p in range(90)]
            assert found == [handle * 1000 + place for place in range(90)]


def test_long_spans_and_large_trees_are_not_taken() -> None:
    reader = BlockReader.over(SlottedStorage(SlottedCache(1, 80), 1, 80, KVShape(1, 1, 4, torch.float32, CPU)))
    assert reader is not None
    reader.most_lanes = 12
    assert reader.takes(Span.at(0, 5, 4), 3)
    assert not reader.takes(Span.at(0, 5, 5), 3)
    reader.most_lanes = 100
    assert reader.takes(Span.at(0, 5, 64, branching([63])), 1)
    assert not reader.takes(Span.at(0, 5, 65, branching([64])), 1)


def missing(name: str) -> None:
    """As importlib.util.find_spec."""


def without_a_folder(name: str) -> None:
    raise RuntimeError("cannot cache function 'score': no locator available")


@pytest.mark.parametrize(
    ("part", "replaced", "reason"),
    [("find_spec", missing, "numba is not installed"), ("import_module", without_a_folder, "no locator available")],
)
def test_where_numba_cannot_work_torch_attends(
    part: str, replaced: object, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = SlottedStorage(SlottedCache(1, 8), 1, 8, KVShape(1, 1, 4, torch.float32, CPU))
    compiled_module.cache_clear()
    monkeypatch.setattr(compiled, part, replaced)
    try:
        assert BlockReader.over(storage) is None
        assert reason in caplog.text
    finally:
        compiled_module.cache_clear()


def scripted(ours: Callable[[int], float]) -> attention_choice.TimedSweeps:
    """torch takes 1."""
    return lambda rows: ([9.0, ours(rows), 9.0], [1.0, 9.0, 9.0])


@pytest.mark.parametrize("paying", [0, *ROWS])
def test_the_choice_follows_the_times(paying: int) -> None:
    assert rows_that_pay(scripted(lambda rows: 0.7 if rows <= paying else 1.5)) == paying


def test_a_little_slower_still_pays() -> None:
    assert rows_that_pay(scripted(lambda rows: 1.1)) == ROWS[-1]
    assert rows_that_pay(scripted(lambda rows: 1.2)) == 0


def test_one_disturbed_measurement_does_not_decide() -> None:
    assert rows_that_pay(scripted(lambda rows: 1.5 if rows == ROWS[0] else 0.5 if rows <= 9 else 2.0)) == 9


def test_prompts_count_more_than_each_size_of_few_rows() -> None:
    """Compiled layers read blocks with few rows, whatever is chosen here."""
    assert rows_that_pay(scripted(lambda rows: 0.7 if rows == ROWS[-1] else 1.25)) == ROWS[-1]
    assert rows_that_pay(scripted(lambda rows: 0.7 if rows == ROWS[-1] else 1.6)) == 0


def test_prompts_alone_decide_where_layers_of_any_length_are_compiled() -> None:
    """Then no pass is left whose few rows torch could attend."""
    slow_when_short = scripted(lambda rows: 1.6 if rows < ROWS[-1] else 1.1)
    assert rows_that_pay(slow_when_short) == 0
    assert rows_that_pay(slow_when_short, any_length=True) == ROWS[-1]
    slow_when_long = scripted(lambda rows: 0.5 if rows <= 9 else 1.5)
    assert rows_that_pay(slow_when_long, any_length=True) == rows_that_pay(slow_when_long) == 9


def test_the_spans_that_are_measured_differ_in_length() -> None:
    """With spans of one length torch needs one call for all, and looks faster than it is in service."""
    for rows in ROWS:
        spans = spans_of(rows)
        assert len({span.end for span in spans}) == len(spans) > 1
        assert (spans[0].start == 0) == (rows == ROWS[-1]), "only the largest are whole prompts"


def test_both_ways_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    real = plan_attention

    def seen(*args: object, **kwargs: object) -> object:
        plan = real(*args, **kwargs)  # type: ignore[arg-type]
        taken.append(isinstance(plan.groups[0], BlockGroup))
        return plan

    monkeypatch.setattr(attention_choice, "plan_attention", seen)
    sweeps = SampleSweeps(6, KVShape(5, 2, 16, torch.float32, CPU))
    assert all(len(seconds) == 5 and min(seconds) > 0 for rows in ROWS for seconds in sweeps(rows))
    assert taken == [True, False] * len(ROWS)
