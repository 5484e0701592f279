"""Each mistake of a start that docs/operations.md lists: one sentence, exit status 1, before Ray starts."""

import json
import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

with warnings.catch_warnings():  # Ray 2.60 declares its models in a way that this pydantic deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from deployments.build import build
    from deployments.cluster import read_config
from deployments import checks, launch
from deployments.config_file import BUILDER, our_applications
from deployments.launch import main
from deployments.settings import ROOT, Settings
from engine.config import ConfigError
from engine.loading import checkpoint_files
from engine.memory.machine import DeviceMemory
from engine.profiling import machine_cpus

DEMO = ROOT / "models/demo/target"
Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("a cluster was started"))
    monkeypatch.setattr(launch.Signals, "listen", lambda self: None)
    monkeypatch.setattr(launch.Signals, "ignore", lambda self: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded target, to be damaged."""
    copy = tmp_path / "own"
    shutil.copytree(DEMO, copy)
    return copy


def start(folder: Path, args: dict[str, Any], port: int | str = 1) -> Path:
    """A configuration with these arguments. Port 1 is never listened at: the start must not get that far."""
    file = folder / "serve.yaml"
    application = {"import_path": "deployments.build:build", "args": args}
    http_options = {"host": "127.0.0.1", "port": port}
    file.write_text(yaml.safe_dump({"http_options": http_options, "applications": [application]}), "utf-8")
    return file


def refusal(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a start that ends with status 1."""
    assert main([str(file)]) == 1
    captured = capsys.readouterr()
    first, *others = captured.out.splitlines()
    assert first == f"foretoken: starting {file}"
    assert captured.err == ""
    (line,) = others
    return line.removeprefix(f"foretoken: {file}: ")


def edited(**fields: Any) -> Damage:
    def edit(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | fields), "utf-8")

    return edit


