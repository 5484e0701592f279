"""Every family's logits equal those of transformers' modules, however the tokens are fed; no trait can be left out."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models import attention
from engine.models.feeds import Feed
from engine.models.loader import TensorNames, load_decoder, open_checkpoint
from engine.models.runner import Runner
from engine.models.traits import Traits
from tests.engine.driving import make_sequence
from tests.engine.models.families import CASES, WINDOW, random_checkpoint, reference
from tests.engine.models.reader import LENGTH, SLOTS, Reader, load_alone
from tests.engine.pairs import VOCAB
from tests.examples import usual_and_proofs
from tests.kv import kv_layout

Made = dict[str, tuple[str, Tensor]]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (SLOTS, LENGTH), generator=generator).tolist()


@pytest.fixture(scope="module")
def made(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """{case: (checkpoint, transformers' logits [slots, length, vocab])}, made when first asked for."""
    return Cases(texts, tmp_path_factory.mktemp("families"))


class Cases(dict[str, tuple[str, Tensor]]):
    def __init__(self, texts: list[list[int]], directory: Path) -> None:
        self.texts, self.directory = texts, directory

    def __missing__(self, name: str) -> tuple[str, Tensor]:
        checkpoint = random_checkpoint(CASES[name], self.directory / name)
        with reference(checkpoint) as logits:
            expected = logits(self.texts)
        with reference(checkpoint, exact=False) as logits:
            untouched = logits(self.texts)
        assert (expected - untouched).abs().max() < 1e-4  # fp64 in place of fp32 changes rounding only
        assert expected.std() > 0.5  # a flat law would agree with anything
        self[name] = checkpoint, expected
        return self[name]


@pytest.fixture(params=sorted(CASES))
def reader(request: pytest.FixtureRequest, made: Made, texts: list[list[int]]) -> Reader:
    checkpoint, expected = made[request.param]
    return Reader(load_alone(checkpoint), texts, expected)


def test_prefill_whole_and_in_chunks(reader: Reader) -> None:
    reader.feed({2: LENGTH})
    for chunk in (1, 7, 2, 19, 5, 30):
        reader.feed({5: chunk})


# One family for each way to attend; the other tests read single tokens of all families behind other tokens.
SINGLY = ("llama", "mistral", "gemma2", "gpt_oss", "smollm3")


of_each_way = pytest.mark.parametrize("reader", usual_and_proofs(sorted(CASES), SINGLY), indirect=True)


@of_each_way
def test_token_by_token(reader: Reader) -> None:
    for _ in range(LENGTH):
        reader.feed({0: 1})


@of_each_way
def test_verification_and_rollback(reader: Reader) -> None:
    """Five drafts, of which the last three are taken back: the rollback crosses windows and blocks."""
    reader.feed({1: 3})
    while reader.runner.cache.length(1) + 6 <= LENGTH:
        reader.feed({1: 1}, {1: 5})
        reader.runner.cache.truncate_to(1, reader.runner.cache.length(1) - 3)


def test_batches(reader: Reader) -> None:
    """Ragged spans with idle slots between them, and decodes at lengths on both sides of a window."""
    for slot, count in {0: 30, 1: 4, 2: WINDOW, 3: 11, 4: 40, 5: WINDOW - 1, 6: 12}.items():
        reader.feed({slot: count})
    reader.feed({0: 1, 1: 1, 2: 1, 4: 1}, {0: 5, 1: 2, 4: 3})
    reader.feed({1: 1, 3: 1, 6: 1})
    reader.feed({5: 1, 2: 1, 7: 25})
    reader.feed({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1})


def test_long_factors_are_warned_of(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, _ = made["phi3, long factors"]
    caplog.clear()
    load_alone(checkpoint, max_len=32)
    assert "max_model_len" not in caplog.text
    load_alone(checkpoint, max_len=33)
    assert "max_model_len is 33; short texts read best with at most 32" in caplog.text


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_scores_of_a_few_queries_at_a_time(
    name: str, made: Made, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "EXPLICIT_SCORES", 5 * LENGTH)
    checkpoint, expected = made[name]
    reader = Reader(load_alone(checkpoint), texts, expected)
    reader.feed({2: LENGTH})
    reader.feed({0: 30, 1: 7})


ROUNDED = {  # tried in `make test`
    torch.float32: ("llama", "gemma2", "gpt_oss"),
    torch.bfloat16: ("llama", "gemma3", "granite", "qwen3_moe"),
    torch.float16: (),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=() if name in ROUNDED[dtype] else pytest.mark.proofs,
        )
        for name in sorted(CASES)
        for dtype in ROUNDED
    ],
    ids=str,
)
def test_lower_precision(name: str, dtype: torch.dtype, made: Made, texts: list[list[int]]) -> None:
    checkpoint, expected = made[name]
    runner = Runner(load_alone(checkpoint, dtype), kv_layout(2, LENGTH), torch.device("cpu"))
    with torch.inference_mode():
        logits = runner.run([Feed(make_sequence(s, texts[s]), LENGTH, outputs=LENGTH) for s in (0, 1)])
    assert logits.dtype is dtype
    similar = torch.nn.functional.cosine_similarity(logits.double().flatten(0), expected[:2].flatten(), dim=0)
    assert similar > (0.97 if dtype.itemsize == 2 else 1 - 1e-7)


# --- every trait matters ---------------------------------------------------------------------------------------------


def experts(**changes: Any) -> Callable[[Traits], Traits]:
    def change(traits: Traits) -> Traits:
        assert traits.experts is not None
        return replace(traits, experts=replace(traits.experts, **changes))

    return change


def without(**changes: Any) -> Callable[[Traits], Traits]:
    return lambda traits: replace(traits, **changes)


def wider_windows(traits: Traits) -> Traits:
    return replace(traits, windows=tuple(w and w + 1 for w in traits.windows))


def shifted_windows(traits: Traits) -> Traits:
    return replace(traits, windows=(*traits.windows[1:], traits.windows[0]))


def plain_rope(traits: Traits) -> Traits:
    ropes = tuple({"rope_type": "default", "rope_theta": rope["rope_theta"]} for rope in traits.ropes)
    assert any(rope["rope_type"] != "default" for rope in traits.ropes)
    return replace(traits, ropes=ropes)


def rope_without(field: str) -> Callable[[Traits], Traits]:
    def change(traits: Traits) -> Traits:
        return replace(traits, ropes=tuple({n: v for n, v in r.items() if n != field} for r in traits.ropes))

    return change


def one_rope(traits: Traits) -> Traits:
    return replace(traits, rope_of_layer=tuple(0 for _ in traits.rope_of_layer))


def unit_attention_factor(traits: Traits) -> Traits:
    return replace(traits, ropes=tuple({**rope, "attention_factor": 1.0} for rope in traits.ropes))


GEMMA2_TRAITS = ("norms", "norm_offset", "activation", "attention_scale", "attention_softcap", "logit_softcap")
# A trait → the change that drops it, by case.
DROPPED: dict[str, dict[str, Callable[[Traits], Traits]]] = {
    "llama": {"rope scaling": plain_rope},
    "llama with biases, yarn": {
        "qkv_bias": without(qkv_bias=False),
        "out_bias": without(out_bias=False),
        "mlp_bias": without(mlp_bias=False),
        "rope scaling": plain_rope,
        "attention factor": unit_attention_factor,
    },
    "llama, dynamic beyond its context": {"rope scaling": plain_rope},
    "mistral": {"windows": without(windows=()), "window size": wider_windows},
    "qwen2": {
        "qkv_bias": without(qkv_bias=False),
        **{f"yarn's {name}": rope_without(name) for name in ("truncate", "beta_fast", "beta_slow", "mscale")},
    },
    "qwen2 with a window in its last layers": {"windows": without(windows=()), "window layers": shifted_windows},
    "qwen3": {"qk_norm": without(qk_norm=None)},
    "gemma2": {
        **{name: without(**{name: getattr(Traits(), name)}) for name in GEMMA2_TRAITS},
        "windows": without(windows=()),
        "window size": wider_windows,
        "window layers": shifted_windows,
        "embedding_multiplier": without(embedding_multiplier=1.0),
    },
    "gemma3": {
        "qk_norm": without(qk_norm=None),
        "norm_offset": without(norm_offset=0.0),
        "two ropes": one_rope,
        "rope scaling": plain_rope,
        "windows": without(windows=()),
    },
    "phi3": {"rotary_dim": without(rotary_dim=8), "windows": without(windows=())},
    "phi3, long factors": {"rope scaling": plain_rope, "attention factor": unit_attention_factor},
    "olmo2": {"qk_norm": without(qk_norm=None), "rope scaling": plain_rope},
    "smollm3": {"no_rope_layers": one_rope},
    "granite": {
        name: without(**{name: getattr(Traits(), name)})
        for name in ("attention_scale", "embedding_multiplier", "residual_multiplier", "logit_divisor")
    },
    "mixtral": {
        "experts per token": experts(per_token=1),
        "normalised": experts(normalised=False),
        "windows": without(windows=()),
    },
    "qwen3_moe": {"experts per token": experts(per_token=2), "normalised": experts(normalised=True)},
    "gpt_oss": {
        "sinks": without(sinks=False),
        "routing": experts(routing="softmax_first", normalised=False),
        "clamp": experts(clamped_at=1e9),
        "slope": experts(slope=1.0),
        "windows": without(windows=()),
        "out_bias": without(out_bias=False),
    },
}


def test_gates_are_clamped_as_published_where_the_configuration_does_not_tell(made: Made, tmp_path: Path) -> None:
    """transformers 5.17 writes neither field."""
    copied = shutil.copytree(made["gpt_oss"][0], tmp_path / "gpt_oss")
    path = Path(copied) / "config.json"
    fields = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({k: v for k, v in fields.items() if not k.startswith("swiglu")}), "utf-8")
    traits = open_checkpoint(str(copied)).shape.traits.experts
    assert traits is not None
    assert (traits.clamped_at, traits.slope) == (7.0, 1.702)


