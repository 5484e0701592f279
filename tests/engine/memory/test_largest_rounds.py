"""The activation budget covers what real rounds allocate, with every feature that a request can ask for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.loading.load as load_module
from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.loading.load import load_models, plan_memory
from engine.loading.planned_weights import beside_weights
from engine.memory.budget import measure_activations
from engine.memory.largest_rounds import measure_largest_rounds
from engine.memory.machine import DeviceMemory
from engine.types import Request, SamplingParams, Verifier
from tests.engine.driving import load
from tests.engine.pairs import Pair, Shape, copy_of, save_pair

CPU = torch.device("cpu")
LIMITS: dict[str, Any] = {
    "max_running": 4,
    "max_spec_length": 4,
    "max_step_tokens": 64,
    "max_model_len": 128,
    "cache": "paged",  # a slotted cache has no memory_fraction
    "memory_fraction": 0.05,
}
VOCAB = 4_000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose logits are larger than all else: 64 rows take 2 MiB in fp64."""
    return save_pair(tmp_path_factory.mktemp("wide"), Shape(vocab=VOCAB))


@pytest.fixture(scope="module")
def measured(wide: Pair) -> tuple[Engine, int]:
    """An engine, and the activation budget that it measured."""
    budgets: list[int] = []

    def measure(*args: Any) -> int:
        budgets.append(measure_largest_rounds(*args))
        return budgets[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "measure_largest_rounds", measure)
        patch.setattr("engine.engine.profile", lambda *_: [])  # times are not looked at
        engine = load(wide, drafts=(wide.draft, wide.draft), **LIMITS)
    return engine, budgets[0]


def largest_step(engine: Engine, requests: list[Request]) -> int:
    """The most bytes that a step allocates until all requests have ended."""
    sizes = []
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        sizes.append(measure_activations(engine.step, CPU))
    return max(sizes)


def test_merged_drafts_stay_within_the_budget(measured: tuple[Engine, int]) -> None:
    """The first prompt of several is read a pass before the others, so the sequences have different numbers of drafts
    at the end."""
    engine, budget = measured
    params = SamplingParams(
        temperature=0.9, top_p=0.95, frequency_penalty=0.5, logprobs=20, max_tokens=6, ignore_eos=True, seed=1
    )
    asked = {"k": 4, "verifier": "rejection", "drafter": "merged"}
    requests = [Request(f"merged-{i}", tuple(range(40, 60)), params, **asked) for i in range(4)]  # type: ignore[arg-type]
    used = largest_step(engine, requests)
    assert 12 * VOCAB * 8 < used <= budget


@pytest.mark.parametrize("verifier", ["match", "block"])
def test_real_rounds_stay_within_the_budget(measured: tuple[Engine, int], verifier: Verifier) -> None:
    engine, budget = measured
    params = SamplingParams(
        temperature=0.9, top_p=0.95, frequency_penalty=0.5, logprobs=20, max_tokens=3, ignore_eos=True, seed=1
    )
    requests = [Request(f"{verifier}-{i}", tuple(range(10, 30)), params, k=4, verifier=verifier) for i in range(4)]
    used = largest_step(engine, requests)
    assert used <= budget
    assert used > 12 * VOCAB * 8, "the logits of four sequences with two drafts each take so much"


@pytest.mark.parametrize("tree", [(4,), (1, 1, 2)])
def test_trees_stay_within_the_budget(measured: tuple[Engine, int], tree: tuple[int, ...]) -> None:
    engine, budget = measured
    params = SamplingParams(
        temperature=0.9, top_p=0.95, frequency_penalty=0.5, logprobs=20, max_tokens=6, ignore_eos=True, seed=1
    )
    requests = [Request(f"{tree}-{i}", tuple(range(10, 30)), params, tree=tree, verifier="rejection") for i in range(4)]
    used = largest_step(engine, requests)
    assert used <= budget
    assert used > 12 * VOCAB * 8


