"""Arguments, descriptions and the report."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.common import Spec
from engine.config import EngineConfig
from engine.llm import LLM
from engine.types import SamplingParams


def test_spec_lists_begin_with_plain_decoding() -> None:
    assert common.spec_list("8,off,2,2") == [0, 2, 8]
    assert common.spec_list("4") == [0, 4]
    for text in ("-1", "on"):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            common.spec_list(text)


def test_policies_come_after_plain_decoding_and_numbers() -> None:
    assert common.policy_list("goodput,4,off,heuristic,2,goodput") == [0, 2, 4, "heuristic", "goodput"]
    assert common.policy_list("goodput") == [0, "goodput"]
    assert common.policy_list("4,1") == [0, 1, 4]
    for text in ("fixed", "better", "-1,goodput", "goodput,", ""):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            common.policy_list(text)


def test_every_spec_is_a_policy() -> None:
    assert [common.spec_name(spec) for spec in common.policy_list("off,4,goodput")] == ["off", "4", "goodput"]
    names = [(common.policy(spec).name, common.policy(spec).k) for spec in common.policy_list("off,4,optimal")]
    assert [names[0][0], names[1], names[2][0]] == ["off", ("fixed", 4), "optimal"]


def test_each_variant_learns_from_its_own_rounds_only(small_pair: list[str]) -> None:
    target, draft = (argument.partition("=")[2] for argument in small_pair[:2])
    llm = LLM(target, draft, max_running=1, max_spec_length=4, threads=1)
    chooser = common.Chooser(llm.engine)
    started = llm.engine.speculator.control
    assert started.timings  # what was measured at the start, which everyone begins with

    def first_alpha(length: int) -> int:
        """Per mille, of a new request's first draft."""
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        return llm.generate([[7, 8, 9]], params)[0].record.column("alpha")[1]

    chooser.use("4", 4)
    unknown, known = [first_alpha(32) for _ in range(2)]
    assert known != unknown
    own = llm.engine.speculator.control
    assert own is not started
    assert own.timings == started.timings
    chooser.use("goodput", "goodput")
    assert llm.engine.policy.name == "goodput"
    assert first_alpha(4) == unknown
    chooser.use("4", 4)
    assert llm.engine.speculator.control is own
    assert first_alpha(4) != unknown


def test_concurrency_is_sorted_and_positive() -> None:
    assert common.concurrency_list("8,1") == [1, 8]
    with pytest.raises(argparse.ArgumentTypeError):
        common.concurrency_list("0")


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    ("specs", "longest"), [([0], 0), ([0, 12], 12), ([0, 2, *common.POLICIES], 16), ([0, 20, "goodput"], 20)]
)
def test_engine_config_is_always_a_valid_one(batch: int, specs: list[Spec], longest: int) -> None:
    """And each of the specs can follow in the same engine."""
    args = argparse.Namespace(device="cpu", dtype="float32", threads=None)
    config = EngineConfig("target", "draft", **common.engine_config(args, specs, batch, 5))
    assert (config.max_running, config.max_spec_length, config.max_waiting) == (batch, longest, 5)
    assert config.policy == common.policy(specs[-1])
    for spec in specs:
        config.check_policy(common.policy(spec))


def test_model_description_counts_stored_parameters() -> None:
    model = common.describe_model("models/demo/draft", "bfloat16")
    config = json.loads(Path("models/demo/draft/config.json").read_text("utf-8"))
    d, ff, layers, vocab = (config[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    kv = config["num_key_value_heads"] * config["head_dim"]
    per_layer = 2 * d * d + 2 * d * kv + 3 * d * ff + 2 * d
    assert model["parameters"] == vocab * d + layers * per_layer + d  # the head is tied
    assert (model["name"], model["dtype"], model["hidden_size"]) == ("demo/draft", "bfloat16", d)


@pytest.mark.parametrize(("outputs", "warned"), [([[7] * 20], True), ([list(range(20))], False)])
def test_repetitive_text_is_said_so(capsys: pytest.CaptureFixture[str], outputs: list[list[int]], warned: bool) -> None:
    report = {"machine": {}, "models": {}, "workload": {}, "text": common.repetition(outputs)}
    common.print_report(report, [[{"spec": "off"}]], as_json=True)
    *_, said, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["text"]["repetitive"] is warned
    assert ("WARNING: repetitive" in said) is warned
