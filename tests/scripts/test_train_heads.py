"""Training Medusa heads with a budget of a few steps: the loss, the data, and files that the engine reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.heads.medusa import load_medusa
from engine.heads.state_heads import StateTarget
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder, open_checkpoint
from scripts.train_heads import Heads, Target, batches, heads_loss, laws, main, read_text
from tests.engine.pairs import Shape, random_model, save_tokenizer

TEXT = "def f(x):\n    return [x for _ in range(x)]  # the cat sat on the mat\n" * 60
HIDDEN = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    random_model(Shape(), seed=1).save_pretrained(directory)
    save_tokenizer(directory)
    (directory / "text.txt").write_text(TEXT, "utf-8")
    return directory


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("heads")
    run(target, out)
    return out


def run(target: Path, out: Path, *more: str) -> None:
    text = [f"--target={target}", f"--text={target / 'text.txt'}", f"--out={out}", "--context=32", "--heads=3"]
    main([*text, "--layers=2", "--steps=3", "--lr=0.01", *more])


def decoder_of(target: Path) -> Decoder:
    opened = open_checkpoint(str(target))
    return load_decoder(opened, dtype=torch.float32, device=torch.device("cpu"), max_len=64)


def test_the_engine_computes_what_was_trained(target: Path, trained: Path) -> None:
    decoder, matrix = decoder_of(target), Target(target).matrix
    known = StateTarget("target", decoder.config, decoder.head)
    loaded = load_medusa(trained, known, dtype=torch.float32, device=torch.device("cpu"))
    heads = Heads(HIDDEN, 3, 2)
    heads.load(weights(trained), trained)
    states = torch.randn(5, HIDDEN)
    with torch.no_grad():
        for k, block in enumerate(heads.each):
            assert torch.allclose(loaded.logits(states)[:, k], block(states) @ matrix.T, rtol=0.05, atol=0.05)  # bf16
    assert loaded.most == 3
    assert any(tensor.any() for tensor in heads.tensors().values())


def weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "work" / "heads.safetensors")


def test_config_and_figures(trained: Path, target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((trained / "config.json").read_text("utf-8"))
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)
    assert config["base_model_name_or_path"] == target.name
    run(target, tmp_path, "--steps=20")
    progress, held = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert progress["step"] == 20
    assert len(progress["accepted"]) == 3
    assert progress["seconds_left"] >= 0
    assert {len(values) for values in held["held_out"].values()} == {3}
    assert all(0 <= value <= 1 for values in held["held_out"].values() for value in values)


def test_resuming_goes_on_from_the_kept_weights(target: Path, trained: Path) -> None:
    before = weights(trained)
    run(target, trained, "--resume", "--lr=0")
    after = weights(trained)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="does not hold 2 heads of this shape: choose its --heads"):
        run(target, trained, "--resume", "--heads=2")


def test_training_makes_heads_agree_more(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(target, tmp_path, "--steps=60", "--layers=1", "--lr=0.003")
    first, *_, last, _ = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(b > a for a, b in zip(first["accepted"], last["accepted"], strict=True))


def test_head_k_learns_the_law_of_the_token_after_next_but_k(target: Path) -> None:
    """Its states and the target's laws lie 1 + k positions apart. An untrained head is the target's own."""
    model = Target(target)
    states, heads = model.states(torch.randint(400, (2, 10))), Heads(HIDDEN, 3, 1)
    for k, (logp, logq) in enumerate(laws(heads, model.matrix, states)):
        own = (states @ model.matrix.T).log_softmax(-1)
        for row in range(2):
            for t in range(9 - k):
                place = row * (9 - k) + t
                assert torch.allclose(logp[place], own[row, t + 1 + k], atol=1e-5)
                assert torch.allclose(logq[place], own[row, t], atol=1e-5)


def test_the_loss_is_the_weighted_sum_of_the_heads_losses(target: Path) -> None:
    model = Target(target)
    states, heads = model.states(torch.randint(400, (2, 10))), Heads(HIDDEN, 3, 1)
    loss, accepted = heads_loss(heads, model.matrix, states)
    wanted = 0.0
    for k, (logp, logq) in enumerate(laws(heads, model.matrix, states)):
        p, q = logp.exp().double(), logq.exp().double()
        alpha = torch.minimum(p, q).sum(-1).mean().item()
        share = np.exp(-3 * alpha)
        wanted += 0.8**k * (share * -(p * logq).sum(-1).mean().item() + (1 - share) * (1 - alpha))
        assert accepted[k] == pytest.approx(alpha, abs=1e-5)
    assert loss.item() == pytest.approx(wanted, rel=1e-4)


def test_the_targets_states_are_those_behind_its_final_norm(target: Path) -> None:
    """As the engine watches them for its heads."""
    model: Any = random_model(Shape(), seed=1).eval()
    ids = torch.randint(400, (1, 7))
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(Target(target).states(ids), wanted, atol=1e-5)


def test_batches_come_from_texts_and_rows() -> None:
    text, rows = np.arange(100), np.arange(1000, 1400).reshape(10, 40)
    source = batches([text, rows], 2, 8, seed=1)
    drawn = [next(source) for _ in range(200)]
    assert {tuple(ids.shape) for ids in drawn} == {(2, 8)}
    assert all((ids[:, 1:] - ids[:, :-1] == 1).all() for ids in drawn)
    of_rows = sum(int(ids.min()) >= 1000 for ids in drawn)
    assert 130 < of_rows < 190  # they have four fifths of the tokens
    with pytest.raises(ValueError, match="100 tokens are too few for windows of 128"):
        next(batches([text], 2, 128, seed=1))


def test_the_end_of_a_text_file_is_held_out(target: Path) -> None:
    text, held = read_text(target, target / "text.txt")
    assert len(held) == pytest.approx(len(text) / 9, abs=2)


def test_a_target_with_scaled_logits_is_refused(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = Target.states
    monkeypatch.setattr(Target, "states", lambda self, ids: 2 * states(self, ids))
    with pytest.raises(ValueError, match="scales, caps or shifts its logits"):
        Target(target)
