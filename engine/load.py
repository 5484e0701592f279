"""Build what an engine runs on: the target, the draft model, the other drafters, the tokenizer.

The checkpoints are checked against each other before any weight is read.
"""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod

import torch

from cache.layout import Layout
from engine.config import ConfigError, EngineConfig
from engine.drafters.chain import Chain, ChainedDrafter
from engine.drafters.lookup import lookup_drafter
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import ngram_drafter
from engine.drafters.prediction import PredictionDrafter
from engine.generation_config import sampling_defaults
from engine.host_memory import keep_freed_memory, limit_compiled_products, out_of_memory
from engine.largest_rounds import measure_largest_rounds
from engine.memory_budget import DeviceMemory, device_memory, layouts
from engine.memory_table import MemoryTable, ModelMemory
from engine.models.decoder import DecoderConfig
from engine.models.hub import checkpoint_directory
from engine.models.loader import Checkpoint, load_decoder, open_checkpoint
from engine.models.runner import Runner, kv_shape
from engine.models.shards import Shards
from engine.models.tokenizer import Tokenizer
from engine.models.tokenizer_files import read_object
from engine.pair import Side, check_pair
from engine.types import DrafterName

DEFAULT_MAX_LEN = 4096  # tokens, where the target allows more and max_model_len is not set

ROLES = ("target", "draft")

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
    target_checkpoint = open_checkpoint(checkpoint_directory(config.target))
    tokenizer = Tokenizer(str(target_checkpoint.path))
    eos_ids = _eos_ids(target_checkpoint)
    defaults = sampling_defaults(target_checkpoint.path) if config.generation_config == "auto" else {}
    checkpoints = [target_checkpoint]
    if config.draft is not None:
        draft = open_checkpoint(checkpoint_directory(config.draft))
        draft_side = Side(config.draft, Tokenizer(str(draft.path)), _eos_ids(draft))
        check_pair(Side(config.target, tokenizer, eos_ids), draft_side)
        checkpoints.append(draft)
    max_len = _max_model_len(config, target_checkpoint)
    target, *drafts = _make_runners(config, checkpoints, max_len, device)
    model = _model_drafter(config, target, drafts[0]) if drafts else None
    return LoadedModels(target, make_drafters(model, device), tokenizer, eos_ids, defaults)


def _model_drafter(config: EngineConfig, target: Runner, draft: Runner) -> ModelDrafter:
    """Beside other sequences the draft model reads a chunk that takes it as long as the target's chunk takes the
    target, and at least two tokens for each running sequence."""
    limit = config.max_step_tokens
    chunk = min(limit, config.chunk(0) * target.decoder.weight_bytes // draft.decoder.weight_bytes)
    return ModelDrafter(draft, target.vocab_size, limit, max(2 * config.max_running, chunk))


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


def plan_memory(config: EngineConfig) -> MemoryTable:
    """What `load_models` would use, from the files' headers: no weight is read and no round is run.

    Raises ConfigError for what cannot be served.
    """
    device = _device(config.device)
    given = [config.target, *([] if config.draft is None else [config.draft])]
    checkpoints = [open_checkpoint(checkpoint_directory(name)) for name in given]
    dtype, max_len = getattr(torch, config.dtype), _max_model_len(config, checkpoints[0])
    weights = [_planned_weights(c, dtype, device) for c in checkpoints]
    memory = _beside_weights(config, device, weights)
    sized = layouts(config, [kv_shape(c.shape, dtype, device) for c in checkpoints], sum(weights), 0, max_len, memory)
    return _memory_table(config, [c.shape for c in checkpoints], weights, sized, None, memory)


def _planned_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a model's weights in memory. On a CPU the head's product is packed, so a tied head is a second copy."""
    shape = checkpoint.shape
    copied = shape.vocab_size * shape.hidden_size if shape.tied and device.type == "cpu" else 0
    return (sum(prod(t.shape) for t in Shards(checkpoint.path).tensors.values()) + copied) * dtype.itemsize


def _beside_weights(config: EngineConfig, device: torch.device, weights: Seq[int]) -> DeviceMemory:
    """The memory that is left beside weights that are not loaded yet. Raises ConfigError if they do not fit."""
    memory = device_memory(device)
    if sum(weights) > memory.available:
        parts = " and ".join(f"{role} {n / 2**20:,.1f} MiB" for role, n in zip(ROLES, weights, strict=False))
        raise ConfigError(
            f"the weights do not fit on {device}: {parts} in {config.dtype}, and {memory.available / 2**20:,.1f} MiB "
            "are available: choose smaller models or a smaller dtype"
        )
    return memory._replace(available=memory.available - sum(weights))


def _make_runners(
    config: EngineConfig, checkpoints: Seq[Checkpoint], max_len: int, device: torch.device
) -> list[Runner]:
    """Load each model and give it its share of the KV memory that is left beside the weights."""
    dtype = getattr(torch, config.dtype)
    _beside_weights(config, device, [_planned_weights(c, dtype, device) for c in checkpoints])
    try:
        decoders = [load_decoder(c, dtype=dtype, device=device, max_len=max_len) for c in checkpoints]
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(f"the weights do not fit on {device}: {error}") from error
    weights = [decoder.weight_bytes for decoder in decoders]
    activations = None
    if config.cache == "paged" and (device.type == "cuda" or config.memory_fraction is not None):
        make_drafter = partial(_model_drafter, config)
        activations = measure_largest_rounds(config, decoders, max_len, device_memory(device), device, make_drafter)
    shapes, memory = [kv_shape(decoder.config, dtype, device) for decoder in decoders], device_memory(device)
    sized = layouts(config, shapes, sum(weights), activations or 0, max_len, memory)
    table = _memory_table(config, [d.config for d in decoders], weights, sized, activations, memory)
    log.info("memory:\n%s", table)
    return [Runner(decoder, layout, device) for decoder, layout in zip(decoders, table.layouts, strict=True)]


def _memory_table(
    config: EngineConfig,
    configs: Seq[DecoderConfig],
    weights: Seq[int],
    sized: Seq[Layout],
    activations: int | None,
    memory: DeviceMemory,
) -> MemoryTable:
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    names = (config.target, config.draft or "")
    models = [
        ModelMemory(role, name, config.dtype, size, kv_shape(shape, dtype, device).token_bytes)
        for role, name, size, shape in zip(ROLES, names, weights, configs, strict=False)
    ]
    within = [_within_context(n, c.max_position_embeddings) for n, c in zip(sized, configs, strict=True)]
    return MemoryTable(config.device, tuple(models), tuple(within), activations, memory)


def _within_context(layout: Layout, context: int) -> Layout:
    """The layout without the positions that a draft of a shorter context than the target's never uses. One block is
    added, because a single sequence may have to copy a block that it shares with the prefix index."""
    if context >= layout.max_len:
        return layout
    blocks = layout.slots * ceil(context / layout.block_size) + 1 if layout.paged else 0
    return replace(layout, max_len=context, blocks=min(layout.blocks, blocks))


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
