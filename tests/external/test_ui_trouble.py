"""The live page where something is in the way: a feed that fails, a run that is stopped, a form half filled in."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from app.fake_engine import FakeEngineClient, spell
from app.openai import stream
from app.page.live import LivePage
from engine.types import Output, Request
from tests.external.browser import PATIENCE_S, Browser
from tests.external.page import VERDICT, fill, generate, visit
from tests.external.server import serving

pytestmark = pytest.mark.external

HINT = "document.querySelector('#hint').textContent"
TROUBLE = "document.querySelector('#trouble').textContent"
LIVE = "document.querySelector('#link').dataset.state === 'live'"


class Gate:
    """Hands requests on, but answers those of the paths in `acts` otherwise; `paths`: what was asked for."""

    def __init__(self) -> None:
        self.acts: dict[str, ASGIApp] = {}
        self.paths: list[str] = []

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            self.paths.append(path)
            await self.acts.get(path, app)(scope, receive, send)

        return handle


def saying(*events: Any) -> ASGIApp:
    """An event stream that ends at once."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"".join(map(stream.event, events)), "more_body": False})

    return answer


async def mute(scope: Scope, receive: Receive, send: Send) -> None:
    """Says nothing until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


def unending(request: Request) -> Iterator[Output]:
    yield Output(request.id, (65,), "A", None)


def lines(request: Request) -> Iterator[Output]:
    return spell(replace(request, prompt_ids=(10,)))


def test_state_and_feed_come_from_one_process(browser: Browser) -> None:
    gate = Gate()
    with serving(FakeEngineClient(), around=gate) as url:
        visit(browser, url)
        assert browser.run("return document.querySelector('#model').textContent") == "fake"
        browser.open("about:blank")
    assert "/ui/events" in gate.paths
    assert "/ui/api/state" not in gate.paths, "another replica may answer that"


def test_a_feed_that_ends_at_once_is_waited_for_ever_longer(browser: Browser) -> None:
    client, gate = FakeEngineClient(), Gate()
    gate.acts["/ui/events"] = saying({"state": LivePage(client).state()})
    with serving(client, around=gate) as url:
        browser.open(f"{url}/ui")
        browser.wait(f"{TROUBLE}.endsWith('ends at once). Trying again in 4 s.')")
        assert gate.paths.count("/ui/events") == 4
        gate.acts.clear()
        browser.wait(LIVE)
        browser.open("about:blank")


def test_a_feed_that_says_nothing_is_given_up_and_tried_again(browser: Browser) -> None:
    gate = Gate()
    gate.acts["/ui/events"] = mute
    with serving(FakeEngineClient(), around=gate) as url:
        browser.open(f"{url}/ui")
        assert browser.wait(TROUBLE).startswith("The server is gone (no event for 6 s). Trying again in ")
        gate.acts.clear()
        browser.wait(LIVE)
        browser.open("about:blank")


def test_a_list_that_does_not_come_is_asked_for_again(browser: Browser) -> None:
    gate = Gate()
    gate.acts["/ui/api/requests"] = mute
    with serving(FakeEngineClient(), around=gate) as url:
        httpx.post(f"{url}/v1/completions", json={"model": "fake", "prompt": "a"}).raise_for_status()
        visit(browser, url)
        ends = time.monotonic() + PATIENCE_S
        while "/ui/api/requests" not in gate.paths:
            assert time.monotonic() < ends
            time.sleep(0.05)
        gate.acts.clear()
        browser.wait("document.querySelectorAll('.row').length === 1")
        browser.open("about:blank")


def test_one_viewer_too_many_is_told_so_and_waits_as_long_as_it_is_asked_to(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.page.feed.MAX_VIEWERS", 0)
    with serving(FakeEngineClient()) as url:
        browser.open(f"{url}/ui")
        said = browser.wait(TROUBLE)
        assert "0 viewers follow this server already" in said
        assert said.endswith("Trying again in 10 s.")
        assert "gone" not in said
        browser.open("about:blank")
    assert all("429" in said for said in browser.complaints())


@pytest.mark.parametrize("button", ["#go", "#ab"])
def test_what_is_stopped_does_not_go_on_being_told_of(browser: Browser, button: str) -> None:
    with serving(FakeEngineClient(unending)) as url:
        visit(browser, url)
        browser.click(button)
        browser.wait(f"{HINT}.startsWith('Running without')" if button == "#ab" else "document.querySelector('.token')")
        browser.click("#stop")
        browser.wait("document.querySelector('#stop').hidden && !document.querySelector('#ab').disabled")
        assert browser.run(f"return {HINT}") == ""
        browser.open("about:blank")


def test_while_something_runs_nothing_else_is_offered_whatever_the_policy_does(browser: Browser) -> None:
    client = FakeEngineClient(unending)
    with serving(client) as url:
        visit(browser, url)
        browser.click("#ab")
        browser.wait(f"{HINT}.startsWith('Running without')")
        browser.run("document.querySelector('#k').firstChild.dataset.old = 1")
        client.refused = "the form is fitted anew"
        browser.wait("!document.querySelector('#k').firstChild.dataset.old")
        assert browser.run("return document.querySelector('#ab').disabled && document.querySelector('#go').disabled")
        assert browser.run(f"return {HINT}").startswith("Running without")
        browser.open("about:blank")


@pytest.mark.parametrize("button", ["#go", "#ab"])
@pytest.mark.parametrize("field", ["max_tokens", "temperature"])
def test_an_empty_number_is_refused_by_the_form(browser: Browser, button: str, field: str) -> None:
    client = FakeEngineClient()
    with serving(client) as url:
        visit(browser, url)
        fill(browser, **{field: ""})
        browser.click(button)
        browser.wait(f"document.activeElement.id === '{field.replace('_', '-')}'")
        assert client.submitted == []
        fill(browser, **{field: "1"})
        browser.click(button)
        browser.wait("document.querySelector('#strip-body').dataset.id")
        assert client.submitted != []
        browser.open("about:blank")


def test_the_pages_own_failure_is_not_laid_to_the_network(browser: Browser) -> None:
    gate = Gate()
    gate.acts["/v1/completions"] = saying({})
    with serving(FakeEngineClient(), around=gate) as url:
        visit(browser, url)
        browser.click("#go")
        assert browser.wait(HINT).startswith("The page failed (")
        browser.open("about:blank")
    assert all("TypeError" in said for said in browser.complaints())


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_a_comparison_uses_the_verifier_that_promises_identity_and_says_so(browser: Browser, verifier: Any) -> None:
    client = FakeEngineClient()
    client.model = replace(client.model, verifier=verifier)
    with serving(client) as url:
        visit(browser, url)
        browser.click("#ab")
        assert "Identical text" in browser.wait(VERDICT)
        said = browser.run(f"return {HINT}")
        browser.open("about:blank")
    assert [request.verifier for request in client.submitted] == [None, None if verifier == "match" else "match"]
    assert ("own verifier, “rejection”" in said) == (verifier == "rejection")


def test_a_long_text_is_followed(browser: Browser) -> None:
    with serving(FakeEngineClient(lines)) as url:
        visit(browser, url)
        generate(browser, url, prompt="a", max_tokens=150)
        at = browser.run(
            "const o = document.querySelector('#output'); return [o.scrollTop, o.scrollTopMax ?? "
            "o.scrollHeight - o.clientHeight]"
        )
        assert at[1] > 500
        assert at[0] == pytest.approx(at[1], abs=1)
        browser.open("about:blank")


def test_who_has_scrolled_up_is_left_there(browser: Browser) -> None:
    with serving(FakeEngineClient()) as url:
        visit(browser, url)
        at = browser.run(
            """return import(location.origin + '/ui/tokens.js').then(({ TokenText }) => {
              const root = document.querySelector('#output');
              const text = new TokenText(root, () => {});
              const add = () => text.add([{tokens: [{text: '\\n'.repeat(60), source: 'plain'}], rejected: []}]);
              add(); root.scrollTop = 100; add();
              return root.scrollTop;
            });"""
        )
        assert at == 100
        browser.open("about:blank")


def test_all_kept_requests_can_be_listed(browser: Browser) -> None:
    body = {"model": "fake", "prompt": "a", "max_tokens": 1}
    with serving(FakeEngineClient()) as url, httpx.Client(base_url=url) as http:
        for _ in range(41):
            http.post("/v1/completions", json=body).raise_for_status()
        visit(browser, url)
        browser.wait("document.querySelectorAll('.row').length === 40")
        browser.click("#more")
        browser.wait("document.querySelectorAll('.row').length === 41")
        assert browser.run("return document.querySelector('#more').hidden")
        browser.open("about:blank")


def luminance(colour: list[int]) -> float:
    """Relative luminance, WCAG 2.2, of sRGB 0..255."""
    shares = [part / 255 for part in colour]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: list[int], other: list[int]) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


PAINTED = """
const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const rgb = (colour) => {
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const of = (selector, name) => rgb(getComputedStyle(document.querySelector(selector))[name]);
const panel = of('.panel', 'backgroundColor');
document.querySelector('#output .ghost').classList.add('chosen');
return {
  edge: [of('#prompt', 'borderTopColor'), panel],
  inside: [of('#prompt', 'borderTopColor'), of('#prompt', 'backgroundColor')],
  other: [of('.time.other', 'fill'), panel],
  // Half transparent, so painted over what lies below.
  ghost: [of('#output .ghost', 'color'), (of('#output', 'backgroundColor'), of('#output .ghost', 'backgroundColor'))],
  when: [of('.row[aria-pressed="true"] .when', 'color'), of('.row[aria-pressed="true"]', 'backgroundColor')],
};
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_must_be_seen_stands_out(browser: Browser, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.devtools("Emulation.setEmulatedMedia", {"features": features})
    with serving(FakeEngineClient()) as url:
        visit(browser, url)
        generate(browser, url)
        browser.wait("document.querySelector('.row[aria-pressed=\"true\"]')")
        found = {name: contrast(*pair) for name, pair in browser.run(PAINTED).items()}
        browser.devtools("Emulation.setEmulatedMedia", {"features": []})
        browser.open("about:blank")
    assert {name: ratio for name, ratio in found.items() if ratio < (4.5 if name in ("when", "ghost") else 3)} == {}
