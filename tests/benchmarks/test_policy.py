"""Traces and their replay: a recorded run is repeated, a broken trace is refused, and a real run is replayed."""

import json
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import policy, trace
from benchmarks.lab.scenarios import cpu, drifting, mixed, profile
from benchmarks.lab.simulator import World
from engine.types import REASONS
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.observation import Timing

DEPTH = 4
BATCH = 3
MACHINE = partial(cpu, DEPTH)
TIMINGS = profile(MACHINE, DEPTH, BATCH)
Rows = dict[int, list[tuple[int, int, int]]]  # handle → (drafted, accepted, emitted) of each round


def run(world: World, config: PolicyConfig) -> tuple[Rows, list[dict[str, Any]]]:
    """(rounds of each request, their lines for a trace)."""
    control = SpecControl(config, DEPTH, TIMINGS)
    rows: Rows = {}
    lines: dict[int, dict[str, Any]] = {}
    while not world.over:
        before = set(world.running)
        done = world.step(control)
        decision = done.decision
        for handle in {*world.running} - before:
            job = world.running[handle].job
            rows[handle] = [(0, 0, 1)]
            lines[handle] = {
                "request": f"r{handle}",
                "source": job.source,
                "prompt_tokens": job.prompt,
                "max_tokens": job.allowed,
                "arrived_s": 0.0,
                "fixed_k": None,
                "max_k": None,
                "rounds": [[world.rounds, 0, 0, 0, 1, 0, -1]],
            }
        for i, handle in enumerate(done.handles):
            k, accepted, emitted = decision.ks[i], done.accepted[i], done.emitted[i]
            rows[handle].append((k, accepted, emitted))
            reason = REASONS.index(decision.reasons[i])
            alpha = round(1000 * decision.alphas[i])
            lines[handle]["rounds"].append([world.rounds, k, k, accepted, emitted, alpha, reason])
    return rows, list(lines.values())


def texts_world(seed: int = 5) -> World:
    return World(islice(drifting(BATCH, seed, tokens=60), 5), MACHINE)


HEAD = {"policy": "fixed", "verifier": "match", "depth": DEPTH, "max_running": BATCH}


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[PolicyConfig], tuple[Rows, Path]]:
    def record(config: PolicyConfig) -> tuple[Rows, Path]:
        rows, lines = run(texts_world(), config)
        step = dict.fromkeys(trace.STEP_FIELDS, 0) | {"step": 1, "step_us": 2000}
        trace.save(tmp_path / "t.jsonl", HEAD, TIMINGS, [*lines, step])
        return rows, tmp_path / "t.jsonl"

    return record


Recorder = Callable[[PolicyConfig], tuple[Rows, Path]]


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_recording_policy_repeats_what_it_did(recorded: Recorder, k: int, seed: int) -> None:
    rows, path = recorded(PolicyConfig("fixed", k=k))
    loaded = trace.load(path)
    texts, known = trace.jobs(loaded, seed)  # drawn bits lie at positions that these rounds never verify
    assert 0 < known < 1
    assert run(World(texts, MACHINE), PolicyConfig("fixed", k=k))[0] == rows
    assert run(World(texts, MACHINE), PolicyConfig("fixed", k=k - 1))[0] != rows


def test_a_known_bit_is_what_any_policy_meets(recorded: Recorder) -> None:
    truth = list(islice(drifting(BATCH, 5, tokens=60), 5))
    _, path = recorded(PolicyConfig("goodput"))
    texts, _ = trace.jobs(trace.load(path))
    known = 0
    for handle, request in enumerate(trace.load(path).requests):
        at = 0
        for row in request.rows:
            places = range(at, at + min(row.accepted + 1, row.drafted))
            mine = [texts[handle].runs[place] > 0 for place in places]
            assert mine == [truth[int(request.name[1:])].runs[place] > 0 for place in places]
            known += len(mine)
            at += row.emitted
    assert known > 100


