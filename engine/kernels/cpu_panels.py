"""Products of a few rows with panels of weights in explicit vectors, for code that Numba compiles (cpu_products.py).

A panel holds the numbers of PANEL channels in the order in which they are multiplied. So weights are one stream of
memory, and a tile of rows is multiplied while it comes: the product of ROWS rows takes hardly longer than that of one.
Weights as they are stored are several streams, each too short for the CPU to ask for memory early enough, and their
sums have to be added up across vectors (docs/log.md). A result is the same bits in any company of rows.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from engine.kernels.cpu_code import (
    CACHE_LINE,
    HAS_PAIRS,
    INDEX,
    VECTOR_BYTES,
    Address,
    add_pairs,
    ask_for,
    behind,
    emitted,
    features,
    index,
    load,
    load_as,
    load_pairs,
    multiply_add,
    pairs_type,
    row_of,
    rows_of,
    spread,
    store,
    sum_type,
    width_of,
    zero_sum,
)
from engine.kernels.cpu_integers import AT_ONCE, BYTE, NEIGHBOURS, SUM, add_products

# Channels of a panel, and rows of a tile at most. Sums in fp32, and of integers with VNNI, stay in registers beside the
# weights of a step. A number of a row is read once for all channels of a panel, and with few of them a sum waits for
# its last addition.
PANEL, ROWS = (64, 6) if "avx512f" in features() else (16, 6)
STEPS = 256  # whose products are added up by themselves: with each addition a larger sum rounds more away
# Bytes from what is multiplied to what is asked for. From 512 to 4,096 all take the same time on a Xeon. An EPYC asks
# by itself: with 1,024 or more, two to six rows take up to 1.6 times as long there while weights come from memory.
AHEAD = 512


class Arithmetic(NamedTuple):
    """How the numbers of a panel are multiplied. A vector of weights holds `neighbours` numbers of each of `channels`
    channels. One instruction multiplies them with as many numbers of a row, and adds up those of a channel."""

    neighbours: int
    channels: int  # of a vector
    sums: Any  # type of a sum, as LLVM has it
    join: Callable[[Any, Any, Any], Any]  # (builder, sums, sums) → their sums
    # (builder, addresses in the panel, a step's first number) → the vectors of its channels
    read: Callable[[Any, Address, Any], list[Any]]
    repeat: Callable[[Any, Any], Any]  # (builder, address) → a vector of a row's neighbours, once for each channel
    add: Callable[[Any, Any, Any, Any], Any]  # (builder, the latter, the former, sums) → sums


def neighbours_of(stored: Any) -> int:
    """How many numbers of a channel lie side by side; stored: their type as Numba has it."""
    return NEIGHBOURS if stored == types.int8 else 2 if stored == types.uint16 and HAS_PAIRS else 1


def partners_of(stored: Any) -> int:
    """How many channels further the number is that shares a word with one, in panels of bfloat16 numbers that are
    widened; stored: their type as Numba has it. 0: panels of this type have their channels in order.

    Half of the numbers are then widened by a shift, and the others where they are. To spread neighbours over a vector
    takes as long as to multiply them by two rows.
    """
    return min(VECTOR_BYTES // 4, PANEL // 2) if stored == types.uint16 else 0


def is_coded(weight: Any) -> bool:
    """Whether a weight of this type is codes with steps. Otherwise it is numbers."""
    return isinstance(weight, types.BaseTuple) and len(weight) > 1


def _arithmetic(x: Any, panels: Any) -> Arithmetic:
    """x, panels: Numba's types of the arrays."""
    stored = panels.dtype
    neighbours = neighbours_of(stored) if stored in (types.int8, x.dtype) else 1
    if stored == types.int8:
        channels, row = AT_ONCE // neighbours, ir.VectorType(ir.IntType(x.dtype.bitwidth), AT_ONCE)
        return Arithmetic(
            neighbours,
            channels,
            SUM,
            ir.IRBuilder.add,
            _in_order(AT_ONCE, neighbours, lambda builder, address: load_as(builder, address, BYTE, AT_ONCE, 1)),
            lambda builder, address: _repeated(builder, address, channels, row),
            add_products,
        )
    channels = VECTOR_BYTES // 4
    if neighbours > 1:
        return Arithmetic(
            neighbours,
            channels,
            sum_type(x),
            ir.IRBuilder.fadd,
            _in_order(2 * channels, neighbours, lambda builder, address: load_pairs(builder, address, channels)),
            lambda builder, address: _repeated(builder, address, channels, pairs_type(channels)),
            add_pairs,
        )
    partners = partners_of(stored)
    channels = partners or channels
    in_order = _in_order(channels, 1, lambda builder, address: load(builder, address, stored, channels))
    return Arithmetic(
        neighbours,
        channels,
        sum_type(x),
        ir.IRBuilder.fadd,
        _words(partners) if partners else in_order,
        lambda builder, address: spread(builder, builder.load(address), channels),
        multiply_add,
    )


