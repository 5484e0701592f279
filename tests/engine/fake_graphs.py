"""Graphs without a device: a capture runs nothing, and a replay runs the region and keeps its result."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from engine.device.graphs import Captured


class _Result(list[Any]):
    """Equal only to itself, so that a set may hold it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class FakeMemory:
    """In place of engine.device.graphs.GraphMemory."""

    def __init__(self) -> None:
        self.need = 0  # bytes that a region takes
        self.takes = 0  # bytes that a capture takes
        self.gives = False  # whether a graph that goes gives them back
        self.error: Exception | None = None  # of each capture
        self.tries = self.captures = self.replays = 0
        self.fresh: list[bool] = []
        self._alive = WeakSet[_Result]()

    def capture(self, region: Callable[[], Any], *, fresh: bool) -> Captured:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.captures += 1
        self.fresh.append(fresh)
        result = _Result()
        self._alive.add(result)

        def replay() -> None:
            self.replays += 1
            result[:] = region()

        return Captured(replay, result)

    def free(self) -> int:
        return -self.takes * (len(self._alive) if self.gives else self.captures)

    def run(self, region: Callable[[], Any]) -> tuple[Any, int]:
        return region(), self.need
