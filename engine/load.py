"""Build what an engine runs on: the target, the draft model, the other drafters, the tokenizer.

The checkpoints are checked against each other before any weight is read.
"""

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod
from time import perf_counter

import torch

from cache.layout import Layout
from engine.config import ConfigError, EngineConfig, WeightForm
from engine.drafters.chain import Chain, ChainedDrafter
from engine.drafters.lookahead import LookaheadDrafter
from engine.drafters.lookup import lookup_drafter
from engine.drafters.merged import MergedDrafter, draft_models
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import ngram_drafter
from engine.drafters.prediction import PredictionDrafter
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.translation import Translation
from engine.generation_config import sampling_defaults
from engine.host_memory import keep_freed_memory, limit_compiled_products, out_of_memory
from engine.largest_rounds import MakeModels, measure_largest_rounds
from engine.machine_memory import DeviceMemory
from engine.memory_budget import copies_bytes, device_memory, layouts
from engine.memory_table import MemoryTable, ModelMemory
from engine.models.decoder import DecoderConfig
from engine.models.hub import checkpoint_directory
from engine.models.loader import Checkpoint, load_model, open_checkpoint
from engine.models.products import Weights
from engine.models.quantize import GROUP
from engine.models.quantized_checkpoints import quantisation
from engine.models.runner import Runner, kv_shape
from engine.models.shards import Shards
from engine.models.tokenizer import Tokenizer
from engine.models.tokenizer_files import read_object
from engine.pair import Side, check_drafts
from engine.threads import choose_threads
from engine.types import DrafterName

DEFAULT_MAX_LEN = 4096  # tokens, where the target allows more and max_model_len is not set

BYTES_OF_FORM = {
    "int8": 1.0,
    "int4": 0.5 + 4 / GROUP,
}  # per number of a product; int4 with a step and an offset per group

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models of an engine and what belongs to them."""

    target: Runner
    drafter: ChainedDrafter
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]  # of requests, by the names of SamplingParams


def with_threads(config: EngineConfig) -> EngineConfig:
    """The configuration with its number of threads, measured for the target's shape if it is left open. The forms of
    products are measured with these threads, so no weight may be loaded before."""
    if config.threads is not None or config.most_threads is None:
        return config
    shape = open_checkpoint(checkpoint_directory(config.target)).shape
    return replace(config, threads=choose_threads(shape, config.most_threads))


def load_models(config: EngineConfig) -> LoadedModels:
    """Load what the configuration names. Raises ConfigError naming both sides of any conflict."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    keep_freed_memory()
    limit_compiled_products()  # before any weight is loaded
    device = _device(config.device)
    began = perf_counter()
    opened = _open_checkpoints(config)
    log.info("configurations and tokenizers are read (%.1f s)", perf_counter() - began)
    make_models = partial(_model_drafters, config, opened.translation)
    target, *drafts = _make_runners(config, opened.checkpoints, opened.max_len, device, make_models)
    drafter = make_drafters(make_models(target, drafts), device, config.suffix_tokens, trees=not config.deterministic)
    return LoadedModels(target, drafter, opened.tokenizer, opened.eos_ids, opened.sampling_defaults)


@dataclass(frozen=True, slots=True)
class _OpenedCheckpoints:
    """What the files beside the weights say, checked against each other."""

    checkpoints: list[Checkpoint]  # the target's, then those of the drafts
    tokenizer: Tokenizer  # the target's
    eos_ids: frozenset[int]  # the target's
    sampling_defaults: Mapping[str, float]
    translation: Translation | None  # None: the drafts have the target's token ids, or there are none
    max_len: int  # tokens


def _open_checkpoints(config: EngineConfig) -> _OpenedCheckpoints:
    """Open the target and the drafts. Raises ConfigError naming both sides of any conflict."""
    target = open_checkpoint(checkpoint_directory(config.target))
    tokenizer, eos_ids = Tokenizer(str(target.path)), _eos_ids(target)
    defaults = sampling_defaults(target.path) if config.generation_config == "auto" else {}
    checkpoints, sides = [target], list[Side]()
    for name in config.draft_models:
        draft = open_checkpoint(checkpoint_directory(name))
        sides.append(Side(name, Tokenizer(str(draft.path)), _eos_ids(draft), draft.shape.vocab_size))
        checkpoints.append(draft)
    translation = check_drafts(Side(config.target, tokenizer, eos_ids, target.shape.vocab_size), sides)
    if config.deterministic:
        _check_deterministic(target)
    max_len = _max_model_len(config, target)
    return _OpenedCheckpoints(checkpoints, tokenizer, eos_ids, defaults, translation, max_len)


