"""Arrays and functions that lie elsewhere, for code that Numba compiles.

One call goes through many layers of the same shapes. To hand an array to compiled code takes about as long as to
multiply a row of 1,000 numbers, and a layer has some twenty. So the first layer is handed over as it is, and the others
as addresses.

LLVM optimises a function again in all code that calls it by name. What is called at an address is compiled once, and
who calls it may be the same code for functions that do different things, as long as they take the same types.
"""

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


def code_of(function: Any, *given: Any) -> int:
    """The address of a compiled function's code for arguments of these types, as `call` takes it. It is compiled or
    read first. The code stays there as long as the function."""
    kinds = tuple(map(typeof, given))
    function.compile(kinds)
    made = function.overloads[kinds]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


def emit_call(context: Any, builder: Any, address: Any, kinds: tuple[Any, ...], given: list[Any]) -> None:
    """Emit a call of the code at the address, which returns nothing. Nobody checks that it takes arguments of exactly
    these types."""
    assert not any(isinstance(kind, types.Literal) for kind in kinds), f"{kinds}: a literal is a type of its own"
    convention = context.call_conv
    function = builder.inttoptr(address, convention.get_function_type(types.none, kinds).as_pointer())
    status, _ = convention.call_function(builder, function, types.none, kinds, given)
    with cgutils.if_unlikely(builder, status.is_error):
        convention.return_status_propagate(builder, status)


@emitted
def call(_context: Any, address: Any, given: Any) -> Any:
    """(address, arguments): call the code at the address, which returns nothing."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit_call(context, builder, arguments[0], tuple(given), cgutils.unpack_tuple(builder, arguments[1]))
        return context.get_dummy_value()

    return types.void(types.intp, given), code


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
