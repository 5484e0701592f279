"""Each form of product is the product, bias included."""

import platform
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import pytest
import torch
from torch import Tensor

import engine.models.compiled as compiled
import engine.models.linear as linear_module
from engine.config import ConfigError
from engine.kernels import cpu_code, cpu_products
from engine.kernels.cpu_panels import PANEL, ROWS
from engine.models import int8_products
from engine.models.compiled_products import LEAST_CHANNELS, panels_of, wide_bias_of
from engine.models.int8_products import (
    LIBRARIES,
    Int8Form,
    Int8Weight,
    Sums,
    _fbgemm_sums,
    check_int8_products,
    int8_forms,
)
from engine.models.linear import BUCKETS, FormChoice, Linear, ProductForm, bucket_of, usable_forms
from engine.models.products import ProductMaker, Weights
from engine.models.quantize import SLICE_ROWS, CodedWeight, quantise_weight
from engine.profiling import machine_cpus
from engine.profiling.machine_cpus import cpu_flags, has_int8_products, smaller_weights
from tests.engine.forked import Forks

ROOT = Path(__file__).resolve().parents[3]
# Sums of 300 products of order 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def int8_reason() -> str:
    try:
        check_int8_products()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not cpu_flags(), reason="this machine does not say what its CPU can")
@pytest.mark.parametrize("numba", [True, False])
def test_the_flags_of_this_cpu_say_whether_it_has_int8_products(numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not numba:
        monkeypatch.setattr(int8_products, "has_compiled_products", lambda: False)
        monkeypatch.setattr(machine_cpus, "find_spec", lambda name: None)
    assert has_int8_products(cpu_flags()) == (not int8_reason())
    assert has_int8_products(frozenset({"sse2"})) is numba


def test_the_flags_of_a_cpu(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path) == frozenset()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_int8\nflags\t\t: other\n", "utf-8")
    assert cpu_flags(tmp_path) == {"fpu", "avx2", "amx_int8"}


def test_only_forms_of_weights_that_a_cpu_has_products_for_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {
        "avx2 avx512f avx512_vnni": "a smaller dtype or int8 or int4 weights",
        "avx2": "a smaller dtype or int4 weights",
        "sse2": "a smaller dtype",
        "": "a smaller dtype or int8 or int4 weights",
    }
    with monkeypatch.context() as patched:
        patched.setattr(machine_cpus, "find_spec", lambda name: None)
        assert {flags: smaller_weights(frozenset(flags.split())) for flags in offered} == offered
    assert smaller_weights(frozenset({"sse2"})) == "a smaller dtype or int8 weights"  # Numba compiles them


needs_int8 = pytest.mark.skipif(bool(int8_reason()), reason=int8_reason())
needs_vnni = pytest.mark.skipif(
    "onednn_int8" not in int8_forms(), reason="oneDNN's int8 products saturate without VNNI"
)


def make(
    dtype: torch.dtype, bias: bool, choice: FormChoice | None = None
) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(400, 300, generator=generator).to(dtype)
    offset = torch.randn(400, generator=generator).to(dtype) * 10 if bias else None
    return Linear(weight, offset, choice), weight, offset


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_form_of_a_product_is_the_product(dtype: torch.dtype, bias: bool) -> None:
    for form in usable_forms(torch.empty(LEAST_CHANNELS, 1, dtype=dtype)):
        linear, weight, offset = make(dtype, bias, [form])
        for rows in (1, 3, 4, 9):
            x = torch.randn(rows, 300, generator=torch.Generator().manual_seed(rows)).to(dtype)
            exact = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
            assert (linear(x).double() - exact).abs().max() < TOLERANCE[dtype]


def test_a_torch_without_onednn_has_the_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators are missing there."""
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    module = runpy.run_path(str(ROOT / "engine/models/linear.py"))
    weight = torch.randn(LEAST_CHANNELS, 3)
    assert module["usable_forms"](weight) == ("plain", "transposed", "compiled")
    assert torch.allclose(module["Linear"](weight)(torch.eye(3)), weight.t())


@needs_onednn
def test_the_number_of_rows_decides_the_form() -> None:
    """Each form gets other values here, which show what computed a row."""
    choice: FormChoice = ["plain", "packed", "transposed", "packed", "plain", "transposed", "packed", "plain"]
    linear, weight, _ = make(torch.float32, False, choice)
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(3))
    y = x @ weight.t()
    factors = {"packed": 1, "transposed": 2, "plain": 3}
    cast(Tensor, linear.forms["transposed"]).mul_(2)
    cast(Tensor, linear.forms["plain"]).mul_(3)
    for rows in range(1, 41):
        form = choice[next((i for i, largest in enumerate(BUCKETS) if rows <= largest), -1)]
        assert choice[bucket_of(rows)] == form
        assert torch.allclose(linear(x[:rows]), factors[form] * y[:rows], atol=1e-3)


@needs_onednn
def test_only_the_chosen_forms_are_kept() -> None:
    size = 400 * 300 * 4
    assert make(torch.float32, False)[0].num_bytes == size
    assert make(torch.float32, True, ["plain"])[0].num_bytes == size + 4 * 400
    linear = make(torch.float32, False, ())[0]
    assert linear.num_bytes == size
    linear.use(["transposed", "packed", "packed", "packed", "packed", "packed", "packed"])
    assert set(linear.forms) == {"transposed", "packed"}
    assert linear.num_bytes == 2 * size


@pytest.mark.parametrize("shape", [(7, 1), (1, 7), (7, 5), (40, 1), (40, 5)])
def test_the_other_forms_have_memory_of_their_own(shape: tuple[int, int]) -> None:
    """The next weight may be read to where this one lies."""
    for form in set(usable_forms(torch.empty(shape))) - {"plain"}:
        weight = torch.ones(shape)
        linear = Linear(weight, None, [form])
        weight.zero_()
        assert torch.equal(linear(torch.ones(2, shape[1])), torch.full((2, shape[0]), float(shape[1])))


@needs_onednn
def test_only_fp32_and_bf16_on_a_cpu_can_be_packed() -> None:
    packable = {dtype for dtype in TOLERANCE if "packed" in usable_forms(torch.empty(1, 1, dtype=dtype))}
    assert packable - {torch.bfloat16} == {torch.float32}  # bf16 on some CPUs only: see the probe below
    assert usable_forms(torch.empty(1, 1, device="meta")) == ("plain",)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.int8])
@pytest.mark.parametrize("shape", [(128, 8), (77, 7), (64, 1)])
def test_a_panel_is_one_stream_of_what_is_multiplied_together(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Step by step, for each channel so many neighbours as one instruction takes. The last panel has whole channels."""
    out, inner = shape
    weight = torch.arange(out * inner).view(shape).remainder(120).to(dtype)
    panels, together = panels_of(weight), cpu_products.neighbours_in(compiled.as_stored(weight))
    steps = -(-inner // together)
    assert panels.numbers.shape == (-(-out // PANEL), steps * together * PANEL)
    for n, panel in enumerate(panels.numbers.view(-1, steps, PANEL, together)):
        first = min(n * PANEL, out - PANEL)
        channels = panel.transpose(0, 1).reshape(PANEL, -1)
        assert torch.equal(channels[:, :inner], weight[first : first + PANEL])
        assert not channels[:, inner:].any()


def test_bfloat16_numbers_that_are_widened_share_words_across_a_panel() -> None:
    """The lower halves of some words are channels in order, and the upper halves are the channels behind these."""
    weight = torch.arange(77 * 3).view(77, 3).bfloat16()
    apart, panels = cpu_products.partners_in(compiled.as_stored(weight)), panels_of(weight, exact=True).numbers
    for first, panel in ((0, panels[0]), (77 - PANEL, panels[-1])):
        halves = panel.view(3, -1, apart, 2).transpose(2, 3)
        assert torch.equal(halves.reshape(3, PANEL).t(), weight[first : first + PANEL])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_a_compiled_product_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    linear, *_ = make(dtype, True, ["compiled"])
    x = torch.randn(2 * ROWS + 2, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(2, len(x) + 1):
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_a_compiled_product_of_many_numbers_is_as_exact_as_others() -> None:
    """One sum over all of them would round away 1.7e-6 of it."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.rand(rows, 16384, generator=generator) for rows in (64, 4))
    exact = x.double() @ weight.double().t()
    error = Linear(weight, None, ["compiled"])(x) / exact - 1
    assert error.square().mean().sqrt() < 4e-7


def test_codes_that_begin_within_a_word_are_laid_out() -> None:
    codes = torch.arange(80 * 24 + 1).remainder(100).to(torch.int8)
    assert torch.equal(panels_of(codes[1:].view(80, 24)).numbers, panels_of(codes[1:].view(80, 24).clone()).numbers)


@pytest.mark.parametrize("width", [31, 32, 300])
def test_a_cpu_that_multiplies_bfloat16_rounds_activations_to_it(width: int) -> None:
    """As torch's products get them. Other CPUs compute with what they are given."""
    generator = torch.Generator().manual_seed(width)
    weight, x = torch.randn(80, width, generator=generator).bfloat16(), torch.randn(7, width, generator=generator)
    out, bias = torch.empty(7, 80), wide_bias_of(None, 80, torch.float32)
    cpu_products.multiply(x.numpy(), compiled.as_stored(panels_of(weight).numbers), bias, out.numpy(), 0, 1)
    rounded, exact = (given.double() @ weight.double().t() for given in (x.bfloat16(), x))
    right, wrong = (rounded, exact) if cpu_code.HAS_PAIRS else (exact, rounded)
    assert torch.allclose(out.double(), right, rtol=0, atol=3e-5)
    assert not torch.allclose(out.double(), wrong, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_share_a_compiled_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    real, parts = cpu_products.multiply, list[object]()

    def counted(*given: object) -> None:
        parts.append(given[-2:])
        real(*given)

    monkeypatch.setattr(cpu_products, "multiply", counted)
    weight, x = torch.randn(1001, 700).to(dtype), torch.randn(5, 700).to(dtype)
    product = Linear(weight, None, ["compiled"])
    alone = product(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiled, "PART_BYTES", 1 << 19)
    assert torch.equal(product(x), alone)
    assert sorted(map(str, parts)) == ["(0, 1)", "(0, 3)", "(1, 3)", "(2, 3)"]


def test_without_numba_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "has_compiled_products", lambda: False)
    assert "compiled" not in usable_forms(torch.empty(LEAST_CHANNELS, 1))


def test_a_weight_of_few_channels_is_not_compiled() -> None:
    assert LEAST_CHANNELS >= PANEL
    assert "compiled" not in usable_forms(torch.empty(LEAST_CHANNELS - 1, 8))
    assert "compiled" in usable_forms(torch.empty(LEAST_CHANNELS, 8))


INT8_SHAPES = [
    (400, 300),
    (64, 64),
    (3, 5),
    (5, 67),
    (96, 512),
    (192, 2048),
]  # signed activations are slow in all but the first


@pytest.fixture(params=get_args(Int8Form))
def form(request: pytest.FixtureRequest) -> Int8Form:
    if request.param not in int8_forms():
        pytest.skip(f"sums of {request.param} are not exact on this machine")
    return cast(Int8Form, request.param)


def make_int8(out: int, inner: int, bias: bool, form: Int8Form) -> tuple[Linear, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out, inner, generator=generator)
    offset = torch.randn(out, generator=generator) * 10 if bias else None
    rounded = quantise_weight(weight)
    return Linear(rounded, offset, [form]), rounded.codes, rounded.steps[:, 0], offset


def activations(rows: int, inner: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    scales = torch.logspace(-3, 3, rows)[:, None]  # each row has a range of its own
    return torch.randn(rows, inner, generator=generator) * scales


@needs_int8
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "inner"), INT8_SHAPES)
def test_an_int8_product_is_a_sum_of_integers(out: int, inner: int, bias: bool, form: Int8Form) -> None:
    """Bit for bit: integer sums, times the channel's step, times the row's step, plus the bias. So the forms agree."""
    linear, integers, steps, offset = make_int8(out, inner, bias, form)
    x = activations(9, inner)
    row_steps = x.abs().amax(1, keepdim=True) * (1 / 127)
    rounded = (x / row_steps).round()
    sums = (rounded.double() @ integers.double().t()).float() * steps
    expected = sums * row_steps if offset is None else torch.addcmul(offset, sums, row_steps)
    assert torch.equal(linear(x), expected)


@needs_int8
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "inner"), INT8_SHAPES)
def test_an_int8_row_does_not_depend_on_its_company(out: int, inner: int, bias: bool, form: Int8Form) -> None:
    linear, x = make_int8(out, inner, bias, form)[0], activations(33, inner)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(1, 34):
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[-rows:]), alone[-rows:])


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_int8_product_is_near_the_product(dtype: torch.dtype, form: Int8Form) -> None:
    """Within half a step of each number: Σ |x| · step(w) / 2 + Σ |w| · step(x) / 2, and the dtype's own rounding."""
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    x = activations(5, 300).to(dtype)
    y = Linear(quantise_weight(weight), None, [form])(x)
    assert y.dtype is dtype
    exact = x.double() @ weight.double().t()
    weight_steps, row_steps = weight.abs().amax(1).double() / 127, x.double().abs().amax(1, keepdim=True) / 127
    bound = x.double().abs().sum(1, keepdim=True) * weight_steps / 2 + row_steps / 2 * weight.double().abs().sum(1)
    error = (y.double() - exact).abs()
    assert (error < 1.01 * bound + 2 * torch.finfo(dtype).eps * exact.abs()).all()
    assert (error > 0.02 * bound).any()  # it is rounded


