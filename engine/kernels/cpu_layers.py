"""A decoder's layer on a CPU, compiled by Numba for the CPU that it runs on.

Between the products of a small model stand some twenty operations of torch, which take longer than the products. Here
a layer is six stages, and layers of the same shapes are one call. Several threads share the stages, and meet behind
each. With few rows each thread computes some of the channels, and norms all rows for itself. With many rows each takes
some of the rows.

What a layer adds to the states is left to the next stage that reads them, which adds and normalises. Each stage gets

    states: (x, added, joined): x + added [N, hidden] enter the layer; joined: room
    layer: (joining, before, qkv, qk_norm, out, after, inner, gate_up, down, factor, scoring), as the stages tell
    room: (qkv [N, width], queries and attended [N, heads, head_dim], gated [N, intermediate])

A norm is (weight [width], floor), as models/norm.py has them, and ([0], ..) for none. A product is (weight, bias), as
`multiply_some` has them. Numbers of the states are fp32, or fp64 for fp64 memory.
"""

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.kernels.cpu_addresses import addresses_of as addresses_of  # for those that call add_layers
from engine.kernels.cpu_addresses import moved
from engine.kernels.cpu_attention import attend
from engine.kernels.cpu_compile import compiled_exactly, inlined
from engine.kernels.cpu_exponentials import exponentials
from engine.kernels.cpu_integers import ACTIVATION, NEIGHBOURS, OFFSET
from engine.kernels.cpu_meeting import ENDED as ENDED
from engine.kernels.cpu_meeting import meet
from engine.kernels.cpu_panels import ROWS as ROWS
from engine.kernels.cpu_panels import is_coded
from engine.kernels.cpu_products import bounds, multiply_some, round_rows
from engine.kernels.cpu_vectors import dot, store_row

STAGES = 6  # of a layer
PROJECT, WRITE, GATE, SHRINK = range(4)  # the stages with products
BLOCK_ROWS = 96  # that a stage computes at once: 16 tiles, whose arithmetic takes longer than reading the weights
OWN_ROWS = 64  # of each part, from which on parts share rows and not channels. Each part then reads all weights, which
# takes less time than their arithmetic, and norms and rounds its own rows only
LARGEST_POWER = 87.0  # exp of more is no fp32 number
GELU_SLOPE, GELU_CUBE = math.sqrt(8 / math.pi), 0.044715  # of the tanh approximation, as a sigmoid


def product(x: Any, given: Any, first: int, last: int, out: Any) -> None:
    """The channels first … last − 1 of x [N, inner] · Wᵀ + b → out [N, channels]."""
    raise NotImplementedError("compiled code only")


@overload(product, strict=False)
def _product(x: Any, given: Any, first: Any, last: Any, out: Any) -> Any:
    if is_coded(given[0]) and x.dtype == types.float64:

        def narrowed(x: Any, given: Any, first: int, last: int, out: Any) -> None:
            product(x.astype(np.float32), given, first, last, out)

        return narrowed
    if is_coded(given[0]):

        def coded(x: Any, given: Any, first: int, last: int, out: Any) -> None:
            weight, bias = given
            width = (x.shape[1] + NEIGHBOURS - 1) // NEIGHBOURS * NEIGHBOURS
            rounded, steps = np.empty((x.shape[0], width), ACTIVATION), np.empty(x.shape[0], np.float32)
            round_rows(x, rounded, steps, np.int64(OFFSET))  # a literal is a type of its own
            multiply_some((rounded, steps), weight, bias, first, last, out)

        return coded

    def plain(x: Any, given: Any, first: int, last: int, out: Any) -> None:
        panels, bias = given
        multiply_some(x, panels, bias, first, last, out)

    return plain


@compiled_exactly
def normalise(x: Any, norm: Any, out: Any) -> None:
    """out = x · weight / sqrt(|x|² + floor²), by rows; out may be x."""
    weight, floor = norm
    squares, number = np.empty((x.shape[0], 1), x.dtype), x.dtype.type
    for row in range(x.shape[0]):
        dot(x, row, x, row, squares)
        scale = number(1) / number(math.sqrt(squares[row, 0] + number(floor) * number(floor)))
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * weight[i] * scale


@compiled_exactly
def join(x: Any, added: Any, norm: Any, factor: float, out: Any) -> None:
    """out = x + norm(added) · factor; out may be x."""
    number = x.dtype.type
    if len(norm[0]):
        normed = np.empty_like(added)
        normalise(added, norm, normed)
        added = normed
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] + added[row, i] * number(factor)


