"""With `deterministic` a row of a pass has the same bits in any company, so a text cannot depend on k or the batch."""

from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import ConfigError, EngineConfig
from engine.loading.load import load_models
from engine.models import steady_linear
from engine.models.decoder import _add
from engine.models.feeds import Feed
from engine.models.layer import no_norm
from engine.models.mlp import Gating, gating
from engine.models.products import ProductMaker, Weights
from engine.models.runner import Runner
from engine.models.steady_linear import TRIAL_CHANNELS, RowRange, SteadyLinear
from engine.models.traits import Activation
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load, make_sequence
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.pairs import VOCAB, Pair, Shape, save_pair
from tests.examples import in_proofs
from tests.kv import kv_config

CPU = torch.device("cpu")
ROWS = 45  # of a text


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Wide enough that kernels differ by the number of rows."""
    return save_pair(tmp_path_factory.mktemp("wide"), Shape())


def runner(pair: Pair, dtype: str) -> Runner:
    config = EngineConfig(pair.target, dtype=dtype, deterministic=True, max_model_len=96, **kv_config())
    return load_models(config).target


@torch.inference_mode()
def states(model: Runner, chunks: list[int], mates: int) -> Tensor:
    """Logits [ROWS, vocab] of one text, fed in chunks beside `mates` texts of other lengths."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(2, VOCAB, (ROWS + 7 * i,), generator=generator).tolist() for i in range(mates + 1)]
    sequences = [make_sequence(i, text) for i, text in enumerate(texts)]
    for i, mate in enumerate(sequences[1:]):
        model.run([Feed(mate, 20 + 7 * i, outputs=1)])
    rows = []
    for chunk in chunks:
        feeds = [Feed(sequences[0], chunk, outputs=chunk)]
        feeds += [Feed(mate, 1, outputs=1) for mate in sequences[1:] if model.uncached(mate) > 1]
        rows.append(model.run(feeds)[:chunk])
    for sequence in sequences:
        model.release(sequence)
    return torch.cat(rows)


COMPANIES = [([ROWS], 0), ([40, 5], 0), ([5] * 9, 0), ([1] * ROWS, 3), ([9] * 5, 2), ([33, 1, 3, 8], 1)]


def differing(model: Runner) -> list[int]:
    """Indices of the companies in which some bit of the text's logits differs from those of a text fed row by row."""
    alone = states(model, [1] * ROWS, 0)
    return [i for i, company in enumerate(COMPANIES) if not torch.equal(states(model, *company), alone)]


@pytest.mark.parametrize("dtype", [*in_proofs("float32"), "bfloat16"])
def test_a_row_has_the_same_bits_in_any_company(wide: Pair, dtype: str) -> None:
    assert differing(runner(wide, dtype)) == []


def test_without_separate_queries_rows_differ(wide: Pair) -> None:
    model = runner(wide, "float32")
    model.attention_plans.separate_to = None
    assert differing(model)


def test_without_steady_products_rows_differ(wide: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_linear, "agreeing_rows", lambda *_: RowRange(1, 1 << 20))
    monkeypatch.setattr(steady_linear, "usable_forms", lambda weight: ("transposed",))
    assert differing(runner(wide, "float32"))


def gate_in_doubt(gating: Gating) -> Tensor | None:
    """A number [1] whose activation has other bits in a vector than by itself; None: torch has no vectors here."""
    gates = torch.randn(4096, 1, generator=torch.Generator().manual_seed(0)) * 3
    alone = torch.cat([gating(gate[None], torch.ones(1, 1)) for gate in gates])
    together = gating(gates, torch.ones(4096, 1))
    return next(iter(gates[alone != together].split(1)), None)


def rows_that_differ(gating: Gating, gate: Tensor) -> bool:
    """Whether 7 rows on 3 threads, which split a row, have other bits than each of them alone."""
    both = torch.cat([gate.expand(7, 4865), torch.ones(7, 4865)], 1)
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        alone = [gating(*row.split(4865, 1)) for row in both.split(1)]
        return not torch.equal(gating(*both.split(4865, 1)), torch.cat(alone))
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_no_row_of_an_activation_is_split_among_threads(activation: Activation) -> None:
    plain = gating(activation)
    if (gate := gate_in_doubt(plain)) is None:
        pytest.skip("this machine computes every number alike")
    assert rows_that_differ(ProductMaker(Weights(), torch.float32, CPU).gating(plain), gate)
    assert not rows_that_differ(ProductMaker(Weights(deterministic=True), torch.float32, CPU).gating(plain), gate)


