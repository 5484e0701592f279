"""Products and gatings in which a row's result does not depend, bit for bit, on the other rows of the call.

A library chooses its kernel by the number of rows, and kernels add in different orders. oneDNN's packed products agree
over most numbers of rows, not all: on a Xeon with AMX one row of a [896, 2432] product in fp32 differs from two and
more, and in bf16 the last rows of 33 differ from those of 32. So the numbers of rows that agree are found by trial.

torch computes an activation in vectors, and the last numbers of a thread's part one by one, with other last bits.
"""

from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.linear import laid_out, lay_out, num_bytes_of, product_of, usable_forms
from engine.models.mlp import Gating
from engine.models.shards import StoredWeight

MOST_ROWS = (32, 16, 8, 4, 2, 1)
FEWEST_ROWS = (1, 2, 4, 8, 16)
ONE_THREAD = 32767  # numbers that torch does not split among threads: one less than at::internal::GRAIN_SIZE
TRIAL_CHANNELS = 256  # output channels with numbers of their own; a head has hundreds of thousands


class RowRange(NamedTuple):
    """Products of `fewest` to `most` rows give each row the same bits."""

    fewest: int
    most: int


class SteadyLinear:
    """y = x Wᵀ + b for x [rows, in] → [rows, out], in calls of as many rows as give every row the same bits."""

    def __init__(self, weight: Tensor | StoredWeight, bias: Tensor | None = None) -> None:
        """weight [out, in]. Raises ConfigError if it cannot be read."""
        form, (out, inner) = usable_forms(weight)[0], weight.shape
        self.range = agreeing_rows(out, inner, weight.dtype, bias is not None, torch.get_num_threads())
        self.weight, self.bias = cast(Tensor, laid_out(weight, [form])[form]), bias
        self._product = product_of(form, self.weight, bias)

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.range.fewest <= x.shape[0] <= self.range.most:
            return self._product(x)
        return torch.cat([self._padded(part) for part in x.split(self.range.most)])

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.range.fewest - x.shape[0]
        return self._product(x) if missing <= 0 else self._product(F.pad(x, (0, 0, 0, missing)))[:-missing]


def steady_gating(gating: Gating) -> Gating:
    """The gating in calls of so few rows that no row is split among threads, unless it is split so alone too."""

    def by_parts(gate: Tensor, up: Tensor) -> Tensor:
        rows = max(1, ONE_THREAD // gate.shape[1])
        if gate.shape[0] <= rows:
            return gating(gate, up)
        return torch.cat([gating(*parts) for parts in zip(gate.split(rows), up.split(rows), strict=True)])

    return by_parts


@cache
@torch.inference_mode()
def agreeing_rows(out: int, inner: int, dtype: torch.dtype, bias: bool, threads: int) -> RowRange:
    """Find the rows of a product of this shape by trial. threads: this process's own; they may change the kernel.

    All rows of the trial are alike, so every row of every call must give the same bits. The terms of each sum cancel
    and differ by a factor of 2²⁴, so that another order of adding gives another sum.
    """
    generator = torch.Generator().manual_seed(0)
    size = (min(out, TRIAL_CHANNELS), (inner + 1) // 2)
    exponents = torch.randint(-12, 13, size, generator=generator)
    half = torch.ldexp(torch.randn(size, generator=generator), exponents)
    order = torch.randperm(2 * size[1], generator=generator)[:inner]
    channels = torch.cat([half, -half], 1)[:, order].to(dtype)
    weight = channels.repeat(-(-out // TRIAL_CHANNELS), 1)[:out]
    form = usable_forms(weight)[0]
    product = product_of(form, lay_out(weight, form), torch.ones(out, dtype=dtype) if bias else None)
    x = torch.ones(MOST_ROWS[0], inner, dtype=dtype)
    results = [product(x[:rows]) for rows in range(1, MOST_ROWS[0] + 1)]
    for most in MOST_ROWS:
        for fewest in (n for n in FEWEST_ROWS if n <= most):
            if all(torch.equal(y, results[most - 1][:1].expand_as(y)) for y in results[fewest - 1 : most]):
                return RowRange(fewest, most)
    raise AssertionError("one row agrees with itself")
