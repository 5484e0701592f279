"""The training script end to end with a budget of a few steps, and the laws of its parts."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.loading.generation_config import sampling_defaults
from scripts import pair_data, train_demo_pair
from scripts.eval_pair import main as evaluate
from scripts.pair_data import corpus, held_out, held_out_tokens, train_tokenizer, training_tokens, windows
from scripts.train_demo_pair import (
    TEMPERATURE,
    TrainingBudget,
    draft_loss,
    learning_rate_scale,
    load_weights,
    main,
    new_model,
)

# A hundredth of the demo pair's numbers; test_the_shapes_are_those_of_the_demo_pair holds the real ones.
VOCAB = 320
SMALL: dict[str, dict[str, Any]] = {
    "target": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    "draft": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 24},
}
SMALL["draft2"] = SMALL["draft"]
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TEXT = "def f{i}(x):\n    return [x * {i} for _ in range({i})]  # a comment, so that the file is long enough to count\n"


@pytest.fixture(scope="module", autouse=True)
def real_shapes() -> Iterator[tuple[int, dict[str, dict[str, Any]]]]:
    """Let the scripts train small models. Yields the vocabulary and the shapes that they have elsewhere."""
    found = pair_data.VOCAB, train_demo_pair.SHAPES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_demo_pair, "SHAPES", SMALL)
        for module in (pair_data, train_demo_pair):
            patch.setattr(module, "VOCAB", VOCAB)
        yield found


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_shapes_are_those_of_the_demo_pair(real_shapes: tuple[int, dict[str, dict[str, Any]]], role: str) -> None:
    vocab, shapes = real_shapes
    kept = json.loads((DEMO / role / "config.json").read_text("utf-8"))
    assert {name: kept[name] for name in shapes[role]} == shapes[role]
    assert kept["vocab_size"] == vocab
    assert shapes["draft2"] == shapes["draft"]  # it begins as a copy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine files to train on and one that is held out."""
    root = tmp_path_factory.mktemp("source")
    names = [f"m{i}.py" for i in range(500)]
    for name in [n for n in names if not held_out(n)][:9] + [n for n in names if held_out(n)][:1]:
        (root / name).write_text("".join(TEXT.format(i=i) for i in range(len(name), 12)))
    return root


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pair")
    common = [f"--out={out}", f"--corpus={source}", "--steps=2", "--batch=2", "--context=32"]
    for part in ("tokenizer", "target", "draft"):
        main([part, *common])
    main(["draft", "--resume", *common])
    main(["draft2", *common])
    return out


@pytest.mark.parametrize("role", SMALL)
def test_training_ends_in_checkpoints_that_transformers_runs(trained: Path, role: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(trained / role)
    tokenizer = AutoTokenizer.from_pretrained(trained / role)
    assert {name: getattr(model.config, name) for name in SMALL[role]} == SMALL[role]
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    text = "def f(x):\n    return 'é'\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=1)
    assert out.shape[1] == ids.shape[1] + 3


def test_the_checkpoint_is_the_trained_model_rounded(trained: Path) -> None:
    exported: Any = AutoModelForCausalLM.from_pretrained(trained / "draft")
    kept = dict(load_weights(new_model("draft"), trained / "work" / "draft.safetensors").named_parameters())
    untrained = dict(new_model("draft").named_parameters())
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, kept[name].to(torch.bfloat16))
    assert any(not torch.equal(kept[name], untrained[name]) for name in kept)


