"""LLVM code for rows of numbers, from which the operations of cpu_vectors.py and cpu_panels.py are made.

A compiler makes vectors of loops too, but asks before each whether the rows overlap, which takes as long as the work on
a row of 64 numbers. And it may add in another order for another number of rows. In explicit vectors a result is the
same bits however many rows are computed beside it.

Numbers of 16 bits arrive as integers, since NumPy has no bfloat16: uint16 holds a bfloat16, int16 a float16. They are
widened to fp32, or bfloat16 is multiplied in pairs where the CPU does that and the model is bfloat16; sums are fp32.
"""

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

VECTOR_BYTES = 64  # of the sums; a CPU with shorter registers takes several
CACHE_LINE = 64  # bytes
INDEX = ir.IntType(64)
Address = Callable[[Any], Any]  # an index of a row → the address of that number
emitted: Any = intrinsic


def features() -> set[str]:
    """What the CPU that is compiled for can do, in LLVM's names."""
    _, _, named = cpu_target.target_context.codegen().magic_tuple()
    return {name[1:] for name in named.split(",") if name.startswith("+")}


# Keys that 1, 2, … queries are multiplied with at once, as many as the sums have registers. A sum waits for its last
# addition, and memory is read faster in several places at once.
TILES = (4, 4, 4, 4, 4, 4) if "avx512f" in features() else (4, 2, 2)
LANES, KEYS = len(TILES), max(TILES)
HAS_PAIRS = "avx512bf16" in features()  # whether the CPU multiplies bfloat16 numbers


def index(number: int) -> Any:
    return ir.Constant(INDEX, number)


def behind(builder: Any, first: Any, count: int) -> list[Any]:
    """The numbers first, first + 1, …"""
    return [builder.add(first, index(n)) for n in range(count)]


def row_of(context: Any, builder: Any, array_type: Any, array: Any, number: Any) -> Address:
    """Addresses in one row of a C-contiguous array of two dimensions."""
    view = context.make_array(array_type)(context, builder, array)
    first = builder.gep(view.data, [builder.mul(number, width_of(context, builder, array_type, array))])
    return lambda x: builder.gep(first, [x])


def rows_of(context: Any, builder: Any, array_type: Any, array: Any, numbers: list[Any]) -> list[Address]:
    return [row_of(context, builder, array_type, array, number) for number in numbers]


def width_of(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.unpack_tuple(builder, view.shape, array_type.ndim)[-1]


def sum_type(array: Any) -> Any:
    return ir.DoubleType() if array.dtype == types.float64 else ir.FloatType()


def load(builder: Any, address: Any, stored: Any, count: int) -> Any:
    """Load `count` neighbouring numbers in the type of sums; stored: their type as Numba has it."""
    of = {types.uint16: ir.IntType(16), types.int16: ir.HalfType(), types.float64: ir.DoubleType()}
    value = load_as(builder, address, of.get(stored, ir.FloatType()), count, stored.bitwidth // 8)
    if stored == types.uint16:
        wide = ir.VectorType(ir.IntType(32), count)
        shifted = builder.shl(builder.zext(value, wide), ir.Constant(wide, [16] * count))
        return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), count))
    return builder.fpext(value, ir.VectorType(ir.FloatType(), count)) if stored == types.int16 else value


def load_as(builder: Any, address: Any, number: Any, count: int, size: int) -> Any:
    """Load `count` neighbouring numbers of LLVM's type `number`, of `size` bytes."""
    return builder.load(builder.bitcast(address, ir.VectorType(number, count).as_pointer()), align=size)


def rounded(builder: Any, value: Any, stored: Any) -> Any:
    """A vector of sums as numbers are stored, rounded to the nearest, half to even; stored: their type as Numba has
    it."""
    count = value.type.count
    if stored == types.int16:
        return builder.fptrunc(value, ir.VectorType(ir.HalfType(), count))
    if stored != types.uint16:
        return value
    wide, narrow = ir.VectorType(ir.IntType(32), count), ir.VectorType(ir.IntType(16), count)
    bits, places = builder.bitcast(value, wide), ir.Constant(wide, [16] * count)
    odd = builder.and_(builder.lshr(bits, places), ir.Constant(wide, [1] * count))
    up = builder.add(builder.add(bits, ir.Constant(wide, [0x7FFF] * count)), odd)
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(nan, ir.Constant(narrow, [0x7FC0] * count), builder.trunc(builder.lshr(up, places), narrow))


def store(builder: Any, value: Any, address: Any, size: int) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=size)


