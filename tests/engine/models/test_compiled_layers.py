"""Layers that are compiled for a CPU give what the layers of torch give, in every family that they know."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, cycle
from pathlib import Path
from time import sleep
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import engine.models.compiled as compiled_code
from engine.kernels import cpu_layers, cpu_products
from engine.memory.budget import measure_activations
from engine.models import between_products, compiled_layers
from engine.models.between_products import compile_layers, tell_gains
from engine.models.compiled_layers import CompiledLayers, products_of
from engine.models.compiled_products import panels_of
from engine.models.decoder import Decoder, WatchedStates
from engine.models.feeds import Feed
from engine.models.few_rows_choice import layers_for_few_rows
from engine.models.linear import BUCKETS
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.norm import RMSNorm
from engine.models.pass_attention import PassAttention
from engine.models.products import Weights
from engine.models.runner import Runner
from tests.engine.driving import make_sequence
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.models.families import CASES, WINDOW, random_checkpoint, reference
from tests.engine.models.forest import BLOCKS, Forest
from tests.engine.models.reader import LENGTH, SLOTS, Reader, all_compiled, in_form, in_panels, load_alone
from tests.engine.models.test_trees import VARIED, Decoders, make_texts, run_rounds
from tests.engine.pairs import VOCAB
from tests.examples import in_proofs
from tests.kv import kv_layout

CPU = torch.device("cpu")
UNKNOWN = ("mixtral", "qwen3_moe", "gpt_oss", "olmo2")  # experts, and norms over all heads
KNOWN = sorted(name for name in CASES if not name.startswith(UNKNOWN))
TEXTS: list[list[int]] = torch.randint(0, VOCAB, (SLOTS, LENGTH), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The checkpoint of a case, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("compiled"), dict[str, str]()

    def of(name: str) -> str:
        if name not in made:
            made[name] = random_checkpoint(CASES[name], folder / name, hidden=64)
        return made[name]

    return of


def few_rows_of(decoder: Decoder) -> CompiledLayers:
    assert isinstance(decoder.few_rows, CompiledLayers)
    return decoder.few_rows


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass that compiled layers compute."""
    rows, real = list[int](), CompiledLayers.add_layers

    def add_layers(self: CompiledLayers, x: Tensor, *given: Any) -> None:
        rows.append(x.shape[0])
        real(self, x, *given)

    monkeypatch.setattr(CompiledLayers, "add_layers", add_layers)
    return rows


@pytest.mark.parametrize("name", sorted(CASES))
def test_which_families_are_known(name: str, checkpoint: Callable[[str], str]) -> None:
    assert (load_alone(checkpoint(name)).few_rows is not None) == (name in KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_logits_are_those_of_transformers(name: str, checkpoint: Callable[[str], str], counted: list[int]) -> None:
    """In fp64, for single tokens, verification that crosses windows and blocks, and ragged batches."""
    with reference(checkpoint(name)) as logits:
        expected = logits(TEXTS)
    reader = Reader(all_compiled(load_alone(checkpoint(name))), TEXTS, expected)
    for _ in range(WINDOW + 3):
        reader.feed({0: 1})
    reader.feed({1: 3})
    while reader.runner.cache.length(1) + 6 <= LENGTH:
        reader.feed({1: 1}, {1: 5})
        reader.runner.cache.truncate_to(1, reader.runner.cache.length(1) - 3)
    reader.feed({2: 20, 3: WINDOW, 4: 40})
    passes = len(counted)
    reader.feed({2: 1, 3: 1, 4: 1, 5: 7, 6: 2}, {2: 5, 4: 3})
    reader.feed({2: 1, 3: 1, 4: 1, 5: 1, 6: 1})
    assert len(counted) == passes + 2
    assert set(counted) == {1, 3, 5, 6, 20, 69}


TREES = (("llama", "slotted"), ("mistral", "gathered"), ("gemma2", "mapped"))  # tried in `make test`


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.proofs] * ((name, kind) not in TREES))
        for name in VARIED
        if name not in UNKNOWN
        for kind in BLOCKS
    ],
)
def test_trees(name: str, kind: str, tmp_path_factory: pytest.TempPathFactory, counted: list[int]) -> None:
    decoder = cast(Decoder, Decoders(tmp_path_factory.mktemp("trees"), hidden=64)[f"{name}, short"])
    run_rounds(Forest(all_compiled(decoder), kind, make_texts()))
    assert counted


