"""The serving benchmark against a small streaming server, with a clock that the server's stream moves."""

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks import serving
from engine.types import RequestRecord, StepStats


class Recorded:
    """An engine whose every request leaves the given record."""

    steps: list[StepStats] = []  # noqa: RUF012 - never written

    def __init__(self, record: RequestRecord) -> None:
        self.token_ids, self.record = [1], record

    def generate(self, prompts: object, params: object, k: object = None) -> list["Recorded"]:
        return [self]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    status, tail = 200, b"data: [DONE]\n\n"
    received: list[dict[str, object]]

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "demo"}]}')

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(b'data: {"choices": []}\n\n', self.tail)

    def _send(self, *chunks: bytes) -> None:
        self.send_response(self.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in (*chunks, b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the name and signature are http.server's."""


@pytest.fixture
def handler() -> type[Handler]:
    return type("FreshHandler", (Handler,), {"received": []})


@pytest.fixture
def port(handler: type[Handler]) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def connection(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    yield connection
    connection.close()


def test_the_clock_is_read_at_the_first_byte_and_at_the_end(
    connection: http.client.HTTPConnection, handler: type[Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes one tick per call: the first byte is one read, the rest another."""
    now = [0.0]
    read = http.client.HTTPResponse.read

    def ticking(response: http.client.HTTPResponse, amount: int | None = None) -> bytes:
        now[0] += 1
        return read(response, amount)

    monkeypatch.setattr(http.client.HTTPResponse, "read", ticking)
    monkeypatch.setattr("benchmarks.serving.time.perf_counter", lambda: now[0])
    assert serving.over_http(connection, "demo", [1, 2], 16) == serving.TimedText(1.0, 1.0)
    fields = {"model": "demo", "prompt": [1, 2], "max_tokens": 16, "temperature": 0, "stream": True}
    assert handler.received == [fields | {"ignore_eos": True}]


def test_the_served_model_is_asked_for(connection: http.client.HTTPConnection, handler: type[Handler]) -> None:
    assert serving.served_model(connection) == "demo"
    handler.status = 503
    with pytest.raises(RuntimeError, match="503"):
        serving.served_model(connection)


@pytest.mark.parametrize(("status", "tail"), [(429, b"data: [DONE]\n\n"), (200, b'data: {"error": {}}\n\n')])
def test_a_failed_stream_is_not_a_measurement(
    connection: http.client.HTTPConnection, handler: type[Handler], status: int, tail: bytes
) -> None:
    handler.status, handler.tail = status, tail
    with pytest.raises(RuntimeError, match=str(status)):
        serving.over_http(connection, "demo", [1], 16)


def test_sides_take_turns_and_warm_ups_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0)
    seen: list[tuple[str, int]] = []

    def side(name: str, prompt: list[int]) -> serving.TimedText:
        seen.append((name, prompt[0]))
        return serving.TimedText(float(len(seen)), 0.0)

    sides = [lambda p: side("a", list(p)), lambda p: side("b", list(p))]
    a, b = serving.alternate(sides, [[1], [2]])
    assert seen == [(name, prompt) for prompt in (1, 1, 1, 1, 2) for name in "ab"]
    assert [[text.first_s for text in texts] for texts in (a, b)] == [[7.0, 9.0], [8.0, 10.0]]


def test_time_to_first_token_in_process_is_from_arrival() -> None:
    """The queue and the prompt count."""
    record = RequestRecord("r", 0, 1, 0, arrived=5.0, admitted=6.0, first_token=7.5, finished=9.0)
    assert serving.in_process(Recorded(record), [1], 4) == serving.TimedText(2.5, 1.5)
    with pytest.raises(RuntimeError, match="no first token"):
        serving.in_process(Recorded(replace(record, first_token=None)), [1], 4)


def test_the_benchmark_against_the_server(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "PAUSE_S", 0)
    pair = ["--target", "models/demo/target", "--draft", "models/demo/draft", "--threads=1", "--json"]
    serving.main([*pair, "--url", f"http://127.0.0.1:{port}", "--prompts-count=2", "--max-tokens=4"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["side"] for row in rows] == ["http", "in process", "difference; ratio"]


def test_speed_is_compared_text_by_text() -> None:
    """The medians of both sides alone would say 1.0."""
    served = [serving.TimedText(0.005, 2.0), serving.TimedText(0.006, 8.0), serving.TimedText(0.010, 4.0)]
    local = [serving.TimedText(0.001, 1.0), serving.TimedText(0.001, 4.0), serving.TimedText(0.002, 8.0)]
    rows = serving.compare(served, local, 9)
    assert [row["tok/s"] for row in rows] == [2.0, 2.0, 0.5]
    assert [row["first token: ms"] for row in rows] == pytest.approx([6.0, 1.0, 5.0])
