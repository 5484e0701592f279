"""Load a target and its draft, checked against each other before any weight is read."""

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch

from cache.slotted import SlottedCache
from cache.storage import SlottedStorage
from engine.config import ConfigError, EngineConfig
from engine.drafters.chain import Chain, Drafters
from engine.drafters.lookup import lookup_drafter
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import ngram_drafter
from engine.drafters.prediction import PredictionDrafter
from engine.memory_budget import device_memory, layouts, measure_activations
from engine.models.attention import Attention, Span, plan_attention
from engine.models.decoder import Decoder
from engine.models.loader import Checkpoint, load_decoder, open_checkpoint
from engine.models.runner import Runner, kv_shape
from engine.models.tokenizer import Tokenizer, require_same_tokenizer
from engine.types import DrafterName

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
    runners = _make_runners(config, [c for c in (opened, draft_opened) if c is not None], max_len, device)
    model = None
    if draft_opened is not None:
        # As many of the draft's tokens as take the time of a chunk of the target's, and two for each that decodes.
        chunk = config.chunk(0) * runners[0].decoder.weight_bytes // runners[1].decoder.weight_bytes
        limit = config.max_step_tokens
        model = ModelDrafter(runners[1], opened.shape.vocab_size, limit, max(2 * config.max_running, min(chunk, limit)))
    return Loaded(runners[0], make_drafters(model, device), tokenizer, _eos_ids(opened))


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


def _make_runners(
    config: EngineConfig, checkpoints: Seq[Checkpoint], max_len: int, device: torch.device
) -> list[Runner]:
    """Each model with the KV memory that is left for it once the weights are there."""
    dtype = getattr(torch, config.dtype)
    decoders = [load_decoder(c, dtype=dtype, device=device, max_len=max_len) for c in checkpoints]
    weights = sum(decoder.weight_bytes for decoder in decoders)
    activations = 0
    if config.cache == "paged" and (device.type == "cuda" or config.memory_fraction is not None):
        largest = [partial(_largest_pass, config, decoder, max_len, device) for decoder in decoders]
        activations = max(measure_activations(run, device) for run in largest)
    shapes = [kv_shape(decoder.config, dtype, device) for decoder in decoders]
    sized = layouts(config, shapes, weights, activations, max_len, device_memory(device))
    return [Runner(decoder, layout, device) for decoder, layout in zip(decoders, sized, strict=True)]


def _largest_pass(config: EngineConfig, decoder: Decoder, max_len: int, device: torch.device) -> None:
    """A pass of max_step_tokens with all the logits that a round may want, over as few sequences as hold it.

    Its small cache counts as activations: a pass of as many tokens can need no more.
    """
    counts = [max_len] * (config.max_step_tokens // max_len)
    counts += [rest] if (rest := config.max_step_tokens % max_len) else []
    shape = decoder.config
    storage = SlottedStorage(
        SlottedCache(len(counts), max_len), len(counts), max_len, kv_shape(shape, decoder.dtype, device)
    )
    spans = [Span.at(slot, 0, count) for slot, count in enumerate(counts)]
    plan = plan_attention(
        spans, storage, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, dtype=decoder.dtype, device=device
    )
    tokens = torch.zeros(config.max_step_tokens, dtype=torch.int64, device=device)
    rows = min(config.max_step_tokens, config.max_running * (1 + config.max_spec_length))
    decoder.logits(decoder.forward(tokens, Attention(plan, storage))[:rows])


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
