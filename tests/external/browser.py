"""A headless Chromium, driven over chromedriver's W3C WebDriver protocol: plain HTTP with JSON."""

import base64
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for an element's id
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Space": "\ue00d",
    "Home": "\ue011",
    "Left": "\ue012",
    "Right": "\ue014",
}
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
PATIENCE_S = 60
TRIES = 5


class Browser:
    """One session."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = self._http.request(method, f"/session/{self._session}{path}", json=body)
        value = reply.json()["value"]
        assert reply.is_success, value
        return value

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value that the body of a function returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def wait(self, expression: str) -> Any:
        """The expression's value once it is true."""
        ends = time.monotonic() + PATIENCE_S
        while not (value := self.run(f"return {expression};")):
            assert time.monotonic() < ends, f"never true: {expression}; the page says: {self.run(PAGE)}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._call("POST", f"/element/{found}/click", {})

    def press(self, *names: str) -> None:
        """Keys by their names in KEYS, or characters."""
        keys = [KEYS.get(name, name) for name in names]
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def resize(self, width: int, height: int) -> None:
        """Of the viewport: a headless window keeps a minimum width of its own."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def picture(self, path: Path) -> None:
        """Of the whole page, as PNG."""
        whole = {"format": "png", "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", whole)["data"]))

    def complaints(self) -> list[str]:
        """What the console logged since the last call, of any level above info."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]


PAGE = "return document.body.innerText.slice(0, 2000)"


@contextmanager
def browsing(chromedriver: str, chromium: str, profile: Path) -> Iterator[Browser]:
    """A browser of its own, with an empty profile; it and its driver end with the block."""
    with (
        _driving(chromedriver, profile / "driver.log") as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        session = _begin(http, chromium, profile)
        try:
            yield Browser(http, session)
        finally:
            http.delete(f"/session/{session}")


def undisturbed(browser: Browser) -> Iterator[Browser]:
    """Whatever a test does with it, the console has nothing to complain about."""
    browser.resize(1280, 900)
    browser.complaints()
    yield browser
    assert browser.complaints() == []


@contextmanager
def _driving(chromedriver: str, log: Path) -> Iterator[int]:
    """A driver's port; the driver ends with the block.

    A driver asked for any port takes one that is free on IPv6, and exits if that one is taken on IPv4: the
    next one is tried.
    """
    for _ in range(TRIES):
        with log.open("w") as out:
            driver = subprocess.Popen([chromedriver, "--port=0"], stdout=out, stderr=subprocess.STDOUT)
        try:
            if port := _port(log, driver):
                yield port
                return
        finally:
            driver.terminate()
            driver.wait(30)
    raise AssertionError(f"no driver of {TRIES} started: {log.read_text()}")


def _port(log: Path, driver: subprocess.Popen[bytes]) -> int | None:
    """Where the driver listens; None: it exited without."""
    ends = time.monotonic() + PATIENCE_S
    while "started successfully on port" not in (said := log.read_text()):
        if driver.poll() is not None:
            return None
        assert time.monotonic() < ends, said
        time.sleep(0.05)
    return int(said.split("started successfully on port ")[1].split(".")[0])


def _begin(http: httpx.Client, chromium: str, profile: Path) -> str:
    options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile / 'profile'}"]}
    wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    reply = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
    assert reply.is_success, reply.text
    return str(reply.json()["value"]["sessionId"])
