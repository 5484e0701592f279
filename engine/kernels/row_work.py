"""What a layer does to the rows of a pass between its products, each as one operation on CUDA, for 16-bit numbers.

A decoding pass has few rows, so each of these takes a GPU the few µs that any kernel takes. By torch's operations they
are ten kernels of a layer beside its products and its attention. By these they are four.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.operations import operation


def _normalise_shapes(x: Tensor, weight: Tensor, eps: float, offset: float, added: Tensor | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operation("row_kernel.normalise", shapes=_normalise_shapes, mutates=("x",))
def normalise(x: Tensor, weight: Tensor, eps: float, offset: float, added: Tensor | None = None) -> Tensor:
    """(offset + weight) · x / sqrt(mean(x²) + eps) of each row, in fp32; before that x += added, in place and rounded.

    x [N, size], whose rows are contiguous; weight [size]. added: contiguous, like x, or of parts [parts, N, size] in
    fp32; None: nothing. Returns a contiguous tensor like x.
    """
    return normalise_reference(x, weight, eps, offset, added)


def normalise_reference(x: Tensor, weight: Tensor, eps: float, offset: float, added: Tensor | None = None) -> Tensor:
    """The definition of normalise()."""
    if added is not None:
        x.copy_(x.float() + added.float().view(-1, *x.shape).sum(0))
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (offset + weight.float())).to(x.dtype)


@operation("row_kernel.add_parts_", mutates=("x",))
def add_parts_(x: Tensor, parts: Tensor) -> None:
    """x [N, size] += the sum of parts [parts, N, size], fp32."""
    x.copy_(x.float() + parts.sum(0))


@operation("row_kernel.normalise_heads_", mutates=("x",))
def normalise_heads_(x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """As normalise(), of each head of each row, in place. x [N, heads, size], whose heads are contiguous; weight [size]
    or [heads, size]."""
    x.copy_(normalise_reference(x, weight, eps, offset))


@operation("row_kernel.rotate_and_store", mutates=("queries", "stored"))
def rotate_and_store(queries: Tensor, kv: Tensor, factors: Tensor, stored: Tensor, rows: Tensor) -> None:
    """Rotate queries in place, and write kv, rotated, to stored[rows]. In fp32.

    queries [N, heads, size] and kv [N, 2 · kv_heads, size]: parts of the rows of one product. stored [R, 2 · kv_heads,
    size] contiguous. rows [N] int64; only rows that nobody reads may be there twice. factors [N, (heads + 2 · kv_heads)
    · size / 2] complex64: those of the pairs of neighbours.
    """
    rotate_and_store_reference(queries, kv, factors, stored, rows)


def rotate_and_store_reference(queries: Tensor, kv: Tensor, factors: Tensor, stored: Tensor, rows: Tensor) -> None:
    """The definition of rotate_and_store()."""
    turned = torch.cat([queries, kv], 1).flatten(1).float()
    turned.view(torch.complex64).mul_(factors)
    heads = turned.view(len(turned), -1, queries.shape[2])
    queries.copy_(heads[:, : queries.shape[1]])
    stored.index_copy_(0, rows, heads[:, queries.shape[1] :].to(stored.dtype))


def _silu_gate_shapes(both: Tensor) -> Tensor:
    return both.new_empty(both.shape[0], both.shape[1] // 2)


@operation("row_kernel.silu_gate", shapes=_silu_gate_shapes)
def silu_gate(both: Tensor) -> Tensor:
    """silu(gate) · up, in fp32. both [N, 2 · n] contiguous: gate, then up. Returns [N, n]."""
    return silu_gate_reference(both)


def silu_gate_reference(both: Tensor) -> Tensor:
    """The definition of silu_gate()."""
    first, up = both.float().chunk(2, 1)
    return (F.silu(first) * up).to(both.dtype)
