"""The conversion of config.json is kept from one start to the next, and never used for another file."""

import json
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.models import config_file, loader
from engine.models.loader import open_checkpoint
from tests.engine.pairs import Shape, edit_json, save_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(save_checkpoint(tmp_path / "llama", Shape(), seed=1))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that transformers has converted."""
    done: list[Path] = []
    convert = loader._transformers_config

    def counted(path: Path) -> object:
        done.append(path)
        return convert(path)

    monkeypatch.setattr(loader, "_transformers_config", counted)
    return done


def test_a_second_start_reads_the_same_configuration_without_converting(
    checkpoint: Path, conversions: list[Path]
) -> None:
    first = open_checkpoint(str(checkpoint))
    assert open_checkpoint(str(checkpoint)) == first
    assert conversions == [checkpoint]


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.125}, {"rope_parameters": {"rope_theta": 77.0}}])
def test_another_configuration_is_converted(
    checkpoint: Path, conversions: list[Path], change: dict[str, object]
) -> None:
    before = open_checkpoint(str(checkpoint))
    edit_json(checkpoint / "config.json", **change)
    assert open_checkpoint(str(checkpoint)).raw != before.raw
    assert len(conversions) == 2


def test_another_version_of_transformers_converts_again(
    checkpoint: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoint(str(checkpoint))
    monkeypatch.setattr(config_file, "version", lambda package: "5.99")
    open_checkpoint(str(checkpoint))
    assert len(conversions) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"key": "0"}', "[" * 100_000, '{"key": "other", "config": {}}'])
def test_a_broken_file_is_replaced(
    checkpoint: Path, conversions: list[Path], content: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_checkpoint(str(checkpoint))
    (kept,) = (checkpoint.parent / "cache" / "foretoken").glob("config-*.json")
    kept.write_text(content, "utf-8")
    assert open_checkpoint(str(checkpoint)) == first
    assert "cannot be used" in caplog.text
    assert open_checkpoint(str(checkpoint)) == first
    assert len(conversions) == 2


def test_a_malformed_configuration_is_refused_each_time(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", rope_parameters="none")
    for _ in range(2):
        with pytest.raises(ConfigError, match="malformed"):
            open_checkpoint(str(checkpoint))


def test_a_configuration_that_refers_to_other_files_is_not_kept(checkpoint: Path, conversions: list[Path]) -> None:
    edit_json(checkpoint / "config.json", configuration_files=["config.4.0.0.json"])
    (checkpoint / "config.4.0.0.json").write_text((checkpoint / "config.json").read_text("utf-8"), "utf-8")
    open_checkpoint(str(checkpoint))
    edit_json(checkpoint / "config.4.0.0.json", rms_norm_eps=0.125)
    assert open_checkpoint(str(checkpoint)).raw["rms_norm_eps"] == 0.125
    assert len(conversions) == 2


def test_a_conversion_of_a_file_that_was_replaced_meanwhile_is_not_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = checkpoint / "config.json"
    before, convert = file.read_text("utf-8"), loader._transformers_config

    def late(path: Path) -> object:
        edit_json(file, rms_norm_eps=0.125)
        return convert(path)

    with monkeypatch.context() as patch:
        patch.setattr(loader, "_transformers_config", late)
        open_checkpoint(str(checkpoint))
    file.write_text(before, "utf-8")
    assert open_checkpoint(str(checkpoint)).raw["rms_norm_eps"] == json.loads(before)["rms_norm_eps"] != 0.125


def test_a_folder_that_cannot_be_written_is_no_fault(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert open_checkpoint(str(checkpoint)) == open_checkpoint(str(checkpoint))


def test_what_is_kept_is_what_transformers_says(checkpoint: Path) -> None:
    raw = open_checkpoint(str(checkpoint)).raw
    assert raw == json.loads(json.dumps(loader._transformers_config(checkpoint).to_dict()))
