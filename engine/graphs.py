"""Captured graphs: the device's work of one part of a round, asked for by one call in place of one per kernel.

Captured work does the same operations on the same memory at each replay. So a part of a round can be captured if its
work depends on nothing but the layout of the numbers that the host sends (Staging.layout) and on what they are. The
layout is the graph's key. A region is a function that asks the device for such work, and does nothing else: it is not
called when its graph is replayed.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)

MOST_GRAPHS = 256  # that are kept; each holds its results, and some hundred kilobytes of the driver's
MOST_SEEN = 1024  # keys that are known without a graph

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the tensors to which each replay writes the results."""

    replay: Callable[[], None]
    result: Any
    pool: Any  # the memory that graphs share: torch.cuda.CUDAGraph.pool()


def capture(region: Callable[[], Any], pool: Any) -> Captured:
    """Capture the region's work without doing it. pool: of an earlier graph; None: there is none."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads may load a model meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = region()
    finally:
        torch.cuda.set_stream(stream)  # torch stays in the stream of a capture that cannot be ended
    return Captured(graph.replay, result, graph.pool())


class Graphs:
    """The graphs of one engine. The latest used ones are kept.

    The first call with a key runs the region: kernels are compiled then. The second call captures it.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._graphs = OrderedDict[Hashable, Captured]()
        self._eager = OrderedDict[Hashable, bool]()  # keys without a graph → whether the next call may capture one
        self._pool: Any = None

    @property
    def count(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    def run(self, key: Hashable | None, region: Callable[[], T]) -> T:
        """Do the region's work and return its result. All graphs share their memory: the result's tensors hold until
        another graph runs. key: equal for equal work; None: never captured."""
        graph = None if key is None else self._find(key, region)
        if graph is None:
            return region()
        graph.replay()
        result: T = graph.result
        return result

    def _find(self, key: Hashable, region: Callable[[], Any]) -> Captured | None:
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if key not in self._eager:
            self._eager[key] = True
            if len(self._eager) > MOST_SEEN:
                self._eager.popitem(last=False)
            return None
        return self._capture(key, region) if self._eager[key] else None

    def _capture(self, key: Hashable, region: Callable[[], Any]) -> Captured | None:
        try:
            graph = capture(region, self._pool)
        except Exception:
            log.warning("a part of a round cannot be captured; it runs operation by operation", exc_info=True)
            self._eager[key] = False
            return None
        del self._eager[key]
        self._graphs[key], self._pool = graph, graph.pool
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        return graph
