"""Files of EAGLE heads: every published format loads and computes what it says; what cannot be served is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import engine.loading.load as load_module
from engine.config import ConfigError, EngineConfig
from engine.heads.eagle import EagleHead
from engine.heads.eagle_files import load_eagle, open_eagle
from engine.heads.eagle_runner import HeadRunner
from engine.heads.files import head_kind
from engine.loading.load import load_models, plan_memory
from engine.loading.model_runners import max_states
from engine.memory.budget import measure_activations
from engine.memory.largest_rounds import measure_largest_rounds
from engine.models.feeds import Feed
from engine.models.loader import load_decoder, open_checkpoint
from engine.types import Request, SamplingParams
from tests.engine.driving import load, make_sequence, model_drafter
from tests.engine.heads.eagles import (
    FORMATS,
    HIDDEN,
    LAYERS,
    READ,
    SlowHead,
    rewrite,
    save_head,
    save_target,
)
from tests.engine.pairs import VOCAB, Pair, edit_json

CPU = torch.device("cpu")
TOKENS = list(range(7, 7 + 5 * 12, 5))
NORMS = ("norm_before_fc", "norm_output", "norm_before_residual")
USUAL_NORMS = {
    *((name, "safeailab") for name in NORMS if name != "norm_output"),
    ("norm_output", "small vocabulary"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def head(target: str, tmp_path: Path) -> Callable[..., Path]:
    """Saves a head of a format, with changes to its config.json, for the target."""
    return lambda kind="safeailab", **changes: Path(save_head(tmp_path / "head", target, kind, **changes))


def opened(target: str, directory: Path) -> EagleHead:
    """The head as the engine loads it, fp64."""
    kind, checkpoint = head_kind(directory), open_checkpoint(target)
    assert kind == "eagle" or kind == "eagle3"
    decoder = load_decoder(checkpoint, dtype=torch.float64, device=CPU, max_len=64)
    return load_eagle(
        open_eagle(directory, kind, checkpoint.shape), decoder, dtype=torch.float64, device=CPU, max_len=64
    )


def assert_as_reference(pair: Pair) -> None:
    """The logits behind a text and behind a draft, through the runners."""
    engine = load(pair, max_running=1, max_step_tokens=64)
    target, runner, slow = engine.target, model_drafter(engine).runner, SlowHead(pair)
    assert isinstance(runner, HeadRunner)
    sequence = make_sequence(1, TOKENS, k=2)
    sequence.drafter = "model"
    with torch.inference_mode():
        target.run([Feed(sequence, len(TOKENS) - 1, outputs=0)])
        runner.allocate(sequence)
        rows = [runner.run([Feed(sequence, len(TOKENS) - 1)]), runner.step([sequence], torch.tensor([9]))]
    assert torch.allclose(torch.cat(rows), slow.logits(TOKENS, 0, [9]), atol=1e-6)


# --- what loads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_loads(target: str, head: Callable[..., Path], kind: str) -> None:
    directory = head(kind)
    assert head_kind(directory) == ("eagle" if kind == "eagle" else "eagle3")
    loaded = opened(target, directory)
    assert loaded.layers == ((LAYERS,) if kind == "eagle" else READ)
    assert (loaded.vocabulary is not None) == (kind == "small vocabulary")
    assert loaded.norm_residual == (kind == "speculators")
    stored = load_file(directory / "model.safetensors")
    shared = {"d2t", "t2d", "embed_tokens.weight"}  # tables, and an embedding that is the target's
    matrices = sum(t.numel() for name, t in stored.items() if t.dim() > 1 and name not in shared)
    assert loaded.weight_bytes >= 8 * matrices


def test_layers_are_those_of_the_authors_where_nothing_is_said(target: str, head: Callable[..., Path]) -> None:
    shape = replace(open_checkpoint(target).shape, num_layers=8)
    assert open_eagle(head(eagle_config={}), "eagle3", shape).layers == (2, 4, 5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in USUAL_NORMS else pytest.mark.proofs)
        for name, kind in product(NORMS, ("safeailab", "speculators", "small vocabulary"))
    ],
)
def test_options_of_the_norms(target: str, head: Callable[..., Path], kind: str, name: str) -> None:
    """Each as config.json has it, and the other way round it computes something else."""
    directory, draw, slow = head(kind), torch.Generator().manual_seed(5), dict[bool, torch.Tensor]()
    rewrite(str(directory), **{"norm.weight": 1 + 0.5 * torch.randn(HIDDEN, generator=draw)})
    before_fuse = {"input_norm.weight": 1 + 0.5 * torch.randn(3 * HIDDEN, generator=draw)}
    for value in (False, True):
        if value and name == "norm_before_fc":
            rewrite(str(directory), **before_fuse)
        edit_json(directory / "config.json", **{name: value})
        assert_as_reference(Pair(target, str(directory)))
        slow[value] = SlowHead(Pair(target, str(directory))).logits(TOKENS, 0, [9])
    assert not torch.allclose(slow[True], slow[False], atol=1e-2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [
        (4, 1, 16),
        *(pytest.param(*shape, marks=pytest.mark.proofs) for shape in ((2, 2, 48), (8, 2, 24))),
    ],
)
def test_heads_of_other_shapes_than_the_targets(
    target: str, head: Callable[..., Path], heads: int, kv_heads: int, size: int
) -> None:
    directory = head(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size)
    draw = torch.Generator().manual_seed(3)
    rows = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    tensors = {
        f"midlayer.self_attn.{p}_proj.weight": 0.1 * torch.randn(n, 2 * HIDDEN, generator=draw) for p, n in rows.items()
    }
    tensors["midlayer.self_attn.o_proj.weight"] = 0.1 * torch.randn(HIDDEN, heads * size, generator=draw)
    rewrite(str(directory), **tensors)
    assert_as_reference(Pair(target, str(directory)))


def test_a_head_of_another_width_brings_its_own_tables(target: str, head: Callable[..., Path]) -> None:
    """Without them it would share the target's, which are of another width."""
    directory, wide, draw = head("speculators"), 2 * HIDDEN, torch.Generator().manual_seed(2)
    edit_json(directory / "config.json", target_hidden_size=HIDDEN)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    edit_json(
        directory / "config.json", transformer_layer_config={**config["transformer_layer_config"], "hidden_size": wide}
    )
    stored = load_file(directory / "model.safetensors")

    def widened(name: str, shape: torch.Size) -> tuple[int, ...]:
        wider = [wide if n == HIDDEN else 2 * wide if n == 2 * HIDDEN else n for n in shape]
        return (wide, 3 * HIDDEN) if name == "fc.weight" else tuple(wider)

    floats = {name: t for name, t in stored.items() if t.is_floating_point()}
    tensors = {n: 0.1 * torch.randn(widened(n, t.shape), generator=draw) for n, t in floats.items()}
    rewrite(str(directory), **tensors)
    assert_as_reference(Pair(target, str(directory)))
    for name, message in (("embed_tokens.weight", "numbers per token"), ("lm_head.weight", "does not fit")):
        copy = directory.parent / name
        shutil.copytree(directory, copy)
        rewrite(str(copy), name)
        with pytest.raises(ConfigError, match=message):
            opened(target, copy)


