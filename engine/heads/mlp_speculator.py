"""The MLP speculator: a small recurrent network on the target's last state (Wertheimer et al. 2024, arXiv 2404.19124).

Step i reads the state of the step before and the embedding of the last token, and drafts the next one:
state = GELU(norm(proj(state) · w + emb(token) · v)), logits = head(state). The first state is the target's, behind its
final norm. Format: the checkpoints of ibm-ai-platform.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.heads.state_heads import HeadFiles, StateTarget, check_hidden, check_vocab
from engine.models.linear import Product, num_bytes_of
from engine.models.norm import RMSNorm
from engine.models.products import AS_IS, Weights

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MLPStage:
    """The weights of one step."""

    embedding: Tensor  # [vocab, inner]
    project: Product  # hidden or inner → inner
    norm: RMSNorm
    shift: Tensor  # [inner] added behind the norm
    head: Product  # inner → vocab


@dataclass(frozen=True, slots=True)
class MLPSpeculator:
    """Weights and forward pass, without state."""

    stages: tuple[MLPStage, ...]
    scale_input: bool  # whether the target's state is normalised, and divided by √2
    weight_bytes: int

    @property
    def most(self) -> int:
        return len(self.stages)

    def start(self, states: Tensor, depth: int) -> "_MLPRun":
        if self.scale_input:
            states = F.rms_norm(states, states.shape[1:], eps=EPS) / 2**0.5
        return _MLPRun(self, states)

    def advance(self, step: int, states: Tensor, tokens: Tensor) -> Tensor:
        """The states [N, inner] of a step, from those of the step before and the tokens [N] behind them."""
        stage = self.stages[step]
        # The weights belong to the number of steps that were trained, not to those that a round draws.
        state_weight = 0.5 ** (0.5 / self.most)
        embedding_weight = ((1 - state_weight**2) * stage.shift.shape[0] / 2) ** 0.5
        # A client's prompt may hold ids that the speculator lacks.
        embedded = F.embedding(tokens.clamp(0, stage.embedding.shape[0] - 1), stage.embedding)
        mixed = stage.project(states).mul_(state_weight).add_(embedded, alpha=embedding_weight)
        return F.gelu(stage.norm(mixed).add_(stage.shift))


class _MLPRun:
    def __init__(self, speculator: MLPSpeculator, states: Tensor) -> None:
        self._speculator = speculator
        self._states = states  # of the latest step
        self._step = 0

    def step(self, rows: Tensor | None, tokens: Tensor) -> Tensor:
        states = self._states if rows is None else self._states[rows]
        self._states = self._speculator.advance(self._step, states, tokens)
        logits = self._speculator.stages[self._step].head(self._states)
        self._step += 1
        return logits


def load_mlp_speculator(
    directory: Path, target: StateTarget, *, dtype: torch.dtype, device: torch.device, weights: Weights = AS_IS
) -> MLPSpeculator:
    """Read a speculator. Raises ConfigError naming the file or tensor, and both sides where it does not fit the
    target."""
    files = HeadFiles(directory, weights, dtype, device)
    count, vocab = files.size("n_predict"), files.size("vocab_size")
    hidden = files.size("emb_dim")
    inner = files.size("inner_dim") if files.config.get("inner_dim") else hidden
    check_hidden(directory, hidden, target)
    check_vocab(directory, vocab, target)
    tied = bool(files.config.get("tie_weights"))
    reader = _StageReader(files, hidden, inner, vocab)
    if tied:
        _ignore_copies(files, count)
    own = [reader.stage(step, 0 if tied else step, min(step, 1) if tied else step) for step in range(_own(count, tied))]
    stages = (*own, *([own[-1]] * (count - len(own))))
    files.finish("MLP speculators")
    return MLPSpeculator(stages, bool(files.config.get("scale_input")), reader.num_bytes)


def _own(count: int, tied: bool) -> int:
    """Steps with weights of their own. Only the first two of tied steps differ, in their projections."""
    return min(count, 2) if tied else count


def _ignore_copies(files: HeadFiles, count: int) -> None:
    """A file may hold tied weights once for each step."""
    for name in files.names:
        _, part, step, _ = name.split(".") if name.count(".") == 3 else ("", "", "0", "")
        if step.isdigit() and (2 if part == "proj" else 1) <= int(step) < count:
            files.ignore(name)


class _StageReader:
    """Reads the weights of steps. What steps share is read once."""

    def __init__(self, files: HeadFiles, hidden: int, inner: int, vocab: int) -> None:
        self._files = files
        self._hidden, self._inner, self._vocab = hidden, inner, vocab
        self._shared: dict[int, tuple[Tensor, RMSNorm, Tensor, Product]] = {}
        self.num_bytes = 0

    def stage(self, step: int, shared: int, projection: int) -> MLPStage:
        """shared: the number in the names of all tensors but the projection."""
        width = self._inner if step else self._hidden
        project = self._files.make(self._files.read(f"speculator.proj.{projection}.weight", self._inner, width))
        self.num_bytes += project.num_bytes
        if shared not in self._shared:
            self._shared[shared] = self._read(shared)
        embedding, norm, shift, head = self._shared[shared]
        return MLPStage(embedding, project, norm, shift, head)

    def _read(self, number: int) -> tuple[Tensor, RMSNorm, Tensor, Product]:
        files, inner, vocab = self._files, self._inner, self._vocab
        embedding = files.read(f"speculator.emb.{number}.weight", vocab, inner)
        norm = RMSNorm(files.read(f"speculator.ln.{number}.weight", inner), EPS)
        shift = files.read(f"speculator.ln.{number}.bias", inner)
        head = files.make.head(files.read(f"speculator.head.{number}.weight", vocab, inner))
        self.num_bytes += head.num_bytes + num_bytes_of(embedding)
        return embedding, norm, shift, head
