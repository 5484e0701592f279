"""Checkpoints whose weights are stored quantised: config.json's quantization_config says how.

Every reader gives a weight [out, in] back: as the codes that are stored, with a step for each channel or for each
group of input channels, or else as numbers. Formats: compressed-tensors (int8, FP8, packed 4 or 8 bits), FP8 with
scales per tensor, channel or block, GPTQ, AWQ and MXFP4. Which weights are quantised follows from the tensors that are
stored beside them, so lists of exceptions need no reading.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import ConfigError, WeightForm
from engine.models.quantize import CodedWeight, stacked
from engine.models.shards import Part, Shards, StoredWeight, TensorSource
from engine.models.weight_formats import (
    MXFP4_PARTS,
    CheckpointWeight,
    Stored,
    awq_weight,
    gptq_weight,
    mxfp4_weight,
    packed_weight,
    scaled_weight,
)

log = logging.getLogger(__name__)

PACKED_FORMATS, PLAIN_FORMATS = ("pack-quantized",), ("int-quantized", "float-quantized", "naive-quantized")
UNQUANTISED = ("F64", "F32", "F16", "BF16")
# The tensors of a quantised weight. Static scales of activations are not used: activations are quantised by their rows.
COMPANIONS = (
    *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx", "input_scale", "input_zero_point", "activation_scale"),
)
# Scales of K and V in a cache of 8 bits. They are not used: the cache here has the model's dtype.
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_zero_point", ".v_zero_point", "_proj.output_scale")
REORDERED = ("group", "dynamic", True)  # actorder: each column names its group, so that groups are no runs of columns
MARKS = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight", *MXFP4_PARTS)  # of a quantised weight


class StoredFiles:
    """The tensors of a checkpoint's files."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    @property
    def names(self) -> Iterable[str]:
        return self._shards.tensors

    def holds(self, name: str) -> bool:
        return name in self._shards.tensors

    def read(self, name: str) -> Tensor:
        if not self.holds(name):
            raise ValueError(f"the checkpoint holds no {name}")
        return self._shards.read(name)

    def dtype(self, name: str) -> str:
        """As the format names it."""
        return self._shards.stored(name).dtype


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a checkpoint's weights are stored."""

    path: Path
    name: str  # for the log
    weight: Callable[[Stored, str], CheckpointWeight | None]  # (tensors, module) → [out, in]; None: not quantised
    kind: WeightForm | None = None  # the form of codes that a product can use as they are; None: it gets numbers
    per_row: bool = False  # whether each channel has one step and no offset
    rounds_activations: bool = False  # whether activations are meant to be integers of 8 bits too (W8A8)

    def read(self, stored: Stored, module: str) -> CheckpointWeight | None:
        """The module's weight. Raises ConfigError, naming the module, for tensors that do not fit the format."""
        try:
            return self.weight(stored, module)
        except (ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError) as error:
            raise ConfigError(f"{self.path}: {module} is no {self.name} weight: {error}") from error


class QuantisedSource(TensorSource):
    """A source in whose checkpoint some weights are quantised."""

    def __init__(
        self,
        quantised: Quantisation,
        shards: Shards,
        dtype: torch.dtype,
        device: torch.device,
        discard: Callable[[str], None],
    ) -> None:
        super().__init__(shards, dtype, device, discard)
        self._quantised, self._files = quantised, StoredFiles(shards)
        if not any(name.endswith(MARKS) for name in self._files.names):
            raise ConfigError(
                f"{quantised.path}: config.json says that weights are {quantised.name}, and none is stored so"
            )
        if unused := sorted(name for name in self._files.names if name.endswith(CACHE_SCALES)):
            log.warning(
                "%s: %d scales of the cache, %r among them, are not used: K and V are kept in the model's dtype",
                *(quantised.path, len(unused), unused[0]),
            )
        for name in unused:
            discard(name)

    def weight(self, parts: Sequence[Part]) -> StoredWeight | CheckpointWeight:
        """Codes, in CPU memory, if all parts are stored as codes with equal groups."""
        if self.narrow_dtype(parts) is not None:  # none is quantised
            return super().weight(parts)
        coded = []
        for part in parts if self._quantised.kind else ():
            weight = self._weight(part.name, part.shape)
            if not isinstance(weight, CodedWeight):
                break
            coded.append(weight if part.order is None else weight.take_rows(part.order))
        if len(coded) == len(parts) and (stack := stacked(coded)) is not None:
            return stack
        return self.stack(parts)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self._files.holds(name):  # else its shape is known when it is read
            super()._check(name, shape)

    def _fill(self, place: Tensor, part: Part) -> None:
        if (weight := self._weight(part.name, part.shape)) is None:
            super()._fill(place, part)
            return
        rows = weight.numbers(self.dtype) if isinstance(weight, CodedWeight) else weight
        place.copy_(rows if part.order is None else rows[part.order])

    def _weight(self, name: str, shape: tuple[int, ...]) -> CheckpointWeight | None:
        files, path = self._files, self._quantised.path
        module = name.removesuffix(".weight")
        weight = self._quantised.read(files, module)
        if weight is None:
            if files.holds(name) and (kind := files.dtype(name)) not in UNQUANTISED:
                raise ConfigError(f"{path}: {name} is stored as {kind} without the scales of {self._quantised.name}")
            return None
        found = tuple((weight.codes if isinstance(weight, CodedWeight) else weight).shape)
        if found != shape:
            raise ConfigError(f"{path}: {name} has shape {found}, config.json says {shape}")
        for part in (".weight", *(f".{companion}" for companion in COMPANIONS), *MXFP4_PARTS):
            self._discard(f"{module}{part}")
        if files.holds(f"{module}.bias") and not files.read(f"{module}.bias").any():  # GPTQ's tools write zeros
            self._discard(f"{module}.bias")
        return weight


