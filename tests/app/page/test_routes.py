"""The live page over HTTP: its files, its data, and one feed for all viewers."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any, get_args

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.page.live import LivePage
from app.page.routes import FILES, FOLDER
from policies.config import PolicyName
from tests.app.harness import PROMPT, Exchange, call
from tests.app.page.test_live import part, step


def make() -> tuple[FakeEngineClient, LivePage, Any]:
    client = FakeEngineClient()
    live = LivePage(client)
    return client, live, create_app(client, live_page=live)


def get(app: Any, path: str, **options: Any) -> Exchange:
    return call(app, method="GET", path=path, **options)


@pytest.mark.parametrize("path", ["/ui", "/ui/app.js", "/ui/api/state", "/ui/events"])
def test_without_a_live_page_its_paths_are_unknown(path: str) -> None:
    assert get(create_app(FakeEngineClient()), path).status == 404


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_with_its_type_and_locked_down(name: str) -> None:
    done = get(make()[2], f"/ui{name}")
    path, media = FILES[name]
    assert (done.status, done.reply) == (200, (FOLDER / path).read_bytes())
    headers = done.reply_headers
    assert headers["content-type"] == media
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cache-control"] == "no-cache"
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    app = make()[2]
    etag = get(app, "/ui/app.js").reply_headers["etag"]
    again = get(app, "/ui/app.js", headers={"if-none-match": etag})
    assert (again.status, again.reply) == (304, b"")
    assert get(app, "/ui/app.js", headers={"if-none-match": '"other"'}).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/ui/nothing.js",
        "/ui/../main.py",
        "/ui/..%2fmain.py",
        "/ui//etc/passwd",
        "/ui/vendor",
        "/ui/index.html",
        "/ui/vendor/LICENSE",
    ],
)
def test_nothing_else_is_served(path: str) -> None:
    done = get(make()[2], path)
    assert done.status == 404
    assert json.loads(done.reply)["error"]["code"] == "not_found"


def test_a_closing_slash_leads_back_without_the_clients_word() -> None:
    done = get(make()[2], "/ui/", headers={"host": "evil.example"})
    assert (done.status, done.reply_headers["location"]) == (308, "../ui")


def test_the_page_loads_only_what_is_served_here() -> None:
    """No file is missing from the table, none names another host, and nothing is written in line (the policy forbids
    it)."""
    served = {name for name, _ in FILES.values()}
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in (".html", ".js", ".css")}
    assert found == served
    for name in served:
        text = (FOLDER / name).read_text("utf-8")
        links = re.findall(r"""(?:src|href)="([^"#]+)"|from "([^"]+)";""", text)
        for link in (a or b for a, b in links):
            target = link.removeprefix("ui/").removeprefix("./")
            assert target in served or link == "data:,", f"{name}: {link}"
        if not name.startswith("vendor"):
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text
            assert not re.search(r"""<style|\sstyle="|\son\w+="|<script>""", text)


@pytest.mark.parametrize("path", ["/ui", "/ui/api/state", "/ui/events"])
def test_the_page_is_only_read(path: str) -> None:
    assert call(make()[2], {}, path=path).status == 405


def test_the_state_says_what_the_server_is_and_how_it_does() -> None:
    client, _, app = make()
    client.stepped([step(0.0, [part(4, 3)])])
    done = get(app, "/ui/api/state")
    state = json.loads(done.reply)
    assert state["model"] == {
        "name": "fake",
        "max_model_len": 256,
        "max_spec_length": 8,
        "drafters": list(client.model.drafters),
        "drafter": "model",
        "verifier": "match",
        "chat": False,
    }
    assert state["trace_viewer_url"] is None
    assert state["now"]["policy"] == {"name": "goodput", "k": 5, "refused": None}
    assert state["now"]["acceptance"] == 0.75
    assert "content-security-policy" in done.reply_headers


def test_the_state_says_whether_there_are_a_chat_template_and_a_viewer_of_traces() -> None:
    client, url = FakeEngineClient(), "https://traces.example/{trace_id}"
    client.model = replace(client.model, has_chat_template=True)
    app = create_app(client, live_page=LivePage(client, trace_viewer_url=url))
    state = json.loads(get(app, "/ui/api/state").reply)
    assert (state["model"]["chat"], state["trace_viewer_url"]) == (True, url)


def test_every_term_that_the_page_names_is_explained() -> None:
    """A word without an explanation would be a button that says nothing."""
    explained = set(re.findall(r'^  "?([a-z-]+)"?:', (FOLDER / "terms.js").read_text("utf-8"), re.MULTILINE))
    page = (FOLDER / "index.html").read_text("utf-8")
    scripts = "".join(path.read_text("utf-8") for path in FOLDER.glob("*.js"))
    named = set(re.findall(r'data-term="([^"]+)"', page)) | set(re.findall(r'\bterm\("([^"]+)"', scripts))
    tiles = set(re.findall(r'^  \["(\w+)", ', (FOLDER / "tiles.js").read_text("utf-8"), re.MULTILINE))
    assert {"k", "round", "recovered", "bonus"} <= named
    assert "speedup" in tiles
    assert (named | tiles | set(get_args(PolicyName))) - explained == set()


def test_requests_are_listed_and_told_one_by_one() -> None:
    _, _, app = make()
    name = json.loads(call(app, PROMPT | {"max_tokens": 6}).reply)["id"]
    (row,) = json.loads(get(app, "/ui/api/requests").reply)["requests"]
    whole = json.loads(get(app, f"/ui/api/requests/{name}").reply)
    assert row["id"] == whole["id"] == name
    assert row["choices"][0]["rounds"] == len(whole["choices"][0]["rounds"]["step"]) == 2


@pytest.mark.parametrize(
    ("asked", "listed"), [("", 3), ("?limit=2", 2), ("?limit=0", 0), ("?limit=x", 3), ("?limit=²", 3)]
)
def test_the_list_can_be_cut_short(asked: str, listed: int) -> None:
    _, _, app = make()
    names = [json.loads(call(app, PROMPT).reply)["id"] for _ in range(3)]
    exchange = Exchange(app, method="GET", path="/ui/api/requests")

    async def go() -> None:
        scope = exchange.scope() | {"query_string": asked.lstrip("?").encode()}
        await exchange.app(scope, exchange.receive, exchange.send)

    asyncio.run(go())
    assert [row["id"] for row in json.loads(exchange.reply)["requests"]] == names[::-1][:listed]


def test_a_request_that_is_not_kept_is_not_found() -> None:
    done = get(make()[2], "/ui/api/requests/cmpl-x")
    assert (done.status, json.loads(done.reply)["error"]["code"]) == (404, "not_found")
