"""Load a target and its draft, checked against each other before any weight is read."""

import json
from dataclasses import dataclass

import torch

from deployments.engine.config import ConfigError, EngineConfig
from deployments.engine.drafters.chain import Chain, Drafters
from deployments.engine.drafters.lookup import lookup_drafter
from deployments.engine.drafters.model import ModelDrafter
from deployments.engine.drafters.ngram import ngram_drafter
from deployments.engine.drafters.prediction import PredictionDrafter
from deployments.engine.models.loader import Checkpoint, load_decoder, open_checkpoint
from deployments.engine.models.tokenizer import Tokenizer, require_same_tokenizer
from deployments.engine.runner import Runner
from deployments.engine.types import DrafterName

DEFAULT_MAX_LEN = 4096  # when the models allow more and the configuration says nothing


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine is made of."""

    target: Runner
    drafter: Drafters
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


def load_pair(config: EngineConfig) -> Loaded:
    """The pair and its drafters. Raises ConfigError naming both sides of any conflict."""
    device = _device(config.device)
    opened = open_checkpoint(config.target)
    tokenizer = Tokenizer(config.target)
    draft_opened = None
    if config.draft is not None:
        draft_opened = open_checkpoint(config.draft)
        require_same_tokenizer(tokenizer, Tokenizer(config.draft), (config.target, config.draft))
    max_len = _context(config, opened, draft_opened)
    target = _load_runner(config, opened, max_len, device)
    model = None
    if draft_opened is not None:
        draft = _load_runner(config, draft_opened, max_len, device)
        model = ModelDrafter(draft, opened.shape.vocab_size, config.max_step_tokens)
    return Loaded(target, make_drafters(model, device), tokenizer, _eos_ids(opened))


def make_drafters(model: ModelDrafter | None, device: torch.device) -> Drafters:
    """Every drafter by its name. `cascade` asks the model only where nothing else has an offer."""
    lookup, prediction = lookup_drafter(device), PredictionDrafter(device)
    chains: dict[DrafterName, Chain] = {
        "ngram": (("ngram", ngram_drafter(device)),),
        "lookup": (("lookup", lookup),),
        "prediction": (("prediction", prediction),),
        "cascade": (("prediction", prediction), ("lookup", lookup)),
    }
    if model is not None:
        chains["model"] = (("model", model),)
        chains["cascade"] += (("model", model),)
    return Drafters(chains, device)


def _device(name: str) -> torch.device:
    """Raises ConfigError for one that this machine has not."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is malformed: {error}") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device {name!r} is asked for, and torch sees {count} CUDA devices here")
    return device


def _load_runner(config: EngineConfig, checkpoint: Checkpoint, max_len: int, device: torch.device) -> Runner:
    decoder = load_decoder(checkpoint, dtype=getattr(torch, config.dtype), device=device, max_len=max_len)
    return Runner(decoder, config.max_running, max_len, device)


def _context(config: EngineConfig, target: Checkpoint, draft: Checkpoint | None) -> int:
    """The longest sequence served, prompt and output together."""
    limits = {f"target {config.target}": target.shape.max_position_embeddings}
    if draft is not None:
        limits[f"draft {config.draft}"] = draft.shape.max_position_embeddings
    if config.max_model_len is None:
        return min(*limits.values(), DEFAULT_MAX_LEN)
    if any(config.max_model_len > limit for limit in limits.values()):
        allowed = ", ".join(f"{name} allows {limit}" for name, limit in limits.items())
        raise ConfigError(f"max_model_len {config.max_model_len} is too long: {allowed}")
    if config.max_model_len < 2:
        raise ConfigError(f"max_model_len {config.max_model_len} leaves no room for a prompt and an output token")
    return config.max_model_len


def _eos_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """generation_config.json goes before config.json, as in transformers; either may list several."""
    path = checkpoint.path / "generation_config.json"
    generation = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    eos = generation.get("eos_token_id", checkpoint.raw.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
