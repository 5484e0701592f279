"""Load a target and its draft, checked against each other before any weight is read."""

import json
from pathlib import Path
from typing import Any

import torch

from deployments.engine.config import ConfigError, EngineConfig
from deployments.engine.drafters.base import Drafter, NoDrafter
from deployments.engine.drafters.model import ModelDrafter
from deployments.engine.models.decoder import DecoderConfig
from deployments.engine.models.loader import load_config, load_decoder
from deployments.engine.models.tokenizer import Tokenizer, require_same_tokenizer
from deployments.engine.runner import Runner

DEFAULT_MAX_LEN = 4096  # when the models allow more and the configuration says nothing


def load_pair(config: EngineConfig) -> tuple[Runner, Drafter, Tokenizer, frozenset[int]]:
    """(target, drafter, tokenizer, end-of-sequence ids). Raises ConfigError naming both sides of any conflict."""
    shape, raw = load_config(config.target)
    tokenizer = Tokenizer(config.target)
    draft_shape = None
    if config.draft is not None:
        draft_shape, _ = load_config(config.draft)
        require_same_tokenizer(tokenizer, Tokenizer(config.draft), (config.target, config.draft))
    max_len = _context(config, shape, draft_shape)
    target = _load_runner(config, config.target, max_len)
    drafter: Drafter = NoDrafter()
    if config.draft is not None:
        draft = _load_runner(config, config.draft, max_len)
        drafter = ModelDrafter(draft, shape.vocab_size, config.max_step_tokens)
    return target, drafter, tokenizer, _eos_ids(config.target, raw)


def _load_runner(config: EngineConfig, directory: str, max_len: int) -> Runner:
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    decoder = load_decoder(directory, dtype=dtype, device=device, max_len=max_len)
    return Runner(decoder, config.max_running, max_len, device)


def _context(config: EngineConfig, target: DecoderConfig, draft: DecoderConfig | None) -> int:
    """The longest sequence served, prompt and output together."""
    limits = {f"target {config.target}": target.max_position_embeddings}
    if draft is not None:
        limits[f"draft {config.draft}"] = draft.max_position_embeddings
    if config.max_model_len is None:
        return min(*limits.values(), DEFAULT_MAX_LEN)
    if any(config.max_model_len > limit for limit in limits.values()):
        allowed = ", ".join(f"{name} allows {limit}" for name, limit in limits.items())
        raise ConfigError(f"max_model_len {config.max_model_len} is too long: {allowed}")
    if config.max_model_len < 2:
        raise ConfigError(f"max_model_len {config.max_model_len} leaves no room for a prompt and an output token")
    return config.max_model_len


def _eos_ids(directory: str, raw: dict[str, Any]) -> frozenset[int]:
    """generation_config.json goes before config.json, as in transformers; either may list several."""
    path = Path(directory) / "generation_config.json"
    generation = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
