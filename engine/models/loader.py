"""Hugging Face checkpoints → Decoder. Only safetensors, only local files, no code from the checkpoint."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.between_products import compile_layers, tell_gains
from engine.models.config_file import MODEL_TYPES, converted_config, read_config_file
from engine.models.decoder import Decoder, DecoderConfig, LanguageModel
from engine.models.few_rows_choice import layers_for_few_rows
from engine.models.layer import Layer, Norm, no_norm
from engine.models.mlp import Experts, GatedMLP, gating
from engine.models.model_families import read_config
from engine.models.norm import RMSNorm
from engine.models.pass_attention import Scoring
from engine.models.products import AS_IS, ProductMaker, Weight, Weights
from engine.models.quantized_checkpoints import QuantisedSource, quantisation
from engine.models.rope import RopeSize, rotation_table, uses_long_factors
from engine.models.shards import Part, Shards, TensorSource
from engine.models.traits import ExpertTraits

if TYPE_CHECKING:  # transformers takes a second to import, and its configuration classes one more
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

PREFIXES = ("model.", "language_model.model.", "model.language_model.")  # of a text model's tensors
FUSED = {("q", "k", "v"): "qkv_proj", ("gate", "up"): "gate_up_proj"}  # where a checkpoint has one tensor for several
LOADERS = 2  # threads: one reads a layer while the other packs the layer before
NOT_READ = ("rotary_emb.inv_freq",)  # tensors that old checkpoints hold although config.json says the same


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory with a config.json that can be served."""

    path: Path
    shape: DecoderConfig
    raw: dict[str, Any]  # config.json as transformers reads it, with older spellings converted
    native: bool = True  # False: transformers' modules compute it (adapter.py)


def open_checkpoint(directory: str) -> Checkpoint:
    """Read and check config.json. Raises ConfigError if it is malformed or needs what the decoder does not have."""
    path = Path(directory)
    given = read_config_file(path)
    kind = given["model_type"]
    if kind not in MODEL_TYPES:
        return adapted_checkpoint(path, kind)
    raw = converted_config(path, given, lambda: _transformers_config(path).to_dict())
    quantisation(path, raw.get("quantization_config"))
    try:
        return Checkpoint(path, read_config(kind, raw.get("text_config") or raw), raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: config.json: {error}") from None


def adapted_checkpoint(path: Path, kind: str) -> Checkpoint:
    """Open a checkpoint that transformers' own modules compute. Raises ConfigError for a kind that they do not know."""
    from transformers import __version__ as version
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        known = f"{', '.join(MODEL_TYPES)}, and what transformers {version} can run"
        raise ConfigError(f"{path} is a {kind!r} model; supported are {known}: choose another")
    from engine.models.adapter_config import read_adapted_config  # the modelling code, which takes seconds to import

    config = _transformers_config(path)
    return Checkpoint(path, read_adapted_config(path, config), config.to_dict(), native=False)


def _transformers_config(path: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many classes here, KeyError among others
        raise ConfigError(f"{path}: config.json is malformed: {error}") from error


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    weights: Weights = AS_IS,
) -> LanguageModel:
    """The checkpoint's decoder if its architecture is native, else transformers' modules. Raises ConfigError."""
    if checkpoint.native:
        return load_decoder(checkpoint, dtype=dtype, device=device, max_len=max_len, weights=weights)
    if weights.form != "as_is":
        raise ConfigError(
            f"{checkpoint.path} is a {checkpoint.shape.architecture!r} model, which is not native, so its weights "
            f"cannot be {weights.form}: choose as_is"
        )
    from engine.models.adapter import load_adapted

    return load_adapted(checkpoint.path, checkpoint.shape, dtype, device)


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    weights: Weights = AS_IS,
) -> Decoder:
    """Read a checkpoint's weights into the decoder's fused layout, one tensor at a time.

    Raises ConfigError, naming the file or tensor, if one is missing, has another shape than config.json says, or is
    something that the family does not have.
    """
    config, path, began = checkpoint.shape, checkpoint.path, perf_counter()
    size = RopeSize(config.traits.rotary_dim or config.head_dim, max_len, config.max_position_embeddings)
    try:
        rotations = tuple(rotation_table(rope, size, dtype, device) for rope in config.traits.ropes)
    except ConfigError as error:
        raise ConfigError(f"{path}: config.json: {error}") from None
    if any(uses_long_factors(rope, size) for rope in config.traits.ropes):
        log.warning(
            "%s: all texts get the frequencies of long ones, since max_model_len is %d; short texts read best with at "
            "most %d",
            *(path, max_len, config.traits.ropes[0]["original_max_position_embeddings"]),
        )
    shards = Shards(path)
    tensors = TensorNames(shards)
    quantised = quantisation(path, checkpoint.raw.get("quantization_config"))
    make = ProductMaker(weights, dtype, device, quantised)
    if quantised is None:
        source = TensorSource(shards, dtype, device, tensors.discard)
    else:
        log.info("%s holds %s weights: %s", path, quantised.name, make.describe(quantised))
        source = QuantisedSource(quantised, shards, dtype, device, tensors.discard)
    prefix = tensors.prefix
    embedding = source.read(f"{prefix}embed_tokens.weight", (config.vocab_size, config.hidden_size))
    # Made first: beside all layers a second copy of the head would be the peak of the load.
    head = make.head(_head_weight(config, embedding, tensors, source))
    layers = _layers(config, source, make, prefix)
    decoder = Decoder(
        config=config,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(
            source.read(f"{prefix}norm.weight", (config.hidden_size,)),
            config.rms_norm_eps,
            offset=config.traits.norm_offset,
        ),
        head=head,
        rotations=rotations,
        few_rows=layers_for_few_rows(layers, config, rotations, dtype, device),
    )
    tensors.refuse_unread(config)
    tell_gains(decoder)
    make.choose_forms()
    compile_layers(decoder)
    dtype_name = str(dtype).removeprefix("torch.")
    size_mb, seconds = decoder.weight_bytes / 1e6, perf_counter() - began
    log.info("%s: weights %s in %s, %.1f MB (%.1f s)", path, weights.form, dtype_name, size_mb, seconds)
    return decoder


