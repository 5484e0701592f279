"""Where threads that compute together wait for each other, for code that Numba compiles (cpu_layers.py).

To wake a thread takes as long as a small product. So threads are woken once for a pass, and meet between its stages.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from engine.kernels.cpu_code import declared, emitted, index, row_of
from engine.kernels.cpu_compile import compiled_exactly

COUNT, ENDED = 0, 1  # places of a meeting's numbers, int64 [1, 2]: arrivals so far; not 0: nobody waits any more
TRIES = 2000  # looks, some µs, before a thread gives its CPU away: another one may need it


@emitted
def _arrive(_context: Any, numbers: Any, place: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = row_of(context, builder, numbers, arguments[0], index(0))(arguments[1])
        builder.atomic_rmw("add", address, index(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(numbers, types.intp), code


@emitted
def _look(_context: Any, numbers: Any, place: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = row_of(context, builder, numbers, arguments[0], index(0))(arguments[1])
        return builder.load_atomic(address, "seq_cst", 8)

    return types.intp(numbers, types.intp), code


@emitted
def _give_way(_context: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.call(declared(builder, "sched_yield", ir.IntType(32), []), [])
        return context.get_dummy_value()

    return types.void(), code


@compiled_exactly
def meet(numbers: Any, number: int, parts: int) -> None:
    """Wait until all parts have come to the meeting of this number: 1, 2, …"""
    if parts == 1:
        return
    _arrive(numbers, COUNT)
    tries = 0
    while _look(numbers, COUNT) < number * parts and _look(numbers, ENDED) == 0:
        tries += 1
        if tries % TRIES == 0:
            _give_way()
