"""Loads heads without memory, and makes them the drafter of a target's runner."""

import logging
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.heads.eagle import HeadTarget
from engine.heads.files import StateKind
from engine.heads.medusa import load_medusa
from engine.heads.mlp_speculator import load_mlp_speculator
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_heads import StateHeads, StateTarget
from engine.heads.states import TargetStates
from engine.model_runners import HEAD_DRAFTERS, max_states, table_bytes
from engine.models.decoder import DecoderConfig, LanguageModel
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
        load = load_medusa if self.kind == "medusa" else load_mlp_speculator
        heads = self.heads = load(self.directory, known, dtype=target.dtype, device=device, weights=weights)
        log.info(
            "%s: %s, %d drafts at most, %.1f MB of their own (%.1f s)",
            *(self.directory, self.kind.replace("_", " "), heads.most, heads.weight_bytes / 1e6),
            perf_counter() - began,
        )
        return heads.weight_bytes + table_bytes(config, target.config.hidden_size, target.dtype)

    def drafter(self, config: EngineConfig, target: Runner) -> StateDrafter:
        """The loaded heads as a drafter, which reads the states of this runner's passes."""
        drafter = self.joining(config, target)
        target.reader = drafter.states
        return drafter

    def joining(self, config: EngineConfig, target: Runner) -> StateDrafter:
        """The loaded heads as a drafter, whose `states` are to become the reader of this runner later."""
        assert self.heads is not None, "the heads are loaded before"
        states = TargetStates((target.decoder.config.num_layers,), HEAD_DRAFTERS, max_states(config))
        return StateDrafter(self.heads, states, target.vocab_size, target.device)


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