def test_the_second_draft_begins_as_the_first(trained: Path, source: Path) -> None:
    """A learning rate of 0 leaves it there; that of the fixture does not."""
    work, first = trained / "work", load_weights(new_model("draft"), trained / "work" / "draft.safetensors")
    moved = load_weights(new_model("draft2"), work / "draft2.safetensors")
    main(["draft2", f"--out={trained}", f"--corpus={source}", "--steps=1", "--batch=2", "--context=32", "--lr=0"])
    still = load_weights(new_model("draft2"), work / "draft2.safetensors")
    weights = [dict(model.named_parameters()) for model in (first, still, moved)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_training_goes_on_from_what_it_wrote_if_asked_to(trained: Path, source: Path, tmp_path: Path) -> None:
    """A learning rate of 0 leaves a model as training began with it."""
    began: dict[bool, dict[str, torch.Tensor]] = {}
    for options in (["--resume"], []):
        work = Path(shutil.copytree(trained, tmp_path / str(len(began)))) / "work"
        common = [f"--out={work.parent}", f"--corpus={source}", "--steps=1", "--batch=2", "--context=32", "--lr=0"]
        main(["draft", *common, *options])
        began[bool(options)] = load_file(work / "draft.safetensors")
    written = load_file(trained / "work" / "draft.safetensors")
    assert all(torch.equal(began[True][name], written[name]) for name in written)
    assert any(not torch.equal(began[False][name], written[name]) for name in written)


def test_the_target_asks_for_its_temperature(trained: Path) -> None:
    assert sampling_defaults(trained / "target") == sampling_defaults(DEMO / "target") == {"temperature": TEMPERATURE}


@pytest.mark.parametrize(("options", "seed"), [([], 1), (["--resume"], 2), (["--seed=0"], 0)])
def test_the_seed_of_the_windows(
    trained: Path, source: Path, options: list[str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def windows_of(_tokens: object, _batch: int, _context: int, given: int) -> None:
        seeds.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_demo_pair, "windows", windows_of)
    with pytest.raises(KeyboardInterrupt):
        main(["draft", f"--out={trained}", f"--corpus={source}", *options])
    assert seeds == [seed]


def test_a_checkpoint_of_another_shape_is_refused(trained: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        load_weights(new_model("draft"), trained / "work" / "target.safetensors")


def test_the_evaluation_of_the_pair_ends_in_one_line_of_json(
    trained: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate([str(trained), f"--corpus={source}", "--prefixes=2", "--prefix-tokens=8", "--new-tokens=12"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures["acceptance"]) == {"0.0", "0.7", "1.0"}
    for shares in figures["acceptance"].values():
        assert 0 <= shares["match"] <= shares["rejection"] + 1e-6 <= 1 + 1e-5
    assert figures["held_out_bytes"] == sum(len(text.encode()) for name, text in corpus(source) if held_out(name))


class Fixed(nn.Module):
    """A model whose logits are given, whatever it reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, ids: torch.Tensor) -> "Fixed":
        return self


def test_the_draft_loss_is_its_formula() -> None:
    p, q = torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[0.25, 0.25, 0.5]]])
    loss, extra = draft_loss(Fixed(q.log()), Fixed(p.log()), torch.zeros(1, 2, dtype=torch.long))
    weight = math.exp(-3 * 0.75)
    cross_entropy = -(0.5 * math.log(0.25) + 0.25 * math.log(0.25) + 0.25 * math.log(0.5))
    assert extra["alpha"] == pytest.approx(0.75)
    assert loss.item() == pytest.approx(weight * cross_entropy + (1 - weight) * 0.25)


def test_the_second_drafts_loss_weighs_where_the_first_one_fails() -> None:
    """Two positions: the first draft's best token is the target's at one of them."""
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]]).log()
    first = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.1, 0.8, 0.1], [0.5, 0.25, 0.25]]]).log()
    window = torch.zeros(1, 3, dtype=torch.long)
    _, told = draft_loss(Fixed(q), Fixed(p), window, Fixed(first), boost=3.0)
    assert told["alpha"] == pytest.approx((3 * (0.1 + 0.25 + 0.1) + 1) / 4)
    assert (told["rescued"], told["kept"]) == (0.0, 1.0)
    assert draft_loss(Fixed(q), Fixed(p), window)[1]["alpha"] == pytest.approx((0.45 + 1) / 2)


def test_a_step_down_the_draft_loss_raises_the_acceptance() -> None:
    target, draft = Fixed(torch.tensor([[[2.0, 0.0, -1.0]]])), Fixed(torch.zeros(1, 1, 3))
    window = torch.zeros(1, 2, dtype=torch.long)
    loss, before = draft_loss(draft, target, window)
    loss.backward()
    assert draft.logits.grad is not None
    assert target.logits.grad is None
    with torch.no_grad():
        draft.logits.sub_(0.5 * draft.logits.grad)
    assert draft_loss(draft, target, window)[1]["alpha"] > before["alpha"]


def test_the_budget_ends_by_steps_or_by_minutes() -> None:
    by_steps = TrainingBudget(minutes=1e9, steps=4, start=0.0)
    assert [by_steps.used(step) >= 1 for step in (0, 3, 4)] == [False, False, True]
    assert TrainingBudget(minutes=1e-9, steps=None, start=0.0).used(0) >= 1


def test_the_learning_rate_warms_up_holds_and_falls_to_two_percent() -> None:
    assert learning_rate_scale(0, 0.0) == pytest.approx(1 / 30)
    assert learning_rate_scale(29, 0.01) == 1.0
    assert learning_rate_scale(500, 0.55) == 1.0
    assert learning_rate_scale(500, 0.775) == pytest.approx(0.5)
    assert learning_rate_scale(500, 0.9999) == pytest.approx(0.02)


def test_held_out_text_is_never_trained_on(source: Path) -> None:
    tokenizer = train_tokenizer(source)
    trained = tokenizer.decode(training_tokens(tokenizer, source).tolist())
    held, n_bytes = held_out_tokens(tokenizer, source)
    texts = {name: text for name, text in corpus(source) if held_out(name)}
    assert len(texts) == 1
    assert tokenizer.decode(held.tolist()) == "".join(texts.values())
    assert n_bytes == len("".join(texts.values()))
    assert trained.count("def f11(x)") == 2 * 9  # every other file twice


def test_a_corpus_without_held_out_files_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match="held out"):
        held_out_tokens(train_tokenizer(source), tmp_path)


def test_windows_are_runs_of_the_text(source: Path) -> None:
    tokens = training_tokens(train_tokenizer(source), source)
    batch = next(windows(tokens, batch=3, context=8, seed=0))
    assert batch.shape == (3, 9)
    runs = {tuple(tokens[i : i + 9].tolist()) for i in range(len(tokens) - 8)}
    assert {tuple(row) for row in batch.tolist()} <= runs
    with pytest.raises(ValueError, match="too few"):
        next(windows(tokens[:9], batch=1, context=8, seed=0))
