"""What tests do on the live page."""

from typing import Any

import httpx

from tests.external.browser import Browser

DONE = "document.querySelector('#output').dataset.state === 'done' && document.querySelector('#strip-body').dataset.id"


def visit(browser: Browser, url: str) -> None:
    browser.open(f"{url}/ui")
    browser.run("sessionStorage.clear()")
    browser.wait("document.querySelector('#link').dataset.state === 'live'")


def fill(browser: Browser, **fields: Any) -> None:
    for name, value in fields.items():
        browser.run("document.getElementById(arguments[0]).value = arguments[1]", name.replace("_", "-"), str(value))


def generate(browser: Browser, url: str, **fields: Any) -> dict[str, Any]:
    """Run the playground to its end; what the server keeps of the request."""
    fill(browser, **{"seed": 7, "max_tokens": 48} | fields)
    browser.run("delete document.querySelector('#strip-body').dataset.id")
    browser.click("#go")
    name = browser.wait(DONE)
    kept: dict[str, Any] = httpx.get(f"{url}/ui/api/requests/{name}").raise_for_status().json()
    return kept


VERDICT = "document.querySelector('#verdict').textContent"


def tokens(browser: Browser, root: str = "#output") -> list[list[str]]:
    """[class, text] of every token, ghosts included."""
    find = "return [...document.querySelectorAll(arguments[0])].map(n => [n.className, n.textContent])"
    found: list[list[str]] = browser.run(find, f"{root} [data-round]")
    return [[name.replace("token ", "").replace(" chosen", ""), text] for name, text in found]
