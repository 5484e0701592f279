"""The dry run of benchmarks.gpu, and what becomes of it when a step fails."""

import gc
import json
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from benchmarks.gpu import parity, rounds, speed, texts
from benchmarks.gpu.checkpoints import FAMILIES
from benchmarks.gpu.generated import ModelShape, Texts, write_sparse
from benchmarks.gpu.kernels import busy_us
from benchmarks.gpu.steps import Recorder, Result, Row, Skipped, Step, markdown, run_steps
from benchmarks.gpu.watch import watching
from engine.config import ConfigError, EngineConfig
from engine.device import graphs
from engine.device.graphs import Graphs
from engine.engine import Engine
from engine.llm import LLM
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.products import Weights
from engine.types import SamplingParams
from tests.engine.fake_graphs import FakeMemory
from tests.examples import in_proofs

# Packages that no step may import, here as missing as on a machine with a GPU, and those of the tree that may ask for
# them at once. tests/test_imports.py shows that the engine does not.
SERVER = ("ray", "pydantic", "starlette", "fastapi", "uvicorn", "opentelemetry")
IMPORTED_ANEW = ("app", "benchmarks", "deployments")
# An engine's start measures one round once, and texts are shorter than those of a dry run by hand.
WHOLE = """
import sys
from engine import engine
from engine.profiling import round_profile
engine.PROFILE_S = 0.0
round_profile.SWEEPS = round_profile.RUNS = 1
from benchmarks.gpu import parity
parity.PROMPT_TOKENS, parity.NEW_TOKENS = 20, 8
{shorter}
from benchmarks.gpu import rounds, speed
rounds.DRY_ROUNDS = 9
speed.REPEATS = 1
from benchmarks.gpu.__main__ import main
sys.exit(main(["--device", "cpu", "--dry-run"]))
"""
# One family and fewer texts.
SHORTER = """
from dataclasses import replace
from benchmarks.gpu import speed, texts
parity.DRY_FAMILIES = ("llama",)
parity.NEW_TOKENS = 6
texts.DRY_TEXTS = 2
speed.DRY_PAIR = replace(speed.DRY_PAIR, target=replace(speed.DRY_PAIR.target, layers=1))
"""
# The engine with all that serves on a CPU.
COMPILED = """
from importlib.util import find_spec
from engine.models import compiled, product_choice, products
compiled.find_spec, products.choose_forms = find_spec, product_choice.choose_forms
compiled.log.disabled = False
compiled.compiled_module.cache_clear()
"""
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
forking = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module", params=[SHORTER, *in_proofs(COMPILED)], ids=["shorter", "whole"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    told = tmp_path_factory.mktemp("dry") / "told"
    told.touch()
    child = get_context("fork").Process(target=dry_run, args=(WHOLE.format(shorter=request.param), told))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        child.start()
    child.join(600)
    if child.is_alive():  # or this process would wait for it at its own end
        child.kill()
        child.join()
    assert child.exitcode == 0, told.read_text("utf-8")
    found: dict[str, Any] = json.loads(told.read_text("utf-8").splitlines()[-1])
    return found


def dry_run(program: str, told: Path) -> None:
    """Run a program in this process, a fork of the tests': to import torch and transformers again takes ten seconds."""
    for name in [name for name in sys.modules if name.partition(".")[0] in IMPORTED_ANEW]:
        del sys.modules[name]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(SERVER))
    with told.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        exec(program, {})


def rows_of(report: dict[str, Any], step: str) -> dict[str, Any]:
    return next({row["what"]: row["value"] for row in s["rows"]} for s in report["steps"] if s["name"] == step)


def test_every_step_of_the_dry_run_ends_well_without_the_server_s_packages(report: dict[str, Any]) -> None:
    states = {step["name"]: step["status"] for step in report["steps"]}
    assert len(states) >= 6
    assert states.pop("captured graphs") in ("ok", "skipped")
    assert set(states.values()) == {"ok"}, report
    assert all(step["rows"] for step in report["steps"] if step["status"] == "ok")