def _in_order(numbers: int, neighbours: int, read: Callable[[Any, Any], Any]) -> Callable[[Any, Address, Any], Any]:
    """Arithmetic.read for vectors of so many numbers, one behind the other."""
    places = range(0, PANEL * neighbours, numbers)
    return lambda builder, panel, first: [read(builder, panel(builder.add(first, index(n)))) for n in places]


def _words(partners: int) -> Callable[[Any, Address, Any], list[Any]]:
    """Arithmetic.read for bfloat16 numbers, two channels to a word, as `partners_of` has them."""
    words = ir.VectorType(ir.IntType(32), partners)
    shift, upper = (ir.Constant(words, [number] * partners) for number in (16, 0xFFFF0000))

    def read(builder: Any, panel: Address, first: Any) -> list[Any]:
        vectors = []
        for place in range(0, PANEL, 2 * partners):
            both = load_as(builder, panel(builder.add(first, index(place))), words.element, partners, 2)
            vectors += [builder.shl(both, shift), builder.and_(both, upper)]
        return [builder.bitcast(vector, ir.VectorType(ir.FloatType(), partners)) for vector in vectors]

    return read


def _repeated(builder: Any, address: Any, times: int, vector: Any) -> Any:
    """The 32 bits at the address so many times, as a vector of that type."""
    bits = builder.load(builder.bitcast(address, ir.IntType(32).as_pointer()), align=1)
    return builder.bitcast(spread(builder, bits, times), vector)


