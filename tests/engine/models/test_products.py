"""What is quantised and what is not, and that a quantised model's text does not depend on the speculation."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import ConfigError, EngineConfig, ProductForms, WeightForm
from engine.kernels.cpu_panels import PANEL
from engine.loading.load import _dtype
from engine.models import coded_linear, product_choice, products, shards
from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.models.int4_linear import Int4Linear
from engine.models.int8_products import Int8Weight, int8_forms
from engine.models.linear import Linear, Product, ProductForm
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.products import AS_IS, ProductMaker, Weights
from engine.models.quantize import CodedWeight, quantise_weight
from engine.models.quantized_checkpoints import Quantisation
from engine.models.runner import Runner
from engine.models.shards import StoredWeight
from engine.models.weight_files import WEIGHTS
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load, make_sequence
from tests.engine.models.test_int4_linear import needs_int4
from tests.engine.models.test_linear import needs_int8, needs_onednn
from tests.engine.pairs import VOCAB, Pair, Shape, copy_of, save_checkpoint
from tests.kv import kv_layout

CPU = torch.device("cpu")
LENGTH = 64
FORMS = [pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=needs_int4)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = Shape(kind="qwen2", tied=request.param)  # it has biases
    return save_checkpoint(tmp_path_factory.mktemp("products") / "target", shape, seed=4)


def logits_of(checkpoint: str, weights: Weights) -> Tensor:
    decoder = load_decoder(
        open_checkpoint(checkpoint), dtype=torch.float32, device=CPU, max_len=LENGTH, weights=weights
    )
    text = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        return Runner(decoder, kv_layout(1, LENGTH), CPU).run([Feed(make_sequence(0, text), LENGTH, outputs=LENGTH)])


def form_of(product: Product) -> WeightForm:
    if isinstance(product, Int4Linear):
        return "int4"
    assert isinstance(product, Linear)
    return "int8" if any(isinstance(kept, Int8Weight) for kept in product.forms.values()) else "as_is"


@pytest.mark.parametrize("form", ["as_is", *FORMS])
def test_freed_memory_goes_back_once_all_products_are_made(
    checkpoint: str, form: WeightForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no form is chosen by measurement."""
    times = list[None]()
    monkeypatch.setattr(products, "give_back_freed_memory", lambda: times.append(None))
    logits_of(checkpoint, Weights(form))
    assert len(times) == 1


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_products_become_integers_and_the_embedding_does_not(checkpoint: str, form: WeightForm, head: bool) -> None:
    source = open_checkpoint(checkpoint)
    plain = load_decoder(source, dtype=torch.float32, device=CPU, max_len=LENGTH)
    decoder = load_decoder(source, dtype=torch.float32, device=CPU, max_len=LENGTH, weights=Weights(form, head))
    for layer in decoder.layers:
        assert {form_of(product) for product in (layer.qkv, layer.out, *layer.mlp.products)} == {form}
    assert form_of(decoder.head) == (form if head else "as_is")
    assert torch.equal(decoder.embedding, plain.embedding)


