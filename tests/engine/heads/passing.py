"""Look-ahead embeddings for a tiny target, and their drafts by a reference. The target is random and so are they, so
requests allow few tokens: then some drafts are right by chance."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafters.chain import ChainedDrafter
from engine.engine import Engine
from engine.heads.pass_heads import PassHeads
from engine.heads.state_loading import pass_drafter
from engine.loading.load import load_models
from engine.types import Request
from policies.config import PolicyConfig
from tests.engine.heads.fitted import CPU, HIDDEN, make_requests, randn, save_heads
from tests.engine.pairs import reference_model
from tests.kv import kv_config

TOKENS = 3  # look-ahead tokens
ALLOWED = tuple(range(2, 6))


def embeddings(count: int = TOKENS, hidden: int = HIDDEN) -> Tensor:
    return 0.15 * randn(count, hidden, seed=3)


def save_pass(directory: Path, tensor: Tensor | None = None, **changes: Any) -> Path:
    tensor = embeddings() if tensor is None else tensor
    config = {"model_type": "pass", "num_lookahead_tokens": tensor.shape[0], "hidden_size": tensor.shape[1]}
    return save_heads(directory, {"embeddings": tensor}, **{**config, **changes})


class PassReference:
    """transformers' own module over a text's embeddings with those of the look-ahead tokens behind them."""

    most = TOKENS

    def __init__(self, checkpoint: str) -> None:
        self.model: Any = reference_model(checkpoint)

    @torch.no_grad()
    def last_state(self, tokens: Seq[int]) -> Tensor:
        """Logits [L, vocab] of the look-ahead tokens behind all but the last of these tokens."""
        text = self.model.get_input_embeddings()(torch.tensor(tokens[:-1]))
        logits: Tensor = self.model(inputs_embeds=torch.cat([text, embeddings()])[None]).logits[0]
        return logits[len(tokens) - 1 :]

    def path_logits(self, state: Tensor, tokens: Seq[int]) -> Tensor:
        allowed = torch.zeros(state.shape[1], dtype=torch.bool).index_fill_(0, torch.tensor(ALLOWED), True)
        return state[len(tokens) - 1].masked_fill(~allowed, -torch.inf)


@dataclass(frozen=True)
class Looking:
    """A target, and a directory with look-ahead embeddings for it."""

    checkpoint: str
    directory: Path
    reference: PassReference

    def engine(self, **config: Any) -> Engine:
        """An engine whose only drafter is that of the embeddings, under the name `model`."""
        settings = {"dtype": "float64", "max_model_len": 96, "policy": PolicyConfig("fixed", k=3), **kv_config()}
        full = EngineConfig(target=self.checkpoint, **{**settings, **config})
        models = load_models(full)
        target = models.target
        drafter = pass_drafter(PassHeads(embeddings(), target.decoder.logits), target, 10_000)
        target.look_ahead = drafter.look_ahead
        assert target.device == CPU
        chained = ChainedDrafter({"model": (("model", drafter),)}, CPU)
        return Engine(full, target, chained, models.tokenizer, models.eos_ids, ("model",))


def few_tokens(temperature: float = 0.0, k: int | None = 3, count: int = 6, **changes: Any) -> list[Request]:
    """As make_requests, for ALLOWED tokens."""
    requests = make_requests(temperature, k, count, **changes)
    return [replace(r, params=replace(r.params, allowed_token_ids=ALLOWED)) for r in requests]