@compiled_exactly
def enter(x: Any, added: Any, joining: Any, factor: float, joined: Any, norm: Any, part: int) -> Any:
    """The normed sum of x and what is to be added. The first part keeps the sum in `joined`."""
    total = joined if part == 0 else np.empty_like(x)
    join(x, added, joining, factor, total)
    if len(norm[0]) == 0:
        return total
    normed = np.empty_like(x)
    normalise(total, norm, normed)
    return normed


@inlined
def project(states: Any, layer: Any, inputs: Any, is_first: bool, room: Any, part: int, parts: int) -> None:
    """Queries, keys and values of the rows. joining: the norm of what the layer before added. inputs [N, width]: of the
    first layer's product, in place of the normed states; none: [0, 0]."""
    x, added, joined = states
    first, last = bounds(room[0].shape[1], part, parts)
    entered = enter(x, added, layer[0], layer[9], joined, layer[1], part)
    product(inputs if is_first and len(inputs) else entered, layer[2], first, last, room[0])


@compiled_exactly
def place(layer: Any, pool: Any, places: Any, room: Any) -> None:
    """Normalise and rotate queries and keys, and store keys and values. One part does it for each row.

    qk_norm: (weight [heads, head_dim], floor) of the first heads of qkv; none: [0, 0]. places: (turns, positions [N],
    rows [N]): at a position turns[position] are cosine and sine for each pair of a head's first numbers; none: [0, 0].
    rows: where the pool takes keys and values.
    """
    qkv, queries, _, _ = room
    turns, positions, rows = places
    weight, floor = layer[3]
    size, width, number = queries.shape[2], queries.shape[1] * queries.shape[2], qkv.dtype.type
    by_head, per_row = qkv.reshape(qkv.size // size, size), qkv.shape[1] // size
    turned = queries.shape[1] + pool.shape[2] // 2  # heads
    flat = queries.reshape(queries.shape[0], width)
    stored = pool.reshape(pool.shape[0] * pool.shape[1], pool.shape[2] * pool.shape[3])
    squares = np.empty((by_head.shape[0], 1), qkv.dtype)
    for n in range(qkv.shape[0]):
        for head in range(weight.shape[0]):
            of = n * per_row + head
            dot(by_head, of, by_head, of, squares)
            scale = number(1) / number(math.sqrt(squares[of, 0] + number(floor) * number(floor)))
            for i in range(size):
                by_head[of, i] *= weight[head, i] * scale
        for of in range(n * per_row, n * per_row + turned):
            for i in range(0, turns.shape[1], 2):
                cosine, sine = turns[positions[n], i], turns[positions[n], i + 1]
                a, b = by_head[of, i], by_head[of, i + 1]
                by_head[of, i], by_head[of, i + 1] = a * cosine - b * sine, a * sine + b * cosine
        for i in range(width):
            flat[n, i] = qkv[n, i]
        store_row(qkv, n, width, stored, rows[n])


@inlined
def write(states: Any, layer: Any, room: Any, part: int, parts: int) -> None:
    """What attention adds to the states."""
    attended, added = room[2], states[1]
    first, last = bounds(added.shape[1], part, parts)
    product(attended.reshape(attended.shape[0], -1), layer[4], first, last, added)


@inlined
def gate(states: Any, layer: Any, room: Any, part: int, parts: int) -> None:
    """activation(gate) · up of the rows. after: the norm of what attention added."""
    x, added, joined = states
    both, gelu = layer[7]
    gated = room[3]
    width = gated.shape[1]
    first, last = bounds(width, part, parts)
    entered = enter(joined, added, layer[5], layer[9], x, layer[6], part)
    halves = np.empty((x.shape[0], 2 * width), x.dtype)
    product(entered, both, first, last, halves)
    product(entered, both, width + first, width + last, halves)
    powers = np.empty((1, last - first), x.dtype)
    for row in range(x.shape[0]):  # The loops count from 0: an index like i − first may be negative to the compiler
        opened, values = halves[row, first:last], halves[row, width + first : width + last]
        activate(opened, gelu, powers)
        combine(opened, powers[0], values, gated[row, first:last])


@compiled_exactly
def activate(numbers: Any, gelu: bool, powers: Any) -> None:
    """powers [1, n] = exp(−u) for the sigmoid of u: u is the number itself, or for gelu a cubic of it."""
    number = powers.dtype.type
    for i in range(len(numbers)):
        x = numbers[i]
        u = number(GELU_SLOPE) * (x + number(GELU_CUBE) * x * x * x) if gelu else x
        powers[0, i] = number(-LARGEST_POWER) if u > number(LARGEST_POWER) else -u
        if powers[0, i] > number(LARGEST_POWER):
            powers[0, i] = number(LARGEST_POWER)
    exponentials(powers, 0)


@compiled_exactly
def combine(opened: Any, powers: Any, values: Any, out: Any) -> None:
    """out = opened · sigmoid · values; powers: as `activate` gives them."""
    one = powers.dtype.type(1)
    for i in range(len(out)):
        out[i] = opened[i] / (one + powers[i]) * values[i]


@inlined
def shrink(states: Any, layer: Any, room: Any, part: int, parts: int) -> None:
    """What the MLP adds to the states."""
    first, last = bounds(states[1].shape[1], part, parts)
    product(room[3], layer[8], first, last, states[1])


@compiled_exactly
def keep(joined: Any, layer: int, watched: Any) -> None:
    """Copy what entered a layer. watched: (the layers [n], table [N, n · hidden])."""
    layers, table = watched
    width = joined.shape[1]
    for place in range(len(layers)):
        if layers[place] == layer:
            for row in range(joined.shape[0]):
                for i in range(width):
                    table[row, place * width + i] = joined[row, i]


@inlined
def in_blocks(
    stage: int, states: Any, layer: Any, inputs: Any, is_first: bool, room: Any, part: int, parts: int
) -> None:
    """A stage, for BLOCK_ROWS rows at a time: what it needs beside them stays small."""
    for at in range(0, states[0].shape[0], BLOCK_ROWS):
        end = at + BLOCK_ROWS
        some = states[0][at:end], states[1][at:end], states[2][at:end]
        space = room[0][at:end], room[1][at:end], room[2][at:end], room[3][at:end]
        if stage == PROJECT:
            project(some, layer, inputs[at:end], is_first, space, part, parts)
        elif stage == WRITE:
            write(some, layer, space, part, parts)
        elif stage == GATE:
            gate(some, layer, space, part, parts)
        else:
            shrink(some, layer, space, part, parts)


@compiled_exactly
def add_layers(
    states: Any,
    given: Any,
    addresses: Any,
    inputs: Any,
    memory: Any,
    watched: Any,
    room: Any,
    meeting: Any,
    part: int,
    parts: int,
) -> None:
    """A run of layers. x is then the sum that entered the last one's second norm.

    given: the first layer; addresses: (of the arrays of each layer, of its pool), as `moved` has them. inputs: of the
    pass's first layer. memory: (pool, places, seen); seen: (tables, first_rows, rows), as `attend` has them. watched:
    as in `keep`. meeting: (where the parts meet, how often they have met before, the run's first layer among the
    pass's).
    """
    numbers, met, first = meeting
    pool, (turns, positions, stored), (tables, first_rows, rows) = memory
    begin, end, share, shares = 0, len(positions), part, parts
    if end >= parts * OWN_ROWS:  # each part has rows of its own, and all channels of them
        begin, end, share, shares = end * part // parts, end * (part + 1) // parts, 0, 1
    own, given_inputs = (states[0][begin:end], states[1][begin:end], states[2][begin:end]), inputs[begin:end]
    space = room[0][begin:end], room[1][begin:end], room[2][begin:end], room[3][begin:end]
    places, kept = (turns, positions[begin:end], stored[begin:end]), (watched[0], watched[1][begin:end])
    for n in range(len(addresses[0])):
        layer, blocks = moved(given, addresses[0], n), moved(pool, addresses[1], n)
        scale, cap, sinks = layer[10]
        is_first = first + n == 0
        in_blocks(PROJECT, own, layer, given_inputs, is_first, space, share, shares)
        meet(numbers, met + 1, parts)
        if share == 0:
            place(layer, blocks, places, space)
            keep(own[2], first + n, kept)
        meet(numbers, met + 2, parts)
        attend(room[1], blocks, tables, first_rows, rows, scale, cap, sinks, room[2], part, parts)
        meet(numbers, met + 3, parts)
        in_blocks(WRITE, own, layer, given_inputs, is_first, space, share, shares)
        meet(numbers, met + 4, parts)
        in_blocks(GATE, own, layer, given_inputs, is_first, space, share, shares)
        meet(numbers, met + 5, parts)
        in_blocks(SHRINK, own, layer, given_inputs, is_first, space, share, shares)
        met += STAGES
        meet(numbers, met, parts)
