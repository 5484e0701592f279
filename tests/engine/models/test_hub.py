"""Checkpoints from a hub: the real client against a hub on this machine, with each thing that can go wrong."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.loading.hub_id import HubId, parse_hub_id
from engine.models import hub as hub_module
from engine.models.hub import checkpoint_directory
from engine.models.weight_files import INDEX, WEIGHTS
from tests.engine.models.hub_server import Files, Hub, commit, serving

ROOT = Path(__file__).resolve().parents[3]
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
WANTED: Files = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"tokenizer": 1}',
    "tokenizer.model": b"sentencepiece",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    INDEX: json.dumps({"weight_map": SHARDS}).encode(),
    SHARDS["a"]: b"first" * 1000,
    SHARDS["b"]: b"second" * 1000,
}
NOT_WANTED: Files = {
    "README.md": b"# A model",
    "modeling_own.py": b"raise SystemExit",
    "pytorch_model.bin": b"\x80\x04.",
    "consolidated.safetensors": b"the same weights again",
    "original/params.json": b"{}",
    "original/chat_template.jinja": b"older",
    "additional_chat_templates/older/tool_use.jinja": b"older",
    "onnx/model.safetensors": b"others",
    "tokenizer.tiktoken": b"ranks",
}

# A process with an environment of its own: the client reads it when it is imported. The client's pauses between two
# tries are left out, and it writes chunks of 1,000 bytes. After a line `full` the disk is full.
CLIENT = """
import errno, json, logging, sys, time
time.sleep = lambda seconds: None
from huggingface_hub import constants, file_download
constants.DOWNLOAD_CHUNK_SIZE = 1000
from engine.config import ConfigError
from engine.models.hub import checkpoint_directory

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("engine").addHandler(handler)
logging.getLogger("engine").setLevel(logging.INFO)

def full(*args, **options):
    raise OSError(errno.ENOSPC, "No space left on device")

for line in sys.stdin:
    if line.strip() == "full":
        file_download.http_get = full
        continue
    lines.clear()
    try:
        reply = {"directory": checkpoint_directory(line.strip()), "refused": ""}
    except ConfigError as error:
        reply = {"directory": "", "refused": str(error)}
    print(json.dumps(reply | {"log": lines}), flush=True)
