"""The forms of products are those that a machine computes fastest; scripted machines stand for real ones."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models import product_choice
from engine.models.compiled import parts_of
from engine.models.int8_products import int8_forms
from engine.models.linear import (
    BUCKETS,
    GainSource,
    Given,
    Laid,
    LayerGain,
    Linear,
    ProductForm,
    laid_out,
    product_of,
    usable_forms,
)
from engine.models.product_choice import (
    MIN_SWEEPS,
    ProductShape,
    TimedCall,
    best_choice,
    best_layers,
    choose_forms,
    describe,
)
from engine.models.product_times import TimesFile
from engine.models.quantize import quantise_weight
from engine.profiling.kept_files import cache_folder
from tests.engine.models.test_linear import needs_onednn

Script = Mapping[ProductForm, Sequence[float]]  # a form's seconds by bucket

FLAT = [9.0] * len(BUCKETS)
# As on a Xeon: few rows are faster transposed, five and more packed.
SLOW: Script = {"compiled": [99.0] * len(BUCKETS)}
SMALL_LAYERS: Script = {
    "packed": FLAT,
    "transposed": [4, 6, 7, 8, 12, 20, 30, 30, 40],
    "plain": [8, 8, 9, 12, 20, 30, 45, 45, 60],
    **SLOW,
}
LARGE_LAYERS: Script = {
    "packed": FLAT,
    "transposed": [7, 14, 20, 30, 50, 90, 90, 90, 90],
    "plain": [8, 14, 21, 33, 50, 90, 90, 90, 90],
    **SLOW,
}
ALWAYS_PACKED: Script = {"packed": FLAT, "transposed": [10.0] * len(BUCKETS), "plain": [11.0] * len(BUCKETS), **SLOW}

pytestmark = needs_onednn


class Machine:
    """Answers how long a product takes without a look at the clock."""

    def __init__(self, scripts: Mapping[int, Script], *, busy: Callable[[int], float] = lambda call: 1.0) -> None:
        """scripts: by the width of the output. busy(number of the call): the factor by which others slow it down."""
        self._scripts, self._busy = scripts, busy
        self.calls: list[tuple[ProductShape, ProductForm, int]] = []

    def __call__(self, shape: ProductShape, form: ProductForm, rows: int, call: Callable[[], object]) -> float:
        self.calls.append((shape, form, rows))
        assert tuple(torch.as_tensor(call()).shape) == (rows, shape.out)
        return self._scripts[shape.out][form][BUCKETS.index(rows)] * self._busy(len(self.calls)) * 1e-6


def products(*widths: int, dtype: torch.dtype = torch.float32) -> list[Linear]:
    return [Linear(torch.ones(width, 16, dtype=dtype), None, ()) for width in widths]


def chosen(made: Sequence[Linear]) -> list[str]:
    return [describe(product.choice) for product in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_shape_gets_its_fastest_form_in_each_bucket(dtype: torch.dtype) -> None:
    machine = Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS, 80: ALWAYS_PACKED})
    if "packed" not in usable_forms(torch.ones(64, 16, dtype=dtype)):
        pytest.skip(f"this CPU has no packed products of {dtype}")
    made = products(64, 96, 80, 64, dtype=dtype)
    choose_forms(made, timed=machine)
    small, large = "transposed to 5 rows, packed beyond", "transposed to 1 row, packed beyond"
    assert chosen(made) == [small, large, "packed", small]
    for product in made:
        x = torch.ones(3, 16, dtype=dtype)
        assert torch.equal(product(x), torch.full((3, product(x).shape[1]), 16.0, dtype=dtype))


def test_every_shape_is_timed_in_every_form_at_every_bucket() -> None:
    machine = Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS})
    choose_forms(products(64, 96, 64), timed=machine)
    for out, weights in ((64, 2), (96, 1)):
        for form in SMALL_LAYERS:
            for rows in BUCKETS:
                assert machine.calls.count((ProductShape(out, 16, False), form, rows)) >= weights * MIN_SWEEPS


def test_a_weight_of_few_channels_is_timed_in_its_own_forms() -> None:
    """A router has as many as there are experts."""
    machine = Machine({8: SMALL_LAYERS, 96: {**ALWAYS_PACKED, "compiled": [1.0] * len(BUCKETS)}})
    made = products(8, 96)
    choose_forms(made, timed=machine)
    assert chosen(made) == ["transposed to 5 rows, packed beyond", "compiled"]
    assert {form for shape, form, _ in machine.calls if shape.out == 8} == set(SMALL_LAYERS) - {"compiled"}


@pytest.mark.parametrize("kept", [True, False])
def test_a_weight_is_timed_where_service_finds_it(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's weights come to lie in a cache after some passes, where one form is the faster one. A larger
    model's weights never do, although its sample would."""
    run: list[ProductForm] = []

    def followed(form: ProductForm, weight: Laid, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        product = product_of(form, weight, bias)

        def call(x: Tensor) -> Tensor:
            run.append(form)
            return product(x)

        return call

    def timed(shape: ProductShape, form: ProductForm, rows: int, call: Callable[[], object]) -> float:
        call()
        cached = len(run) > 8 and set(run[-9:]) == {form}
        return {"transposed": 1.0 if cached else 9.0, "packed": 5.0, "plain": 20.0, "compiled": 20.0}[form] * 1e-6

    monkeypatch.setattr(product_choice, "product_of", followed)
    made = products(64, 96)
    monkeypatch.setattr(product_choice, "SAMPLE_BYTES", sum(64 * width for width in (64, 96)) - (not kept))
    choose_forms(made, timed=timed)
    assert chosen(made) == (["transposed"] if kept else ["packed"]) * 2


def test_of_a_large_weight_only_a_part_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choice, "SAMPLE_BYTES", 200 * 16 * 4)
    sizes: list[int] = []

    def counted(weight: Given, forms: Sequence[ProductForm]) -> dict[ProductForm, Laid]:
        sizes.append(weight.shape[0])
        return laid_out(weight, forms)

    def timed(shape: ProductShape, form: ProductForm, rows: int, call: Callable[[], object]) -> float:
        assert torch.equal(torch.as_tensor(call()), torch.full((rows, min(shape.out, 192)), 17.0))
        return LARGE_LAYERS[form][BUCKETS.index(rows)]

    monkeypatch.setattr(product_choice, "laid_out", counted)
    made = [Linear(torch.ones(width, 16), torch.ones(width), ()) for width in (3000, 96)]
    choose_forms(made, timed=timed)
    assert set(sizes) == {192, 96}
    assert chosen(made) == ["transposed to 1 row, packed beyond"] * 2
    assert made[0](torch.ones(1, 16)).shape == (1, 3000)


