"""Heads without memory as the `draft` of a configuration: found, loaded, profiled, budgeted, refused."""

import json
import logging
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.drafters.base import Draft, DraftBatch
from engine.engine import Engine
from engine.heads.files import head_kind
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_loading import state_target
from engine.loading import load as loading
from engine.loading.checkpoint_files import CheckpointFiles, check_together
from engine.loading.load import load_models, plan_memory
from engine.memory.budget import layouts
from engine.models.decoder import Decoder
from engine.profiling.round_profile import profile
from engine.types import DRAFTERS, DrafterName, Request, SamplingParams
from policies.config import PolicyConfig
from tests.engine.heads.fitted import (
    Fitted,
    Recorder,
    ReferenceMedusa,
    ReferenceTarget,
    Tensors,
    load_target,
    make_requests,
    mlp_config,
    randn,
    random_medusa,
    random_mlp,
    save_heads,
)
from tests.engine.heads.test_medusa import in_vllms_names
from tests.engine.models.test_adapter import random_checkpoint
from tests.engine.pairs import Pair
from tests.kv import kv_config


def config_of(fitted: Fitted, **changes: Any) -> EngineConfig:
    settings = {"dtype": "float64", "max_model_len": 96, "max_running": 4, "max_spec_length": 6, **kv_config()}
    own = {"target": fitted.checkpoint, "draft": str(fitted.directory), "policy": PolicyConfig("fixed", k=3)}
    return EngineConfig(**{**settings, **own, **changes})


def state_drafter(engine: Engine) -> StateDrafter:
    (found,) = (d for d in engine.drafter.drafters if isinstance(d, StateDrafter))  # type: ignore[attr-defined]
    return found


def run(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], int, set[str]]:
    """(tokens, accepted drafts, who proposed) of requests."""
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    accepted, proposers = 0, set[str]()
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            if output.record is not None:
                accepted += sum(output.record.column("accepted"))
                proposers |= {DRAFTERS[n] for n in output.record.column("proposer") if n >= 0}
    engine.audit()
    return tokens, accepted, proposers


@pytest.mark.parametrize(
    ("fitted", "drafter"),
    [
        ("medusa", "model"),
        ("mlp", "cascade"),
        ("medusa", None),
        *(pytest.param("mlp", name, marks=pytest.mark.proofs) for name in ("model", None)),
        pytest.param("medusa", "cascade", marks=pytest.mark.proofs),
    ],
    indirect=["fitted"],
)
def test_an_engine_drafts_with_the_heads_of_its_draft(fitted: Fitted, drafter: DrafterName | None) -> None:
    """Also where no drafter is named: there is a draft."""
    engine = Engine.from_config(config_of(fitted))
    plain, _, _ = run(engine, make_requests(0.8, k=0, drafter=None))
    tokens, accepted, proposers = run(engine, make_requests(0.8, drafter=drafter))
    assert tokens == plain
    assert accepted
    assert "model" in proposers
    state_drafter(engine).audit(set())


def test_other_drafters_work_beside_heads(fitted: Fitted) -> None:
    engine = Engine.from_config(config_of(fitted))
    plain, _, _ = run(engine, make_requests(0.0, k=0, drafter=None))
    assert run(engine, make_requests(0.0, drafter="ngram"))[0] == plain


def test_the_profile_has_the_cost_of_the_heads(fitted: Fitted) -> None:
    """A profile holds rounds with at most as many drafts as heads; the others show what verification costs."""
    models = load_models(config_of(fitted))
    timings = profile(models.target, models.drafter, 4, 6, budget_s=30.0, kept=False)
    most = fitted.heads.most
    assert {(t.depth, t.forwards) for t in timings if 0 < t.depth <= most} == {(k, k) for k in (1, 2, 4) if k <= most}
    assert any(t.depth > most and not t.forwards for t in timings)
    assert all(t.draft_s > 0 for t in timings if t.forwards)
    models.drafter.audit(set())


def test_heads_without_memory_take_no_kv_memory(fitted: Fitted) -> None:
    if "block_size" not in kv_config():
        pytest.skip("slots have no budget")
    config = config_of(fitted, kv_tokens=960)
    table = plan_memory(config)
    assert len(table.layouts) == len(table.models) == 1
    assert load_models(config).target.cache.free_slots == 4


