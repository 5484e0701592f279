"""The data of the demo pair: the source of Python's standard library, a tokenizer trained on it, and token windows."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
BOS, EOS = 0, 1
SPECIAL = ("<|bos|>", "<|eos|>")  # their ids are BOS and EOS
STDLIB = Path(sysconfig.get_paths()["stdlib"])

PairTokens = NDArray[np.uint16]

# A line break keeps its indentation, a word keeps one leading space, digits form groups of up to three, and a run of
# punctuation stays together. The tokenizer then splits each piece into merges of bytes.
_PIECES = r"\n[ \t]*| ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|[ \t]+"


def corpus(root: Path = STDLIB) -> Iterator[tuple[str, str]]:
    """Yield (path below root, text) of every .py file of 201 to 399,999 characters, in the order of the paths."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "lib2to3/tests/data" in name:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # test data in other encodings
        if 200 < len(text) < 400_000:
            yield name, text


def held_out(name: str) -> bool:
    """Whether a file is held out: one in fifty, by the hash of its path, so it is the same in every Python version."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50 == 0


def _is_test(name: str) -> bool:
    return "/test" in "/" + name


def train_tokenizer(root: Path = STDLIB) -> Tokenizer:
    """Train a byte-level BPE on the training files except tests, whose words are not those of ordinary programs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for name, text in corpus(root) if not _is_test(name) and not held_out(name))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_tokens(tokenizer: Tokenizer, root: Path = STDLIB) -> PairTokens:
    """Return all training documents in a fixed shuffled order. Tests occur once, other files twice."""
    documents: list[PairTokens] = []
    for name, text in corpus(root):
        if not held_out(name):
            documents += [_document(tokenizer, text)] * (1 if _is_test(name) else 2)
    order = np.random.default_rng(0).permutation(len(documents))
    return np.concatenate([documents[i] for i in order])


def held_out_tokens(tokenizer: Tokenizer, root: Path = STDLIB) -> tuple[PairTokens, int]:
    """Return the held-out documents in order, and their length in bytes. Raises ValueError if there are none."""
    texts = [text for name, text in corpus(root) if held_out(name)]
    if not texts:
        raise ValueError(f"no file under {root} is held out; give a folder with more Python files")
    return np.concatenate([_document(tokenizer, text) for text in texts]), sum(len(t.encode()) for t in texts)


def _document(tokenizer: Tokenizer, text: str) -> PairTokens:
    return np.array([BOS, *tokenizer.encode(text).ids, EOS], np.uint16)


def windows(tokens: PairTokens, batch: int, context: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield random windows without end, int64 [batch, context + 1]. The label of a token is the one to its right."""
    if len(tokens) < context + 2:
        raise ValueError(
            f"{len(tokens)} tokens are too few for windows of {context + 1}: at least {context + 2} needed"
        )
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - context - 1, batch)
        yield torch.from_numpy(np.stack([tokens[i : i + context + 1] for i in starts]).astype(np.int64))
