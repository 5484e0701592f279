"""The training data of draft heads: rows of text that the target continued, rows of plain text, and hidden states.

Everything lies in shards of SHARD_ROWS rows in a work folder, so that it is made once. A row has CONTEXT tokens.
Files are held out as in scripts/pair_data.py: one in fifty, by the hash of its name. They are in no shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.llm import LLM
from engine.types import SamplingParams
from scripts.pair_data import corpus, held_out

CONTEXT = 512  # tokens of a row
SHARD_ROWS = 128
PREFIX = (16, 256)  # tokens of a prefix that the target continues: at least, less than
TEMPERATURES = (0.0, 0.7, 1.0)  # of continued rows, in turn
PIECE = 20_000  # characters; a single text file is cut into so long pieces, which are held out like files
FEATURE_BATCH = 4  # rows per pass of the target
LARGEST = 65_504.0  # of float16; a larger hidden state (an attention sink of some large models) is stored as this

HeadsTokens = NDArray[np.int32]
Writer = Callable[[HeadsTokens, np.random.Generator], HeadsTokens]


@dataclass(frozen=True)
class FrozenTarget:
    """A frozen target in fp32 with its tokenizer."""

    path: Path
    model: Any
    tokenizer: Tokenizer

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]"""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> torch.Tensor:
        """[vocab, hidden]"""
        return self.model.get_output_embeddings().weight


def load_target(path: Path) -> FrozenTarget:
    """Load a checkpoint of transformers. Raises ValueError if the directory is none, or if its head is not one matrix
    on its last hidden state."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ValueError(f"target {path} has no {name}: give the directory of a Hugging Face causal LM")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    target = FrozenTarget(path, model, Tokenizer.from_file(str(path / "tokenizer.json")))
    ids = torch.arange(8)[None] % target.config.vocab_size
    output = model(ids, output_hidden_states=True)
    if not torch.allclose(output.hidden_states[-1] @ target.head.T, output.logits, rtol=1e-3, atol=1e-3):
        raise ValueError(f"target {path} scales, caps or shifts its logits: a head on its matrix cannot follow it")
    return target


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text): pieces of a file, or the .py files of a directory, or its .txt and .md files if it has none.

    Raises ValueError if there is no text.
    """
    found = 0
    for found, document in enumerate(_texts(path), 1):  # noqa: B007 - the count is used after the loop
        yield document
    if not found:
        raise ValueError(f"no text at {path}: give a text file, or a directory with .py, .txt or .md files")


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_file():
        text = path.read_text("utf-8")
        for start in range(0, len(text), PIECE):
            yield f"{path.name}#{start // PIECE}", text[start : start + PIECE]
    elif any(path.rglob("*.py")):
        yield from corpus(path)
    else:
        for file in sorted([*path.rglob("*.txt"), *path.rglob("*.md")]):
            yield file.relative_to(path).as_posix(), file.read_text("utf-8", errors="replace")


def read_tokens(target: FrozenTarget, path: Path, held: bool) -> HeadsTokens:
    """Return the held-out documents in order, or all others in a fixed shuffled order, each between BOS and EOS.

    Raises ValueError if there are fewer tokens than one row has.
    """
    documents = [text for name, text in texts(path) if held_out(name) == held]
    if not held:
        documents = [documents[i] for i in np.random.default_rng(0).permutation(len(documents))]
    bos, eos = first_token(target), _ids(target.config.eos_token_id)[:1]
    encoded = target.tokenizer.encode_batch(documents, add_special_tokens=False)
    tokens = np.array([id for document in encoded for id in (*bos, *document.ids, *eos)], np.int32)
    if len(tokens) <= CONTEXT:
        part = "held-out" if held else "training"
        raise ValueError(f"{path} has {len(tokens)} {part} tokens, at least {CONTEXT + 1} are needed: give more text")
    return tokens


def first_token(target: FrozenTarget) -> list[int]:
    """The token that begins a text, or no token."""
    return _ids(target.config.bos_token_id)


def _ids(given: int | Sequence[int] | None) -> list[int]:
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def prepare(
    target: FrozenTarget, work: Path, text: Path, shards: dict[str, int], threads: int, layers: Sequence[int]
) -> None:
    """Make the shards that the work folder lacks: {"generated": number, "text": number}, then all hidden states."""
    missing = [(kind, i) for kind, n in shards.items() for i in range(n) if not _rows_path(work, kind, i).exists()]
    if missing:
        tokens = read_tokens(target, text, held=False)
        writers: dict[str, Writer] = {"generated": TextContinuer(target, threads), "text": text_rows}
        for kind, i in missing:
            rng = np.random.default_rng((len(kind), i))  # the two kinds get different prefixes
            _save(_rows_path(work, kind, i), writers[kind](tokens, rng))
            print(f"{kind} rows, shard {i + 1} of {shards[kind]}", flush=True)
    for kind, n in shards.items():
        for i in range(n):
            write_states(target, work, kind, i, layers)


