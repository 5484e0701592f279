"""What cannot be served is refused at start-up, with both sides of the conflict in the message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM

from engine.config import ConfigError, EngineConfig
from engine.loading.load import load_models
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.model_families import FAMILIES
from engine.models.tokenizer import Tokenizer
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load, model_drafter
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.pairs import LLAMA3, VOCAB, Pair, Shape, copy_of, edit_json, save_checkpoint, save_tokenizer


def refused(target: str | Path, draft: str | Path | None = None, max_model_len: int | None = None) -> str:
    """The message with which this pair is refused."""
    other = None if draft is None else str(draft)
    config = EngineConfig(str(target), other, dtype="float64", max_model_len=max_model_len)
    with pytest.raises(ConfigError) as caught:
        load_models(config)
    return str(caught.value)


def both_sides(damage: Callable[[Path], object], pair: Pair, tmp_path: Path, expected: str) -> None:
    """The same damage to a target and to a draft; the message names the damaged one."""
    broken = copy_of(pair.target, tmp_path / "broken")
    damage(broken)
    for message in (refused(broken), refused(pair.target, broken)):
        assert expected in message
        assert str(broken) in message


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def removed_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def narrowed_tensor(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:16].contiguous()


TOO_DEEP = "[" * 100_000
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}


def edit(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "config.json", **changes)


def edit_generation(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit_json(path / "generation_config.json", **changes)


def without(*names: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        content = json.loads((path / "config.json").read_text("utf-8"))
        (path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if k not in names}), "utf-8")

    return remove


def added_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16)


def biased_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.bias"] = torch.ones(VOCAB)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another architecture": (edit(model_type="mamba"), "is a 'mamba' model"),
    "an unknown architecture": (
        edit(model_type="frobnicate"),
        f"'frobnicate' model; supported are {', '.join(FAMILIES)}, and what transformers",
    ),
    "no architecture": (without("model_type"), "is a None model; supported are"),
    "no config": (lambda p: (p / "config.json").unlink(), "no config.json"),
    "a config that is no JSON": (lambda p: (p / "config.json").write_text("{"), "config.json is malformed"),
    "a config that is too deep": (lambda p: (p / "config.json").write_text(TOO_DEEP), "config.json is malformed"),
    "an architecture that is a list": (edit(model_type=["llama"]), "is a ['llama'] model; supported are"),
    "token settings that are too deep": (
        lambda p: (p / "tokenizer_config.json").write_text(TOO_DEEP),
        "tokenizer_config.json is malformed",
    ),
    "special tokens that are no list": (
        lambda p: edit_json(p / "tokenizer_config.json", additional_special_tokens=5),
        "additional_special_tokens must be a list or an object, not 5",
    ),
    "an index that is too deep": (
        lambda p: (p / "model.safetensors.index.json").write_text(TOO_DEEP),
        "index.json is malformed",
    ),
    "an index of pickles": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}'),
        "names files that are not safetensors: pytorch_model.bin",
    ),
    "a config that is a list": (lambda p: (p / "config.json").write_text("[]"), "config.json is malformed"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no model.safetensors"),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "no tokenizer.json"),
    "a missing tensor": (lambda p: edit_tensors(p, removed_tensor), "no tensor 'model.layers.1.mlp.up_proj.weight'"),
    "another shape": (lambda p: edit_tensors(p, narrowed_tensor), "has shape (16, 64), config.json says (32, 64)"),
    "a tensor too many": (
        lambda p: edit_tensors(p, added_tensor),
        "does not ask for in a 'llama' model, 'model.layers.1.self_attn.q_norm.weight' among them",
    ),
    "a bias of the head": (
        lambda p: edit_tensors(p, biased_head),
        "does not ask for in a 'llama' model, 'lm_head.bias' among them",
    ),
    "an end token that is no id": (
        edit_generation(eos_token_id="</s>"),
        "eos_token_id must be a token id or a list of them, not '</s>'",
    ),
    "an end token that is no id, in a list": (edit_generation(eos_token_id=[1, True]), "eos_token_id must be a token"),
    "fewer layers than tensors": (edit(num_hidden_layers=1), "tensors that config.json does not ask for"),
    "no shape": (without("hidden_size", "vocab_size"), "config.json lacks hidden_size, vocab_size"),
    "another activation": (edit(hidden_act="gelu"), "hidden_act 'gelu' is not supported; silu, gelu_pytorch_tanh are"),
    "biases that are not there": (edit(mlp_bias=True), "no tensor 'model.layers.0.mlp.gate_proj.bias'"),
    "sliding windows": (edit(sliding_window=16), "sliding_window 16 is not supported for 'llama' models"),
    "sliding layers": (
        edit(layer_types=["full_attention", "sliding_attention"]),
        "layer_types ['full_attention', 'sliding_attention'] is not supported for 'llama' models",
    ),
    "capped logits": (edit(final_logit_softcapping=30.0), "final_logit_softcapping 30.0 is not supported for 'llama'"),
    "another scale": (edit(attention_multiplier=0.5), "attention_multiplier 0.5 is not supported for 'llama' models"),
    "partial rotary": (edit(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported for"),
    "partial rotary that is no number": (
        edit(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": [0.5]}),
        "partial_rotary_factor must be a number above 0 and at most 1e+30, not [0.5]",
    ),
    "quantised weights": (edit(quantization_config={"quant_method": "bitsandbytes"}), "is quantised by 'bitsandbytes'"),
    "quantised weights that are not there": (
        edit(quantization_config={"quant_method": "gptq", "bits": 4}),
        "says that weights are GPTQ int4, and none is stored so",
    ),
    "a rope that is not known": (edit(rope_parameters=PROPORTIONAL), "rope type 'proportional' is not supported"),
    "a rope without its fields": (
        edit(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
        "config.json is malformed",
    ),
    "a rope with another field": (
        edit(rope_parameters={**LINEAR, "mrope_section": [2, 3, 3]}),
        "rope_parameters mrope_section are not supported",
    ),
    "a rope whose field is no number": (
        edit(rope_parameters={**LINEAR, "factor": "two"}),
        "rope_parameters of type 'linear' are malformed",
    ),
    "a shape that is no number": (edit(num_attention_heads="four"), "num_attention_heads"),
    "a shape that is negative": (
        edit(intermediate_size=-3),
        "intermediate_size must be an integer of at least 1 and at most 2,147,483,647, not -3",
    ),
    "an epsilon of nothing": (edit(rms_norm_eps=0.0), "rms_norm_eps must be a number above 0 and at most 1e+30, not"),
    **{
        f"{name} beyond all memory": (edit(**{name: 10**30}), f"{name} must be an integer of at least 1 and at most")
        for name in ("hidden_size", "num_key_value_heads", "num_hidden_layers", "vocab_size")
    },
    "heads beyond all memory": (edit(num_attention_heads=10**30), "config.json"),
    "a context beyond all memory": (edit(max_position_embeddings=10**30), "max_position_embeddings must be an integer"),
    "a number beyond fp64": (edit(rms_norm_eps=10**400), "config.json is malformed"),
    "an integer of 5,000 digits": (
        lambda p: (p / "config.json").write_text('{"hidden_size": 1' + "0" * 5000 + "}"),
        "config.json is malformed",
    ),
    "a rope beyond fp64": (
        edit(rope_parameters={**LINEAR, "rope_theta": 10**400}),
        "of type 'linear' are malformed",
    ),
    "heads that cannot share": (edit(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of"),
    "an odd head": (edit(head_dim=15), "head_dim"),
}


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": 16, "use_sliding_window": False}, {"quantization_config": None}, {"attention_multiplier": 1.0}],
)
def test_what_a_config_only_mentions_is_no_damage(changes: dict[str, object], pair: Pair, tmp_path: Path) -> None:
    path = copy_of(pair.target, tmp_path / "whole")
    edit_json(path / "config.json", **changes)
    load_models(EngineConfig(str(path), dtype="float64"))


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_damaged_checkpoints(name: str, pair: Pair, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    both_sides(damage, pair, tmp_path, message)


def test_a_directory_that_does_not_exist(pair: Pair, tmp_path: Path) -> None:
    assert f"there is no directory {tmp_path}/nowhere" in refused(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in refused(pair.target, tmp_path / "nowhere")


def test_a_sharded_checkpoint_with_a_missing_shard(pair: Pair, tmp_path: Path) -> None:
    path = copy_of(pair.target, tmp_path / "sharded")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({n: tensors[n] for n in members}, path / file, metadata={"format": "pt"})
    weight_map = {n: file for file, members in halves.items() for n in members}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    requests = [Request("r", (5, 6, 7), SamplingParams(temperature=0, max_tokens=8), k=0)]
    whole, sharded = load(Pair(pair.target, pair.draft)), load(Pair(str(path), pair.draft))
    assert drive(sharded, requests).tokens == drive(whole, requests).tokens
    (path / "two.safetensors").unlink()
    message = refused(path)
    assert "names files that are missing: two.safetensors" in message
    assert str(path) in message


def test_a_draft_that_maps_two_ids_differently_is_not_read_as_a_twin(pair: Pair, tmp_path: Path) -> None:
    """Same size, same specials, two entries swapped: sizes alone would not tell."""
    other = copy_of(pair.target, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocab = content["model"]["vocab"]
    a, b = (next(t for t, i in vocab.items() if i == n) for n in (40, 41))
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    translation = model_drafter(load(Pair(pair.target, str(other)))).runner.translation
    assert translation is not None
    assert {i: j for i, j in translation.shared.items() if i != j} == {40: 41, 41: 40}


def test_a_draft_tokenizer_with_fewer_entries(pair: Pair, tmp_path: Path) -> None:
    other = copy_of(pair.target, tmp_path / "other")
    save_tokenizer(other, merges=20)
    translation = model_drafter(load(Pair(pair.target, str(other)))).runner.translation
    assert translation is not None
    assert all(i == j for i, j in translation.shared.items())
    assert len(translation.shared) == 256 + 20


def test_several_drafts_need_the_targets_tokenizer(pair: Pair, tmp_path: Path) -> None:
    other = copy_of(pair.draft, tmp_path / "other")
    save_tokenizer(other, merges=20)
    with pytest.raises(ConfigError, match=f"draft {other} has another tokenizer than target .* several drafts need"):
        load(pair, drafts=(pair.draft, str(other)))
    assert model_drafter(load(pair, drafts=(str(other),))).runner.translation is not None  # alone it has a translation


def other_eos(path: Path) -> None:
    edit_json(path / "config.json", eos_token_id=7)
    edit_json(path / "generation_config.json", eos_token_id=[7, 9])


def other_pad(path: Path) -> None:
    """The same map, but one more id is special."""
    vocab = json.loads((path / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    edit_json(path / "tokenizer_config.json", pad_token=next(t for t, i in vocab.items() if i == 50))


def new_pad(path: Path) -> None:
    """A token that the other tokenizer does not have."""
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(["<|pad|>"])
    backend.save(str(path / "tokenizer.json"))


def other_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("{{ messages }}")


DIFFERENCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "end tokens": (other_eos, "differ in end tokens [1] and [1, 7, 9]; the target's hold"),
    "special tokens": (other_pad, "differ in special tokens [0, 1] and [0, 1, 50]; the target's hold"),
    "a token for padding": (new_pad, "differ in special tokens [0, 1] and [0, 1, {pad}]; the target's hold"),
    "chat templates": (other_template, "differ in chat templates; the target's hold"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_draft_that_maps_all_strings_alike_is_used_with_a_warning(
    name: str, pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, message = DIFFERENCES[name]
    message = message.format(pad=len(Tokenizer(pair.target).vocab))
    other = copy_of(pair.draft, tmp_path / "other")
    change(other)
    request = Request("r", (5, 6, 7), SamplingParams(temperature=1, seed=1, max_tokens=20), k=3)
    engine = load(Pair(pair.target, str(other)))
    assert f"target {pair.target} and draft {other} {message}" in caplog.text
    assert engine.intake.eos_ids == {1}
    run = drive(engine, [request])
    assert run.drafted
    assert run.tokens == drive(load(pair), [request]).tokens


def test_a_twin_draft_is_used_without_a_warning(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    load(pair)
    assert caplog.text == ""


def test_a_special_token_with_the_id_of_another_token(pair: Pair, tmp_path: Path) -> None:
    """Only where nothing contradicts the target may the draft have more special tokens."""
    one, other = copy_of(pair.target, tmp_path / "one"), copy_of(pair.target, tmp_path / "other")
    for path, name in ((one, "<|pad|>"), (other, "<|fill|>")):
        backend = Backend.from_file(str(path / "tokenizer.json"))
        backend.add_special_tokens([name])
        backend.save(str(path / "tokenizer.json"))
    pad = len(Tokenizer(pair.target).vocab)
    translation = model_drafter(load(Pair(str(one), str(other)))).runner.translation
    assert translation is not None
    assert pad not in translation.shared


@pytest.mark.parametrize("rows", [VOCAB - 40, VOCAB + 112])
def test_padded_tables_are_accepted(pair: Pair, tmp_path: Path, rows: int) -> None:
    """Only the maps must agree: tables are padded as their makers like."""
    draft = save_checkpoint(tmp_path / "padded", Shape(vocab=rows), seed=3)
    engine = load(Pair(pair.target, draft))
    request = Request("r", (5, 6, 7), SamplingParams(temperature=1, seed=1, max_tokens=20, ignore_eos=True), k=3)
    run = drive(engine, [request])
    assert run.drafted
    assert run.tokens == drive(load(pair), [request]).tokens


def test_a_context_longer_than_the_target_allows(pair: Pair, tmp_path: Path) -> None:
    short = save_checkpoint(tmp_path / "short", Shape(max_positions=64), seed=3)
    assert refused(pair.target, max_model_len=129) == f"max_model_len 129 is too long: target {pair.target} allows 128"
    message = refused(short, pair.target, max_model_len=65)
    assert message == f"max_model_len 65 is too long: target {short} allows 64"
    assert "must be at least 2" in refused(pair.target, max_model_len=1)
    assert load(Pair(short, pair.draft), max_model_len=None).max_model_len == 64
    assert load(Pair(pair.target, short), max_model_len=None).max_model_len == 128
    assert load(Pair(pair.target, short), max_model_len=128).max_model_len == 128


@pytest.mark.parametrize(("positions", "capped"), [(4096, False), (4097, True)])
def test_a_context_that_is_cut_is_told(
    positions: int, capped: bool, pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_of(pair.target, tmp_path / "long")
    edit_json(path / "config.json", max_position_embeddings=positions)
    message = "max_model_len 4096 of the model's 4097; set max_model_len to serve more"
    with caplog.at_level("INFO", "engine.loading.load"):
        assert load(Pair(str(path), str(path)), max_model_len=None, max_running=1).max_model_len == 4096
        assert (message in caplog.text) == capped
        caplog.clear()
        load(Pair(str(path), str(path)), max_model_len=4096, max_running=1)
        assert "max_model_len" not in caplog.text


@pytest.mark.parametrize(
    ("device", "message"), [("cuda", "torch sees 0 CUDA devices"), ("cuda:x", "'cuda:x' is malformed")]
)
def test_a_device_that_this_machine_has_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, device: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        load_models(EngineConfig(pair.target, device=device))


def test_prompts_are_whole_whatever_the_checkpoint_saved(pair: Pair, tmp_path: Path) -> None:
    """Truncation and padding are saved with a tokenizer that was last used for training batches."""
    path = copy_of(pair.target, tmp_path / "saved")
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=24)
    backend.save(str(path / "tokenizer.json"))
    assert len(Backend.from_file(str(path / "tokenizer.json")).encode("def main").ids) == 24
    saved, clean = Tokenizer(str(path)), Tokenizer(pair.target)
    for text in ("a", "def main(argv=None):", "the cat sat on the mat, the dog did not"):
        assert saved.encode(text) == clean.encode(text)
        assert clean.decode(clean.encode(text)) == text


def test_a_model_that_writes_in_channels_is_told(pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copy_of(pair.target, tmp_path / "channels")
    load(Pair(str(path), pair.draft))
    assert "channels" not in caplog.text.replace(str(path), "")
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(["<|channel|>"])
    backend.save(str(path / "tokenizer.json"))
    load(Pair(str(path), pair.draft))
    assert f"{path} writes chats in channels (<|channel|>)" in caplog.text


def test_an_end_token_outside_of_the_vocabulary_never_comes(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until min_tokens the end tokens get no chance: one without a logit must not break the round."""
    path = copy_of(pair.target, tmp_path / "outside")
    edit_json(path / "generation_config.json", eos_token_id=[1, -1, VOCAB])
    engine = load(Pair(str(path), pair.draft))
    assert engine.intake.eos_ids == {1}
    assert f"end tokens -1, {VOCAB} are outside of the vocabulary of {VOCAB}" in caplog.text
    params = SamplingParams(temperature=1, seed=1, max_tokens=6, min_tokens=5)
    assert len(drive(engine, [Request("r", (5, 6, 7), params)]).tokens["r"]) >= 5


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_stored_is_compared(
    same: bool, pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does: a head with other values is not tied, whatever config.json says."""
    path = copy_of(pair.target, tmp_path / "stored")
    edit_json(path / "config.json", tie_word_embeddings=True)

    def head(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if same else embedding.flip(0).contiguous()

    edit_tensors(path, head)
    decoder = load_decoder(open_checkpoint(str(path)), dtype=torch.float64, device=torch.device("cpu"), max_len=64)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    assert torch.equal(decoder.head.weight, model.lm_head.weight)
    assert (decoder.head.weight is decoder.embedding) == same
    assert ("is not tied" in caplog.text) != same


def test_older_configurations_of_rope_mean_the_same(tmp_path: Path) -> None:
    """transformers before 5 wrote rope_theta and rope_scaling, as most published checkpoints have it."""

    def rotations(path: Path | str) -> torch.Tensor:
        device = torch.device("cpu")
        checkpoint = open_checkpoint(str(path))
        (table,) = load_decoder(checkpoint, dtype=torch.float64, device=device, max_len=128).rotations
        return table

    newer = save_checkpoint(tmp_path / "newer", Shape(rope=LLAMA3), seed=1)
    older = copy_of(newer, tmp_path / "older")
    content = json.loads((older / "config.json").read_text("utf-8"))
    scaling = content.pop("rope_parameters")
    (older / "config.json").write_text(json.dumps(content), "utf-8")
    theta = scaling.pop("rope_theta")
    edit_json(older / "config.json", rope_theta=theta, rope_scaling=scaling)
    assert torch.equal(rotations(older), rotations(newer))
    edit_json(older / "config.json", rope_theta=theta, rope_scaling=None)
    assert not torch.equal(rotations(older), rotations(newer))


def test_windows_that_no_layer_has_are_no_obstacle(tmp_path: Path) -> None:
    """Published qwen2 checkpoints have use_sliding_window with max_window_layers beyond their layers."""
    path = save_checkpoint(tmp_path / "qwen2", Shape(kind="qwen2"), seed=1)
    plain = open_checkpoint(path).shape
    edit_json(Path(path) / "config.json", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    assert open_checkpoint(path).shape == plain
    edit_json(Path(path) / "config.json", layer_types=["full_attention", "sliding_attention"])
    assert open_checkpoint(path).shape.traits.windows == (None, 16)


def test_windows_without_a_size(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "qwen2", Shape(kind="qwen2"), seed=1)
    edit_json(Path(path) / "config.json", layer_types=["full_attention", "sliding_attention"])
    assert "sliding_window must be an integer of at least 1 and at most 2,147,483,647, not None" in refused(path)
    edit_json(Path(path) / "config.json", layer_types=["full_attention", "linear_attention"])
    assert "linear_attention" in refused(path)


@pytest.mark.parametrize("names", ["rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq"])
def test_frequencies_that_old_checkpoints_hold_are_not_read(pair: Pair, tmp_path: Path, names: str) -> None:
    path = copy_of(pair.target, tmp_path / "old")
    edit_tensors(path, lambda tensors: tensors.update({f"model.layers.0.{names}": torch.ones(8)}))
    load_models(EngineConfig(str(path), dtype="float64"))


def test_the_text_model_of_a_checkpoint_that_also_sees(tmp_path: Path) -> None:
    """A gemma 3 checkpoint with a vision tower: its text is that of the same weights without one."""
    text = random_checkpoint(CASES["gemma3"], tmp_path / "text")
    config = json.loads((Path(text) / "config.json").read_text("utf-8"))
    tensors = load_file(Path(text) / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        both = copy_of(text, tmp_path / prefix)
        (both / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}), "utf-8")
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file({**renamed, "vision_tower.weight": torch.ones(3)}, both / "model.safetensors")
        requests = [Request("r", (5, 6, 7), SamplingParams(temperature=0, max_tokens=8), k=0)]
        assert (
            drive(load(Pair(str(both), str(both))), requests).tokens == drive(load(Pair(text, text)), requests).tokens
        )
