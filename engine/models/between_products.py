"""Prepares compiled layers: measures what torch takes between the products of a layer, and compiles the code.

A product that is a little slower in compiled code is chosen nevertheless if that saves more around it.
"""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from cache.slotted import SlottedCache
from cache.storage import KVShape, SlottedStorage
from engine.models.attention import Attention, plan_attention
from engine.models.compiled import one_part, parts_of
from engine.models.compiled_layers import CompiledLayers, products_of
from engine.models.compiled_products import LEAST_CHANNELS, compiled_product, panels_of
from engine.models.cpu_attention import BlockReader
from engine.models.decoder import Decoder
from engine.models.layer import Layer, no_norm
from engine.models.linear import BUCKETS, GainSource, LayerGain
from engine.models.mlp import GatedMLP
from engine.models.rope import row_rotations
from engine.models.spans import Span
from engine.profiling.quartile import lower_quartile

log = logging.getLogger(__name__)

RUNS, GAIN_RUNS = 20, 6  # the latter take milliseconds each
KEYS = 64  # that attention sees, at most
PASSING_NUMBERS = 1 << 20  # of float32: more than the cache of a core holds, mostly
SAMPLE = (16384, 1024)  # of a weight: 64 MiB, beside which it takes no time to wake threads
PRODUCTS = 4  # of a layer
SHARED_NUMBERS = 1 << 15  # torch's threads share an operation on so many for each
REST_S = 100e-6  # in which torch's threads fall asleep: they wait actively for 5 µs (engine.IDLE_WORKERS_SPIN)


@dataclass(frozen=True, slots=True)
class _NoProduct:
    """A product that takes no time."""

    weight: Tensor  # what it gives
    num_bytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight


def tell_gains(decoder: Decoder) -> None:
    """Let the products of compiled layers find out what these gain."""
    if not isinstance(decoder.few_rows, CompiledLayers):
        return
    shapes = [tuple(product.shape) for product in products_of(decoder.layers[0])]
    name = sha256(repr((decoder.config.head_sizes, decoder.config.traits, shapes)).encode()).hexdigest()[:8]
    gain = GainSource(name, cache(partial(_layer_gain, decoder, decoder.few_rows.layer_bytes)))
    for layer in decoder.layers:
        for product in products_of(layer):
            if product.given is not None:
                product.layer_gain = gain


def compile_layers(decoder: Decoder) -> None:
    """Compile the code of layers whose forms are chosen, if passes will use it. Rounds that are measured later, and
    requests, do not wait for it then."""
    if decoder.block_rows == 0:
        return
    began, dtype, first = perf_counter(), decoder.dtype, products_of(decoder.layers[0])[0]
    attention = _short_attention(decoder, 1, decoder.config.num_layers, by_blocks=True)
    x = torch.zeros(1, decoder.config.hidden_size, dtype=dtype)
    with torch.inference_mode():
        decoder.add_layers(x, attention, inputs=torch.zeros(1, first.shape[1], dtype=dtype))
    log.info("compiled layers are ready (%.1f s)", perf_counter() - began)


@torch.inference_mode()
def _layer_gain(decoder: Decoder, layer_bytes: int) -> LayerGain:
    wake_s = _seconds_to_wake()
    few = [_seconds_between(decoder, rows) / PRODUCTS + wake_s for rows in BUCKETS[:-2]]
    # With more rows it is arithmetic, which compiled layers do as well.
    return LayerGain((*few, few[-1], 0.0), (*_gains_of_threads(layer_bytes), 1.0))