def test_the_figures_of_a_pair_are_all_there(report: dict[str, Any]) -> None:
    rows = rows_of(report, "speed, tiny pair")
    for what in (
        "decode step over its byte floor, batch 1",
        "target's forward, 1 + 5 rows over one, batch 1",
        "goodput over plain at acceptance 0.8, batch 1",
        "goodput over plain at acceptance 0.8, batch 2",
    ):
        assert rows[what] > 0
    assert rows["accepted share of reached drafts, batch 1"] == pytest.approx(speed.ACCEPTANCE, abs=0.2)


# What a step can do to a run


def works(recorder: Recorder) -> None:
    recorder.at_most("figure", 1.0, 2.0)


def fails(recorder: Recorder) -> None:
    recorder.note("before the fault", 3.0)
    raise RuntimeError("no kernel")


def dies(recorder: Recorder) -> None:
    recorder.note("before the end", 4.0)
    os._exit(7)


def hangs(recorder: Recorder) -> None:
    recorder.note("before it hangs", 5.0)
    time.sleep(600)


def misses(recorder: Recorder) -> None:
    recorder.at_least("share", 0.5, 1.0)


def skips(recorder: Recorder) -> None:
    raise Skipped("there is no such device")


def silent(text: str) -> None:
    pass


def run(*steps: Callable[[Recorder], None], must_meet: bool = False, limit_s: float = 20.0) -> list[Result]:
    made = [Step(step.__name__, step, limit_s, must_meet) for step in steps]
    return run_steps(made, "cpu", dry=True, budget_s=60, say=silent)


@forking
@pytest.mark.parametrize(
    ("step", "reason", "told"),
    [
        (fails, "RuntimeError: no kernel", [Row("before the fault", 3.0)]),
        (dies, "its process ended with exit code 7", [Row("before the end", 4.0)]),
        (hangs, "it took too long, so it was ended", [Row("before it hangs", 5.0)]),
    ],
)
def test_a_step_that_fails_is_recorded_and_the_others_run(
    step: Callable[[Recorder], None], reason: str, told: list[Row]
) -> None:
    first, broken, last = run(works, step, works, limit_s=2.0 if step is hangs else 20.0)
    assert first.status == last.status == "ok"
    assert first.rows == last.rows == [Row("figure", 1.0, "≤ 2", True)]
    assert (broken.status, broken.reason, broken.rows) == ("failed", reason, told)
    assert f"| **{step.__name__}** | failed: {reason} |" in markdown([first, broken, last])


@forking
def test_an_aim_that_is_missed_fails_a_step_only_where_it_must_be_met() -> None:
    assert [result.status for result in run(misses, works)] == ["ok", "ok"]
    assert [result.status for result in run(misses, works, must_meet=True)] == ["failed", "ok"]


def test_steps_for_cuda_are_processes_that_share_nothing_with_this_one() -> None:
    step = Step("works", partial(Recorder.note, what="figure", value=1.0), 60)
    (result,) = run_steps([step], "cuda", dry=True, budget_s=60, say=silent)
    assert (result.status, result.rows) == ("ok", [Row("figure", 1.0)]), result.reason


def computes_in_threads(recorder: Recorder) -> None:
    """Several threads that use torch for the first time at the same moment."""
    together = threading.Barrier(4)

    def compute(_: int) -> torch.Tensor:
        together.wait()
        return torch.ones(100_000).double()

    with ThreadPoolExecutor(4) as threads:
        assert all(bool((made == 1).all()) for made in threads.map(compute, range(4)))
    assert torch.set_num_threads.mock_calls == [call(1)]  # type: ignore[attr-defined]