@needs_int8
def test_rows_of_zeros_and_rows_that_are_not_finite(form: Int8Form) -> None:
    linear, _, _, bias = make_int8(96, 512, True, form)
    x = activations(4, 512)
    clean = linear(x)
    x[0], x[1, 7], x[2, 9] = 0.0, torch.inf, torch.nan
    y = linear(x)
    assert bias is not None
    assert torch.equal(y[0], bias)
    assert not y[1:3].isfinite().any()  # a request with such logits ends; a finite row would go on
    assert torch.equal(y[3], clean[3])


def test_a_weight_is_rounded_to_the_nearest_step() -> None:
    weight = torch.randn(SLICE_ROWS + 3, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[5] = 0
    rounded = quantise_weight(weight)
    integers, steps = rounded.codes, rounded.steps[:, 0]
    assert (integers.dtype, steps.dtype) == (torch.int8, torch.float32)
    assert torch.equal(integers.abs().amax(1), torch.where(torch.arange(len(weight)) == 5, 0, 127))
    assert ((integers * steps[:, None] - weight.float()).abs() <= 0.501 * steps[:, None]).all()


@needs_int8
def test_halves_are_rounded_to_the_even_number(form: Int8Form) -> None:
    weight = CodedWeight(torch.eye(8, dtype=torch.int8), torch.ones(8, 1))
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -126.5]])
    assert Linear(weight, None, [form])(x).tolist() == [[127, 0, 2, 2, 0, -2, -2, -126]]


