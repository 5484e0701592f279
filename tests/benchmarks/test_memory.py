"""The memory benchmark: every part on a tiny pair, and what each refuses to measure. No test looks at a time's size."""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bookkeeping, interference, memory
from benchmarks.bookkeeping import TimeLedger
from benchmarks.interference import InterferenceRun
from benchmarks.stepping import DrivenRequest, Driver, Text, greedy, make_engine
from engine.types import RequestRecord
from tests.engine.pairs import Shape, save_pair

Rows = list[dict[str, Any]]
Run = Callable[..., Rows]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """In fp64 a position takes 512 bytes of a layer, so a block of 8 fills a page."""
    pair = save_pair(tmp_path_factory.mktemp("pair"), Shape(max_positions=256))
    return ["--target", pair.target, "--draft", pair.draft, "--dtype=float64", "--threads=1"]


@pytest.fixture
def run(pair: list[str], capsys: pytest.CaptureFixture[str]) -> Run:
    def run(part: str, *more: str) -> Rows:
        common = ["--prompts-count=4", "--repeats=1", "--spec=off,2", "--max-model-len=128", "--block-size=8", "--json"]
        memory.main([*pair, *common, "--part", part, *more])
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["benchmark"] == "memory"
        assert {"machine", "models", "workload"} <= report.keys()
        assert list(report["results"]) == [part]
        rows: Rows = report["results"][part]
        return rows

    return run


@pytest.fixture
def args(pair: list[str]) -> argparse.Namespace:
    return argparse.Namespace(
        target=pair[1],
        draft=pair[3],
        dtype="float64",
        device="cpu",
        threads=1,
        spec=[0, 2],
        max_model_len=128,
        block_size=8,
        prompt_tokens=12,
        max_tokens=12,
        repeats=1,
        shared=40,
        tail=8,
        streams=2,
        window=4,
        long_prompt=40,
        slots=2,
        most_running=8,
        lengths=(16, 32),
        requests=4,
        passes=1,
        prefill_chunk=[64],
    )


def text(count: int = 1000) -> Text:
    return Text([[2 + (7 * i * i + 3 * i) % 300 for i in range(count)]])


def test_prefix(run: Run) -> None:
    rows = run("prefix", "--shared=48", "--tail=8", "--repeats=2")
    assert [(r["k"], r["request"]) for r in rows] == [
        (k, name) for k in ("off", "2") for name in ("miss", "hit", "other salt")
    ]
    assert [r["cached tokens"] for r in rows] == [0, 48, 0] * 2
    assert all(r["first token ms"] > 0 and r["speedup"] > 0 for r in rows)
    assert [r["speedup"] for r in rows if r["request"] == "miss"] == [1.0, 1.0]
    assert [r["same text"] for r in rows] == [None, True, True] * 2
    assert all((r["first draft ms"] is None) == (r["k"] == "off") for r in rows)
    assert all(r["first draft ms"] > r["first token ms"] for r in rows if r["k"] == "2")


def test_prefix_refuses_a_hit_that_was_none(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "make_engine", partial(make_engine, prefix_cache=False))
    with pytest.raises(RuntimeError, match="hit: 0 tokens of 48"):
        memory.measure_prefix(args, text())


def test_prefix_refuses_a_miss_that_was_none(args: argparse.Namespace) -> None:
    driver = Driver(make_engine(args, "paged", 2, block_size=8))
    prompt = text().take(48)
    assert memory.start_alone(driver, prompt, 0, "same").cached == 0
    assert memory.start_alone(driver, prompt, 0, "same").cached == 40  # never all of a prompt
    assert memory.start_alone(driver, prompt, 0, "other").cached == 0


def test_decode(run: Run) -> None:
    rows = run("decode", "--concurrency=1,2", "--groups=1", "--max-tokens=6", "--prompt-tokens=12")
    caches = ["slotted", "slotted again", "paged", "paged, gathered"]
    assert [(r["batch"], r["k"], r["cache"]) for r in rows] == [
        (b, k, c) for b in (1, 2) for k in ("off", "2") for c in caches
    ]
    assert all(r[name] > 0 for r in rows for name in ("tok/s", "decode tok/s", "target ms", "decode ratio"))
    assert {r["decode ratio"] for r in rows if r["cache"] == "slotted"} == {1.0}
    assert [r["block"] for r in rows] == [None, None, 8, 12] * 4


