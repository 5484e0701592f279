"""A hub on this machine that speaks the protocol of huggingface.co, as far as its client asks, and fails on request."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
RESOLVE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")

Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """`models`: id → revision → files. Tests change the other fields and look at `requests`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, dict[str, Files]] = {}
        self.gated: dict[str, str] = {}  # id → the token that may read it
        self.status: dict[str, int] = {}  # part of a path → the status with which every request to it is answered
        self.cut: dict[str, int] = {}  # file → how many of its transfers still break off after half of their bytes
        self.requests: list[tuple[str, str, str | None]] = []  # (method, path, Range)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> list[str]:
        """The files of which bytes were asked for, in order."""
        found = [(method, RESOLVE.fullmatch(path)) for method, path, _ in self.requests]
        return sorted(match["file"] for method, match in found if match and method == "GET")


@contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def commit(model: str, revision: str) -> str:
    return hashlib.sha1(f"{model}@{revision}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers["range"]))
        found = API.fullmatch(path) or RESOLVE.fullmatch(path)
        if found is None:
            return self._send(404, b"{}")
        model, token = found["id"], self.headers["authorization"]
        for part, status in self.server.status.items():
            if part in path:
                return self._send(status, b"{}")
        if token == "Bearer wrong":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if model not in self.server.models:
            return self._send(401 if token is None else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if model in self.server.gated and token != f"Bearer {self.server.gated[model]}":
            return self._send(401 if token is None else 403, b"{}", {"X-Error-Code": "GatedRepo"})
        revision = self._revision(model, found["revision"] or "main")
        if revision is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = self.server.models[model][revision]
        if path.startswith("/api/"):
            return self._describe(model, revision, files, tree=found["what"] == "tree")
        return self._file(model, revision, files, found["file"])

    def _revision(self, model: str, asked: str) -> str | None:
        known = self.server.models[model]
        return next((name for name in known if asked in (name, commit(model, name))), None)

    def _describe(self, model: str, revision: str, files: Files, *, tree: bool) -> None:
        entries = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
        siblings = [{"rfilename": n, "size": len(d), "blobId": _etag(d)} for n, d in files.items()]
        info = {"id": model, "modelId": model, "sha": commit(model, revision), "siblings": siblings}
        self._send(200, json.dumps(entries if tree else info).encode())

    def _file(self, model: str, revision: str, files: Files, name: str) -> None:
        headers = {"X-Repo-Commit": commit(model, revision), "Accept-Ranges": "bytes"}
        if name not in files:
            self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            return
        data = files[name]
        headers |= {"ETag": f'"{_etag(data)}"', "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{_etag(data)}"'}
        first = int((self.headers["range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        left = self.server.cut.get(name, 0)
        if self.command == "GET" and left:
            self.server.cut[name] = left - 1
        self._send(206 if first else 200, data[first:], headers, cut=self.command == "GET" and left > 0)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
