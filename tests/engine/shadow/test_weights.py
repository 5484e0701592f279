"""Weights that are kept as codes on a CUDA device: an engine on the shadow device says what an engine on the CPU says
whose checkpoint holds the numbers that the codes stand for."""

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import ConfigError, EngineConfig, WeightForm
from engine.engine import Engine
from engine.kernels.row_products import most_rows
from engine.loading.load import plan_memory
from engine.models.coded_linear import CodedLinear
from engine.models.decoder import Decoder, LanguageModel
from engine.models.linear import Linear, Product
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.products import Weights
from engine.models.quantize import CodedWeight, quantise_as_fp8, quantise_in_groups, quantise_weight
from engine.types import Request, SamplingParams
from tests.engine.driving import load, model_drafter
from tests.engine.models.test_quantized_checkpoints import FORMATS, LENGTH, fp8, save_quantised
from tests.engine.pairs import Pair, Shape, copy_of, save_checkpoint
from tests.engine.shadow.both import run_both, without_measurements
from tests.engine.shadow.cuda import shadow_cuda
from tests.engine.shadow.emulator import emulated_graphs
from tests.engine.shadow.report import KINDS, measure
from tests.engine.shadow.test_crossings import check_budget
from tests.engine.shadow.test_same_text import SETTINGS
from tests.examples import in_proofs, usual_and_proofs

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

QUANTISE: dict[WeightForm, Callable[[Tensor], CodedWeight]] = {
    "int8": quantise_weight,
    "int4": quantise_in_groups,
    "fp8": quantise_as_fp8,
}
CODES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
REQUESTS = [
    Request(f"r{i}", (2 + i, 7, 9, 3 * i + 5), SamplingParams(temperature=t, seed=i, max_tokens=12, ignore_eos=True))
    for i, t in enumerate((0.0, 0.8, 0.8))
]


@pytest.fixture(autouse=True)
def _without_measurements() -> Iterator[None]:
    with without_measurements():
        yield


def start(pair: Pair, device: str, **config: Any) -> Engine:
    return load(pair, device=device, **{**SETTINGS, **config})


def rounded(checkpoint: str, form: WeightForm, folder: Path) -> str:
    """A copy with the numbers that the codes of its products stand for."""
    path = copy_of(checkpoint, folder) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "_proj.weight" in name or name == "lm_head.weight":
            weight = tensors[name]
            tensors[name] = QUANTISE[form](weight).numbers(torch.float32)[:, : weight.shape[1]].contiguous()
    save_file(tensors, path)
    return str(folder)


def decoder_on_cuda(path: Path, form: WeightForm) -> Decoder:
    checkpoint, weights = open_checkpoint(str(path)), Weights(form)
    return load_decoder(checkpoint, dtype=torch.float64, device=CUDA, max_len=LENGTH, weights=weights)


def products_of(decoder: LanguageModel) -> list[Product]:
    assert isinstance(decoder, Decoder)
    return [p for layer in decoder.layers for p in (layer.qkv, layer.out, *layer.mlp.products)]


@pytest.mark.parametrize("how", [("int4", True), ("fp8", False), *in_proofs(("int8", False))], ids=str)
def test_quantised_at_load(pair: Pair, how: tuple[WeightForm, bool], tmp_path: Path) -> None:
    form, graphs = how
    reference = Pair(rounded(pair.target, form, tmp_path / "target"), rounded(pair.draft, form, tmp_path / "draft"))
    engines: list[Engine] = []

    def make(device: str) -> Engine:
        if device == "cpu":
            return start(reference, device)
        engines.append(start(pair, device, target_weights=form, draft_weights=form, graphs=graphs))
        return engines[0]

    with emulated_graphs():
        both = run_both(make, REQUESTS)
    both.check()
    both.check_drafts()
    for decoder in (engines[0].target.decoder, model_drafter(engines[0]).runner.decoder):
        assert isinstance(decoder, Decoder)
        assert isinstance(decoder.head, CodedLinear)
        assert {p.weight.dtype for p in products_of(decoder) if isinstance(p, CodedLinear)} == {CODES[form]}


KEPT = {  # by format of a checkpoint; none: it is dequantised
    "gptq": torch.uint8,
    "gptq of 8 bits": torch.int8,
    "gptq in another order": None,
    "awq": torch.uint8,
    "packed int4": torch.uint8,
    "packed int4 with zeros": torch.uint8,
    "packed int8": torch.int8,
    "packed int8 per channel": torch.int8,
    "gptq of 8 bits per channel": torch.int8,
    "gptq of 8 bits, size null": torch.int8,
    "weights of int8 alone": torch.int8,
    "int8": torch.int8,
    "int8 by the format's defaults": torch.int8,
    "int8 of one scale": torch.int8,
    "groups of integers in another order": None,
    "fp8 per channel": torch.float8_e4m3fn,
    "fp8 per tensor": torch.float8_e4m3fn,
    "fp8 in blocks": torch.float8_e4m3fn,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("plain") / "plain", Shape(kind="qwen2"), seed=9)


