"""What a layer does to each token by itself: a gated MLP, or a mixture of such MLPs."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.row_work import silu_gate
from engine.models.linear import Product
from engine.models.traits import Activation, ExpertTraits

Gating = Callable[[Tensor, Tensor], Tensor]  # (gate, up) → what `down` gets; may write into either


class GatedMLP:
    """down(activation(gate) · up), gate and up from one product."""

    def __init__(self, gate_up: Product, down: Product, gating: Gating) -> None:
        self.gate_up = gate_up  # hidden → 2·intermediate
        self.down = down
        self._gating = gating

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate_up, self.down

    def with_products(self, gate_up: Product, down: Product) -> "GatedMLP":
        """The same between other products."""
        return GatedMLP(gate_up, down, self._gating)

    @property
    def is_silu(self) -> bool:
        """Whether the activation is silu."""
        return self._gating is _silu

    @property
    def is_sigmoid(self) -> bool:
        """Whether the activation is silu or gelu's tanh approximation, x times a sigmoid."""
        return self._gating in (_silu, _gelu_tanh)

    def __call__(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        if self.is_silu and both.is_cuda and both.dtype.itemsize == 2:
            return self.down(silu_gate(both))
        gate, up = both.split_with_sizes((both.shape[-1] // 2,) * 2, -1)  # less host work than chunk
        return self.down(self._gating(gate, up))


class Experts:
    """Each token goes through the few experts that its router chooses; a row's result depends on that row alone."""

    def __init__(self, router: Product, experts: tuple[GatedMLP, ...], traits: ExpertTraits) -> None:
        self.router = router  # hidden → number of experts
        self.experts = experts
        self._traits = traits

    @property
    def products(self) -> tuple[Product, ...]:
        return self.router, *(product for expert in self.experts for product in expert.products)

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, self.experts[number](x[rows]) * weights[rows, place, None])
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, experts) [N, per_token]. As in transformers, only a softmax that comes first is in fp32."""
        traits, logits = self._traits, self.router(x)
        if traits.routing == "choice_first":
            best, chosen = logits.topk(traits.per_token)
            return best.softmax(-1), chosen
        chances = logits.softmax(-1, dtype=torch.float32 if x.dtype.itemsize == 2 else x.dtype)
        weights, chosen = chances.topk(traits.per_token)
        if traits.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh").mul_(up)


def _clamped(gate: Tensor, up: Tensor, limit: float, slope: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return (gate * slope).sigmoid_().mul_(gate).mul_(up.clamp(-limit, limit) + 1)


def gating(activation: Activation, experts: ExpertTraits | None = None) -> Gating:
    if experts is not None and experts.clamped_at is not None:
        return partial(_clamped, limit=experts.clamped_at, slope=experts.slope)
    return {"silu": _silu, "gelu_tanh": _gelu_tanh}[activation]