def _emit_sums(builder: Any, kinds: tuple[Any, Any], by_row: list[Address], panel: Address, width: Any) -> list[Any]:
    """For each row the vectors of its products with the panel's channels.

    kinds: Numba's types of rows and panels; panel: the addresses of its numbers.
    """
    how, size = _arithmetic(*kinds), kinds[1].dtype.bitwidth // 8
    step = PANEL * how.neighbours  # numbers of the panel that are multiplied at once
    places = range(0, step, how.channels * how.neighbours)
    totals, parts = ([[zero_sum(builder, how.sums, how.channels) for _ in places] for _ in by_row] for _ in range(2))
    pairs = list(zip(chain(*totals), chain(*parts), strict=True))
    most = index(STEPS * how.neighbours)
    with cgutils.for_range_slice(builder, index(0), width, most, INDEX) as (begin, _):
        for _, part in pairs:
            builder.store(ir.Constant(part.type.pointee, None), part)
        end = builder.add(begin, most)
        stop = builder.select(builder.icmp_signed("<", width, end), width, end)
        with cgutils.for_range_slice(builder, begin, stop, index(how.neighbours), INDEX) as (i, _):
            first = builder.mul(i, index(PANEL))
            values = how.read(builder, panel, first)
            for line in range(0, step * size, CACHE_LINE):
                ask_for(builder, panel(builder.add(first, index((AHEAD + line) // size))))
            for row, sums in zip(by_row, parts, strict=True):
                numbers = how.repeat(builder, row(i))
                for value, part in zip(values, sums, strict=True):
                    builder.store(how.add(builder, numbers, value, builder.load(part)), part)
        for total, part in pairs:
            builder.store(how.join(builder, builder.load(total), builder.load(part)), total)
    return [[builder.load(total) for total in sums] for sums in totals]


def _emit_tiles(
    context: Any, builder: Any, kinds: tuple[Any, Any, Any], given: tuple[Any, ...], end: Callable[..., Any]
) -> None:
    """Emit the products of 1 to ROWS rows with a panel.

    kinds: Numba's types of rows, panels and out; given: (rows, the first, how many, panels, the panel, the first
    channel, out); end: (row, vector of sums, their first channel) → the numbers for `out`.
    """
    (x, first, count, panels, panel, channel, out), size = given, kinds[2].dtype.bitwidth // 8
    width, stream = width_of(context, builder, kinds[0], x), row_of(context, builder, kinds[1], panels, panel)
    for rows in range(1, ROWS + 1):
        with builder.if_then(builder.icmp_signed("==", count, index(rows))):
            numbers = behind(builder, first, rows)
            by_row = rows_of(context, builder, kinds[0], x, numbers)
            made = _emit_sums(builder, kinds[:2], by_row, stream, width)
            for row, target, vectors in zip(
                numbers, rows_of(context, builder, kinds[2], out, numbers), made, strict=True
            ):
                for n, sums in enumerate(vectors):
                    place = builder.add(channel, index(n * sums.type.count))
                    store(builder, end(row, sums, place), target(place), size)


@emitted
def multiply_panel(
    _context: Any, x: Any, row: Any, rows: Any, weight: Any, panel: Any, bias: Any, channel: Any, out: Any
) -> Any:
    """(x [n, width], row, rows, weight: panels [m, width · PANEL], panel, bias [channels], channel, out [n, channels]):
    out[row, channel …] becomes the products of x[row] with the panel, plus the bias, and so for `rows` rows.

    weight may also be (panels,), as multiply_some has it. For 8-bit integers x is (codes [n, width], steps [n]), and
    weight (panels, steps [channels], what OFFSET adds to the sums, int32 [channels]); both steps multiply the sums.
    """
    in_tuple, coded = isinstance(weight, types.BaseTuple), is_coded(weight)

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        given, first, count, weights, number, added, start, written = arguments
        ends = _emit_scaling if coded else _emit_bias
        end = ends(context, builder, (x, weight, bias, out), (given, weights, added))
        numbers, kind = (cgutils.unpack_tuple(builder, given)[0], x[0]) if coded else (given, x)
        panels, stored = (cgutils.unpack_tuple(builder, weights)[0], weight[0]) if in_tuple else (weights, weight)
        _emit_tiles(context, builder, (kind, stored, out), (numbers, first, count, panels, number, start, written), end)
        return context.get_dummy_value()

    given = x, types.intp, types.intp, weight, types.intp, bias, types.intp, out
    return types.void(*given), code


def _emit_bias(context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Callable[..., Any]:
    """The `end` of _emit_tiles that adds the bias. kinds: Numba's types of x, weight, bias and out; given: the first
    three arrays."""
    bias, offsets = kinds[2], row_of(context, builder, kinds[2], given[2], index(0))
    return lambda _, sums, place: builder.fadd(sums, load(builder, offsets(place), bias.dtype, sums.type.count))


def _emit_scaling(context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Callable[..., Any]:
    """The `end` of _emit_tiles for integers."""
    (x, weight, bias, out), both = kinds, [cgutils.unpack_tuple(builder, arrays) for arrays in given[:2]]
    arrays = (x[1], both[0][1]), (weight[1], both[1][1]), (weight[2], both[1][2]), (bias, given[2])
    of_row, of_channel, offsets, biases = (row_of(context, builder, *array, index(0)) for array in arrays)

    def scaled(row: Any, sums: Any, place: Any) -> Any:
        count = sums.type.count
        exact = builder.sub(sums, load_as(builder, offsets(place), SUM, count, 4))
        numbers = builder.sitofp(exact, ir.VectorType(ir.FloatType(), count))
        numbers = builder.fmul(numbers, load(builder, of_channel(place), types.float32, count))
        step = spread(builder, builder.load(of_row(row)), count)
        numbers = multiply_add(builder, numbers, step, load(builder, biases(place), types.float32, count))
        return builder.fpext(numbers, ir.VectorType(sum_type(out), count)) if out.dtype == types.float64 else numbers

    return scaled