def test_decode_refuses_different_text() -> None:
    memory._require_same_text("paged", [[1, 2, 3]], [[1, 2, 3]])
    with pytest.raises(RuntimeError, match=r"paged: sequence 1 differs .* from token 2 on"):
        memory._require_same_text("paged", [[1], [1, 2, 4]], [[1], [1, 2, 3]])


def test_every_engine_goes_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    drivers: dict[str, Any] = {"a": "a", "b": "b", "c": "c"}

    def timed_run(driver: str, *_: object) -> argparse.Namespace:
        order.append(driver)
        return argparse.Namespace(outputs=[])

    monkeypatch.setattr(memory, "timed_run", timed_run)
    monkeypatch.setattr(memory, "merge", list)
    merged = memory._in_turn(drivers, [[]] * 3, 1, 0, 0)
    assert [len(runs) for runs in merged.values()] == [3, 3, 3]  # type: ignore[arg-type]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_concurrency(run: Run) -> None:
    rows = run(
        "concurrency", "--slots=2", "--most-running=8", "--requests=16", "--lengths=16-48", "--passes=1", "--spec=off,1"
    )
    assert [(r["k"], r["cache"]) for r in rows] == [(k, c) for k in ("off", "1") for c in ("slotted", "paged")]
    assert {r["positions"] for r in rows} == {2 * 128}
    slotted, paged = rows[::2], rows[1::2]
    assert [(r["mean running"], r["peak"], r["preempted"]) for r in slotted] == [(2.0, 2, 0)] * 2
    # 256 positions hold more than twice two sequences of at most 48, and no more than eight may run.
    assert all(4 < r["mean running"] <= r["peak"] <= 8 for r in paged)
    assert all(r["running ratio"] == r["mean running"] / 2 for r in paged)
    assert all(r["tok/s"] > 0 and r["throughput ratio"] > 0 for r in rows)


def test_concurrency_refuses_a_queue_that_nobody_waits_in(args: argparse.Namespace) -> None:
    with pytest.raises(RuntimeError, match="all 4 requests ran at once"):
        memory.measure_concurrency(args, text())


def test_interference(run: Run) -> None:
    rows = run("interference", "--streams=2", "--window=4", "--prompt-tokens=12", "--long-prompt=60", "--repeats=2")
    assert [(r["chunk"], r["k"]) for r in rows] == [(memory.CHUNK, "off"), (memory.CHUNK, "2")]
    timed = {"without ms", "with ms", "without p99", "with p99", "with max", "first token ms", "alone ms"}
    ratios = {"median ratio", "p99 ratio", "control", "first token ratio"}
    assert all(row.keys() == timed | ratios | {"chunk", "k"} for row in rows)
    assert all(row[name] > 0 for row in rows for name in timed | ratios)


