"""Quantised checkpoints against straightforward readers: each test packs numbers one by one, as the format says."""

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.config import ConfigError, EngineConfig, WeightForm
from engine.loading.load import plan_memory
from engine.loading.planned_weights import planned_weights
from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.models.int4_linear import Int4Linear
from engine.models.int8_products import Int8Weight
from engine.models.linear import Linear, Product
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.products import Weights
from engine.models.runner import Runner
from tests.engine.driving import make_sequence
from tests.engine.models import families
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.models.test_int4_linear import needs_int4
from tests.engine.models.test_linear import int8_reason, needs_int8
from tests.engine.pairs import VOCAB, Shape, copy_of, edit_json, save_checkpoint
from tests.kv import kv_layout

CPU = torch.device("cpu")
LENGTH = 48
Stored = dict[str, Tensor]
Pack = Callable[[Tensor], tuple[Stored, Tensor]]  # weight → (the format's tensors, the numbers that they stand for)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("quantised") / "plain", Shape(kind="qwen2"), seed=9)


def int32(number: int) -> int:
    """The signed number with these 32 bits."""
    return number - 2**32 if number >= 2**31 else number


def packed(values: list[int], bits: int, order: list[int] | None = None) -> list[int]:
    """Unsigned values in int32s, from the lowest bits; `order`: which value of a word comes at each place."""
    per_word = 32 // bits
    words = []
    for start in range(0, len(values), per_word):
        group = values[start : start + per_word] + [0] * (start + per_word - len(values))
        words.append(int32(sum(group[order[i] if order else i] << (bits * i) for i in range(per_word))))
    return words


