"""Which graphs are kept, when a region is captured, and what that may cost. The graphs are those of a fake."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.device import graphs as graphs_module
from engine.device.graphs import GRAPH_BYTES, MOST_FAILURES, GraphMemory, Graphs, graph_room
from tests.engine.fake_graphs import FakeMemory

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory()
    monkeypatch.setattr(graphs_module, "GraphMemory", lambda device: fake)
    return fake


def run(graphs: Graphs, keys: str, region: Callable[[], Any] = list, owner: int = 0) -> None:
    for key in keys:
        graphs.run(owner, key, region)


def test_the_first_call_runs_the_region_the_second_captures_it_and_later_ones_replay(fake: FakeMemory) -> None:
    graphs, calls = Graphs(CPU), list[int]()

    def region() -> list[int]:
        calls.append(0)
        return [len(calls)]

    assert graphs.run(0, "a", region) == [1]
    assert not fake.tries
    first = graphs.run(0, "a", region)
    assert (first, fake.captures, fake.replays) == ([2], 1, 1)
    assert graphs.discovered == 2
    assert graphs.run(0, "a", lambda: [0]) is first  # the captured region ran, and wrote to the same place
    assert (first, fake.captures, fake.replays) == ([3], 1, 2)
    assert graphs.discovered == 2, "a replay takes its usual time"
    assert graphs.run(1, "a", lambda: [0]) == [0], "another model's work has its own graphs"
    assert graphs.stats == {
        "kept": 1,
        "captures": 1,
        "failed captures": 0,
        "replays": 2,
        "not captured: the first of its kind": 2,
    }


def test_work_without_a_layout_is_never_captured(fake: FakeMemory) -> None:
    graphs = Graphs(CPU)
    assert [graphs.run(0, None, partial(int, n)) for n in range(4)] == [0, 1, 2, 3]
    assert not fake.captures


def test_memory_that_no_graph_holds_any_more_is_not_used_again(fake: FakeMemory) -> None:
    graphs = Graphs(CPU)
    run(graphs, "aabb")
    graphs.drop(0)
    run(graphs, "cc")
    assert fake.fresh == [True, False, True]


def test_the_graph_that_was_used_longest_ago_goes(fake: FakeMemory) -> None:
    graphs = Graphs(CPU, most=2)
    run(graphs, "aabbacc")  # b was used longest ago when c is captured
    assert fake.captures == 3
    run(graphs, "ac")
    assert fake.captures == 3
    run(graphs, "bb")
    assert fake.captures == 4


def test_keys_that_do_not_come_again_are_forgotten(fake: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MOST_SEEN", 3)
    graphs = Graphs(CPU)
    run(graphs, "abcda")
    assert not fake.tries
    run(graphs, "a")
    assert fake.captures == 1


def test_graphs_of_a_runner_that_has_gone_are_dropped(fake: FakeMemory) -> None:
    graphs = Graphs(CPU)
    run(graphs, "aab", owner=1)
    run(graphs, "aa", owner=2)
    graphs.drop(1)
    assert graphs.count == 1
    run(graphs, "ab", owner=1)
    assert fake.captures == 2, "work that was known before is known no more"
    run(graphs, "a", owner=2)
    assert graphs.stats["replays"] == fake.replays == 3


# --- what they may cost ----------------------------------------------------------------------------------------------


def test_work_that_needs_more_memory_than_was_set_aside_is_not_captured(fake: FakeMemory) -> None:
    room = graph_room(1000)
    graphs = Graphs(CPU, room)
    fake.need = room - GRAPH_BYTES
    run(graphs, "aa")
    assert fake.captures == 1
    fake.need += 1
    run(graphs, "bbb")
    assert fake.captures == 1
    assert graphs.stats["not captured: the memory of graphs is too small"] == 2
    assert graphs.discovered == 2 + 1, "such work always takes as long"
    fake.need = 1000  # something else took memory meanwhile
    run(graphs, "bb")
    assert fake.captures == 1, "all graphs share the memory of the widest work"


def test_work_that_only_seemed_to_need_too_much_is_captured_later(fake: FakeMemory) -> None:
    graphs = Graphs(CPU, graph_room(1000))
    fake.need = 2 * graph_room(1000)
    run(graphs, "aa")
    fake.need = 1000
    run(graphs, "aa")
    assert fake.captures == 1


def test_as_many_graphs_as_are_kept_fit_the_room(fake: FakeMemory) -> None:
    graphs, fake.need = Graphs(CPU, graph_room(1000)), 1000
    for key in range(graphs_module.MOST_GRAPHS + 2):
        for _ in range(2):
            graphs.run(0, key, list)
    assert graphs.count == graphs_module.MOST_GRAPHS
    assert fake.captures == graphs.count + 2


def test_captures_end_when_they_have_taken_what_was_set_aside(
    fake: FakeMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver takes more than was allowed for. Graphs that are there go on."""
    graphs = Graphs(CPU, 10 * GRAPH_BYTES)
    fake.takes = 6 * GRAPH_BYTES
    run(graphs, "aabbccdd")
    assert fake.captures == 2
    assert [record.message for record in caplog.records] == [
        "no more graphs are captured: they take 12,582,912 bytes, and 10,485,760 were set aside"
    ]
    run(graphs, "ab")
    assert graphs.stats["replays"] == 4