def test_a_weight_is_kept_in_two_forms_at_most() -> None:
    """Each form is the fastest somewhere. Plain decoding and verification matter more than large passes."""
    times: Script = {
        "packed": [9, 9, 9, 5, 5, 5, 5, 5, 5],
        "transposed": [4, 9, 9, 9, 9, 9, 9, 9, 9],
        "plain": [9, 9, 9, 9, 9, 9, 4, 4, 4],
    }
    assert describe(best_choice(times)) == "transposed to 1 row, packed beyond"
    assert set(best_choice(times, most_forms=3)) == set(times)


def test_a_second_form_must_earn_its_memory() -> None:
    times: Script = {
        "packed": [8.9, *FLAT[1:]],
        "transposed": [8.7, *[20.0] * (len(BUCKETS) - 1)],
        "plain": [30.0] * len(BUCKETS),
    }
    assert describe(best_choice(times)) == "packed"


def test_panels_beside_another_form_are_a_copy() -> None:
    script: Script = {**LARGE_LAYERS, "compiled": [1, 1, 2, 4, 20, 40, 60, 60, 80]}
    for room, expected in ((None, "compiled to 5 rows, packed beyond"), (0, "compiled")):
        made = products(96, 96)
        copied = choose_forms(made, copies_bytes=room, timed=Machine({96: script}))
        assert chosen(made) == [expected] * 2
        assert copied == (2 * 96 * 16 * 4 if room is None else 0)