@needs_int8
def test_the_bytes_of_the_weights_are_those_that_are_kept(checkpoint: str) -> None:
    source = open_checkpoint(checkpoint)
    weights = Weights("int8", head=True, copies_bytes=0)
    decoder = load_decoder(source, dtype=torch.float32, device=CPU, max_len=LENGTH, weights=weights)
    c = source.shape
    qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    outputs = (qkv, c.hidden_size, 2 * c.intermediate_size, c.hidden_size)
    inputs = (c.hidden_size, c.num_heads * c.head_dim, c.hidden_size, c.intermediate_size)
    layer = sum(n * k + 4 * n for n, k in zip(outputs, inputs, strict=True)) + 4 * qkv  # integers, steps, qkv's bias
    assert isinstance(decoder.head, Linear)
    rows = -(-c.vocab_size // PANEL) * PANEL if "compiled_int8" in decoder.head.forms else c.vocab_size
    head = rows * c.hidden_size + 4 * c.vocab_size
    assert decoder.weight_bytes == c.num_layers * layer + head + 4 * c.vocab_size * c.hidden_size


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rounded_logits_are_near_those_of_the_weights_as_they_are(
    checkpoint: str, form: WeightForm, head: bool
) -> None:
    exact, rounded = logits_of(checkpoint, AS_IS), logits_of(checkpoint, Weights(form, head))
    error = (rounded - exact).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < {"int8": 0.05, "int4": 0.4}[form]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("form", FORMS)
def test_the_text_of_a_rounded_pair_is_the_same_for_any_k(pair: Pair, form: WeightForm, temperature: float) -> None:
    """The rest is fp64 here. In fp32 attention depends, in its last bits, on the other rows of the call, and now and
    then such a bit decides to which integer a number is rounded. Layers for such a mixture would be compiled."""
    forms = {"target_weights": form, "draft_weights": form, "products": "plain"}
    engine = load(pair, **forms, max_running=4, max_spec_length=4, max_step_tokens=40)
    texts, drafted = [], []
    for k in (0, 4):
        requests = [
            Request(
                f"r{i}", (2 + i, 7, 9, 3 * i + 5), SamplingParams(temperature=temperature, seed=i, max_tokens=20), k=k
            )
            for i in range(8)
        ]
        run = drive(engine, requests)
        texts.append(run.tokens)
        drafted.append((run.drafted, run.accepted))
    assert texts[0] == texts[1]
    assert drafted[0] == (0, 0) != drafted[1]
    assert 0 < drafted[1][1] < drafted[1][0]


def linears(decoder: Decoder) -> list[Linear]:
    products = [p for layer in decoder.layers for p in (layer.qkv, layer.out, *layer.mlp.products)]
    return [p for p in (decoder.head, *products) if isinstance(p, Linear)]


@needs_onednn
@pytest.mark.parametrize(("asked", "measured"), [("auto", True), ("packed", False), ("plain", False)])
def test_only_auto_measures_and_the_others_have_one_form(
    checkpoint: str, asked: ProductForms, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Linear] = []

    def choose(undecided: list[Linear], **_: object) -> None:
        given.extend(undecided)
        for product in undecided:
            assert isinstance(product.given, StoredWeight | Tensor)
            product.use(["transposed"])

    monkeypatch.setattr(products, "choose_forms", choose)
    decoder = load_decoder(
        open_checkpoint(checkpoint), dtype=torch.float32, device=CPU, max_len=LENGTH, weights=Weights(products=asked)
    )
    assert linears(decoder)
    assert {id(p) for p in given} == ({id(p) for p in linears(decoder)} if measured else set())
    form = "transposed" if measured else "packed" if asked == "packed" else "plain"
    assert {p.choice for p in linears(decoder)} == {(form,)}


@needs_int8
def test_weights_become_integers_when_their_forms_are_chosen(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the integers of the whole model would lie in memory beside its products."""
    rounded: list[torch.Size] = []

    def counted(weight: Tensor) -> CodedWeight:
        rounded.append(weight.shape)
        return quantise_weight(weight)

    def choose(undecided: list[Linear], **_: object) -> None:
        made.append((len(undecided), list(rounded)))
        for product in undecided:
            product.use([int8_forms()[0]])

    made: list[tuple[int, list[torch.Size]]] = []
    for module in (products, shards):
        monkeypatch.setattr(module, "quantise_weight", counted)
    monkeypatch.setitem(products.QUANTISE, "int8", counted)
    monkeypatch.setattr(products, "choose_forms", choose)
    monkeypatch.setattr(products, "usable_forms", lambda weight: 2 * int8_forms())  # a choice, on any CPU
    source = open_checkpoint(checkpoint)
    decoder = load_decoder(source, dtype=torch.float32, device=CPU, max_len=LENGTH, weights=Weights("int8"))
    every = len(linears(decoder))
    tied = [decoder.embedding.shape] if source.shape.tied else []
    assert made == [(every, tied)]
    assert len(rounded) == every


@needs_onednn
@pytest.mark.parametrize("form", ["packed", "transposed"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_weights_that_are_laid_out_as_they_are_read_are_the_stored_ones(
    source: str, form: ProductForm, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit. They pass through memory that is used again for the next weight."""
    path = copy_of(checkpoint, tmp_path / "stored")
    if source == "bfloat16":
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / WEIGHTS).items()}
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    monkeypatch.setattr(product_choice, "best_choice", lambda times, *given, **_: (form,))
    monkeypatch.setattr(product_choice, "best_layers", lambda times, *given: dict.fromkeys(times, (form,)))
    monkeypatch.setattr(shards, "KEPT_SHARE", 1)
    decoders = {
        asked: load_decoder(
            open_checkpoint(str(path)), dtype=torch.float32, device=CPU, max_len=LENGTH, weights=Weights(products=asked)
        )
        for asked in ("auto", "plain")
    }
    for chosen, plain in zip(linears(decoders["auto"]), linears(decoders["plain"]), strict=True):
        assert set(chosen.forms) == {form}
        found = chosen.weight.to_dense() if form == "packed" else chosen.weight.t()
        assert torch.equal(found, plain.weight)