def test_an_echoed_prompt_stays_within_the_budget(measured: tuple[Engine, int]) -> None:
    engine, budget = measured
    params = SamplingParams(max_tokens=1, prompt_logprobs=20, seed=1)
    used = largest_step(engine, [Request("echo", tuple(range(2, 120)), params, k=0)])
    assert 60 * VOCAB * 8 < used <= budget


def test_the_measurement_leaves_nothing_behind(measured: tuple[Engine, int]) -> None:
    engine, _ = measured
    assert engine.target.cache.free_slots == LIMITS["max_running"]
    engine.drafter.audit(set())


def test_rounds_that_do_not_fit_are_refused(wide: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr("engine.memory.largest_rounds.measure_activations", full)
    with pytest.raises(ConfigError, match="max_step_tokens 64 at max_model_len 128 does not fit beside the weights"):
        load(wide, **LIMITS)


def test_weights_that_do_not_fit_are_not_even_read(wide: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.planned_weights.device_memory", lambda device: DeviceMemory(2**30, 2**20))
    monkeypatch.setattr(load_module, "load_model", lambda *_, **__: pytest.fail("it was read"))
    config = EngineConfig(wide.target, wide.draft)
    for start in (load_models, plan_memory):
        with pytest.raises(ConfigError, match=r"do not fit on cpu: target \d\.\d MiB and draft .* 1\.0 MiB are avail"):
            start(config)


@pytest.mark.parametrize(("device", "forms"), [("cpu", "int4"), ("cuda", "int8 or int4")])
def test_only_forms_of_weights_that_the_device_has_are_offered(
    device: str, forms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the CPU lacks does not bind a GPU."""
    monkeypatch.setattr("engine.loading.planned_weights.device_memory", lambda device: DeviceMemory(2**30, 2**20))
    monkeypatch.setattr("engine.profiling.machine_cpus.cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr("engine.profiling.machine_cpus.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"choose smaller models, a smaller dtype or {forms} weights$"):
        beside_weights(torch.device(device), [2**20, 2**20])


def test_the_plan_refuses_what_cannot_be_loaded(wide: Pair, tmp_path: Path) -> None:
    draft = copy_of(wide.draft, tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    for start in (load_models, plan_memory):
        with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
            start(EngineConfig(wide.target, str(draft)))


def test_the_plan_needs_no_weights_and_tells_the_same(
    wide: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = DeviceMemory(2**34, 2**33)
    monkeypatch.setattr(load_module, "device_memory", lambda device: memory)
    config = EngineConfig(wide.target, wide.draft, max_running=4, max_step_tokens=128, kv_tokens=4096)
    with caplog.at_level("INFO", "engine.memory.table"):
        load_models(config)
    (logged,) = (m.removeprefix("memory:\n") for m in caplog.messages if m.startswith("memory:"))
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "load_model", lambda *_, **__: pytest.fail("it was read"))
        planned = str(plan_memory(config))
    rows = [line.split() for line in planned.splitlines()]
    assert [row[0] for row in rows] == ["cpu", "target", "draft", "KV", "activations", "room", "requests"]
    several = str(plan_memory(replace(config, draft=None, drafts=(wide.draft, wide.target))))
    one, both = (kv_tokens_bytes(table) for table in (planned, several))
    assert both > one  # the second draft's
    assert [line.split("MiB")[0].split()[:-1] for line in several.splitlines()[1:4]] == [
        ["target"], ["draft", "1"], ["draft", "2"],
    ]  # fmt: skip
    for line in ("KV", "requests", "activations"):
        assert _line(planned, line) == _line(logged, line)
    assert "at once: 4 of 128 tokens (max_running 4)" in planned


def kv_tokens_bytes(table: str) -> float:
    """MiB of the KV memory of all models."""
    return float(_line(table, "KV").split()[1].replace(",", ""))


def _line(table: str, name: str) -> str:
    (found,) = (line for line in table.splitlines() if line.split()[0] == name)
    return found