def unlinked(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def written(name: str, data: bytes) -> Damage:
    return lambda directory: (directory / name).write_bytes(data)


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no directory": (shutil.rmtree, "there is no directory {}: give the directory of a Hugging Face checkpoint"),
    "no config": (unlinked("config.json"), "{} holds no config.json: give the directory of a Hugging Face checkpoint"),
    "broken config": (written("config.json", b"{"), "{}: config.json is malformed: Expecting property name"),
    "unknown architecture": (edited(model_type="no_model"), "{} is a 'no_model' model; supported are llama, mistral"),
    "architecture": (edited(model_type=None), "{} is a None model; supported are llama, mistral"),
    "lacking": (edited(hidden_size=None), "{}: config.json lacks hidden_size"),
    "no tokenizer": (unlinked("tokenizer.json"), "{} holds no tokenizer.json. A conversion of another format"),
    "broken tokenizer": (written("tokenizer.json", b"{}"), "{}/tokenizer.json is malformed"),
    "no weights": (unlinked("model.safetensors"), "{} holds no model.safetensors (other weight formats are not read)"),
    "pickle": (pickled, "{} holds no model.safetensors; pytorch_model.bin is a pickle, and a pickle can run code"),
    "truncated": (written("model.safetensors", b"\xff" * 20), "{}/model.safetensors is truncated or no safetensors"),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_checkpoint_that_cannot_be_served(
    name: str, role: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGES[name]
    damage(checkpoint)
    pair = {"target": str(DEMO), "draft": str(DEMO)} | {role: str(checkpoint)}
    assert refusal(start(tmp_path, pair), capsys).startswith(f"{role}: {message.format(checkpoint)}")


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown setting": ({"max_runing": 4}, "there is no setting 'max_runing': did you mean 'max_running'?"),
    "out of range": ({"max_running": 0}, "max_running: Input should be greater than or equal to 1, not 0"),
    "no number": ({"drain_s": "soon"}, "drain_s: Input should be a valid number"),
    "no choice": ({"dtype": "int4"}, "dtype: Input should be 'auto', 'float64'"),
    "conflict": ({"kv_tokens": 4096, "memory_fraction": 0.5}, "kv_tokens and memory_fraction both say how large"),
    "too long": ({"max_model_len": 5000}, f"max_model_len 5000 is too long: target {DEMO} allows 2048"),
    "no such draft": ({"drafts": [str(DEMO), "/nope"]}, "drafts: there is no directory /nope: give the directory"),
    "no keys": ({"api_key_file": "/nope/keys"}, "api_key_file: /nope/keys cannot be read: No such file"),
    "no template": ({"chat_template": "/nope/a.jinja"}, "chat_template: there is no file /nope/a.jinja"),
    "no GPU": ({"device": "cuda"}, "device: cuda was asked for, and this machine has no GPU with a driver"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_setting_that_cannot_be_served(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, message = ARGUMENTS[name]
    monkeypatch.setattr(checks, "has_gpu", lambda: False)
    assert refusal(start(tmp_path, {"target": str(DEMO), "draft": "none"} | args), capsys).startswith(message)


def test_a_draft_of_another_vocabulary(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Tokenizer(WordLevel({"<unk>": 0, "другой": 1}, unk_token="<unk>")).save(str(checkpoint / "tokenizer.json"))
    line = refusal(start(tmp_path, {"target": str(DEMO), "draft": str(checkpoint)}), capsys)
    assert line.startswith(f"target {DEMO} and draft {checkpoint} share 0 of the target's")
    assert line.endswith("take a draft whose tokenizer is closer to the target's")


def test_weights_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "has_gpu", lambda: False)
    monkeypatch.setattr(checkpoint_files, "machine_memory", lambda: DeviceMemory(2**30, 2**20))
    monkeypatch.setattr(machine_cpus, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(machine_cpus, "find_spec", lambda name: None)
    line = refusal(start(tmp_path, {"target": str(DEMO), "draft": "none"}), capsys)
    assert line.startswith("the weights do not fit: they take 0.0")
    assert line.endswith("choose smaller models, a smaller dtype or int4 weights")
    monkeypatch.setattr(checkpoint_files, "machine_memory", lambda: DeviceMemory(2**40, 2**40))
    checks.check_models(Settings(target=str(DEMO)), "cpu")


@pytest.mark.parametrize(
    ("args", "flags", "message"),
    [
        (
            {"target_weights": "int8"},
            {"sse2", "avx2"},
            "int8 needs Numba, or a CPU with VNNI .*: install numba, or choose int4 .* or",
        ),
        (
            {"draft_weights": "int8"},
            {"sse2"},
            "int8 needs Numba, or a CPU with VNNI .*: install numba, or choose as",
        ),
        (
            {"draft_weights": "int4"},
            {"sse2"},
            "int4 needs a CPU with AVX2 instructions, and this one has none: choose as",
        ),
        ({"target_weights": "int8"}, {"avx2", "avx_vnni"}, None),
        ({"target_weights": "int4"}, {"avx2"}, None),
        ({"target_weights": "int8"}, set[str](), None),  # not known
    ],
)
def test_weights_that_this_cpu_has_no_products_for(
    args: dict[str, str], flags: set[str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(machine_cpus, "find_spec", lambda name: None)
    settings = Settings.model_validate({"target": str(DEMO), "draft": str(DEMO)} | args)
    if message is None:
        checks.check_models(settings, "cpu")
        return
    with pytest.raises(ConfigError, match=f"^{next(iter(args))} {message}"):
        checks.check_models(settings, "cpu")


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for written in (port, str(port)):  # Serve reads both
            line = refusal(start(tmp_path, {"target": str(DEMO), "draft": str(DEMO)}, written), capsys)
            assert line == f"port {port} of 127.0.0.1 is taken: end what listens there, or choose another port"
    checks.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "line 1, column 16: no YAML"),
        ("", "the file names no application; add one under `applications`"),
        ("applications: []", "the file names no application; add one under `applications`"),
        ("applications: [{import_path: deployments.build:build, args: 4}]", "args must be names and values, not int"),
        (
            "applications: [{import_path: deployments.build:build, deployments: "
            "[{name: Replica, user_config: {k: -1}}]}]",
            "user_config: k: Input should be greater than or equal to 0, not -1",
        ),
        (
            "applications: [{import_path: deployments.build:build, deployments: "
            "[{name: Replica, user_config: {policy: fixed, k: 99}}]}]",
            "policy fixed with k 99 exceeds max_spec_length, which is 16",
        ),
        (
            "applications: [{import_path: deployments.build:build, deployments: "
            "[{name: Replica, user_config: {draft: /none}}]}]",
            "user_config: draft: there is no directory /none: give the directory of a Hugging Face checkpoint",
        ),
    ],
)
def test_a_file_that_cannot_be_served(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text, "utf-8")
    assert refusal(file, capsys).startswith(message)


def test_what_is_malformed_is_left_to_serves_schema() -> None:
    document = {"applications": [4, {"import_path": BUILDER, "deployments": 4}]}
    (ours,) = our_applications(document)
    assert (ours.args, ours.user_config) == ({}, None)
    with pytest.raises(ValueError, match=r"applications\.1\.deployments: Input should be a valid list, not 4"):
        read_config(document)


def test_a_target_alone_has_no_draft_and_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # ends the start behind all other checks
        main([str(start(tmp_path, {"target": str(DEMO)}, taken.getsockname()[1]))])
    hint = capsys.readouterr().out.splitlines()[1]
    assert hint.startswith("foretoken: no draft is named, so decoding is plain")
    assert Settings(target=str(DEMO)).draft is None
    assert Settings(target=str(DEMO), draft="none").hint is None
    assert Settings().hint is None


# Counts what is imported: the reason why the answer comes within seconds.
IMPORTS = """
import sys
from deployments.launch import main
status = main(sys.argv[1:])
print(status, sorted({"ray", "torch", "transformers"} & sys.modules.keys()))
"""


def test_a_mistake_is_told_before_ray_and_torch_are_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, str(start(tmp_path, {"target": "/nope/target"}))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert "there is no directory /nope/target" in done.stdout.splitlines()[1]
    assert done.stdout.splitlines()[2:] == ["1 []"]


def test_a_hub_id_that_cannot_be_had(tmp_path: Path) -> None:
    file = start(tmp_path, {"target": "nobody/nothing-here", "draft": "none"})
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "deployments.launch", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    (line,) = done.stdout.splitlines()[1:]
    assert "target: HF_HUB_OFFLINE is set, and nobody/nothing-here is not in the cache" in line


def test_serve_run_ends_with_the_same_line() -> None:
    """The builder runs before Ray starts; Serve's own line comes first."""
    command = [str(Path(sys.executable).with_name("serve")), "run", "deployments.build:build", "target=/nope/target"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "foretoken: target: there is no directory /nope/target: give the directory of a Hugging Face checkpoint"
    )
    assert len((done.stdout + done.stderr).splitlines()) <= 3


def test_in_a_cluster_the_builder_raises_instead_of_ending_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^foretoken: there is no setting 'tagret': did you mean 'target'\?$"):
        build({"tagret": "x"})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="did you mean 'target'") as refused:
        build({"tagret": "x"})
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(("alive", "cpus", "checked"), [(1, 2.0, True), (2, 2.0, False), (1, 0.0, False)])
def test_files_are_looked_for_only_where_replicas_run(
    alive: int, cpus: float, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster of several machines the builder may run on one without the checkpoint."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}] * alive + [{"Alive": False}])
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": cpus})
    if checked:
        with pytest.raises(ValueError, match="there is no directory /nope"):
            build({"target": "/nope"})
    else:
        build({"target": "/nope"})


@pytest.mark.parametrize(("address", "checked"), [(None, False), ("", False), ("local", True), ("auto", False)])
def test_serve_run_may_join_a_cluster_that_has_other_machines(
    address: str | None, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and GPUs may be on those. `ray start` writes the cluster's address to this file."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379", "utf-8")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    if checked:
        with pytest.raises(SystemExit, match="there is no directory /nope"):
            build({"target": "/nope", "device": "cpu"})
    else:
        build({"target": "/nope", "device": "cuda"})
