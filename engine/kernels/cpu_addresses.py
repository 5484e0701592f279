"""Arrays that lie elsewhere, for code that Numba compiles: one call goes through many layers of the same shapes.

To hand an array to compiled code takes about as long as to multiply a row of 1,000 numbers. A layer has some twenty.
So the first layer is handed over as it is, and the others as addresses.
"""

from itertools import count
from typing import Any

from numba import types
from numba.core import cgutils

from engine.kernels.cpu_code import emitted, index, row_of


def addresses_of(given: Any) -> list[int]:
    """The addresses of all arrays in nested tuples, in order."""
    if isinstance(given, tuple):
        return [address for part in given for address in addresses_of(part)]
    return [given.ctypes.data] if hasattr(given, "ctypes") else []


@emitted
def moved(_context: Any, given: Any, addresses: Any, row: Any) -> Any:
    """(arrays in nested tuples, or one array; addresses [n, arrays] int64; row): the same with the memory at the
    addresses of that row. Whoever hands over the addresses keeps the memory."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value, table, number = arguments
        at, place = row_of(context, builder, addresses, table, number), count()

        def move(kind: Any, value: Any) -> Any:
            is_tuple = isinstance(kind, types.BaseTuple)
            if is_tuple:
                parts = cgutils.unpack_tuple(builder, value)
                return context.make_tuple(builder, kind, [move(of, part) for of, part in zip(kind, parts, strict=True)])
            if isinstance(kind, (types.Number, types.Boolean)):
                return value
            assert isinstance(kind, types.Array), f"a layer has arrays and numbers, not {kind}"
            array = context.make_array(kind)(context, builder, value)
            array.data = builder.inttoptr(builder.load(at(index(next(place)))), array.data.type)
            array.meminfo, array.parent = (cgutils.get_null_value(of.type) for of in (array.meminfo, array.parent))
            return array._getvalue()

        return move(given, value)

    return given(given, addresses, types.intp), code