# --- what is refused -------------------------------------------------------------------------------------------------


def refusal(target: str, directory: Path) -> str:
    """The error of a start with this draft. The plan without weights says the same, if config.json is the reason."""
    with pytest.raises(ConfigError) as caught:
        load_models(EngineConfig(target, str(directory), dtype="float64"))
    return str(caught.value)


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "P-EAGLE": ("speculators", {"parallel_drafting": True}, "holds a P-EAGLE head .parallel_drafting in config.json."),
    "masks": ("safeailab", {"mask_hidden": True}, "P-EAGLE"),
    "another algorithm": ("speculators", {"speculators_model_type": "dflash"}, "'dflash' head of speculators"),
    "its first format": ("speculators", {"speculators_model_type": "eagle"}, "'eagle' head of speculators, not an 'ea"),
    "MTP": ("safeailab", {"model_type": "qwen3_next_mtp"}, "holds MTP layers of a 'qwen3_next_mtp' model"),
    "quantised": ("safeailab", {"quantization_config": {"quant_method": "awq"}}, "quantised weights are not supported"),
    "fc_norm": ("safeailab", {"fc_norm": True}, "fc_norm in config.json is not supported: give a head"),
    "another family": ("safeailab", {"model_type": "mamba"}, "head of 'mamba' layers; supported are llama"),
    "other norms": ("safeailab", {"model_type": "olmo2"}, "other norms, windows, sinks or experts"),
    "another target": ("speculators", {"target_hidden_size": 128}, "hidden size 128, and the target has 64"),
    "a wider head": ("eagle", {"hidden_size": 128}, "hidden size 128, and the target has 64"),
    "layers outside": (
        "safeailab",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
        r"must be layers from 0 to the target's 6, not \[1, 3, 7\]",
    ),
    "layers twice": ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, "must be different layers"),
    "no list of layers": ("speculators", {"eagle_aux_hidden_state_layer_ids": 3}, "must be layers from 0 to .* not 3"),
    "layers that are lists": ("speculators", {"eagle_aux_hidden_state_layer_ids": [[1], [2]]}, "must be layers from 0"),
    "no states": ("safeailab", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
    "no object": (
        "safeailab",
        {"eagle_config": [1, 2]},
        r"eagle_config in config.json must be an object, not \[1, 2\]",
    ),
    "no layer": (
        "speculators",
        {"transformer_layer_config": "llama"},
        "transformer_layer_config in config.json must be",
    ),
    "a malformed layer": ("speculators", {"transformer_layer_config": {"hidden_size": "wide"}}, "malformed"),
    "no number": ("safeailab", {"draft_vocab_size": "all"}, "draft_vocab_size in config.json must be an integer"),
    "a negative number": ("safeailab", {"draft_vocab_size": -1}, "at least 1, not -1"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_served_is_refused(
    target: str, head: Callable[..., Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weight is read."""
    kind, changes, message = CONFIGS[case]
    directory = head(kind, **changes)
    monkeypatch.setattr(load_module, "load_model", lambda *_, **__: pytest.fail("it was read"))
    for start in (load_models, plan_memory):
        with pytest.raises(ConfigError, match=message) as caught:
            start(EngineConfig(target, str(directory), dtype="float64"))
        assert str(directory) in str(caught.value)


def small(ids: list[int]) -> torch.Tensor:
    """d2t for a head that drafts the target's tokens `ids`."""
    return torch.tensor(ids) - torch.arange(len(ids))


ODD = list(range(1, VOCAB, 2))
TENSORS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "duplicates": ("small vocabulary", {"d2t": small([*ODD[:-1], 1])}, (), "d2t must name 200 different tokens"),
    "a wrong length": ("small vocabulary", {"d2t": small(ODD[:-1])}, (), "d2t must name 200 different tokens"),
    "outside": ("small vocabulary", {"d2t": small([*ODD[:-1], VOCAB])}, (), "d2t must name 200 different tokens"),
    "two dimensions": ("small vocabulary", {"d2t": small(ODD)[:, None].expand(-1, 2)}, (), "d2t must name 200"),
    "no d2t": ("small vocabulary", {}, ("d2t",), "holds no d2t, and drafts 200 of 400 tokens"),
    "no head": ("small vocabulary", {}, ("lm_head.weight",), "holds no lm_head.weight, and the target's does not fit"),
    "another head": ("small vocabulary", {"lm_head.weight": torch.zeros(10, HIDDEN)}, (), "lm_head.weight has shape"),
    "a short embedding": (
        "safeailab",
        {"embed_tokens.weight": torch.zeros(9, HIDDEN)},
        (),
        "has 9 rows, the target 40",
    ),
    "unread": ("safeailab", {"midlayer.self_attn.q_proj.bias": torch.zeros(HIDDEN)}, (), "q_proj.bias"),
    "another state": ("safeailab", {"fc.weight": torch.zeros(HIDDEN, 3 * 96)}, (), "hidden size 96, and the target"),
    "more states": ("safeailab", {"fc.weight": torch.zeros(HIDDEN, 4 * HIDDEN)}, (), "is a head for targets of hidden"),
    "missing": ("safeailab", {}, ("norm.weight",), "holds no tensor 'norm.weight'"),
    "no fc": ("safeailab", {}, ("fc.weight",), "holds no tensor 'fc.weight'"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(target: str, head: Callable[..., Path], case: str) -> None:
    kind, tensors, dropped, message = TENSORS[case]
    directory = head(kind)
    rewrite(str(directory), *dropped, **tensors)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(target, directory)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("kind", ["safeailab", "eagle"])
def test_a_pickle_is_refused_with_what_to_do(target: str, head: Callable[..., Path], kind: str) -> None:
    directory = head(kind)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in (told := refusal(target, directory))
    assert "convert it to safetensors" in told


def test_heads_only_draft(target: str, head: Callable[..., Path]) -> None:
    directory = str(head())
    with pytest.raises(ConfigError, match=r"target .* is a head, which only drafts"):
        load_models(EngineConfig(directory, None))
    with pytest.raises(ConfigError, match=r"draft .* is a head, which cannot be one of several drafts"):
        load_models(EngineConfig(target, drafts=(target, directory)))


# --- memory ----------------------------------------------------------------------------------------------------------

LIMITS: dict[str, Any] = {
    "max_running": 4,
    "max_spec_length": 4,
    "max_step_tokens": 64,
    "max_model_len": 96,
    "cache": "paged",
    "block_size": 16,
    "memory_fraction": 0.05,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_plan_counts_at_least_the_weights_that_are_loaded(
    target: str, head: Callable[..., Path], kind: str
) -> None:
    config = EngineConfig(target, str(head(kind)), dtype="float64", max_model_len=96)
    planned = plan_memory(config)
    loaded = opened(target, Path(config.draft or ""))
    assert [model.role for model in planned.models] == ["target", "draft"]
    assert loaded.weight_bytes <= planned.models[1].weight_bytes
    assert planned.models[1].token_bytes == 2 * HIDDEN * 8 * loaded.config.num_layers


def test_the_activation_budget_covers_rounds_with_a_head(
    target: str, head: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[int] = []

    def measure(*args: Any) -> int:
        budgets.append(measure_largest_rounds(*args))
        return budgets[-1]

    monkeypatch.setattr(load_module, "measure_largest_rounds", measure)
    monkeypatch.setattr("engine.engine.profile", lambda *_: [])
    engine = load(Pair(target, str(head())), **LIMITS)
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.5, max_tokens=6, ignore_eos=True, seed=1)
    for i in range(4):
        engine.submit(Request(f"r{i}", tuple(range(10, 30 + i)), params, k=4, verifier="rejection"))
    sizes = []
    while engine.has_work:
        sizes.append(measure_activations(engine.step, CPU))
    states = max_states(engine.config) * 3 * HIDDEN * 8  # allocated once, by the first pass; the plan counts it apart
    assert budgets[0] > 64 * 3 * HIDDEN * 8  # the states of the largest pass are in it
    assert max(sizes) <= budgets[0] + states
    assert sorted(sizes)[-2] <= budgets[0]
