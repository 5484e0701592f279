"""The number of CPU threads: the fewest that clearly pay on this machine."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import load
from engine.models.decoder import DecoderConfig
from engine.models.loader import load_model, open_checkpoint
from engine.profiling.machine_cpus import usable_cpus
from engine.profiling.threads import choose_threads
from tests.engine.pairs import Pair


@pytest.fixture(autouse=True)
def _one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def shape_of(pair: Pair) -> DecoderConfig:
    return open_checkpoint(pair.target).shape


@pytest.mark.parametrize(
    ("speedups", "most", "chosen"),
    [
        ({1: 1.0, 2: 1.9, 4: 3.0}, 4, 4),
        ({1: 1.0, 2: 1.9, 4: 2.0}, 4, 2),  # the last two hardly help
        ({1: 1.0, 2: 1.05}, 2, 1),
        ({1: 1.0, 2: 0.5, 4: 1.2}, 4, 4),
        ({1: 1.0, 2: 0.5, 4: 0.4}, 4, 1),
        ({1: 1.0, 2: 1.9, 4: 1.5, 6: 2.6}, 6, 6),
        ({1: 1.0}, 1, 1),
    ],
)
def test_the_fewest_threads_that_clearly_pay(
    pair: Pair, speedups: dict[int, float], most: int, chosen: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose_threads(shape_of(pair), most, lambda threads, rows: rows / speedups[threads]) == chosen
    assert torch.get_num_threads() == chosen
    (line,) = [record.getMessage() for record in caplog.records if record.name == "engine.profiling.threads"]
    assert line.startswith(f"{chosen} ")


def test_threads_that_only_help_verification_do_not_pay(pair: Pair) -> None:
    """Plain decoding with two threads takes longer."""
    seconds = {(1, 1): 1.0, (1, 5): 3.0, (2, 1): 1.1, (2, 5): 1.5}
    assert choose_threads(shape_of(pair), 2, lambda threads, rows: seconds[threads, rows]) == 1


def test_real_passes_are_measured(pair: Pair) -> None:
    assert choose_threads(shape_of(pair), 2) in (1, 2)


@pytest.mark.parametrize(
    ("given", "threads"), [({"most_threads": 2}, 2), ({"threads": 3, "most_threads": 2}, 3), ({}, None)]
)
def test_the_engine_runs_with_what_was_chosen(
    pair: Pair, given: dict[str, int], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And weights are loaded after the choice, because products are chosen for it. threads pins the number."""
    seen: list[int] = []
    monkeypatch.setattr(load, "choose_threads", lambda shape, most: most)

    def loading(*given: Any, **named: Any) -> Any:
        seen.append(torch.get_num_threads())
        return load_model(*given, **named)

    monkeypatch.setattr(load, "load_model", loading)
    engine = Engine.from_config(EngineConfig(pair.target, None, max_running=1, max_model_len=32, **given))  # type: ignore[arg-type]
    assert engine.config.threads == threads
    assert seen == [threads or 1]


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_a_containers_quota_limits_the_cpus(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", "utf-8")
    assert usable_cpus(tmp_path) == cpus


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_idle_workers_sleep_unless_the_operator_says_otherwise(given: dict[str, str], spins: str) -> None:
    code = "import engine, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    done = subprocess.run([sys.executable, "-c", code], env=usual | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spins


@pytest.mark.parametrize(
    ("order", "given", "spin"),
    [
        ("engine, torch", {}, False),
        ("torch, engine", {}, True),
        pytest.param("benchmarks.decode, engine", {}, False, marks=pytest.mark.proofs),
        ("torch, engine", {"GOMP_SPINCOUNT": "7"}, False),
    ],
)
def test_idle_workers_spin_where_torch_comes_first(
    order: str, given: dict[str, str], spin: bool, tmp_path: Path
) -> None:
    code = f"import {order}; import engine; print(engine.IDLE_WORKERS_SPIN)"
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    if "benchmarks" not in order:  # an empty module in torch's place loads 3 s faster
        (tmp_path / "torch.py").touch()
        usual["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [usual.get("PYTHONPATH")]), os.getcwd()])
    done = subprocess.run([sys.executable, "-c", code], env=usual | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(spin)


@pytest.mark.parametrize(("spins", "threads", "warned"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_the_start_tells_of_workers_that_spin(
    spins: bool,
    threads: int,
    warned: bool,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(load, "IDLE_WORKERS_SPIN", spins)
    load.load_models(EngineConfig(target=pair.target, device="cpu", threads=threads))
    assert ("import engine first" in caplog.text) == warned