def _layers(config: DecoderConfig, source: TensorSource, make: ProductMaker, prefix: str) -> tuple[Layer, ...]:
    pool = ThreadPoolExecutor(LOADERS, thread_name_prefix="weights")
    try:
        readers = (LayerReader(config, source, make, f"{prefix}layers.{i}.", i) for i in range(config.num_layers))
        return tuple(pool.map(LayerReader.layer, readers))
    finally:
        pool.shutdown(cancel_futures=True)


def _head_weight(config: DecoderConfig, embedding: Tensor, tensors: "TensorNames", source: TensorSource) -> Weight:
    """The head's weight. A head that is stored with other values than the embedding's is not tied, as in transformers,
    whatever config.json says."""
    shape = (config.vocab_size, config.hidden_size)
    tied = Part(f"{tensors.prefix}embed_tokens.weight", shape)
    if config.tied and not tensors.has_head:
        return source.shared(embedding, tied)
    name = f"{tensors.head}.weight"
    if not config.tied:
        return source.weight([Part(name, shape)])
    weight = source.read(name, shape)
    if torch.equal(weight, embedding):
        return source.shared(embedding, tied)
    log.warning("%s is not tied to the embedding, though config.json says so: its values differ", tensors.head)
    return source.shared(weight, Part(name, shape))


ExpertParts = tuple[Weight, Tensor | None, Weight, Tensor | None]  # gate and up, their bias, down, its bias


class TensorNames:
    """The names of a checkpoint's tensors, and which of them were read."""

    def __init__(self, shards: Shards) -> None:
        self._path = shards.directory
        self._unread = set(shards.tensors)
        # The first prefix, which most checkpoints have, is named in the error if there is no embedding at all.
        found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in self._unread]
        self.prefix = found[0] if found else PREFIXES[0]
        self.head = "language_model.lm_head" if self.prefix == PREFIXES[1] else "lm_head"
        self.has_head = any(name.startswith(f"{self.head}.") for name in self._unread)

    def discard(self, name: str) -> None:
        """The tensor was read, or need not be."""
        self._unread.discard(name)

    def refuse_unread(self, config: DecoderConfig) -> None:
        """Raise ConfigError if a tensor of the text model was not read: it would change what the model computes."""
        own = (self.prefix, f"{self.head}.")
        mine = (name for name in self._unread if name.startswith(own) and not name.endswith(NOT_READ))
        if left := sorted(mine):
            raise ConfigError(
                f"{self._path} holds {len(left)} tensors that config.json does not ask for in a "
                f"{config.architecture!r} model, {left[0]!r} among them"
            )