def test_unknown_bits_are_drawn_with_the_rate_of_the_known() -> None:
    def traced(name: str, rounds: list[list[int]]) -> trace.Traced:
        rows = [trace.TraceRow(*row) for row in rounds]
        return trace.Traced(name, "model", 5, 10_000, 0.0, None, None, rows)

    first = [1, 0, 0, 0, 1, 0, -1]
    mostly_right = [first, *([[2, 4, 4, 4, 5, 0, 0]] * 400)]
    plain = [first, *([[2, 0, 0, 0, 1, 0, 0]] * 2000)]
    requests = [traced("right", mostly_right), traced("plain", plain)]
    loaded = trace.Trace({}, DEPTH, 2, [], requests, [])
    (right, drawn), known = trace.jobs(loaded)
    assert known == pytest.approx(1600 / 4000)
    assert set(right.alphas) == {1.0}
    assert right.runs[0] >= right.length
    assert set(drawn.alphas) == {1.0}  # nothing is known of this request, so the rate of all counts
    alone = trace.jobs(trace.Trace({}, DEPTH, 2, [], requests[1:], []))[0][0]
    assert sum(run > 0 for run in alone.runs) / len(alone.runs) == pytest.approx(trace.UNKNOWN_RATE, abs=0.05)


def test_rows_of_a_replay(recorded: Recorder) -> None:
    _, path = recorded(PolicyConfig("fixed", k=3))
    rows, known = policy.replay(trace.load(path), seed=0)
    assert 0 < known < 1
    by_name = {row["policy"]: row for row in rows}
    assert list(by_name) == [
        *("off", "1", "2", "4", "heuristic", "optimal", "goodput"),
        *("confidence (not replayable)", "clairvoyant, rates", "clairvoyant, bits"),
    ]
    assert by_name["off"]["over off"] == 1.0
    assert by_name["confidence (not replayable)"]["tok/s"] is None
    rates = {name: row["tok/s"] for name, row in by_name.items() if isinstance(row["tok/s"], float)}
    assert max(rates, key=lambda name: rates[name]) == "clairvoyant, bits"
    assert policy.replay(trace.load(path), seed=0) == (rows, known)
    assert policy.replay(trace.load(path), seed=1)[0] != rows


def test_a_policy_that_is_worse_is_reported_worse(tmp_path: Path) -> None:
    first, wrong = [1, 0, 0, 0, 1, 0, -1], [2, 4, 4, 0, 1, 0, 0]
    right = [2, 4, 4, 4, 5, 0, 0]
    rates = {}
    for name, row in (("wrong", wrong), ("right", right)):
        line = {"request": name, "source": "model", "prompt_tokens": 5, "max_tokens": 400}
        line |= {"arrived_s": 0, "fixed_k": None, "max_k": None, "rounds": [first, *([row] * 40)]}
        trace.save(tmp_path / name, HEAD, TIMINGS, [line])
        rates[name] = {r["policy"]: r["over off"] for r in policy.replay(trace.load(tmp_path / name), 0)[0]}
    assert rates["wrong"]["4"] < rates["wrong"]["1"] < 1  # type: ignore[operator]
    assert rates["right"]["4"] > rates["right"]["1"] > 1  # type: ignore[operator]
    assert rates["wrong"]["goodput"] > rates["wrong"]["1"]  # type: ignore[operator]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _row(place: int, column: int, value: int) -> Callable[[list[dict[str, Any]]], None]:
    def spoil(lines: list[dict[str, Any]]) -> None:
        lines[1]["rounds"][place][column] = value

    return spoil


