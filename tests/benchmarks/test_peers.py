"""The peers benchmark: its workers' protocol, its tables, and a run in float64, where no text may differ."""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.peers import __main__ as peers
from benchmarks.peers import installed, report
from benchmarks.peers.installed import Unavailable, WorkerPool
from benchmarks.peers.systems import BatchSize, System, TimedOutputs, run_group, run_repeat, whole_groups
from benchmarks.peers.worker import Worker, WorkerError
from benchmarks.peers.workers import write_gguf
from benchmarks.prompts import Prompts

PAIR = ["--target=models/demo/target", "--draft=models/demo/draft", "--dtype=float64", "--threads=1", "--json"]
ECHO = """
import json, sys
print("a line of the library's own")
print("@@" + json.dumps({"pid": __import__("os").getpid()}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("fail"):
        sys.exit("out of memory")
    print("@@" + json.dumps({"seconds": 0.5, "tokens": [prompt[::-1] for prompt in request["prompts"]]}), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker([sys.executable, "-c", ECHO], {}, tmp_path / "echo.log")
    yield worker
    worker.close()


def state(pid: int) -> str:
    """T is stopped; S, R and D are not."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def wait_for_state(pid: int, expected: str) -> None:
    deadline = time.monotonic() + 10
    while state(pid) != expected:
        assert time.monotonic() < deadline, state(pid)
        time.sleep(0.001)


def test_a_worker_answers_requests_and_stands_still_between_them(echo: Worker) -> None:
    wait_for_state(echo.first_reply["pid"], "T")
    assert installed.ask(echo, 2, 4, [[1, 2], [3]]) == TimedOutputs(0.5, [[2, 1], [3]])
    wait_for_state(echo.first_reply["pid"], "T")
    assert installed.ask(echo, 2, 4, [[5, 6]]) == TimedOutputs(0.5, [[6, 5]])


def test_a_worker_that_ends_is_an_error_with_its_log(echo: Worker) -> None:
    with pytest.raises(WorkerError, match="echo ended with status 1:\nout of memory"):
        echo.ask(fail=True)
    with pytest.raises(WorkerError):
        echo.ask(prompts=[])


def test_a_worker_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="cannot start /no/such/program"):
        Worker(["/no/such/program"], {}, tmp_path / "log")
    with pytest.raises(WorkerError, match="no such model"):
        Worker([sys.executable, "-c", "import sys; sys.exit('no such model')"], {}, tmp_path / "log")


def test_the_pool_ends_its_workers(tmp_path: Path) -> None:
    with WorkerPool(tmp_path) as pool:
        pid = pool.start("echo", [sys.executable, "-c", ECHO], {}).first_reply["pid"]
    assert not Path(f"/proc/{pid}").exists()


def test_a_benchmark_that_is_ended_ends_its_workers(tmp_path: Path) -> None:
    before, pids = signal.getsignal(signal.SIGTERM), list[int]()

    def benchmark() -> None:
        with WorkerPool(tmp_path) as pool:
            pids.append(pool.start("echo", [sys.executable, "-c", ECHO], {}).first_reply["pid"])
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        benchmark()
    assert not Path(f"/proc/{pids[0]}").exists()
    assert signal.getsignal(signal.SIGTERM) == before


def options(**changes: object) -> argparse.Namespace:
    given = {"target": "t", "draft": "d", "dtype": "float32", "weights": "as_is", "concurrency": [1], "spec": [0, 4]}
    return argparse.Namespace(**(given | {"max_tokens": 4} | changes))


@pytest.mark.parametrize("systems", [installed.vllm_systems, installed.llama_systems])
def test_a_peer_that_is_not_installed_gives_its_reason(tmp_path: Path, systems: peers.StartPeer) -> None:
    pool = WorkerPool(tmp_path)
    with pytest.raises(Unavailable, match=r"run scripts/setup_peers\.sh"):
        systems(options(), pool)
    for name in ("vllm", "llama"):
        (tmp_path / f"{name}.reason").write_text("no wheel for this machine\n")
    with pytest.raises(Unavailable, match="not installed: no wheel for this machine"):
        systems(options(), pool)


@pytest.mark.parametrize("changes", [{"dtype": "float64"}, {"weights": "int8"}])
def test_vllm_is_left_out_where_it_cannot_do_the_work(tmp_path: Path, changes: dict[str, str]) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(Unavailable, match=r"float64|int8"):
        installed.vllm_systems(options(**changes), WorkerPool(tmp_path))


def scripted(peer: str, spec: int, seconds: list[float], kind: str = "") -> System:
    return System(peer, spec, lambda prompts: TimedOutputs(1.0, []), kind, list(seconds))


def a_cell() -> BatchSize:
    ours = [scripted("ours", 0, [1.0, 1.0, 2.0]), scripted("ours", 4, [0.5, 0.5, 0.5])]
    theirs = [scripted("vLLM", 0, [2.0, 2.0, 2.0]), scripted("vLLM", 4, [2.0, 1.0, 1.5])]
    return BatchSize(2, [[[1], [2]]], ours, scripted("ours", 0, [1.0, 2.0, 2.0], "again"), theirs)


def test_ratios_pair_equal_k_and_show_the_spread() -> None:
    plain, four, again = report.ratio_rows(a_cell(), max_tokens=50)
    assert (plain["k"], plain["ours/theirs"]) == ("off", 2.0)
    assert (four["k"], four["ours/theirs"], four["lowest"], four["highest"]) == ("4", 3.0, 2.0, 4.0)
    assert (four["their tok/s"], four["our tok/s"]) == (pytest.approx(66.67, abs=0.01), 200.0)
    assert (again["peer"], again["ours/theirs"], again["highest"]) == ("ours again", 1.0, 2.0)


