"""A request's rounds in the terminal, from a real HTTP server that tells what the live page is told."""

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.page.live import LivePage
from app.round_columns import COLUMNS
from app.telemetry.rounds_table import rounds_table
from engine.types import REASONS, RoundRecord
from scripts.trace import WHY, Look, RoundRow, drawing, main, report, rounds_of, strip
from tests.app.harness import PROMPT, call

Answer = tuple[int, Any]

ROUNDS: dict[str, list[Any]] = {
    "step": [40, 41, 42, 43, 44, 47],
    "k": [0, 3, 3, 0, 4, 4],
    "reason": [None, "policy", "load", "load", "cap", "policy"],
    "alpha": [0, 800, 750, 700, 700, 720],
    "drafted": [0, 3, 3, 0, 2, 4],
    "accepted": [0, 2, 0, 0, 2, 4],
    "emitted": [1, 3, 1, 1, 3, 5],
    "drafter": [None, "model", "model", None, "lookup", "model"],
    "batch": [1, 2, 2, 3, 2, 1],
    "began_us": [300, 5300, 9300, 13300, 15300, 20300],
    "draft_us": [0, 900, 900, 0, 20, 1200],
    "verify_us": [4500, 2500, 2600, 1500, 2400, 2500],
    "overhead_us": [100, 100, 100, 80, 90, 110],
}
CHOICE = {
    "index": 0,
    "finish_reason": "length",
    "drafter": "cascade",
    "verifier": "match",
    "policy": "goodput",
    "fixed_k": None,
    "k_max": 8,
    "rounds": ROUNDS,
}
TOLD = {
    "id": "cmpl-4b2a",
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "began_unix_ms": 1_763_737_442_500,
    "status": "ok",
    "error": None,
    "model": "demo",
    "prompt_tokens": 5,
    "output_tokens": 14,
    "queue_ms": 0.25,
    "ttft_ms": 5.0,
    "total_ms": 24.5,
    "choices": [CHOICE],
}
GOLDEN = """\
cmpl-4b2a  ok  demo  2025-11-21 15:04:02 UTC
5 + 14 tokens; queue 0.2 ms, first token 5.0 ms, total 24.5 ms
trace 4bf92f3577b34da6a3ce929d0e0e4736

choice 0: length; drafter cascade, verifier match, policy goodput, k at most 8
  4 │    ·█
  3 │ ░░ ·█
  2 │ █░ ██
  1 │ █░ ██
    │-pllcp
    │0
█ accepted  ░ rejected  · asked for, not offered
k: p policy  c cap  l load  - not chosen

why k       rounds  mean k  drafted  accepted    share  tokens
policy           2     3.5        7         6   85.7 %       8
cap              1     4.0        2         2  100.0 %       3
load             2     1.5        3         0    0.0 %       2
not chosen       1     0.0        0         0        -       1

slowest  step  at ms  total ms  draft  verify  rest  k  accepted  batch  drafter
0          40    0.3       4.6    0.0     4.5   0.1  0       0/0      1        -
5          47   20.3       3.8    1.2     2.5   0.1  4       4/4      1    model
2          42    9.3       3.6    0.9     2.6   0.1  3       0/3      2    model
1          41    5.3       3.5    0.9     2.5   0.1  3       2/3      2    model
4          44   15.3       2.5    0.0     2.4   0.1  4       2/2      2   lookup

14 tokens in 6 rounds, 4 of them with drafts: 2.33 tokens per round; 8 of 12 drafts accepted (66.7 %)
steps took 19.6 ms: draft 3.0, verify 16.0, rest 0.6
"""


