"""A decoder's layers on a CPU, compiled for it (engine/kernels/cpu_layers.py), for passes of few rows, or of any number
where compiled code is the fastest for all."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from engine.models.attention import Attention
from engine.models.compiled import compiled_module, counted_memory, parts_of, together, type_of_sums
from engine.models.compiled_products import LEAST_CHANNELS, Panels, coded_weight, wide_bias_of
from engine.models.cpu_attention import scoring_numbers
from engine.models.decoder import DecoderConfig, WatchedStates
from engine.models.int8_products import Int8Weight
from engine.models.layer import Layer, Norm, no_norm
from engine.models.linear import BUCKETS, COMPILED, Linear
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
    scoring: tuple[float, float, Any]  # scale, cap, sinks


class LayerRun(NamedTuple):
    """Layers that follow each other and differ in the numbers of their weights only."""

    layers: range
    window: int | None
    turns: Any  # cosine and sine by position, as the kernel has them
    given: KernelLayer  # the first layer
    addresses: Any  # [layers, arrays] int64


class CompiledLayers:
    """The layers of one decoder. Their products' forms must be chosen before the first pass."""

    def __init__(self, layers: Seq[Layer], config: DecoderConfig, rotations: Seq[Tensor], dtype: torch.dtype) -> None:
        """rotations: as Decoder has them; dtype: of the states."""
        self._layers, self.wide = layers, type_of_sums(dtype)
        self._heads, self._head_dim = config.num_heads, config.head_dim
        self.factor = float(config.traits.residual_multiplier)
        self._turns = [torch.view_as_real(table).flatten(1).numpy() for table in rotations]
        self.number = torch.empty(0, dtype=self.wide).numpy().dtype
        self.nothing = np.empty((0, 0), self.number)

    @classmethod
    def of(cls, layers: Seq[Layer], config: DecoderConfig, rotations: Seq[Tensor], dtype: torch.dtype) -> Self | None:
        """None: some layer cannot be computed like this."""
        if not all(map(_is_known, layers)) or compiled_module("cpu_layers") is None:
            return None
        return cls(layers, config, rotations, dtype)

    @cached_property
    def block_rows(self) -> int:
        """As LanguageModel.block_rows. Up to so many rows all products are fastest in compiled code, as measured."""
        return min(compiled_to(product.choice) for layer in self._layers for product in products_of(layer))

    def can_compute(self, x: Tensor, attention: PassAttention) -> bool:
        """Whether compiled code computes a pass over the states x [N, hidden]."""
        rows = x.shape[0]
        return 0 < rows <= self.block_rows and isinstance(attention, Attention) and attention.by_blocks is not None

    def add_layers(
        self,
        x: Tensor,
        attention: PassAttention,
        watched: WatchedStates | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Add to the states x [N, hidden] what the layers write. inputs [N, width]: of the first product, in place of
        the normed states."""
        assert isinstance(attention, Attention)
        assert attention.by_blocks is not None
        reader, group = attention.by_blocks
        states = x if x.dtype == self.wide else x.to(self.wide)
        room, work = self.room(x.shape[0]), self.work(x.shape[0], reader.read_bytes(group))
        arrays = states.numpy(), np.zeros(x.shape, self.number), np.empty(x.shape, self.number)
        # NumPy's memory is there in a tenth of the time of torch's, but torch's profiler does not see it.
        own = (*room, *arrays[1:])
        counted = counted_memory(lambda: sum(array.nbytes for array in own) + self.kernel_bytes(len(x), parts_of(work)))
        given = self.nothing if inputs is None else inputs.to(self.wide).contiguous().numpy()
        positions, rows = attention.positions.numpy(), attention.plan.cache_rows.numpy()
        layers = np.array([] if watched is None else watched.layers, np.int64)
        table = torch.empty(len(rows), len(layers) * x.shape[1], dtype=self.wide)
        calls = []
        for run in self._runs:
            first, addresses = run.layers.start, (run.addresses, reader.addresses[run.layers.start : run.layers.stop])
            memory = reader.blocks(first), (run.turns, positions, rows), reader.seen(group, run.window)
            calls.append((arrays, run.given, addresses, given, memory, (layers, table.numpy())))
        self._compute(calls, room, work)
        del counted
        self._kernel.join(arrays[0], arrays[1], self.last_norm, self.factor, arrays[0])
        if states is not x:
            x.copy_(states)
        if watched is not None and len(layers):
            watched.take(table.to(x.dtype))

    def work(self, rows: int, seen_bytes: int) -> int:
        """Bytes that a layer reads, as in_parts counts them: its weights for each tile of rows, or its keys and values.
        Threads meet six times in a layer, so this must be worth them."""
        return max(self.layer_bytes * -(-rows // self.tile_rows), seen_bytes)

    def _compute(self, calls: Seq[tuple[Any, ...]], room: tuple[Any, ...], work: int) -> None:
        def compute(numbers: Any, part: int, parts: int) -> None:
            layers = 0
            for call in calls:
                met = self._kernel.STAGES * layers
                self._kernel.add_layers(*call, room, (numbers, met, layers), part, parts)
                layers += len(call[2][0])

        self.in_meetings(compute, work)

    def in_meetings(self, function: Callable[[Any, int, int], None], work: int) -> None:
        """Call function(numbers, part, parts) in as many threads as the work is worth. numbers: where they meet."""
        numbers = np.zeros((1, 2), np.int64)

        def compute(part: int, parts: int) -> None:
            try:
                function(numbers, part, parts)
            except BaseException:
                numbers[0, self._kernel.ENDED] = 1
                raise

        try:
            together(compute, work)
        except BaseException:
            numbers[0, self._kernel.ENDED] = 1  # a thread may not have started at all
            raise

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def tile_rows(self) -> int:
        """Rows that multiply a weight while it is read once."""
        return int(self._kernel.ROWS)

    @property
    def is_one_run(self) -> bool:
        """The forms of the products must be chosen, and compiled ones be among them."""
        return len(self._runs) == 1

    @property
    def first_run(self) -> LayerRun:
        return self._runs[0]

    @cached_property
    def _runs(self) -> list[LayerRun]:
        last, runs, known = object(), list[tuple[int, int]](), self._known
        for index in range(len(known)):
            kind = _kind(known[index]), self._layers[index].rope, self._layers[index].scoring.window
            if kind == last:
                runs[-1] = runs[-1][0], index + 1
            else:
                runs.append((index, index + 1))
            last = kind
        return [self._run(*ends) for ends in runs]

    def _run(self, first: int, end: int) -> LayerRun:
        layer, known = self._layers[first], self._known
        turns = self.nothing if layer.rope is None else self._turns[layer.rope]
        addresses = np.array([self._kernel.addresses_of(known[index]) for index in range(first, end)], np.int64)
        return LayerRun(range(first, end), layer.scoring.window, turns, known[first], addresses)

    @cached_property
    def _kernel(self) -> Any:
        return compiled_module("cpu_layers")

    @cached_property
    def _known(self) -> list[KernelLayer]:
        joining = [no_norm, *(layer.after_mlp for layer in self._layers)]
        return [self._of(layer, norm) for layer, norm in zip(self._layers, joining, strict=False)]

    @cached_property
    def last_norm(self) -> tuple[Any, float]:
        return self.norm_of(self._layers[-1].after_mlp)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of a layer's numbers as they are multiplied, or of its codes."""
        return sum(product.work for product in products_of(self._layers[0]))

    @cached_property
    def _widths(self) -> tuple[int, int]:
        qkv, _, gate_up, _ = products_of(self._layers[0])
        return qkv.shape[0], gate_up.shape[0]

    def room(self, rows: int) -> tuple[Any, ...]:
        """See the kernel."""
        (qkv, gate_up), heads = self._widths, (rows, self._heads, self._head_dim)
        shapes = (rows, qkv), heads, heads, (rows, gate_up // 2)
        return tuple([np.empty(shape, self.number) for shape in shapes])

    def kernel_bytes(self, rows: int, parts: int) -> int:
        """What each part allocates by itself, at most: normed states, the inputs of a product in its own numbers, and
        gate and up."""
        products = products_of(self._layers[0])
        hidden, widest = products[-1].shape[0], max(product.shape[1] for product in products)
        each = 2 * hidden + widest + self._widths[1]
        return parts * min(rows, self._kernel.BLOCK_ROWS) * each * self.number.itemsize

    def _of(self, layer: Layer, joining: Norm) -> KernelLayer:
        assert isinstance(layer.mlp, GatedMLP)
        qkv, out, gate_up, down = map(self.product_of, products_of(layer))
        return KernelLayer(
            self.norm_of(joining),
            self.norm_of(layer.before_attention),
            qkv,
            self._qk_norm(layer),
            out,
            self.norm_of(layer.after_attention),
            self.norm_of(layer.before_mlp),
            (gate_up, not layer.mlp.is_silu),
            down,
            self.factor,
            scoring_numbers(layer.scoring, self._head_dim, self.wide),
        )

    def norm_of(self, norm: Norm) -> tuple[Any, float]:
        if isinstance(norm, RMSNorm):
            return norm.weight.to(self.wide).contiguous().numpy(), float(norm.floor)
        return np.empty(0, self.number), 0.0

    def _qk_norm(self, layer: Layer) -> tuple[Any, float]:
        if not layer.qk_norms:
            return self.nothing, 0.0
        parts = [norm.weight.expand(heads.stop - (heads.start or 0), -1) for heads, norm in layer.qk_norms]
        return torch.cat(parts).to(self.wide).contiguous().numpy(), float(layer.qk_norms[0][1].floor)

    def product_of(self, product: Linear) -> tuple[Any, Any]:
        kept = next(product.forms[form] for form in COMPILED if form in product.forms)
        if isinstance(kept, Int8Weight):
            return coded_weight(kept.packed, kept.steps, product.bias)
        assert isinstance(kept, Panels)
        return kept.stored, wide_bias_of(product.bias, product.shape[0], self.wide)


def _kind(known: Any) -> Any:
    """What must be equal in the layers of a run: all numbers, and the shapes and types of arrays."""
    if isinstance(known, tuple):
        return tuple(map(_kind, known))
    return (known.shape, known.strides, known.dtype) if isinstance(known, np.ndarray) else known


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
    return len(products) == 4 and all(product.shape[0] >= LEAST_CHANNELS for product in products)


def compiled_to(choice: Seq[str]) -> int:
    """The largest number of rows up to which a choice is compiled code. The last bucket holds all larger numbers."""
    forms = [*choice, *[choice[-1]] * (len(BUCKETS) - len(choice))]
    if all(form in COMPILED for form in forms):
        return sys.maxsize
    ends = [limit for limit, form in zip(BUCKETS, forms, strict=True) if form in COMPILED]
    return max((limit for i, limit in enumerate(ends) if limit == BUCKETS[i]), default=0)