@needs_int8
def test_the_bytes_of_an_int8_product(form: Int8Form) -> None:
    linear = make_int8(448, 300, True, form)[0]
    assert linear.num_bytes == 448 * 300 + 2 * 4 * 448


@needs_int8
@pytest.mark.parametrize("fault", ["no kernel", "saturates"])
def test_a_form_whose_sums_are_not_exact_here_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weight: Int8Weight) -> Sums:
        if fault == "no kernel":
            raise RuntimeError("there is no such engine")
        return lambda numbers: _fbgemm_sums(weight)(numbers).clamp_(max=32767)

    usual = int8_forms()
    monkeypatch.setattr(int8_products, "_fbgemm_sums", broken)
    int8_products._is_exact_here.cache_clear()
    try:
        exact = tuple(form for form in usual if form != "fbgemm_int8")
        assert int8_forms() == usable_forms(quantise_weight(torch.ones(4, 4))) == exact
    finally:
        int8_products._is_exact_here.cache_clear()


@needs_int8
def test_the_forms_are_known_before_threads_make_products() -> None:
    """Finding them sets the filters of warnings, which is of the whole process."""
    int8_products._is_exact_here.cache_clear()
    ProductMaker(Weights("int8", head=False), torch.float32, torch.device("cpu"))
    assert int8_products._is_exact_here.cache_info().currsize == len(LIBRARIES)


