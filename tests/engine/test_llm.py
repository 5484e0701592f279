"""The offline interface."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.llm import LLM
from engine.models.runner import Runner
from engine.types import InvalidRequest, SamplingParams
from policies.config import PolicyConfig
from tests.engine.pairs import Pair, copy_of, edit_json

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(pair: Pair) -> LLM:
    return LLM(pair.target, pair.draft, dtype="float64", max_model_len=64)


@pytest.mark.parametrize(
    ("given", "captured"),
    [
        ({"device": "cuda"}, True),
        ({"device": "cuda", "graphs": False}, False),
        ({"device": "cuda", "cache": "slotted"}, False),
        ({}, False),
    ],
)
def test_rounds_are_captured_where_they_can_be(
    given: dict[str, Any], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "from_config", lambda config: config)
    made: Any = LLM("target", **given).engine
    assert made.graphs == captured


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "the cat sat"
    ids = llm.engine.tokenizer.encode(text)
    by_text, by_ids = llm.generate([text, ids], GREEDY)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == tuple(ids)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == llm.engine.tokenizer.decode(by_text.token_ids)
    assert by_text.finish_reason == "length"


def test_one_each(llm: LLM) -> None:
    """params and k may be lists; completions keep the prompts' order however long each takes."""
    prompts = ["the cat", "def main(", "a"]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=5 + 9 * (i % 2), ignore_eos=True) for i in range(3)]
    together = llm.generate(prompts, params, k=[0, 3, None])
    assert [len(c.token_ids) for c in together] == [5, 14, 5]
    assert [c.seed for c in together] == [0, 1, 2]
    assert [c.record.k_max for c in together] == [0, 3, 16]
    assert [c.record.fixed_k for c in together] == [0, 3, None]
    assert [max(c.drafted) for c in together[:2]] == [0, 3]
    assert max(together[2].drafted) <= 3  # the policy's, cut by max_tokens after one token
    for prompt, each, completion in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], each, k=0)
        assert alone.token_ids == completion.token_ids


def test_the_checkpoints_sampling_defaults_hold_as_in_the_server(pair: Pair, tmp_path: Path) -> None:
    path = copy_of(pair.target, tmp_path / "tuned")
    edit_json(path / "generation_config.json", temperature=0.0, top_k=3)
    tuned = LLM(str(path), dtype="float64", max_model_len=64)
    assert tuned.sampling_params(top_k=5) == SamplingParams(temperature=0.0, top_k=5)
    assert tuned.sampling_params(temperature=0.7, max_tokens=4) == SamplingParams(0.7, top_k=3, max_tokens=4)
    greedy, (default,) = tuned.generate(["the cat"], SamplingParams(0.0)), tuned.generate(["the cat"])
    assert default.token_ids == greedy[0].token_ids
    untuned = LLM(str(path), dtype="float64", max_model_len=64, generation_config="none")
    assert untuned.sampling_params() == SamplingParams()
    with pytest.raises(InvalidRequest, match="temperature"):
        tuned.sampling_params(temperature=-1)


def test_steps_are_those_of_the_last_call(llm: LLM) -> None:
    (completion,) = llm.generate(["the dog"], GREEDY, k=2)
    assert sum(s.emitted for s in llm.steps) == len(completion.token_ids) == 10
    assert sum(s.drafted for s in llm.steps) == sum(completion.drafted)
    assert sum(s.accepted for s in llm.steps) == sum(completion.accepted)


@pytest.mark.parametrize(("config", "passes"), [({}, 3), ({"prefill_chunk": 20}, 8), ({"max_step_tokens": 480}, 1)])
def test_prompts_share_whole_passes(pair: Pair, config: dict[str, int], passes: int) -> None:
    """Eight prompts of 60 tokens: a pass beside the first text's tokens holds as many as one without."""
    own: dict[str, Any] = {"max_running": 8, "max_spec_length": 4, "max_step_tokens": 180, **config}
    llm = LLM(pair.target, dtype="float64", max_model_len=96, policy=PolicyConfig("off"), **own)
    prompts = [[5 + i] * 60 for i in range(8)]
    completions = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert [len(c.token_ids) for c in completions] == [30] * 8
    assert sum(step.prefill_tokens > 0 for step in llm.steps) == passes


def test_many_more_than_run_at_once(llm: LLM) -> None:
    prompts = [[5 + i, 6] for i in range(40)]
    assert [c.prompt_token_ids for c in llm.generate(prompts, GREEDY)] == [tuple(p) for p in prompts]