class Server:
    """Answers by path; remembers what it was asked, with the key."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        seen = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append((self.path, self.headers.get("authorization")))
                status, body = answers.get(self.path, (404, {"error": {"message": "no such thing here"}}))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self._thread.join()
        self.http.server_close()


Serve = Callable[[dict[str, Answer]], Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Server] = []

    def start(answers: dict[str, Answer]) -> Server:
        started.append(Server(answers))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_request_as_it_is_shown(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve({"/ui/api/requests/cmpl-4b2a": (200, TOLD)})
    assert main(["cmpl-4b2a", "--url", server.url]) == 0
    assert capsys.readouterr().out == GOLDEN
    assert server.asked == [("/ui/api/requests/cmpl-4b2a", None)]


def test_ids_go_to_the_server_as_they_are_given(serve: Serve) -> None:
    server = serve({"/ui/api/requests/4b2a": (200, TOLD), "/ui/api/requests/a%2F..%20%3Fb": (200, TOLD)})
    assert main(["4b2a", "--url", server.url + "/"]) == 0
    assert main(["a/.. ?b", "--url", server.url]) == 0


def test_last_is_the_newest(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    latest = {"requests": [{"id": "cmpl-4b2a"}, {"id": "cmpl-old"}]}
    server = serve({"/ui/api/requests": (200, latest), "/ui/api/requests/cmpl-4b2a": (200, TOLD)})
    assert main(["last", "--url", server.url]) == 0
    assert capsys.readouterr().out == GOLDEN


def test_the_key_goes_with_every_request(serve: Serve) -> None:
    latest = {"requests": [{"id": "cmpl-4b2a"}]}
    server = serve({"/ui/api/requests": (200, latest), "/ui/api/requests/cmpl-4b2a": (200, TOLD)})
    assert main(["last", "--url", server.url, "--key", "k-1"]) == 0
    assert [key for _, key in server.asked] == ["Bearer k-1"] * 2


@pytest.mark.parametrize(
    ("name", "answer", "options", "says"),
    [
        ("gone", (404, {"error": {"message": "this server keeps no request of that id"}}), [], "keeps no request"),
        ("gone", (404, b"<html>"), [], "404: Not Found"),
        ("locked", (401, {"error": {"message": "?"}}), [], "needs an API key: --key"),
        ("locked", (401, b""), ["--key", "wrong"], "refuses that API key"),
        ("odd", (200, b"<html>"), [], "something else than JSON"),
        ("odd", (200, b"\xff"), [], "something else than JSON"),
        ("odd", (200, {"id": "odd"}), [], "cannot read"),
        ("odd", (200, []), [], "cannot read"),
        ("odd", (200, TOLD | {"choices": [CHOICE | {"rounds": ROUNDS | {"k": [1]}}]}), [], "cannot read"),
    ],
)
def test_failures_say_what_is_wrong(
    name: str, answer: Answer, options: list[str], says: str, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve({f"/ui/api/requests/{name}": answer})
    assert main([name, "--url", server.url, *options]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("trace: ")
    assert says in shown.err
    assert len(shown.err.splitlines()) == 1


def test_there_may_be_no_last_request(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["last", "--url", serve({"/ui/api/requests": (200, {"requests": []})}).url]) == 1
    assert "has ended no request yet" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1", "127.0.0.1:8000"])
def test_only_http_is_asked(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x", "--url", url]) == 1
    assert "no http:// or https://" in capsys.readouterr().err


def test_no_server(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve({})
    server.stop()
    server.stop = lambda: None  # type: ignore[method-assign]
    assert main(["x", "--url", server.url]) == 1
    assert "no answer from" in capsys.readouterr().err
    assert main(["x", "--url", "http://127.0.0.1:x"]) == 1
    assert "no answer from" in capsys.readouterr().err


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def shown_on(stream: io.TextIOWrapper, told: dict[str, Any], serve: Serve, monkeypatch: pytest.MonkeyPatch) -> str:
    server = serve({"/ui/api/requests/x": (200, told)})
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["x", "--url", server.url]) == 0
    stream.seek(0)
    return stream.read()


def test_ascii_where_the_encoding_is_not_utf_8(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    shown = shown_on(stream, TOLD | {"model": "démo→"}, serve, monkeypatch)
    assert shown.splitlines()[5:11] == [
        "  4 |    .#",
        "  3 | -- .#",
        "  2 | #- ##",
        "  1 | #- ##",
        "    |-pllcp",
        "    |0",
    ]
    assert "démo?" in shown


def test_colour_on_a_terminal_only_and_not_against_the_users_wish(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def utf8(kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
        return kind(io.BytesIO(), encoding="utf-8")

    coloured = shown_on(utf8(Terminal), TOLD, serve, monkeypatch)
    assert "\x1b[32m█\x1b[0m" in coloured
    assert "\x1b[31m░\x1b[0m" in coloured
    assert shown_on(utf8(io.TextIOWrapper), TOLD, serve, monkeypatch) == GOLDEN
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown_on(utf8(Terminal), TOLD, serve, monkeypatch) == GOLDEN


def test_nothing_of_the_servers_reaches_the_terminal_as_a_command(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shown_on(
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), TOLD | {"model": "\x1b[2Jdemo"}, serve, monkeypatch
    )
    assert "\x1b" not in shown
    assert "?[2Jdemo" in shown


def a_round(**values: Any) -> RoundRow:
    return rounds_of({"rounds": {name: column[:1] for name, column in ROUNDS.items()}})[0]._replace(**values)


PLAIN = Look.of(100, unicode=False, colour=False)


def test_a_strip_wraps_to_the_width_and_goes_on_with_its_numbers() -> None:
    rounds = [a_round(k=1, drafted=1, accepted=i % 2, reason="policy") for i in range(23)]
    look = Look.of(16, unicode=False, colour=False)
    assert list(strip(rounds, look)) == [
        "  1 |-#-#-#-#-#-",
        "    |ppppppppppp",
        "    |0",
        "  1 |#-#-#-#-#-#",
        "    |ppppppppppp",
        "    |         20",
        "  1 |-",
        "    |p",
        "    |",
    ]
    assert all(len(line) <= 16 for line in strip(rounds, look))


def test_a_tall_strip_is_drawn_to_scale() -> None:
    rounds = [a_round(k=24, drafted=20, accepted=7), a_round(k=1, drafted=1, accepted=1)]
    lines = list(strip(rounds, PLAIN))
    cells = [line[5:] for line in lines[:-2]]
    assert len(cells) == 12
    assert lines[0].startswith(" 24 |")
    assert [row[0] for row in cells] == ["."] * 2 + ["-"] * 6 + ["#"] * 4
    assert cells[-1] == "##"
    assert "a row is 2 drafts" in "\n".join(report(TOLD | {"choices": [CHOICE | columns_of(rounds)]}, PLAIN))


def columns_of(rounds: list[RoundRow]) -> dict[str, Any]:
    return {"rounds": {name: [getattr(r, name) for r in rounds] for name in RoundRow._fields}}


def test_reasons_that_this_script_does_not_know_are_shown_too() -> None:
    shown = list(report(TOLD | {"choices": [CHOICE | columns_of([a_round(reason="new")])]}, PLAIN))
    assert "    |*" in shown
    assert any(line.startswith("new ") for line in shown)


def test_it_knows_every_reason_and_every_column() -> None:
    """The script must run without the rest of the project, so it spells them itself."""
    assert set(WHY) == {*REASONS, None}
    assert RoundRow._fields == tuple(COLUMNS)


def test_choices_and_requests_without_rounds() -> None:
    off = CHOICE | {"index": 1, "drafter": None, "k_max": 0, "fixed_k": 0, "finish_reason": None}
    off |= columns_of([a_round(), a_round()])
    none = {"rounds": {name: [] for name in RoundRow._fields}, "index": 2, "fixed_k": 3}
    shown = "\n".join(report(TOLD | {"choices": [CHOICE, off, CHOICE | none]}, PLAIN))
    assert "choice 1: not finished; speculation off" in shown
    assert "2 tokens in 2 rounds, 0 of them with drafts: 1.00 tokens per round; 0 of 0 drafts accepted (-)" in shown
    assert "policy goodput, k = 3\nno rounds" in shown
    nothing: dict[str, Any] = {
        "choices": [],
        "status": "error",
        "error": "engine_overloaded",
        "ttft_ms": None,
        "trace_id": None,
    }
    lines = list(report(TOLD | nothing, PLAIN))
    assert lines[0].startswith("cmpl-4b2a  error (engine_overloaded)  demo")
    assert "first token -," in lines[1]
    assert lines[2:] == ["trace -", "no rounds: the engine ran nothing of this request"]


def test_it_reads_what_the_live_page_is_told(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeEngineClient()
    app = create_app(client, live_page=LivePage(client))
    name = json.loads(call(app, PROMPT | {"n": 2, "max_tokens": 7}).reply)["id"]
    paths = ["/ui/api/requests", f"/ui/api/requests/{name}"]
    server = serve({path: (200, call(app, method="GET", path=path).reply) for path in paths})
    assert main(["last", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}  ok  fake  ")
    assert shown.count("7 tokens in 3 rounds, 3 of them with drafts") == 2
    assert shown.count("  1 │███\n") == 2


def test_every_round_is_a_row_on_demand(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve({"/ui/api/requests/cmpl-4b2a": (200, TOLD)})
    assert main(["cmpl-4b2a", "--url", server.url]) == 0
    assert "slowest" in capsys.readouterr().out
    assert main(["cmpl-4b2a", "--url", server.url, "--rounds"]) == 0
    shown = capsys.readouterr().out
    assert "slowest" not in shown
    first = next(i for i, line in enumerate(shown.splitlines()) if line.startswith("round "))
    rows = [line.split() for line in shown.splitlines()[first + 1 : first + 1 + len(ROUNDS["step"])]]
    assert [int(row[3]) for row in rows] == ROUNDS["k"]
    assert [row[4] for row in rows] == [why or "-" for why in ROUNDS["reason"]]
    assert [[int(n) for n in row[5:8]] for row in rows] == [
        list(counts) for counts in zip(ROUNDS["drafted"], ROUNDS["accepted"], ROUNDS["emitted"], strict=True)
    ]


def test_trees_are_drawn_in_the_table_of_all_rounds(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    record = RoundRecord(3, 0, 800, 3, 2, 3, 0, tree=(-1, 0, -1), path=(0, 1))
    trees = [None, {"parents": record.tree, "accepted": record.path}, None, None, None, None]
    server = serve({"/ui/api/requests/cmpl-4b2a": (200, TOLD | {"choices": [CHOICE | {"trees": trees}]})})
    assert main(["cmpl-4b2a", "--url", server.url, "--rounds"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("round "))
    assert [line.split()[-1] for line in lines[first : first + 4]] == ["tree", "-", "++/.", "-"]
    assert rounds_table([record]).split()[-1] == "++/.", "the traces draw the same"


@pytest.mark.parametrize("path", [(), (0,), (0, 1), (0, 2), (3,), (3, 4), (3, 5)])
def test_a_tree_is_drawn_as_in_the_traces(path: tuple[int, ...]) -> None:
    """Accepted drafts with their rank, rejected ones, those that nobody tried."""
    shape = (-1, 0, 0, -1, 3, 3)
    record = RoundRecord(6, 0, 800, 6, len(path), 1 + len(path), 0, tree=shape, path=path)
    assert drawing({"parents": list(shape), "accepted": list(path)}) == rounds_table([record]).split()[-1]


def test_ranks_above_nine_are_one_sign() -> None:
    assert drawing({"parents": [-1] * 12, "accepted": [10]}) == "/".join([*"xxxxxxxxxx", "9", "."])
