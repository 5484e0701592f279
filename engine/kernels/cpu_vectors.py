"""Products of rows in explicit vectors, for code that Numba compiles (cpu_attention.py, cpu_products.py).

A compiler makes vectors of such loops too, but asks before each whether the rows overlap, which takes as long as the
work on a row of 64 numbers. And it may add in another order for another number of rows. Here a result is the same bits
however many rows are computed beside it.

Numbers of 16 bits arrive as integers, since NumPy has no bfloat16: uint16 holds a bfloat16, int16 a float16. They are
multiplied and added as fp32.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

VECTOR_BYTES = 64  # of the sums; a CPU with shorter registers takes several
CACHE_LINE = 64  # bytes
WEIGHED = 4  # rows that are added in one go: a sum's own load and store cost as much as a row
emitted: Any = intrinsic
# Sums may be taken in another order, so that they are taken in vectors. Infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp", "afn"}
compiled: Any = njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
INDEX = ir.IntType(64)
Address = Callable[[Any], Any]  # an index of a row → the address of that number


def _sums(array: Any) -> Any:
    return ir.DoubleType() if array.dtype == types.float64 else ir.FloatType()


def _row(context: Any, builder: Any, array_type: Any, array: Any, number: Any) -> Address:
    """Addresses in one row of a C-contiguous array of two dimensions."""
    view = context.make_array(array_type)(context, builder, array)
    first = builder.gep(view.data, [builder.mul(number, _width(context, builder, array_type, array))])
    return lambda x: builder.gep(first, [x])


def _width(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.unpack_tuple(builder, view.shape, array_type.ndim)[-1]


def _load(builder: Any, address: Any, stored: Any, count: int) -> Any:
    """Load `count` neighbouring numbers in the type of sums; stored: their type as Numba has it."""
    size = stored.bitwidth // 8
    of = {types.uint16: ir.IntType(16), types.int16: ir.HalfType(), types.float64: ir.DoubleType()}
    number = of.get(stored, ir.FloatType())
    vector = ir.VectorType(number, count)
    value = builder.load(builder.bitcast(address, vector.as_pointer()), align=size)
    if stored == types.uint16:
        wide = ir.VectorType(ir.IntType(32), count)
        shifted = builder.shl(builder.zext(value, wide), ir.Constant(wide, [16] * count))
        return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), count))
    return builder.fpext(value, ir.VectorType(ir.FloatType(), count)) if stored == types.int16 else value


def _store(builder: Any, value: Any, address: Any, size: int) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=size)


def _spread(builder: Any, value: Any, count: int) -> Any:
    """A vector of `count` times the number."""
    vector = ir.VectorType(value.type, count)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


def _total(builder: Any, vector: Any) -> Any:
    """The sum of a vector's numbers: halves are added until one is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        kind = ir.VectorType(ir.IntType(32), count)
        low = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(count))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(count, 2 * count))))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}{'f64' if isinstance(kind.element, ir.DoubleType) else 'f32'}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def _over_row(builder: Any, width: Any, number: Any, body: Callable[[Any, int], None]) -> None:
    """Emit body(x, count) for all numbers of a row: in whole vectors, then one by one."""
    count = VECTOR_BYTES // (8 if isinstance(number, ir.DoubleType) else 4)
    step = ir.Constant(INDEX, count)
    whole = builder.mul(builder.sdiv(width, step), step)
    with cgutils.for_range_slice(builder, ir.Constant(INDEX, 0), whole, step, INDEX) as (x, _):
        body(x, count)
    with cgutils.for_range_slice(builder, whole, width, ir.Constant(INDEX, 1), INDEX) as (x, _):
        body(x, 1)