def grouped(weight: Tensor, bits: int, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(unsigned integers [out, in], scales fp16 [out, groups], zero points [out, groups]) of groups of columns."""
    count = int(group.max()) + 1
    scales, zeros = torch.empty(len(weight), count), torch.empty(len(weight), count, dtype=torch.int64)
    integers = torch.empty(weight.shape, dtype=torch.int64)
    for g in range(count):
        part = weight[:, group == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / (2**bits - 1)).half().float()
        zeros[:, g] = (-low / scales[:, g]).round().clamp(1, 2**bits - 1).long()
        integers[:, group == g] = (part / scales[:, g, None]).round().long() + zeros[:, g, None]
    return integers.clamp(0, 2**bits - 1), scales, zeros


def meant(integers: Tensor, scales: Tensor, zeros: Tensor, group: Tensor) -> Tensor:
    numbers = torch.empty(integers.shape)
    for column, g in enumerate(group.tolist()):
        numbers[:, column] = (integers[:, column] - zeros[:, g]) * scales[:, g]
    return numbers


def gptq(weight: Tensor, bits: int = 4, size: int = 32, shuffled: bool = False) -> tuple[Stored, Tensor]:
    group = torch.arange(weight.shape[1]) // size
    if shuffled:
        group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(1))]
    integers, scales, zeros = grouped(weight, bits, group)
    tensors = {
        "qweight": torch.tensor([packed(row, bits) for row in integers.tolist()], dtype=torch.int32).t().contiguous(),
        "qzeros": torch.tensor([packed(row, bits) for row in (zeros - 1).t().tolist()], dtype=torch.int32),
        "scales": scales.t().half().contiguous(),
        "g_idx": group.int(),
    }
    return tensors, meant(integers, scales, zeros, group)


def symmetric_gptq(weight: Tensor) -> tuple[Stored, Tensor]:
    """8 bits with a step per channel and the zero point 128, as the integers of W8A8 have it."""
    scales = (weight.abs().amax(1) / 127).half().float()[:, None]
    integers, zeros = (weight / scales).round().long() + 128, torch.full(scales.shape, 128)
    group = torch.zeros(weight.shape[1], dtype=torch.int64)
    tensors = {
        "qweight": torch.tensor([packed(row, 8) for row in integers.tolist()], dtype=torch.int32).t().contiguous(),
        "qzeros": torch.tensor([packed(row, 8) for row in (zeros - 1).t().tolist()], dtype=torch.int32),
        "scales": scales.t().half().contiguous(),
        "g_idx": group.int(),
    }
    return tensors, meant(integers, scales, zeros, group)


def awq(weight: Tensor, size: int = 32) -> tuple[Stored, Tensor]:
    group = torch.arange(weight.shape[1]) // size
    integers, scales, zeros = grouped(weight, 4, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": torch.tensor([packed(row, 4, order) for row in integers.t().tolist()], dtype=torch.int32),
        "qzeros": torch.tensor([packed(row, 4, order) for row in zeros.t().tolist()], dtype=torch.int32),
        "scales": scales.t().half().contiguous(),
    }
    return tensors, meant(integers, scales, zeros, group)


def pack_quantized(weight: Tensor, bits: int = 4, size: int = 32, asymmetric: bool = False) -> tuple[Stored, Tensor]:
    group = torch.arange(weight.shape[1]) // size
    integers, scales, zeros = grouped(weight, bits, group)
    if not asymmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
        scales = torch.stack([weight[:, group == g].abs().amax(1) for g in range(scales.shape[1])], 1) / zeros
        scales = scales.half().float()
        steps = torch.stack([weight[:, c] / scales[:, g] for c, g in enumerate(group.tolist())], 1)
        integers = (steps.round().long() + 2 ** (bits - 1)).clamp(0, 2**bits - 1)
    tensors = {
        "weight_packed": torch.tensor([packed(row, bits) for row in integers.tolist()], dtype=torch.int32),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if asymmetric:
        columns = [packed(column, bits) for column in zeros.t().tolist()]
        tensors["weight_zero_point"] = torch.tensor(columns, dtype=torch.int32).t().contiguous()
    return tensors, meant(integers, scales, zeros, group)


def w8a8(weight: Tensor, divisor: float = 127.5, per_tensor: bool = False) -> tuple[Stored, Tensor]:
    largest = weight.abs().amax(1, keepdim=True)
    scale = (largest.amax().view(1) if per_tensor else largest) / divisor
    integers = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": integers, "weight_scale": scale}, integers.float() * scale


def w8a8_in_groups(weight: Tensor, size: int = 32) -> tuple[Stored, Tensor]:
    """Groups of columns in another order, as calibration by activations leaves them."""
    group = torch.arange(weight.shape[1]) // size
    group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(1))]
    scale = torch.stack([weight[:, group == g].abs().amax(1) for g in range(int(group.max()) + 1)], 1) / 127
    zero = torch.arange(scale.numel()).view(scale.shape) % 5 - 2
    integers = (weight / scale[:, group] + zero[:, group]).round().clamp(-128, 127).to(torch.int8)
    stored = {"weight": integers, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    return stored | {"weight_g_idx": group.int()}, (integers - zero[:, group]) * scale[:, group]


def fp8(weight: Tensor, name: str = "weight_scale", block: tuple[int, int] | None = None) -> tuple[Stored, Tensor]:
    rows, columns = block or (1, weight.shape[1])
    scales = torch.stack(
        [torch.stack([part.abs().amax() for part in strip.split(columns, 1)]) for strip in weight.split(rows)]
    )
    scales /= 448
    numbers, stored = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
        numbers[part] = stored[part].float() * scales[i, j]
    return {"weight": stored, name: scales}, numbers


def fp8_per_tensor(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.abs().amax() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, stored.float() * scale


def compressed(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """inputs: how activations are quantised; None: they are not."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int", "num_bits": 8, **weights}}
    groups = {"group_0": group | {"input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
INT8 = compressed("int-quantized", BY_TOKEN, strategy="channel")
FP8 = {"quant_method": "fp8", "weight_block_size": [24, 40]}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, gptq),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, lambda w: gptq(w, bits=8)),
    "gptq in another order": (GPTQ | {"desc_act": True}, lambda w: gptq(w, shuffled=True)),
    "awq": (AWQ, awq),
    "packed int4": (compressed("pack-quantized", num_bits=4), pack_quantized),
    "packed int4 with zeros": (
        compressed("pack-quantized", num_bits=4, symmetric=False),
        lambda w: pack_quantized(w, asymmetric=True),
    ),
    "packed int8": (compressed("pack-quantized"), lambda w: pack_quantized(w, bits=8)),
    "packed int8 per channel": (
        compressed("pack-quantized", strategy="channel"),
        lambda w: pack_quantized(w, bits=8, size=w.shape[1]),
    ),
    "gptq of 8 bits per channel": (GPTQ | {"bits": 8, "group_size": -1}, lambda w: symmetric_gptq(w)),
    "gptq of 8 bits, size null": (GPTQ | {"bits": 8, "group_size": None}, lambda w: symmetric_gptq(w)),
    "weights of int8 alone": (compressed("int-quantized", strategy="channel"), w8a8),
    "int8": (INT8, w8a8),
    "int8 by the format's defaults": (compressed("int-quantized", {}, strategy="channel"), w8a8),
    "int8 of one scale": (compressed("int-quantized", BY_TOKEN, strategy="tensor"), lambda w: w8a8(w, per_tensor=True)),
    "groups of integers in another order": (
        compressed("int-quantized", strategy="group", symmetric=False, group_size=32, actorder="group"),
        w8a8_in_groups,
    ),
    "fp8 per channel": (compressed("float-quantized", type="float", strategy="channel"), fp8),
    "fp8 per tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_per_tensor),
    "fp8 in blocks": (FP8, lambda w: fp8(w, "weight_scale_inv", (24, 40))),
}

