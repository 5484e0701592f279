"""Training look-ahead embeddings with a budget of a few steps: the laws, and files that the engine reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.heads.pass_heads import load_pass
from engine.heads.state_loading import state_target
from engine.models.loader import load_decoder, open_checkpoint
from scripts.train_pass import AnchoredTarget, laws, main
from tests.engine.pairs import Shape, random_model, save_tokenizer

TEXT = "def f(x):\n    return [x for _ in range(x)]  # the cat sat on the mat\n" * 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    random_model(Shape(), seed=1).save_pretrained(directory)
    save_tokenizer(directory)
    (directory / "text.txt").write_text(TEXT, "utf-8")
    return directory


def run(target: Path, out: Path, *more: str) -> None:
    text = [f"--target={target}", f"--text={target / 'text.txt'}", f"--out={out}", "--context=24", "--anchors=5"]
    main([*text, "--tokens=3", "--steps=3", *more])


def test_laws_are_those_of_each_text_read_anew(target: Path) -> None:
    """With anchors side by side as with one at a time: no look-ahead token sees those of another anchor."""
    known, tokens = AnchoredTarget(target), 0.1 * torch.randn(3, 64)
    ids, anchors = torch.arange(2, 42).view(2, 20), torch.tensor([4, 9, 10])
    model = random_model(Shape(), seed=1).eval()
    with torch.no_grad():
        pairs = list(laws(known, tokens, ids, anchors))
        for i, (logp, logq) in enumerate(pairs):
            for row, text in enumerate(ids):
                own = model(text[None]).logits[0].log_softmax(-1)
                for place, anchor in enumerate(anchors.tolist()):
                    states = torch.cat((known.embedding[text[: anchor + 1]], tokens))
                    wanted = model(inputs_embeds=states[None]).logits[0, anchor + 1 + i].log_softmax(-1)
                    assert torch.allclose(logq[row * 3 + place], wanted, atol=1e-3)
                    assert torch.allclose(logp[row * 3 + place], own[anchor + 1 + i], atol=1e-3)


def test_the_engine_reads_what_was_trained(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(target, tmp_path, "--steps=20")
    progress, held = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert progress["step"] == 20
    assert progress["seconds_left"] >= 0
    assert {len(values) for values in held["held_out"].values()} == {3}
    decoder = load_decoder(open_checkpoint(str(target)), dtype=torch.float32, device=torch.device("cpu"), max_len=64)
    loaded = load_pass(
        *(tmp_path, state_target("target", decoder), decoder.logits), dtype=torch.float32, device=torch.device("cpu")
    )
    kept = load_file(tmp_path / "work" / "embeddings.safetensors")["embeddings"]
    assert torch.equal(loaded.embeddings, kept)
    run(target, tmp_path, "--resume", "--steps=1", "--lr=0")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["embeddings"], kept)
    with pytest.raises(ValueError, match="choose its --tokens"):
        run(target, tmp_path, "--resume", "--tokens=2")
