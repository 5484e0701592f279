"""EAGLE heads from their published files: SafeAILab's (https://github.com/SafeAILab/EAGLE) and those of speculators
(https://github.com/vllm-project/speculators)."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.heads.eagle import EagleHead, HeadTarget
from engine.heads.files import EagleKind
from engine.models.between_products import compile_layers, tell_gains
from engine.models.compiled_layers import CompiledLayers
from engine.models.config_file import MODEL_TYPES, converted_config
from engine.models.decoder import Decoder, DecoderConfig
from engine.models.layer import Layer, Norm, no_norm
from engine.models.loader import Checkpoint, LayerReader
from engine.models.model_families import read_config
from engine.models.norm import RMSNorm
from engine.models.products import AS_IS, ProductMaker, Weight, Weights
from engine.models.rope import RopeSize, rotation_table
from engine.models.shards import Part, Shards, TensorSource
from engine.models.tokenizer_files import read_object
from engine.models.traits import PRE_NORM, NormNames

log = logging.getLogger(__name__)

NOT_READ = ("t2d", "rotary_emb.inv_freq")  # d2t and config.json say the same
OUTPUT = "lm_head.weight"  # missing where the target's is used
WITHOUT_INPUT_NORM = NormNames(before_mlp="post_attention_layernorm")  # EAGLE's first layer


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleCheckpoint(Checkpoint):
    """A directory with an EAGLE head that fits the target. `shape` describes its layers over the target's tokens."""

    kind: EagleKind
    layers: tuple[int, ...]  # of the target's whose states it reads, numbered as in WatchedStates
    target_width: int  # the target's hidden size
    draft_vocab: int  # tokens that it drafts
    norm_residual: bool
    norm_output: bool
    norm_before_fuse: bool


def open_eagle(directory: Path, kind: EagleKind, target: DecoderConfig) -> EagleCheckpoint:
    """Read and check config.json. Raises ConfigError if a field is malformed, unknown, or does not fit the target."""
    raw = read_object(directory / "config.json")
    if "quantization_config" in raw:
        raise ConfigError(f"{directory}: heads with quantised weights are not supported: give one in 16 or 32 bits")
    if raw.get("fc_norm"):
        raise ConfigError(f"{directory}: fc_norm in config.json is not supported: give a head without it")
    shape = _shape(directory, raw, target)
    width = _count(directory, raw, "target_hidden_size") or (
        target.hidden_size if kind == "eagle3" else shape.hidden_size
    )
    _check_target(directory, width, target.hidden_size)
    return EagleCheckpoint(
        directory,
        shape,
        raw,
        kind=kind,
        layers=_layers(directory, raw, target) if kind == "eagle3" else (target.num_layers,),
        target_width=target.hidden_size,
        draft_vocab=_count(directory, raw, "draft_vocab_size") or target.vocab_size,
        # speculators says True where nothing is said, SafeAILab False.
        norm_residual=bool(raw.get("norm_before_residual", "speculators_model_type" in raw)),
        norm_output=bool(raw.get("norm_output")),
        norm_before_fuse=bool(raw.get("norm_before_fc")),
    )


def _check_target(directory: Path, width: float, target_width: int) -> None:
    if width != target_width:
        raise ConfigError(
            f"{directory} is a head for targets of hidden size {width:g}, and the target has {target_width}"
        )


def _count(directory: Path, raw: dict[str, Any], name: str) -> int | None:
    value = raw.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{directory}: {name} in config.json must be an integer of at least 1, not {value!r}")
    return value


