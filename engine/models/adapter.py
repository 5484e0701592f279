"""Any causal LM of transformers whose layers attend through its attention interface, over our KV memory.

transformers' own modules compute everything but attention. An attention function of ours is registered under NAME: it
writes K and V into the cache's rows and attends as native decoders do, so inputs are packed, and rollback, prefixes and
windows work alike. No code of a checkpoint is run. What cannot work is refused by name: without weights
(adapter_config.py), and after the weights are loaded, by comparing a few logits with those of transformers' attention.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cache.layout import Layout, make_cache
from cache.memory import make_storage
from cache.storage import KVShape
from engine.config import ConfigError
from engine.memory.errors import out_of_memory
from engine.models.attention import Attention, plan_attention
from engine.models.decoder import DecoderConfig, WatchedStates
from engine.models.pass_attention import PassAttention, Scoring
from engine.models.shards import Shards
from engine.models.spans import Span

NAME = "packed_kv"  # of the attention function
PROBE_TOKENS = 3
CHECKED_TEXTS = ((16, 8), (5, 1))  # tokens of each text in the first and in the second pass of the check
TOLERANCE = {8: 1e-3, 4: 1e-3, 2: 0.05}  # bytes of a number → relative difference of logits; norms compute in fp32
# What modules pass to their attention and what changes nothing here: masks and caches are not used.
NEUTRAL = frozenset(("position_ids", "position_embeddings", "use_cache", "cache_position", "dropout", "cache"))
OTHER_OUTPUTS = frozenset(("output_attentions", "output_hidden_states", "output_router_logits"))  # which nobody reads

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How a layer calls its attention."""

    layer: int | None
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    causal: bool
    unknown: tuple[str, ...]  # arguments that the function does not know


@dataclass(slots=True)
class Pass:
    """The pass that a model computes: what its attention modules share."""

    attention: PassAttention | None = None  # None: the model is examined, and nothing is computed
    calls: list[AttentionCall] = field(default_factory=list)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, N, head_dim], key and value [1, kv_heads, N, head_dim] of N
    packed tokens → ([1, N, heads, head_dim], no weights)."""
    current = cast(Pass, module.kv_pass)  # set by AdaptedModel
    layer: int | None = getattr(module, "layer_idx", None)
    if current.attention is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        unknown = tuple(
            name for name, given in others.items() if given is not None and name not in NEUTRAL | OTHER_OUTPUTS
        )
        dims = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        current.calls.append(AttentionCall(layer, *dims, sliding_window, bool(causal), unknown))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    assert layer is not None
    kv = torch.cat([key[0], value[0]]).transpose(0, 1)  # [N, 2·kv_heads, head_dim]
    scoring = Scoring(scaling, sliding_window, softcap, s_aux)
    attended = current.attention(layer, query[0].transpose(0, 1), kv, scoring)
    return attended.view(1, query.shape[2], query.shape[1], -1), None


def no_mask(**_: Any) -> None:
    """Our attention makes its own masks."""


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


class States:
    """A model's output that holds nothing but its states: no cache, attentions or router's logits."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class ReplacedBase(nn.Module):
    """A causal LM's model without its head; for the head alone it returns `hidden` [1, R, hidden] instead of a pass."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.hidden: Tensor | None = None
        self.read = False  # whether `hidden` was asked for

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.hidden is not None:
            self.read = True
            return States(self.hidden)
        return self.base(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


class AdaptedModel:
    """A causal LM of transformers as a LanguageModel."""

    def __init__(self, model: Any, config: DecoderConfig) -> None:
        self.config = config
        self._model = model.eval().requires_grad_(False)
        self._pass = Pass()
        for module in model.modules():
            module.kv_pass = self._pass
        decoder = model.get_decoder()
        (name,) = (name for name, module in model.named_modules() if module is decoder and name)
        self._base = ReplacedBase(decoder)
        model.set_submodule(name, self._base)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The product that gives the logits, without what the model does to them."""
        head: Callable[[Tensor], Tensor] = self._model.get_output_embeddings()
        return head

    @property
    def can_capture(self) -> bool:
        return False

    @property
    def block_rows(self) -> int:
        return 0

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._model.parameters())

    def forward(self, ids: Tensor, attention: PassAttention, watched: WatchedStates | None = None) -> Tensor:
        """As Decoder.forward, but the final norm is applied to the states."""
        self._pass.attention = attention
        try:
            positions = attention.positions[None]
            mask = torch.ones_like(ids[None])  # without it transformers looks for the texts' ends, and waits for a GPU
            output = self._base(
                input_ids=ids[None],
                attention_mask=mask,
                position_ids=positions,
                use_cache=False,
                output_hidden_states=watched is not None,
            )
        finally:
            self._pass.attention = None
        if watched is not None:
            for layer, states in enumerate(output.hidden_states or ()):  # some modules give none
                if layer in watched.layers:
                    watched.keep(layer, states[0])
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] → [R, vocab], by the model's own head and what it does to its logits."""
        self._base.hidden = hidden[None]
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._base.hidden = None
        return logits.to(self.dtype)

    def examine(self) -> list[AttentionCall]:
        """The calls of attention in a pass that computes nothing. For a model on the meta device."""
        self._pass.calls.clear()
        ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
        self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        width = self._model.get_output_embeddings().in_features
        self.logits(torch.zeros(PROBE_TOKENS, width, dtype=self.dtype, device="meta"))
        if not self._base.read:
            raise ValueError("its head does not read what its decoder returns")
        return list(self._pass.calls)

    def reference_logits(self, ids: Tensor) -> Tensor:
        """Logits [N, vocab] of one text, ids [N], by transformers' eager attention."""
        self._model.set_attn_implementation("eager")
        try:
            self._pass.calls.clear()
            logits: Tensor = self._model(input_ids=ids[None], use_cache=False).logits[0]
            assert not self._pass.calls, "transformers computed with our attention"
        finally:
            self._model.set_attn_implementation(NAME)
        return logits