W8A8 = ("int8", "int8 of one scale", "int8 by the format's defaults")
WEIGHTS_ALONE = (
    "packed int8 per channel",
    "gptq of 8 bits per channel",
    "gptq of 8 bits, size null",
    "weights of int8 alone",
)


def save_quantised(plain: str, path: Path, config: dict[str, Any], pack: Pack | None) -> tuple[Path, Path]:
    """(a copy whose layers' products are stored in the format, a plain copy with the numbers that they stand for)."""
    quantised, reference = copy_of(plain, path / "quantised"), copy_of(plain, path / "reference")
    tensors, numbers = load_file(Path(plain) / "model.safetensors"), load_file(Path(plain) / "model.safetensors")
    for name in [n for n in tensors if "_proj.weight" in n] if pack else []:
        stored, numbers[name] = pack(tensors.pop(name))  # type: ignore[misc]
        tensors |= {f"{name.removesuffix('weight')}{part}": t.contiguous() for part, t in stored.items()}
    save_file(tensors, quantised / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, reference / "model.safetensors")
    edit_json(quantised / "config.json", quantization_config=config)
    return quantised, reference


def decoder_of(path: Path, weights: Weights = Weights(), dtype: torch.dtype = torch.float32) -> Decoder:  # noqa: B008
    return load_decoder(open_checkpoint(str(path)), dtype=dtype, device=CPU, max_len=LENGTH, weights=weights)


def logits_of(decoder: Decoder) -> Tensor:
    text = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        return Runner(decoder, kv_layout(1, LENGTH), CPU).run([Feed(make_sequence(0, text), LENGTH, outputs=LENGTH)])


