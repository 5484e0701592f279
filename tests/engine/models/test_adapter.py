"""Architectures that are not native: transformers' modules over our KV memory, exact, or refused by name."""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import ConfigError
from engine.models import adapter
from engine.models.adapter import AdaptedModel
from engine.models.loader import load_model, open_checkpoint
from engine.models.pass_attention import Scoring
from engine.models.products import Weights
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load
from tests.engine.fresh import memory
from tests.engine.models.families import InFP64, reference
from tests.engine.models.forest import Forest, Part
from tests.engine.models.reader import LENGTH, SLOTS, Reader
from tests.engine.pairs import VOCAB, Pair, save_tokenizer

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    # Parallel residuals, LayerNorm, a quarter of each head rotated.
    "gpt_neox": {"intermediate_size": 40},
    # Windows in every layer, two kv heads, biases.
    "starcoder2": {"intermediate_size": 40, "num_key_value_heads": 2, "sliding_window": 9},
    # Rotated pairs are neighbours, logits are scaled.
    "cohere": {"intermediate_size": 40, "num_key_value_heads": 2, "logit_scale": 0.5},
    # Learned positions.
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
}
# Experts. Their grouped products have no fp64.
OLMOE = {"intermediate_size": 16, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}


# Windows that are switched off: its masks are told of windows of 0.
QWEN2_MOE = {**OLMOE, "intermediate_size": 40, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
EXPERTS = {"olmoe": OLMOE, "qwen2_moe": QWEN2_MOE}


def random_checkpoint(kind: str, directory: Path, like: str | None = None) -> str:
    """Random weights in fp32, or those of `like` with noise."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON, **(KINDS | EXPERTS)[kind]))
    if like is not None:
        model.load_state_dict(type(model).from_pretrained(like, dtype=torch.float32).state_dict())
    generator = torch.Generator().manual_seed(7 if like is None else 8)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if like is not None:
                weight.add_(0.1 * weight.std() * drawn)
            elif "norm" in name:
                weight.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * drawn)
            else:
                weight.copy_(drawn * (0.2 if weight.dim() == 1 else 0.25))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (SLOTS, LENGTH), generator=generator).tolist()


@pytest.fixture(scope="module", params=sorted(KINDS))
def made(
    request: pytest.FixtureRequest, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Tensor]:
    """A checkpoint, and transformers' logits [slots, length, vocab] in fp64."""
    checkpoint = random_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    with reference(checkpoint) as logits:
        expected = logits(texts)
    assert expected.std() > 0.3
    return checkpoint, expected


@pytest.fixture(autouse=True)
def in_fp64() -> Iterator[None]:
    """transformers' modules compute norms and softmaxes in fp32 whatever the dtype."""
    with InFP64():
        yield


def test_logits_are_those_of_transformers_however_tokens_are_fed(
    made: tuple[str, Tensor], texts: list[list[int]]
) -> None:
    checkpoint, expected = made
    model = load_model(open_checkpoint(checkpoint), dtype=torch.float64, device=CPU, max_len=LENGTH)
    reader = Reader(model, texts, expected)
    reader.feed({2: LENGTH})
    for chunk in (1, 7, 2, 19, 5, 30):
        reader.feed({5: chunk})
    for slot, count in {0: 30, 1: 4, 3: 11, 6: 12}.items():
        reader.feed({slot: count})
    for _ in range(8):
        reader.feed({0: 1, 1: 1, 3: 1})
    reader.feed({0: 1, 1: 1, 6: 25}, {0: 5, 1: 2})
    while reader.runner.cache.length(1) + 6 <= LENGTH:  # five drafts, of which three are taken back
        reader.feed({1: 1}, {1: 5})
        reader.runner.cache.truncate_to(1, reader.runner.cache.length(1) - 3)


def test_trees_of_drafts_are_read_like_their_paths(made: tuple[str, Tensor], texts: list[list[int]]) -> None:
    model = load_model(open_checkpoint(made[0]), dtype=torch.float64, device=CPU, max_len=LENGTH)
    forest = Forest(model, "gathered", [texts[0][:20], texts[1][:11], texts[2][:30]])
    parts = [Part(0, 20, texts[3][:8], (-1, 0, 1, 2, 1, 4, -1, 6)), Part(1, 11, texts[3][:4]), Part(2, 30)]
    forest.feed(parts)
    forest.accept(parts, [5, 2, -1])


@pytest.mark.parametrize("kind", sorted(EXPERTS))
def test_experts_are_those_of_transformers(kind: str, texts: list[list[int]], tmp_path: Path) -> None:
    checkpoint = random_checkpoint(kind, tmp_path)
    with reference(checkpoint) as logits:
        expected = logits(texts)
    model = load_model(open_checkpoint(checkpoint), dtype=torch.float32, device=CPU, max_len=LENGTH)
    reader = Reader(model, texts, expected)
    for counts in ({0: 30, 1: 4, 2: LENGTH}, {0: 1, 1: 20, 3: 7}):
        reader.feed(counts)
    reader.feed({0: 1, 1: 2}, {0: 5})


@pytest.mark.parametrize(
    "kind", ["gpt_neox", *(pytest.param(kind, marks=pytest.mark.proofs) for kind in ("opt", "starcoder2"))]
)
def test_texts_do_not_depend_on_drafts_and_greedy_ones_are_transformers(kind: str, tmp_path: Path) -> None:
    """Through the whole engine, with prefix hits; the draft is an adapted model too."""
    target = random_checkpoint(kind, tmp_path / "target")
    pair = Pair(target, random_checkpoint(kind, tmp_path / "draft", like=target))
    engine = load(pair, max_running=4, max_spec_length=4, max_step_tokens=40, **memory("mapped", 320))
    draw = random.Random(3)
    shared = tuple(draw.randrange(2, VOCAB) for _ in range(20))
    prompts = [(*shared, 5 + i) for i in range(3)]

    def requests(k: int) -> list[Request]:
        params = [SamplingParams(0.8 * (i > 0), seed=i, max_tokens=32, ignore_eos=True) for i in range(3)]
        return [Request(f"r{i}", prompts[i], params[i], k=k) for i in range(3)]

    alone = {r.id: drive(engine, [r]).tokens[r.id] for r in requests(0)}
    together = drive(engine, {0: requests(4)[:1], 3: requests(4)[1:]})
    assert together.tokens == alone
    assert 0 < together.accepted < together.drafted
    assert sum(s.cached_tokens for s in together.steps) >= 16
    with reference(target) as logits:
        theirs = logits([[*prompts[0], *alone["r0"]]])[0].argmax(-1)
    assert theirs[len(prompts[0]) - 1 : -1].tolist() == alone["r0"]
    window = KINDS[kind].get("sliding_window")
    assert engine.target.cache.window == window


def test_greedy_texts_of_qwen2_moe_are_those_of_transformers(tmp_path: Path) -> None:
    checkpoint = random_checkpoint("qwen2_moe", tmp_path)
    engine = load(Pair(checkpoint, checkpoint), dtype="float32", max_spec_length=4)
    prompt = tuple(range(5, 25))
    params = SamplingParams(0, max_tokens=32, ignore_eos=True)
    texts = [drive(engine, [Request("r", prompt, params, k=k)]).tokens["r"] for k in (0, 4)]
    with reference(checkpoint) as logits:
        theirs = logits([[*prompt, *texts[0]]])[0].argmax(-1)
    assert texts == [theirs[len(prompt) - 1 : -1].tolist()] * 2
    assert engine.target.cache.window is None


def test_what_is_slower_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(random_checkpoint("opt", tmp_path))
    with caplog.at_level(logging.WARNING, "engine"):
        model = load_model(checkpoint, dtype=torch.float32, device=CPU, max_len=64)
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}: 'opt' is no native architecture: transformers' modules compute it in float32, slower than a "
        "native one would"
    ]
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0.9 * size < model.weight_bytes < size
    with pytest.raises(ConfigError, match="'opt' model, which is not native, so its weights cannot be int8"):
        load_model(checkpoint, dtype=torch.float32, device=CPU, max_len=64, weights=Weights("int8"))