def ask_for(builder: Any, address: Any) -> None:
    """Ask for the cache line of this address, which need not exist. Nothing waits for it."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], fnty=kind)
    read, keep, data_cache = (ir.Constant(flag, n) for n in (0, 2, 1))
    builder.call(function, [builder.bitcast(address, byte), read, keep, data_cache])


def spread(builder: Any, value: Any, count: int) -> Any:
    """A vector of `count` times the number."""
    vector = ir.VectorType(value.type, count)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


def totals_of(builder: Any, vectors: list[Any], add: Callable[[Any, Any], Any] | None = None) -> Any:
    """The sums of equally long vectors as one vector; as many as a power of 2. add: of two vectors; None: their sum.

    Upper halves are added to lower halves until one number is left of each. So the others do not change a sum's bits.
    """
    if add is None:
        add = builder.add if isinstance(vectors[0].type.element, ir.IntType) else builder.fadd
    length = vectors[0].type.count  # of what is left of each
    while len(vectors) > 1 or length > 1:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        numbers = len(pairs[0]) * vectors[0].type.count
        halves = [[i for i in range(numbers) if (i % length >= length // 2) == upper] for upper in (False, True)]
        if length == 1:
            vectors = [picked(builder, a, list(range(numbers)), b) for a, b in pairs]
        else:
            vectors = [add(*(picked(builder, pair[0], half, pair[-1]) for half in halves)) for pair in pairs]
            length //= 2
    return vectors[0]


def picked(builder: Any, vector: Any, places: Iterable[int], other: Any = None) -> Any:
    """The numbers at these places of the vector and of another one behind it."""
    places = list(places)
    chosen = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)
    return builder.shuffle_vector(vector, vector if other is None else other, chosen)


def in_tiles(builder: Any, lane: Any, lanes: Any, key: Any, emit: Callable[[list[Any], list[Any]], None]) -> None:
    """Emit code for each number of lanes, 1 to LANES: those behind `lane`, and KEYS keys behind `key` in groups."""
    for count, group in enumerate(TILES, 1):
        with builder.if_then(builder.icmp_signed("==", lanes, index(count))):
            keys = behind(builder, key, KEYS)
            for first in range(0, KEYS, group):
                emit(behind(builder, lane, count), keys[first : first + group])


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of as many vectors as each has numbers, a power of 2: blocks off the diagonal change places, first of
    half the size, then of a quarter, and so on."""
    rows, size = list(rows), len(rows)
    step = size // 2
    while step:
        for i in (i for i in range(size) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i] = picked(builder, a, [c - step + size if c & step else c for c in range(size)], b)
            rows[i + step] = picked(builder, a, [c + size if c & step else c + step for c in range(size)], b)
        step //= 2
    return rows


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}{'f64' if isinstance(kind.element, ir.DoubleType) else 'f32'}"
    return builder.call(declared(builder, name, kind, [kind] * 3), [a, b, c])


class _BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def pairs_type(count: int) -> Any:
    """A vector of so many pairs of bfloat16 numbers."""
    return ir.VectorType(_BFloat16(), 2 * count)


def load_pairs(builder: Any, address: Any, count: int) -> Any:
    """Load `count` neighbouring pairs of bfloat16 numbers as they are."""
    return load_as(builder, address, _BFloat16(), 2 * count, 2)


def add_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c for bfloat16 numbers a and b: each number of c, fp32, gets the products of two neighbours. Numbers
    below the normal ones of fp32 count as 0, given or made."""
    name = f"llvm.x86.avx512bf16.dpbf16ps.{c.type.count * 32}"
    return builder.call(declared(builder, name, c.type, [c.type, a.type, b.type]), [c, a, b])


def declared(builder: Any, name: str, returned: Any, given: list[Any]) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returned, given), name)


def zero_sum(builder: Any, kind: Any, count: int) -> Any:
    """A variable that holds a vector of `count` zeros."""
    zero = ir.Constant(ir.VectorType(kind, count), None)
    place = cgutils.alloca_once(builder, zero.type)
    builder.store(zero, place)
    return place


def over_row(builder: Any, width: Any, count: int, body: Callable[[Any, int], None]) -> None:
    """Emit body(x, count) for all numbers of a row: in vectors of `count`, then one by one."""
    whole = builder.mul(builder.sdiv(width, index(count)), index(count))
    with cgutils.for_range_slice(builder, index(0), whole, index(count), INDEX) as (x, _):
        body(x, count)
    with cgutils.for_range_slice(builder, whole, width, index(1), INDEX) as (x, _):
        body(x, 1)
