"""Build what an engine runs on: the target, the draft model, the other drafters, the tokenizer.

The checkpoints are checked against each other before any weight is read.
"""

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import cast

import torch

from cache.layout import Layout
from engine import IDLE_WORKERS_SPIN
from engine.config import ConfigError, EngineConfig
from engine.device.captured_laws import law_dtype
from engine.device.graphs import graph_room
from engine.device.round_limits import fixed_bytes
from engine.drafters.chain import Chain, ChainedDrafter, with_model
from engine.drafters.lookahead import LookaheadDrafter
from engine.drafters.lookup import lookup_drafter
from engine.drafters.merged import MergedDrafter, draft_models
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import ngram_drafter
from engine.drafters.prediction import PredictionDrafter
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.translation import Translation
from engine.heads.eagle import HeadTarget
from engine.heads.eagle_drafter import EagleDrafter
from engine.heads.eagle_files import EagleCheckpoint, load_eagle, open_eagle
from engine.heads.eagle_runner import HeadRunner
from engine.heads.files import head_kind, refuse_heads
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_loading import StateHeadsFolder
from engine.loading.end_tokens import end_tokens
from engine.loading.generation_config import sampling_defaults
from engine.loading.model_runners import Model, draft_runner, make_runners, states_bytes
from engine.loading.pair import Side, check_drafts
from engine.loading.planned_weights import beside_weights, planned_weights, roles, weight_forms
from engine.memory.budget import (
    COPIES_SHARE,
    choose_block_size,
    copies_bytes,
    device_memory,
    draft_layout,
    kv_bytes,
    layouts,
    room_beside,
)
from engine.memory.errors import out_of_memory
from engine.memory.host import keep_freed_memory, limit_compiled_products
from engine.memory.largest_rounds import MakeModels, measure_largest_rounds
from engine.memory.machine import DeviceMemory
from engine.memory.table import MemoryTable, ModelMemory
from engine.models.decoder import DecoderConfig, LanguageModel
from engine.models.hub import checkpoint_directory
from engine.models.loader import Checkpoint, load_model, open_checkpoint
from engine.models.products import Weights
from engine.models.runner import Runner, kv_shape
from engine.models.tokenizer import Tokenizer
from engine.profiling.threads import choose_threads
from engine.sampling.kept_draws import compile_draws
from engine.types import DrafterName

