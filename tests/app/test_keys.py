"""With API keys set, only /health and the live page's static files need no key."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.keys import ApiKeys, RequireKey
from app.main import create_app
from app.page.live import LivePage
from app.page.routes import FILES
from tests.app.harness import PROMPT, Exchange, call

KEY = "sk-one"
DATA = ["/ui/api/state", "/ui/api/requests", "/ui/api/requests/x"]
CLOSED = ["/", "/v1/models", "/v1/models/fake", "/nowhere", "/ui/nowhere", "/ui/events", *DATA]


def app_with(*keys: str) -> Any:
    client = FakeEngineClient()
    return create_app(client, live_page=LivePage(client), keys=ApiKeys.from_strings(keys) if keys else None)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_request_without_a_key_is_refused_as_openai_would() -> None:
    done = call(app_with(KEY), PROMPT)
    assert (done.status, done.reply_headers["www-authenticate"]) == (401, "Bearer")
    error = json.loads(done.reply)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "x-request-id" in done.reply_headers


@pytest.mark.parametrize("key", [KEY, "sk-two"])
def test_any_of_the_keys_opens(key: str) -> None:
    assert call(app_with(KEY, "sk-two"), PROMPT, headers=bearer(key)).status == 200


def test_without_keys_all_is_open() -> None:
    app = app_with()
    assert call(app, PROMPT).status == 200
    assert [call(app, method="GET", path=path).status for path in DATA] == [200, 200, 404]


@pytest.mark.parametrize("path", CLOSED)
def test_what_is_not_listed_as_open_is_closed(path: str) -> None:
    assert call(app_with(KEY), method="GET", path=path).status == 401


@pytest.mark.parametrize("path", DATA[:2])
def test_the_pages_data_open_with_a_key(path: str) -> None:
    assert call(app_with(KEY), method="GET", path=path, headers=bearer(KEY)).status == 200


@pytest.mark.parametrize("path", ["/health", *(f"/ui{name}" for name in FILES)])
def test_health_and_the_pages_files_are_open_to_get_and_nothing_else(path: str) -> None:
    app = app_with(KEY)
    for method in ("GET", "HEAD"):
        assert call(app, method=method, path=path).status == 200
    assert call(app, method="POST", path=path).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(KEY.upper()),
        {"x-api-key": KEY},
        {"host": "health", "x-original-url": "/health"},
    ],
)
def test_what_is_not_the_key_is_refused(headers: dict[str, str]) -> None:
    assert call(app_with(KEY), method="GET", path="/v1/models", headers=headers).status == 401


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/health/../v1/models", "/x/health", "/ui/api/state/../../ui"]
)
def test_a_path_that_only_resembles_an_open_one_is_closed(path: str) -> None:
    assert call(app_with(KEY), method="GET", path=path).status == 401


def under_a_prefix(path: str) -> int:
    exchange = Exchange(app_with(KEY), method="GET", path=path)

    async def go() -> None:
        await exchange.app(exchange.scope() | {"root_path": "/llm"}, exchange.receive, exchange.send)

    asyncio.run(asyncio.wait_for(go(), 30))
    return exchange.status


def test_under_a_prefix_the_same_paths_are_open() -> None:
    assert under_a_prefix("/llm/health") == under_a_prefix("/llm/ui") == 200
    assert under_a_prefix("/llm/v1/models") == under_a_prefix("/llmhealth") == under_a_prefix("/llm") == 401


def test_the_scheme_may_be_written_in_any_case() -> None:
    headers = {"authorization": f"bearer  {KEY} "}
    assert call(app_with(KEY), method="GET", path="/v1/models", headers=headers).status == 200


def test_a_websocket_is_closed_and_the_lifespan_passes() -> None:
    passed: list[str] = []
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    async def go() -> None:
        closed = RequireKey(inner, ApiKeys.from_strings([KEY]), ["/open"])
        await closed({"type": "websocket", "path": "/open", "headers": []}, receive, send)
        await closed({"type": "lifespan"}, receive, send)

    asyncio.run(go())
    assert (passed, sent[0]["type"]) == (["lifespan"], "websocket.close")


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the first team\n{KEY}\n\n  sk-two  \n")
    keys = ApiKeys.read(path)
    assert [keys.accept(f"Bearer {key}") for key in (KEY, "sk-two", "# of the first team", "")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no API key"),
        ("# none\n", "no API key"),
        ("good\nsécret\n", "line 2"),
        ("a b\n", "line 1"),
        ("a\x7fb\n", "line 1"),
    ],
)
def test_a_file_without_keys_or_with_one_that_cannot_be_sent_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        ApiKeys.read(path)
    assert "sécret" not in str(raised.value)


def test_no_keys_at_all_are_an_error() -> None:
    with pytest.raises(ValueError, match="no API key"):
        ApiKeys([])


def test_keys_do_not_hold_a_key() -> None:
    assert KEY not in repr(vars(ApiKeys.from_strings([KEY])))
