"""The built-in prompts: slices of Python standard library sources that the demo pair was not trained on."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

SHORTEST, LONGEST = 64, 128  # tokens of a built-in prompt
CHARS_PER_TOKEN = 8  # more than any tokenizer that compresses code needs

Prompts = Sequence[Sequence[int]]  # token ids by prompt


class PromptTokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...


def held_out(relative_path: str) -> bool:
    """Whether a standard library file belongs to the 2 % that scripts/train_demo_pair.py keeps out of training."""
    return _digest(relative_path) % 50 == 0


def builtin_prompts(tokenizer: PromptTokenizer, count: int) -> list[list[int]]:
    """`count` prompts of SHORTEST to LONGEST tokens. The files are visited in turn, each time at another line.

    Deterministic for one Python version and tokenizer. Raises ValueError when the library's sources are not installed.
    """
    sources = dict(held_out_sources())
    if not sources:
        raise ValueError("no source file of the standard library was found: pass --prompts FILE")
    order = sorted(sources, key=_digest)
    prompts: list[list[int]] = []
    draw = 0
    while len(prompts) < count:
        name = order[draw % len(order)]
        prompt = _slice(tokenizer, sources[name], _digest(f"{name}#{draw}"))
        draw += 1
        if len(prompt) >= SHORTEST:
            prompts.append(prompt)
        elif draw > 100 * (count + len(order)):
            raise ValueError("the standard library's sources are too short for this tokenizer: pass --prompts FILE")
    return prompts


def file_prompts(tokenizer: PromptTokenizer, path: Path) -> list[list[int]]:
    """One prompt per line that is not blank. Raises ValueError for a file without any."""
    prompts = [tokenizer.encode(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _slice(tokenizer: PromptTokenizer, text: str, draw: int) -> list[int]:
    lines = text.splitlines(keepends=True)
    window = "".join(lines[draw % len(lines) :])[: LONGEST * CHARS_PER_TOKEN]
    return tokenizer.encode(window)[: SHORTEST + draw // len(lines) % (LONGEST - SHORTEST + 1)]


def held_out_sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "lib2to3/tests/data" in name or not held_out(name):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:  # encoding tests of the library itself
            continue
        if 200 < len(text) < 400_000:
            yield name, text


def _digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)
