"""The command `foretoken`: its options are the settings, and chat, trace and bench do what they say."""

import io
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

import pytest
from starlette.types import ASGIApp
from typer.testing import CliRunner

from app.fake_engine import FakeEngineClient
from app.main import create_app
from deployments.cli.__main__ import app as command
from deployments.cli.__main__ import benchmarks
from deployments.cli.chat import GREEN, PLAIN, Conversation, converse, printable
from deployments.settings import ROOT, Settings
from tests.app.harness import call


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configurations that would have been served."""
    documents: list[dict[str, Any]] = []

    def serve(read: Any, source: str, *, dry_run: bool) -> int:
        documents.append(read() | {"source": source, "dry_run": dry_run})
        return 3

    monkeypatch.setattr("deployments.launch.serve", serve)
    monkeypatch.chdir(os.getcwd())  # the command changes it
    return documents


def arguments_of(document: dict[str, Any]) -> dict[str, Any]:
    """Without num_cpus, which the machine decides."""
    (application,) = document["applications"]
    return {name: value for name, value in application["args"].items() if name != "num_cpus"}


@pytest.mark.parametrize(("given", "cpus"), [((), "12"), (("--num-cpus", "3"), "3")])
def test_the_only_replica_has_all_cpus_unless_told_otherwise(
    served: list[dict[str, Any]], given: tuple[str, ...], cpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.cli.options.usable_cpus", lambda: 12)
    run("serve", *given, status=3)
    assert served[0]["applications"][0]["args"]["num_cpus"] == cpus


def test_help_has_an_option_for_every_setting_with_its_text_and_default() -> None:
    shown = " ".join(run("serve", "--help").split())
    for name, field in Settings.model_fields.items():
        assert name == "target" or f"--{name.replace('_', '-')} " in shown
        assert field.description, f"{name} has no text"
        if name not in ("target", "draft") and field.default is not None:
            assert f"[default: {str(field.default).lower()}]" in shown
    assert "--cache paged|slotted" in shown
    assert "--max-running INTEGER" in shown


def test_settings_reach_the_builder_as_serve_run_would_give_them(served: list[dict[str, Any]]) -> None:
    run("serve", "--draft", "none", "--max-running", "4", "--prefix_cache", "false", "--port", "8123", status=3)
    (document,) = served
    assert arguments_of(document) == {"draft": "none", "max_running": "4", "prefix_cache": "false"}
    assert document["http_options"] == {"host": "127.0.0.1", "port": 8123}
    settings = Settings.model_validate(arguments_of(document))
    assert (settings.draft, settings.max_running, settings.prefix_cache) == (None, 4, False)


def test_without_a_target_it_is_the_embedded_pair(served: list[dict[str, Any]]) -> None:
    run("serve", "--dry-run", status=3)
    assert served[0]["dry_run"]
    assert arguments_of(served[0]) == {}
    assert Settings.model_validate({}).draft is not None


def test_paths_are_those_of_the_working_directory(
    served: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    run("serve", "own", "--draft", "./gone", "--api-key-file", "own", status=3)
    monkeypatch.chdir(tmp_path)
    run("serve", "owner/name", "--draft", "models/demo/draft", "--chat-template", "tool_use", status=3)
    assert arguments_of(served[0]) == {
        "target": f"{tmp_path}/own",
        "draft": f"{tmp_path}/gone",
        "api_key_file": f"{tmp_path}/own",
    }
    assert arguments_of(served[1]) == {
        "target": "owner/name",
        "draft": "models/demo/draft",
        "chat_template": "tool_use",
    }


def test_paths_of_several_drafts_are_those_of_the_working_directory(
    served: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    (folder / "own").mkdir(parents=True)
    monkeypatch.chdir(folder)
    run("serve", "--drafts", "own ./gone owner/name", status=3)
    run("serve", "--drafts", "none", status=3)
    several, none = map(arguments_of, served)
    assert several == {"drafts": [f"{folder}/own", f"{folder}/gone", "owner/name"]}
    assert Settings.model_validate(several).drafts == tuple(several["drafts"])
    assert Settings.model_validate(none).drafts == ()


def test_an_unknown_option_is_refused(served: list[dict[str, Any]]) -> None:
    assert "--max-runing" in run("serve", "--max-runing", "4", status=2)
    assert served == []


def test_help_imports_neither_torch_nor_ray() -> None:
    heavy = "{'ray', 'torch', 'transformers'}"
    script = f"import sys; import deployments.cli.__main__; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The programs that would have taken the place of this process."""
    commands: list[list[str]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        assert path == sys.executable
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
        commands.append(command[1:])
        raise SystemExit  # as a program of its own it never returns

    monkeypatch.setattr(os, "execve", execve)
    return commands


def test_a_trace_is_the_scripts_with_all_rounds(become: list[list[str]]) -> None:
    run("trace")
    run("trace", "cmpl-7", "--url", "http://h:1", "--key", "k")
    before = ["-P", "-m", "scripts.trace"]
    assert become == [
        [*before, "last", "--rounds", "--url", "http://127.0.0.1:8000"],
        [*before, "cmpl-7", "--rounds", "--url", "http://h:1", "--key", "k"],
    ]


def test_a_benchmark_gets_its_own_options(become: list[list[str]]) -> None:
    run("bench", "decode", "--spec", "off,4", "--help")
    assert become[0] == ["-P", "-m", "benchmarks.decode", "--spec", "off,4", "--help"]


def test_benchmarks_are_listed() -> None:
    assert {"decode", "load", "peers", "acceptance"} <= benchmarks().keys()
    assert "common" not in benchmarks()
    assert run("bench") == run("bench", "--help")
    assert "there is no benchmark 'decod'" in run("bench", "decod", status=1)
    assert "  decode      Speed of the engine" in run("bench")
    run("bench", "dekode", status=1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Bridge(BaseHTTPRequestHandler):
    """A socket in front of the real edge."""

    app: ASGIApp
    seen: list[tuple[str, Any, str | None]]

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        self.seen.append((self.path, body, self.headers["authorization"]))
        done = call(self.app, body, method=self.command, path=self.path)
        self.send_response(done.status)
        self.end_headers()
        self.wfile.write(done.reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def listening(handler: type[Bridge]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[tuple[str, type[Bridge]]]:
    handler = type("OwnBridge", (Bridge,), {"app": create_app(FakeEngineClient()), "seen": []})
    with listening(handler) as url:
        yield url, handler


def talk(url: str, said: str, out: TextIO, key: str | None = None, **parameters: Any) -> int:
    source = Terminal(said) if out.isatty() else io.StringIO(said)
    return converse(Conversation(url, key, "Be short.", {"max_completion_tokens": 5, **parameters}), source, out)


def test_a_conversation_without_a_terminal_is_plain_text(server: tuple[str, type[Bridge]]) -> None:
    url, bridge = server
    out = io.StringIO()
    assert talk(url, "first\n\nsecond\n", out, key="secret") == 0
    answers = out.getvalue().splitlines()
    assert [len(answer) for answer in answers] == [5, 5]
    (_, _, key), (path, first, _), (_, second, _) = bridge.seen
    assert (key, path) == ("Bearer secret", "/v1/chat/completions")
    system, question = {"role": "system", "content": "Be short."}, {"role": "user", "content": "first"}
    assert first["messages"] == [system, question]
    assert second["messages"][:3] == [system, question, {"role": "assistant", "content": answers[0]}]
    assert (first["model"], first["stream"], first["max_completion_tokens"]) == ("fake", True, 5)


def test_on_a_terminal_accepted_drafts_are_green(
    server: tuple[str, type[Bridge]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, coloured, silent = io.StringIO(), Terminal(), Terminal()
    assert talk(server[0], "first\n", plain, seed=1) == 0
    assert talk(server[0], "first\n/exit\nmore\n", coloured, seed=1) == 0
    assert "accepted drafts" in coloured.getvalue().splitlines()[0]
    answer = coloured.getvalue().partition("> ")[2]
    assert plain.getvalue().strip() in answer.replace(GREEN, "").replace(PLAIN, "")
    assert " drafts accepted, " in answer
    monkeypatch.setenv("NO_COLOR", "1")
    assert talk(server[0], "first\n", silent, seed=1) == 0
    assert "\x1b" not in silent.getvalue()


def test_a_refusal_is_told_and_the_conversation_goes_on(
    server: tuple[str, type[Bridge]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    assert talk(server[0], "first\nsecond\n", out, temperature=-1) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(error.startswith("foretoken: 400: temperature") for error in errors)
    assert server[1].seen[2][1]["messages"][1:] == [{"role": "user", "content": "second"}]


def test_no_server_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("http://127.0.0.1:1", "first\n", io.StringIO()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("foretoken: no answer from http://127.0.0.1:1: ")
    assert line.endswith("Connection refused. `foretoken serve` starts a server")


def test_nothing_of_the_model_reaches_the_terminal_as_a_command() -> None:
    assert printable("a\x1b[2Jb\n\tc\x07\x9b\u202e") == "a�[2Jb\n\tc���"


def test_writing_that_is_no_command_stays_as_it_is() -> None:
    text = "\u00e7a va\u00a0? \u4f60\u597d\u3000\U0001f469\u200d\U0001f680 \u0645\u06cc\u200c\u0631\u0648\u0645"
    assert printable(text) == text


class Raw(Bridge):
    """Answers every POST with one stream."""

    stream: bytes

    def do_POST(self) -> None:
        self.seen.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"]))), None))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.stream)


@pytest.fixture
def raw(server: tuple[str, type[Bridge]]) -> Iterator[tuple[str, type[Raw]]]:
    handler = type("OwnRaw", (Raw,), {"app": create_app(FakeEngineClient()), "seen": [], "stream": b""})
    with listening(handler) as url:
        yield url, handler


SAID = b'data: {"choices": [{"delta": {"content": "a\\u001b[2Jb"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_without_colour_a_terminal_gets_no_command_either(
    raw: tuple[str, type[Raw]], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw[1].stream = SAID + DONE
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, piped = Terminal(), io.StringIO()
    assert talk(raw[0], "first\n", terminal) == 0
    assert "a�[2Jb" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()
    assert talk(raw[0], "first\n", piped) == 0
    assert piped.getvalue() == "a\x1b[2Jb\n"


BROKEN = {
    "no end": (SAID, "the answer broke off"),
    "no UTF-8": (b'data: {"a": "\xff"}\n\n', "the answer broke off: "),
    "no JSON": (b"data: {\n\n", "the answer broke off: "),
    "an error": (b'data: {"error": {"message": "no\\u001b[2J"}}\n\n', "no�[2J"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_breaks_off_is_told_and_not_kept(
    name: str, raw: tuple[str, type[Raw]], capsys: pytest.CaptureFixture[str]
) -> None:
    raw[1].stream, reason = BROKEN[name]
    assert talk(raw[0], "first\nsecond\n", io.StringIO()) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(error.startswith(f"foretoken: {reason}") for error in errors)
    assert [message["content"] for message in raw[1].seen[-1][1]["messages"]] == ["Be short.", "second"]


def test_an_answer_can_be_stopped_before_it_begins(
    server: tuple[str, type[Bridge]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends nothing before the first token, so Ctrl-C may come while the request is still being opened."""
    real, interrupted = urllib.request.urlopen, [True]

    def opened(request: urllib.request.Request, **options: Any) -> Any:
        if request.data is not None and interrupted:
            interrupted.pop()
            raise KeyboardInterrupt
        return real(request, **options)

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    out = io.StringIO()
    assert talk(server[0], "first\nsecond\n", out) == 0
    assert out.getvalue().splitlines() == ["", "(stopped)", "Be sh"]
    assert [message["content"] for message in server[1].seen[-1][1]["messages"]] == ["Be short.", "second"]


def test_a_terminal_without_unicode_shows_what_it_can(raw: tuple[str, type[Raw]]) -> None:
    raw[1].stream = SAID.replace(b'"a', b'"\\u00e9') + DONE
    data = io.BytesIO()
    out = io.TextIOWrapper(data, "ascii")
    assert talk(raw[0], "first\n", out) == 0
    assert data.getvalue().startswith(b"?")


def test_the_script_finds_its_checkout_from_any_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a checkout" / ".venv" / "bin"
    folder.mkdir(parents=True)
    script = folder / "foretoken"
    script.write_bytes((ROOT / "scripts/foretoken").read_bytes())
    script.chmod(0o755)
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$@"\n', "utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        [script, "serve", "a b"], cwd="/", capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.stdout.splitlines() == [f"{tmp_path}/a checkout", "-P", "-m", "deployments.cli", "serve", "a b"]
