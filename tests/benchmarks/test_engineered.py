"""The engineered pair at a tiny shape: its acceptance, its text, its weights."""

import json
from collections import Counter
from functools import cache
from math import log
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import engineered
from benchmarks.stats import acceptance_rate
from engine.llm import LLM, Completion
from engine.models.tokenizer import Tokenizer
from engine.types import SamplingParams

VOCAB, TEXTS, TOKENS, K = 1024, 16, 128, 4
ACCEPTANCES = (0.3, 0.9)
SHAPE = ["--layers=2", "--hidden=128", "--intermediate=128", f"--vocab={VOCAB}", "--draft-layers=1"]
NARROW = ["--draft-hidden=128", "--draft-intermediate=64", "--acceptance=.3,.6,.9"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engineered")
    engineered.main([str(out), *SHAPE, *NARROW])
    return out


@cache
def texts(pair: Path, acceptance: float, temperature: float) -> list[Completion]:
    llm = LLM(
        str(pair / "target"), str(pair / f"draft-{acceptance:g}"), threads=1, max_running=TEXTS, max_spec_length=K
    )
    prompts = torch.randint(2, VOCAB, (TEXTS, 4), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=1, ignore_eos=True)
    return llm.generate(prompts, params, K)


def measured(completions: list[Completion]) -> float | None:
    return acceptance_rate(
        [drafted for c in completions for drafted in c.drafted],
        [accepted for c in completions for accepted in c.accepted],
    )


def test_greedy_drafts_are_accepted_as_asked_for(pair: Path) -> None:
    found = [measured(texts(pair, acceptance, 0.0)) for acceptance in ACCEPTANCES]
    assert found == pytest.approx(ACCEPTANCES, abs=0.03)


def test_sampled_drafts_are_accepted_about_as_often(pair: Path) -> None:
    assert measured(texts(pair, 0.6, 0.8)) == pytest.approx(0.6, abs=0.06)


def test_greedy_text_has_no_repeated_token_and_sampled_text_is_varied(pair: Path) -> None:
    assert all(len(set(c.token_ids)) == TOKENS for c in texts(pair, 0.9, 0.0))
    counts = Counter(token for c in texts(pair, 0.9, 0.8) for token in c.token_ids)
    total = counts.total()
    assert -sum(n / total * log(n / total) for n in counts.values()) > 0.8 * log(VOCAB)  # nats


def test_each_emitted_token_has_text(pair: Path) -> None:
    tokenizer = Tokenizer(str(pair / "target"))
    for completion in texts(pair, 0.9, 0.8):
        assert tokenizer.encode(completion.text)
        assert "\N{REPLACEMENT CHARACTER}" not in completion.text


def test_weights_have_their_full_size_and_depend_on_the_seed_alone(pair: Path, tmp_path: Path) -> None:
    engineered.main([str(tmp_path / "same"), *SHAPE, *NARROW])
    engineered.main([str(tmp_path / "other"), *SHAPE, *NARROW, "--seed=1"])
    first, same, other = (
        load_file(root / "target" / "model.safetensors") for root in (pair, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["model.layers.1.mlp.down_proj.weight"].shape == (128, 128)
    assert float(first["model.layers.1.self_attn.q_proj.weight"].std()) == pytest.approx(128**-0.5, rel=0.05)


def test_a_vocabulary_larger_than_the_demo_pairs_has_text_for_each_id() -> None:
    tokenizer = engineered.make_tokenizer(5000)
    assert tokenizer.get_vocab_size() == 5000
    words = [tokenizer.decode([i]) for i in range(4096, 5000)]
    assert len(set(words)) == len(words)
    assert all(words)


def test_a_shape_that_cannot_be_built_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engineered.main([str(tmp_path), "--hidden", "100"])
    assert "hidden is 100" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_acceptance_beyond_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        engineered.main([str(tmp_path), "--acceptance", "1.5"])


def test_the_checkpoint_says_what_it_is(pair: Path) -> None:
    config = json.loads((pair / "target" / "config.json").read_text("utf-8"))
    assert (config["model_type"], config["num_hidden_layers"], config["vocab_size"]) == ("llama", 2, VOCAB)
