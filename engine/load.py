"""Build what an engine runs on: the target, the draft model, the other drafters, the tokenizer.

The checkpoints are checked against each other before any weight is read.
"""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch

from cache.layout import Layout
from cache.slotted import SlottedCache
from cache.storage import SlottedStorage
from engine.config import ConfigError, EngineConfig
from engine.drafters.chain import Chain, ChainedDrafter
from engine.drafters.lookup import lookup_drafter
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import ngram_drafter
from engine.drafters.prediction import PredictionDrafter
from engine.drafters.translation import Translation
from engine.generation_config import sampling_defaults
from engine.host_memory import keep_freed_memory, limit_compiled_products
from engine.memory_budget import device_memory, layouts, measure_activations
from engine.models.attention import Attention, Span, plan_attention
from engine.models.decoder import Decoder
from engine.models.loader import Checkpoint, load_decoder, open_checkpoint
from engine.models.runner import Runner, kv_shape
from engine.models.tokenizer import Tokenizer
from engine.models.tokenizer_files import read_object
from engine.pair import Side, check_pair
from engine.types import DrafterName

DEFAULT_MAX_LEN = 4096  # tokens, where the target allows more and max_model_len is not set

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models of an engine and what belongs to them."""

    target: Runner
    drafter: ChainedDrafter
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]  # of requests, by the names of SamplingParams


def load_models(config: EngineConfig) -> LoadedModels:
    """Load what the configuration names. Raises ConfigError naming both sides of any conflict."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    keep_freed_memory()
    limit_compiled_products()  # before any weight is loaded
    device = _device(config.device)
    target_checkpoint = open_checkpoint(config.target)
    tokenizer = Tokenizer(config.target)
    eos_ids = _eos_ids(target_checkpoint)
    defaults = sampling_defaults(target_checkpoint.path) if config.generation_config == "auto" else {}
    checkpoints = [target_checkpoint]
    translation = None
    if config.draft is not None:
        draft = open_checkpoint(config.draft)
        draft_side = Side(config.draft, Tokenizer(config.draft), _eos_ids(draft), draft.shape.vocab_size)
        target_side = Side(config.target, tokenizer, eos_ids, target_checkpoint.shape.vocab_size)
        translation = check_pair(target_side, draft_side)
        checkpoints.append(draft)
    max_len = _max_model_len(config, target_checkpoint)
    target, *drafts = _make_runners(config, checkpoints, max_len, device)
    model = _model_drafter(config, target, drafts[0], translation) if drafts else None
    return LoadedModels(target, make_drafters(model, device), tokenizer, eos_ids, defaults)


def _model_drafter(
    config: EngineConfig, target: Runner, draft: Runner, translation: Translation | None
) -> ModelDrafter:
    """Beside other sequences the draft model reads a chunk that takes it as long as the target's chunk takes the
    target, and at least two tokens for each running sequence."""
    limit = config.max_step_tokens
    chunk = min(limit, config.chunk(0) * target.decoder.weight_bytes // draft.decoder.weight_bytes)
    return ModelDrafter(draft, target.vocab_size, limit, max(2 * config.max_running, chunk), translation)


def make_drafters(model: ModelDrafter | None, device: torch.device) -> ChainedDrafter:
    """Every drafter by its name. In `cascade` the draft model is asked only where no other drafter has an offer."""
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
    return ChainedDrafter(chains, device)


def _device(name: str) -> torch.device:
    """Raises ConfigError for a malformed name and for a device that this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is malformed: {error}") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device {name!r} is not available: torch sees {count} CUDA devices here")
    return device


def _make_runners(
    config: EngineConfig, checkpoints: Seq[Checkpoint], max_len: int, device: torch.device
) -> list[Runner]:
    """Load each model and give it its share of the KV memory that is left beside the weights."""
    dtype = getattr(torch, config.dtype)
    decoders = [load_decoder(c, dtype=dtype, device=device, max_len=max_len) for c in checkpoints]
    weights = sum(decoder.weight_bytes for decoder in decoders)
    activations = 0
    if config.cache == "paged" and (device.type == "cuda" or config.memory_fraction is not None):
        largest = [partial(_largest_pass, config, decoder, max_len, device) for decoder in decoders]
        activations = max(measure_activations(run, device) for run in largest)
    shapes = [kv_shape(decoder.config, dtype, device) for decoder in decoders]
    sized = layouts(config, shapes, weights, activations, max_len, device_memory(device))
    return [
        Runner(decoder, _within_context(layout, decoder.config.max_position_embeddings), device)
        for decoder, layout in zip(decoders, sized, strict=True)
    ]


def _within_context(layout: Layout, context: int) -> Layout:
    """The layout without the positions that a draft of a shorter context than the target's never uses. One block is
    added, because a single sequence may have to copy a block that it shares with the prefix index."""
    if context >= layout.max_len:
        return layout
    blocks = layout.slots * ceil(context / layout.block_size) + 1 if layout.paged else 0
    return replace(layout, max_len=context, blocks=min(layout.blocks, blocks))


def _largest_pass(config: EngineConfig, decoder: Decoder, max_len: int, device: torch.device) -> None:
    """Run a pass of max_step_tokens, over as few sequences as possible, with as many logits as a round may need.

    Its small cache is counted as activations, so the measured size is an upper bound.
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


def _max_model_len(config: EngineConfig, target: Checkpoint) -> int:
    """Tokens of the longest sequence that is served, prompt and output together. The draft's own limit does not count:
    beyond it nothing is drafted."""
    limit = target.shape.max_position_embeddings
    if config.max_model_len is None:
        if limit > DEFAULT_MAX_LEN:
            log.info("max_model_len %d of the model's %d; set max_model_len to serve more", DEFAULT_MAX_LEN, limit)
        return min(limit, DEFAULT_MAX_LEN)
    if config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is too long: target {config.target} allows {limit}")
    if config.max_model_len < 2:
        raise ConfigError(
            f"max_model_len must be at least 2, a prompt token and an output token, not {config.max_model_len}"
        )
    return config.max_model_len


def _eos_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """End-of-sequence tokens. generation_config.json goes before config.json, as in transformers."""
    generation = read_object(checkpoint.path / "generation_config.json")
    eos = generation.get("eos_token_id", checkpoint.raw.get("eos_token_id"))
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