def test_interference_by_chunk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller chunk means more steps with the prompt in them."""
    passages: dict[int, int] = {}
    summarise = interference.summarise

    def counted(chunk: int, k: int, own: list[InterferenceRun]) -> dict[str, object]:
        passages[chunk] = len(own[0].during)
        return summarise(chunk, k, own)

    monkeypatch.setattr(interference, "summarise", counted)
    rows = run(
        "interference",
        "--streams=2",
        "--window=2",
        "--prompt-tokens=12",
        "--long-prompt=48",
        "--spec=off",
        "--prefill-chunk=12,48",
    )
    assert [r["chunk"] for r in rows] == [12, 48]
    assert passages == {12: 2 * 4, 48: 2 * 1}


def test_gaps_are_of_one_stream_and_of_the_time_asked_for() -> None:
    streams = [DrivenRequest("a", 0.0, [1.0, 2.0, 5.0, 6.0]), DrivenRequest("b", 0.0, [2.0, 4.5])]
    assert interference.gaps(streams, 1.0, 5.0) == [1.0, 3.0, 2.5]
    assert interference.gaps(streams, 5.0, 9.0) == [1.0]


def test_a_stream_that_stalls_is_waited_for() -> None:
    """It has its token a step after the newcomer: without that step its long gap would not be seen."""
    streams = [DrivenRequest("a", 0.0, [1.0]), DrivenRequest("b", 0.0, [1.0])]
    newcomer = DrivenRequest("new", 1.0)
    script = [[streams[0]], [streams[0], newcomer], [streams[0]], streams, streams]
    now = iter(range(2, 9))

    class Scripted:
        def step(self) -> Any:
            at = float(next(now))
            for request in script[int(at) - 2]:
                request.times.append(at)
            newcomer.ended = RequestRecord("new", 0, 1, 0, 0.0) if newcomer.times else None
            return argparse.Namespace(stats=argparse.Namespace(drafted=0))

    interference.join(Scripted(), streams, newcomer, 0)  # type: ignore[arg-type]
    assert interference.gaps(streams, 1.0, 9.0) == [1.0, 1.0, 1.0, 1.0, 4.0]


@pytest.mark.parametrize(("length", "window"), [(14, 4), (64, 60), (128, 112)])
def test_interference_refuses_streams_that_end_too_early(args: argparse.Namespace, length: int, window: int) -> None:
    """Before the streams have settled, in the window, and while the prompt is read."""
    args.max_model_len, args.window, args.long_prompt, args.spec = length, window, length - 28, [0]
    with pytest.raises(RuntimeError, match="a stream ended before the prompt was read"):
        interference.measure_interference(args, text())


def test_interference_ratios_are_within_a_repeat() -> None:
    calm = InterferenceRun(([1.0, 1.0], [1.0, 2.0]), [2.0, 2.0, 4.0], first=3.0, alone=2.0)
    slow = InterferenceRun(([10.0, 10.0], [10.0, 10.0]), [30.0], first=60.0, alone=20.0)
    row = interference.summarise(64, 0, [calm, slow, calm])
    assert (row["chunk"], row["k"], row["median ratio"], row["first token ratio"]) == (64, "off", 2.0, 1.5)
    assert (row["with max"], row["alone ms"]) == (30e3, 2e3)


def test_bookkeeping(run: Run) -> None:
    rows = run("bookkeeping", "--sequences=4", "--prompt-tokens=12", "--steps=6", "--passes=2")
    assert [(r["cache"], r["k"]) for r in rows] == [(c, k) for c in ("slotted", "paged") for k in ("off", "2")]
    assert [r["block"] for r in rows] == [None, None, 8, 8]
    for row in rows:
        assert 0 < row["bookkeeping ms"] <= row["p99"]
        assert 0 < row["of a step"] < 1
        assert row["steps"] == 12
        # A plan, and at least the new length of each of four sequences.
        assert row["calls"] >= 1 + 4
        assert row["plan ms"] > 0
        assert row["extend ms"] > 0
        assert row["timer ms"] > 0
        assert row["policy ms"] > 0


def test_bookkeeping_refuses_sequences_that_end_too_early(args: argparse.Namespace) -> None:
    args.sequences, args.steps = 4, 200
    driver = Driver(make_engine(args, "slotted", 4))
    with pytest.raises(RuntimeError, match=r"a sequence ended after 11\d of 200 steps"):
        bookkeeping.watch(driver, args, text(), 0)


def test_bookkeeping_refuses_fewer_sequences(args: argparse.Namespace) -> None:
    args.sequences, args.steps = 4, 1
    driver = Driver(make_engine(args, "slotted", 2))
    with pytest.raises(RuntimeError, match="a sequence ended after 0 of 1 steps"):
        bookkeeping.watch(driver, args, text(), 0)


def test_a_call_within_a_timed_call_counts_once() -> None:
    ledger = TimeLedger()
    inner = ledger.wrap("inner", lambda: 1)
    outer = ledger.wrap("outer", lambda: inner() + inner())
    assert outer() == 2
    spent, calls = ledger.take()
    assert (set(spent), calls) == ({"outer"}, 1)
    assert inner() == 1
    assert set(ledger.take()[0]) == {"inner"}
    assert ledger.take() == ({}, 0)


def test_what_is_left_out_is_no_part_of_who_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks at every reading. The outer call reads it twice, and so does what it leaves out; the timed
    call within that does not."""
    ticks = itertools.count()
    monkeypatch.setattr(bookkeeping, "perf_counter_ns", lambda: 10 * next(ticks))
    ledger = TimeLedger()
    inner = ledger.wrap("inner", lambda: None)
    chosen = ledger.exclude(inner)
    ledger.wrap("outer", chosen)()
    assert ledger.take() == ({"outer": 20}, 1)  # 30 from first to last reading, 10 of them left out
    ledger.wrap("outer", inner)()
    assert ledger.take() == ({"outer": 10}, 1)
    inner()
    assert ledger.take() == ({"inner": 10}, 1)


