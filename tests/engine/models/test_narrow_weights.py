"""Weights of 16 bits in a float32 model: compiled code reads them as they are stored, and the results are the same bits
as of widened ones."""

import json
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.heads.eagle_files import load_eagle, open_eagle
from engine.models import product_choice
from engine.models.compiled_layers import CompiledLayers, products_of
from engine.models.compiled_products import Panels, compiled_product, panels_of
from engine.models.decoder import Decoder
from engine.models.linear import BUCKETS, Laid, Linear, ProductForm, narrow_of, product_of
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.product_choice import MIN_SWEEPS, choose_forms
from engine.models.shards import Part, Shards, StoredWeight, TensorSource
from engine.models.weight_files import WEIGHTS
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.models.reader import LENGTH, in_form
from tests.engine.models.test_compiled_layers import PASSES, logits_of
from tests.engine.models.test_product_choice import ALWAYS_PACKED, Machine, Script
from tests.engine.models.test_quantized_checkpoints import compressed, pack_quantized
from tests.engine.pairs import Shape, copy_of, edit_json, save_checkpoint

CPU = torch.device("cpu")
DEMO = Path(__file__).resolve().parents[3] / "models/demo"
EMBEDDING = "model.embed_tokens.weight"
NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, str]:
    """A checkpoint with a tied head, by the dtype of its files. All have the same numbers."""
    folder = tmp_path_factory.mktemp("narrow")
    given = random_checkpoint(CASES["qwen2"], folder / "given", hidden=64)
    kept = dict[torch.dtype, str]()
    for dtype in (torch.float32, *NARROW):
        path = copy_of(given, folder / str(dtype))
        tensors = {name: tensor.bfloat16().half() for name, tensor in load_file(path / WEIGHTS).items()}
        assert all(torch.equal(tensor.bfloat16().half(), tensor) for tensor in tensors.values())
        save_file({name: t.to(dtype) for name, t in tensors.items()}, path / WEIGHTS, metadata={"format": "pt"})
        kept[dtype] = str(path)
    return kept


def source_of(directory: Path, dtype: torch.dtype, **tensors: Tensor) -> TensorSource:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    return TensorSource(Shards(directory), dtype, CPU, lambda name: None)


def weight_of(source: TensorSource, *names: str) -> StoredWeight:
    weight = source.weight([Part(name, (64, 16)) for name in names])
    assert isinstance(weight, StoredWeight)
    return weight