@pytest.mark.parametrize(("name", "trait"), [(name, trait) for name, changes in DROPPED.items() for trait in changes])
def test_no_trait_can_be_left_out(
    name: str, trait: str, made: Made, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the trait the logits are others, by far more than rounding."""
    checkpoint, expected = made[name]
    whole = open_checkpoint(checkpoint)
    traits = DROPPED[name][trait](whole.shape.traits)
    assert traits != whole.shape.traits
    broken = replace(whole, shape=replace(whole.shape, traits=traits))
    monkeypatch.setattr(TensorNames, "refuse_unread", lambda *_: None)
    decoder = load_decoder(broken, dtype=torch.float64, device=torch.device("cpu"), max_len=LENGTH)
    with pytest.raises(AssertionError, match="logits differ") as caught:
        Reader(decoder, texts, expected).feed({0: LENGTH})
    assert float(str(caught.value).split("logits differ by ")[1].split()[0]) > 1e-3


def test_every_trait_of_every_family_is_dropped_somewhere() -> None:
    """A new trait needs a case above: each field of Traits that differs from llama's in a case is named there."""
    named = {trait for changes in DROPPED.values() for trait in changes}
    synonyms = {"ropes": "rope scaling", "rope_of_layer": "two ropes", "experts": "experts per token"}
    for field in fields(Traits):
        assert synonyms.get(field.name, field.name) in named or field.name == "fused"
