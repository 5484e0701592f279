"""Captured graphs on the shadow device, in place of torch.cuda.graph.

A capture records the operations of a region with the tensors that they read and write. A replay repeats them on the
same memory. As on CUDA:
- what crosses between host and device, or waits, ends the capture with an error, and so do events. Work on the host,
  which no replay would repeat, does so too: CUDA would let it pass;
- a capture computes nothing: its results hold numbers after a replay only;
- all graphs of an engine share their memory, and there is one engine: when one runs, the results of the others are
  gone. Here they are overwritten at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.device.graphs import Captured
from tests.engine.shadow.counting import project_lines
from tests.engine.shadow.device import WITHOUT_OPERATION, Operation, active

GARBAGE = -77  # no id, place or length


class CaptureError(RuntimeError):
    """What torch.cuda.graph refuses."""


class Tape:
    """The operations of one graph."""

    def __init__(self) -> None:
        self._steps: list[tuple[Operation, Sequence[Any], dict[str, Any], list[Tensor]]] = []
        self._made: list[Tensor] = []
        self._spoiled = False

    def __len__(self) -> int:
        return len(self._steps)

    def refuse(self, what: str) -> NoReturn:
        raise CaptureError(f"{what} during a capture, at {project_lines()}")

    def add(self, func: Operation, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if func.is_view:
            return
        read = {t.untyped_storage().data_ptr() for t in _flat([*args, *kwargs.values()])}
        made = [t for t in _flat(result) if t.untyped_storage().data_ptr() not in read]
        self._made += made
        if func.name().partition("::")[2].partition(".")[0] not in WITHOUT_OPERATION:
            self._steps.append((func, args, kwargs, made))

    def spoil(self) -> None:
        """Overwrite all that the graph has computed in memory of its own."""
        if not self._spoiled:
            for tensor in self._made:
                tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else GARBAGE)
        self._spoiled = True

    def replay(self) -> None:
        self._spoiled = False
        for func, args, kwargs, made in self._steps:
            result = _flat(func(*args, **kwargs))
            for kept, new in zip(made, result if made else (), strict=True):
                kept.copy_(new)


class Emulator:
    """All graphs that were captured, in order."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0

    def capture(self, region: Callable[[], Any], *, fresh: bool) -> Captured:
        """As GraphMemory.capture."""
        device, tape = active(), Tape()
        device.recorder = tape
        try:
            result = region()
        finally:
            device.recorder = None
        with _disable_current_modes():
            tape.spoil()
        self.tapes.append(tape)
        return Captured(lambda: self._replay(tape), result)

    def _replay(self, tape: Tape) -> None:
        active().counts.operate("graph")
        self.replays += 1
        with _disable_current_modes():
            for other in self.tapes:
                if other is not tape:
                    other.spoil()
            tape.replay()


@contextmanager
def emulated_graphs() -> Iterator[Emulator]:
    """Captures are those of the emulator."""
    emulator = Emulator()
    with patch("engine.device.graphs.GraphMemory.capture", emulator.capture):
        yield emulator


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in _flat(part)] if isinstance(result, list | tuple) else []