@pytest.mark.parametrize(
    ("saved_us", "threads", "expected"),
    [
        (0.0, 1.0, "packed"),
        (0.5, 1.0, "packed"),
        (3.0, 1.0, "compiled to 5 rows, packed beyond"),
        (0.0, 1.2, "compiled to 5 rows, packed beyond"),
        (200.0, 1.0, "compiled"),
    ],
)
def test_a_compiled_layer_gains_more_than_its_products_say(saved_us: float, threads: float, expected: str) -> None:
    script: Script = {**ALWAYS_PACKED, "compiled": [10, 10, 10, 10, 30, 60, 90, 90, 120]}
    made = products(96, 96)
    put_in_layers(made, saved_us, [threads] * len(BUCKETS))
    choose_forms(made, timed=Machine({96: script}))
    assert chosen(made) == [expected] * 2


def put_in_layers(
    made: Sequence[Linear], saved_us: float = 0.0, threads: Sequence[float] = (1.0,) * len(BUCKETS), name: str = "one"
) -> None:
    gain = LayerGain((saved_us * 1e-6,) * len(BUCKETS), tuple(threads))
    for product in made:
        product.layer_gain = GainSource(name, lambda: gain)


def test_the_products_of_a_layer_are_compiled_together() -> None:
    """Each alone would be compiled for other numbers of rows, so a layer would hardly ever be."""
    first: Script = {**ALWAYS_PACKED, "compiled": [5, 5, 9.5, 5, 9.5, 20, 30, 30, 40]}
    second: Script = {**ALWAYS_PACKED, "compiled": [5, 9.5, 5, 5, 7, 20, 30, 30, 40]}
    for layered in (True, False):
        made = products(96, 80)
        if layered:
            put_in_layers(made)
        choose_forms(made, timed=Machine({96: first, 80: second}))
        together = chosen(made) == ["compiled to 9 rows, packed beyond"] * 2
        assert together == layered


def test_a_larger_product_counts_for_more_in_a_layer() -> None:
    small: Script = {form: [s / 10 for s in ALWAYS_PACKED[form]] for form in ALWAYS_PACKED}
    for slow, expected in ((96, "packed"), (80, "compiled to 15 rows, packed beyond")):
        made = products(96, 80, 80)
        put_in_layers(made)
        large = {**ALWAYS_PACKED, "compiled": [*([14.0] if slow == 96 else [4.0]) * 6, 90, 90, 90]}
        little = {**small, "compiled": [*([0.4] if slow == 96 else [1.4]) * 6, 9, 9, 9]}
        choose_forms(made, timed=Machine({96: little, 80: large}))
        assert chosen(made) == [expected] * 3


def test_few_rows_are_not_chosen_for_by_many() -> None:
    """Eight sequences with one draft each are 16 rows, with four drafts 40."""
    script: Script = {**ALWAYS_PACKED, "compiled": [*[4.0] * 6, 6, 14, 40]}
    made = products(96, 96)
    put_in_layers(made)
    choose_forms(made, timed=Machine({96: script}))
    assert chosen(made) == ["compiled to 24 rows, packed beyond"] * 2


def test_beyond_compiled_layers_each_product_has_its_own_form() -> None:
    compiled = [5.0, 5, 5, 5, 5, 20, 30, 30, 40]
    made = products(96, 80)
    put_in_layers(made)
    plain: Script = {"packed": [12.0] * len(BUCKETS), "transposed": [11.0] * len(BUCKETS), "plain": FLAT}
    scripts = {96: {**ALWAYS_PACKED, "compiled": compiled}, 80: {**plain, "compiled": compiled}}
    choose_forms(made, timed=Machine(scripts))
    assert chosen(made) == ["compiled to 9 rows, packed beyond", "compiled to 9 rows, plain beyond"]