@forking
def test_a_step_may_use_torch_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork whose pool of threads is torn fails in some of these steps, so they also look whether it was replaced."""
    torch.set_num_threads(1)
    torch.ones(100_000).double()  # from here on torch has a pool, which is torn in a fork
    monkeypatch.setattr(torch, "set_num_threads", Mock(wraps=torch.set_num_threads))
    assert {(result.status, result.reason) for result in run(*[computes_in_threads] * 8)} == {("ok", "")}


@forking
def test_a_skipped_step_tells_why() -> None:
    (result,) = run(skips)
    assert (result.status, result.reason) == ("skipped", "there is no such device")


@forking
def test_no_step_begins_after_the_whole_time() -> None:
    steps = [Step("long", hangs, 60), Step("late", works, 60)]
    long, late = run_steps(steps, "cpu", dry=True, budget_s=1, say=silent)
    assert (long.status, late.status, late.reason, late.rows) == ("failed", "failed", "no time is left", [])


def meets(recorder: Recorder, own: str, other: str, folder: Path) -> None:
    """Leave a sign, and wait two seconds for the other's."""
    (folder / own).touch()
    until = time.monotonic() + 2
    while not (folder / other).exists():
        if time.monotonic() > until:
            raise RuntimeError(f"{other} does not run beside it")
        time.sleep(0.01)


@forking
@pytest.mark.parametrize(("is_timed", "states"), [(False, ["ok"] * 3), (True, ["failed", "ok", "ok"])])
def test_only_steps_that_time_nothing_run_side_by_side(is_timed: bool, states: list[str], tmp_path: Path) -> None:
    """Two that wait for each other, and one that is alone in any case."""
    names = ("a", "b"), ("b", "a")
    pair = [Step(own, partial(meets, own=own, other=of, folder=tmp_path), 20, is_timed=is_timed) for own, of in names]
    results = run_steps([*pair, Step("works", works, 20)], "cpu", dry=True, budget_s=60, say=silent)
    assert [result.status for result in results] == states


@forking
def test_a_step_that_hangs_costs_its_neighbours_nothing() -> None:
    steps = [Step("hangs", hangs, 1, is_timed=False), Step("works", works, 20, is_timed=False)]
    hung, other = run_steps(steps, "cpu", dry=True, budget_s=60, say=silent)
    assert (hung.status, hung.reason, hung.rows) == (
        "failed",
        "it took too long, so it was ended",
        [Row("before it hangs", 5.0)],
    )
    assert other.status == "ok"
    assert other.seconds < 1 <= hung.seconds


def test_a_measurement_that_would_end_too_late_is_not_begun() -> None:
    recorder = Recorder("cpu", True, time.monotonic() + 10, lambda row: None)
    recorder.check_time(5)
    with pytest.raises(TimeoutError):
        recorder.check_time(11)


# Generated pairs

PLAIN_PRODUCTS = Weights(products="plain")  # what is measured may choose packed weights, which cannot be read
TINY = ModelShape("qwen2", 2, 128, 192, 4, 2, 64, 4352)


def test_a_generated_checkpoint_is_sparse_and_has_norms_of_one(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "made", TINY, torch.float32)
    stored = (tmp_path / "made" / "model.safetensors").stat()
    assert stored.st_size > TINY.num_bytes(torch.float32)
    assert stored.st_blocks * 512 < stored.st_size / 4
    decoder = load_decoder(open_checkpoint(path), dtype=torch.float32, device=CPU, max_len=64, weights=PLAIN_PRODUCTS)
    norm: Any = decoder.norm
    assert (norm.weight == norm.weight[0]).all()
    assert norm.weight[0] > 0
    assert not decoder.layers[1].qkv.weight.any()


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.8, 1.0])
def test_the_draft_s_permutation_agrees_for_the_set_share(acceptance: float) -> None:
    texts = Texts.draw(4096, acceptance)
    count = len(texts.tokens)
    assert len(texts.target.unique()) == len(texts.draft.unique()) == count
    assert int((texts.target == texts.draft).sum()) / count == pytest.approx(acceptance, abs=0.01)
    text = texts.after(int(texts.tokens[0]), count)
    assert len(set(text)) == count  # no text repeats itself