def _check_deterministic(target: Checkpoint) -> None:
    """Raises ConfigError for a target whose rows would depend on each other through what `deterministic` lacks."""
    traits = target.shape.traits
    lacking = {
        "is not native": not target.native,
        "has sliding windows": any(window is not None for window in traits.windows),
        "has soft-capped scores": traits.attention_softcap is not None,
        "has attention sinks": traits.sinks,
        "has experts": traits.experts is not None,
    }
    if found := [what for what, is_so in lacking.items() if is_so]:
        raise ConfigError(f"deterministic cannot be honoured: {target.path} {' and '.join(found)}: choose false")


def _model_drafters(
    config: EngineConfig, translation: Translation | None, target: Runner, drafts: Seq[Runner]
) -> list[ModelDrafter]:
    """Beside other sequences a draft model reads a chunk that takes it as long as the target's chunk takes the target,
    and at least two tokens for each running sequence."""
    limit, made = config.max_step_tokens, list[ModelDrafter]()
    for rank, draft in enumerate(drafts):
        chunk = min(limit, config.chunk(0) * target.decoder.weight_bytes // draft.decoder.weight_bytes)
        chunk = max(2 * config.max_running, chunk)
        made.append(ModelDrafter(draft, target.vocab_size, limit, chunk, translation, rank))
    return made


def make_drafters(
    models: Seq[ModelDrafter], device: torch.device, suffix_tokens: int, *, trees: bool = True
) -> ChainedDrafter:
    """Every drafter by its name. In `cascade` the first draft model is asked only where no other drafter has an offer.

    suffix_tokens: the most tokens of finished outputs that `suffix` keeps. trees: whether a round may check trees.
    """
    lookup, prediction = lookup_drafter(device), PredictionDrafter(device)
    chains: dict[DrafterName, Chain] = {
        "ngram": (("ngram", ngram_drafter(device)),),
        "lookup": (("lookup", lookup),),
        "prediction": (("prediction", prediction),),
        "cascade": (("prediction", prediction), ("lookup", lookup)),
        "suffix": (("suffix", SuffixDrafter(device, suffix_tokens)),),
        "lookahead": (("lookahead", LookaheadDrafter(device, trees=trees)),),
    }
    if models:
        model = draft_models(models)
        chains["model"] = (("model", model),)
        chains["cascade"] += (("model", model),)
        if isinstance(model, MergedDrafter):
            chains["merged"] = (("merged", model),)
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


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of this name. `auto` is float32 on CPU. On a GPU it is bfloat16, or float16 if the GPU has no bfloat16:
    torch would emulate it there."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def plan_memory(config: EngineConfig) -> MemoryTable:
    """What `load_models` would use, from the files' headers: no weight is read and no round is run.

    Raises ConfigError for what cannot be served.
    """
    device = _device(config.device)
    dtype, opened = _dtype(config.dtype, device), _open_checkpoints(config)
    checkpoints, max_len = opened.checkpoints, opened.max_len
    weights = _planned_weights(config, checkpoints, dtype, device)
    memory = _beside_weights(device, weights)
    shapes, contexts = [kv_shape(c.shape, dtype, device) for c in checkpoints], _contexts(c.shape for c in checkpoints)
    sized = layouts(config, shapes, sum(weights), 0, max_len, memory, contexts)
    return _memory_table(config, [c.shape for c in checkpoints], dtype, weights, sized, None, memory)


def _planned_weights(
    config: EngineConfig, checkpoints: Seq[Checkpoint], dtype: torch.dtype, device: torch.device
) -> list[int]:
    """Bytes of each model's weights in memory, at least. The copies of small products are not counted."""
    planned = []
    for checkpoint, form in zip(checkpoints, _forms(config), strict=True):
        tensors, shape = Shards(checkpoint.path).tensors, checkpoint.shape
        product_bytes = BYTES_OF_FORM.get(form, dtype.itemsize)
        if quantised := quantisation(checkpoint.path, checkpoint.raw.get("quantization_config")):
            kept = quantised.bits == 8 and form != "int4" and device.type == "cpu"  # its integers are used as they are
            head_bytes = 0 if shape.tied and device.type != "cpu" else product_bytes
            tables = shape.vocab_size * shape.hidden_size * (dtype.itemsize + head_bytes)
            planned.append(ceil(tables + shape.layer_numbers * (1 if kept else product_bytes)))
            continue
        if not checkpoint.native:
            planned.append(sum(prod(tensor.shape) for tensor in tensors.values()) * dtype.itemsize)
            continue
        # On a CPU the head's product is packed, so a tied head is a second copy.
        size = shape.vocab_size * shape.hidden_size * product_bytes if shape.tied and device.type == "cpu" else 0
        for name, tensor in tensors.items():
            product = len(tensor.shape) > 1 and not name.endswith("embed_tokens.weight")
            size += prod(tensor.shape) * (product_bytes if product else dtype.itemsize)
        planned.append(ceil(size))
    return planned


def _beside_weights(device: torch.device, weights: Seq[int]) -> DeviceMemory:
    """The memory that is left beside weights that are not loaded yet. Raises ConfigError if they do not fit."""
    memory = device_memory(device)
    if sum(weights) > memory.available:
        parts = " and ".join(
            f"{role} {n / 2**20:,.1f} MiB" for role, n in zip(_roles(len(weights)), weights, strict=True)
        )
        raise ConfigError(
            f"the weights do not fit on {device}: {parts}, and {memory.available / 2**20:,.1f} MiB are available: "
            "choose smaller models, a smaller dtype or int8 or int4 weights"
        )
    return memory._replace(available=memory.available - sum(weights))


def _roles(count: int) -> list[str]:
    """The roles of so many models."""
    return ["target", "draft"] if count == 2 else ["target", *(f"draft {n + 1}" for n in range(count - 1))]


def _steady(config: EngineConfig) -> list[bool]:
    """Whether the rows of each model are independent of each other. The draft models' numbers do not reach the text."""
    return [config.deterministic, *(False for _ in config.draft_models)]


def _forms(config: EngineConfig) -> list[WeightForm]:
    return [config.target_weights, *(config.draft_weights for _ in config.draft_models)]


def _make_runners(
    config: EngineConfig,
    checkpoints: Seq[Checkpoint],
    max_len: int,
    device: torch.device,
    make_models: MakeModels,
) -> list[Runner]:
    """Load each model and give it its share of the KV memory that is left beside the weights."""
    dtype = _dtype(config.dtype, device)
    planned = _planned_weights(config, checkpoints, dtype, device)
    beside = _beside_weights(device, planned)
    copies = copies_bytes(
        config, [kv_shape(c.shape, dtype, device) for c in checkpoints], sum(planned), max_len, beside
    )
    try:
        decoders = [
            load_model(
                c,
                dtype=dtype,
                device=device,
                max_len=min(max_len, c.shape.max_position_embeddings),  # a draft's context may be shorter
                weights=Weights(form, config.quantize_head, config.products, steady, copies * size // sum(planned)),
            )
            for c, form, steady, size in zip(checkpoints, _forms(config), _steady(config), planned, strict=True)
        ]
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(f"the weights do not fit on {device}: {error}") from error
    weights = [decoder.weight_bytes for decoder in decoders]
    activations = None
    if config.cache == "paged" and (device.type == "cuda" or config.memory_fraction is not None):
        activations = measure_largest_rounds(config, decoders, max_len, device_memory(device), device, make_models)
    shapes, memory = [kv_shape(decoder.config, dtype, device) for decoder in decoders], device_memory(device)
    contexts = _contexts(decoder.config for decoder in decoders)
    sized = layouts(config, shapes, sum(weights), activations or 0, max_len, memory, contexts)
    table = _memory_table(config, [d.config for d in decoders], dtype, weights, sized, activations, memory)
    table.tell()
    return [
        Runner(decoder, layout, device, deterministic=steady)
        for decoder, layout, steady in zip(decoders, table.layouts, _steady(config), strict=True)
    ]


def _memory_table(
    config: EngineConfig,
    configs: Seq[DecoderConfig],
    dtype: torch.dtype,
    weights: Seq[int],
    sized: Seq[Layout],
    activations: int | None,
    memory: DeviceMemory,
) -> MemoryTable:
    names, device = (config.target, *config.draft_models), torch.device(config.device)
    forms = [str(dtype).removeprefix("torch.") if form == "as_is" else form for form in _forms(config)]
    models = [
        ModelMemory(role, name, form, size, kv_shape(shape, dtype, device).token_bytes)
        for role, name, form, size, shape in zip(_roles(len(names)), names, forms, weights, configs, strict=True)
    ]
    return MemoryTable(config.device, tuple(models), tuple(sized), activations, memory)


def _contexts(configs: Iterable[DecoderConfig]) -> list[int]:
    return [config.max_position_embeddings for config in configs]


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
    """End-of-sequence tokens. generation_config.json goes before config.json, as in transformers. One that the model
    cannot draw is left out, with a warning. Raises ConfigError for what is no token id."""
    generation = read_object(checkpoint.path / "generation_config.json")
    eos = generation.get("eos_token_id", checkpoint.raw.get("eos_token_id"))
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ConfigError(f"{checkpoint.path}: eos_token_id must be a token id or a list of them, not {eos!r}")
    vocab = checkpoint.shape.vocab_size
    if outside := [i for i in ids if not 0 <= i < vocab]:
        told = ", ".join(map(str, outside))
        log.warning("%s: end tokens %s are outside of the vocabulary of %d", checkpoint.path, told, vocab)
    return frozenset(ids) - set(outside)
