"""Products by code that is compiled for this CPU (engine/kernels/cpu_products.py).

Its weights are laid out in panels, so that few rows take as long as reading the weights. A row's result is the same
bits in any company.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.blocks import block
from engine.models.compiled import as_stored, compiled_module, in_parts, type_of_sums

LEAST_CHANNELS = 64  # of a weight: a panel of the CPUs with the longest ones
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [out, in] as compiled code reads it: see cpu_products.py."""

    numbers: Tensor  # [panels, width · PANEL]
    shape: torch.Size  # of the weight, with the channels that were added
    exact: bool = False  # whether numbers of 16 bits are multiplied in fp32, as if they had been widened before

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a product's inputs and results."""
        return torch.float32 if self.exact else self.numbers.dtype

    @property
    def work(self) -> int:
        """Bytes of the numbers as they are multiplied: those of 16 bits take as long as wide ones, once they came."""
        return self.numbers.numel() * self.dtype.itemsize

    @property
    def stored(self) -> Any:
        """As compiled code takes them."""
        return (as_stored(self.numbers),) if self.exact else as_stored(self.numbers)

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes


def has_compiled_products() -> bool:
    return compiled_module("cpu_products") is not None


def panels_of(weight: Tensor, *, exact: bool = False) -> Panels:
    """weight [out ≥ LEAST_CHANNELS, in] of numbers or int8. exact: see Panels; only for numbers of 16 bits."""
    out, inner = weight.shape
    module = compiled_module("cpu_products")
    assert module is not None, "has_compiled_products() asks first"
    neighbours = 1 if exact else module.neighbours_in(as_stored(weight))
    weight = F.pad(weight, (0, -inner % neighbours)) if inner % neighbours else weight.contiguous()
    if weight.storage_offset() % neighbours:
        weight = weight.clone()
    words = weight.view(WORDS[neighbours * weight.element_size()])  # what lies side by side, moved at once
    channels, width = module.PANEL, words.shape[1]
    whole, apart = out // channels, module.partners_in(as_stored(weight)) if neighbours == 1 else 0
    panels = block((-(-out // channels), width, channels), words.dtype)
    _put(panels[:whole], words[: whole * channels].view(whole, channels, width), apart)
    if len(panels) > whole:
        _put(panels[-1:], words[-channels:].unsqueeze(0), apart)
    return Panels(panels.view(len(panels), -1).view(weight.dtype), torch.Size((out, inner)), exact)


def _put(panels: Tensor, words: Tensor, apart: int) -> None:
    """panels [n, width, channels] = words [n, channels, width]. apart: as `partners_of` in cpu_panels.py."""
    count, channels, width = words.shape
    if not apart:
        panels.copy_(words.mT)
        return
    in_pairs = words.view(count, channels // (2 * apart), 2, apart, width).permute(0, 4, 1, 3, 2)
    panels.view(in_pairs.shape).copy_(in_pairs)


def compiled_product(weight: Panels, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x Wᵀ + b. Sums are fp32 or fp64, and rounded once."""
    module = compiled_module("cpu_products")
    assert module is not None, "panels_of() asked"
    multiply, stored, dtype = module.multiply, weight.stored, weight.dtype
    sums, channels, work, most = type_of_sums(dtype), weight.shape[0], weight.work, module.ROWS
    wide_bias, same = wide_bias_of(bias, channels, sums), dtype == sums

    def product(x: Tensor) -> Tensor:
        wide = x.contiguous() if same else x.to(sums, memory_format=torch.contiguous_format)
        out = torch.empty(x.shape[0], channels, dtype=sums)
        in_parts(multiply, work * -(-x.shape[0] // most), wide.numpy(), stored, wide_bias, out.numpy())
        return out if same else out.to(dtype)

    return product


def wide_bias_of(bias: Tensor | None, channels: int, sums: torch.dtype) -> Any:
    """The bias as compiled code adds it: none is zeros."""
    return torch.zeros(channels, dtype=sums).numpy() if bias is None else bias.detach().to(sums).contiguous().numpy()


CodedWeightArrays = tuple[tuple[Any, Any, Any], Any]  # ((panels, steps, what OFFSET adds), bias), as the kernel's


def coded_panels(codes: Tensor) -> Panels:
    """codes int8 [out, in], with further channels of zeros if there are too few for a panel."""
    missing = LEAST_CHANNELS - len(codes)
    return panels_of(F.pad(codes, (0, 0, 0, missing)) if missing > 0 else codes)


def coded_weight(panels: Panels, steps: Tensor, bias: Tensor | None) -> CodedWeightArrays:
    """W = the panels of codes · steps fp32 [out] as the kernel reads it, with zeros for channels that were added."""
    module = compiled_module("cpu_products")
    assert module is not None, "panels_of() asked"
    added, sums = (0, panels.shape[0] - len(steps)), torch.empty(panels.shape[0], dtype=torch.int32)
    module.sum_codes(panels.numbers.numpy(), sums.numpy())
    offsets = sums * module.OFFSET
    given = torch.zeros(len(steps)) if bias is None else bias.detach().float()
    wide_bias, wide_steps = (F.pad(numbers, added).contiguous().numpy() for numbers in (given, steps))
    return (panels.numbers.numpy(), wide_steps, offsets.numpy()), wide_bias


def compiled_int8_product(panels: Panels, steps: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x Wᵀ + b for W = the panels of codes · steps fp32 [out], and x of any floating dtype, which is rounded to
    integers by rows. Sums are exact."""
    module = compiled_module("cpu_products")
    weight, wide_bias = coded_weight(panels, steps, bias)
    channels, given, num_bytes = len(steps), panels.shape[0], panels.num_bytes
    assert module is not None, "panels_of() asked"
    width, most = panels.numbers.shape[1] // module.PANEL, module.ROWS

    def product(x: Tensor) -> Tensor:
        wide, rows = x.float().contiguous(), x.shape[0]
        rounded, row_steps = np.empty((rows, width), module.ACTIVATION), np.empty(rows, np.float32)
        module.round_rows(wide.numpy(), rounded, row_steps, module.OFFSET)
        out, work = torch.empty(rows, given), num_bytes * -(-rows // most)
        in_parts(module.multiply, work, (rounded, row_steps), weight, wide_bias, out.numpy())
        return (out if given == channels else out[:, :channels]).to(x.dtype)

    return product