@pytest.fixture(scope="module", params=sorted(FORMATS))
def stored(
    request: pytest.FixtureRequest, plain: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    return request.param, *save_quantised(plain, tmp_path_factory.mktemp("format"), *FORMATS[request.param])


def test_a_quantised_checkpoint_is_the_numbers_that_it_stands_for(stored: tuple[str, Path, Path]) -> None:
    name, quantised, reference = stored
    exact = logits_of(decoder_of(reference, dtype=torch.float64))
    logits = logits_of(decoder_of(quantised, dtype=torch.float64))
    if name in W8A8 and not int8_reason():  # the activations are rounded too
        assert 1e-4 < (logits - exact).square().mean().sqrt() / exact.std() < 0.05
    else:
        assert (logits - exact).abs().max() < 1e-4


def is_int8(product: Product) -> bool:
    return isinstance(product, Linear) and all(isinstance(kept, Int8Weight) for kept in product.forms.values())


@needs_int8
@pytest.mark.parametrize("name", ["int8", "int8 of one scale"])
def test_integers_are_used_as_they_are_stored(plain: str, tmp_path: Path, name: str) -> None:
    """Making them anew from their numbers would round a second time, wherever the largest is not 127. Compiled layers
    for 16 bits beside integers would take long, and are not looked at."""
    quantised, reference = save_quantised(plain, tmp_path, *FORMATS[name])
    decoder = decoder_of(quantised, Weights(products="plain"), dtype=torch.bfloat16)
    layer, (gate_up, down) = decoder.layers[0], decoder.layers[0].mlp.products
    weight = load_file(reference / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert all(is_int8(product) for product in (layer.qkv, layer.out, gate_up, down))
    assert isinstance(decoder.head, Linear)
    assert not is_int8(decoder.head)
    ones = torch.eye(weight.shape[1])
    assert torch.allclose(down(ones), weight.t(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("form", "names"), [("as_is", W8A8), ("int8", W8A8 + WEIGHTS_ALONE)])
@pytest.mark.parametrize("name", W8A8 + WEIGHTS_ALONE)
def test_activations_are_rounded_only_where_the_checkpoint_or_the_operator_says_so(
    plain: str,
    tmp_path: Path,
    name: str,
    form: WeightForm,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Product, log and plan agree. The layout of the products is asked, and none is computed: any CPU can do that."""
    monkeypatch.setattr("engine.models.products.check_int8_products", lambda: None)
    path, _ = save_quantised(plain, tmp_path, *FORMATS[name])
    with caplog.at_level(logging.INFO):
        decoder = decoder_of(path, Weights(form, products="packed"))
    layer = decoder.layers[0]
    rounded = {is_int8(product) for product in (layer.qkv, layer.out, *layer.mlp.products)}
    assert rounded == {name in names}
    assert ("int8 products use them as they are" in caplog.text) == (name in names)
    config = EngineConfig(str(path), target_weights=form, max_model_len=LENGTH)
    planned = plan_memory(config).models[0].weight_bytes
    assert planned == pytest.approx(decoder.weight_bytes, rel=0.1)  # biases, steps and norms are not planned


@needs_int8
def test_steps_are_those_that_are_stored(plain: str, tmp_path: Path) -> None:
    """Also those of a channel whose integers are small, which larger integers and a smaller step would give too."""

    def small(weight: Tensor) -> tuple[Stored, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / torch.arange(1, 1 + len(weight))[:, None].clamp(max=127)
        integers = (weight / scale).round().to(torch.int8)
        return {"weight": integers, "weight_scale": scale}, integers * scale

    quantised, _ = save_quantised(plain, tmp_path, INT8, small)
    tensors, layer = load_file(quantised / "model.safetensors"), decoder_of(quantised).layers[1]
    names = ("gate_proj", "up_proj")
    scales = torch.cat([tensors[f"model.layers.1.mlp.{name}.weight_scale"] for name in names])
    gate_up = layer.mlp.products[0]
    assert isinstance(gate_up, Linear)
    for kept in gate_up.forms.values():
        assert isinstance(kept, Int8Weight)
        assert torch.equal(kept.steps, scales[:, 0])


def w4a16(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Stored, Tensor]:
    """Symmetric 4-bit integers with scales of `dtype`, as compressed-tensors packs them."""
    tensors, _ = pack_quantized(weight)
    scale = tensors["weight_scale"].to(dtype)
    spread = scale.float().repeat_interleave(32, 1)[:, : weight.shape[1]]
    integers = (weight / spread).round().clamp(-8, 7)
    words = [packed([int(n) + 8 for n in row], 4) for row in integers.tolist()]
    stored = {"weight_packed": torch.tensor(words, dtype=torch.int32), "weight_scale": scale}
    return tensors | stored, integers * spread


@needs_int4
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_int4_is_kept_if_its_scales_can_be(plain: str, tmp_path: Path, dtype: torch.dtype) -> None:
    config = compressed("pack-quantized", num_bits=4)
    quantised, reference = save_quantised(plain, tmp_path, config, lambda weight: w4a16(weight, dtype))
    layer = decoder_of(quantised, Weights("int4")).layers[0]
    down = layer.mlp.products[1]
    numbers = load_file(reference / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, Int4Linear)
    assert isinstance(layer.qkv, Int4Linear)
    kept = torch.equal(down(torch.eye(numbers.shape[1])), numbers.bfloat16().float().t())
    assert kept == (dtype is torch.bfloat16)


def test_a_decoder_of_other_weights_differs(plain: str, tmp_path: Path) -> None:
    """The negative control: packed in another order, the same tensors stand for other numbers."""
    quantised, reference = save_quantised(plain, tmp_path, AWQ, awq)
    edit_json(quantised / "config.json", quantization_config=FORMATS["packed int4"][0])
    with pytest.raises(ConfigError, match="holds no tensor"):
        decoder_of(quantised)
    edit_json(quantised / "config.json", quantization_config=AWQ)
    exact = logits_of(decoder_of(reference))
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.qweight"
    tensors[name] = (tensors[name] >> 4) & 0x0F0F0F0F | ((tensors[name] & 0x0F0F0F0F) << 4)
    save_file(tensors, quantised / "model.safetensors")
    assert (logits_of(decoder_of(quantised)) - exact).abs().max() > 0.1


@needs_int8
@pytest.mark.parametrize(
    ("config", "pack", "form", "message"),
    [
        (GPTQ, gptq, "as_is", "GPTQ int4 weights: they are dequantised to float32: this format has no product here"),
        (GPTQ, gptq, "int8", "GPTQ int4 weights: they are dequantised and then made int8"),
        (GPTQ, gptq, "int4", "GPTQ int4 weights: int4 products use them as they are where bfloat16 has their scales"),
        (INT8, w8a8, "int4", "int-quantized int8 weights: they are dequantised and then made int4"),
        (INT8, w8a8, "as_is", "int-quantized int8 weights: int8 products use them as they are"),
        (*FORMATS["weights of int8 alone"], "as_is", "to float32: config.json does not ask for rounded activations"),
    ],
)
def test_the_log_says_what_becomes_of_the_weights(
    plain: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    pack: Pack,
    form: WeightForm,
    message: str,
) -> None:
    path, _ = save_quantised(plain, tmp_path, config, pack)
    with caplog.at_level(logging.INFO):
        decoder_of(path, Weights(form))
    assert message in caplog.text
    assert f"weights {form} in float32, 0." in caplog.text


@needs_int8
def test_a_checkpoint_of_4_bits_can_be_served_in_int8(plain: str, tmp_path: Path) -> None:
    quantised, reference = save_quantised(plain, tmp_path, GPTQ, gptq)
    exact, rounded = logits_of(decoder_of(reference)), logits_of(decoder_of(quantised, Weights("int8")))
    assert 1e-4 < (rounded - exact).square().mean().sqrt() / exact.std() < 0.05


@pytest.mark.parametrize(
    "form", ["as_is", pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=needs_int4)]
)
@pytest.mark.parametrize("name", ["gptq", "awq", "packed int4", "int8", "fp8 in blocks"])
def test_the_plan_counts_weights_as_they_are_kept(plain: str, tmp_path: Path, name: str, form: WeightForm) -> None:
    """Four bits in a file are 32 in memory if they are dequantised."""
    path, _ = save_quantised(plain, tmp_path, *FORMATS[name])
    planned = plan_memory(EngineConfig(str(path), target_weights=form, max_model_len=LENGTH)).models[0].weight_bytes
    loaded = decoder_of(path, Weights(form, products="packed")).weight_bytes
    assert planned == pytest.approx(loaded, rel=0.05)  # steps and biases are not planned


@pytest.mark.parametrize(("stored_as", "kept"), [(torch.float8_e4m3fn, 1), (torch.float8_e5m2, 2)])
def test_the_plan_for_a_gpu_counts_the_fp8_numbers_that_its_products_read(
    plain: str, tmp_path: Path, stored_as: torch.dtype, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        numbers = weight.to(stored_as)
        return {"weight": numbers, "weight_scale": torch.ones(())}, numbers.float()

    path, _ = save_quantised(plain, tmp_path, FORMATS["fp8 per tensor"][0], pack)
    monkeypatch.setattr("engine.models.products.coded_products_reason", lambda device: None)
    checkpoint = open_checkpoint(str(path))
    (planned,) = planned_weights(EngineConfig(str(path)), [checkpoint], torch.bfloat16, torch.device("cuda"))
    tables = checkpoint.shape.vocab_size * checkpoint.shape.hidden_size * (2 if checkpoint.shape.tied else 4)
    assert planned == tables + kept * checkpoint.shape.layer_numbers


def test_zero_biases_of_gptq_are_none(plain: str, tmp_path: Path) -> None:
    quantised, _ = save_quantised(plain, tmp_path, GPTQ, gptq)
    tensors = load_file(quantised / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
    save_file(tensors, quantised / "model.safetensors")
    decoder_of(quantised)
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1.0
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj\.bias"):
        decoder_of(quantised)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'; supported are compressed-tensors, fp8"),
        ({"quant_method": "gptq"}, "quantization_config of config.json is malformed: KeyError"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (AWQ | {"version": "gemv"}, "AWQ of 4 bits in version 'gemv'"),
        (FP8 | {"weight_block_size": [128]}, "malformed"),
        (FP8 | {"weight_block_size": [0, 128]}, "a block of 0 × 128"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "malformed"),
        (compressed("marlin-24", num_bits=4), "compressed-tensors marlin-24 int4 is not supported"),
        (compressed("pack-quantized", num_bits=3), "pack-quantized int3 is not supported"),
        (INT8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights is not supported"),
        (INT8 | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config is not"),
        ({"quant_method": ["gptq"]}, r"quantised by \['gptq'\]"),
    ],
)
def test_metadata_that_cannot_be_read(plain: str, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    path, _ = save_quantised(plain, tmp_path, config, None)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(path))


NAN = torch.ones(96, 64).index_fill(1, torch.tensor([5]), torch.nan).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("config", "pack", "part", "broken", "message"),
    [
        (GPTQ, gptq, "scales", torch.ones(2, 95).half(), "is no GPTQ int4 weight: scales of"),
        (GPTQ, gptq, "g_idx", torch.full((64,), 7, dtype=torch.int32), "does not name one of 2 groups"),
        (GPTQ | {"desc_act": True}, gptq, "g_idx", None, "desc_act is true, and the checkpoint holds no g_idx"),
        (AWQ, awq, "qweight", torch.ones(64, 12), "stored as torch.float32 instead of int32"),
        (FP8, FORMATS["fp8 in blocks"][1], "weight_scale_inv", torch.ones(3, 3), r"scales of shape \(3, 3\)"),
        (INT8, w8a8, "weight_scale", torch.ones(96, 0), "is no compressed-tensors int-quantized int8 weight: "),
        (FORMATS["packed int8"][0], FORMATS["packed int8"][1], "weight_shape", torch.tensor(64), "int8 weight: "),
        (INT8, w8a8, "weight_scale", None, "stored as I8 without the scales of compressed-tensors int-quantized int8"),
        (FP8, FORMATS["fp8 in blocks"][1], "weight", NAN, r"up_proj\.weight holds FP8 numbers that are not finite"),
        (AWQ, awq, "qzeros", None, "up_proj is no AWQ int4 weight: the checkpoint holds no .*qzeros"),
    ],
)
def test_tensors_that_do_not_fit_the_format(
    plain: str, tmp_path: Path, config: dict[str, Any], pack: Pack, part: str, broken: Tensor | None, message: str
) -> None:
    path, _ = save_quantised(plain, tmp_path, config, pack)
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    assert name in tensors
    del tensors[name]
    save_file(tensors | ({} if broken is None else {name: broken}), path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        decoder_of(path)


def test_the_metadata_of_a_real_checkpoint_is_understood(plain: str, tmp_path: Path) -> None:
    """compressed-tensors writes these fields, with nulls where a scheme does not use one."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
    config = INT8 | {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**weights, "block_structure": None, "actorder": None, "dynamic": False},
                "input_activations": BY_TOKEN,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    path, _ = save_quantised(plain, tmp_path, config, w8a8)
    assert json.loads((path / "config.json").read_text("utf-8"))["quantization_config"] == config
    decoder_of(path)


@pytest.mark.parametrize("sparsity", [None, {}, {"format": "dense"}])
def test_a_checkpoint_that_is_not_sparse_may_say_so(plain: str, tmp_path: Path, sparsity: object) -> None:
    path, _ = save_quantised(plain, tmp_path, INT8 | {"sparsity_config": sparsity}, w8a8)
    decoder_of(path)


def test_a_refusal_is_not_wrapped_in_another(plain: str, tmp_path: Path) -> None:
    path, _ = save_quantised(plain, tmp_path, INT8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, None)
    with pytest.raises(ConfigError, match=r"^\S+: compressed-tensors int-quantized int8 with sparse weights is not "):
        open_checkpoint(str(path))


def test_scales_of_the_cache_are_not_used_and_the_log_names_them(
    plain: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config, pack = FORMATS["fp8 per channel"]
    path, reference = save_quantised(plain, tmp_path, config | {"kv_cache_scheme": scheme}, pack)
    assert decoder_of(path)
    assert "of the cache" not in caplog.text
    tensors = load_file(path / "model.safetensors")
    for layer, part in itertools.product(range(2), "kv"):
        tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(0.5)
    save_file(tensors, path / "model.safetensors")
    assert (logits_of(decoder_of(path)) - logits_of(decoder_of(reference))).abs().max() < 1e-3
    name = "model.layers.0.self_attn.k_scale"
    assert f"{path}: 4 scales of the cache, {name!r} among them, are not used" in caplog.text


def test_static_scales_of_activations_are_not_used(plain: str, tmp_path: Path) -> None:
    """Activations are quantised by their rows. An asymmetric scheme stores a zero point beside each scale."""
    path, _ = save_quantised(plain, tmp_path, INT8, w8a8)
    expected = logits_of(decoder_of(path))
    tensors = load_file(path / "model.safetensors")
    for module in [name.removesuffix("weight") for name in tensors if name.endswith("_proj.weight")]:
        tensors[f"{module}input_scale"] = torch.tensor([0.1])
        tensors[f"{module}input_zero_point"] = torch.tensor([3], dtype=torch.int8)
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(logits_of(decoder_of(path)), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_without_any_metadata_are_not_taken_for_numbers(plain: str, tmp_path: Path, dtype: torch.dtype) -> None:
    path = copy_of(plain, tmp_path / "codes")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} is stored as \w+, and no quantization_config of config.json says"):
        decoder_of(path)


def mxfp4_experts(tensors: Stored, generator: torch.Generator) -> dict[str, Tensor]:
    """Replace the experts of all layers with random MXFP4 blocks. Returns the numbers, by transformers' converter."""
    numbers = {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, inner // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 127, (experts, out, inner // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    return numbers


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(a gpt_oss checkpoint whose experts are MXFP4, the same with their numbers)."""
    directory = tmp_path_factory.mktemp("mxfp4")
    case = replace(CASES["gpt_oss"], config={**CASES["gpt_oss"].config, "intermediate_size": 64})
    reference = random_checkpoint(case, directory / "reference")
    quantised, file = copy_of(reference, directory / "quantised"), "model.safetensors"
    tensors = load_file(quantised / file)
    numbers = mxfp4_experts(tensors, torch.Generator().manual_seed(5))
    save_file({**load_file(f"{reference}/{file}"), **numbers}, f"{reference}/{file}", metadata={"format": "pt"})
    save_file(tensors, quantised / file)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_json(
        quantised / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    )
    return quantised, reference


def test_mxfp4_is_the_numbers_that_transformers_converts_it_to(gpt_oss: tuple[Path, str]) -> None:
    quantised, reference = gpt_oss
    text = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    with families.reference(reference) as logits:
        exact = logits([text])[0]
    assert (logits_of(decoder_of(quantised, dtype=torch.float64)) - exact).abs().max() < 1e-9


@needs_int8
def test_mxfp4_experts_can_be_served_in_int8(gpt_oss: tuple[Path, str]) -> None:
    quantised, reference = gpt_oss
    decoder = decoder_of(quantised, Weights("int8"))
    assert all(is_int8(product) for product in decoder.layers[0].mlp.products[1:])
    exact, rounded = logits_of(decoder_of(Path(reference))), logits_of(decoder)
    assert 1e-4 < (rounded - exact).square().mean().sqrt() / exact.std() < 0.3  # some tokens choose another expert


@pytest.mark.parametrize(
    ("part", "broken", "message"),
    [
        ("scales", torch.ones(4, 128, 1), "scales as torch.float32 instead of uint8"),
        ("scales", torch.ones(4, 128, 2, dtype=torch.uint8), r"scales of \(4, 128, 2\)"),
        ("scales", None, "is no MXFP4 weight: the checkpoint holds no .*_scales"),
        ("blocks", torch.ones(4, 64, 1, 16, dtype=torch.uint8), r"is no MXFP4 weight: blocks of shape"),
    ],
)
def test_experts_that_are_no_mxfp4(
    gpt_oss: tuple[Path, str], tmp_path: Path, part: str, broken: Tensor | None, message: str
) -> None:
    path = copy_of(str(gpt_oss[0]), tmp_path / "broken")
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.gate_up_proj_{part}"
    del tensors[name]
    save_file(tensors | ({} if broken is None else {name: broken}), path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        decoder_of(path)