def _gains_of_threads(layer_bytes: int) -> list[float]:
    """How many times as fast the threads that share a layer multiply as one does, once they are awake, for BUCKETS but
    the last. With few rows they share the speed of the memory, with many each has a core's speed.

    All numbers of rows take turns, so that other work for a moment disturbs one turn of each.
    """
    parts, sizes = parts_of(layer_bytes), BUCKETS[:-1]
    if parts == 1:
        return [1.0] * len(sizes)
    product = compiled_product(panels_of(torch.ones(SAMPLE)), None)
    seconds = [(list[float](), list[float]()) for _ in sizes]
    inputs = [torch.ones(rows, SAMPLE[1]) for rows in sizes]
    for _ in range(GAIN_RUNS):
        for x, both in zip(inputs, seconds, strict=True):
            for spent, alone in zip(both, (False, True), strict=True):
                began = perf_counter()
                with one_part() if alone else nullcontext():
                    product(x)
                spent.append(perf_counter() - began)
    gains = [min(by_itself) / min(together) for together, by_itself in seconds]
    return [min(parts, max(1.0, gain)) for gain in accumulate(gains, max)]


def _seconds_to_wake() -> float:
    """Seconds that a product waits for torch's threads, which fall asleep between products. Products that are timed one
    after the other find them awake."""
    if torch.get_num_threads() == 1:
        return 0.0
    numbers, seconds = torch.zeros(SHARED_NUMBERS * torch.get_num_threads()), (list[float](), list[float]())
    for _ in range(RUNS):
        rested = perf_counter() + REST_S
        while perf_counter() < rested:
            pass
        for spent in seconds:  # asleep, then awake
            began = perf_counter()
            numbers.add_(0)
            spent.append(perf_counter() - began)
    asleep, awake = map(lower_quartile, seconds)
    return max(0.0, asleep - awake)


def _seconds_between(decoder: Decoder, rows: int) -> float:
    """Seconds of a layer whose products take no time, with attention over few keys, and of calls of compiled products,
    which compiled layers do without too."""
    config, dtype, rows = decoder.config, decoder.dtype, min(rows, _keys(decoder))
    layer, attention = _without_products(decoder.layers[0], rows, dtype), _short_attention(decoder, rows)
    alone = replace(decoder, layers=(layer,), few_rows=None)
    x = torch.ones(rows, config.hidden_size, dtype=dtype)
    product = compiled_product(panels_of(torch.ones(LEAST_CHANNELS, 1, dtype=dtype)), None)
    inputs = layer.before_attention(x)
    rotations = [row_rotations(table, attention.positions, config.head_sizes) for table in alone.rotations]
    passing, seconds = torch.ones(PASSING_NUMBERS), list[float]()
    for run in range(1 + RUNS):
        passing.sum()  # weights pass through the caches in service
        began = perf_counter()
        alone.add_layer(0, x, inputs, rotations, attention, no_norm)
        for _ in range(PRODUCTS):
            product(x[:, :1])
        if run:
            seconds.append(perf_counter() - began)
    return lower_quartile(seconds)


def _keys(decoder: Decoder) -> int:
    """KEYS, or all that the decoder allows."""
    return min([KEYS, *(len(table) for table in decoder.rotations)])


def _short_attention(decoder: Decoder, rows: int, layers: int = 1, *, by_blocks: bool = False) -> Attention:
    """Over as many layers; the rows are the last keys."""
    config, dtype, cpu, keys = decoder.config, decoder.dtype, torch.device("cpu"), _keys(decoder)
    shape = KVShape(layers, config.num_kv_heads, config.head_dim, dtype, cpu)
    storage = SlottedStorage(SlottedCache(1, keys), 1, keys, shape)
    reader = BlockReader.over(storage) if by_blocks else None
    plan = plan_attention(
        [Span.at(0, keys - rows, rows)],
        storage,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        dtype=dtype,
        device=cpu,
        reader=reader,
        few_rows=rows,
    )
    return Attention(plan, storage, reader)


def _without_products(layer: Layer, rows: int, dtype: torch.dtype) -> Layer:
    qkv, out, gate_up, down = (
        _NoProduct(torch.ones(rows, product.shape[0], dtype=dtype)) for product in products_of(layer)
    )
    assert isinstance(layer.mlp, GatedMLP)
    return replace(layer, qkv=qkv, out=out, mlp=layer.mlp.with_products(gate_up, down))
