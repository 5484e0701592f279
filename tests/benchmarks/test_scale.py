"""The benchmark of scale: every cell that the memory holds, with contexts as asked for."""

import json
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.peers.installed import WorkerPool
from benchmarks.peers.worker import WorkerError

ARGS = ["--target=models/demo/target", "--seconds=0", "--json"]


def test_a_row_for_each_cell_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main([*ARGS, "--sequences=1,2,4", "--contexts=16,200", "--kv-tokens=600"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["context"], row["sequences"]) for row in report["rows"]] == [
        (16, 1),
        (16, 2),
        (16, 4),
        (200, 1),
        (200, 2),
    ]
    assert all(row["ms"] > 0 for row in report["rows"])
    assert [row["growth"] is None for row in report["rows"]] == [True, False, False, True, False]


def test_ragged_contexts_spread_from_an_eighth_to_all() -> None:
    contexts = scale.contexts_of(8, 800, ragged=True)
    assert sorted(contexts) == [100 + 100 * i for i in range(8)]
    assert contexts != sorted(contexts)
    assert scale.contexts_of(3, 800, ragged=False) == [800, 800, 800]


class Peer:
    """Takes a millisecond per token of its prompts for a step. It has no room behind a hundred of one prompt, and ends
    at three prompts."""

    def ask(self, prompts: list[list[int]], steps: int) -> dict[str, list[float]]:
        if len(prompts) == 3:
            raise WorkerError("vllm-0 ended with status 1")
        return {"seconds": [1e-3 * sum(map(len, prompts))] * (steps if len(prompts[0]) < 100 else 0)}

    def close(self) -> None: ...


def test_vllms_steps_stand_beside_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scale, "vllm_worker", lambda *_, **kv: Peer())
    scale.main([*ARGS, "--sequences=1,2", "--contexts=16", "--kv-tokens=600", "--vllm"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["vLLM ms"] for row in rows] == [16.0, 32.0]
    assert [row["vLLM over ours"] for row in rows] == [
        pytest.approx(row["vLLM ms"] / row["ms"], rel=0.01) for row in rows
    ]


def test_a_cell_for_which_vllm_has_no_room_is_blank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "vllm_worker", lambda *_, **kv: Peer())
    scale.main([*ARGS, "--sequences=1", "--contexts=16,100", "--kv-tokens=600", "--vllm"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["vLLM ms"] for row in rows] == [16.0, None]
    assert rows[1]["vLLM over ours"] is None
    with pytest.raises(SystemExit, match="vLLM: vllm-0 ended with status 1"):
        scale.main([*ARGS, "--sequences=3", "--contexts=16", "--kv-tokens=600", "--vllm"])


def test_without_vllm_its_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scale, "WorkerPool", lambda: WorkerPool(tmp_path))
    with pytest.raises(SystemExit, match=r"vLLM: not installed: run scripts/setup_peers\.sh"):
        scale.main([*ARGS, "--sequences=1", "--contexts=16", "--vllm"])


def test_without_contexts_those_that_the_target_allows_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main([*ARGS, "--sequences=1"])  # the embedded target has 2,048 positions
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["context"] for row in report["rows"]] == [128, 512, 2046]