def test_threads_gain_as_much_as_they_do_for_each_number_of_rows() -> None:
    script: Script = {**ALWAYS_PACKED, "compiled": [12.0] * len(BUCKETS)}
    made = products(96, 96)
    put_in_layers(made, threads=[2, 2, 2, 2, 1, 1, 1, 1, 1])
    choose_forms(made, timed=Machine({96: script}))
    assert chosen(made) == ["compiled to 5 rows, packed beyond"] * 2


def test_times_of_layers_are_kept_apart(tmp_path: Path) -> None:
    """They are taken in one thread."""
    for layered in (False, True):
        for again in (False, True):
            made, machine = products(96), Machine({96: ALWAYS_PACKED})
            if layered:
                put_in_layers(made)
            choose_forms(made, cache=tmp_path, timed=machine)
            assert bool(machine.calls) is not again


def test_what_layers_gain_is_kept_with_the_times_that_it_was_measured_with(tmp_path: Path) -> None:
    """A start beside other work would mix what it sees with times of a quiet machine."""
    script: Script = {**ALWAYS_PACKED, "compiled": [10.0] * len(BUCKETS)}
    for saved_us in (200.0, 0.0):
        made = products(96, 96)
        put_in_layers(made, saved_us)
        choose_forms(made, cache=tmp_path, timed=Machine({96: script}))
        assert chosen(made) == ["compiled"] * 2
        assert made[0].layer_gain is None
    other = products(96, 96)
    put_in_layers(other, 0.0, name="another structure")
    choose_forms(other, cache=tmp_path, timed=Machine({96: script}))
    assert chosen(other) == ["packed"] * 2


def test_layers_with_one_form_have_it() -> None:
    shape = ProductShape(96, 16, False)
    assert best_layers({shape: {"compiled_int8": FLAT}}, {shape: 2}) == {shape: ("compiled_int8",)}


@pytest.mark.parametrize("in_layers", [True, False])
def test_products_of_a_compiled_layer_are_timed_in_one_thread(in_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer wakes its threads once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    parts: dict[ProductForm, set[int]] = {}

    def timed(shape: ProductShape, form: ProductForm, rows: int, call: Callable[[], object]) -> float:
        parts.setdefault(form, set()).add(parts_of(1 << 30))
        return 1e-6

    made = products(96)
    if in_layers:
        put_in_layers(made)
    choose_forms(made, timed=timed)
    assert parts.pop("compiled") == ({1, 4} if in_layers else {4})  # passes of more rows are not compiled layers
    assert set.union(*parts.values()) == {4}


@pytest.mark.parametrize(("room", "kept"), [(0, 1), (3 * 96 * 16 * 4 - 1, 1), (3 * 96 * 16 * 4, 2)])
def test_where_memory_is_short_there_is_one_form(room: int, kept: int) -> None:
    made = products(96, 96, 96)
    choose_forms(made, copies_bytes=room, timed=Machine({96: LARGE_LAYERS}))
    assert {len(product.forms) for product in made} == {kept}
    if kept == 1:
        assert chosen(made) == ["packed"] * 3


def choose(folder: Path, timed: TimedCall) -> list[str]:
    made = products(64, 96)
    choose_forms(made, cache=folder, timed=timed)
    return chosen(made)


def test_the_second_start_reads_what_the_first_one_measured(tmp_path: Path) -> None:
    first, second = Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS}), Machine({64: ALWAYS_PACKED, 96: ALWAYS_PACKED})
    measured = choose(tmp_path, first)
    assert choose(tmp_path, second) == measured
    assert first.calls
    assert not second.calls
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]


def test_a_shape_that_the_file_lacks_is_measured(tmp_path: Path) -> None:
    scripts = {64: SMALL_LAYERS, 96: LARGE_LAYERS, 80: ALWAYS_PACKED}
    choose(tmp_path, Machine(scripts))
    choose_forms(products(80), cache=tmp_path, timed=Machine(scripts))
    again = Machine(scripts)
    choose_forms(products(64, 96, 80), cache=tmp_path, timed=again)
    assert not again.calls