def write_states(target: FrozenTarget, work: Path, kind: str, i: int, layers: Sequence[int]) -> None:
    """Write the hidden states of a shard of rows, unless they are there for these layers."""
    rows, path = _rows_path(work, kind, i), _states_path(work, kind, i, layers)
    if not path.exists():
        _save(path, hidden_states(target, np.load(rows), layers))
        print(f"hidden states of {kind} shard {i + 1}", flush=True)


def text_rows(tokens: HeadsTokens, rng: np.random.Generator) -> HeadsTokens:
    """Return random windows, [SHARD_ROWS, CONTEXT]."""
    starts = rng.integers(0, len(tokens) - CONTEXT, SHARD_ROWS)
    return np.stack([tokens[i : i + CONTEXT] for i in starts])


class TextContinuer:
    """Continues prefixes of a text with the project's engine, without drafts."""

    def __init__(self, target: FrozenTarget, threads: int) -> None:
        self.begin = first_token(target)
        self.llm = LLM(
            str(target.path),
            threads=threads,
            max_running=SHARD_ROWS,
            max_waiting=SHARD_ROWS,
            max_spec_length=0,
            max_step_tokens=8 * CONTEXT,
            prefill_chunk=CONTEXT,
            max_model_len=CONTEXT,
            kv_tokens=2 * SHARD_ROWS * CONTEXT,
        )

    def __call__(self, tokens: HeadsTokens, rng: np.random.Generator) -> HeadsTokens:
        """Return rows of a prefix and its continuation, [SHARD_ROWS, CONTEXT]. Every second prefix begins a text.

        A row goes on after an end token, as the target's own training text did.
        """
        prompts, params = [], []
        for row in range(SHARD_ROWS):
            start, n = rng.integers(0, len(tokens) - CONTEXT), rng.integers(*PREFIX)
            prompt = (*(self.begin if row % 2 else ()), *tokens[start : start + n].tolist())
            temperature = TEMPERATURES[row % len(TEMPERATURES)]
            seed = int(rng.integers(2**31))
            prompts.append(prompt)
            params.append(
                SamplingParams(max_tokens=CONTEXT - len(prompt), temperature=temperature, seed=seed, ignore_eos=True)
            )
        outputs = self.llm.generate(prompts, params)
        return np.array([[*p, *o.token_ids] for p, o in zip(prompts, outputs, strict=True)], np.int32)


@torch.no_grad()
def hidden_states(target: FrozenTarget, rows: HeadsTokens, layers: Sequence[int]) -> NDArray[np.float16]:
    """Return the states entering `layers`, and the last one after the final norm: [rows, tokens, layers + 1, hidden].

    transformers' hidden_states[i] enters layer i; hidden_states[-1] is the input of the target's head.
    """
    parts = []
    for ids in torch.from_numpy(rows.astype(np.int64)).split(FEATURE_BATCH):
        states = target.model.base_model(ids, output_hidden_states=True, use_cache=False).hidden_states
        kept = torch.stack([states[i] for i in (*layers, -1)], 2)
        parts.append(kept.clamp(-LARGEST, LARGEST).half().numpy())
    return np.concatenate(parts)


def _rows_path(work: Path, kind: str, i: int) -> Path:
    return work / f"{kind}-{i:03}.npy"


def _states_path(work: Path, kind: str, i: int, layers: Sequence[int]) -> Path:
    return work / f"{kind}-{i:03}-states-{'-'.join(map(str, layers))}.npy"


def _save(path: Path, array: NDArray[Any]) -> None:
    """Write so that a file under this name is always whole."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.save(file, array)
    part.rename(path)


TrainingBatch = tuple[torch.Tensor, torch.Tensor]


class TrainingRows:
    """All rows of a work folder with their hidden states, which stay on disk until they are used."""

    def __init__(self, work: Path, layers: Sequence[int]) -> None:
        pattern = f"*-states-{'-'.join(map(str, layers))}.npy"
        self.states = [np.load(path, mmap_mode="r") for path in sorted(work.glob(pattern))]
        names = [path.name.split("-states-")[0] for path in sorted(work.glob(pattern))]
        self.tokens = np.concatenate([np.load(work / f"{name}.npy") for name in names])

    def scale(self) -> float:
        """The root mean square of the hidden states that are features, from one row."""
        return float(np.sqrt(np.square(self.states[0][0, :, :-1], dtype=np.float32).mean()))

    def batches(self, batch: int, seed: int) -> Iterator[TrainingBatch]:
        """Yield (tokens int64 [batch, CONTEXT], states fp32 [batch, CONTEXT, layers + 1, hidden]) without end.

        Every row once before any row again, in an order that the seed decides.
        """
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(len(self.tokens))
            for start in range(0, len(order) - batch + 1, batch):
                chosen = order[start : start + batch]
                states = np.stack([self.states[i // SHARD_ROWS][i % SHARD_ROWS] for i in chosen])
                yield torch.from_numpy(self.tokens[chosen].astype(np.int64)), torch.from_numpy(states).float()
