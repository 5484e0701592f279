"""The live page in a real browser, before a real server over the demo pair."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.fake_engine import FakeEngineClient, spell
from app.keys import ApiKeys
from deployments.bridge import LocalClient
from engine.config import EngineConfig
from engine.engine import Engine
from policies.config import PolicyConfig
from tests.external.browser import Browser
from tests.external.page import DONE, VERDICT, fill, generate, tokens, visit
from tests.external.server import serving

pytestmark = pytest.mark.external

DEMO = Path(__file__).resolve().parents[2] / "models/demo"
KEY = "sk-of-the-test"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    config = EngineConfig(
        target=str(DEMO / "target"), draft=str(DEMO / "draft"), policy=PolicyConfig("fixed", k=4), threads=1
    )
    client = LocalClient(Engine.from_config(config), "demo")
    with serving(client) as url:
        yield url
    client.close()


def test_the_playground_streams_tokens_in_the_colours_of_their_sources(browser: Browser, server: str) -> None:
    visit(browser, server)
    rounds = generate(browser, server)["choices"][0]["rounds"]
    sources = [source for source, _ in tokens(browser)]
    assert sources.count("draft") > 0
    assert sources.count("recovered") > 0
    assert sources.count("ghost") == sum(rounds["drafted"]) - sum(rounds["accepted"])
    assert len(sources) - sources.count("ghost") == sum(rounds["emitted"]) == 48
    asked = {"model": "demo", "prompt": browser.run("return document.querySelector('#prompt').value")}
    body = asked | {"seed": 7, "max_tokens": 48, "temperature": 0.6}
    reply = httpx.post(f"{server}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert "".join(text for source, text in tokens(browser) if source != "ghost") == reply["choices"][0]["text"]
    colours = "return ['draft', 'recovered', 'bonus', 'plain'].map(s => getComputedStyle("
    styles = browser.run(colours + "document.querySelector('.legend .' + s)).textDecorationStyle)")
    assert styles[:3] == ["solid", "dashed", "double"], "told apart by more than their colour"


def test_rejected_drafts_are_shown_where_asked_for(browser: Browser, server: str) -> None:
    visit(browser, server)
    generate(browser, server)
    shown = "return getComputedStyle(document.querySelector('#output .ghost')).display !== 'none'"
    assert not browser.run(shown)
    browser.click("#ghosts")
    assert browser.run(shown)


def test_speculation_can_be_switched_off(browser: Browser, server: str) -> None:
    visit(browser, server)
    kept = generate(browser, server, k="off")
    assert {source for source, _ in tokens(browser)} == {"plain"}
    assert kept["choices"][0]["drafter"] is None


def test_a_comparison_ends_in_identical_and_a_ratio(browser: Browser, server: str) -> None:
    visit(browser, server)
    fill(browser, seed=7, max_tokens=48)
    browser.click("#ab")
    verdict = browser.wait(VERDICT)
    assert re.fullmatch(
        r"\d+\.\d\d × as fast Identical text: 48 tokens in \d+\.\d\d s with drafts, \d+\.\d\d s without\. Seed 7\.",
        verdict,
    )
    size = "parseFloat(getComputedStyle(document.querySelector(arguments[0])).fontSize)"
    big, small = (browser.run(f"return {size}", f"#verdict {part}") for part in ("strong", "span"))
    assert big >= 1.8 * small
    without, drafted = tokens(browser, "#text-off"), tokens(browser, "#text-on")
    assert {source for source, _ in without} == {"plain"}
    assert "draft" in {source for source, _ in drafted}
    texts = ["".join(text for source, text in lane if source != "ghost") for lane in (without, drafted)]
    assert texts[0] == texts[1] != ""


class Liar(FakeEngineClient):
    """Its text depends on the drafts."""

    def submit(self, requests: Any) -> Any:
        self.outputs_of = scripted(b"abcdX" if requests[0].k == 0 else b"abcdY")
        return super().submit(requests)


def scripted(ids: bytes) -> Callable[[Any], Iterator[Any]]:
    return lambda request: spell(replace(request, prompt_ids=tuple(ids)))


def test_a_comparison_that_finds_a_difference_says_where(browser: Browser) -> None:
    with serving(Liar()) as url:
        visit(browser, url)
        fill(browser, seed=7, max_tokens=12)
        browser.click("#ab")
        assert browser.wait(VERDICT).startswith("Different texts The texts differ at token 5.")
        browser.open("about:blank")


def test_the_strip_shows_what_the_server_tells(browser: Browser, server: str) -> None:
    visit(browser, server)
    kept = generate(browser, server)
    rounds = kept["choices"][0]["rounds"]
    drawn = browser.run(
        """return [...document.querySelectorAll('#strip-body .column')].map(column => {
          const count = (name) => column.querySelectorAll('.' + name).length;
          const height = (name) => Number(column.querySelector('.time.' + name).getAttribute('height'));
          return [count('accepted'), count('rejected'), count('missing'), height('draft'), height('verify')];
        });"""
    )
    columns = list(zip(rounds["accepted"], rounds["drafted"], rounds["k"], strict=True))
    assert [column[:3] for column in drawn] == [[a, d - a, max(0, k - d)] for a, d, k in columns]
    times = [us for pair in zip(rounds["draft_us"], rounds["verify_us"], strict=True) for us in pair]
    heights = [height for column in drawn for height in column[3:]]
    scale = sum(heights) / sum(times)
    assert heights == pytest.approx([us * scale for us in times], abs=0.01)
    assert kept["id"] in browser.run("return document.querySelector('#strip-body').innerText")


def test_the_strip_tells_of_a_round_by_keyboard(browser: Browser, server: str) -> None:
    visit(browser, server)
    rounds = generate(browser, server)["choices"][0]["rounds"]
    browser.run("document.querySelector('#strip-body .rounds').focus()")
    browser.press("Home", "Right", "Right")
    said = browser.run("return document.querySelector('#strip-body .facts').textContent")
    assert said.startswith(f"Round 2 · {rounds['drafted'][2]} drafts by model, {rounds['accepted'][2]} accepted · k = ")
    assert f"({rounds['reason'][2]})" in said


def test_the_strip_draws_the_tree_of_a_round(browser: Browser, server: str) -> None:
    asked = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 24, "seed": 7, "speculation": {"tree": [3, 2]}}
    name = httpx.post(f"{server}/v1/completions", json=asked, timeout=60).raise_for_status().json()["id"]
    trees = httpx.get(f"{server}/ui/api/requests/{name}").raise_for_status().json()["choices"][0]["trees"]
    index, tree = next((i, tree) for i, tree in enumerate(trees) if tree and len(tree["accepted"]) == 1)
    visit(browser, server)
    browser.wait(f"document.querySelector('.row[data-id=\"{name}\"]')")
    browser.click(f'.row[data-id="{name}"]')
    browser.wait(f"document.querySelector('#strip-body').dataset.id === '{name}'")
    browser.run("document.querySelector('#strip-body .rounds').focus()")
    browser.press("Home", *["Right"] * index)
    drawn = browser.run("return [...document.querySelectorAll('.tree circle')].map(c => c.getAttribute('class'))")
    assert drawn[0] == "text-end"
    (kept,) = tree["accepted"]
    for node, (parent, fate) in enumerate(zip(tree["parents"], drawn[1:], strict=True)):
        tried = parent == kept or (parent == -1 and node < kept)
        assert fate == ("accepted" if node == kept else "rejected" if tried else "unreached")
    assert "Tree of 9 drafts, 2 deep" in browser.run("return document.querySelector('.tree').textContent")
    browser.press("Home")
    assert browser.run("return document.querySelectorAll('.tree circle').length") == 0, "the prompt's round has none"


def test_the_text_tells_of_a_round_by_keyboard(browser: Browser, server: str) -> None:
    visit(browser, server)
    rounds = generate(browser, server)["choices"][0]["rounds"]
    browser.run("document.querySelector('#output').focus()")
    browser.press("Home", "Right")
    said = browser.run("return document.querySelector('#facts').textContent")
    assert said.startswith(f"Round 1 · {rounds['drafted'][1]} drafts by model, {rounds['accepted'][1]} accepted · k = ")
    assert browser.run("return new Set([...document.querySelectorAll('.chosen')].map(n => n.dataset.round)).size") == 1


def test_everything_is_reached_by_keyboard(browser: Browser, server: str) -> None:
    visit(browser, server)
    generate(browser, server)
    browser.wait("document.querySelectorAll('.row').length")
    browser.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = []
    for _ in range(100):
        browser.press("Tab")
        reached.append(browser.run("const a = document.activeElement; return a.id || a.className || a.name"))
    wanted = ["prompt", "temperature", "max-tokens", "seed", "k", "drafter", "go", "ab", "ghosts", "output", "row"]
    wanted += ["quiet copy", "rounds", "span", "form", "example", "term", "term token bonus"]
    assert [name for name in wanted if name not in reached] == []
    browser.run("document.querySelector('#go').focus(); delete document.querySelector('#strip-body').dataset.id")
    browser.press("Enter")
    browser.wait(DONE)


def test_the_figures_and_charts_live(browser: Browser, server: str) -> None:
    visit(browser, server)
    generate(browser, server)
    browser.wait("Number(document.querySelector('#tile-rate').textContent.replace(',', '')) > 0")
    browser.wait("document.querySelector('#readout-rate').textContent")
    browser.wait("document.querySelector('#readout-accepted').textContent")
    assert browser.wait("document.querySelector('#readout-time').textContent").startswith("draft ")
    now = httpx.get(f"{server}/ui/api/state").json()["now"]
    browser.wait(f"document.querySelector('#tile-acceptance').textContent === '{100 * now['acceptance']:.0f} %'")
    for accepted, drafted in zip(now["positions"]["accepted"], now["positions"]["drafted"], strict=True):
        browser.wait(f"document.querySelector('.survival').textContent.includes('{accepted:,} of {drafted:,}')")


def test_the_text_begins_with_its_prompt(browser: Browser, server: str) -> None:
    visit(browser, server)
    asked = browser.run("return document.querySelector('#prompt').value")
    generate(browser, server, max_tokens=8)
    said = browser.run("return document.querySelector('#output').textContent")
    assert said == asked + "".join(text for _, text in tokens(browser))
    browser.run("document.querySelector('#examples button:nth-child(3)').click()")
    asked = browser.run("return document.querySelector('#prompt').value")
    assert asked.startswith("class Person:")
    browser.click("#ab")
    browser.wait(VERDICT)
    for lane in ("#text-off", "#text-on"):
        assert browser.run("return document.querySelector(arguments[0]).textContent", lane).startswith(asked)


def test_a_chat_goes_on_from_answer_to_question(browser: Browser, server: str) -> None:
    visit(browser, server)
    browser.click("#form-choice input[value=chat]")
    browser.run("fetch2 = window.fetch; asked = []; window.fetch = (p, o) => (asked.push([p, o?.body]), fetch2(p, o))")
    first = generate(browser, server, max_tokens=8)
    assert first["id"].startswith("chatcmpl-")
    question = browser.run("return document.querySelector('#output .prompt').textContent")
    answer = "".join(text for source, text in tokens(browser) if source != "ghost")
    assert browser.run("return document.querySelector('#prompt').value") == ""
    generate(browser, server, max_tokens=8, prompt="Another one")
    shown = browser.run("return [...document.querySelectorAll('#output .turn')].map(n => n.textContent)")
    assert shown == [question, answer, "Another one"]
    bodies = [json.loads(body) for path, body in browser.run("return asked") if path == "v1/chat/completions"]
    assert [[(m["role"], m["content"]) for m in body["messages"]] for body in bodies] == [
        [("user", question)],
        [("user", question), ("assistant", answer), ("user", "Another one")],
    ]
    fill(browser, prompt="A third one", max_tokens=8)
    browser.click("#ab")
    assert "Identical text" in browser.wait(VERDICT)
    browser.click("#new-chat")
    assert browser.run("return document.querySelector('#output').textContent") == ""
    assert browser.run("return document.querySelector('#new-chat').hidden")


def test_where_there_is_no_chat_template_no_chat_is_offered(browser: Browser) -> None:
    with serving(FakeEngineClient()) as url:
        visit(browser, url)
        browser.wait("document.querySelector('#model').textContent === 'fake'")
        assert browser.run("return document.querySelector('#form-choice').hidden")
        browser.open("about:blank")


@pytest.mark.parametrize("width", [1280, 400])
def test_a_term_explains_itself_where_it_stands(browser: Browser, server: str, width: int) -> None:
    browser.resize(width, 900)
    visit(browser, server)
    shown = "document.querySelector('#tip').matches(':popover-open')"
    for word in ("recovered", "bonus", "round", "k", "fixed"):
        browser.run("document.querySelector('#options').open = true")
        browser.wait(f"document.querySelector('[data-term={word}]')")
        browser.run(f"document.querySelector('[data-term={word}]').scrollIntoView({{block: 'center'}})")
        browser.run("return new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        browser.run(f"document.querySelector('[data-term={word}]').focus({{preventScroll: true}})")
        browser.press("Enter")
        browser.wait(shown)
        said, described = browser.run(
            "return [document.querySelector('#tip').textContent, document.activeElement.getAttribute('title')]"
        )
        assert said == described
        assert len(said) > 40
        left, right, top, bottom = browser.run(
            "const at = document.querySelector('#tip').getBoundingClientRect(); "
            "return [at.left, at.right, at.top, at.bottom]"
        )
        assert left >= 0
        assert right <= width
        assert top >= 0
        assert bottom <= 900
        browser.press("Escape")
        browser.wait(f"!{shown}")
        assert browser.run("return document.activeElement.dataset.term") == word


def test_a_small_screen_begins_with_what_one_can_do(browser: Browser, server: str) -> None:
    browser.resize(400, 900)
    visit(browser, server)
    order = """return ['#ab', '#go', '#output', '#tiles', '#rows'].map(s => {
      const at = document.querySelector(s).getBoundingClientRect();
      return at.top + window.scrollY;
    });"""
    tops = browser.run(order)
    assert tops == sorted(tops)
    assert tops[2] < 900, "the text is seen without scrolling"
    assert not browser.run("return document.querySelector('#options').open")
    fill(browser, max_tokens="")
    browser.click("#go")
    browser.wait("document.querySelector('#options').open && document.activeElement.id === 'max-tokens'")


class Tracing:
    """Gives every request a trace, as the Tracer does."""

    def began(self, exchange: Any) -> None:
        exchange.trace_id = "0af7651916cd43dd8448eb211c80319c"

    def ended(self, exchange: Any) -> None:
        pass

    def stepped(self, steps: Any) -> None:
        pass


@pytest.mark.parametrize("viewer", [None, "https://traces.example/trace/{trace_id}?view=1"])
def test_a_traces_id_leads_to_the_operators_viewer(browser: Browser, viewer: str | None) -> None:
    with serving(FakeEngineClient(), listeners=[Tracing()], trace_viewer_url=viewer) as url:
        visit(browser, url)
        generate(browser, url)
        assert "0af7651916cd43dd8448eb211c80319c" in browser.run(
            "return document.querySelector('#strip-body').innerText"
        )
        link = browser.run("return document.querySelector('#strip-body a')?.href ?? null")
        assert link == (viewer and viewer.replace("{trace_id}", "0af7651916cd43dd8448eb211c80319c"))
        browser.open("about:blank")


def test_recent_requests_tell_their_size_speed_and_speedup(browser: Browser, server: str) -> None:
    visit(browser, server)
    kept = generate(browser, server)
    row = f"document.querySelector('.row[data-id=\"{kept['id']}\"]')"
    browser.wait(f"{row} && {row}.querySelector('.speedup').textContent")
    kept = httpx.get(f"{server}/ui/api/requests/{kept['id']}").raise_for_status().json()
    said = browser.run(f"return {row}.innerText")
    assert f"{kept['prompt_tokens']} + 48 tokens" in said
    shown = float(said.split(" ×")[0].split()[-1])
    assert abs(shown - kept["speedup"]) < 0.0051  # a browser rounds 1.115 up, and Python down
    assert f"{48_000 / kept['total_ms']:.0f} tokens/s" in said


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_sticks_out(browser: Browser, server: str, width: int, tmp_path: Path) -> None:
    browser.resize(width, 900)
    visit(browser, server)
    generate(browser, server)
    browser.picture(tmp_path / f"{width}.png")
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_a_server_without_requests_says_so(browser: Browser) -> None:
    with serving(FakeEngineClient()) as url:
        visit(browser, url)
        assert "No requests yet" in browser.run("return document.querySelector('#requests').innerText")
        assert "No drafts in the last 5 minutes" in browser.run("return document.querySelector('#charts').innerText")
        browser.open("about:blank")


def test_a_server_without_drafter_says_so(browser: Browser) -> None:
    client = FakeEngineClient()
    client.model = replace(client.model, drafters=(), drafter=None, max_spec_length=0)
    with serving(client) as url:
        visit(browser, url)
        said = browser.run("return document.body.innerText")
        assert "this server has no drafter" in said
        assert "there is nothing to compare" in said
        assert browser.run("return document.querySelector('#ab').disabled && document.querySelector('#k').disabled")
        generate(browser, url)
        browser.wait("!document.querySelector('#go').disabled")
        assert browser.run("return document.querySelector('#ab').disabled"), "also after a run"
        browser.open("about:blank")


def test_a_server_that_drafts_nothing_by_itself_says_so_and_compares_all_the_same(browser: Browser) -> None:
    client = FakeEngineClient()
    client.model = replace(client.model, policy="off", drafter=None)
    with serving(client) as url:
        visit(browser, url)
        assert "the policy is off" in browser.run("return document.querySelector('#tiles').innerText")
        assert "drafts nothing by itself" in browser.run("return document.querySelector('#hint').textContent")
        browser.click("#ab")
        assert "Identical text" in browser.wait(VERDICT)
        assert client.submitted[-1].k == 4
        browser.open("about:blank")


def test_the_servers_words_are_shown_where_it_refuses(browser: Browser, server: str) -> None:
    visit(browser, server)
    fill(browser, max_tokens=1_000_000)
    browser.click("#go")
    assert "this model's maximum context length is" in browser.wait("document.querySelector('#hint').textContent")
    assert "400" in browser.complaints()[0], "the browser's own line"


def test_where_keys_are_set_the_page_asks_for_one_and_keeps_it_in_the_tab(browser: Browser) -> None:
    with serving(FakeEngineClient(), ApiKeys.from_strings([KEY])) as url:
        browser.open(f"{url}/ui")
        browser.wait("document.querySelector('#key-dialog').open")
        browser.run("document.querySelector('#key-dialog').addEventListener('close', () => (window.wasClosed = true))")
        browser.press("Escape", "Escape")
        browser.wait("window.wasClosed && document.querySelector('#key-dialog').open")
        browser.press(*"ключ", "Enter")
        assert browser.run("return document.querySelector('#key').validity.patternMismatch"), "no header can carry it"
        browser.run("document.querySelector('#key').value = ''")
        browser.press(*"wrong", "Enter")
        browser.wait("document.querySelector('#key-why').textContent.includes('did not accept')")
        browser.wait("document.querySelector('#key-dialog').open")
        browser.press(*KEY, "Enter")
        browser.wait("document.querySelector('#link').dataset.state === 'live'")
        assert browser.run("return [Object.values(sessionStorage), localStorage.length, document.cookie]") == [
            [KEY],
            0,
            "",
        ]
        fill(browser, max_tokens=9)
        browser.click("#go")
        browser.wait(DONE)
        assert all("401" in said for said in browser.complaints())
        browser.open("about:blank")


def test_when_the_server_goes_the_page_says_so_and_returns_with_it(browser: Browser) -> None:
    with serving(FakeEngineClient()) as url:
        visit(browser, url)
    said = browser.wait("document.querySelector('#trouble').textContent")
    assert said.startswith("The server is gone")
    browser.click("#go")
    assert browser.wait("document.querySelector('#hint').textContent") == "The server cannot be reached."
    with serving(FakeEngineClient(), port=int(url.rsplit(":", 1)[1])):
        browser.wait("document.querySelector('#link').dataset.state === 'live'")
        assert browser.run("return document.querySelector('#trouble').hidden")
        browser.open("about:blank")
    assert all("ERR_" in said for said in browser.complaints())


def test_what_a_browser_refuses_is_found(browser: Browser, server: str) -> None:
    """The negative control of every test here: a script in the page's text would be refused, and reported."""
    visit(browser, server)
    browser.run("const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)")
    assert browser.run("return window.ran === undefined")
    assert any("Content Security Policy" in said for said in browser.complaints())
