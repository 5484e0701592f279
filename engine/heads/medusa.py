"""Medusa heads: several heads on the target's last state. Each drafts one token further ahead than the one before.

Cai et al. 2024 (arXiv 2401.10774, section 2.1). Head k reads the state behind the target's final norm at position t and
gives the law of token t + 2 + k: blocks x + SiLU(Wx + b), then a matrix to the vocabulary. A head does not know what
the heads before it drew. Its law is still the law that its draft is drawn from, so every verifier stays lossless.

At temperature 0 a chain of such drafts is blockwise parallel decoding (Stern, Shazeer & Uszkoreit 2018, arXiv
1811.03115): each head proposes its most likely token, and the target keeps the longest prefix that it would have
written. It needs no code of its own.
"""

import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ConfigError
from engine.heads.eagle import OUTSIDE
from engine.heads.state_heads import HeadFiles, IndependentRun, LogitsOf, StateTarget, check_hidden, check_vocab
from engine.models.linear import Product, num_bytes_of
from engine.models.products import AS_IS, Weights


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Weights and forward pass, without state."""

    most: int  # heads
    first: Product  # hidden → heads · hidden: the first block of all heads
    later: tuple[tuple[Product, ...], ...]  # by head: its further blocks
    outputs: tuple[LogitsOf, ...]  # by head; one for all: they share it
    vocabulary: Tensor | None  # [n] int64: the target's id of each token that is drafted; None: all, in order
    vocab_size: int  # of the logits
    scale: float  # of the logits
    weight_bytes: int  # without a matrix that is the target's

    def logits(self, states: Tensor, depth: int | None = None) -> Tensor:
        """States [R, hidden] → logits [R, depth, vocab] of the first `depth` heads; None: of all heads."""
        depth = self.most if depth is None else depth
        hidden = self._blocks(states, depth)
        if len(self.outputs) == 1:
            logits = self.outputs[0](hidden.flatten(0, 1)).unflatten(0, (depth, -1))
        else:
            logits = torch.stack([output(x) for output, x in zip(self.outputs, hidden, strict=False)])
        if self.scale != 1:
            logits = logits * self.scale
        if self.vocabulary is not None:
            full = logits.new_full((*logits.shape[:2], self.vocab_size), OUTSIDE)
            logits = full.index_copy_(2, self.vocabulary, logits)
        return logits.transpose(0, 1)  # the rows of a head are neighbours in memory

    def start(self, states: Tensor, depth: int) -> IndependentRun:
        return IndependentRun(self.logits(states, depth))

    def _blocks(self, states: Tensor, depth: int) -> Tensor:
        """[depth, R, hidden]: what the heads' matrices read."""
        rows, width = states.shape
        written = F.silu(self.first(states)).view(rows, self.most, width).transpose(0, 1)[:depth]
        hidden = torch.add(written, states, out=states.new_empty(depth, rows, width))  # contiguous, as products like it
        for x, blocks in zip(hidden, self.later, strict=False):
            for block in blocks:
                x.add_(F.silu(block(x)))
        return hidden


@dataclass(frozen=True, slots=True)
class _Names:
    """How a format names the tensors of head h and its block l, without ".weight" and ".bias"."""

    block: str
    output: str  # of a head's own matrix; with h = 0 and l = number of blocks
    pattern: re.Pattern[str]  # of a block, with groups for h and l

    def blocks(self, names: Iterable[str]) -> set[tuple[int, int]]:
        found = (self.pattern.fullmatch(name) for name in names)
        return {(int(match[1]), int(match[2])) for match in found if match}


# The names in the authors' files, version 1, and in vLLM's. An older vLLM file has "medusa_heads." before all names.
FORMATS = tuple(
    _Names(prefix + block, prefix + output, re.compile(re.escape(prefix) + pattern))
    for prefix in ("", "medusa_heads.")
    for block, output, pattern in (
        ("{h}.{l}.linear", "{h}.{l}", r"(\d+)\.(\d+)\.linear\.weight"),
        ("blocks.{h}.layers.{l}", "lm_heads.{h}", r"blocks\.(\d+)\.layers\.(\d+)\.weight"),
    )
)
SHARED = "lm_head.weight"  # one matrix for all heads, in vLLM's files