@needs_int8
def test_an_int8_weight_has_one_form_for_few_rows_and_one_for_more() -> None:
    if len(int8_forms()) < 2:
        pytest.skip("this machine has one form of int8 products")
    weight = quantise_weight(torch.randn(64, 32))
    few: list[ProductForm] = [int8_forms()[-1]] * 2
    more: list[ProductForm] = [int8_forms()[0]] * 5
    linear = Linear(weight, None, few + more)
    assert set(linear.forms) == {*few, *more}
    assert linear.num_bytes == 2 * weight.nbytes
    x = activations(9, 32)
    assert torch.equal(linear(x)[:2], linear(x[:2]))
    used = [linear._by_rows[rows] for rows in (1, 2, 3, 9)]
    assert len(set(used[:2])) == len(set(used[2:])) == 1
    assert len(set(used)) == 2


PROBE = """
from engine.models.linear import Linear
from engine.models.int8_products import int8_forms
from engine.models.quantize import quantise_weight
import torch
for dtype in (torch.float32, torch.bfloat16):
    print(dtype, Linear(torch.ones(16, 64, dtype=dtype)).choice)
print(*int8_forms())
for rows in (1, 2, 17):
    Linear(quantise_weight(torch.randn(192, 512)), None, ['onednn_int8'])(torch.randn(rows, 512))
"""


