"""The built-in prompts are repeatable, of the promised length, and unseen in training."""

import sysconfig
from pathlib import Path

import pytest

from benchmarks import prompts


class Characters:
    """Four characters to a token: its first one's code point and its place do not matter, only the text does."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [ord(text[i]) for i in range(0, len(text), 4)]


def test_prompts_are_repeatable_and_bounded() -> None:
    found = prompts.builtin_prompts(Characters(), 20)
    assert found == prompts.builtin_prompts(Characters(), 20)
    assert len(found) == 20
    assert found[:5] == prompts.builtin_prompts(Characters(), 5)
    assert all(prompts.SHORTEST <= len(p) <= prompts.LONGEST for p in found)
    assert len({len(p) for p in found}) > 5
    assert len({tuple(p) for p in found}) == 20


def test_every_prompt_comes_from_a_held_out_file() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    unseen = [p for p in root.rglob("*.py") if prompts.held_out(p.relative_to(root).as_posix())]
    texts = [p.read_text("utf-8", errors="replace") for p in unseen if "site-packages" not in p.parts]
    tokenizer = Characters()
    prompts.builtin_prompts(tokenizer, 10)
    assert len(tokenizer.texts) >= 10
    assert all(any(given in text for text in texts) for given in tokenizer.texts)


def test_the_split_is_the_one_of_training() -> None:
    """Known members of both sides; another hash or modulus moves some of them."""
    assert all(map(prompts.held_out, ("asyncio/events.py", "functools.py", "graphlib.py", "test/test_enum.py")))
    assert not any(map(prompts.held_out, ("argparse.py", "json/decoder.py", "queue.py", "typing.py")))


def test_no_sources_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.prompts.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="--prompts FILE"):
        prompts.builtin_prompts(Characters(), 1)
    (tmp_path / "graphlib.py").write_text("x = 1\n" * 40)  # held out, but too short for any prompt
    with pytest.raises(ValueError, match="too short"):
        prompts.builtin_prompts(Characters(), 1)


def test_file_prompts_skip_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("abcdefgh\n\n  \nx\n")
    assert prompts.file_prompts(Characters(), path) == [[ord("a"), ord("e")], [ord("x")]]
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        prompts.file_prompts(Characters(), path)