def test_the_largest_rounds_run_with_heads(
    fitted: Fitted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their drafts and laws are part of the activation budget."""
    if "block_size" not in kv_config():
        pytest.skip("slots have no budget")
    drafted: list[int] = []
    propose = StateDrafter.propose

    def watching(self: StateDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft = propose(self, batch, ks)
        drafted.append(max(draft.ks))
        return draft

    monkeypatch.setattr(StateDrafter, "propose", watching)
    with caplog.at_level(logging.INFO):
        load_models(config_of(fitted, memory_fraction=0.5, max_step_tokens=64))
    assert drafted
    assert set(drafted) == {fitted.heads.most}
    assert any("drafts at most" in record.message for record in caplog.records)


def test_the_bytes_of_heads_are_part_of_the_budget(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def watching(*args: Any) -> Any:
        held.append(args[3])
        return layouts(*args)

    monkeypatch.setattr(loading, "layouts", watching)
    models = load_models(config_of(fitted))
    (drafter,) = (d for d in models.drafter.drafters if isinstance(d, StateDrafter))
    assert held[0] > drafter.heads.weight_bytes > 0


# Which heads a directory holds


@pytest.mark.parametrize(
    ("tensors", "config", "kind"),
    [
        (random_medusa(), {"medusa_num_heads": 2, "medusa_num_layers": 1}, "medusa"),
        (random_medusa(), {}, "medusa"),
        (in_vllms_names(random_medusa()), {"num_heads": 4, "num_hidden_layers": 1, "hidden_size": 64}, "medusa"),
        (in_vllms_names(random_medusa(), prefix="medusa_heads."), {"model_type": "medusa"}, "medusa"),
        (random_mlp(), mlp_config(), "mlp_speculator"),
        (random_mlp(), mlp_config(model_type="other"), "mlp_speculator"),
        ({"model.embed_tokens.weight": randn(4, 4)}, {"model_type": "llama"}, None),
    ],
)
def test_heads_are_known_by_their_files(
    tmp_path: Path, tensors: Tensors, config: dict[str, object], kind: str | None
) -> None:
    assert head_kind(save_heads(tmp_path, tensors, **config)) == kind


def test_heads_are_checked_before_a_start(fitted: Fitted, tmp_path: Path) -> None:
    config = config_of(fitted)
    sides = [CheckpointFiles.read(Path(name)) for name in (fitted.checkpoint, str(fitted.directory))]
    assert sides[1].tokenizer is None
    check_together(config, sides)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps({"medusa_num_heads": 2}), "utf-8")
    torch.save({}, pickled / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt is a pickle, .* convert it to safetensors"):
        CheckpointFiles.read(pickled)


def test_heads_are_no_target_and_no_draft_among_others(fitted: Fitted, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a head, which only drafts for a target"):
        load_models(EngineConfig(target=str(fitted.directory)))
    with pytest.raises(ConfigError, match="is a head, which cannot be one of several drafts"):
        load_models(config_of(fitted, draft=None, drafts=(pair.draft, str(fitted.directory))))
    wide = save_heads(tmp_path / "wide", random_medusa(hidden=32))
    with pytest.raises(ConfigError, match=r"read states of 32 numbers, and those of target .* have 64"):
        load_models(config_of(fitted, draft=str(wide)))


def test_a_target_that_scales_its_logits_gives_scaled_ones(pair: Pair, tmp_path: Path) -> None:
    """Heads over its matrix get the logits that its own states would get."""
    scaled = tmp_path / "granite"
    shutil.copytree(pair.target, scaled)
    content = json.loads((scaled / "config.json").read_text("utf-8"))
    content |= {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "logits_scaling": 4.0}
    content |= {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.25}
    (scaled / "config.json").write_text(json.dumps(content), "utf-8")
    decoder, _ = load_target(str(scaled))
    assert isinstance(decoder, Decoder)
    states = randn(3, 64)
    found = state_target("granite", decoder).logits(decoder.norm(states))
    assert (found - decoder.logits(states)).abs().max() < 1e-9
    assert (found - decoder.head(decoder.norm(states))).abs().max() > 1e-3


def test_a_request_for_logprobs_and_heads_share_a_round(fitted: Fitted) -> None:
    engine = Engine.from_config(config_of(fitted))
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    assert run(engine, [Request("r", (5, 6, 7), params, 3, drafter="model")])[1] >= 0


@pytest.mark.parametrize("kind", ["gpt_neox", pytest.param("opt", marks=pytest.mark.proofs)])
def test_heads_for_a_target_that_is_not_native(kind: str, tmp_path: Path) -> None:
    """Their states are those of transformers' module behind its final norm."""
    checkpoint, tensors = random_checkpoint(kind, tmp_path / kind), random_medusa(hidden=32)
    directory = save_heads(tmp_path / "medusa", tensors, medusa_num_heads=4)
    fitted = Fitted(checkpoint, directory, ReferenceTarget(checkpoint), ReferenceMedusa(tensors, 4, 2))
    engine = Engine.from_config(config_of(fitted))
    plain, _, _ = run(engine, make_requests(0.0, k=0, drafter=None, count=4))
    recorder = Recorder(engine)
    assert run(engine, make_requests(0.0, count=4))[0] == plain
    assert recorder.check(fitted) > 60


@pytest.mark.parametrize("trees", [False, True])
def test_the_policy_chooses_the_drafts_of_heads(fitted: Fitted, trees: bool) -> None:
    engine = Engine.from_config(config_of(fitted, policy=PolicyConfig("goodput", trees=trees), max_spec_length=8))
    plain, _, _ = run(engine, make_requests(0.0, k=0, drafter=None))
    recorder = Recorder(engine)
    assert run(engine, make_requests(0.0, k=None))[0] == plain
    recorder.check(fitted)
