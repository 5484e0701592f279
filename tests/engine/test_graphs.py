"""Which graphs are kept, and when a region is captured. The graphs themselves are those of a fake."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from engine import graphs as graphs_module
from engine.graphs import Captured, Graphs


class FakeCapture:
    """A capture runs nothing. A replay runs the region and keeps its result."""

    def __init__(self) -> None:
        self.pools: list[Any] = []
        self.replays = 0

    def __call__(self, region: Callable[[], Any], pool: Any) -> Captured:
        self.pools.append(pool)
        result: list[Any] = []

        def replay() -> None:
            self.replays += 1
            result[:] = region()

        return Captured(replay, result, "the pool")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    fake = FakeCapture()
    monkeypatch.setattr(graphs_module, "capture", fake)
    return fake


def test_the_first_call_runs_the_region_the_second_captures_it_and_later_ones_replay(fake: FakeCapture) -> None:
    graphs, calls = Graphs(), list[int]()

    def region() -> list[int]:
        calls.append(0)
        return [len(calls)]

    assert graphs.run("a", region) == [1]
    assert (len(fake.pools), fake.replays) == (0, 0)
    first = graphs.run("a", region)
    assert (first, len(fake.pools), fake.replays) == ([2], 1, 1)
    assert graphs.run("a", lambda: [0]) is first  # the captured region ran, and wrote to the same place
    assert (first, len(fake.pools), fake.replays) == ([3], 1, 2)


def test_work_without_a_key_is_never_captured(fake: FakeCapture) -> None:
    graphs = Graphs()
    assert [graphs.run(None, partial(int, n)) for n in range(4)] == [0, 1, 2, 3]
    assert not fake.pools


def test_graphs_share_their_memory(fake: FakeCapture) -> None:
    graphs = Graphs()
    for key in "aabb":
        graphs.run(key, list)
    assert fake.pools == [None, "the pool"]


def test_the_graph_that_was_used_longest_ago_goes(fake: FakeCapture) -> None:
    graphs = Graphs(most=2)
    for key in "aabbacc":  # b was used longest ago when c is captured
        graphs.run(key, list)
    assert len(fake.pools) == 3
    graphs.run("a", list)
    graphs.run("c", list)
    assert len(fake.pools) == 3
    graphs.run("b", list)
    graphs.run("b", list)
    assert len(fake.pools) == 4


def test_keys_that_do_not_come_again_are_forgotten(fake: FakeCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MOST_SEEN", 3)
    graphs = Graphs()
    for key in "abcda":
        graphs.run(key, list)
    assert not fake.pools
    graphs.run("a", list)
    assert len(fake.pools) == 1


def test_what_cannot_be_captured_runs_as_it_is_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(region: Callable[[], Any], pool: Any) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs_module, "capture", refuse)
    graphs = Graphs()
    with caplog.at_level(logging.WARNING):
        assert [graphs.run("a", partial(int, n)) for n in range(4)] == [0, 1, 2, 3]
    (record,) = caplog.records
    assert "cannot be captured" in record.message
    assert "not permitted" in caplog.text


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    current = "the engine's stream"

    def set_stream(stream: str) -> None:
        nonlocal current
        current = stream

    @contextmanager
    def graph(*args: object, **options: object) -> Iterator[None]:
        """As torch.cuda.graph, which leaves its stream only if the capture can be ended."""
        set_stream("the capture's stream")
        yield
        raise RuntimeError("the capture was invalidated")

    for name, value in {
        "CUDAGraph": object,
        "graph": graph,
        "current_stream": lambda: current,
        "set_stream": set_stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    streams = list[str]()
    graphs = Graphs()
    for _ in range(3):
        graphs.run("a", lambda: streams.append(current))
    assert streams == ["the engine's stream", "the capture's stream", *["the engine's stream"] * 2]


def test_an_error_of_the_work_itself_reaches_the_caller(fake: FakeCapture) -> None:
    def failing() -> list[int]:
        raise MemoryError

    graphs = Graphs()
    for _ in range(3):
        with pytest.raises(MemoryError):
            graphs.run("a", failing)