def test_memory_of_graphs_that_go_is_free_again(fake: FakeMemory) -> None:
    graphs = Graphs(CPU, 10 * GRAPH_BYTES, most=1)
    fake.takes = 6 * GRAPH_BYTES
    fake.gives = True
    run(graphs, "aabbccdd")
    assert fake.captures == 4


# --- what fails ------------------------------------------------------------------------------------------------------


def test_captures_that_fail_are_tried_no_more(fake: FakeMemory, caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs(CPU)
    run(graphs, "zz")
    fake.error = RuntimeError("operation not permitted when stream is capturing")
    with caplog.at_level(logging.WARNING):
        for key in range(5):
            assert [graphs.run(0, key, partial(int, n)) for n in range(4)] == [0, 1, 2, 3]
    assert fake.tries == 1 + MOST_FAILURES
    told = [record.message for record in caplog.records]
    assert told == [
        *["a part of a round cannot be captured; it runs operation by operation"] * MOST_FAILURES,
        "no more graphs are captured: 2 captures failed",
    ]
    assert "not permitted" in caplog.text
    run(graphs, "z")
    assert graphs.stats["replays"] == 2, "graphs that are there go on"


def test_one_capture_that_fails_does_not_end_the_others(fake: FakeMemory) -> None:
    graphs, fake.error = Graphs(CPU), RuntimeError()
    run(graphs, "aaa")
    fake.error = None
    run(graphs, "aaabb")
    assert (fake.tries, fake.captures) == (2, 1)


def test_an_error_of_the_work_itself_reaches_the_caller(fake: FakeMemory) -> None:
    def failing() -> list[int]:
        raise MemoryError

    graphs = Graphs(CPU)
    for _ in range(3):
        with pytest.raises(MemoryError):
            graphs.run(0, "a", failing)


# --- torch's part ----------------------------------------------------------------------------------------------------


class FakeCuda:
    """What captures ask of torch.cuda, for any number of GPUs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current: object = "the engine's stream"
        self.asked: list[tuple[Any, Any]] = []  # (pool, stream) of each capture
        self.fails = False
        self._pools = 0
        for name, value in {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self.graph,
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "graph_pool_handle": self.make_pool,
            "Stream": lambda device: SimpleNamespace(device=device),
        }.items():
            patch.setattr(torch.cuda, name, value)

    def make_pool(self) -> int:
        self._pools += 1
        return self._pools

    def set_stream(self, stream: object) -> None:
        self.current = stream

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        """As torch.cuda.graph, which leaves its stream only if the capture can be ended."""
        assert capture_error_mode == "thread_local"
        self.asked.append((pool, stream))
        before, self.current = self.current, stream
        yield
        if self.fails:
            raise RuntimeError("the capture was invalidated")
        self.current = before


def test_each_engine_captures_in_a_stream_and_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    devices = [torch.device("cuda", n) for n in (0, 1)]
    memories = [GraphMemory(device) for device in devices]
    for fresh in (True, False):
        for memory in memories:
            captured = memory.capture(lambda: cuda.current, fresh=fresh)
            assert captured.result is cuda.asked[-1][1]
    pools, streams = zip(*cuda.asked, strict=True)
    assert pools == (1, 2, 1, 2)
    assert [stream.device for stream in streams] == [*devices, *devices]
    assert streams[0] is streams[2]
    memories[0].capture(list, fresh=True)
    assert cuda.asked[-1][0] == 3


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.fails = True
    memory, inside = GraphMemory(torch.device("cuda", 0)), list[object]()
    with pytest.raises(RuntimeError):
        memory.capture(lambda: inside.append(cuda.current), fresh=True)
    assert inside == [cuda.asked[0][1]]
    assert cuda.current == "the engine's stream"


def test_the_memory_of_work_is_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 bytes before, 350 at the peak; the peak before the run, 900, was forgotten."""
    state = SimpleNamespace(peak=900)

    def region() -> str:
        state.peak = 350
        return "the result"

    for name, value in {
        "reset_peak_memory_stats": lambda device: setattr(state, "peak", 100),
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: state.peak,
        "mem_get_info": lambda device: (7, 9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    memory = GraphMemory(torch.device("cuda", 0))
    assert memory.run(region) == ("the result", 250)
    assert memory.free() == 7
