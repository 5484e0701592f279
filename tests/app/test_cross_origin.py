"""Web pages of other origins, and browsers at /."""

import json
from typing import Any

import pytest

from app.cross_origin import check_origins
from app.fake_engine import FakeEngineClient
from app.keys import ApiKeys
from app.main import create_app
from app.page.live import LivePage
from deployments.settings import Settings
from tests.app.harness import PROMPT, call

ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def app_for(*origins: str, key: str | None = None) -> Any:
    client = FakeEngineClient()
    keys = None if key is None else ApiKeys.from_strings([key])
    return create_app(client, live_page=LivePage(client), keys=keys, allowed_origins=origins)


def test_by_default_no_other_origin_may_read_a_reply() -> None:
    done = call(app_for(), PROMPT, headers={"origin": ORIGIN})
    assert done.status == 200
    assert not [name for name in done.reply_headers if name.startswith("access-control")]
    assert call(app_for(), method="OPTIONS", headers=PREFLIGHT).status == 405


@pytest.mark.parametrize("origins", [(ORIGIN,), ("http://localhost:3000", ORIGIN), ("*",)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_named_origin_may_ask_first_and_read_replies(origins: tuple[str, ...], stream: bool) -> None:
    """Browsers send OPTIONS without the key."""
    app = app_for(*origins, key="k")
    asked = call(app, method="OPTIONS", headers=PREFLIGHT)
    assert asked.status == 200
    assert asked.reply_headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert "POST" in asked.reply_headers["access-control-allow-methods"]
    assert "x-stainless-lang" in asked.reply_headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in asked.reply_headers
    headers = {"origin": ORIGIN, "authorization": "Bearer k"}
    done = call(app, PROMPT | {"stream": stream}, headers=headers)
    assert done.status == 200
    assert done.reply_headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert "x-request-id" in done.reply_headers["access-control-expose-headers"]
    assert b"abc" in done.reply


def test_a_page_can_read_why_it_was_refused() -> None:
    done = call(app_for(ORIGIN, key="k"), PROMPT, headers={"origin": ORIGIN})
    assert (done.status, done.reply_headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert json.loads(done.reply)["error"]["code"] == "invalid_api_key"


def test_a_stranger_is_not_answered() -> None:
    strange = {"origin": "https://evil.example.org"}
    app = app_for(ORIGIN)
    assert call(app, method="OPTIONS", headers=PREFLIGHT | strange).status == 400
    assert "access-control-allow-origin" not in call(app, PROMPT, headers=strange).reply_headers


@pytest.mark.parametrize(
    "origin",
    ["example.org", "https://example.org/", "https://a.org/path", "https://A.org", "file:///a", "", "https://"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        check_origins([origin])


@pytest.mark.parametrize("origin", ["*", "http://127.0.0.1:8080", "https://a.example.org", "tauri://localhost"])
def test_origins(origin: str) -> None:
    check_origins([origin])


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_a_browser_at_the_root_gets_the_page_and_others_get_json() -> None:
    app = app_for()
    sent = call(app, method="GET", path="/", headers={"accept": BROWSER})
    assert (sent.status, sent.reply_headers["location"], sent.reply_headers["vary"]) == (307, "/ui", "accept")
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        done = call(app, method="GET", path="/", headers=accept)
        assert (done.status, json.loads(done.reply)["model"]) == (200, "fake")
    alone = call(create_app(FakeEngineClient()), method="GET", path="/", headers={"accept": BROWSER})
    assert alone.status == 200, "this server has no page"


def test_with_keys_a_browser_finds_the_page_which_asks_for_one() -> None:
    app = app_for(key="k")
    assert call(app, method="GET", path="/", headers={"accept": BROWSER}).status == 307
    assert call(app, method="GET", path="/", headers={"accept": "*/*"}).status == 401
    assert call(app, method="POST", path="/", headers={"accept": BROWSER}).status == 401


@pytest.mark.parametrize("given", [f"{ORIGIN} http://localhost:3000", [ORIGIN, "http://localhost:3000"]])
def test_the_setting_takes_a_text_or_a_list(given: Any) -> None:
    assert Settings(allowed_origins=given).edge().allowed_origins == (ORIGIN, "http://localhost:3000")


@pytest.mark.parametrize("given", [None, "none", "", []])
def test_the_setting_may_name_none(given: Any) -> None:
    assert Settings(allowed_origins=given).edge().allowed_origins == Settings().edge().allowed_origins == ()


def test_the_setting_refuses_what_is_no_origin() -> None:
    with pytest.raises(ValueError, match=r"'example\.org' is not an origin"):
        Settings(allowed_origins="https://a.org example.org")  # type: ignore[arg-type]