def quantisation(path: Path, config: dict[str, Any] | None) -> Quantisation | None:
    """Read a quantization_config; None for None. Raises ConfigError for one that is malformed or not supported."""
    if not config:
        return None
    methods = {
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "fbgemm_fp8": _fp8,
        "gptq": _gptq,
        "awq": _awq,
        "mxfp4": _mxfp4,
    }
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in methods:
        raise ConfigError(f"{path} is quantised by {method!r}; supported are {', '.join(methods)}: choose another")
    try:
        return methods[method](path, config)
    except ConfigError:  # a ValueError too
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: the quantization_config of config.json is malformed: {error!r}") from error


def _compressed(path: Path, config: dict[str, Any]) -> Quantisation:
    schemes = list(config["config_groups"].values())
    groups = [scheme["weights"] for scheme in schemes]
    kinds = {(group.get("type", "int"), int(group["num_bits"])) for group in groups}
    layout = config.get("format", "pack-quantized")
    bits = sorted(n for _, n in kinds)
    name = f"compressed-tensors {layout} {' and '.join(f'{kind}{n}' for kind, n in sorted(kinds))}"
    if not groups:
        raise ValueError("config_groups is empty")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ConfigError(f"{path}: {name} with sparse weights is not supported")
    if config.get("transform_config"):  # activations would have to be turned as the weights were
        raise ConfigError(f"{path}: {name} with a transform_config is not supported")
    symmetric = all(group.get("symmetric", True) for group in groups)
    reordered = any(group.get("actorder") in REORDERED for group in groups)
    per_row = kinds == {("int", 8)} and symmetric and not reordered
    per_row &= all(group.get("strategy") in ("channel", "tensor") for group in groups)
    rounds_activations = all(_rounds_activations(scheme) for scheme in schemes)
    if layout in PACKED_FORMATS and kinds <= {("int", 4), ("int", 8)}:
        kind: WeightForm = "int4" if kinds == {("int", 4)} else "int8"
        read = partial(packed_weight, bits=bits)
        return Quantisation(path, name, read, None if reordered else kind, per_row, rounds_activations)
    if layout in PLAIN_FORMATS and kinds <= {("int", 8), ("float", 8)}:
        blocks = [group["block_structure"] for group in groups if group.get("block_structure")]
        kind = "fp8" if kinds == {("float", 8)} else "int8"
        read = partial(scaled_weight, block_size=_block_size(blocks[0]) if blocks else None)
        return Quantisation(
            path, name, read, kind if symmetric and not reordered else None, per_row, rounds_activations
        )
    raise ConfigError(
        f"{path}: {name} is not supported; supported are pack-quantized int4 and int8, "
        "int-quantized int8 and float-quantized float8"
    )


def _rounds_activations(scheme: dict[str, Any]) -> bool:
    inputs = scheme.get("input_activations")
    return inputs is not None and (inputs.get("type", "int"), inputs.get("num_bits", 8)) == ("int", 8)


def _fp8(path: Path, config: dict[str, Any]) -> Quantisation:
    size = config.get("weight_block_size")
    blocks = None if size is None else _block_size(size)
    return Quantisation(path, "FP8", partial(scaled_weight, block_size=blocks), "fp8")


def _block_size(size: Sequence[int]) -> tuple[int, int]:
    rows, columns = (int(n) for n in size)
    if min(rows, columns) < 1:
        raise ValueError(f"a block of {rows} × {columns}")
    return rows, columns


def _gptq(path: Path, config: dict[str, Any]) -> Quantisation:
    bits, form = int(config["bits"]), config.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{path}: GPTQ of {bits} bits in format {form!r} is not supported; 2, 4 and 8 bits are")
    raised = 1 if form == "gptq" else 0  # the first format stores zero points less 1
    group_size = config.get("group_size")
    groups = group_size is not None and int(group_size) > 0  # else there is one group
    reordered = bool(config.get("desc_act")) and groups
    kind: WeightForm | None = None if reordered else "int8" if bits == 8 else "int4"
    per_row = bits == 8 and not groups and bool(config.get("sym", True))
    read = partial(gptq_weight, bits=bits, raised=raised, reordered=reordered)
    return Quantisation(path, f"GPTQ int{bits}", read, kind, per_row)


def _awq(path: Path, config: dict[str, Any]) -> Quantisation:
    bits, version = int(config.get("bits", config.get("w_bit", 4))), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ConfigError(f"{path}: AWQ of {bits} bits in version {version!r} is not supported; 4 bits in gemm are")
    return Quantisation(path, "AWQ int4", awq_weight, "int4")


def _mxfp4(path: Path, config: dict[str, Any]) -> Quantisation:
    return Quantisation(path, "MXFP4", mxfp4_weight)
