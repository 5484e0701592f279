"""How each format of quantised weights stores one weight. Every reader gives a weight [out, in] back."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.models.blocks import block
from engine.models.quantize import SLICE_ROWS, CodedWeight, row_slices

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MXFP4_PARTS = ("_blocks", "_scales")
# The numbers of MXFP4 by their lowest three bits; the fourth is the sign.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MXFP4_BLOCK, MXFP4_BIAS = 32, 127
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble, from the lowest, within eight columns


class Stored(Protocol):
    """The tensors of a checkpoint as they are stored."""

    def holds(self, name: str) -> bool: ...
    def read(self, name: str) -> Tensor: ...


CheckpointWeight = Tensor | CodedWeight


def scaled_weight(stored: Stored, module: str, block_size: tuple[int, int] | None) -> CheckpointWeight | None:
    """int8 or FP8 numbers [out, in] with scales: one, [out], [out, 1], or one per block."""
    names = [f"{module}.{part}" for part in ("weight_scale", "weight_scale_inv") if stored.holds(f"{module}.{part}")]
    if not names:
        return None
    weight, scale = stored.read(f"{module}.weight"), stored.read(names[0]).float()
    if weight.dtype not in (torch.int8, *FP8):
        raise ValueError(f"its weight is stored as {weight.dtype}")
    if weight.dtype is torch.float8_e4m3fn and not all(map(_is_finite, weight.view(torch.uint8).split(SLICE_ROWS))):
        raise ValueError(f"{module}.weight holds FP8 numbers that are not finite")
    rows, columns = weight.shape
    zero = stored.read(f"{module}.weight_zero_point").float() if stored.holds(f"{module}.weight_zero_point") else None
    if stored.holds(f"{module}.weight_g_idx"):
        group = _groups(stored, f"{module}.weight_g_idx", columns, scale.shape[1])
        scale, zero, block_size = scale[:, group], None if zero is None else zero[:, group], None
    elif zero is None and weight.dtype is not torch.float8_e5m2:
        steps = _steps_of_groups(scale, rows, columns, block_size)
        if steps is not None:
            return CodedWeight(weight, steps)
    numbers = block((rows, columns), torch.float32)
    spread_scale = _spread(scale, rows, columns, block_size)
    spread_zero = None if zero is None else _spread(zero, rows, columns, block_size)
    for part in row_slices(weight):
        wide = weight[part].float()
        numbers[part] = (wide if spread_zero is None else wide - spread_zero(part)) * spread_scale(part)
    return numbers


def _is_finite(codes: Tensor) -> bool:
    """codes: FP8 numbers of E4M3 as uint8."""
    return not (codes & 0x7F == 0x7F).any()


def _steps_of_groups(scale: Tensor, rows: int, columns: int, block_size: tuple[int, int] | None) -> Tensor | None:
    """Scales as steps [rows, groups]; None if they are not those of equal groups of columns."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    if scale.numel() == rows and scale.shape[0] == rows:
        return scale.reshape(rows, 1)
    if block_size is None:
        return scale if scale.dim() == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0 else None
    if columns % block_size[1] or tuple(scale.shape) != (-(-rows // block_size[0]), columns // block_size[1]):
        return None
    return scale.repeat_interleave(block_size[0], 0)[:rows]


def _spread(scale: Tensor, rows: int, columns: int, block_size: tuple[int, int] | None) -> Callable[[slice], Tensor]:
    """A function: part of the rows → their scales, in a shape that broadcasts over these rows of [rows, columns]."""
    if scale.numel() == 1:
        return lambda part: scale.reshape(1, 1)
    if scale.numel() == rows and scale.shape[0] == rows:
        return lambda part: scale.reshape(rows, 1)[part]
    if block_size is None and scale.shape[0] == rows and columns % scale.shape[1] == 0:  # groups of columns
        block_size = (1, columns // scale.shape[1])
    if block_size is None or tuple(scale.shape) != (-(-rows // block_size[0]), -(-columns // block_size[1])):
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} for a weight of {rows} × {columns}, blocks of {block_size}"
        )
    height, width = block_size
    of_row = torch.arange(rows) // height
    return lambda part: scale[of_row[part]].repeat_interleave(width, 1)[:, :columns]


def packed_weight(stored: Stored, module: str, bits: list[int]) -> CheckpointWeight | None:
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
    numbers = _unpacked_rows(packed, fitting[0], columns)
    zero = torch.full_like(scale, half)
    if stored.holds(f"{module}.weight_zero_point"):  # packed along the channels
        packed_zero = stored.read(f"{module}.weight_zero_point")
        if packed_zero.dtype is torch.int32:
            zero = _unpack(packed_zero.t(), fitting[0]).flatten(1)[:, :rows].t().float()
        else:
            zero = packed_zero.float() + half
    return _grouped(stored, f"{module}.weight_g_idx", numbers, zero, scale, fitting[0])


def gptq_weight(stored: Stored, module: str, bits: int, raised: int, reordered: bool) -> CheckpointWeight | None:
    """qweight [in / (32 / bits), out], qzeros [groups, out / (32 / bits)], scales [groups, out], g_idx [in]."""
    if not stored.holds(f"{module}.qweight"):
        return None
    if reordered and not stored.holds(f"{module}.g_idx"):
        raise ValueError("desc_act is true, and the checkpoint holds no g_idx of it")
    packed = stored.read(f"{module}.qweight").t()
    numbers = _unpacked_rows(packed, bits, packed.shape[1] * (32 // bits))
    scale = stored.read(f"{module}.scales").float()
    zero = (_unpack(stored.read(f"{module}.qzeros"), bits).flatten(1) + raised) & (2**bits - 1)
    if zero.shape != scale.shape or scale.shape[1] != numbers.shape[0]:
        raise ValueError(f"scales of {tuple(scale.shape)} and zeros of {tuple(zero.shape)} for {tuple(numbers.shape)}")
    return _grouped(stored, f"{module}.g_idx", numbers, zero.t().float(), scale.t(), bits)


def awq_weight(stored: Stored, module: str) -> CheckpointWeight | None:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    if not stored.holds(f"{module}.qweight"):
        return None
    numbers, zero = (_unpacked_awq(stored.read(f"{module}.{part}")) for part in ("qweight", "qzeros"))
    scale = stored.read(f"{module}.scales").float()
    zero = zero.t()
    if zero.shape != scale.shape or scale.shape[1] != numbers.shape[0]:
        raise ValueError(f"scales of {tuple(scale.shape)} and zeros of {tuple(zero.shape)} for {tuple(numbers.shape)}")
    return _grouped(stored, f"{module}.g_idx", numbers, zero.t().float(), scale.t(), 4)


def _grouped(stored: Stored, name: str, numbers: Tensor, zero: Tensor, scale: Tensor, bits: int) -> CheckpointWeight:
    """(numbers uint8 [out, in] − zero [out, groups]) · scale [out, groups]. name: of the columns' groups, if they are
    stored.

    The integers of equal runs of columns stay integers, less half of their range. They take the memory of `numbers`.
    """
    group, half = _groups(stored, name, numbers.shape[1], scale.shape[1]), 2 ** (bits - 1)
    if not torch.equal(group, _runs(numbers.shape[1], scale.shape[1])):
        wide = block(numbers.shape, torch.float32)
        for part in row_slices(numbers):
            wide[part] = (numbers[part] - zero[part][:, group]) * scale[part][:, group]
        return wide
    offsets = (half - zero) * scale
    integers = numbers.sub_(half).view(torch.int8)  # a byte wraps, so that a negative number is right
    return CodedWeight(integers, scale.contiguous(), offsets.contiguous() if offsets.any() else None)


def mxfp4_weight(stored: Stored, module: str) -> Tensor | None:
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


def _unpacked_awq(packed: Tensor) -> Tensor:
    """[n, out / 8] → uint8 [out, n]."""
    numbers = block((packed.shape[1] * 8, len(packed)), torch.uint8)
    for part in row_slices(packed):
        nibbles = _unpack(packed[part], 4)
        columns = torch.empty_like(nibbles)
        columns[..., list(AWQ_ORDER)] = nibbles
        numbers[:, part] = columns.flatten(1).t()
    return numbers


def _unpacked_rows(packed: Tensor, bits: int, columns: int) -> Tensor:
    """int32 [rows, n] → the unsigned numbers in it, uint8 [rows, columns]."""
    numbers = block((len(packed), columns), torch.uint8)
    for part in row_slices(packed):
        numbers[part] = _unpack(packed[part], bits).flatten(1)[:, :columns]
    return numbers


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
