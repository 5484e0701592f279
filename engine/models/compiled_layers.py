"""A decoder's layers for passes of few rows on a CPU, compiled for it (engine/kernels/cpu_layers.py)."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from engine.models.attention import Attention
from engine.models.compiled import as_stored, compiled_module, together, type_of_sums
from engine.models.compiled_products import LEAST_CHANNELS, coded_weight
from engine.models.decoder import DecoderConfig
from engine.models.int8_products import Int8Weight
from engine.models.layer import Keep, Layer, Norm, no_norm
from engine.models.linear import AS_STORED, BUCKETS, COMPILED, Linear
from engine.models.mlp import GatedMLP
from engine.models.norm import RMSNorm
from engine.models.pass_attention import PassAttention


class KernelLayer(NamedTuple):
    """A layer as the kernel reads it."""

    joining: tuple[Any, float]  # the norm of what the layer before added
    before: tuple[Any, float]
    qkv: tuple[Any, Any]
    qk_norm: tuple[Any, float]
    out: tuple[Any, Any]
    after: tuple[Any, float]
    inner: tuple[Any, float]
    gate_up: tuple[tuple[Any, Any], bool]  # and whether the activation is gelu
    down: tuple[Any, Any]
    factor: float


class CompiledLayers:
    """The layers of one decoder. Their products' forms must be chosen before the first pass."""

    def __init__(self, layers: Seq[Layer], config: DecoderConfig, dtype: torch.dtype) -> None:
        """dtype: of the states."""
        self._layers, self._wide = layers, type_of_sums(dtype)
        self._heads, self._head_dim = config.num_heads, config.head_dim
        self._factor = float(config.traits.residual_multiplier)

    @classmethod
    def of(cls, layers: Seq[Layer], config: DecoderConfig, dtype: torch.dtype) -> Self | None:
        """None: some layer cannot be computed like this."""
        if not all(map(_is_known, layers)) or compiled_module("cpu_layers") is None:
            return None
        return cls(layers, config, dtype)

    @cached_property
    def block_rows(self) -> int:
        """As LanguageModel.block_rows. Up to so many rows all products are fastest in compiled code, as measured."""
        return min(_compiled_to(product.choice) for layer in self._layers for product in products_of(layer))

    def can_compute(self, x: Tensor, attention: PassAttention) -> bool:
        """Whether a pass over the states x [N, hidden] is one of few rows."""
        rows = x.shape[0]
        return 0 < rows <= self.block_rows and isinstance(attention, Attention) and attention.by_blocks is not None

    def add_layers(
        self, x: Tensor, rotations: Seq[Tensor], attention: PassAttention, keep: Keep, inputs: Tensor | None = None
    ) -> None:
        """Add to the states x [N, hidden] what the layers write. inputs [N, width]: of the first product, in place of
        the normed states."""
        assert isinstance(attention, Attention)
        assert attention.by_blocks is not None
        reader, group = attention.by_blocks
        states = x if x.dtype == self._wide else x.to(self._wide)
        added, joined = torch.zeros_like(states), torch.empty_like(states)
        arrays, room = (states.numpy(), added.numpy(), joined.numpy()), self._room(x.shape[0])
        none = torch.empty(0, 0, dtype=self._wide).numpy()
        factors = [torch.view_as_real(table).flatten(1).numpy() for table in rotations]
        given = none if inputs is None else inputs.to(self._wide).contiguous().numpy()
        rows = group.places(reader.block_size)
        calls = []
        for index, (layer, known) in enumerate(zip(self._layers, self._known, strict=True)):
            turned = none if layer.rope is None else factors[layer.rope]
            seen = reader.seen(group, self._head_dim, layer.scoring)
            memory = (reader.blocks(index), turned, rows, seen)
            calls.append(((*arrays, none if index else given), known, memory, room))
        seen_bytes = reader.read_bytes(group)
        self._compute(calls, lambda index: keep(index, joined if x is states else joined.to(x.dtype)), seen_bytes)
        last = self._norm(self._layers[-1].after_mlp)
        self._kernel.join(arrays[0], arrays[1], last, self._factor, arrays[0])
        if states is not x:
            x.copy_(states)

    def _compute(self, calls: Seq[tuple[Any, ...]], computed: Callable[[int], None], seen_bytes: int) -> None:
        """computed: is told a layer's number while `joined` holds what entered it. seen_bytes: of a layer's keys and
        values."""
        meeting = np.zeros((1, 2), np.int64)

        def compute(part: int, parts: int) -> None:
            try:
                for index, call in enumerate(calls):
                    self._kernel.add_layer(*call, meeting, index, part, parts)
                    if part == 0:
                        computed(index)
            except BaseException:
                meeting[0, self._kernel.ENDED] = 1
                raise

        try:  # threads wait for Python once in a layer, so what a layer reads must be worth them
            together(compute, max(self.layer_bytes, seen_bytes))
        except BaseException:
            meeting[0, self._kernel.ENDED] = 1  # a thread may not have started at all
            raise

    @cached_property
    def _kernel(self) -> Any:
        return compiled_module("cpu_layers")

    @cached_property
    def _known(self) -> list[KernelLayer]:
        joining = [no_norm, *(layer.after_mlp for layer in self._layers)]
        return [self._of(layer, norm) for layer, norm in zip(self._layers, joining, strict=False)]

    @property
    def layer_bytes(self) -> int:
        """A layer's products take so many bytes in one form."""
        memories = ((p.num_bytes, len({id(laid) for laid in p.forms.values()})) for p in products_of(self._layers[0]))
        return sum(num_bytes // max(1, count) for num_bytes, count in memories)

    def _room(self, rows: int) -> tuple[Any, ...]:
        """See the kernel."""
        qkv, _, gate_up, _ = products_of(self._layers[0])
        heads = rows, self._heads, self._head_dim
        shapes = (rows, qkv.shape[0]), heads, heads, (rows, gate_up.shape[0] // 2)
        return tuple(torch.empty(shape, dtype=self._wide).numpy() for shape in shapes)

    def _of(self, layer: Layer, joining: Norm) -> KernelLayer:
        assert isinstance(layer.mlp, GatedMLP)
        qkv, out, gate_up, down = map(self._product, products_of(layer))
        return KernelLayer(
            self._norm(joining),
            self._norm(layer.before_attention),
            qkv,
            self._qk_norm(layer),
            out,
            self._norm(layer.after_attention),
            self._norm(layer.before_mlp),
            (gate_up, not layer.mlp.is_silu),
            down,
            self._factor,
        )

    def _norm(self, norm: Norm) -> tuple[Any, float]:
        if isinstance(norm, RMSNorm):
            return norm.weight.to(self._wide).contiguous().numpy(), float(norm.floor)
        return torch.empty(0, dtype=self._wide).numpy(), 0.0

    def _qk_norm(self, layer: Layer) -> tuple[Any, float]:
        if not layer.qk_norms:
            return torch.empty(0, 0, dtype=self._wide).numpy(), 0.0
        parts = [norm.weight.expand(heads.stop - (heads.start or 0), -1) for heads, norm in layer.qk_norms]
        return torch.cat(parts).to(self._wide).contiguous().numpy(), float(layer.qk_norms[0][1].floor)

    def _product(self, product: Linear) -> tuple[Any, Any]:
        kept = next(product.forms[form] for form in (*AS_STORED, "compiled_int8") if form in product.forms)
        if isinstance(kept, Int8Weight):
            return coded_weight(kept.packed, kept.steps, product.bias)
        bias = torch.empty(0) if product.bias is None else product.bias
        return as_stored(kept.contiguous()), bias.to(self._wide).contiguous().numpy()


def products_of(layer: Layer) -> list[Linear]:
    """Return a known layer's products: qkv, out, gate and up, down."""
    return [product for product in (layer.qkv, layer.out, *layer.mlp.products) if isinstance(product, Linear)]


def _is_known(layer: Layer) -> bool:
    """Whether the kernel knows what the layer does."""
    norms = (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
    if not all(norm is no_norm or (isinstance(norm, RMSNorm) and not norm.fused) for norm in norms):
        return False
    if not isinstance(layer.mlp, GatedMLP) or not layer.mlp.is_sigmoid:
        return False
    covered = 0
    for heads, norm in layer.qk_norms:
        if norm.dims != (-1,) or (heads.start or 0) != covered:
            return False
        covered = heads.stop
    products = products_of(layer)
    return len(products) == 4 and all(product.shape[0] >= 2 * LEAST_CHANNELS for product in products)


def _compiled_to(choice: Seq[str]) -> int:
    """The largest number of rows up to which a choice is compiled code."""
    forms = [*choice, *[choice[-1]] * (len(BUCKETS) - len(choice))]
    ends = [limit for limit, form in zip(BUCKETS, forms, strict=True) if form in COMPILED]
    return max((limit for i, limit in enumerate(ends) if limit == BUCKETS[i]), default=0)