# oneDNN and Numba read their environment once in a process.


@needs_int8
def test_without_avx512_bf16_is_not_packed_and_forms_that_saturate_are_not_used(fresh_processes: Forks) -> None:
    result = fresh_processes.run(PROBE, {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert result.stdout.splitlines()[:2] == ["torch.float32 ('packed',)", "torch.bfloat16 ('plain',)"], result.stderr
    assert result.stdout.splitlines()[2].split() == [form for form in int8_forms() if form != "onednn_int8"]


def test_int8_is_refused_where_there_are_no_exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_products, "has_compiled_products", lambda: False)
    monkeypatch.setattr(int8_products, "_is_exact_here", lambda form: False)
    with pytest.raises(ConfigError, match=r"^weights cannot be int8: .*: install numba, or choose int4 or as_is$"):
        ProductMaker(Weights("int8"), torch.float32, torch.device("cpu"))


OTHER_CPU = """
import torch
from engine.kernels.cpu_integers import AT_ONCE, HAS_VNNI
from engine.models.compiled_products import (
    LEAST_CHANNELS, coded_panels, compiled_int8_product, compiled_product, panels_of
)
from engine.models.quantize import quantise_weight, scale_activations
for shape in ((400, 300), (64, 67), (77, 640), (9, 9)):
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    coded = quantise_weight(weight)
    product = compiled_product(panels_of(weight), bias) if shape[0] >= LEAST_CHANNELS else None
    narrow = weight.bfloat16()
    kinds = (panels_of(narrow, exact=True), panels_of(narrow.float())) if product else ()
    both = [compiled_product(panels, bias) for panels in kinds]
    rounding = compiled_product(panels_of(narrow), bias) if product else None
    exact = compiled_int8_product(coded_panels(coded.codes), coded.steps.flatten(), bias)
    for rows in range(1, 14):
        x = torch.randn(rows, shape[1])
        if product:
            assert torch.allclose(product(x), torch.addmm(bias, x, weight.t()), atol=1e-3)
            assert torch.equal(product(x)[-1:], product(x[-1:]))
            assert torch.equal(both[0](x), both[1](x))
            assert torch.equal(rounding(x.bfloat16()), both[1](x.bfloat16().float()).bfloat16())
        numbers, row_steps = scale_activations(x)
        sums = (numbers.round().double() @ coded.codes.double().t()).float() * coded.steps.flatten()
        assert torch.allclose(exact(x), torch.addcmul(bias, sums, row_steps), rtol=1e-6, atol=1e-6)
        assert torch.equal(exact(x)[-1:], exact(x[-1:]))
print(AT_ONCE, HAS_VNNI)
"""


OTHER_CPUS = {  # features, and the products of an instruction
    "haswell": ("+avx2,+fma,+f16c", 16),
    "skylake-avx512": ("+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl", 32),
    "x86-64": ("+sse2", 16),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other CPUs are x86-64")
@pytest.mark.parametrize(
    "cpu", ["haswell", *(pytest.param(name, marks=pytest.mark.proofs) for name in ("skylake-avx512", "x86-64"))]
)
def test_products_that_are_compiled_for_other_cpus(cpu: str, fresh_processes: Forks, tmp_path: Path) -> None:
    """One with AVX2 and fused multiply-add, one with AVX-512, and one with neither. They have no VNNI, and two of them
    fewer registers."""
    features, at_once = OTHER_CPUS[cpu]
    if cpu == "skylake-avx512" and not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= cpu_flags():
        pytest.skip("this machine has no AVX-512")
    environment = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = fresh_processes.run(OTHER_CPU, environment)
    assert result.stdout.split() == [str(at_once), "False"], result.stderr


@needs_vnni
@pytest.mark.parametrize("instructions", ["ALL", pytest.param("AVX2_VNNI", marks=pytest.mark.proofs)])
def test_no_int8_product_is_left_to_reference_code(fresh_processes: Forks, instructions: str) -> None:
    """It is a thousand times slower."""
    if instructions == "AVX2_VNNI" and "avx_vnni" not in cpu_flags():
        pytest.skip("this machine's VNNI instructions need AVX-512")
    result = fresh_processes.run(PROBE, {"ONEDNN_MAX_CPU_ISA": instructions, "ONEDNN_VERBOSE": "1"})
    products = [line for line in result.stdout.splitlines() if "exec,cpu,matmul" in line]
    assert len(products) == 5, result.stderr
    assert not [line for line in products if ",ref" in line]
