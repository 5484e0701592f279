"""The routes of the live page: its files, its data and its event stream. All data are those of this process: one
replica of a deployment."""

import asyncio
import hashlib
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from app.errors import error_object
from app.openai.forms import ID_PREFIXES
from app.openai.replies import JSON
from app.page.feed import EventsEndpoint
from app.page.live import LivePage
from app.page.recent_requests import MAX_REQUESTS

FOLDER = Path(__file__).parent / "ui"
HTML, SCRIPT, STYLE = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "text/css; charset=utf-8"

# The only files that are served: path below /ui → (file in FOLDER, content type).
FILES = {
    "": ("index.html", HTML),
    "/style.css": ("style.css", STYLE),
    "/app.js": ("app.js", SCRIPT),
    "/api.js": ("api.js", SCRIPT),
    "/charts.js": ("charts.js", SCRIPT),
    "/chat.js": ("chat.js", SCRIPT),
    "/compare.js": ("compare.js", SCRIPT),
    "/dom.js": ("dom.js", SCRIPT),
    "/examples.js": ("examples.js", SCRIPT),
    "/playground.js": ("playground.js", SCRIPT),
    "/requests.js": ("requests.js", SCRIPT),
    "/strip.js": ("strip.js", SCRIPT),
    "/terms.js": ("terms.js", SCRIPT),
    "/tiles.js": ("tiles.js", SCRIPT),
    "/tokens.js": ("tokens.js", SCRIPT),
    "/tree.js": ("tree.js", SCRIPT),
    "/vendor/uPlot.iife.min.js": ("vendor/uPlot.iife.min.js", SCRIPT),
    "/vendor/uPlot.min.css": ("vendor/uPlot.min.css", STYLE),
}
OPEN_PATHS = frozenset({"/ui/", *(f"/ui{path}" for path in FILES)})  # they hold no data

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

WAIT_FOR_RECORD_S = 1.0  # the longest wait for the record of a request that still runs
POLL_S = 0.02


class File(NamedTuple):
    data: bytes
    type: str
    etag: str


def page_routes(live_page: LivePage) -> list[Route]:
    files = {path: _load(FOLDER / name, media) for path, (name, media) in FILES.items()}
    return [
        Route("/ui", partial(file, files)),
        Route("/ui/api/state", partial(state, live_page)),
        Route("/ui/api/requests", partial(list_requests, live_page)),
        Route("/ui/api/requests/{id}", partial(get_request, live_page)),
        Route("/ui/events", EventsEndpoint(live_page, HEADERS), methods=["GET"]),
        Route("/ui/{path:path}", partial(file, files)),
    ]


def _load(path: Path, media: str) -> File:
    data = path.read_bytes()
    return File(data, media, f'"{hashlib.sha256(data).hexdigest()[:16]}"')


async def file(files: dict[str, File], request: Request) -> Response:
    path = request.path_params.get("path")
    if path == "":  # /ui/: the page's relative links would not work from there
        return RedirectResponse("../ui", 308, HEADERS)
    page_file = files.get("" if path is None else f"/{path}")
    if page_file is None:
        return _not_found(f"the live page has no file {path!r}")
    headers = HEADERS | {"etag": page_file.etag}
    if request.headers.get("if-none-match") == page_file.etag:
        return Response(status_code=304, headers=headers)
    return Response(page_file.data, headers=headers, media_type=page_file.type)


async def state(live_page: LivePage, request: Request) -> Response:
    return JSON(live_page.state(), headers=HEADERS)


async def list_requests(live_page: LivePage, request: Request) -> Response:
    """Return summaries of the kept requests, newest first. `?limit=N` returns the newest N only."""
    text = request.query_params.get("limit", "")
    limit = int(text) if text.isdecimal() and len(text) <= len(str(MAX_REQUESTS)) else MAX_REQUESTS
    return JSON({"requests": [kept.summary() for kept in islice(live_page.recent.latest(), limit)]}, headers=HEADERS)


async def get_request(live_page: LivePage, request: Request) -> Response:
    """Return the record of one request. Waits up to WAIT_FOR_RECORD_S for a request that still runs: its client may
    read the last byte before the server has made the record."""
    name = request.path_params["id"]
    deadline = time.monotonic() + WAIT_FOR_RECORD_S
    while {prefix + name for prefix in ID_PREFIXES} & live_page.open and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing to wait on
        await asyncio.sleep(POLL_S)
    kept = live_page.recent.get(name)
    if kept is None:
        return _not_found(
            f"this server keeps no request with the id {name!r}: it still runs, or newer ones replaced it"
        )
    return JSON(kept.whole(), headers=HEADERS)


def _not_found(message: str) -> Response:
    return JSON(error_object(message, "invalid_request_error", "not_found"), 404, HEADERS)