def test_choosing_k_is_left_out_of_the_plan(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_engine(args, "paged", 2, block_size=8))
    choose = driver.engine.scheduler._choose_k

    def slow(*args: Any) -> Any:
        clock[0] += 1
        return choose(*args)

    clock = [0]  # stands still but for `slow`
    monkeypatch.setattr(bookkeeping, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(driver.engine.scheduler, "_choose_k", slow)
    with bookkeeping.timed_methods(driver.engine) as ledger:
        driver.submit(text().take(12), greedy(8), 0)
        driver.run()
        assert ledger.take()[0]["plan"] == 0
    assert clock[0] > 1
    assert driver.engine.scheduler._choose_k is slow


def test_a_timed_call_that_raises_is_timed_and_over() -> None:
    ledger = TimeLedger()
    with pytest.raises(ZeroDivisionError):
        ledger.wrap("fails", lambda: 1 / 0)()
    ledger.wrap("works", lambda: None)()
    assert set(ledger.take()[0]) == {"fails", "works"}


def test_methods_are_timed_of_both_models_and_put_back(args: argparse.Namespace) -> None:
    driver = Driver(make_engine(args, "paged", 2, block_size=8))
    runners = bookkeeping.runners(driver.engine)
    assert len(runners) == 2
    before = [type(runner.cache).truncate_to for runner in runners]
    with bookkeeping.timed_methods(driver.engine) as ledger:
        driver.submit(text().take(12), greedy(2), 0)
        driver.run()
        both = ledger.take()[1]
        for runner in runners:
            runner.cache.release(0)
        assert ledger.take()[1] == 2
    assert both > 0
    assert [type(runner.cache).truncate_to for runner in runners] == before


def test_a_method_that_is_gone_is_missed(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(args, "slotted", 2)
    monkeypatch.setitem(bookkeeping.METHODS, "cache", ("no_such_method",))
    with pytest.raises(AttributeError, match="no_such_method"), bookkeeping.timed_methods(engine):
        pass


def test_text_of_any_length() -> None:
    endless = Text([[1, 2], [3]])
    assert [endless.take(2), endless.take(5)] == [[1, 2], [3, 1, 2, 3, 1]]


def test_requests_share_only_what_their_salt_allows(args: argparse.Namespace) -> None:
    driver = Driver(make_engine(args, "paged", 2, block_size=8))
    prompt = text().take(30)
    for _ in range(2):
        (request,) = driver.generate([prompt], greedy(2), 0)
        assert (len(request.token_ids), request.record.cached_tokens) == (2, 0)


def test_a_request_that_fails_is_no_measurement(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_engine(args, "slotted", 2))
    request = driver.submit(text().take(12), greedy(2), 0)
    with pytest.raises(RuntimeError, match="has not finished"):
        _ = request.record
    step = driver.engine.step

    def failing() -> Any:
        result = step()
        broken = [o._replace(finish_reason="error", error="broken") for o in result.outputs]
        return replace(result, outputs=broken)

    monkeypatch.setattr(driver.engine, "step", failing)
    with pytest.raises(RuntimeError, match="request-0: broken"):
        driver.run()


@pytest.mark.parametrize("argument", ["--part=prefix,speed", "--lengths=64-32", "--lengths=1-32", "--spec=-1"])
def test_arguments_that_mean_nothing_are_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.main([argument])
    assert argument.split("=")[0] in capsys.readouterr().err


def test_the_embedded_pair_is_the_default() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--target")
    p.add_argument("--draft")
    named = p.parse_args([*memory.DEMO, "--target", "mine"])
    assert named.target == "mine"
    assert Path(named.draft, "config.json").is_file()