@pytest.mark.parametrize("acceptance", [0.5, pytest.param(0.8, marks=pytest.mark.proofs)])
def test_a_generated_pair_has_the_acceptance_that_was_set(
    acceptance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are checked by Bench.run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recorder = Recorder("cpu", True, time.monotonic() + 60, lambda row: None)
    bench = speed.Bench(speed.DRY_PAIR, acceptance, recorder, tmp_path / "pair", (8,))
    bench.new_tokens = 75
    run = bench.run(8, 3)
    assert run.alpha == pytest.approx(acceptance, abs=0.08)


def test_a_batch_that_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = Engine.from_config

    def small(config: EngineConfig) -> Engine:
        if config.max_running > 1:
            raise ConfigError("it does not fit")
        return make(config)

    monkeypatch.setattr(Engine, "from_config", small)
    rows = list[Row]()
    recorder = Recorder("cpu", True, time.monotonic() + 60, rows.append)
    bench = speed._largest_bench(speed.DRY_PAIR, recorder, tmp_path)
    assert bench.batches == (1,)
    assert rows == [Row("batch 2 is left out", "it does not fit")]


def test_a_pair_that_writes_another_text_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recorder = Recorder("cpu", True, time.monotonic() + 60, lambda row: None)
    bench = speed.Bench(speed.DRY_PAIR, 0.8, recorder, tmp_path / "pair", (1,))
    bench.engine.target.decoder.head.weight.neg_()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="not what the pair was made to write"):
        bench.run(1, 0)


# Waits for the device


def test_each_wait_that_torch_tells_of_is_counted_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = list[str]()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with rounds._counted_waits(torch.device("cuda")) as told:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("another matter", stacklevel=1)
    assert len(told) == 3
    assert len(set(told)) == 1
    assert told[0].startswith("tests/benchmarks/test_gpu.py:")
    assert modes == ["warn", "default"]


# Parity


def test_another_model_is_no_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: transformers computes other weights than the engine."""
    rows = list[Row]()
    recorder = Recorder("cpu", True, time.monotonic() + 60, rows.append)
    reference = parity._reference

    def disturbed(*arguments: Any) -> Any:
        model = reference(*arguments)
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
        return model

    monkeypatch.setattr(parity, "_reference", disturbed)
    parity.compare_family(recorder, "llama", FAMILIES["llama"], tmp_path / "llama")
    assert [row.met for row in rows] == [False, False, False]


@pytest.mark.parametrize("captures", [True, False])
def test_graphs_must_be_captured(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be captured gives the same texts too."""
    told = graph_rows(monkeypatch, captures=captures)
    assert {row.what: row.met for row in told if row.met is not None} == {
        f"{dtype}: {what}": captures if what == "graphs that were captured" else True
        for dtype in rounds.DTYPES
        for what in ("graphs that were captured", "captures that failed", "texts of 16 that are the same with graphs")
        if dtype == "float64" or not what.startswith("texts")
    }
    notes = {row.what: row.value for row in told if row.met is None}
    assert notes["float64: graphs: replays"] == captures
    assert notes.get("float64: graphs: not captured: the first of its kind", 0) == captures


