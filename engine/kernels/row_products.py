"""Products of few rows with what a layer does before and after them, each as one operation on CUDA, for 16-bit numbers.

They are for passes of at most `most_rows` rows: plain decoding, the steps of a draft model, and the verification of few
sequences. Such a pass takes a GPU as long as reading the weights does, and a few µs more for each kernel. With these
operations a layer has five kernels for one row and seven for several.

One row is normalised inside of the product that it goes through, which is given the norm's weight as `gain`. Several
rows are normalised before: `gain` is None then.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.operations import operation
from engine.kernels.row_work import normalise_reference, rotate_and_store_reference, silu_gate_reference


@cache
def most_rows(device: torch.device) -> int:
    """The most rows for which the kernels take less time than cuBLAS and the kernels beside it. 0: nobody has measured
    that on such a device. It was measured on an H100 only."""
    return 64 if torch.cuda.get_device_capability(device)[0] == 9 else 0


def _project_shapes(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape[0], others[4])  # type: ignore[call-overload]


@operation("row_product_kernel.project_and_store", shapes=_project_shapes, mutates=("stored",))
def project_and_store(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Tensor,
    stored: Tensor,
    places: Tensor,
    width: int,
    gain: Tensor | None,
    eps: float,
    offset: float,
) -> Tensor:
    """Queries, keys and values of rows x [N, inner]: the product by weight [channels, inner], rotated.

    Returns the first `width` channels [N, width]. Writes the others to stored[places]: stored [R, heads, size], places
    [N] int64. factors [N, channels / 2] complex64: those of the pairs of neighbours. bias [channels]. gain [inner],
    eps, offset: as row_work.normalise(), of a single row; None: x is normalised.
    """
    y = _product(x, weight, bias, gain, eps, offset)
    heads = y.unflatten(1, (-1, stored.shape[2]))
    queries, kv = heads.split_with_sizes((heads.shape[1] - stored.shape[1], stored.shape[1]), 1)
    rotate_and_store_reference(queries, kv, factors, stored, places)
    return queries.flatten(1)


def _normalised_shapes(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape[0], len(weight))


@operation("row_product_kernel.normalised_product", shapes=_normalised_shapes)
def normalised_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, eps: float, offset: float
) -> Tensor:
    """x Wᵀ + bias of rows x [N, inner]: [N, channels]. gain, eps, offset: as project_and_store()."""
    return _product(x, weight, bias, gain, eps, offset)


def _gated_shapes(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape[0], len(weight) // 2)


@operation("row_product_kernel.gated_product", shapes=_gated_shapes)
def gated_product(x: Tensor, weight: Tensor, gain: Tensor | None, eps: float, offset: float) -> Tensor:
    """silu(gate) · up of rows x [N, inner], by weight [2 · n, inner]: gate, then up. Returns [N, n]. gain, eps, offset:
    as project_and_store()."""
    return silu_gate_reference(_product(x, weight, None, gain, eps, offset))


@operation("row_product_kernel.add_product_", mutates=("x",))
def add_product_(x: Tensor, inputs: Tensor, weight: Tensor) -> None:
    """x += inputs Wᵀ, of a single row: x [1, out], inputs [1, inner]."""
    x.add_(F.linear(inputs, weight))


def _parts_shapes(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(1, x.shape[0], len(weight), dtype=torch.float32)


@operation("row_product_kernel.product_parts", shapes=_parts_shapes)
def product_parts(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [parts, N, out], whose sum is x Wᵀ: the operation chooses how many parts there are."""
    return F.linear(x, weight).float()[None]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, eps: float, offset: float) -> Tensor:
    return F.linear(x if gain is None else normalise_reference(x, gain, eps, offset), weight, bias)