# --- parts that could be left out ------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "qk norm": ("qwen3", lambda known: known._replace(qk_norm=(known.qk_norm[0][:0], 0.0))),
    "bias": ("qwen2", lambda known: known._replace(qkv=(known.qkv[0], 0 * known.qkv[1]))),
    "norm behind attention": ("gemma2", lambda known: known._replace(after=(known.after[0][:0], 0.0))),
    "norm behind the MLP": ("gemma2", lambda known: known._replace(joining=(known.joining[0][:0], 0.0))),
    "gelu": ("gemma3", lambda known: known._replace(gate_up=(known.gate_up[0], False))),
    "multiplier": ("granite", lambda known: known._replace(factor=1.0)),
    "floor": ("llama", lambda known: known._replace(inner=(known.inner[0], 1.0))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_control_no_part_can_be_left_out(fault: str, checkpoint: Callable[[str], str]) -> None:
    name, broken = FAULTS[fault]
    decoder = all_compiled(load_alone(checkpoint(name)))
    with reference(checkpoint(name)) as logits:
        reader = Reader(decoder, TEXTS, logits(TEXTS))
    reader.feed({0: 4})
    few_rows_of(decoder)._known[:] = map(broken, few_rows_of(decoder)._known)
    few_rows_of(decoder).__dict__.pop("_runs")
    with pytest.raises(AssertionError, match="logits differ"):
        reader.feed({0: 1})


# --- number types, company, threads ----------------------------------------------------------------------------------


def make(checkpoint: str, dtype: torch.dtype, weights: Weights) -> Decoder:
    """All products compiled, the head's too."""
    with in_form("compiled_int8" if weights.form == "int8" else "compiled"):
        source = open_checkpoint(checkpoint)
        return all_compiled(load_decoder(source, dtype=dtype, device=CPU, max_len=LENGTH, weights=weights))


KINDS = {
    "float32": (torch.float32, Weights()),
    "bfloat16": (torch.bfloat16, Weights()),
    "float16": (torch.float16, Weights()),
    "int8": (torch.float32, Weights("int8")),
    "int8 beside bfloat16": (torch.bfloat16, Weights("int8")),
    "int8 beside float64": (torch.float64, Weights("int8")),
}
TYPES = [
    "float32",
    "bfloat16",
    "int8",
    *in_proofs("float16", "int8 beside bfloat16", "int8 beside float64"),
]  # each is compiled by itself
NEAR = {
    "float32": 1 - 1e-9,
    "bfloat16": 0.999,
    "float16": 0.99999,
    "int8": 1 - 1e-9,
    "int8 beside bfloat16": 0.999,
    "int8 beside float64": 1 - 1e-12,
}  # cosine of all logits


def logits_of(decoder: Decoder, passes: Sequence[dict[int, int]]) -> dict[int, Tensor]:
    """Logits of each sequence's rows, fed in these passes."""
    runner, rows = Runner(decoder, kv_layout(SLOTS, LENGTH), CPU), dict[int, list[Tensor]]()
    if (blocks := runner.attention_plans.reader) is not None:
        blocks.most_lanes = sys.maxsize
    sequences = [make_sequence(slot, text) for slot, text in enumerate(TEXTS)]
    with torch.inference_mode():
        for counts in passes:
            logits = runner.run([Feed(sequences[s], count, outputs=count) for s, count in counts.items()])
            for slot, part in zip(counts, logits.split(list(counts.values())), strict=True):
                rows.setdefault(slot, []).append(part)
    return {slot: torch.cat(parts) for slot, parts in rows.items()}


PASSES = ({0: 9}, {1: 4, 2: 1}, {0: 1, 1: 1, 2: 6}, {0: 5, 1: 1, 2: 1})
PROMPTS = ({0: 60, 1: 47, 2: 51, 3: 40, 4: 9}, {0: 1, 1: 1})  # so many rows that three threads have their own


def one_by_one(passes: Sequence[dict[int, int]]) -> Sequence[dict[int, int]]:
    return [{slot: 1} for counts in passes for slot, count in counts.items() for _ in range(count)]


@pytest.mark.parametrize("kind", TYPES)
def test_every_number_type_is_near_what_torch_gives(
    kind: str, checkpoint: Callable[[str], str], counted: list[int]
) -> None:
    decoder = make(checkpoint("qwen3 with biases and windows"), *KINDS[kind])
    counted.clear()
    ours, theirs = logits_of(decoder, PASSES), logits_of(replace(decoder, few_rows=None), PASSES)
    assert counted == [sum(counts.values()) for counts in PASSES]
    for slot, logits in ours.items():
        assert logits.dtype is decoder.dtype
        assert torch.cosine_similarity(logits.double().flatten(), theirs[slot].double().flatten(), 0) > NEAR[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_in_any_company(
    kind: str, checkpoint: Callable[[str], str], counted: list[int]
) -> None:
    """The head's product is compiled too; the final norm is torch's."""
    decoder = make(checkpoint("qwen3 with biases and windows"), *KINDS[kind])
    for passes in (PASSES, PROMPTS):
        counted.clear()
        together, alone = logits_of(decoder, passes), logits_of(decoder, one_by_one(passes))
        assert counted[: len(passes)] == [sum(counts.values()) for counts in passes]
        assert all(torch.equal(together[slot], alone[slot]) for slot in together)


@pytest.mark.parametrize("passes", [PASSES, PROMPTS], ids=["channels", "rows"])
@pytest.mark.parametrize("kind", TYPES)
def test_threads_share_a_layer(
    kind: str, passes: Sequence[dict[int, int]], checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(PASSES[-1].values()) < 3 * cpu_layers.OWN_ROWS <= sum(PROMPTS[0].values())
    decoder = make(checkpoint("gemma2" if kind == "float32" else "qwen3 with biases and windows"), *KINDS[kind])
    alone, real, parts = logits_of(decoder, passes), cpu_layers.add_layers, set[object]()

    def add_layers(*given: Any) -> None:
        parts.add(given[-2:])
        real(*given)

    monkeypatch.setattr(cpu_layers, "add_layers", add_layers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiled_code, "PART_BYTES", 1)
    shared = logits_of(decoder, passes)
    assert parts == {(0, 3), (1, 3), (2, 3)}
    assert all(torch.equal(shared[slot], alone[slot]) for slot in alone)


@pytest.mark.parametrize(("passes", "by_rows"), [(PASSES, False), (PROMPTS, True)], ids=["few", "many"])
def test_two_threads_share_channels_of_few_rows_and_many_rows(
    passes: Sequence[dict[int, int]], by_rows: bool, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two parts runs by itself: what the other would write stays as it was."""
    decoder, real = make(checkpoint("llama"), *KINDS["float32"]), cpu_layers.add_layers
    written = list[Tensor]()

    def add_layers(*given: Any) -> None:
        (qkv, *_), (numbers, *_), part = given[-4], given[-3], given[-2]
        if part == 0:
            qkv.fill(np.nan)
            numbers[0, cpu_layers.ENDED] = 1  # nobody waits for the other
            real(*given)
            written.append(torch.from_numpy(qkv).isfinite())

    monkeypatch.setattr(cpu_layers, "add_layers", add_layers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(compiled_code, "PART_BYTES", 1)
    logits_of(decoder, passes[:1])
    half = len(written[0]) // 2
    if by_rows:
        assert written[0][:half].all()
        assert not written[0][half:].any()
    else:
        assert written[0].any(1).all()
        assert not written[0].all(1).any()


@pytest.mark.parametrize("width", [32, 40, 100, 333])
@pytest.mark.parametrize("parts", [1, 3, 9])
def test_the_halves_of_a_gate_may_begin_within_a_panel(width: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part computes whole panels, so some channels of the other half too. Python runs the gate around the compiled
    product, because a gate by itself would be compiled for this test alone."""
    monkeypatch.setattr(cpu_layers, "product", lambda x, given, *to: cpu_products.multiply_some(x, *given, *to))
    generator = torch.Generator().manual_seed(width)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 24), (2 * width, 24), (2 * width,)))
    no_norm, numbers = (np.empty(0, np.float32), 0.0), np.empty((5, width), np.float32)
    product = panels_of(weight).numbers.numpy(), bias.numpy()
    layer = (*[no_norm] * 7, (product, False), product, 1.0)
    states, room = (x.numpy().copy(), np.zeros((5, 24), np.float32), x.numpy()), (numbers,) * 4
    for part in range(parts):
        cpu_layers.gate.py_func(states, layer, room, part, parts)
    gate, up = torch.addmm(bias, x, weight.t()).split(width, 1)
    assert torch.allclose(torch.from_numpy(numbers), silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("failing", [0, 1])
def test_nobody_waits_for_a_thread_that_fails(
    failing: int, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, real = make(checkpoint("gemma2"), *KINDS["float32"]), cpu_layers.add_layers

    def add_layers(*given: Any) -> None:
        if given[-2] == failing and given[-3][1] > 0:  # in a later run, when the parts have met
            raise MemoryError("there is no room")
        real(*given)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(compiled_code, "PART_BYTES", 1)
    logits_of(decoder, PASSES)
    monkeypatch.setattr(cpu_layers, "add_layers", add_layers)
    with pytest.raises(MemoryError, match="there is no room"):
        logits_of(decoder, PASSES)
    monkeypatch.setattr(cpu_layers, "add_layers", real)
    logits_of(decoder, PASSES)


# --- where they are used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float64),
        ("gemma2", torch.bfloat16),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.proofs),
        pytest.param("gemma2", torch.float64, marks=pytest.mark.proofs),
    ],
)
def test_watched_states_are_those_that_enter_a_layer(
    name: str, dtype: torch.dtype, checkpoint: Callable[[str], str]
) -> None:
    """All layers of llama would be one call."""
    decoder, tables = load_alone(checkpoint(name), dtype), list[Tensor]()
    for model in (all_compiled(decoder), replace(decoder, few_rows=None)):
        watched = WatchedStates((0, 2, model.config.num_layers))
        with torch.inference_mode():
            ids, attention = _pass(model, texts=1, rows=6)
            model.forward(ids, attention, watched)
        assert watched.table is not None
        assert watched.table.dtype is dtype
        tables.append(watched.table.double())
    close = partial(torch.allclose, tables[0], atol=1e-9 if dtype is torch.float64 else 0.2, rtol=0.05)
    assert close(tables[1])
    assert not close(tables[1].roll(decoder.config.hidden_size, 1))  # the states of other layers