def load_adapted(path: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> AdaptedModel:
    """Load the weights. Raises ConfigError for files or tensors that are missing, broken or of another shape, and for a
    model whose logits over our KV memory are not those of transformers."""
    stored = Shards(path).tensors  # refuses broken files, and names them
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False),
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, info = loaded
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        raise ConfigError(f"{path} cannot be loaded by transformers: {error}") from error
    for what in ("missing_keys", "mismatched_keys", "error_msgs", "unexpected_keys"):
        if found := sorted(map(str, info.get(what) or ())):
            raise ConfigError(
                f"{path}: {len(found)} of {len(stored)} tensors, {what.replace('_', ' ')}: {found[0]!r} …"
            )
    adapted = AdaptedModel(model.to(device), config)
    try:
        difference = largest_difference(adapted, device)
    except Exception as error:  # of any module
        raise ConfigError(f"{path} is a {config.architecture!r} model, whose modules fail here: {error}") from error
    if not difference <= TOLERANCE[dtype.itemsize]:
        raise ConfigError(
            f"{path} is a {config.architecture!r} model, whose logits over our KV memory differ from transformers' by "
            f"{difference:.1%}: it depends on something that is not supported"
        )
    dtype_name = str(dtype).removeprefix("torch.")
    log.warning(
        "%s: %r is no native architecture: transformers' modules compute it in %s, slower than a native one would",
        *(path, config.architecture, dtype_name),
    )
    return adapted


@torch.inference_mode()
def largest_difference(adapted: AdaptedModel, device: torch.device) -> float:
    """The relative difference of the logits of packed passes in pieces from transformers' of whole texts."""
    config, generator = adapted.config, torch.Generator().manual_seed(0)
    longest = min(config.max_position_embeddings, max(map(sum, CHECKED_TEXTS)))
    texts = [torch.randint(0, config.vocab_size, (min(sum(n), longest),), generator=generator) for n in CHECKED_TEXTS]
    layout = Layout(len(texts), longest)
    cache = make_cache(layout)
    heads = config.num_heads, config.num_kv_heads
    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, adapted.dtype, device)
    storage = make_storage(layout, cache, shape)
    parts: list[list[Tensor]] = [[] for _ in texts]
    starts = [0] * len(texts)
    for number in range(2):
        ends = [min(sum(n[: number + 1]), len(text)) for n, text in zip(CHECKED_TEXTS, texts, strict=True)]
        spans = [Span.at(i, a, b - a) for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]
        plan = plan_attention(
            spans, storage, num_heads=heads[0], num_kv_heads=heads[1], dtype=adapted.dtype, device=device
        )
        ids = torch.cat([texts[s.slot][s.start : s.end] for s in spans]).to(device)
        logits = adapted.logits(adapted.forward(ids, Attention(plan, storage)))
        for span, part in zip(spans, logits.split([s.size for s in spans]), strict=True):
            parts[span.slot].append(part)
        starts = ends
    differences = []
    for text, part in zip(texts, parts, strict=True):
        expected = adapted.reference_logits(text.to(device)).double()
        differences.append((torch.cat(part).double() - expected).norm() / expected.norm())
    return float(torch.stack(differences).max())  # NaN stays NaN