def format_of(name: str) -> Any:
    config, pack = FORMATS[name]
    if name != "fp8 in blocks":
        return config, pack
    # Blocks that are equal groups of columns, as those of real checkpoints are.
    return config | {"weight_block_size": [24, 32]}, lambda weight: fp8(weight, "weight_scale_inv", (24, 32))


USUAL = (
    "gptq",
    "gptq in another order",
    "awq",
    "packed int4",
    "packed int8",
    "int8",
    "fp8 per channel",
    "fp8 in blocks",
)


@pytest.mark.parametrize("name", usual_and_proofs(FORMATS, USUAL))
def test_codes_of_a_checkpoint_are_kept(plain: str, name: str, tmp_path: Path) -> None:
    quantised, reference = save_quantised(plain, tmp_path, *format_of(name))
    with shadow_cuda():
        decoder = decoder_on_cuda(quantised, "as_is")
        kept, rows = decoder.layers[1].mlp.products[1], decoder.layers[1].mlp.products[1].weight.shape[0]
        product = kept(torch.eye(96, dtype=torch.float64).to("cuda")).cpu()
    numbers = load_file(reference / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert product.shape == (96, rows)
    assert torch.allclose(product.t(), numbers.double(), rtol=1e-6, atol=1e-7)
    assert (kept.weight.dtype if isinstance(kept, CodedLinear) else None) is KEPT[name]


@pytest.mark.parametrize("name", ["awq", *in_proofs("int8", "fp8 in blocks")])
def test_the_text_of_a_quantised_checkpoint(plain: str, name: str, tmp_path: Path) -> None:
    quantised, reference = save_quantised(plain, tmp_path, *format_of(name))
    both = run_both(
        lambda device: start(Pair(*(str(reference if device == "cpu" else quantised),) * 2), device), REQUESTS[:2]
    )
    both.check()
    both.check_drafts()


@pytest.mark.parametrize(
    "what",
    [
        (None, "int4"),
        ("gptq", "as_is"),
        ("gptq in another order", "as_is"),
        ("fp8 per channel", "as_is"),
        *in_proofs(
            (None, "as_is"),
            ("gptq", "int4"),
            ("packed int8", "as_is"),
            ("packed int8", "int4"),
            ("groups of integers in another order", "as_is"),
        ),
    ],
    ids=str,
)
def test_the_plan_counts_the_bytes_of_the_codes(
    plain: str, what: tuple[str | None, WeightForm], tmp_path: Path
) -> None:
    """It may leave out steps, offsets and biases, which weigh much in so small a model only."""
    name, form = what
    path = plain if name is None else str(save_quantised(plain, tmp_path, *format_of(name))[0])
    with shadow_cuda():
        config = EngineConfig(path, device="cuda", dtype="float64", target_weights=form, max_model_len=LENGTH)
        planned = plan_memory(config).models[0].weight_bytes
        decoder = decoder_on_cuda(Path(path), form)
        products = [decoder.head, *products_of(decoder)]
        tables = sum(product.num_bytes - product.weight.nbytes for product in products)
    norms = 8 * 5 * decoder.config.hidden_size  # which only the plan counts
    assert decoder.weight_bytes - tables <= planned <= decoder.weight_bytes + norms


def test_a_round_crosses_no_more_often(pair: Pair) -> None:
    check_budget("match", measure(pair, KINDS["match"], "int4"))


@pytest.fixture
def another_gpu() -> Iterator[None]:
    """The engine asks the GPU anew, in this test and in later ones: it keeps an answer for the process."""
    most_rows.cache_clear()
    yield
    most_rows.cache_clear()


@pytest.mark.usefixtures("another_gpu")
def test_an_old_gpu_dequantises_and_says_so(
    plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = save_quantised(plain, tmp_path, *FORMATS["gptq"])
    pair = Pair(str(quantised), plain)
    with shadow_cuda(), caplog.at_level(logging.INFO):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        engine = start(pair, "cuda", dtype="float16")
        assert {type(product) for product in products_of(engine.target.decoder)} == {Linear}
        with pytest.raises(
            ConfigError, match=r"int8 weights .* compute capability 7\.5, and they need 8\.0: choose as"
        ):
            start(pair, "cuda", dtype="float16", draft_weights="int8")
    said = "GPTQ int4 weights: they are dequantised to float16: cuda has compute capability 7.5, and they need 8.0"
    assert said in caplog.text.replace("cuda:0", "cuda")


def test_the_log_says_that_codes_are_used_as_they_are(
    plain: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantised, _ = save_quantised(plain, tmp_path, *FORMATS["fp8 per channel"])
    with shadow_cuda(), caplog.at_level(logging.INFO):
        start(Pair(str(quantised), plain), "cuda", dtype="bfloat16")
    assert "float8 weights: fp8 products use them as they are, with activations in bfloat16" in caplog.text