def _dots_of(lanes: int) -> Any:
    """(queries [n, width], lane, rows [m, width], number, products [n, ..], i): products[lane, i] becomes the dot
    product of rows[number] with queries[lane], and so for the lanes behind it."""

    @emitted
    def dots(_context: Any, queries: Any, lane: Any, rows: Any, number: Any, products: Any, i: Any) -> Any:
        kind, size = _sums(queries), queries.dtype.bitwidth // 8

        def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            q, first, keys, key_number, out, start = arguments
            of_lanes = [builder.add(first, ir.Constant(INDEX, n)) for n in range(lanes)]
            by_lane = [_row(context, builder, queries, q, lane) for lane in of_lanes]
            key = _row(context, builder, rows, keys, key_number)
            whole, rest = ([_zero_sum(builder, kind, count) for _ in by_lane] for count in (VECTOR_BYTES // size, 1))

            def body(x: Any, count: int) -> None:
                values = _load(builder, key(x), rows.dtype, count)
                for total, row in zip(rest if count == 1 else whole, by_lane, strict=True):
                    query = _load(builder, row(x), queries.dtype, count)
                    builder.store(_multiply_add(builder, query, values, builder.load(total)), total)

            _over_row(builder, _width(context, builder, queries, q), kind, body)
            for lane, total, more in zip(of_lanes, whole, rest, strict=True):
                added = builder.fadd(_total(builder, builder.load(total)), _total(builder, builder.load(more)))
                builder.store(added, _row(context, builder, products, out, lane)(start))
            return context.get_dummy_value()

        return types.void(queries, types.intp, rows, types.intp, products, types.intp), code

    return dots


def _zero_sum(builder: Any, kind: Any, count: int) -> Any:
    zero = ir.Constant(ir.VectorType(kind, count), None)
    place = cgutils.alloca_once(builder, zero.type)
    builder.store(zero, place)
    return place


dots_1, dots_2, dots_3, dots_4 = (_dots_of(lanes) for lanes in (1, 2, 3, 4))


def _add_of(lanes: int) -> Any:
    """(weights [n, ..], lane, i, rows [m, width], numbers [1, ..], ahead, sums [n, width]): add to sums[lane], … the
    rows numbers[0, i] + ahead … numbers[0, i + WEIGHED − 1] + ahead by weights[lane, i], …"""

    @emitted
    def add(_context: Any, weights: Any, lane: Any, i: Any, rows: Any, numbers: Any, ahead: Any, sums: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            w, first, start, values, all_numbers, more, out = arguments
            of_lanes = [builder.add(first, ir.Constant(INDEX, n)) for n in range(lanes)]
            places = [builder.add(start, ir.Constant(INDEX, n)) for n in range(WEIGHED)]
            number_at = _row(context, builder, numbers, all_numbers, ir.Constant(INDEX, 0))
            chosen = [builder.add(builder.load(number_at(place)), more) for place in places]
            read = [_row(context, builder, rows, values, number) for number in chosen]
            factors = [
                [builder.load(_row(context, builder, weights, w, n)(place)) for place in places] for n in of_lanes
            ]
            targets = [_row(context, builder, sums, out, lane) for lane in of_lanes]

            def body(x: Any, count: int) -> None:
                loaded = [_load(builder, row(x), rows.dtype, count) for row in read]
                for target, by_row in zip(targets, factors, strict=True):
                    total = _load(builder, target(x), sums.dtype, count)
                    for factor, value in zip(by_row, loaded, strict=True):
                        total = _multiply_add(builder, _spread(builder, factor, count), value, total)
                    _store(builder, total, target(x), sums.dtype.bitwidth // 8)

            _over_row(builder, _width(context, builder, sums, out), _sums(sums), body)
            return context.get_dummy_value()

        return types.void(weights, types.intp, types.intp, rows, numbers, types.intp, sums), code

    return add


add_1, add_2, add_4 = _add_of(1), _add_of(2), _add_of(4)


@emitted
def prefetch(_context: Any, rows: Any, number: Any) -> Any:
    """Ask for the cache lines of rows[number]. Nothing waits for them."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number = arguments
        row, width = _row(context, builder, rows, array, number), _width(context, builder, rows, array)
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], fnty=kind)
        read, keep, data_cache = (ir.Constant(flag, n) for n in (0, 2, 1))
        step = ir.Constant(INDEX, max(1, CACHE_LINE * 8 // rows.dtype.bitwidth))
        with cgutils.for_range_slice(builder, ir.Constant(INDEX, 0), width, step, INDEX) as (x, _):
            builder.call(function, [builder.bitcast(row(x), byte), read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(rows, types.intp), code
