"""Heads that draft from one state of the target, and the reader that they share."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.decoder import DecoderConfig
from engine.models.products import ProductMaker, Weights
from engine.models.shards import Part, Shards, TensorSource
from engine.models.tokenizer_files import read_object
from engine.models.weight_files import INDEX, WEIGHTS

LogitsOf = Callable[[Tensor], Tensor]  # [R, hidden] → [R, vocab]


class HeadRun(Protocol):
    """The heads of one proposal, from the first to the last."""

    def step(self, rows: Tensor | None, tokens: Tensor) -> Tensor:
        """Logits [N, vocab] of the next head. rows [N] int64: the row of the step before that each one continues; None:
        all, in their order. tokens [N] int64: the last token of each row's text: a committed one in the first step,
        then a draft. The vocabulary may be smaller or larger than the target's."""
        ...


class IndependentRun:
    """Heads that do not know what the heads before them drew."""

    def __init__(self, logits: Tensor) -> None:
        """logits [R, depth, vocab]."""
        self._logits = logits
        self._step = 0
        self._owners: Tensor | None = None  # of the rows of the latest step; None: all, in their order

    def step(self, rows: Tensor | None, tokens: Tensor) -> Tensor:
        if rows is not None:
            self._owners = rows if self._owners is None else self._owners[rows]
        logits = self._logits[:, self._step]
        self._step += 1
        return logits if self._owners is None else logits[self._owners]


class StateHeads(Protocol):
    """Heads without memory. Each one drafts one more token, so a draft is as deep as there are heads."""

    @property
    def most(self) -> int:
        """The number of heads."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def start(self, states: Tensor, depth: int) -> HeadRun:
        """Begin with the states [R, hidden] behind the target's final norm, for `depth` ≤ `most` steps. A text of n
        tokens has the state of its position n − 2, the last one that the target has read."""
        ...


@dataclass(frozen=True, slots=True)
class StateTarget:
    """What heads need to know of their target."""

    name: str
    config: DecoderConfig
    logits: LogitsOf  # states behind the final norm [R, hidden] → [R, vocab]


class HeadFiles:
    """The files of heads: config.json, and the tensors of a safetensors checkpoint."""

    def __init__(self, directory: Path, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError for files that are missing or broken, and for pickles."""
        self.directory = directory
        self.config: dict[str, Any] = read_object(directory / "config.json")
        _check_name(directory)
        self._shards = Shards(directory)
        self.names = frozenset(self._shards.tensors)
        self.device = device
        self.make = ProductMaker(weights, dtype, device)
        self._unread = set(self.names)
        self._source = TensorSource(self._shards, dtype, device, self._unread.discard)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards.stored(name).shape

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor in the heads' dtype. Raises ConfigError unless it has this shape."""
        return self.stack([name], *shape)

    def stack(self, names: Seq[str], *shape: int) -> Tensor:
        """Tensors of this shape on top of each other. Raises ConfigError for one of another shape."""
        for name in names:
            if self.shape(name) != shape:
                raise ConfigError(f"{self.directory}: {name} has shape {self.shape(name)}, and {shape} is needed")
        return self._source.stack([Part(name, shape) for name in names])

    def read_ids(self, name: str) -> Tensor:
        """A list of token ids [n] int64, on the CPU."""
        dtype = self._shards.stored(name).dtype
        if len(self.shape(name)) != 1 or dtype not in ("I64", "I32", "I16"):
            raise ConfigError(f"{self.directory}: {name} must be a list of integers, not {dtype} of {self.shape(name)}")
        self._unread.discard(name)
        return self._shards.read(name).long()

    def size(self, field: str) -> int:
        """A whole number above 0 of config.json. Raises ConfigError."""
        value = self.config.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.directory}: config.json: {field} must be a whole number above 0, not {value!r}")
        return value

    def number(self, field: str, default: float) -> float:
        """A positive number of config.json, or the default. Raises ConfigError."""
        value = self.config.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ConfigError(f"{self.directory}: config.json: {field} must be a positive number, not {value!r}")
        return value

    def ignore(self, name: str) -> None:
        """The tensor needs no reading."""
        self._unread.discard(name)

    def finish(self, kind: str) -> None:
        """Choose the forms of the products. Raises ConfigError if a tensor was not read: it would change what the heads
        compute."""
        if self._unread:
            raise ConfigError(
                f"{self.directory} holds {len(self._unread)} tensors that {kind} do not have, {min(self._unread)!r} "
                "among them: remove them, or give a directory of such heads alone"
            )
        self._shards.close()
        self.make.choose_forms()


def _check_name(directory: Path) -> None:
    """Raise ConfigError for safetensors under another name: some servers read heads from such files."""
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if others and not (directory / WEIGHTS).is_file() and not (directory / INDEX).is_file():
        raise ConfigError(f"{directory} holds no {WEIGHTS}; rename {others[0]} to that if it holds the heads")


def check_hidden(directory: Path, found: int, target: StateTarget) -> None:
    """Raise ConfigError unless the heads read states as wide as the target's."""
    if found != target.config.hidden_size:
        raise ConfigError(
            f"the heads in {directory} read states of {found} numbers, and those of target {target.name} have "
            f"{target.config.hidden_size}: give the heads of this target"
        )


def check_vocab(directory: Path, found: int, target: StateTarget) -> None:
    """Raise ConfigError if the heads know more tokens than the target."""
    if found > target.config.vocab_size:
        raise ConfigError(
            f"the heads in {directory} draft {found} tokens, and target {target.name} has {target.config.vocab_size}: "
            "give the heads of this target"
        )