def test_nothing(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_an_invalid_request_stops_all_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="exceed the context of 64"):
        llm.generate(["fine", [5] * 60], GREEDY)
    with pytest.raises(InvalidRequest, match="does not lie between 0 and this server's maximum, 16"):
        llm.generate(["fine", "also fine"], GREEDY, k=[1, 17])
    with pytest.raises(InvalidRequest, match="no tokens"):
        llm.generate(["fine", ""], GREEDY)
    assert not llm.engine.has_work


@pytest.mark.parametrize("lists", [{"params": [GREEDY]}, {"k": [1, 2, 3]}])
def test_lists_of_another_length(llm: LLM, lists: dict[str, list[SamplingParams]] | dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="argument"):
        llm.generate(["one", "two"], **lists)
    assert not llm.engine.has_work


@pytest.mark.parametrize("name", ["prompts", "predictions"])
def test_a_text_in_place_of_a_list(llm: LLM, name: str) -> None:
    given: dict[str, Any] = {"prompts": ["the cat"], name: "the cat"}
    with pytest.raises(TypeError, match=f"{name} must be a list, not the text 'the cat'"):
        llm.generate(params=GREEDY, **given)


def test_an_interrupted_call_leaves_nothing_to_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Runner.run
    passes = iter((run, run))

    def interrupted(self: Runner, *given: Any) -> Any:
        step = next(passes, None)
        if step is None:
            raise KeyboardInterrupt
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["def main(", "the cat"], GREEDY)
    assert not llm.engine.has_work
    llm.engine.audit()
    (again,) = llm.generate(["the cat"], GREEDY)
    assert again.token_ids == llm.generate(["the cat"], GREEDY, k=0)[0].token_ids


def test_without_a_draft_every_round_is_plain(llm: LLM, pair: Pair) -> None:
    plain = LLM(pair.target, dtype="float64", max_model_len=64)
    (completion,) = plain.generate(["the cat"], GREEDY)
    assert completion.token_ids == llm.generate(["the cat"], GREEDY, k=4)[0].token_ids
    assert sum(completion.drafted) == completion.record.k_max == 0
    assert completion.record.column("emitted") == [1] * 10
    assert plain.generate(["the cat"], GREEDY, k=0)[0].token_ids == completion.token_ids
    with pytest.raises(InvalidRequest, match="no drafter is configured"):
        plain.generate(["the cat"], GREEDY, k=1)


def test_a_failure_while_running_is_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="the model failed"):
            llm.generate(["the cat"], GREEDY)
    assert len(llm.generate(["the cat"], GREEDY)[0].token_ids) == 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 2.5),
        ("seed", 1.5),
        ("max_tokens", 2.5),
        ("min_tokens", 0.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("seed", 2**63),
        ("seed", -(2**63)),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ("a", "b", "c", "d", "e")),
        ("stop", ("a", "")),
    ],
)
def test_parameters_outside_their_range(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "'int8' is not one of auto, float64, float32, bfloat16, float16"),
        ({"target_weights": "int3"}, "target_weights 'int3' is not one of as_is, int8, int4, fp8"),
        ({"target_weights": "fp8"}, "target_weights fp8 needs device cuda, not cpu: choose int8"),
        ({"draft_weights": "int8"}, "draft_weights int8 needs a draft checkpoint"),
        ({"policy": PolicyConfig("fixed", k=17)}, "17 exceeds max_spec_length"),
        ({"max_spec_length": -1}, "max_spec_length must not be negative"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"device": "gpu"}, "device 'gpu' is not one of cpu, cuda"),
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"max_waiting": -1}, "max_waiting must not be negative"),
        ({"max_step_tokens": 271}, r"271 cannot hold one verification of every sequence: max_running 16 × \(1 \+"),
    ],
)
def test_configurations_that_conflict(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("target", **settings)
    EngineConfig("target", max_step_tokens=272)


def test_special_tokens_begin_a_prompt_and_not_a_prediction(pair: Pair, tmp_path: Path) -> None:
    path = copy_of(pair.target, tmp_path / "begins")
    edit_json(path / "tokenizer_config.json", add_bos_token=True)
    llm = LLM(str(path), dtype="float64", max_model_len=64)
    plain = llm.engine.tokenizer.encode("the cat", special=False)
    (guessed,) = llm.generate(["the cat"], GREEDY, k=3, predictions=["the cat"])
    assert guessed.prompt_token_ids == (llm.engine.tokenizer.vocab["<|bos|>"], *plain)
    assert guessed.record.prediction_tokens == len(plain)


def test_a_lone_surrogate_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        llm.generate(["a\ud800"], GREEDY)
