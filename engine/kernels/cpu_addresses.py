"""Arrays and functions that lie elsewhere, for code that Numba compiles.

One call goes through many layers of the same shapes. To hand an array to compiled code takes about as long as to
multiply a row of 1,000 numbers, and a layer has some twenty. So the first layer is handed over as it is, and the others
as addresses.

LLVM optimises a function again in all code that calls it by name. A callee, called at its address, is compiled once.
And one caller may call functions that do different things, as long as they take the same types.
"""

import hashlib
from itertools import count
from typing import Any

from numba import typeof, types
from numba.core import cgutils

from engine.kernels.cpu_code import emitted, index, row_of


def addresses_of(given: Any) -> list[int]:
    """The addresses of all arrays in nested tuples, in order."""
    if isinstance(given, tuple):
        return [address for part in given for address in addresses_of(part)]
    return [given.ctypes.data] if hasattr(given, "ctypes") else []


Callee = tuple[int, int]  # the address of compiled code, and a number that stands for the types of its arguments


def callee_of(function: Any, *given: Any) -> Callee:
    """A compiled function's code for arguments of these types, as `call` takes it. It is compiled or read first.

    LLVM finds code by its name among all that the process has loaded, whoever compiled it. So two functions with one
    `__qualname__` would be taken for each other.
    """
    kinds = tuple(map(typeof, given))
    if kinds not in function.overloads:
        function.compile(kinds)
    made = function.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name)), _number_of(kinds)


def _number_of(kinds: tuple[Any, ...]) -> int:
    """The same in all processes, since compiled code is kept."""
    return int.from_bytes(hashlib.sha256(str(kinds).encode()).digest()[:7], "big")


def emit_call(context: Any, builder: Any, callee: Any, kinds: tuple[Any, ...], given: list[Any]) -> None:
    """Emit a call of a callee that returns nothing. It raises a TypeError if the callee takes arguments of other types:
    a literal, too, is a type of its own."""
    convention, (address, number) = context.call_conv, cgutils.unpack_tuple(builder, callee)
    with cgutils.if_unlikely(builder, builder.icmp_signed("!=", number, index(_number_of(kinds)))):
        convention.return_user_exc(builder, TypeError, (f"the callee takes arguments of other types than {kinds}",))
    function = builder.inttoptr(address, convention.get_function_type(types.none, kinds).as_pointer())
    status, _ = convention.call_function(builder, function, types.none, kinds, given)
    with cgutils.if_unlikely(builder, status.is_error):
        convention.return_status_propagate(builder, status)


@emitted
def call(_context: Any, callee: Any, given: Any) -> Any:
    """(callee, arguments): call it. It returns nothing."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit_call(context, builder, arguments[0], tuple(given), cgutils.unpack_tuple(builder, arguments[1]))
        return context.get_dummy_value()

    return types.void(callee, given), code


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
