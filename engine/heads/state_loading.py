"""Loads heads without memory, and makes them the drafter of a target's runner."""

import logging
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from engine.config import ConfigError, EngineConfig
from engine.heads.eagle import HeadTarget
from engine.heads.files import StateKind
from engine.heads.medusa import load_medusa
from engine.heads.mlp_speculator import load_mlp_speculator
from engine.heads.pass_heads import DRAFTERS, PassDrafter, PassHeads, load_pass
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_heads import StateHeads, StateTarget
from engine.heads.states import TargetStates
from engine.loading.model_runners import HEAD_DRAFTERS, max_states, table_bytes
from engine.models.decoder import Decoder, DecoderConfig, LanguageModel
from engine.models.feeds import StateReader
from engine.models.look_ahead import EmbeddingModel, LookAhead
from engine.models.products import Weights
from engine.models.runner import Runner

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StateHeadsFolder:
    """A directory with heads without memory, and the heads once they are loaded."""

    directory: Path
    kind: StateKind
    heads: StateHeads | None = None

    def load(self, config: EngineConfig, target: LanguageModel, device: torch.device) -> int:
        """Read the heads of this target. Returns the bytes that they and the target's states that wait for them take.

        Raises ConfigError naming the file or tensor, and both sides where they do not fit.
        """
        began = perf_counter()
        weights = Weights(config.draft_weights, config.quantize_head, config.products)
        known = state_target(config.target, target)
        if self.kind == "pass":
            _check_native(self.directory, config.target, target)
            self.heads = load_pass(self.directory, known, target.logits, dtype=target.dtype, device=device)
        else:
            load = load_medusa if self.kind == "medusa" else load_mlp_speculator
            self.heads = load(self.directory, known, dtype=target.dtype, device=device, weights=weights)
        heads = self.heads
        log.info(
            "%s: %s, %d drafts at most, %.1f MB of their own (%.1f s)",
            *(self.directory, self.kind.replace("_", " "), heads.most, heads.weight_bytes / 1e6),
            perf_counter() - began,
        )
        return heads.weight_bytes + waiting_bytes(config, heads, target)

    def drafter(self, config: EngineConfig, target: Runner) -> StateDrafter:
        """The loaded heads as a drafter, which reads the states of this runner's passes."""
        drafter = self.joining(config, target)
        target.reader, target.look_ahead = readers_of(drafter)
        return drafter

    def joining(self, config: EngineConfig, target: Runner) -> StateDrafter:
        """The loaded heads as a drafter, whose readers are to become those of this runner later."""
        assert self.heads is not None, "the heads are loaded before"
        if isinstance(self.heads, PassHeads):
            return pass_drafter(self.heads, target, max_states(config))
        states = TargetStates((target.decoder.config.num_layers,), HEAD_DRAFTERS, max_states(config))
        return StateDrafter(self.heads, states, target.vocab_size, target.device)


def pass_drafter(heads: PassHeads, target: Runner, max_rows: int) -> PassDrafter:
    """A drafter that keeps the states of look-ahead tokens behind `max_rows` positions at most."""
    states = TargetStates((), DRAFTERS, max_rows)
    look_ahead = LookAhead(cast(EmbeddingModel, target.decoder), heads.embeddings, states, DRAFTERS)
    return PassDrafter(heads, look_ahead, states, target.vocab_size, target.device)


def readers_of(drafter: StateDrafter) -> tuple[StateReader | None, LookAhead | None]:
    """(the reader of the states of a target's passes, the look-ahead tokens that ride in them) for these heads."""
    return (None, drafter.look_ahead) if isinstance(drafter, PassDrafter) else (drafter.states, None)


def waiting_bytes(config: EngineConfig, heads: StateHeads, target: LanguageModel) -> int:
    """The most bytes that the target's states take while they wait for the heads."""
    states = heads.most if isinstance(heads, PassHeads) else 1  # of a position
    return table_bytes(config, states * target.config.hidden_size, target.dtype)


def _check_native(directory: Path, name: str, target: LanguageModel) -> None:
    """Raise ConfigError for a target whose first layer takes nothing but embeddings of ids."""
    if not isinstance(target, Decoder):
        raise ConfigError(
            f"{directory} holds look-ahead embeddings, which ride in the passes of native architectures only, and "
            f"target {name} runs through transformers: choose another draft"
        )


def state_target(name: str, model: LanguageModel) -> StateTarget:
    """What heads need to know of a loaded target."""
    return StateTarget(name, model.config, _NormedLogits(model.config, cast(HeadTarget, model)))


@dataclass(frozen=True, slots=True)
class _NormedLogits:
    """The target's logits [R, vocab] of states behind its final norm [R, hidden]."""

    config: DecoderConfig
    model: HeadTarget

    def __call__(self, states: Tensor) -> Tensor:
        logits, traits = self.model.head(states), self.config.traits
        if traits.logit_divisor != 1:
            logits = logits / traits.logit_divisor
        if traits.logit_softcap is not None:
            logits = (logits / traits.logit_softcap).tanh() * traits.logit_softcap
        return logits
