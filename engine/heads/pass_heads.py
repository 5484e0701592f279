"""PaSS: the target drafts for itself, from look-ahead tokens that ride in its passes (engine/models/look_ahead.py).

Monea, Joulin & Grave 2023 (arXiv 2311.13581). Only the embeddings of the look-ahead tokens are learned. The paper takes
two passes for a round: one drafts, one verifies. Here the pass that verifies a round's drafts also carries the
look-ahead tokens of the next round, behind every place at which that may begin.

A directory holds model.safetensors with one tensor, `embeddings` [L, hidden], and config.json with these fields:

    model_type             "pass"
    num_lookahead_tokens   L, at most MOST
    hidden_size            of the target
    num_target_layers      of the target; may be left out
    vocab_size             of the target; may be left out
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.drafters.base import NO_OFFER, Offer
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_heads import HeadFiles, IndependentRun, LogitsOf, StateTarget, check_hidden
from engine.heads.states import TargetStates
from engine.models.look_ahead import LookAhead
from engine.models.products import AS_IS
from engine.models.runner import Runner
from engine.sequence import Sequence
from engine.types import DrafterName

MOST = 16  # look-ahead tokens
DRAFTERS: frozenset[DrafterName] = frozenset({"model"})  # `cascade` may draft much by itself, which leaves no room


@dataclass(frozen=True, slots=True)
class PassHeads:
    """Gives laws from the states of look-ahead tokens. Head i reads the state of look-ahead token i."""

    embeddings: Tensor  # [L, hidden]
    output: LogitsOf  # the target's logits of states before its final norm

    @property
    def most(self) -> int:
        return self.embeddings.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.embeddings.nbytes

    def start(self, states: Tensor, depth: int) -> IndependentRun:
        """As StateHeads.start, but states [R, L · hidden] of the look-ahead tokens behind R positions."""
        each = states.unflatten(1, (self.most, -1))[:, :depth]
        return IndependentRun(self.output(each.flatten(0, 1)).unflatten(0, (-1, depth)))


def load_pass(
    directory: Path, target: StateTarget, output: LogitsOf, *, dtype: torch.dtype, device: torch.device
) -> PassHeads:
    """Read look-ahead embeddings. output: the target's logits of states before its final norm.

    Raises ConfigError naming the file, field or tensor, and both sides where they do not fit the target.
    """
    files = HeadFiles(directory, AS_IS, dtype, device)
    count, hidden = files.size("num_lookahead_tokens"), files.size("hidden_size")
    if count > MOST:
        raise ConfigError(
            f"{directory}: config.json: num_lookahead_tokens is {count}, and at most {MOST} are supported"
        )
    check_hidden(directory, hidden, target)
    for field, has in (("num_target_layers", target.config.num_layers), ("vocab_size", target.config.vocab_size)):
        if files.config.get(field, has) != has:
            raise ConfigError(
                f"{directory}: config.json: {field} is {files.config[field]!r}, and target {target.name} has {has}: "
                "give the embeddings of this target"
            )
    embeddings = files.read("embeddings", count, hidden)
    if not bool(embeddings.isfinite().all()):
        raise ConfigError(f"{directory}: embeddings holds numbers that are not finite in {dtype}")
    files.finish("look-ahead embeddings")
    return PassHeads(embeddings, output)


class PassDrafter(StateDrafter):
    """Drafts from the look-ahead tokens' states behind a text's last but one token, which the target has read last.

    It offers drafts for a sequence that has no such states too: a round that is to have drafts carries look-ahead
    tokens, a plain round carries none. So the first round behind a plain one proposes nothing.
    """

    def __init__(
        self, heads: PassHeads, look_ahead: LookAhead, states: TargetStates, target_vocab: int, device: torch.device
    ) -> None:
        """states: the reader of look_ahead."""
        super().__init__(heads, states, target_vocab, device)
        self.look_ahead = look_ahead

    def offer(self, sequence: Sequence, k: int) -> Offer:
        if k <= 0 or sequence.drafter not in DRAFTERS or sequence.handle in self._given_up:
            return NO_OFFER
        return Offer(sequence.drafter, min(k, self.heads.most), 1, trees=True)

    def imagine_inputs(self, sequence: Sequence, target: Runner) -> None:
        self.look_ahead.imagine(sequence, self.heads.most)
        self._imagine(sequence, target, self.heads.most * target.decoder.config.hidden_size)

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        self.look_ahead.forget(sequence.handle)

    def _most(self, sequence: Sequence) -> int:
        return min(self.heads.most, self.look_ahead.held(sequence.handle))