SPOILED: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Any]]] = {
    "other version": ("line 1: not the head", lambda lines: lines[0].update(trace=2)),
    "no depth": ("line 1: 'depth' is missing", lambda lines: lines[0].pop("depth")),
    "other verifier": ("line 1: under verifier block", lambda lines: lines[0].update(verifier="block")),
    "short timing": ("line 1: a timing must have", lambda lines: lines[0]["timings"][0].pop()),
    "no depth at all": ("line 1: depth and max_running", lambda lines: lines[0].update(depth=0)),
    "no rounds": ("line 2: 'rounds' is missing", lambda lines: lines[1].pop("rounds")),
    "short row": ("line 2: ", lambda lines: lines[1]["rounds"][0].pop()),
    "more accepted than drafted": ("line 2: .* is impossible", _row(1, 3, DEPTH + 1)),
    "nothing emitted": ("line 2: .* is impossible", _row(1, 4, 0)),
    "drafts in the prompt's pass": ("line 2: its first round", _row(0, 2, 1)),
    "too many tokens": ("line 2: .* of at most 3", lambda lines: lines[1].update(max_tokens=3)),
    "no times": ("line 7: 'step_us' is missing", lambda lines: lines[-1].pop("step_us")),
    "no request": ("holds no request", lambda lines: lines.__delitem__(slice(1, None))),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_malformed_trace_is_refused(recorded: Recorder, case: str) -> None:
    _, path = recorded(PolicyConfig("fixed", k=3))
    trace.load(path)
    message, spoil = SPOILED[case]
    lines = _lines(path)
    spoil(lines)
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    with pytest.raises(ValueError, match=message):
        trace.load(path)


@pytest.mark.parametrize(("content", "message"), [("", "is empty"), ("{\n", "line 1"), ("[1]\n", "line 1")])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t").write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        trace.load(tmp_path / "t")


def test_without_prices_there_is_no_replay(recorded: Recorder) -> None:
    _, path = recorded(PolicyConfig("off"))
    lines = _lines(path)
    lines[0]["timings"] = []
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    with pytest.raises(ValueError, match="no timings"):
        policy.replay(trace.load(path), 0)


def test_the_time_of_a_policy_is_taken() -> None:
    inner = SpecControl(PolicyConfig(), DEPTH, TIMINGS)
    timed = policy.Timed(inner)
    timed.observe(Timing(1, 0, 0, 5, 0, 0, 0.0, 0.01, 0.0), [], [0])  # before any plan: not a round of decoding
    world = texts_world()
    while not world.over:
        world.step(timed)
    assert timed.median_ms > 0


def test_arguments() -> None:
    assert [policy.one_spec(text) for text in ("off", "4", "goodput")] == [0, 4, "goodput"]
    assert policy.policy("heuristic", 2).k == 2
    for argv in (["--simulate", "--target", "x"], ["--simulate", "--trace", "x"], []):
        with pytest.raises(SystemExit):
            policy.main(argv)


def test_simulations_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(policy, "BATCHES", (2,))
    monkeypatch.setattr(policy, "TIMED", (2,))
    monkeypatch.setattr(policy, "DAMAGED", (("cpu", 1),))
    monkeypatch.setattr(policy, "PHASED", (("cpu", 1, 1.5),))
    monkeypatch.setattr(policy, "PHASED_SEEDS", 1)
    monkeypatch.setattr(policy, "BRANCHED", (("gpu", 2),))
    monkeypatch.setattr(policy, "mixed", partial(mixed, tokens=8, each=1))
    policy.main(["--simulate", "--rounds=20", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["batch"] for row in report["simulated"]] == [2]
    assert report["simulated"][0]["over clairvoyant"] > 0.5
    assert [row["policy"] for row in report["ramp"]][-2:] == ["goodput", "clairvoyant"]
    assert report["damage"][0]["left alone after"] >= 0
    assert [row["slow"] for row in report["phased"]] == [1.5]
    assert 0.5 < report["phased"][0]["over steady"] < 2
    assert [(row["prices"], row["batch"]) for row in report["trees"]] == [("gpu", 2)]
    assert 0.5 < report["trees"][0]["over chains"] < 2


def test_a_real_run_is_recorded_and_replayed(
    small_pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    size = ["--prompts-count=3", "--max-tokens=24", "--concurrency=2", "--dtype=float64"]
    policy.main(["--record", str(path), *small_pair, *size, "--spec=3"])
    loaded = trace.load(path)
    assert (loaded.depth, loaded.max_running, loaded.tokens) == (policy.DEPTH, 2, 3 * 24)
    assert loaded.seconds > 0
    assert any(step["predicted_us"] > 0 and step["predicted_tokens"] > 0 for step in loaded.steps)
    world = World(trace.jobs(loaded)[0], partial(cpu, loaded.depth))
    rows: Rows = {handle: [(0, 0, 1)] for handle in range(3)}
    control = SpecControl(PolicyConfig("fixed", k=3), loaded.depth)
    while not world.over:
        done = world.step(control)
        for handle, k, accepted, emitted in zip(
            done.handles, done.decision.ks, done.accepted, done.emitted, strict=True
        ):
            rows[handle].append((k, accepted, emitted))
    assert list(rows.values()) == [[row[2:5] for row in request.rows] for request in loaded.requests]
    capsys.readouterr()
    policy.main(["--trace", str(path), "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["recorded"]["policy"] == "3"
    assert report["models"]["target"]["parameters"] > 0
    assert {row["policy"] for row in report["results"]} >= {"off", "8", "goodput", "clairvoyant, bits"}
