"""The operator's settings and the two Serve files: both are valid and have no key that Serve would silently ignore."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from app.telemetry.tracer import TraceConfig, TraceLevel
from deployments.checks import read_settings
from deployments.settings import ROOT, ChatConfig, EdgeConfig, PolicySettings, Settings
from engine.config import ConfigError, EngineConfig
from engine.loading.hub_id import HubId, parse_hub_id
from engine.types import DRAFTERS, VERIFIERS
from policies.config import PolicyConfig, PolicyName

with warnings.catch_warnings():  # Ray 2.60 declares its models in a way that this pydantic deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        RayActorOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

# Deprecated for an environment variable, but the field is what Ray 2.60 acts on, and a file can carry it.
pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")

FILES = ["serve_config.yaml", "serve_config.gpu.yaml"]


def load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text("utf-8")))


def unknown_keys(config: dict[str, Any]) -> list[str]:
    """Return the keys, at any level, for which Serve has no field and which it would silently drop."""
    found = _unknown("", config, ServeDeploySchema)
    found += _unknown("http_options.", config.get("http_options", {}), HTTPOptionsSchema)
    for application in config.get("applications", []):
        found += _unknown("application.", application, ServeApplicationSchema)
        for deployment in application.get("deployments", []):
            found += _unknown("deployment.", deployment, DeploymentSchema)
            found += _unknown("autoscaling_config.", deployment.get("autoscaling_config", {}), AutoscalingConfig)
            found += _unknown("ray_actor_options.", deployment.get("ray_actor_options", {}), RayActorOptionsSchema)
    return found


def _unknown(prefix: str, fields: dict[str, Any], model: type[BaseModel]) -> list[str]:
    return [prefix + name for name in fields if name not in model.model_fields]


def settings_of(config: dict[str, Any]) -> Settings:
    return Settings.model_validate(config["applications"][0]["args"])


def replica_of(config: dict[str, Any]) -> dict[str, Any]:
    (application,) = config["applications"]
    (replica,) = application["deployments"]
    return dict(replica)


def test_the_defaults_are_the_demo_pair() -> None:
    config = Settings().freeze("cpu")
    assert config == EngineConfig(
        target=str(ROOT / "models/demo/target"),
        draft=str(ROOT / "models/demo/eagle"),
        device="cpu",
        dtype="auto",
        policy=PolicyConfig(),
        max_waiting=48,
        most_threads=1,
    )
    assert (Path(config.target) / "config.json").is_file()
    assert Settings().name == "demo"


def test_strings_from_the_command_line_become_what_they_say() -> None:
    settings = Settings.model_validate(
        {"policy": "fixed", "spec_length": "4", "max_running": "2", "max_model_len": "128", "threads": "3"}
        | {"num_cpus": "0.5"}
    )
    config = settings.freeze("cpu")
    assert config.policy == PolicyConfig(name="fixed", k=4)
    assert (config.max_running, config.max_model_len, config.threads) == (2, 128, 3)
    assert settings.num_cpus == 0.5


@pytest.mark.parametrize("said", ["models/demo/draft models/demo/target", ["models/demo/draft", "models/demo/target"]])
def test_several_drafts_take_the_place_of_the_embedded_one(said: Any) -> None:
    settings = Settings.model_validate({"drafts": said, "drafter": "merged"})
    config = settings.freeze("cpu")
    assert config.draft is None
    assert config.drafts == config.draft_models == (str(ROOT / "models/demo/draft"), str(ROOT / "models/demo/target"))
    assert config.drafter == "merged"
    assert Settings().freeze("cpu").draft_models == (str(ROOT / "models/demo/eagle"),)


def test_the_forms_of_the_weights_reach_the_engine() -> None:
    config = Settings.model_validate(
        {"target_weights": "int8", "draft_weights": "int8", "quantize_head": "false"}
        | {"products": "packed", "deterministic": "true"}
    ).freeze("cpu")
    assert (config.target_weights, config.draft_weights, config.quantize_head) == ("int8", "int8", False)
    assert (config.products, config.deterministic) == ("packed", True)


def test_graphs_reach_an_engine_on_cuda() -> None:
    settings = Settings.model_validate({"graphs": "true", "device": "cuda"})
    assert settings.freeze("cuda").graphs
    assert Settings().freeze("cuda").graphs
    assert not Settings().freeze("cpu").graphs
    assert not Settings(cache="slotted").freeze("cuda").graphs
    assert not Settings(graphs=False).freeze("cuda").graphs
    with pytest.raises(ValidationError, match="graphs need device cuda and cache paged, not cpu and paged"):
        Settings.model_validate({"graphs": "true"})


def test_what_the_cache_may_take_reaches_the_engine() -> None:
    config = Settings.model_validate(
        {
            "block_size": "32",
            "kv_tokens": "4096",
            "suffix_tokens": "0",
            "prefix_cache": "false",
            "max_demand": "2.5",
            "max_prompt_tokens": "9000",
            "request_timeout_s": "60",
        }
    ).freeze("cpu")
    assert (config.cache, config.block_size, config.kv_tokens, config.memory_fraction) == ("paged", 32, 4096, None)
    assert (config.prefix_cache, config.max_demand, config.request_timeout_s) == (False, 2.5, 60.0)
    assert config.max_prompt_tokens == 9000
    assert (config.suffix_tokens, Settings().freeze("cpu").suffix_tokens) == (0, 65_536)
    assert Settings().freeze("cpu").max_prompt_tokens == 131_072
    assert Settings.model_validate({"memory_fraction": "0.5"}).freeze("cpu").memory_fraction == 0.5
    assert Settings.model_validate({"cache": "slotted"}).freeze("cpu").cache == "slotted"


@pytest.mark.parametrize(
    ("said", "meant"),
    [("true", True), ("True", True), (True, True), ("false", False), ("False", False), (False, False)],
)
def test_the_prefix_cache_is_on_or_off_in_yaml_and_on_the_command_line(said: Any, meant: bool) -> None:
    assert Settings.model_validate({"prefix_cache": said}).freeze("cpu").prefix_cache is meant


def test_whether_the_checkpoints_sampling_defaults_hold_reaches_the_engine() -> None:
    assert Settings().freeze("cpu").generation_config == "auto"
    assert Settings.model_validate({"generation_config": "none"}).freeze("cpu").generation_config == "none"
    with pytest.raises(ValidationError, match="generation_config"):
        Settings.model_validate({"generation_config": "vllm"})


@pytest.mark.parametrize("name", ["block_size", "kv_tokens", "memory_fraction", "request_timeout_s"])
@pytest.mark.parametrize("none", ["none", "", None])
def test_limits_of_the_cache_can_be_left_to_the_engine(name: str, none: str | None) -> None:
    assert getattr(Settings.model_validate({name: none}).freeze("cpu"), name) is None


@pytest.mark.parametrize("none", ["none", "None", "", "null", None])
def test_none_can_be_said_on_the_command_line(none: str | None) -> None:
    settings = Settings.model_validate({"draft": none, "max_model_len": none, "threads": none, "model_name": none})
    assert (settings.draft, settings.max_model_len, settings.threads, settings.model_name) == (None,) * 4
    assert settings.freeze("cpu").draft is None


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("auto", "cpu", "auto"),  # the engine decides: only the replica sees the GPU
        ("auto", "cuda", "auto"),
        ("float16", "cuda", "float16"),
        ("float64", "cpu", "float64"),
        ("float32", "cuda", "float32"),
    ],
)
def test_dtype_is_left_to_the_engine_unless_given(dtype: str, device: Any, expected: str) -> None:
    config = Settings.model_validate({"dtype": dtype}).freeze(device)
    assert (config.dtype, config.device) == (expected, device)


@pytest.mark.parametrize(
    ("drafter", "expected", "policy"),
    [
        ("auto", None, "heuristic"),
        ("off", None, "off"),
        (False, None, "off"),
        ("model", "model", "heuristic"),
        ("cascade", "cascade", "heuristic"),
    ],
)
def test_drafter_is_a_name_or_left_to_the_engine_or_off(drafter: Any, expected: str | None, policy: str) -> None:
    config = Settings.model_validate({"drafter": drafter, "policy": "heuristic"}).freeze("cpu")
    assert (config.drafter, config.policy.name) == (expected, policy)


def test_off_needs_no_quotes_in_yaml() -> None:
    assert Settings.model_validate(yaml.safe_load("drafter: off")).drafter == "off"
    assert Settings.model_validate(yaml.safe_load("policy: off")).policy == "off"
    assert PolicySettings.model_validate(yaml.safe_load("policy: off")).freeze().name == "off"


def test_traces_are_packed_unless_said_otherwise() -> None:
    assert Settings().edge() == EdgeConfig("demo", TraceConfig("packed", 0.0), None, 10)
    assert Settings.model_validate(yaml.safe_load("trace_level: off")).edge().traces.level == "off"
    for level in get_args(TraceLevel):
        assert Settings.model_validate({"trace_level": level}).edge().traces.level == level
    assert Settings.model_validate({"api_key_file": "keys.txt"}).edge().api_key_file == str(ROOT / "keys.txt")


def test_trace_ids_lead_where_the_operator_says() -> None:
    url = "https://traces.example/trace/{trace_id}?view=all"
    assert Settings().edge().trace_viewer_url is None
    assert Settings.model_validate({"trace_viewer_url": "none"}).edge().trace_viewer_url is None
    assert Settings.model_validate({"trace_viewer_url": url}).edge().trace_viewer_url == url


def test_a_chat_template_is_a_file_or_a_name() -> None:
    def chat(**said: str | None) -> ChatConfig:
        return Settings.model_validate(said).edge().chat

    assert chat() == chat(chat_template="none", reasoning_tags="none") == ChatConfig(None, None)
    assert chat(chat_template="tool_use").template == "tool_use"
    assert chat(chat_template="own.jinja").template == str(ROOT / "own.jinja")
    assert chat(chat_template="/x/own").template == "/x/own"
    assert chat(reasoning_tags="<think> </think>").reasoning_tags == ("<think>", "</think>")
    assert Settings.model_validate({"reasoning_tags": ["<a b>", "<c>"]}).edge().chat.reasoning_tags == ("<a b>", "<c>")
    for wrong in ("<think>", "a b c"):
        with pytest.raises(ValidationError):
            chat(reasoning_tags=wrong)


def test_every_policy_can_be_set() -> None:
    for name in get_args(PolicyName):
        assert Settings.model_validate({"policy": name}).freeze("cpu").policy == PolicyConfig(name=name)
        assert PolicySettings.model_validate({"policy": name}).freeze() == PolicyConfig(name=name)


def test_what_may_change_live_has_the_policys_own_parameters_and_defaults() -> None:
    assert PolicySettings().freeze() == PolicyConfig()
    fields = {"policy" if f.name == "name" else f.name for f in dataclasses.fields(PolicyConfig)}
    assert PolicySettings.model_fields.keys() == fields | {"draft"}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, "/started"),
        ({"draft": "none"}, None),
        ({"draft": None}, None),
        ({"draft": "models/demo/draft"}, str(ROOT / "models/demo/draft")),
        ({"draft": "owner/name@main"}, "hf://owner/name@main"),
    ],
)
def test_a_live_draft_is_read_as_the_arguments_one(said: dict[str, Any], meant: str | None) -> None:
    started = EngineConfig(target="/target", draft="/started")
    assert PolicySettings.model_validate(said).draft_of(started) == meant


def test_a_live_draft_that_conflicts_is_refused_before_the_start() -> None:
    arguments = {"target": "t", "drafts": "a b"}
    assert read_settings(arguments, {"policy": "off"}).drafts == ("a", "b")
    with pytest.raises(ConfigError, match="cannot replace the drafts"):
        read_settings(arguments, {"draft": "c"})
    with pytest.raises(ConfigError, match="drafter 'model' needs a draft checkpoint"):
        read_settings({"target": "t", "draft": "d", "drafter": "model"}, {"draft": "none"})


def test_every_live_setting_reaches_the_policy() -> None:
    said = {
        "policy": "confidence",
        "k": "3",
        "max_k": "7",
        "threshold": "0.3",
        "hysteresis": "0",
        "probe_share": "0.05",
        "trees": "true",
    }
    meant = PolicyConfig(name="confidence", k=3, max_k=7, threshold=0.3, hysteresis=0.0, probe_share=0.05, trees=True)
    assert PolicySettings.model_validate(said).freeze() == meant
    assert PolicySettings.model_validate(said | {"max_k": "none"}).freeze().max_k is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"polcy": "off"}, "polcy"),
        ({"name": "off"}, "name"),
        ({"policy": "fast"}, "policy"),
        ({"policy": True}, "policy"),
        ({"k": -1}, "k"),
        ({"k": 2.5}, "k"),
        ({"k": True}, "k"),
        ({"k": None}, "k"),
        ({"max_k": -1}, "max_k"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"hysteresis": -0.1}, "hysteresis"),
        ({"hysteresis": 1}, "hysteresis"),
        ({"hysteresis": float("inf")}, "hysteresis"),
        ({"probe_share": -0.1}, "probe_share"),
        ({"probe_share": 0.6}, "probe_share"),
        ({"probe_share": True}, "probe_share"),
        ({"trees": 2}, "trees"),
        ({"trees": "some"}, "trees"),
        ({"draft": 5}, "draft"),
        ({"draft": ["a", "b"]}, "draft"),
        ("goodput", "dictionary"),
        (["goodput"], "dictionary"),
        (None, "dictionary"),
    ],
)
def test_a_bad_live_setting_is_refused_by_name(fields: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        PolicySettings.model_validate(fields)


def test_the_engines_drafters_and_verifiers_can_be_set() -> None:
    for name in DRAFTERS:
        drafts = {"drafts": "a b"} if name == "merged" else {}
        assert Settings.model_validate({"drafter": name, **drafts}).freeze("cpu").drafter == name
    for verifier in VERIFIERS:
        assert Settings.model_validate({"verifier": verifier}).freeze("cpu").verifier == verifier


@pytest.mark.parametrize(("num_cpus", "threads"), [(0.5, 1), (1, 1), (2, 2), (3.5, 3)])
def test_a_cpu_replica_has_no_more_threads_than_cpus(num_cpus: float, threads: int) -> None:
    settings = Settings(num_cpus=num_cpus)
    assert (settings.freeze("cpu").threads, settings.freeze("cpu").most_threads) == (None, threads)
    assert (settings.freeze("cuda").threads, settings.freeze("cuda").most_threads) == (None, None)
    assert Settings(num_cpus=num_cpus, threads=7).freeze("cpu").threads == 7


def test_directories_may_be_absolute_relative_or_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = Settings(target="/models/t", draft="~/d").freeze("cpu")
    assert (config.target, config.draft) == ("/models/t", "/home/someone/d")
    assert Settings(target="./pairs/t").freeze("cpu").target == str(ROOT / "pairs/t")


def test_the_name_is_given_or_the_directorys() -> None:
    assert Settings(target="/models/llama-8b/").name == "llama-8b"
    assert Settings(target="/models/llama-8b", model_name="mine").name == "mine"
    assert Settings(target=".").name == ROOT.name
    assert Settings(target="pairs/../llama-8b/.").name == "llama-8b"


@pytest.mark.parametrize("target", ["models/demo/target", "models/demo/target/", str(ROOT / "models/demo/target")])
def test_the_embedded_pair_is_demo_however_it_is_spelt(target: str) -> None:
    assert Settings(target=target).name == "demo"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"spec_lenght": 4}, "Extra inputs"),
        ({"spec_length": "many"}, "valid integer"),
        ({"spec_length": -1}, "greater than or equal to 0"),
        ({"spec_length": True}, "must be a number"),
        ({"spec_length": 17, "policy": "fixed"}, "max_spec_length"),
        ({"policy": "fast"}, "'goodput'"),
        ({"policy": True}, "'goodput'"),
        ({"policy": None}, "'goodput'"),
        ({"k": 4}, "Extra inputs"),
        ({"max_running": 0}, "greater than or equal to 1"),
        ({"max_running": 64}, "cannot hold one verification of every sequence"),
        ({"device": "tpu"}, "'auto', 'cpu' or 'cuda'"),
        ({"dtype": "int8"}, "'bfloat16'"),
        ({"target_weights": "int3"}, "'as_is', 'int8', 'int4' or 'fp8'"),
        ({"draft_weights": "int8", "draft": "none"}, "needs a draft checkpoint"),
        ({"target_weights": "fp8", "device": "cpu"}, "needs device cuda"),
        ({"drafter": "eagle"}, "'cascade'"),
        ({"drafter": True}, "'cascade'"),
        ({"drafter": "model", "draft": "none"}, "needs a draft checkpoint"),
        ({"drafter": "merged"}, "needs at least two draft checkpoints"),
        ({"draft": "a", "drafts": "b c"}, "are both set: set one of them"),
        ({"verifier": "typical"}, "'match', 'rejection' or 'block'"),
        ({"target": ""}, "at least 1 character"),
        ({"num_cpus": 0}, "greater than 0"),
        ({"num_cpus": "inf"}, "finite"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"cache": "radix"}, "'paged' or 'slotted'"),
        ({"block_size": 0}, "greater than or equal to 1"),
        ({"block_size": True}, "must be a number"),
        ({"kv_tokens": 0}, "greater than or equal to 1"),
        ({"kv_tokens": 1.5}, "valid integer"),
        ({"kv_tokens": 4096, "memory_fraction": 0.5}, "set one of them"),
        ({"kv_tokens": 4096, "cache": "slotted"}, "cannot be honoured by a slotted cache"),
        ({"memory_fraction": 0}, "greater than 0"),
        ({"memory_fraction": 1.01}, "between 0 and 1"),
        ({"memory_fraction": True}, "must be a number"),
        ({"prefix_cache": "maybe"}, "valid boolean"),
        ({"prefix_cache": None}, "valid boolean"),
        ({"max_demand": 0.9}, "at least 1"),
        ({"max_prompt_tokens": 0}, "greater than or equal to 1"),
        ({"max_prompt_tokens": "none"}, "valid integer"),
        ({"max_demand": "nan"}, "finite|greater than 0"),
        ({"max_demand": "inf"}, "finite"),
        ({"max_demand": "none"}, "valid number"),
        ({"request_timeout_s": 0}, "greater than 0"),
        ({"request_timeout_s": True}, "must be a number"),
        ({"request_timeout_s": "inf"}, "finite"),
        ({"trace_level": "all"}, "'packed' or 'rounds'"),
        ({"trace_steps": 1.01}, "less than or equal to 1"),
        ({"trace_steps": -0.01}, "greater than or equal to 0"),
        ({"trace_steps": True}, "must be a number"),
        ({"trace_viewer_url": "http://localhost:16686/trace/"}, r"\{trace_id\} in place of the trace's id"),
        ({"trace_viewer_url": "javascript:alert('{trace_id}')"}, "http or https URL"),
    ],
)
def test_a_bad_setting_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Settings.model_validate(fields)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_valid_for_serve_and_for_us(name: str) -> None:
    config = load(name)
    ServeDeploySchema.model_validate(config)
    AutoscalingConfig.model_validate(replica_of(config)["autoscaling_config"])
    assert unknown_keys(config) == []
    assert settings_of(config)
    assert PolicySettings.model_validate(replica_of(config)["user_config"]).policy == "goodput"


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_in_one_place_who_chooses_k(name: str) -> None:
    """A user_config overrides the arguments, so such an argument would have no effect."""
    assert not {"policy", "spec_length"} & load(name)["applications"][0]["args"].keys()


def test_the_default_file_explains_every_live_setting() -> None:
    text = (ROOT / "serve_config.yaml").read_text("utf-8")
    section = text[text.index("user_config:") : text.index("autoscaling_config:")]
    assert {line.strip().removeprefix("# ").partition(":")[0] for line in section.splitlines()[1:] if line.strip()} == (
        PolicySettings.model_fields.keys()
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_listens_on_this_machine_only(name: str) -> None:
    assert load(name)["http_options"] == {"host": "127.0.0.1", "port": 8000}


@pytest.mark.parametrize("name", FILES)
def test_a_new_replica_starts_before_sequences_have_to_wait(name: str) -> None:
    config = load(name)
    settings, replica = settings_of(config), replica_of(config)
    assert replica["autoscaling_config"]["target_ongoing_requests"] < settings.max_running
    assert "max_ongoing_requests" not in replica  # build.py's, which follows max_running and max_waiting


def test_the_default_file_leaves_cpu_or_gpu_to_the_builder() -> None:
    config = load("serve_config.yaml")
    assert "ray_actor_options" not in replica_of(config)
    assert settings_of(config).device == "auto"
    assert settings_of(config).freeze("cpu") == Settings().freeze("cpu")
    assert settings_of(config).name == "demo"


def test_the_gpu_file_asks_for_one_gpu_and_marks_its_placeholders() -> None:
    text = (ROOT / "serve_config.gpu.yaml").read_text("utf-8")
    config = load("serve_config.gpu.yaml")
    settings = settings_of(config)
    assert replica_of(config)["ray_actor_options"]["num_gpus"] == 1
    assert (settings.device, settings.dtype) == ("cuda", "bfloat16")
    assert text.count("/path/to/") == text.count("PLACEHOLDER") == 2


def _misspell(section: Callable[[dict[str, Any]], dict[str, Any]], name: str) -> dict[str, Any]:
    config = load("serve_config.gpu.yaml")
    section(config)[name] = 1
    return config


@pytest.mark.parametrize(
    ("section", "name", "found"),
    [
        (lambda config: config, "tracing_confg", "tracing_confg"),
        (lambda config: config["http_options"], "prot", "http_options.prot"),
        (lambda config: config["applications"][0], "arg", "application.arg"),
        (lambda config: _replica(config), "max_ongoing_request", "deployment.max_ongoing_request"),
        (lambda config: _replica(config)["autoscaling_config"], "max_replica", "autoscaling_config.max_replica"),
        (lambda config: _replica(config)["ray_actor_options"], "num_gpu", "ray_actor_options.num_gpu"),
    ],
)
def test_a_misspelt_key_that_serve_accepts_is_found(
    section: Callable[[dict[str, Any]], dict[str, Any]], name: str, found: str
) -> None:
    config = _misspell(section, name)
    ServeDeploySchema.model_validate(config)  # no complaint: this is why we look ourselves
    assert unknown_keys(config) == [found]


def _replica(config: dict[str, Any]) -> dict[str, Any]:
    replica: dict[str, Any] = config["applications"][0]["deployments"][0]
    return replica


def test_a_checkpoint_is_looked_for_where_the_settings_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica may have another working directory, with other directories in it."""
    launcher, replica = tmp_path / "launcher", tmp_path / "replica"
    (launcher / "mine/model").mkdir(parents=True)
    (replica / "Qwen/Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(launcher)
    configs = [Settings(target=name).freeze("cpu") for name in ("mine/model", "Qwen/Qwen3-8B")]
    monkeypatch.chdir(replica)
    assert configs[0].target == str(launcher / "mine/model")
    assert parse_hub_id(configs[1].target) == HubId("Qwen/Qwen3-8B", None)


@pytest.mark.parametrize("given", ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B@main"])
def test_a_hub_id_is_passed_on_and_is_the_default_name(given: str) -> None:
    settings = Settings(target=given, draft="Qwen/Qwen3-0.6B")
    config = settings.freeze("cpu")
    assert (config.target, config.draft) == (f"hf://{given}", "hf://Qwen/Qwen3-0.6B")
    assert settings.name == "Qwen/Qwen3-8B"
    assert Settings(target=given, model_name="mine").name == "mine"


@pytest.mark.parametrize("given", ["models/demo", "./models/none", "models/none/target", "/models/none"])
def test_a_path_is_no_hub_id(given: str) -> None:
    """`models/demo` is a directory of this repository; the others are spelt as paths."""
    config = Settings(target=given).freeze("cpu")
    assert config.target == str(ROOT / given)


def test_what_is_left_out_is_the_engines_default() -> None:
    ours, engines = Settings().freeze("cpu"), EngineConfig("")
    differing = {f.name for f in dataclasses.fields(EngineConfig) if getattr(ours, f.name) != getattr(engines, f.name)}
    assert differing == {"target", "draft", "dtype", "most_threads"}