def test_threads_with_rows_of_their_own_read_their_inputs_and_keep_their_states(
    checkpoint: Callable[[str], str], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first product has inputs of its own, as that of an EAGLE head."""
    decoder, found = load_alone(checkpoint("gemma2")), list[Tensor]()
    inputs = torch.randn(150, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(compiled_code, "PART_BYTES", 1)
    assert len(inputs) >= 2 * cpu_layers.OWN_ROWS
    for model in (all_compiled(decoder), replace(decoder, few_rows=None)):
        watched = WatchedStates((0, 2))
        with torch.inference_mode():
            ids, attention = _pass(model, texts=3, rows=50)
            x = model.embedding[ids].clone()
            model.add_layers(x, attention, watched, inputs)
        assert watched.table is not None
        found.append(torch.cat([x, watched.table], 1))
    assert counted == [150]
    ours, theirs = found
    assert torch.allclose(ours, theirs, atol=1e-9)


def test_the_memory_of_a_long_pass_is_measured(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NumPy and compiled code allocate would not be counted."""
    decoder = load_alone(checkpoint("llama"))
    model = all_compiled(decoder)

    def measured(model: Decoder) -> int:
        with torch.inference_mode():
            ids, attention = _pass(model, texts=3, rows=50)
            return measure_activations(partial(model.add_layers, model.embedding[ids], attention), CPU)

    ours, theirs = measured(model), measured(replace(decoder, few_rows=None))
    assert theirs / 2 < ours < 3 * theirs
    layers, states = few_rows_of(model), 150 * decoder.config.hidden_size * 8
    allocated = sum(array.nbytes for array in layers.room(150)) + 2 * states + layers.kernel_bytes(150, 1)
    monkeypatch.setattr(compiled_layers, "counted_memory", lambda _: None)
    assert measured(model) < allocated <= ours


def _pass(model: Decoder, texts: int, rows: int) -> tuple[Tensor, Any]:
    """(ids, attention) of a pass over the first rows of some texts."""
    runner = Runner(model, kv_layout(texts, LENGTH), CPU)
    assert runner.attention_plans.reader is not None
    runner.attention_plans.reader.most_lanes = sys.maxsize
    for slot in range(texts):
        runner.cache.allocate(slot)
        runner.cache.reserve(slot, rows)
    planned = runner.prepare([Feed(make_sequence(slot, TEXTS[slot]), rows) for slot in range(texts)])
    return torch.tensor([TEXTS[slot][:rows] for slot in range(texts)]).flatten(), runner.attention(planned)


def test_a_head_with_inputs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    from tests.engine.heads.test_eagle import test_logits_are_those_of_the_reference

    real = CompiledLayers.product_of
    monkeypatch.setattr(CompiledLayers, "block_rows", sys.maxsize)
    monkeypatch.setattr(CompiledLayers, "product_of", lambda self, product: real(self, in_panels(product)))
    for form in ("eagle", "eagle3"):
        test_logits_are_those_of_the_reference(save_eagle_pair(tmp_path / form, form), (3, 1, 9, 7))
    assert counted


def test_only_passes_of_few_rows_are_compiled(checkpoint: Callable[[str], str], counted: list[int]) -> None:
    decoder = all_compiled(load_alone(checkpoint("llama")))
    few_rows_of(decoder).block_rows = 5
    logits_of(decoder, ({0: 6}, {1: 5}, {0: 1, 1: 1}))
    assert counted == [5, 2]


@pytest.mark.parametrize("max_len", [1, 8])
def test_short_contexts_are_prepared_too(max_len: int, checkpoint: Callable[[str], str]) -> None:
    decoder = load_alone(checkpoint("llama"), torch.float32, max_len)
    few_rows_of(decoder).block_rows = 1
    tell_gains(decoder)
    compile_layers(decoder)


def test_layers_are_compiled_when_they_are_loaded(checkpoint: Callable[[str], str], counted: list[int]) -> None:
    """The first request does not wait for it, nor the measurement of rounds."""
    make(checkpoint("llama"), *KINDS["float32"])
    assert counted == [1]
    counted.clear()
    unused = load_decoder(
        open_checkpoint(checkpoint("llama")),
        dtype=torch.float32,
        device=CPU,
        max_len=LENGTH,
        weights=Weights(products="plain"),
    )
    assert unused.block_rows == 0
    assert not counted


def test_a_pass_that_torch_attends_is_not_compiled(checkpoint: Callable[[str], str], counted: list[int]) -> None:
    decoder = all_compiled(load_alone(checkpoint("llama")))
    runner = Runner(decoder, kv_layout(1, LENGTH), CPU)
    runner.attention_plans.reader = None
    with torch.inference_mode():
        runner.run([Feed(make_sequence(0, TEXTS[0]), 1)])
    assert not counted


@pytest.mark.parametrize(
    ("choices", "rows"), [((9, 9), sys.maxsize), ((3, 9), 3), ((0, 9), 0), ((9, 1), 1), ((8, 8), 40)]
)
def test_as_many_rows_as_all_products_are_compiled_for(
    choices: tuple[int, int], rows: int, checkpoint: Callable[[str], str]
) -> None:
    decoder = load_alone(checkpoint("llama"))
    few_rows = CompiledLayers.of(decoder.layers, decoder.config, decoder.rotations, decoder.dtype)
    assert few_rows is not None
    first, *others = [product for layer in decoder.layers for product in products_of(layer)]
    with pytest.MonkeyPatch.context() as patched:
        for product, count in [(first, choices[0]), *((product, choices[1]) for product in others)]:
            patched.setattr(product, "choice", ("compiled",) * count + ("packed",) * (len(BUCKETS) - count))
        assert few_rows.block_rows == rows
        if rows == sys.maxsize:  # products of one form have it for all rows
            del few_rows.block_rows
            for product in (first, *others):
                patched.setattr(product, "choice", ("compiled_int8",))
            assert few_rows.block_rows == rows


@pytest.mark.parametrize("weights", [Weights(deterministic=True), Weights("int4")])
def test_other_products_are_left_to_torch(weights: Weights, checkpoint: Callable[[str], str]) -> None:
    decoder = load_decoder(
        open_checkpoint(checkpoint("llama")), dtype=torch.float32, device=CPU, max_len=LENGTH, weights=weights
    )
    assert decoder.few_rows is None
    tell_gains(decoder)  # to nobody


def test_without_numba_torch_computes_all_passes(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_alone(checkpoint("llama"))
    monkeypatch.setattr(compiled_layers, "compiled_module", lambda name: None)
    assert layers_for_few_rows(decoder.layers, decoder.config, decoder.rotations, decoder.dtype, CPU) is None


def let_choose(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the forms of its products be chosen anew. Other tests have the same decoder."""
    for layer in decoder.layers:
        for product in products_of(layer):
            monkeypatch.setattr(product, "given", torch.empty(0))
            monkeypatch.setattr(product, "layer_gain", None)


def test_what_compiled_layers_save_is_measured(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower norm makes them save more."""
    decoder, real = load_alone(checkpoint("llama"), torch.float32), RMSNorm.__call__

    def saved() -> Sequence[float]:
        let_choose(decoder, monkeypatch)
        tell_gains(decoder)
        products = [product for layer in decoder.layers for product in products_of(layer)]
        (gain,) = {product.layer_gain.measure() for product in products if product.layer_gain is not None}
        assert set(gain.threads) == {1}
        return gain.saved_s

    def slow(self: RMSNorm, x: Tensor) -> Tensor:
        sleep(0.005)
        return real(self, x)

    before = saved()
    monkeypatch.setattr(RMSNorm, "__call__", slow)
    assert len(before) == len(BUCKETS)
    assert before[-1] == 0  # passes of more rows are not compiled
    assert all(less < 0.5 * more for less, more in zip(before[:-1], saved()[:-1], strict=True))


def test_what_torch_waits_for_its_threads_is_saved_too(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripted clock: 30 µs for an operation when the threads sleep, 5 when they are awake."""
    steps = cycle([0.0, 1.0, 0.0, 30e-6, 0.0, 5e-6])  # a rest, then both operations
    passed = accumulate(steps)
    with monkeypatch.context() as patched:
        patched.setattr(between_products, "perf_counter", lambda: next(passed))
        assert between_products._seconds_to_wake() == 0.0
        patched.setattr(torch, "get_num_threads", lambda: 2)
        assert between_products._seconds_to_wake() == pytest.approx(25e-6)
    decoder = load_alone(checkpoint("llama"), torch.float32)
    monkeypatch.setattr(between_products, "_seconds_to_wake", lambda: 10.0)
    tell_gains(decoder)
    assert products_of(decoder.layers[0])[0].layer_gain is None, "its form is chosen"
    let_choose(decoder, monkeypatch)
    tell_gains(decoder)
    gain = products_of(decoder.layers[0])[0].layer_gain
    assert gain is not None
    assert all(10 < saved_s < 11 for saved_s in gain.measure().saved_s[:-1])


def test_more_rows_share_threads_at_least_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted clock: what threads take together and one alone, for each number of rows. A disturbed turn says nothing,
    and threads beyond those that share a layer gain nothing."""
    together, alone = [1.0] * 8, [1.2, 1.5, 1.3, 1.6, 0.9, 2.5, 1.9, 1.9]
    turn = [(0.0, a, 0.0, b) for a, b in zip(together, alone, strict=True)]
    disturbed = [(0.0, 50.0, 0.0, b) for b in alone]
    passed = accumulate(chain.from_iterable([*disturbed, *turn * (between_products.GAIN_RUNS - 1)]))
    monkeypatch.setattr(between_products, "perf_counter", lambda: next(passed))
    monkeypatch.setattr(between_products, "compiled_product", lambda weight, bias: lambda x: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    gains = between_products._gains_of_threads(compiled_code.PART_BYTES)
    assert gains == pytest.approx([1.2, 1.5, 1.5, 1.6, 1.6, 2.0, 2.0, 2.0])
    assert between_products._gains_of_threads(compiled_code.PART_BYTES - 1) == [1.0] * 8


def test_an_unknown_attention_is_left_to_the_layers_of_torch(checkpoint: Callable[[str], str]) -> None:
    few_rows = few_rows_of(all_compiled(load_alone(checkpoint("llama"))))
    assert not few_rows.can_compute(torch.zeros(1, 8), cast(PassAttention, object()))