def test_packed_products_need_onednn_and_its_types() -> None:
    with pytest.raises(ConfigError, match=r"products packed needs a torch with oneDNN, .*, not torch.float16 on cpu"):
        ProductMaker(Weights(products="packed"), torch.float16, CPU)
    with pytest.raises(ConfigError, match="products packed needs device cpu and dtype float32 or bfloat16"):
        EngineConfig("target", products="packed", dtype="float64")
    with pytest.raises(ConfigError, match="products 'fast' is not one of auto, packed, plain"):
        EngineConfig("target", products="fast")  # type: ignore[arg-type]


@needs_onednn
def test_a_tied_head_that_stays_plain_is_counted_once(checkpoint: str) -> None:
    source = open_checkpoint(checkpoint)
    decoder = load_decoder(source, dtype=torch.float32, device=CPU, max_len=LENGTH, weights=Weights(products="plain"))
    table = 4 * source.shape.vocab_size * source.shape.hidden_size
    layers = sum(p.num_bytes for p in linears(decoder)[1:])
    assert decoder.weight_bytes == layers + table * (1 if source.shape.tied else 2)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_rounded_weights_need_a_gpu_with_kernels_for_them(form: WeightForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=f"^{form} weights .* cuda:0 has compute capability 7.5, and they need 8.0"):
        ProductMaker(Weights(form), torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(coded_linear, "triton_reason", lambda: "triton is not installed")
    with pytest.raises(ConfigError, match=f"^{form} weights .* triton is not installed: choose as_is"):
        ProductMaker(Weights(form), torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="fp8 weights need device cuda, not cpu: choose int8"):
        ProductMaker(Weights("fp8"), torch.bfloat16, CPU)


@pytest.mark.parametrize(("asked", "kept"), [("int8", True), ("as_is", True), ("int4", False)])
def test_stored_codes_are_those_of_their_checkpoint(
    asked: WeightForm, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of 8 bits may all be small enough for 4. Rounding them again would change their steps."""

    def coded(weight: CodedWeight, bias: Tensor | None, device: torch.device) -> SimpleNamespace:
        made.append(weight)
        return SimpleNamespace(weight=weight.codes, steps=weight.steps, offsets=weight.offsets)

    made: list[CodedWeight] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(coded_linear, "triton_reason", lambda: None)
    monkeypatch.setattr(products, "CodedLinear", coded)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_: tensor)
    small = CodedWeight(torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 1))
    stored = Quantisation(Path(), "int8", lambda *_: small, "int8")
    ProductMaker(Weights(asked), torch.float32, torch.device("cuda", 0), stored)(small)
    assert (made[0] is small) == kept


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_takes_bfloat16_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: torch.dtype
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    assert _dtype("auto", torch.device("cuda", 0)) is expected
    assert _dtype("auto", CPU) is torch.float32
    assert _dtype("float16", torch.device("cuda", 0)) is torch.float16