def test_a_deterministic_model_splits_no_activation(wide: Pair) -> None:
    if (gate := gate_in_doubt(gating("silu"))) is None:
        pytest.skip("this machine computes every number alike")
    for layer in runner(wide, "float32").decoder.layers:  # type: ignore[attr-defined]
        assert not rows_that_differ(layer.mlp._gating, gate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scaled_residual_does_not_depend_on_its_place(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 999, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.cat([a + b * 0.22 for a, b in zip(x.split(1), y.split(1), strict=True)])
    _add(x, y, no_norm, 0.22, no_norm)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("range_", [RowRange(1, 1), RowRange(2, 4), RowRange(4, 4), RowRange(1, 64)])
def test_a_steady_product_is_the_product_in_calls_of_the_range(
    range_: RowRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady_linear, "agreeing_rows", lambda *_: range_)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 40, generator=generator), torch.randn(24, generator=generator)
    linear = SteadyLinear(weight, bias)
    sizes: list[int] = []
    product = linear._product

    def counted(x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        return product(x)

    monkeypatch.setattr(linear, "_product", counted)
    for rows in (1, 2, 3, 4, 5, 9, 33):
        x = torch.randn(rows, 40, generator=generator)
        assert torch.allclose(linear(x), x @ weight.t() + bias, atol=1e-4)
    assert all(range_.fewest <= size <= range_.most for size in sizes)
    assert linear.num_bytes == 4 * 24 * 41


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_sees_kernels_that_add_in_another_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose products of one row, and of more than 16, add from the other end."""

    def product_of(form: str, weight: Tensor, bias: Tensor | None) -> object:
        def product(x: Tensor) -> Tensor:
            terms = (x[:, None, :] * weight).float()
            order = terms.flip(-1) if x.shape[0] == 1 or x.shape[0] > 16 else terms
            return reduce(torch.add, order.unbind(-1)).to(dtype)

        return product

    monkeypatch.setattr(steady_linear, "lay_out", lambda weight, form: weight)
    monkeypatch.setattr(steady_linear, "product_of", product_of)
    steady_linear.agreeing_rows.cache_clear()
    try:
        assert steady_linear.agreeing_rows(8, 50, dtype, False, 1) == RowRange(2, 16)
    finally:
        steady_linear.agreeing_rows.cache_clear()


def test_the_trial_of_a_head_draws_few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that drew every number of a large head would take more memory than the model."""
    drawn: list[int] = []
    ldexp = torch.ldexp

    def counted(mantissas: Tensor, exponents: Tensor) -> Tensor:
        drawn.append(mantissas.numel())
        return ldexp(mantissas, exponents)

    monkeypatch.setattr(torch, "ldexp", counted)
    steady_linear.agreeing_rows(2 * TRIAL_CHANNELS + 5, 40, torch.float32, True, 1)
    assert drawn == [TRIAL_CHANNELS * 20]


@pytest.mark.parametrize("temperature", [*in_proofs(0.0), 0.8])
def test_a_seeded_text_in_bfloat16_is_the_same_for_any_k_and_batch(wide: Pair, temperature: float) -> None:
    requests = [
        Request(f"r{i}", (2 + i, 7, 9, 3 * i + 5), SamplingParams(temperature=temperature, seed=i, max_tokens=16))
        for i in range(4)
    ]
    engine = load(wide, dtype="bfloat16", deterministic=True, max_running=4, max_spec_length=4, max_step_tokens=40)
    texts = []
    for k, batch in ((0, 1), (4, 1), (0, 4), (4, 4)):
        asked = [replace(r, k=k) for r in requests]
        runs = [drive(engine, asked[i : i + batch]) for i in range(0, len(asked), batch)]
        assert (sum(run.accepted for run in runs) > 0) == (k > 0)
        texts.append({name: tokens for run in runs for name, tokens in run.tokens.items()})
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_what_deterministic_does_not_cover_is_refused(tmp_path: Path) -> None:
    windows = random_checkpoint(CASES["mistral"], tmp_path)
    with pytest.raises(ConfigError, match=r"deterministic cannot be honoured: .* has sliding windows: choose false"):
        load_models(EngineConfig(windows, deterministic=True))
    with pytest.raises(ConfigError, match="deterministic needs device cpu and products auto or packed"):
        EngineConfig("target", deterministic=True, products="plain")
    with pytest.raises(ConfigError, match="deterministic needs device cpu"):
        EngineConfig("target", deterministic=True, device="cuda")