def load(directory: str, form: ProductForm, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder with all products in one form, and all passes in compiled layers where they are compiled."""
    with in_form(form):
        return load_decoder(open_checkpoint(directory), dtype=dtype, device=CPU, max_len=LENGTH)


def linears(decoder: Decoder) -> list[Linear]:
    found = [decoder.head, *(product for layer in decoder.layers for product in products_of(layer))]
    return [product for product in found if isinstance(product, Linear)]


@pytest.mark.parametrize("inner", [1, 2, 33, 300])
@pytest.mark.parametrize("dtype", NARROW)
def test_a_product_has_the_bits_of_the_widened_weight(dtype: torch.dtype, inner: int) -> None:
    """Numbers that are not rounded: bfloat16 has few of their digits."""
    generator = torch.Generator().manual_seed(inner)
    weight, bias = torch.randn(80, inner, generator=generator).to(dtype), torch.randn(80, generator=generator)
    panels = panels_of(weight, exact=True)
    assert (panels.dtype, panels.numbers.dtype, panels.num_bytes) == (torch.float32, dtype, 2 * 128 * inner)
    narrow, wide = compiled_product(panels, bias), compiled_product(panels_of(weight.float()), bias)
    for rows in (1, 2, 13):
        x = torch.randn(rows, inner, generator=generator)
        assert narrow(x).dtype is torch.float32
        assert torch.equal(narrow(x), wide(x))
        assert not torch.equal(narrow(x), narrow(x.to(dtype).float()))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_model_has_the_bits_of_its_widened_weights_in_half_of_the_memory(
    dtype: torch.dtype, stored: dict[torch.dtype, str]
) -> None:
    narrow, wide = load(stored[dtype], "compiled"), load(stored[torch.float32], "compiled")
    layers = [cast(CompiledLayers, decoder.few_rows) for decoder in (narrow, wide)]
    assert layers[0].layer_bytes == layers[1].layer_bytes  # as much arithmetic for the threads to share
    for decoder, kept, few_rows in zip((narrow, wide), (dtype, torch.float32), layers, strict=True):
        assert {product.weight.dtype for product in linears(decoder)} == {kept}
        assert few_rows.block_rows == sys.maxsize
    ours, theirs = logits_of(narrow, PASSES), logits_of(wide, PASSES)
    assert all(torch.equal(ours[slot], theirs[slot]) for slot in theirs)
    numbers = sum(product.weight.numel() for product in linears(wide))
    assert wide.weight_bytes - narrow.weight_bytes == 2 * numbers


def test_negative_control_another_stored_number_changes_the_logits(
    stored: dict[torch.dtype, str], tmp_path: Path
) -> None:
    path = copy_of(stored[torch.bfloat16], tmp_path / "other")
    tensors = load_file(path / WEIGHTS)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    ours, theirs = (logits_of(load(str(p), "compiled"), PASSES) for p in (path, stored[torch.bfloat16]))
    assert not torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize(
    ("files", "model", "narrow"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float16, torch.bfloat16, None),
        (torch.bfloat16, torch.float64, None),
    ],
)
def test_which_weights_are_narrow(
    files: torch.dtype, model: torch.dtype, narrow: torch.dtype | None, tmp_path: Path
) -> None:
    source = source_of(tmp_path / "a", model, a=torch.randn(64, 16).to(files), b=torch.randn(64, 16).to(files))
    weight = weight_of(source, "a", "b")
    assert (weight.narrow, narrow_of(weight)) == (narrow, narrow)
    if narrow is not None:
        assert weight.narrowed().dtype is narrow
        assert torch.equal(weight.narrowed().float(), weight.read())


def test_parts_of_several_types_are_widened(tmp_path: Path) -> None:
    tensors = {name: torch.randn(64, 16).to(dtype) for name, dtype in zip("abc", (*NARROW, torch.float32), strict=True)}
    source = source_of(tmp_path / "mixed", torch.float32, **tensors)
    assert {weight_of(source, *names).narrow for names in ("ab", "bc", "ac", "abc")} == {None}
    product = Linear(weight_of(source, "a", "b"), None, ["compiled"])
    assert isinstance(product.forms["compiled"], Panels)
    assert product.forms["compiled"].numbers.dtype is torch.float32


def test_a_tied_head_shares_the_embedding_or_has_its_own_numbers(stored: dict[torch.dtype, str]) -> None:
    assert open_checkpoint(stored[torch.bfloat16]).shape.tied
    plain, compiled = (load(stored[torch.bfloat16], form) for form in ("plain", "compiled"))
    assert plain.head.weight is plain.embedding
    assert compiled.embedding.dtype is torch.float32
    assert compiled.head.weight.dtype is torch.bfloat16
    x = torch.randn(3, plain.config.hidden_size)
    assert torch.allclose(plain.head(x), compiled.head(x), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_embedding_is_no_narrow_weight(tied: bool, tmp_path: Path) -> None:
    """Its tensors have other names. What is not quantised beside it stays narrow."""
    path = copy_of(save_checkpoint(tmp_path / "plain", Shape(kind="qwen2", tied=tied), seed=9), tmp_path / "quantised")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / WEIGHTS).items()}
    packed, _ = pack_quantized(tensors.pop(EMBEDDING).float(), 8, size=64)
    tensors |= {EMBEDDING.replace("weight", part): tensor for part, tensor in packed.items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    edit_json(path / "config.json", quantization_config=compressed("pack-quantized", num_bits=8, group_size=64))
    decoder = load(str(path), "compiled")
    layers = [product for layer in decoder.layers for product in products_of(layer)]
    assert {product.weight.dtype for product in layers} == {torch.bfloat16}
    assert decoder.head.weight.dtype is (torch.float32 if tied else torch.bfloat16)


def test_narrow_weights_are_timed_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept under a name of their own: another model of the same shapes may have wide ones."""
    timed = set[tuple[torch.dtype, torch.dtype | None]]()

    def followed(form: ProductForm, weight: Laid, bias: Tensor | None) -> object:
        if isinstance(weight, Panels):
            timed.add((weight.numbers.dtype, weight.dtype))
        return product_of(form, weight, bias)

    monkeypatch.setattr(product_choice, "product_of", followed)
    script: Script = {**ALWAYS_PACKED, "compiled": [1.0] * len(BUCKETS)}
    for files in (*NARROW, torch.float32, *NARROW, torch.float32):
        source, machine = (
            source_of(tmp_path / "a", torch.float32, a=torch.ones(64, 16).to(files)),
            Machine({64: script}),
        )
        product = Linear(weight_of(source, "a"), None, ())
        before = len(timed)
        choose_forms([product], cache=tmp_path / "times", timed=machine)
        assert isinstance(product.forms["compiled"], Panels)
        assert product.forms["compiled"].numbers.dtype is files
        assert (len(machine.calls) >= MIN_SWEEPS) == (len(timed) > before)
    assert timed == {(files, torch.float32) for files in (*NARROW, torch.float32)}


def test_a_second_form_of_narrow_weights_takes_half_of_the_memory(tmp_path: Path) -> None:
    script: Script = {**ALWAYS_PACKED, "compiled": [1, 1, 2, 4, 20, 40, 60, 60, 80]}
    for files, taken in ((torch.bfloat16, 0.5), (torch.float32, 1.0)):
        source = source_of(tmp_path / "a", torch.float32, a=torch.ones(64, 16).to(files))
        size = 4 * 64 * 16
        for room, forms in ((int(taken * size), 2), (int(taken * size) - 1, 1)):
            product = Linear(weight_of(source, "a"), None, ())
            copied = choose_forms([product], copies_bytes=room, timed=Machine({64: script}))
            assert len(product.forms) == forms
            assert copied == (room if forms == 2 else 0)
            assert product.num_bytes == (size + copied if forms == 2 else taken * size)


def test_the_embedded_head_keeps_its_numbers() -> None:
    target = load(str(DEMO / "target"), "compiled")
    with in_form("compiled"):
        head = load_eagle(
            open_eagle(DEMO / "eagle", "eagle3", target.config), target, dtype=torch.float32, device=CPU, max_len=LENGTH
        )
    products = [head.fuse, *products_of(head.body.layers[0])]
    assert {product.weight.dtype for product in products} == {torch.bfloat16}
    numbers = sum(product.weight.numel() for product in products)
    assert json.loads((DEMO / "eagle/config.json").read_text("utf-8"))["dtype"] == "bfloat16"
    assert head.weight_bytes == 2 * numbers


def test_a_second_form_must_pay_for_its_share_of_memory(tmp_path: Path) -> None:
    """Beside narrow weights it takes twice their memory. Here it saves 4 %."""
    script: Script = {**ALWAYS_PACKED, "packed": [9.0] * 9, "compiled": [*[1.0] * 8, 9 * 1.255]}
    for files, forms in ((torch.bfloat16, {"compiled"}), (torch.float32, {"compiled", "packed"})):
        source = source_of(tmp_path / "a", torch.float32, a=torch.ones(64, 16).to(files))
        product = Linear(weight_of(source, "a"), None, ())
        choose_forms([product], timed=Machine({64: script}))
        assert set(product.forms) == forms
