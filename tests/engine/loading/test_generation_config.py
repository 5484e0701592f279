"""What a checkpoint's generation_config.json recommends becomes the default of requests, or is named as ignored."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.loading.generation_config import sampling_defaults
from tests.engine.driving import load
from tests.engine.pairs import Pair, copy_of, edit_json


def defaults(directory: Path, **fields: Any) -> dict[str, float]:
    (directory / "generation_config.json").write_text(json.dumps(fields), "utf-8")
    return sampling_defaults(directory)


def test_the_fields_that_are_present_are_defaults(tmp_path: Path) -> None:
    qwen = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults(tmp_path, **qwen, do_sample=True, bos_token_id=3, eos_token_id=[3, 4]) == qwen
    assert defaults(tmp_path, min_p=0.1, repetition_penalty=1.05) == {"min_p": 0.1, "repetition_penalty": 1.05}
    assert defaults(tmp_path, temperature=None, top_k=-1) == {"top_k": 0}
    assert defaults(tmp_path) == {}


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


def test_what_is_ignored_is_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        defaults(tmp_path, do_sample=True, pad_token_id=0, transformers_version="5", top_p=0.9, _from_model_config=True)
        assert caplog.text == ""
        assert defaults(tmp_path, do_sample=False, max_new_tokens=2048, typical_p=0.9, temperature=0.7) == {
            "temperature": 0.7
        }
    (record,) = caplog.records
    assert record.getMessage().endswith("generation_config.json: ignored are do_sample, max_new_tokens, typical_p")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must lie between 0 and 2"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_p": "high"}, "generation_config.json"),
        ({"min_p": True}, "true and false are no numbers"),
    ],
)
def test_a_value_that_no_request_may_have(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        defaults(tmp_path, **fields)
    assert str(caught.value).endswith("mend the file, or set generation_config to none")


def test_a_malformed_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is malformed: it must hold a JSON object"):
        sampling_defaults(tmp_path)


def test_the_operator_decides_whether_they_hold(pair: Pair, tmp_path: Path) -> None:
    path = copy_of(pair.target, tmp_path / "tuned")
    edit_json(path / "generation_config.json", temperature=0.6, eos_token_id=[1, 4])
    tuned = Pair(str(path), pair.draft)
    assert load(tuned).sampling_defaults == {"temperature": 0.6}
    untuned = load(tuned, generation_config="none")
    assert untuned.sampling_defaults == {}
    assert untuned.intake.eos_ids == {1, 4}
    edit_json(path / "generation_config.json", temperature=3)
    load(tuned, generation_config="none")
    with pytest.raises(ConfigError, match="generation_config 'vllm' is not one of auto, none"):
        EngineConfig("t", generation_config="vllm")  # type: ignore[arg-type]


def test_the_drafts_file_has_no_say(pair: Pair, tmp_path: Path) -> None:
    path = copy_of(pair.draft, tmp_path / "tuned")
    edit_json(path / "generation_config.json", temperature=0.6)
    assert load(Pair(pair.target, str(path))).sampling_defaults == {}
