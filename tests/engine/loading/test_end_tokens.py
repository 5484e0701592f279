"""Which tokens end a text, and what the start says about them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.loading.end_tokens import end_tokens
from engine.models.loader import open_checkpoint
from engine.models.tokenizer import Tokenizer
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load
from tests.engine.pairs import EOS, Pair, copy_of, edit_json

PROMPT = (5, 6, 7)


def ends(path: Path) -> frozenset[int]:
    return end_tokens(open_checkpoint(str(path)), Tokenizer(str(path)))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([EOS, 4], 5, {EOS, 4}),
        (EOS, 5, {EOS}),
        (None, EOS, {EOS}),
        (None, [EOS, 4], {EOS, 4}),
        ([], EOS, {EOS}),
        (0, None, {0, EOS}),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    pair: Pair, tmp_path: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    path = copy_of(pair.target, tmp_path / "ends")
    edit_json(path / "generation_config.json", eos_token_id=generation)
    edit_json(path / "config.json", eos_token_id=config)
    assert ends(path) == expected
    if generation is None:
        (path / "generation_config.json").unlink()
        assert ends(path) == expected


def test_without_a_configured_end_token_the_tokenizer_s_ends_a_text(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_of(pair.target, tmp_path / "ends")
    edit_json(path / "generation_config.json", eos_token_id=None)
    edit_json(path / "config.json", eos_token_id=None)
    assert ends(path) == {EOS}
    (path / "generation_config.json").unlink()
    assert load(Pair(str(path), pair.draft)).intake.eos_ids == {EOS}
    assert "end token" not in caplog.text
    edit_json(path / "tokenizer_config.json", eos_token=None)
    assert ends(path) == frozenset()
    assert f"{path} names no end token" in caplog.text


def test_the_tokenizer_s_end_token_ends_a_text_beside_the_configured_ones(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fine-tune for ChatML: its configuration is that of the base model."""
    path = copy_of(pair.target, tmp_path / "ends")
    assert ends(path) == {EOS}
    assert not caplog.text
    for file in ("config.json", "generation_config.json"):
        edit_json(path / file, eos_token_id=7)
    assert ends(path) == {EOS, 7}
    assert f"end token {Tokenizer(str(path)).name(EOS)!r} ({EOS}) is not among the eos_token_id 7" in caplog.text


def test_a_greedy_text_ends_where_transformers_ends_it(pair: Pair, tmp_path: Path) -> None:
    """For a checkpoint whose configuration names the tokenizer's end token, as ordinary ones do."""
    path = copy_of(pair.target, tmp_path / "ends")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0].tolist()
    edit_json(path / "generation_config.json", eos_token_id=[EOS, plain[len(PROMPT) + 9]])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0, len(PROMPT) :].tolist()
    params = SamplingParams(temperature=0, max_tokens=24)
    text = drive(load(Pair(str(path), pair.draft)), [Request("r", PROMPT, params)]).tokens["r"]
    assert text == expected
    assert len(text) <= 10