def test_what_our_memory_would_compute_otherwise_is_found_at_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(random_checkpoint("starcoder2", tmp_path))
    monkeypatch.setattr(adapter, "Scoring", lambda scale, *_: Scoring(scale))  # without its window
    with pytest.raises(ConfigError, match="'starcoder2' model, whose logits over our KV memory differ from"):
        load_model(checkpoint, dtype=torch.float64, device=CPU, max_len=64)


def test_a_tensor_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(random_checkpoint("opt", tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.decoder.layers.1.fc1.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing keys: 'model\.decoder\.layers\.1\.fc1\.weight'"):
        load_model(checkpoint, dtype=torch.float32, device=CPU, max_len=64)
    tensors["model.decoder.layers.1.fc1.weight"] = lost[:5].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model(checkpoint, dtype=torch.float32, device=CPU, max_len=64)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({}, "'falcon' model, whose attention is its own and not that of transformers' attention interface"),
    "qwen2_vl": ({}, "'qwen2_vl' model with a part for vision: only models of text alone are supported$"),
    "mllama": ({}, "'mllama' model with a part for vision: only models of text alone are supported$"),
    "gemma3n": ({}, "'gemma3n' model with a part for vision and audio: only models of text alone are supported$"),
    "gemma4": ({}, "'gemma4' model with parts beside its text model: only models of text alone are supported$"),
    "pixtral": ({}, "'pixtral' model, which is no causal language model in transformers: only those are supported$"),
    "qwen3_next": ({}, r"'qwen3_next' model with a recurrent state \(linear_attention layers\): only attention is"),
    "lfm2": ({}, "'lfm2' model with a recurrent state: only attention is supported$"),
    "jamba": ({}, r"'jamba' model with a recurrent state \(linear_attention layers\): only attention is supported$"),
    "mamba": ({}, "'mamba' model: 0 of its 3 layers attend"),
    "bloom": ({}, "'bloom' model: 0 of its 3 layers attend"),
    "t5": ({}, "'t5' model with an encoder"),
    "bert": ({}, "'bert' model, whose attention is not causal"),
    "opt": ({**KINDS["opt"], "quantization_config": {"quant_method": "gptq", "bits": 4}}, "with quantised weights"),
    "stablelm": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
        "'stablelm' model with dynamic rotary positions, which .*: a token would depend on the texts beside it",
    ),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_cannot_work_is_refused_by_name_before_any_weight_is_read(kind: str, tmp_path: Path) -> None:
    config, message = REFUSED[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **COMMON, **config}), "utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_of_an_error_of_a_module_only_the_first_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: AdaptedModel) -> None:
        raise ImportError("\nno such package\nInstall it with:\npip install it")

    random_checkpoint("opt", tmp_path)
    monkeypatch.setattr(AdaptedModel, "examine", fail)
    with pytest.raises(ConfigError, match=r"through transformers' attention interface: no such package$"):
        open_checkpoint(str(tmp_path))
