"""Checkpoints whose weights are stored quantised: config.json's quantization_config says how.

Every reader gives a weight [out, in] back: as the codes that are stored, with a step for each channel or for each
group of input channels, or else as numbers. Formats: compressed-tensors (int8, FP8, packed 4 or 8 bits), FP8 with
scales per tensor, channel or block, GPTQ, AWQ and MXFP4. Which weights are quantised follows from the tensors that are
stored beside them, so lists of exceptions need no reading.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.config import ConfigError, WeightForm
from engine.models.quantize import CodedWeight, stacked
from engine.models.shards import Part, Shards, TensorSource

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PACKED_FORMATS, PLAIN_FORMATS = ("pack-quantized",), ("int-quantized", "float-quantized", "naive-quantized")
UNQUANTISED = ("F64", "F32", "F16", "BF16")
# The tensors of a quantised weight. Static scales of activations are not used: activations are quantised by their rows.
COMPANIONS = (
    *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx", "input_scale", "activation_scale"),
)
REORDERED = ("group", "dynamic", True)  # actorder: each column names its group, so that groups are no runs of columns
MXFP4_PARTS = ("_blocks", "_scales")
MARKS = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight", *MXFP4_PARTS)  # of a quantised weight
# The numbers of MXFP4 by their lowest three bits; the fourth is the sign.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MXFP4_BLOCK, MXFP4_BIAS = 32, 127
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble, from the lowest, within eight columns


class Stored(Protocol):
    """The tensors of a checkpoint as they are stored."""

    def holds(self, name: str) -> bool: ...
    def read(self, name: str) -> Tensor: ...


CheckpointWeight = Tensor | CodedWeight


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

    def weight(self, parts: Sequence[Part]) -> CheckpointWeight:
        """Codes, in CPU memory, if all parts are stored as codes with equal groups."""
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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: the quantization_config of config.json is malformed: {error!r}") from error


def _compressed(path: Path, config: dict[str, Any]) -> Quantisation:
    groups = [group["weights"] for group in config["config_groups"].values()]
    kinds = {(group.get("type", "int"), int(group["num_bits"])) for group in groups}
    layout = config.get("format", "pack-quantized")
    bits = sorted(n for _, n in kinds)
    name = f"compressed-tensors {layout} {' and '.join(f'{kind}{n}' for kind, n in sorted(kinds))}"
    if not groups:
        raise ValueError("config_groups is empty")
    reordered = any(group.get("actorder") in REORDERED for group in groups)
    if config.get("sparsity_config", {}).get("format", "dense") != "dense":
        raise ConfigError(f"{path}: {name} with sparse weights is not supported")
    if config.get("transform_config"):  # activations would have to be turned as the weights were
        raise ConfigError(f"{path}: {name} with a transform_config is not supported")
    if layout in PACKED_FORMATS and kinds <= {("int", 4), ("int", 8)}:
        kind: WeightForm = "int4" if kinds == {("int", 4)} else "int8"
        return Quantisation(
            path, name, lambda stored, module: _packed_weight(stored, module, bits), None if reordered else kind
        )
    if layout in PLAIN_FORMATS and kinds <= {("int", 8), ("float", 8)}:
        blocks = [group["block_structure"] for group in groups if group.get("block_structure")]
        per_row = all(group.get("strategy") in ("channel", "tensor") for group in groups)
        size = _block_size(blocks[0]) if blocks else None
        stored_as: WeightForm | None = "fp8" if kinds == {("float", 8)} else "int8"
        if reordered or not all(group.get("symmetric", True) for group in groups):
            stored_as = None
        per_row &= stored_as == "int8"
        return Quantisation(
            path, name, lambda stored, module: _scaled_weight(stored, module, size), stored_as, per_row=per_row
        )
    raise ConfigError(
        f"{path}: {name} is not supported; supported are pack-quantized int4 and int8, "
        "int-quantized int8 and float-quantized float8"
    )


def _fp8(path: Path, config: dict[str, Any]) -> Quantisation:
    size = config.get("weight_block_size")
    blocks = None if size is None else _block_size(size)
    return Quantisation(path, "FP8", lambda stored, module: _scaled_weight(stored, module, blocks), "fp8")


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
    reordered = bool(config.get("desc_act")) and int(config.get("group_size", -1)) > 0  # else there is one group
    kind: WeightForm | None = None if reordered else "int8" if bits == 8 else "int4"
    return Quantisation(
        path, f"GPTQ int{bits}", lambda stored, module: _gptq_weight(stored, module, bits, raised, reordered), kind
    )


def _awq(path: Path, config: dict[str, Any]) -> Quantisation:
    bits, version = int(config.get("bits", config.get("w_bit", 4))), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ConfigError(f"{path}: AWQ of {bits} bits in version {version!r} is not supported; 4 bits in gemm are")
    return Quantisation(path, "AWQ int4", _awq_weight, "int4")


def _mxfp4(path: Path, config: dict[str, Any]) -> Quantisation:
    return Quantisation(path, "MXFP4", _mxfp4_weight)


def _scaled_weight(stored: Stored, module: str, block: tuple[int, int] | None) -> CheckpointWeight | None:
    """int8 or FP8 numbers [out, in] with scales: one, [out], [out, 1], or one per block."""
    names = [f"{module}.{part}" for part in ("weight_scale", "weight_scale_inv") if stored.holds(f"{module}.{part}")]
    if not names:
        return None
    weight, scale = stored.read(f"{module}.weight"), stored.read(names[0]).float()
    if weight.dtype not in (torch.int8, *FP8):
        raise ValueError(f"its weight is stored as {weight.dtype}")
    if weight.dtype is torch.float8_e4m3fn and bool((weight.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ValueError(f"{module}.weight holds FP8 numbers that are not finite")
    rows, columns = weight.shape
    zero = stored.read(f"{module}.weight_zero_point").float() if stored.holds(f"{module}.weight_zero_point") else None
    if stored.holds(f"{module}.weight_g_idx"):
        group = _groups(stored, f"{module}.weight_g_idx", columns, scale.shape[1])
        scale, zero, block = scale[:, group], None if zero is None else zero[:, group], None
    elif zero is None and weight.dtype is not torch.float8_e5m2:
        steps = _steps_of_groups(scale, rows, columns, block)
        if steps is not None:
            return CodedWeight(weight, steps)
    wide = weight.float()
    if zero is not None:
        wide = wide - _spread(zero, rows, columns, block)
    return wide * _spread(scale, rows, columns, block)


def _steps_of_groups(scale: Tensor, rows: int, columns: int, block: tuple[int, int] | None) -> Tensor | None:
    """Scales as steps [rows, groups]; None if they are not those of equal groups of columns."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    if scale.numel() == rows and scale.shape[0] == rows:
        return scale.reshape(rows, 1)
    if block is None:
        return scale if scale.dim() == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0 else None
    if columns % block[1] or tuple(scale.shape) != (-(-rows // block[0]), columns // block[1]):
        return None
    return scale.repeat_interleave(block[0], 0)[:rows]


def _spread(scale: Tensor, rows: int, columns: int, block: tuple[int, int] | None) -> Tensor:
    """Scales in a shape that broadcasts over a weight [rows, columns]."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.numel() == rows and scale.shape[0] == rows:
        return scale.reshape(rows, 1)
    if block is None and scale.shape[0] == rows and columns % scale.shape[1] == 0:  # groups of columns
        block = (1, columns // scale.shape[1])
    if block is None or tuple(scale.shape) != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"scales of shape {tuple(scale.shape)} for a weight of {rows} × {columns}, blocks of {block}")
    return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def _packed_weight(stored: Stored, module: str, bits: list[int]) -> CheckpointWeight | None:
    """compressed-tensors' weight_packed: numbers + 2^(bits − 1), along a row, from the lowest bits."""
    if not stored.holds(f"{module}.weight_packed"):
        return None
    packed, scale = stored.read(f"{module}.weight_packed"), stored.read(f"{module}.weight_scale").float()
    rows, columns = (int(n) for n in stored.read(f"{module}.weight_shape"))
    fitting = [n for n in bits if tuple(packed.shape) == (rows, -(-columns // (32 // n)))]
    if len(fitting) != 1 or scale.shape[0] != rows or scale.dim() != 2:
        raise ValueError(
            f"weight_packed of shape {tuple(packed.shape)} and scales of {tuple(scale.shape)} for {rows} × {columns}"
        )
    half = 2 ** (fitting[0] - 1)
    numbers = _unpack(packed, fitting[0]).flatten(1)[:, :columns]
    zero = torch.full_like(scale, half)
    if stored.holds(f"{module}.weight_zero_point"):  # packed along the channels
        packed_zero = stored.read(f"{module}.weight_zero_point")
        if packed_zero.dtype is torch.int32:
            zero = _unpack(packed_zero.t(), fitting[0]).flatten(1)[:, :rows].t().float()
        else:
            zero = packed_zero.float() + half
    return _grouped(stored, f"{module}.weight_g_idx", numbers, zero, scale, fitting[0])


def _gptq_weight(stored: Stored, module: str, bits: int, raised: int, reordered: bool) -> CheckpointWeight | None:
    """qweight [in / (32 / bits), out], qzeros [groups, out / (32 / bits)], scales [groups, out], g_idx [in]."""
    if not stored.holds(f"{module}.qweight"):
        return None
    if reordered and not stored.holds(f"{module}.g_idx"):
        raise ValueError("desc_act is true, and the checkpoint holds no g_idx of it")
    numbers = _unpack(stored.read(f"{module}.qweight").t(), bits).flatten(1)  # [out, in]
    scale = stored.read(f"{module}.scales").float()
    zero = (_unpack(stored.read(f"{module}.qzeros"), bits).flatten(1) + raised) & (2**bits - 1)
    if zero.shape != scale.shape or scale.shape[1] != numbers.shape[0]:
        raise ValueError(f"scales of {tuple(scale.shape)} and zeros of {tuple(zero.shape)} for {tuple(numbers.shape)}")
    return _grouped(stored, f"{module}.g_idx", numbers, zero.t().float(), scale.t(), bits)


def _awq_weight(stored: Stored, module: str) -> CheckpointWeight | None:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    if not stored.holds(f"{module}.qweight"):
        return None
    numbers, zero = (_unpack_awq(stored.read(f"{module}.{part}")) for part in ("qweight", "qzeros"))
    scale = stored.read(f"{module}.scales").float()
    if zero.shape != scale.shape or scale.shape[1] != numbers.shape[1]:
        raise ValueError(f"scales of {tuple(scale.shape)} and zeros of {tuple(zero.shape)} for {tuple(numbers.shape)}")
    return _grouped(stored, f"{module}.g_idx", numbers.t(), zero.t().float(), scale.t(), 4)


def _grouped(stored: Stored, name: str, numbers: Tensor, zero: Tensor, scale: Tensor, bits: int) -> CheckpointWeight:
    """(numbers [out, in] − zero [out, groups]) · scale [out, groups]. name: of stored groups of columns.

    The integers of equal runs of columns stay integers, less half of their range.
    """
    group, half = _groups(stored, name, numbers.shape[1], scale.shape[1]), 2 ** (bits - 1)
    if not torch.equal(group, _runs(numbers.shape[1], scale.shape[1])):
        return (numbers - zero[:, group]) * scale[:, group]
    offsets = (half - zero) * scale
    integers = (numbers - half).to(torch.int8).contiguous()
    return CodedWeight(integers, scale.contiguous(), offsets.contiguous() if offsets.any() else None)


def _mxfp4_weight(stored: Stored, module: str) -> Tensor | None:
    """Experts' weights [experts, in, out], from blocks uint8 [experts, out, in / 32, 16] of 32 numbers in 4 bits, the
    lower bits first, and scales uint8 [experts, out, in / 32], powers of two less MXFP4_BIAS
    (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). bfloat16 has the numbers.
    """
    if not stored.holds(f"{module}_blocks"):
        return None
    blocks, scales = (stored.read(f"{module}{part}") for part in MXFP4_PARTS)
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise ValueError(f"blocks are stored as {blocks.dtype} and scales as {scales.dtype} instead of uint8")
    if blocks.dim() != 4 or blocks.shape[:3] != scales.shape or blocks.shape[3] != MXFP4_BLOCK // 2:
        raise ValueError(f"blocks of shape {tuple(blocks.shape)} and scales of {tuple(scales.shape)}")
    table = torch.tensor(E2M1 + [-number for number in E2M1], dtype=torch.bfloat16)
    numbers = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)
    for expert, (nibbles, powers) in enumerate(zip(blocks, scales, strict=True)):
        pairs = torch.stack([nibbles & 15, nibbles >> 4], -1)
        numbers[expert] = torch.ldexp(table[pairs.int()], powers[..., None, None].int() - MXFP4_BIAS)
    return numbers.flatten(2).transpose(1, 2)


def _unpack_awq(packed: Tensor) -> Tensor:
    """[n, out / 8] → [n, out]."""
    nibbles = _unpack(packed, 4)
    columns = torch.empty_like(nibbles)
    columns[..., list(AWQ_ORDER)] = nibbles
    return columns.flatten(1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., n] → the unsigned numbers in it, from the lowest bits, [..., n, 32 / bits]."""
    if packed.dtype is not torch.int32:
        raise ValueError(f"packed numbers are stored as {packed.dtype} instead of int32")
    return (packed[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)


def _groups(stored: Stored, name: str, columns: int, count: int) -> Tensor:
    """The group of each column, [columns]: as stored, or equal runs."""
    if stored.holds(name):
        group = stored.read(name).long()
        if tuple(group.shape) != (columns,) or int(group.min()) < 0 or int(group.max()) >= count:
            raise ValueError(f"{name} does not name one of {count} groups for each of {columns} columns")
        return group
    return _runs(columns, count)


def _runs(columns: int, count: int) -> Tensor:
    if columns % count:
        raise ValueError(f"{columns} columns are not {count} equal groups")
    return torch.arange(columns) // (columns // count)