class LayerReader:
    """Reads the tensors of one layer."""

    def __init__(
        self,
        config: DecoderConfig,
        source: TensorSource,
        make: ProductMaker,
        prefix: str,
        index: int,
        attention_width: int | None = None,
    ) -> None:
        """prefix: the beginning of the tensors' names. attention_width: the width of the input of q, k and v; None:
        hidden_size."""
        self._c, self._t = config, config.traits
        self._make = make
        self._source = source
        self._prefix = prefix
        self._index = index
        self._attention_width = config.hidden_size if attention_width is None else attention_width

    def layer(self) -> Layer:
        c, t, names = self._c, self._t, self._t.norms
        q_rows = c.num_heads * c.head_dim
        sinks = self._read("self_attn.sinks", c.num_heads) if t.sinks else None
        qkv, qkv_bias = self._qkv()
        out_bias = self._read("self_attn.o_proj.bias", c.hidden_size) if t.out_bias else None
        return Layer(
            before_attention=self._norm(names.before_attention),
            qkv=self._make(qkv, qkv_bias),
            qk_norms=self._qk_norms(),
            rope=t.rope(self._index),
            scoring=Scoring(t.attention_scale, t.window(self._index), t.attention_softcap, sinks),
            out=self._make(self._weight("self_attn.o_proj.weight", c.hidden_size, q_rows), out_bias),
            after_attention=self._norm(names.after_attention),
            before_mlp=self._norm(names.before_mlp),
            mlp=self._experts(t.experts) if t.experts and t.has_experts(self._index) else self._mlp(),
            after_mlp=self._norm(names.after_mlp),
        )

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._source.read(self._prefix + name, shape)

    def _weight(self, name: str, *shape: int) -> Weight:
        return self._source.weight([Part(self._prefix + name, shape)])

    def _norm(self, name: str | None) -> Norm:
        if name is None:
            return no_norm
        weight = self._read(f"{name}.weight", self._c.hidden_size)
        return RMSNorm(weight, self._c.rms_norm_eps, offset=self._t.norm_offset)

    def _qkv(self) -> tuple[Weight, Tensor | None]:
        """Weight and bias of the product that gives q, k and v."""
        c, names = self._c, ("q", "k", "v")
        rows = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim)
        orders = (self._paired(torch.arange(rows[0])), self._paired(torch.arange(rows[1])), None)
        weight = self._source.weight(
            self._parts("self_attn", names, rows, "weight", self._attention_width, orders=orders)
        )
        if not self._t.qkv_bias:
            return weight, None
        return weight, self._source.stack(self._parts("self_attn", names, rows, "bias", orders=orders))

    def _parts(
        self,
        part: str,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        kind: str,
        *width: int,
        orders: tuple[Tensor | None, ...] | None = None,
    ) -> list[Part]:
        """The tensors of several products, to be put on top of each other as fused checkpoints have them."""
        orders = orders or (None,) * len(names)
        if not self._t.fused:
            return [
                Part(f"{self._prefix}{part}.{name}_proj.{kind}", (count, *width), order)
                for name, count, order in zip(names, rows, orders, strict=True)
            ]
        order = None
        if any(o is not None for o in orders):
            starts = [sum(rows[:i]) for i in range(len(rows))]
            each = [torch.arange(n) if o is None else o for n, o in zip(rows, orders, strict=True)]
            order = torch.cat([start + rows_of for start, rows_of in zip(starts, each, strict=True)])
        return [Part(f"{self._prefix}{part}.{FUSED[names]}.{kind}", (sum(rows), *width), order)]

    def _paired(self, rows: Tensor) -> Tensor:
        """Make the two numbers of each rotary pair neighbours: of each head (x₀ … x_{d/2−1}, y₀ … y_{d/2−1}) becomes
        (x₀, y₀, x₁, y₁, …). d numbers of a head are rotated, the rest stays."""
        rotary_dim = self._t.rotary_dim or self._c.head_dim
        heads = rows.unflatten(0, (-1, self._c.head_dim))
        pairs = heads[:, :rotary_dim].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([pairs, heads[:, rotary_dim:]], 1).flatten(0, 1)

    def _qk_norms(self) -> tuple[tuple[slice, RMSNorm], ...]:
        c, t = self._c, self._t
        if t.qk_norm is None:
            return ()
        weights = []
        for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads)):
            shape = c.head_dim if t.qk_norm == "head" else heads * c.head_dim
            weight = self._read(f"self_attn.{name}_norm.weight", shape)
            weights.append(self._paired(weight).view(-1, c.head_dim).expand(heads, -1))
        rotated = c.num_heads + c.num_kv_heads
        if t.qk_norm == "head":
            return ((slice(rotated), RMSNorm(torch.cat(weights), c.rms_norm_eps, offset=t.norm_offset)),)
        places = (slice(c.num_heads), slice(c.num_heads, rotated))
        norms = (RMSNorm(w.contiguous(), c.rms_norm_eps, offset=t.norm_offset, dims=2) for w in weights)
        return tuple(zip(places, norms, strict=True))

    def _mlp(self) -> GatedMLP:
        c, t = self._c, self._t
        rows = (c.intermediate_size, c.intermediate_size)
        gate_up = self._source.weight(self._parts("mlp", ("gate", "up"), rows, "weight", c.hidden_size))
        gate_up_bias = self._source.stack(self._parts("mlp", ("gate", "up"), rows, "bias")) if t.mlp_bias else None
        down = self._weight("mlp.down_proj.weight", c.hidden_size, c.intermediate_size)
        down_bias = self._read("mlp.down_proj.bias", c.hidden_size) if t.mlp_bias else None
        gate = self._make.gating(gating(t.activation))
        return GatedMLP(self._make(gate_up, gate_up_bias), self._make(down, down_bias), gate)

    def _experts(self, traits: ExpertTraits) -> Experts:
        c, names = self._c, traits.names
        router = self._read(f"{names.router}.weight", traits.count, c.hidden_size)
        router_bias = self._read(f"{names.router}.bias", traits.count) if names.router_bias else None
        gate = gating(self._t.activation, traits)
        parts = self._fused_experts(traits) if "{}" not in names.gate else self._single_experts(traits)
        experts = tuple(
            GatedMLP(self._make(gate_up, gate_up_bias), self._make(down, down_bias), gate)
            for gate_up, gate_up_bias, down, down_bias in parts
        )
        return Experts(self._make.router(router, router_bias), experts, traits)

    def _single_experts(self, traits: ExpertTraits) -> Iterator[ExpertParts]:
        """The weights of each expert, from a tensor for each product."""
        hidden, inner, names = self._c.hidden_size, traits.intermediate_size, traits.names
        for number in range(traits.count):
            parts = [Part(self._prefix + name.format(number), (inner, hidden)) for name in (names.gate, names.up)]
            yield self._source.weight(parts), None, self._weight(names.down.format(number), hidden, inner), None

    def _fused_experts(self, traits: ExpertTraits) -> Iterator[ExpertParts]:
        """The weights of each expert, from tensors [experts, in, out] whose rows of gate and up take turns."""
        count, hidden, inner, names = traits.count, self._c.hidden_size, traits.intermediate_size, traits.names
        gate_up, gate_up_bias = (
            self._read(names.gate, count, hidden, 2 * inner).transpose(1, 2),
            self._read(f"{names.gate}_bias", count, 2 * inner),
        )
        down = self._read(names.down, count, inner, hidden).transpose(1, 2)
        down_bias = self._read(f"{names.down}_bias", count, hidden)
        order = torch.cat([torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)])
        for number in range(count):
            bias = gate_up_bias[number][order]
            yield gate_up[number][order].contiguous(), bias, down[number].contiguous(), down_bias[number]