"""


@dataclass
class Client:
    process: "subprocess.Popen[str]"
    log: list[str]

    def ask(self, given: str) -> dict[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(given + "\n")
        self.process.stdin.flush()
        reply: dict[str, str] = json.loads(self.process.stdout.readline())
        self.log = list(reply["log"])
        return reply

    def directory(self, given: str) -> Path:
        reply = self.ask(given)
        assert reply["refused"] == ""
        return Path(reply["directory"])

    def refused(self, given: str) -> str:
        reply = self.ask(given)
        assert reply["directory"] == ""
        assert "\n" not in reply["refused"]
        return reply["refused"]

    def fill_the_disk(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("full\n")


@contextmanager
def client(url: str, home: Path, **environment: str) -> Iterator[Client]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=kept | settings | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield Client(process, [])


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def shared_client(server: Hub, home: Path) -> Iterator[Client]:
    with client(server.url, home) as shared:
        yield shared


@pytest.fixture
def asked(shared_client: Client, server: Hub) -> Client:
    """The client without a token. The hub is whole again and has forgotten all requests."""
    server.gated.clear()
    server.status.clear()
    server.cut.clear()
    server.requests.clear()
    return shared_client


def offer(server: Hub, model: str, **changes: Files) -> None:
    """Put a model with these revisions into the hub; without any, a whole model in `main`."""
    server.models[model] = changes or {"main": WANTED | NOT_WANTED}


def files_of(directory: Path) -> Files:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_only_what_is_needed_is_downloaded_and_only_once(asked: Client, server: Hub) -> None:
    offer(server, "some/model")
    directory = asked.directory("some/model")
    assert files_of(directory) == WANTED
    assert directory.name == commit("some/model", "main")
    assert server.fetched() == sorted(WANTED)
    assert "GiB from http://127.0.0.1" in asked.log[0]
    server.requests.clear()
    assert asked.directory("some/model") == directory
    assert server.fetched() == []
    assert asked.log == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(asked: Client, server: Hub) -> None:
    single = {"config.json": b"{}", WEIGHTS: b"weights"}
    offer(server, "some/revised", main=single | {WEIGHTS: b"others"}, tuned=single)
    for revision in ("tuned", commit("some/revised", "tuned")):
        directory = asked.directory(f"some/revised@{revision}")
        assert files_of(directory) == single
    assert "no revision 'other' at http" in asked.refused("some/revised@other")


def test_a_transfer_that_breaks_off_is_resumed(asked: Client, server: Hub) -> None:
    offer(server, "some/resumed")
    server.cut[SHARDS["b"]] = 1
    assert files_of(asked.directory("some/resumed")) == WANTED
    ranges = [r for method, path, r in server.requests if method == "GET" and path.endswith(SHARDS["b"])]
    assert ranges == [None, f"bytes={len(WANTED[SHARDS['b']]) // 2}-"]


def test_a_hub_that_stops_half_way(asked: Client, server: Hub) -> None:
    offer(server, "some/stopped")
    server.cut[SHARDS["b"]] = 1000
    message = asked.refused("some/stopped")
    assert message.startswith("the download of some/stopped broke off: ")
    assert message.endswith("start again: complete files are kept")
    server.cut.clear()
    server.requests.clear()
    assert files_of(asked.directory("some/stopped")) == WANTED
    assert server.fetched() == [SHARDS["b"]], "what had come is not fetched again"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (500, "answered 500, and some/failing is not in the cache"),
        (401, "answered 401 for some/failing: set HF_TOKEN to a token that may read it"),
        (403, "answered 403 for some/failing: set HF_TOKEN to a token that may read it"),
        (404, "there is no directory some/failing, and http"),
    ],
)
def test_a_hub_that_refuses_the_listing(asked: Client, server: Hub, status: int, reason: str) -> None:
    offer(server, "some/failing")
    server.status["/api/models/some/failing"] = status
    assert reason in asked.refused("some/failing")
    assert server.fetched() == []


def test_a_hub_that_fails_at_a_file(asked: Client, server: Hub) -> None:
    offer(server, "some/half")
    server.status[f"resolve/{commit('some/half', 'main')}/{SHARDS['b']}"] = 500
    message = asked.refused("some/half")
    assert message.startswith("the download of some/half broke off: http")
    assert "answered 500" in message


def test_a_model_that_the_hub_does_not_have(asked: Client) -> None:
    message = asked.refused("no/model")
    assert message.startswith("there is no directory no/model, and http://127.0.0.1")
    assert message.endswith("has no model of that name, or it is private: set HF_TOKEN to a token that may read it")


def test_a_gated_model_needs_a_token(asked: Client, server: Hub, tmp_path: Path) -> None:
    offer(server, "some/gated")
    server.gated["some/gated"] = "right"
    message = asked.refused("some/gated")
    assert message.startswith(f"some/gated is gated at {server.url}: accept its terms at {server.url}/some/gated; ")
    assert message.endswith("set HF_TOKEN to a token that may read it")
    with client(server.url, tmp_path, HF_TOKEN="right") as trusted:
        assert files_of(trusted.directory("some/gated")) == WANTED
        server.gated["some/gated"] = "another"
        assert trusted.refused("some/gated").endswith("the account of HF_TOKEN has no access")
    with client(server.url, tmp_path, HF_TOKEN="wrong") as mistaken:
        assert mistaken.refused("some/gated") == f"{server.url} answered 401 for some/gated: HF_TOKEN is not valid"


def test_a_hub_that_is_down_leaves_the_cache(asked: Client, server: Hub) -> None:
    offer(server, "some/cached")
    directory = asked.directory("some/cached")
    server.status["/api/"] = 503
    assert asked.directory("some/cached") == directory
    assert asked.log == [
        f"{server.url} answered 503: serving some/cached from the cache, commit {commit('some/cached', 'main')}"
    ]


def test_offline_only_the_cache_is_read(asked: Client, server: Hub, home: Path) -> None:
    for name in ("some/kept", "some/partial"):
        offer(server, name)
        directory = asked.directory(name)
    (directory / SHARDS["b"]).unlink()
    server.requests.clear()
    with client(server.url, home, HF_HUB_OFFLINE="1") as offline:
        assert files_of(offline.directory("some/kept")) == WANTED
        missing = f"HF_HUB_OFFLINE is set, and some/new is not in the cache {home}/hub"
        assert offline.refused("some/new") == missing
        assert offline.refused("some/partial").endswith(f"some/partial is not in the cache {home}/hub completely")
    assert server.requests == []


def test_nobody_listens(tmp_path: Path) -> None:
    with serving() as hub:
        url = hub.url
    with client(url, tmp_path) as alone:
        message = alone.refused("some/model")
    assert message.startswith(f"{url} cannot be reached (")
    assert "and some/model is not in the cache" in message


def test_a_full_disk(server: Hub, tmp_path: Path) -> None:
    offer(server, "some/large")
    with client(server.url, tmp_path) as full:
        full.fill_the_disk()
        message = full.refused("some/large")
    assert f"must be downloaded to {tmp_path}/hub, and its disk is full: free some of it, or set HF_HOME" in message


@pytest.mark.parametrize(
    ("model", "files", "reason"),
    [
        ("pickle", {"config.json": b"{}", "pytorch_model.bin": b"\x80"}, "pytorch_model.bin is a pickle"),
        ("gguf", {"config.json": b"{}", "model.gguf": b"GGUF"}, "holds no model.safetensors (other weight formats"),
        ("bare", {WEIGHTS: b"weights"}, "holds no config.json"),
        (
            "outside",
            {"config.json": b"{}", INDEX: b'{"weight_map": {"a": "../a.safetensors"}}'},
            "outside of its directory",
        ),
        (
            "missing",
            {"config.json": b"{}", INDEX: b'{"weight_map": {"a": "a.safetensors"}}'},
            "does not hold a.safetensors",
        ),
    ],
)
def test_models_that_cannot_be_served(asked: Client, server: Hub, model: str, files: Files, reason: str) -> None:
    offer(server, f"some/{model}", main=files)
    assert reason in asked.refused(f"some/{model}")
    assert not any(name.endswith((".bin", ".gguf", ".safetensors")) for name in server.fetched())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Qwen/Qwen3-8B", HubId("Qwen/Qwen3-8B", None)),
        ("Qwen/Qwen3-8B@refs/pr/3", HubId("Qwen/Qwen3-8B", "refs/pr/3")),
        ("a/b@main", HubId("a/b", "main")),
        ("hf://a/b@main", HubId("a/b", "main")),
        ("hf://a", None),
        ("/models/a", None),
        ("./models/a", None),
        ("../a", None),
        ("~/a", None),
        ("models/demo/target", None),
        ("model", None),
        ("a/b@", None),
        ("a/", None),
    ],
)
def test_what_names_a_model_of_the_hub(given: str, expected: HubId | None) -> None:
    assert parse_hub_id(given) == expected


def test_a_directory_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert checkpoint_directory("some/model") == "some/model"
    assert parse_hub_id("some/other") is not None
    assert parse_hub_id("hf://some/model") == HubId("some/model", None)


def test_code_of_the_checkpoint_is_told_and_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "own.Config"}}', "utf-8")
    with caplog.at_level(logging.WARNING, "engine"):
        assert checkpoint_directory(str(tmp_path)) == str(tmp_path)
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path} names code of its own in config.json (auto_map); it is never run"
    ]
    caplog.clear()
    (tmp_path / "config.json").write_text("{}", "utf-8")
    checkpoint_directory(str(tmp_path))
    assert caplog.records == []


def test_progress_is_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blobs = tmp_path / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "before").write_bytes(bytes(50))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_module, "PROGRESS_S", 0.005)
    with caplog.at_level(logging.INFO, "engine"), hub_module._progress(HubId("some/model", None), 200):
        (blobs / "new.incomplete").write_bytes(bytes(100))
        while "some/model: 0.00 GiB of 0.00 GiB downloaded (50 %)" not in caplog.messages:
            pass
    assert caplog.messages[-1] == "some/model: downloaded"