DEFAULT_MAX_LEN = 4096  # tokens, where the target allows more and max_model_len is not set
CHANNEL = "<|channel|>"  # begins a channel of a reply in gpt_oss's format

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models of an engine and what belongs to them."""

    target: Runner
    drafter: ChainedDrafter
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]  # of requests, by the names of SamplingParams
    room: int  # bytes that are left on the device once all KV memory is used


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
    if IDLE_WORKERS_SPIN and torch.get_num_threads() > 1 and config.device != "cuda":
        log.warning("torch was imported before engine, so its idle threads keep CPUs busy: import engine first")
    keep_freed_memory()
    limit_compiled_products()  # before any weight is loaded
    device = _device(config.device)
    if device.type == "cpu":
        compile_draws()
    began = perf_counter()
    opened = _open_checkpoints(config)
    log.info("configurations and tokenizers are read (%.1f s)", perf_counter() - began)
    make_models = partial(_model_drafters, config, opened.translation, opened.heads)
    (target, *drafts), room = _make_runners(config, opened, device, make_models)
    drafter = make_drafters(make_models(target, drafts), device, config.suffix_tokens, trees=not config.deterministic)
    return LoadedModels(target, drafter, opened.tokenizer, opened.eos_ids, opened.sampling_defaults, room)


@dataclass(frozen=True, slots=True)
class _OpenedCheckpoints:
    """What the files beside the weights say, checked against each other."""

    checkpoints: list[Checkpoint]  # the target's, then those of the drafts
    tokenizer: Tokenizer  # the target's
    eos_ids: frozenset[int]  # the target's
    sampling_defaults: Mapping[str, float]
    translation: Translation | None  # None: the drafts have the target's token ids, or there are none
    max_len: int  # tokens
    heads: StateHeadsFolder | None  # the draft, if it has no KV memory; then it is not among the checkpoints

    def narrowed(self, config: EngineConfig) -> EngineConfig:
        """The configuration without a draft that is not among the checkpoints."""
        if self.heads is None:
            return config
        return replace(config, draft=None, drafts=(), drafter=None, draft_weights="as_is")


def _open_checkpoints(config: EngineConfig) -> _OpenedCheckpoints:
    """Open the target and the drafts. Raises ConfigError naming both sides of any conflict."""
    directories = [Path(checkpoint_directory(name)) for name in (config.target, *config.draft_models)]
    kinds = {path: kind for path in directories if (kind := head_kind(path)) is not None}
    refuse_heads(list(kinds), directories[0], len(directories) - 1)
    target = open_checkpoint(str(directories[0]))
    tokenizer = Tokenizer(str(target.path))
    eos_ids = end_tokens(target, tokenizer)
    if tokenizer.vocab.get(CHANNEL) in tokenizer.special_ids:
        log.warning(
            "%s writes chats in channels (%s). Special tokens are left out of texts, so a reply holds the text of all "
            "channels, one behind the other: analysis…assistantfinal…",
            *(target.path, CHANNEL),
        )
    defaults = sampling_defaults(target.path) if config.generation_config == "auto" else {}
    checkpoints, sides, heads = [target], list[Side](), None
    for name, directory in zip(config.draft_models, directories[1:], strict=True):
        kind = kinds.get(directory)
        if kind == "medusa" or kind == "mlp_speculator" or kind == "pass":
            heads = StateHeadsFolder(directory, kind)
            continue
        if kind is not None:
            checkpoints.append(open_eagle(directory, kind, target.shape))
            continue
        draft = open_checkpoint(str(directory))
        own = Tokenizer(str(draft.path))
        sides.append(Side(name, own, end_tokens(draft, own), draft.shape.vocab_size))
        checkpoints.append(draft)
    translation = check_drafts(Side(config.target, tokenizer, eos_ids, target.shape.vocab_size), sides)
    if config.deterministic:
        _check_deterministic(target)
    max_len = _max_model_len(config, target)
    return _OpenedCheckpoints(checkpoints, tokenizer, eos_ids, defaults, translation, max_len, heads)


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
    config: EngineConfig,
    translation: Translation | None,
    heads: StateHeadsFolder | None,
    target: Runner,
    drafts: Seq[Runner],
) -> list[ModelDrafter] | list[StateDrafter]:
    """The drafters of the draft models, or the drafter of heads without memory.

    Beside other sequences a draft model reads prompts in chunks. A chunk takes it as long as the target's chunk takes
    the target. It has at least two tokens for each running sequence.
    """
    if heads is not None:
        return [heads.drafter(config, target)]
    limit, made = config.max_step_tokens, list[ModelDrafter]()
    for rank, draft in enumerate(drafts):
        chunk = min(limit, config.chunk(0) * target.decoder.weight_bytes // draft.decoder.weight_bytes)
        chunk = max(2 * config.max_running, chunk)
        make = EagleDrafter if isinstance(draft, HeadRunner) else ModelDrafter
        made.append(make(draft, target.vocab_size, limit, chunk, translation, rank))
        made[-1].compile()
    return made


def load_draft(config: EngineConfig, target: Runner, room: int) -> ModelDrafter | StateDrafter:
    """Load the configuration's only draft beside a target that serves. It gets KV memory by the target's layout. The
    caller still has to name the reader of the target's states.

    room: bytes that it may take. Raises ConfigError as load_models does, and for a draft that needs more.
    """
    device, dtype, opened = target.device, target.decoder.dtype, _open_checkpoints(config)
    if opened.heads is not None:
        room_beside(config.draft, opened.heads.load(config, target.decoder, device), 0, room)
        return opened.heads.joining(config, target)
    shape, beside = opened.checkpoints[1].shape, kv_shape(target.decoder.config, dtype, device)
    kv = kv_shape(shape, dtype, device)
    layout = draft_layout(config, target.layout, beside, kv, shape.max_position_embeddings)
    size = kv_bytes(layout, kv.token_bytes, device)
    left = room_beside(config.draft, planned_weights(config, opened.checkpoints, dtype, device)[1], size, room)
    copies = [0, int(COPIES_SHARE * left)]
    model = _load(config, opened.checkpoints, dtype, device, opened.max_len, copies, target.decoder)[1]
    room_beside(config.draft, model.weight_bytes, size + states_bytes(config, [model]), room)
    runner = draft_runner(config, model, layout, target.staging)
    return _model_drafters(config, opened.translation, None, target, [runner])[0]


def make_drafters(
    models: Seq[ModelDrafter] | Seq[StateDrafter], device: torch.device, suffix_tokens: int, *, trees: bool = True
) -> ChainedDrafter:
    """Every drafter by its name. In `cascade` the first draft model is asked only where no other drafter has an offer.

    suffix_tokens: the most tokens of finished outputs that `suffix` keeps. trees: whether a round may check trees.
    """
    lookup, prediction = lookup_drafter(), PredictionDrafter()
    chains: dict[DrafterName, Chain] = {
        "ngram": (("ngram", ngram_drafter()),),
        "lookup": (("lookup", lookup),),
        "prediction": (("prediction", prediction),),
        "cascade": (("prediction", prediction), ("lookup", lookup)),
        "suffix": (("suffix", SuffixDrafter(suffix_tokens)),),
        "lookahead": (("lookahead", LookaheadDrafter(trees=trees)),),
    }
    if models:
        model = draft_models(models)
        chains = with_model(chains, model)
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
    config, checkpoints, max_len = opened.narrowed(config), opened.checkpoints, opened.max_len
    weights = planned_weights(config, checkpoints, dtype, device)
    memory = beside_weights(device, weights)
    shapes, contexts = [kv_shape(c.shape, dtype, device) for c in checkpoints], _contexts(c.shape for c in checkpoints)
    sized = layouts(config, shapes, sum(weights), 0, max_len, memory, contexts)
    return _memory_table(config, [c.shape for c in checkpoints], dtype, weights, sized, None, memory)


def _steady(config: EngineConfig) -> list[bool]:
    """Whether the rows of each model are independent of each other. The draft models' numbers do not reach the text."""
    return [config.deterministic, *(False for _ in config.draft_models)]


