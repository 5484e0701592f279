"""Captured graphs: the device's work of one part of a round, asked for by one call in place of one per kernel.

Captured work does the same operations on the same memory at each replay. So a part of a round can be captured if its
work depends on nothing but the layout of the numbers that the host sends (Staging.layout) and on what they are. The
layout is the graph's key. A region is a function that asks the device for such work, and does nothing else: it is not
called when its graph is replayed.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

log = logging.getLogger(__name__)

MOST_GRAPHS = 256  # that are kept
MOST_SEEN = 1024  # keys that are known without a graph
MOST_FAILURES = 2  # captures that may fail before no more are tried
GRAPH_BYTES = 1 << 20  # what the driver takes for each graph: 96 of a 7B model and its draft took less on an H100

T = TypeVar("T")


def graph_room(round_bytes: int) -> int:
    """Bytes that all graphs of an engine may take. round_bytes: what its largest round takes. A captured round has no
    more sequences or drafts than that, and all graphs share the memory of their work."""
    return round_bytes + MOST_GRAPHS * GRAPH_BYTES


_capturing = threading.Lock()  # torch allows one capture at a time in a process


GraphKey = tuple[int, Hashable]  # the number of the runner whose model does the work, the layout of the work's numbers


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, and the tensors to which each replay writes the results."""

    replay: Callable[[], None]
    result: Any


class GraphMemory:
    """The stream in which one engine captures, and the memory that its graphs share. Engines on several GPUs have one
    each: a stream belongs to one GPU, and memory that several threads hand out does too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, region: Callable[[], Any], *, fresh: bool) -> Captured:
        """Capture the region's work without doing it. fresh: no graph is left that holds the memory. torch lets nobody
        use such memory again."""
        stream = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if fresh or self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may load a model meanwhile.
            with (
                _capturing,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = region()
        finally:
            torch.cuda.set_stream(stream)  # torch stays in the stream of a capture that cannot be ended
        return Captured(graph.replay, result)

    def free(self) -> int:
        """Bytes of the device that nobody has taken."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def run(self, region: Callable[[], T]) -> tuple[T, int]:
        """(the region's result, the most bytes that its work took at once). The host does not wait for the work."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        result = region()
        return result, torch.cuda.max_memory_allocated(self._device) - before


class Graphs:
    """The graphs of one engine. The latest used ones are kept.

    The first call with a key runs the region: kernels are compiled then, and it shows how much memory the work takes.
    The second call captures it, if the memory that was set aside for graphs holds it.
    """

    def __init__(self, device: torch.device, room: int | None = None, most: int = MOST_GRAPHS) -> None:
        """room: bytes that all graphs may take; None: there is no limit."""
        self._memory = GraphMemory(device)
        self._room = room
        self._most = most
        self._graphs = OrderedDict[GraphKey, Captured]()
        self._needs = OrderedDict[GraphKey, int | None]()  # keys without a graph → bytes of their work; None: it failed
        self._widest = 0  # bytes of the widest work that was captured: the graphs share them
        self._taken = 0  # bytes that the device has lost to captures
        self._failures = 0
        self._stopped = False  # whether no more captures are tried
        self.replays = 0
        self.captures = 0
        self.discovered = 0  # first runs and captures, which take far longer than a replay
        self.eager = Counter[str]()  # why parts of rounds ran operation by operation → how many

    @property
    def count(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    @property
    def stats(self) -> dict[str, int]:
        """What was captured so far, and how many parts of rounds were not, by reason."""
        done = {"kept": self.count, "captures": self.captures, "failed captures": self._failures}
        return done | {"replays": self.replays} | {f"not captured: {why}": n for why, n in self.eager.most_common()}

    def run(self, owner: int, layout: Hashable | None, region: Callable[[], T]) -> T:
        """Do the region's work and return its result. All graphs share their memory: the result's tensors hold until
        another graph runs. owner: owns the work, see Key. layout: equal for equal work of one owner; None: the work is
        not captured, and the reason has been counted."""
        if layout is None:
            return region()
        key = owner, layout
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return cast(T, self._replay(self._graphs[key]))
        need = self._needs.get(key, 0)
        if self._stopped or need is None:
            return self._run_eagerly("captures failed or have stopped", region)
        if key not in self._needs or not self._fits(need):
            return self._measure(key, region)
        graph = self._capture(key, region)
        if graph is None:
            return self._run_eagerly("captures failed or have stopped", region)
        return cast(T, self._replay(graph))

    def drop(self, owner: int) -> None:
        """Forget all graphs of a runner that is out of use."""
        for key in [key for key in self._graphs if key[0] == owner]:
            self._forget(key)
        for key in [key for key in self._needs if key[0] == owner]:
            del self._needs[key]

    def _replay(self, graph: Captured) -> Any:
        self.replays += 1
        graph.replay()
        return graph.result

    def _run_eagerly(self, why: str, region: Callable[[], T]) -> T:
        self.eager[why] += 1
        return region()

    def _fits(self, need: int) -> bool:
        graphs = min(1 + self.count, self._most)
        return self._room is None or max(self._widest, need) + graphs * GRAPH_BYTES <= self._room

    def _measure(self, key: GraphKey, region: Callable[[], T]) -> T:
        """Run the region as it is. If anybody else takes memory meanwhile, the work looks too wide. So work that seems
        not to fit is measured again."""
        self.discovered += key not in self._needs
        result, need = self._memory.run(region)
        self.eager["the memory of graphs is too small" if key in self._needs else "the first of its kind"] += 1
        self._needs[key] = need
        if len(self._needs) > MOST_SEEN:
            self._needs.popitem(last=False)
        return result

    def _capture(self, key: GraphKey, region: Callable[[], Any]) -> Captured | None:
        self.discovered += 1
        need, free = self._needs[key], self._memory.free()
        try:
            graph = self._memory.capture(region, fresh=not self._graphs)
        except Exception:
            self._fail(key)
            return None
        del self._needs[key]
        self.captures += 1
        self._graphs[key], self._widest = graph, max(self._widest, need or 0)
        self._taken += free - self._memory.free()
        if len(self._graphs) > self._most:
            self._forget(next(iter(self._graphs)))
        if self._room is not None and self._taken > self._room:
            self._stop(f"they take {self._taken:,} bytes, and {self._room:,} were set aside")
        return graph

    def _fail(self, key: GraphKey) -> None:
        self._failures += 1
        self._needs[key] = None
        log.warning("a part of a round cannot be captured; it runs operation by operation", exc_info=True)
        if self._failures >= MOST_FAILURES:
            self._stop(f"{self._failures} captures failed")

    def _stop(self, why: str) -> None:
        self._stopped = True
        log.warning("no more graphs are captured: %s", why)

    def _forget(self, key: GraphKey) -> None:
        free = self._memory.free()
        del self._graphs[key]
        self._taken -= max(0, self._memory.free() - free)