def test_each_of_ours_is_compared_with_a_peers_plain_and_fastest_way() -> None:
    rows = report.best_rows(a_cell(), max_tokens=50)
    assert [(r["our k"], r["over its plain"], r["its best"], r["over its best"]) for r in rows] == [
        ("off", 2.0, "vLLM, k 4", 1.0),
        ("4", 4.0, "vLLM, k 4", 3.0),
    ]


def test_systems_take_turns_within_a_group() -> None:
    turns: list[tuple[str, int]] = []

    def taking_turns(name: str) -> System:
        def run(prompts: Prompts) -> TimedOutputs:
            turns.append((name, prompts[0][0]))
            return TimedOutputs(1.0, [[7] for _ in prompts])

        return System(name, 0, run)

    cell = BatchSize(2, whole_groups([[1], [2], [3], [4], [5]], 2), [taking_turns("a")], taking_turns("b"), [])
    run_repeat(cell, 1, repeat=0)
    assert turns == [("a", 1), ("b", 1), ("b", 3), ("a", 3)]
    assert [system.outputs for system in cell.systems] == [[[7]] * 4] * 2
    assert cell.again.seconds == [1.0, 1.0]


def test_a_system_that_stops_early_is_refused() -> None:
    system = System("short", 0, lambda prompts: TimedOutputs(1.0, [[1, 2]]))
    with pytest.raises(RuntimeError, match="emitted 2 tokens, not 3"):
        run_group([system], [[5]], 3)


def test_every_system_agrees_in_float64(small_pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    peers.main(
        [
            *small_pair,
            "--dtype=float64",
            "--json",
            "--spec=3",
            "--max-tokens=6",
            "--prompts-count=2",
            "--repeats=1",
            "--concurrency=1,2",
        ]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["batch"], r["peer"], r["k"]) for r in found["results"]] == [
        (1, "transformers plain", "off"),
        (1, "transformers assisted", "3"),
        (1, "transformers lookup", "3"),
        (1, "ours again", "off"),
        (2, "transformers plain", "off"),
        (2, "ours again", "off"),
    ]
    assert {(r["batch"], r["system"], r["k"], r["as"]): r["agree"] for r in found["agreement"]} == {
        (1, "ours", "off", "transformers plain"): 1.0,
        (1, "ours", "3", "transformers plain"): 1.0,
        (1, "ours again", "off", "transformers plain"): 1.0,
        (1, "transformers assisted", "3", "transformers plain"): 1.0,
        (1, "transformers lookup", "3", "transformers plain"): 1.0,
        (2, "ours", "off", "transformers plain"): 1.0,
        (2, "ours", "3", "transformers plain"): 1.0,
        (2, "ours again", "off", "transformers plain"): 1.0,
    }
    assert [row["left out"] for row in found["skipped"]] == ["vllm", "llama.cpp"]


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--temperature=0.5"], "temperature must be 0"), (["--prompts-count=4", "--concurrency=8"], "less than a batch")],
)
def test_a_run_that_compares_nothing_is_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        peers.main([*PAIR, *given])
    assert message in capsys.readouterr().err


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Two layers' names at a tiny shape: hidden 8, two heads, one of KV, head_dim 4."""
    generator = torch.Generator().manual_seed(0)
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    names = {"model.embed_tokens.weight": 6, "lm_head.weight": 6, "model.norm.weight": 0}
    for place in write_gguf.IN_LAYER:
        names[f"model.layers.0.{place}.weight"] = 0 if "norm" in place else rows.get(place.rpartition(".")[2], 8)
    weights = {n: torch.randn((rows, 8) if rows else (8,), generator=generator) for n, rows in names.items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return weights


CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


def test_every_tensor_has_its_place_in_gguf(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "model")
    found = dict(write_gguf.tensors(CONFIG, tmp_path / "model"))
    assert len(found) == len(weights)
    assert np.array_equal(found["blk.0.ffn_down.weight"], weights["model.layers.0.mlp.down_proj.weight"].numpy())
    assert np.array_equal(found["output.weight"], weights["lm_head.weight"].numpy())
    q = weights["model.layers.0.self_attn.q_proj.weight"].numpy()  # heads of rows 0 to 3 and 4 to 7, halves of two
    assert np.array_equal(found["blk.0.attn_q.weight"], q[[0, 2, 1, 3, 4, 6, 5, 7]])
    k = weights["model.layers.0.self_attn.k_proj.weight"].numpy()
    assert np.array_equal(found["blk.0.attn_k.weight"], k[[0, 2, 1, 3]])
    tied = dict(write_gguf.tensors({**CONFIG, "tie_word_embeddings": True}, tmp_path / "model"))
    assert found.keys() - tied.keys() == {"output.weight"}


def test_a_tensor_without_a_place_in_gguf_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="q_norm"):
        dict(write_gguf.tensors(CONFIG, folder))


def test_bf16_is_read_exactly(tmp_path: Path) -> None:
    values = torch.randn(3, 5).bfloat16()
    save_file({"x": values}, tmp_path / "x.safetensors")
    ((name, read),) = write_gguf.read_safetensors(tmp_path / "x.safetensors")
    assert name == "x"
    assert np.array_equal(read, values.float().numpy())


def test_gguf_is_written_once_and_its_failure_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "model")
    runs: list[list[str]] = []

    def write(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        runs.append(command)
        Path(command[3]).touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", write)
    files = {installed.gguf_file(Path("python"), tmp_path / "model", "F16", tmp_path / "gguf") for _ in range(2)}
    assert len(runs) == len(files) == 1
    monkeypatch.undo()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(Unavailable, match=r"gguf|qwen2"):
        installed.gguf_file(Path(sys.executable), tmp_path / "model", "F32", tmp_path / "gguf")