def _make_runners(
    given: EngineConfig, opened: _OpenedCheckpoints, device: torch.device, make_models: MakeModels
) -> tuple[list[Runner], int]:
    """Load each model and give it its share of the KV memory that is left beside the weights. Returns the runners and
    the bytes that are left then."""
    config, checkpoints, max_len = opened.narrowed(given), opened.checkpoints, opened.max_len
    dtype = _dtype(config.dtype, device)
    planned = planned_weights(config, checkpoints, dtype, device)
    beside = beside_weights(device, planned)
    copies = copies_bytes(
        config, [kv_shape(c.shape, dtype, device) for c in checkpoints], sum(planned), max_len, beside
    )
    try:
        decoders = _load(config, checkpoints, dtype, device, max_len, [copies * n // sum(planned) for n in planned])
        of_heads = opened.heads.load(given, cast(LanguageModel, decoders[0]), device) if opened.heads else 0
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
    of_graphs = graph_room(activations or 0) if config.graphs else 0
    block_size = choose_block_size(config, shapes, config.max_running, max_len) if config.graphs else 0
    law_bytes = law_dtype(dtype).itemsize
    fixed = fixed_bytes(config, block_size, max_len, decoders[0].config.vocab_size, law_bytes)
    held = (activations or 0) + states_bytes(config, decoders) + of_heads + of_graphs + fixed
    sized = layouts(config, shapes, sum(weights), held, max_len, memory, contexts)
    table = _memory_table(config, [d.config for d in decoders], dtype, weights, sized, activations, memory)
    table = replace(table, graph_bytes=of_graphs + fixed)
    table.tell()
    return make_runners(config, decoders, table.layouts, device, of_graphs), table.room


def _load(
    config: EngineConfig,
    checkpoints: Seq[Checkpoint],
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    copies: Seq[int],
    target: LanguageModel | None = None,
) -> list[Model]:
    """The weights of each model, the target's first. copies: bytes that second forms of its weights may take. target:
    the target, if it is loaded already."""
    loaded: list[Model] = [] if target is None else [target]
    wanted = zip(checkpoints, weight_forms(config), _steady(config), copies, strict=True)
    for checkpoint, form, steady, size in islice(wanted, len(loaded), None):
        context = min(max_len, checkpoint.shape.max_position_embeddings)  # a draft's context may be shorter
        weights = Weights(form, config.quantize_head, config.products, steady, size)
        if isinstance(checkpoint, EagleCheckpoint):
            body = cast(HeadTarget, loaded[0])
            head = load_eagle(checkpoint, body, dtype=dtype, device=device, max_len=context, weights=weights)
            loaded.append(head)
        else:
            loaded.append(load_model(checkpoint, dtype=dtype, device=device, max_len=context, weights=weights))
    return loaded


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
    forms = [str(dtype).removeprefix("torch.") if form == "as_is" else form for form in weight_forms(config)]
    models = [
        ModelMemory(role, name, form, size, kv_shape(shape, dtype, device).token_bytes)
        for role, name, form, size, shape in zip(roles(len(names)), names, forms, weights, configs, strict=True)
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