def damage_about(content: dict[str, dict[str, object]]) -> None:
    content["about"]["cpu"] = "another one"


def damage_times(content: dict[str, dict[str, object]]) -> None:
    content["seconds"]["64 × 16"] = {"packed": [1.0], "transposed": [1.0], "plain": [1.0]}


def damage_numbers(content: dict[str, dict[str, object]]) -> None:
    content["seconds"]["64 × 16"] = {form: [0.0] * len(BUCKETS) for form in SMALL_LAYERS}


def damage_all(content: dict[str, dict[str, object]]) -> None:
    content.clear()


@pytest.mark.parametrize("damage", [damage_about, damage_times, damage_numbers, damage_all, None])
def test_a_broken_or_foreign_file_is_refused_and_replaced(
    damage: Callable[[dict[str, dict[str, object]]], None] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS})
    expected = choose(tmp_path, machine)
    (path,) = tmp_path.iterdir()
    if damage is None:
        path.write_text("{", "utf-8")
    else:
        content = json.loads(path.read_text("utf-8"))
        damage(content)
        path.write_text(json.dumps(content), "utf-8")
    again = Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS})
    assert choose(tmp_path, again) == expected
    assert again.calls
    assert "cannot be used" in caplog.text
    unread = Machine({})
    assert choose(tmp_path, unread) == expected


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("", "utf-8")
    assert choose(occupied / "below", Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS}))


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    for _ in range(2):
        machine = Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS})
        assert choose(cache_folder(), machine)
        assert machine.calls
    assert not caplog.records


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    assert choose(tmp_path, Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS}))
    assert not list(tmp_path.iterdir())


def test_the_times_of_a_busy_machine_are_used_but_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    busier = Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS}, busy=lambda call: 1.01**call)
    assert choose(tmp_path, busier)
    assert "busy machine" in caplog.text
    assert not list(tmp_path.iterdir())


def test_machines_threads_dtypes_and_sizes_have_files_of_their_own(tmp_path: Path) -> None:
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(usual + 1)
        other_threads = TimesFile(tmp_path, torch.float32, 1 << 24).path
    finally:
        torch.set_num_threads(usual)
    others = [
        TimesFile(tmp_path, dtype, size).path for dtype in (torch.float32, torch.bfloat16) for size in (1, 1 << 24)
    ]
    assert len({other_threads, *others}) == 5


def test_forms_of_8_bit_codes_are_measured_and_kept_apart_from_the_others(tmp_path: Path) -> None:
    if len(int8_forms()) < 2:
        pytest.skip("this machine has one form of int8 products")
    first, *_, last = int8_forms()
    times = {first: FLAT, last: [6, 8, 9.5, 12, 15, 20, 25, 25, 30]}
    few: Script = {form: times.get(form, [40.0] * len(BUCKETS)) for form in int8_forms()}
    weights = [quantise_weight(torch.ones(width, 16)) for width in (64, 96, 64)]
    for bias in (None, torch.ones(64)):
        made = [Linear(weight, bias if len(weight.codes) == 64 else None, ()) for weight in weights]
        machine = Machine({64: few, 96: few})
        assert choose_forms(made, cache=tmp_path, timed=machine) == sum(weight.nbytes for weight in weights)
        assert chosen(made) == [f"{last} to 2 rows, {first} beyond"] * 3
        assert machine.calls
    choose(tmp_path, Machine({64: SMALL_LAYERS, 96: LARGE_LAYERS}))
    assert len(list(tmp_path.iterdir())) == 2
    made = [Linear(weight, None, ()) for weight in weights]
    assert choose_forms(made, copies_bytes=0, cache=tmp_path) == 0
    assert {len(product.forms) for product in made} == {1}


def test_layers_of_fp64_have_no_compiled_form() -> None:
    made = products(96, 80, dtype=torch.float64)
    put_in_layers(made)
    choose_forms(made)
    assert chosen(made) == ["plain"] * 2