def load_medusa(
    directory: Path, target: StateTarget, *, dtype: torch.dtype, device: torch.device, weights: Weights = AS_IS
) -> MedusaHeads:
    """Read heads from the authors' files or from vLLM's. Heads without a matrix to the vocabulary use the target's.

    The number of heads is told by the names of the tensors: the authors' config.json may say less. Raises ConfigError
    naming the file or tensor, and both sides where the heads do not fit the target.
    """
    files = HeadFiles(directory, weights, dtype, device)
    known, heads, layers = _layout(files)
    block = known.block.format
    hidden = files.shape(block(h=0, l=0) + ".weight")[-1]
    check_hidden(directory, hidden, target)
    first = [block(h=head, l=0) for head in range(heads)]
    products = [files.make(files.stack([f"{n}.weight" for n in first], hidden, hidden), _bias(files, first, hidden))]
    later = []
    for head in range(heads):
        rest = [block(h=head, l=layer) for layer in range(1, layers)]
        made = [files.make(files.read(f"{n}.weight", hidden, hidden), _bias(files, [n], hidden)) for n in rest]
        later.append(tuple(made))
        products += made
    vocabulary = _vocabulary(files, target)
    own = _own_outputs(files, known, (heads, layers), vocabulary, target)
    files.finish("Medusa heads")
    return MedusaHeads(
        most=heads,
        first=products[0],
        later=tuple(later),
        outputs=own or (target.logits if vocabulary is None else _Chosen(target.logits, vocabulary),),
        vocabulary=vocabulary,
        vocab_size=target.config.vocab_size,
        scale=files.number("logit_scale", 1.0) if own else 1.0,
        weight_bytes=sum(p.num_bytes for p in (*products, *own)) + num_bytes_of(vocabulary),
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The target's logits of some tokens."""

    logits: LogitsOf
    vocabulary: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)[:, self.vocabulary]


def _layout(files: HeadFiles) -> tuple[_Names, int, int]:
    """(names, heads, blocks per head). Raises ConfigError if there are none, or if a head lacks a block."""
    for known in FORMATS:
        if found := known.blocks(files.names):
            heads, layers = (1 + max(numbers) for numbers in zip(*found, strict=True))
            for head, layer in product(range(heads), range(layers)):
                if (head, layer) not in found:
                    name = known.block.format(h=head, l=layer)
                    raise ConfigError(
                        f"{files.directory} holds {heads} Medusa heads of {layers} blocks, but no {name}.weight"
                    )
            return known, heads, layers
    raise ConfigError(
        f"{files.directory} holds no Medusa heads: tensors named 0.0.linear.weight or blocks.0.layers.0.weight are "
        "expected"
    )


def _bias(files: HeadFiles, names: Seq[str], hidden: int) -> Tensor | None:
    """The biases of blocks; None if they have none."""
    stored = [f"{name}.bias" for name in names]
    return files.stack(stored, hidden) if stored[0] in files.names else None


def _vocabulary(files: HeadFiles, target: StateTarget) -> Tensor | None:
    """The tokens that are drafted: `token_map` of vLLM's files. Raises ConfigError for ids that the target lacks."""
    size, vocab = files.config.get("truncated_vocab_size"), target.config.vocab_size
    if "token_map" not in files.names:
        if isinstance(size, int) and size < files.config.get("vocab_size", size):
            raise ConfigError(
                f"{files.directory}: truncated_vocab_size is {size}, and there is no tensor token_map that says which "
                "tokens these are: add it, or remove the field"
            )
        return None
    ids = files.read_ids("token_map")
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) < len(ids):
        raise ConfigError(f"{files.directory}: token_map must hold different ids from 0 to {vocab - 1}")
    return ids.to(files.device)


def _own_outputs(
    files: HeadFiles, known: _Names, size: tuple[int, int], vocabulary: Tensor | None, target: StateTarget
) -> tuple[Product, ...]:
    """The heads' own matrices: one for each head, one for all, or () if the target's is used."""
    heads, layers = size
    each = [f"{known.output.format(h=head, l=layers)}.weight" for head in range(heads)]
    shared = SHARED if SHARED in files.names else each[0] if files.config.get("original_lm_head") else None
    if shared in files.names:
        for name in set(each) & files.names - {shared}:
            files.ignore(name)  # vLLM reads one of them
        each = [shared]
    elif each[0] not in files.names:
        return ()
    return tuple(files.make.head(_output(files, name, vocabulary, target)) for name in each)


def _output(files: HeadFiles, name: str, vocabulary: Tensor | None, target: StateTarget) -> Tensor:
    """A matrix to the vocabulary, with a row for each token that is drafted."""
    rows, hidden = files.shape(name)[0], target.config.hidden_size
    check_vocab(files.directory, rows, target)
    weight = files.read(name, rows, hidden)
    if vocabulary is None or rows == len(vocabulary):
        return weight
    if rows <= int(vocabulary.max()):
        raise ConfigError(f"{files.directory}: {name} has {rows} rows, and token_map names {len(vocabulary)} tokens")
    return weight[vocabulary]