def test_other_texts_with_graphs_fail_in_fp64_only(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [row for row in graph_rows(monkeypatch, differs=True) if "the same with graphs" in row.what]
    assert [(row.value, row.met) for row in told] == [(14, False), (14, None), (14, None)]


def test_a_capture_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = graph_rows(monkeypatch, error=RuntimeError("it cannot be captured"))
    assert [row.met for row in told if "failed" in row.what and row.met is not None] == [False] * len(rounds.DTYPES)


def graph_rows(
    monkeypatch: pytest.MonkeyPatch, *, captures: bool = True, differs: bool = False, error: Exception | None = None
) -> list[Row]:
    """What compare_graphs tells of engines whose graphs capture nothing real. differs: one text of each generation."""

    class FakeLLM:
        def __init__(self, *names: str, graphs: bool, **settings: Any) -> None:
            self.graphs, kept = graphs, Graphs(torch.device("cpu"))
            if graphs and captures:
                kept.run(0, "a", list)
                kept.run(0, "a", list)
            self.engine = SimpleNamespace(target=SimpleNamespace(staging=SimpleNamespace(graphs=kept)))

        def generate(self, prompts: list[list[int]], params: object, k: int) -> list[Any]:
            other = SimpleNamespace(token_ids=(1, 3 if differs and self.graphs else 2))
            return [other, *[SimpleNamespace(token_ids=(1, 2))] * (len(prompts) - 1)]

    memory = FakeMemory()
    memory.error = error
    monkeypatch.setattr(graphs, "GraphMemory", lambda device: memory)
    monkeypatch.setattr(rounds, "LLM", FakeLLM)
    monkeypatch.setattr(rounds, "make_pair", lambda folder: (folder, folder))
    told = list[Row]()
    rounds.compare_graphs(Recorder("cuda", True, time.monotonic() + 60, told.append))
    return told


def test_the_first_engine_is_gone_before_the_second_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory of the device, and an engine refers to itself."""
    alive = list[weakref.ref[Any]]()

    class Self:
        def __init__(self, *names: str, **settings: Any) -> None:
            assert not any(other() for other in alive)
            alive.append(weakref.ref(self))
            self.engine = SimpleNamespace(target=SimpleNamespace(staging=SimpleNamespace(graphs=Graphs(CPU))))
            self.engine.owner = self

        def generate(self, prompts: list[list[int]], params: object, k: int) -> list[Any]:
            return [SimpleNamespace(token_ids=(1, 2))] * len(prompts)

    monkeypatch.setattr(rounds, "LLM", Self)
    monkeypatch.setattr(rounds, "make_pair", lambda folder: (folder, folder))
    gc.disable()
    try:
        rounds.compare_graphs(Recorder("cuda", True, time.monotonic() + 60, lambda row: None))
    finally:
        gc.enable()
    assert len(alive) == 2 * len(rounds.DTYPES)


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cuda:0", True), ("cpu", False)])
def test_the_speed_of_a_gpu_is_that_of_captured_rounds(device: str, expected: bool) -> None:
    recorder = Recorder(device, True, time.monotonic() + 60, lambda row: None)
    assert speed._config("target", "draft", recorder, torch.bfloat16, 8).graphs == expected


# Faults after which an engine goes on


def test_a_step_fails_if_a_drafter_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine repeats the round without drafts, so its texts are right."""

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no kernel")

    def serve(recorder: Recorder) -> None:
        llm = LLM(*map(str, parity.make_pair(tmp_path)), **parity.small_engine())
        if broken:
            monkeypatch.setattr(llm.engine.drafter, "propose", fail)
        llm.generate(parity.prompts(1), SamplingParams(**parity.GREEDY, max_tokens=4), k=2)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = list[Row]()
    recorder = Recorder("cpu", True, time.monotonic() + 60, told.append)
    broken = False
    watching(serve, recorder)
    assert [row.met for row in told] == [True]
    broken = True
    with pytest.raises(RuntimeError, match=r"faults: (.|\n)*no kernel"):
        watching(serve, recorder)
    assert told[1].met is False
    assert any(row.value == "a drafter failed" for row in told[2:])


def test_texts_that_are_not_the_cpu_s_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the engine that stands for the device's draws at another temperature."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(parity, "NEW_TOKENS", 6)
    write, asked = texts.write, [0]

    def disturbed(engine: Engine, name: str, kind: texts.TextKind, k: int | None, count: int) -> texts.Written:
        asked[0] += 1
        if asked[0] > len(texts.KINDS):
            kind = replace(kind, params={**kind.params, "temperature": 1.0})
        return write(engine, name, kind, k, count)

    monkeypatch.setattr(texts, "write", disturbed)
    told = list[Row]()
    texts.compare_texts(Recorder("cpu", True, time.monotonic() + 60, told.append))
    missed = [row.what for row in told if row.met is False and "CPU" in row.what]
    assert {f"{name}, fp64: share of texts that are those of the CPU" for name in texts.KINDS} == set(missed)


def test_the_device_is_busy_while_any_kernel_runs() -> None:
    assert busy_us([(5, 7), (0, 2), (1, 4), (1.5, 2), (6, 7)]) == 6
    assert busy_us([]) == 0
