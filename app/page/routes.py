"""The live page: its files, its data and its feed, all of this process only (of a deployment, of one replica)."""

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
from app.openai.replies import JSON
from app.page.feed import Events
from app.page.live import LivePage
from app.page.recent_requests import KEPT

FOLDER = Path(__file__).parent / "ui"
HTML, SCRIPT, STYLE = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "text/css; charset=utf-8"

# All that is served of the folder, by its path below /ui.
FILES = {
    "": ("index.html", HTML),
    "/style.css": ("style.css", STYLE),
    "/app.js": ("app.js", SCRIPT),
    "/api.js": ("api.js", SCRIPT),
    "/charts.js": ("charts.js", SCRIPT),
    "/compare.js": ("compare.js", SCRIPT),
    "/dom.js": ("dom.js", SCRIPT),
    "/playground.js": ("playground.js", SCRIPT),
    "/requests.js": ("requests.js", SCRIPT),
    "/strip.js": ("strip.js", SCRIPT),
    "/tiles.js": ("tiles.js", SCRIPT),
    "/tokens.js": ("tokens.js", SCRIPT),
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

LAST_MOMENT_S = 1.0  # that a request which still runs is waited for, when its record is asked for
LOOK_EVERY_S = 0.02


class File(NamedTuple):
    data: bytes
    type: str
    etag: str


def page_routes(live: LivePage) -> list[Route]:
    files = {path: _load(FOLDER / name, media) for path, (name, media) in FILES.items()}
    return [
        Route("/ui", partial(file, files)),
        Route("/ui/api/state", partial(state, live)),
        Route("/ui/api/requests", partial(list_requests, live)),
        Route("/ui/api/requests/{id}", partial(get_request, live)),
        Route("/ui/events", Events(live, HEADERS), methods=["GET"]),
        Route("/ui/{path:path}", partial(file, files)),
    ]


def _load(path: Path, media: str) -> File:
    data = path.read_bytes()
    return File(data, media, f'"{hashlib.sha256(data).hexdigest()[:16]}"')


async def file(files: dict[str, File], request: Request) -> Response:
    path = request.path_params.get("path")
    if path == "":  # /ui/: the page's own links would lead nowhere from there
        return RedirectResponse("../ui", 308, HEADERS)
    found = files.get("" if path is None else f"/{path}")
    if found is None:
        return _absent("the live page has no such file")
    headers = HEADERS | {"etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, headers=headers, media_type=found.type)


async def state(live: LivePage, request: Request) -> Response:
    return JSON(live.state(), headers=HEADERS)


async def list_requests(live: LivePage, request: Request) -> Response:
    """Newest first; `?limit=N`: the latest N."""
    asked = request.query_params.get("limit", "")
    limit = int(asked) if asked.isdecimal() and len(asked) <= len(str(KEPT)) else KEPT
    return JSON({"requests": [kept.summary() for kept in islice(live.recent.latest(), limit)]}, headers=HEADERS)


async def get_request(live: LivePage, request: Request) -> Response:
    """Waits a moment for one that runs: its client may have read the last byte before the server is done with it."""
    name = request.path_params["id"]
    deadline = time.monotonic() + LAST_MOMENT_S
    while {name, f"cmpl-{name}"} & live.open and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing to wait on
        await asyncio.sleep(LOOK_EVERY_S)
    kept = live.recent.get(name)
    if kept is None:
        return _absent("this server keeps no request of that id: it still runs, or others have taken its place")
    return JSON(kept.whole(), headers=HEADERS)


def _absent(message: str) -> Response:
    return JSON(error_object(message, "invalid_request_error", "not_found"), 404, HEADERS)