def _object(directory: Path, raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{directory}: {name} in config.json must be an object, not {value!r}")
    return value


def _shape(directory: Path, raw: dict[str, Any], target: DecoderConfig) -> DecoderConfig:
    given = _object(directory, raw, "transformer_layer_config") or raw
    family = given.get("model_type", "llama")
    if not isinstance(family, str) or family not in MODEL_TYPES:
        raise ConfigError(
            f"{directory} is a head of {family!r} layers; supported are {', '.join(MODEL_TYPES)}: choose another"
        )

    def convert() -> dict[str, Any]:
        # It takes a second to import, and a kept configuration needs none.
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        fields = {name: value for name, value in given.items() if name != "model_type"}
        try:
            return dict(CONFIG_MAPPING[family](**fields).to_dict())
        except Exception as error:  # transformers raises errors of many classes here
            raise ConfigError(f"it is malformed: {' '.join(str(error).split())}") from error

    kept = given is raw and "model_type" in raw
    try:
        shape = read_config(family, converted_config(directory, raw, convert) if kept else convert())
    except ConfigError as error:
        raise ConfigError(f"{directory}: config.json: {error}") from None
    traits = shape.traits
    if traits.norms != PRE_NORM or any(traits.windows) or traits.experts or traits.sinks:
        raise ConfigError(
            f"{directory} is a head of {family!r} layers with other norms, windows, sinks or experts than llama's: not "
            "supported"
        )
    return replace(
        shape,
        vocab_size=target.vocab_size,
        tied=False,
        # A head is asked as far as its target reads; other servers do the same.
        max_position_embeddings=max(shape.max_position_embeddings, target.max_position_embeddings),
    )


def _layers(directory: Path, raw: dict[str, Any], target: DecoderConfig) -> tuple[int, ...]:
    """The layers that the head reads. By default those of EAGLE-3's own code."""
    nested = _object(directory, raw, "eagle_config")
    name, n = "eagle_aux_hidden_state_layer_ids", target.num_layers
    layers = nested.get(name) or raw.get(name) or [2, n // 2, n - 3]
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{directory}: use_aux_hidden_state false is not supported")
    if not isinstance(layers, list) or not all(isinstance(i, int) and 0 <= i <= n for i in layers):
        raise ConfigError(f"{directory}: {name} must be layers from 0 to the target's {n}, not {layers}")
    if len(set(layers)) < len(layers):
        raise ConfigError(f"{directory}: {name} must be different layers of the target, not {layers}")
    return tuple(layers)


def load_eagle(
    checkpoint: EagleCheckpoint,
    target: HeadTarget,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    weights: Weights = AS_IS,
) -> EagleHead:
    """Read a head's weights. It shares what it does not bring along, embedding or head, with the target.

    Raises ConfigError, naming the tensor, if one is missing, has a wrong shape, or is not known.
    """
    began, reader = perf_counter(), _Reader(checkpoint, target, dtype, device, ProductMaker(weights, dtype, device))
    head = reader.head(max_len)
    reader.refuse_unread()
    tell_gains(head.body)
    reader.make.choose_forms()
    compile_layers(head.body)
    log.info(
        "%s: %s head, reads the target's layers %s, %.1f MB of its own (%.1f s)",
        *(checkpoint.path, checkpoint.kind, ", ".join(map(str, head.layers))),
        *(head.weight_bytes / 1e6, perf_counter() - began),
    )
    return head


class _Reader:
    """Reads the tensors of one head."""

    def __init__(
        self,
        checkpoint: EagleCheckpoint,
        target: HeadTarget,
        dtype: torch.dtype,
        device: torch.device,
        make: ProductMaker,
    ) -> None:
        self._shards = Shards(checkpoint.path)
        self._names = frozenset(self._shards.tensors)
        self._unread = set(self._names)
        self._source = TensorSource(self._shards, dtype, device, self._unread.discard)
        self._checkpoint, self._target = checkpoint, target
        self._dtype, self._device, self.make = dtype, device, make
        self._root = "model." if any(name.startswith("model.") for name in self._names) else ""

    def head(self, max_len: int) -> EagleHead:
        c = self._checkpoint
        eagle3, hidden = c.kind == "eagle3", c.shape.hidden_size
        embedding, vocabulary = self._embedding(), self._vocabulary()
        output = self._output()
        fuse_width = len(c.layers) * c.target_width if eagle3 else 2 * hidden
        if eagle3:
            _check_target(
                c.path, self._shards.stored(self._rooted("fc.weight")).shape[-1] / len(c.layers), c.target_width
            )
        layers = tuple(self._layer(i) for i in range(c.shape.num_layers))
        first = self._layer_prefix(0)
        fuse = self.make(self._matrix("fc.weight", hidden, fuse_width), self._optional("fc.bias", hidden))
        products = [fuse, *(p for layer in layers for p in (layer.qkv, layer.out, *layer.mlp.products))]
        size = RopeSize(c.shape.head_dim, max_len, c.shape.max_position_embeddings)
        ropes = (rotation_table(rope, size, self._dtype, self._device) for rope in c.shape.traits.ropes)
        rotations, on_cpu = tuple(ropes), self._device.type == "cpu"
        return EagleHead(
            body=Decoder(
                config=c.shape,
                embedding=embedding,
                layers=layers,
                norm=self._norm(f"{self._root}norm.weight", hidden) if eagle3 else no_norm,
                head=output,
                rotations=rotations,
                # A GPU's layers of few rows take no inputs of their own.
                few_rows=CompiledLayers.of(layers, c.shape, rotations, self._dtype) if on_cpu else None,
            ),
            layers=c.layers,
            fuse=fuse,
            fused_norm=self._norm("input_norm.weight", fuse_width) if c.norm_before_fuse else no_norm,
            hidden_norm=self._norm(f"{first}hidden_norm.weight", hidden) if eagle3 else None,
            norm_residual=c.norm_residual,
            norm_output=c.norm_output,
            vocabulary=vocabulary,
            state_width=len(c.layers) * c.target_width,
            own_products=(*products, *([output] if OUTPUT in self._names else [])),
            own_embedding_bytes=0 if embedding is self._target.embedding else embedding.nbytes,
        )

    def refuse_unread(self) -> None:
        """Raise ConfigError for tensors that were not read: they would change what the head computes."""
        if left := sorted(name for name in self._unread if not name.endswith(NOT_READ)):
            raise ConfigError(
                f"{self._checkpoint.path} holds {len(left)} tensors that its {self._checkpoint.kind} head does not "
                f"have, {left[0]!r} among them"
            )

    def _layer(self, index: int) -> Layer:
        c, prefix = self._checkpoint, self._layer_prefix(index)
        wide = c.kind == "eagle3" and index == 0
        normed = f"{prefix}input_layernorm.weight" in self._names
        traits = replace(c.shape.traits, norms=PRE_NORM if normed or c.kind == "eagle3" else WITHOUT_INPUT_NORM)
        shape = replace(c.shape, traits=traits)
        width = 2 * c.shape.hidden_size if wide else None
        return LayerReader(shape, self._source, self.make, prefix, index, width).layer()

    def _layer_prefix(self, index: int) -> str:
        middle = f"{self._root}midlayer."
        if index == 0 and any(name.startswith(middle) for name in self._names):
            return middle
        return f"{self._root}layers.{index}."

    def _embedding(self) -> Tensor:
        """The head's own embedding, unless it is missing or the target's."""
        name, theirs = f"{self._root}embed_tokens.weight", self._target.embedding
        if name in self._names:
            rows = self._shards.stored(name).shape[0]
            own = self._source.read(name, (rows, self._checkpoint.shape.hidden_size))
            if own.shape[0] < theirs.shape[0]:
                raise ConfigError(f"{self._checkpoint.path}: {name} has {rows} rows, the target {theirs.shape[0]}")
            if own.shape != theirs.shape or not torch.equal(own, theirs.to(own.dtype)):
                return own
        elif theirs.shape[1] != self._checkpoint.shape.hidden_size:
            raise ConfigError(
                f"{self._checkpoint.path} holds no {name}, and the target's embedding has {theirs.shape[1]} numbers "
                f"per token, not {self._checkpoint.shape.hidden_size}"
            )
        return theirs

    def _output(self) -> Any:
        """The product that gives the logits."""
        c, name = self._checkpoint, OUTPUT
        if name in self._names:
            return self.make.head(self._source.weight([Part(name, (c.draft_vocab, c.shape.hidden_size))]))
        if c.draft_vocab != c.shape.vocab_size or c.shape.hidden_size != c.target_width:
            raise ConfigError(
                f"{c.path} holds no {name}, and the target's does not fit: {c.draft_vocab} tokens and hidden size "
                f"{c.shape.hidden_size} are asked for"
            )
        return self._target.head

    def _vocabulary(self) -> Tensor | None:
        """The target's ids of the head's tokens, from d2t: differences between both ids; None: they are the same."""
        c = self._checkpoint
        if "d2t" not in self._names:
            if c.draft_vocab != c.shape.vocab_size:
                raise ConfigError(f"{c.path} holds no d2t, and drafts {c.draft_vocab} of {c.shape.vocab_size} tokens")
            return None
        self._unread.discard("d2t")
        steps = self._shards.read("d2t").long().flatten()
        ids = steps + torch.arange(len(steps))
        if len(ids) != c.draft_vocab or not _distinct(ids.tolist(), c.shape.vocab_size):
            raise ConfigError(f"{c.path}: d2t must name {c.draft_vocab} different tokens of the target")
        return None if torch.equal(ids, torch.arange(c.shape.vocab_size)) else ids.to(self._device)

    def _matrix(self, name: str, rows: int, columns: int) -> Weight:
        return self._source.weight([Part(self._rooted(name), (rows, columns))])

    def _optional(self, name: str, size: int) -> Tensor | None:
        return self._source.read(self._rooted(name), (size,)) if self._rooted(name) in self._names else None

    def _rooted(self, name: str) -> str:
        return f"{self._root}{name}" if f"{self._root}{name}" in self._names else name

    def _norm(self, name: str, size: int) -> Norm:
        return RMSNorm(self._source.read(name, (size,)), self._checkpoint.shape.rms_norm_eps)


def _distinct(ids: list[int], vocab: int) -> bool:
    return len(set(ids)) == len(ids) and all(0 <= i < vocab for i in ids)
