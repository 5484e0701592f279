"""`foretoken chat`: a conversation in the terminal with a running server."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from io import TextIOWrapper
from typing import Any, TextIO
from unicodedata import category

TIMEOUT_S = 300.0  # without a byte of the server
GREEN, GREY, PLAIN = "\x1b[32m", "\x1b[90m", "\x1b[0m"
PROMPT = "> "
ENDINGS = ("/exit", "/quit")
HARMLESS = "\n\t\u200c\u200d"  # the last two shape letters and join emoji


class NoAnswer(Exception):
    """The server gave no answer. The message says why."""


@dataclass
class Conversation:
    """What was said so far. An answer that broke off, or was stopped before its first word, is not kept, nor its
    question."""

    url: str
    key: str | None
    system: str | None
    parameters: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    model: str = ""

    def __post_init__(self) -> None:
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def open(self) -> None:
        """Ask which model the server has. Raises NoAnswer."""
        with self._request("/v1/models", None) as reply:
            self.model = str(json.load(reply)["data"][0]["id"])

    def say(self, text: str, out: TextIO, *, colour: bool) -> None:
        """Send a message and write the answer while it comes. Raises NoAnswer."""
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*self.messages, question], "stream": True, **self.parameters}
        answer, stopped = Answer(out, colour=colour), False
        try:
            # The server's reply begins with the first token.
            with self._request("/v1/chat/completions", body | {"speculation": {"tokens": True}}) as reply:
                for event in _events(reply):
                    answer.add(event)
        except KeyboardInterrupt:  # leaving the connection ends the request at the server
            stopped = True
            out.write("\n(stopped)")
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswer(f"the answer broke off: {error}") from None
        answer.end()
        if answer.content or not stopped:
            self.messages += [question, {"role": "assistant", "content": answer.content}]

    def _request(self, path: str, body: Any) -> HTTPResponse:
        if not self.url.startswith(("http://", "https://")):
            raise NoAnswer(f"{self.url} is no http:// or https:// address")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, {"content-type": "application/json"})
        if self.key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        try:
            reply: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise NoAnswer(_refusal(error)) from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise NoAnswer(f"no answer from {self.url}: {reason}. `foretoken serve` starts a server") from None
        return reply


class Answer:
    """Writes an answer from a stream's events."""

    def __init__(self, out: TextIO, *, colour: bool) -> None:
        self.content = ""
        self._out = out
        self._terminal = out.isatty()
        self._colour = colour
        self._began = time.monotonic()
        self._sources: list[str] = []  # of each token
        self._drafted = 0

    def add(self, event: dict[str, Any]) -> None:
        """Raises NoAnswer for an error event."""
        if "error" in event:
            raise NoAnswer(str(event["error"].get("message")))
        for choice in event.get("choices", ()):
            delta, rounds = choice.get("delta", {}), (choice.get("speculation") or {}).get("rounds", [])
            self.content += delta.get("content") or ""
            self._count(rounds)
            if self._colour:
                self._paint(rounds)
            else:
                text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                self._out.write(printable(text) if self._terminal else text)
        self._out.flush()

    def _count(self, rounds: list[dict[str, Any]]) -> None:
        self._sources += [token["source"] for entry in rounds for token in entry["tokens"]]
        self._drafted += sum(entry["drafted"] for entry in rounds)

    def _paint(self, rounds: list[dict[str, Any]]) -> None:
        """The texts of all tokens join to the answer's text; a round comes when its text is complete."""
        for entry in rounds:
            for token in entry["tokens"]:
                text = printable(token["text"])
                self._out.write(f"{GREEN}{text}{PLAIN}" if token["source"] == "draft" and text else text)

    def end(self) -> None:
        self._out.write("\n")
        if self._colour:
            seconds, tokens = time.monotonic() - self._began, len(self._sources)
            accepted = self._sources.count("draft")
            rate = f"{tokens / seconds:.0f} tokens/s"
            self._out.write(f"{GREY}{tokens} tokens, {accepted} of {self._drafted} drafts accepted, {rate}{PLAIN}\n")
        self._out.flush()


def converse(conversation: Conversation, source: TextIO, out: TextIO) -> int:
    """Read messages until the end of the input. Returns the exit status.

    On a terminal there is a prompt and colour; elsewhere each line is a message, and only the answers are written.
    """
    interactive = source.isatty() and out.isatty()
    colour = out.isatty() and not os.environ.get("NO_COLOR")
    if isinstance(out, TextIOWrapper):
        out.reconfigure(errors="replace")  # characters that its encoding does not have
    try:
        conversation.open()
        if interactive:
            drafts = f"{GREEN}accepted drafts{PLAIN} are green. " if colour else ""
            out.write(
                f"{printable(conversation.model)} at {conversation.url}. {drafts}Ctrl-C stops an answer, Ctrl-D ends\n"
            )
    except (NoAnswer, LookupError, ValueError) as error:
        print(f"foretoken: {printable(str(error))}", file=sys.stderr)
        return 1
    failed = False
    for text in _messages(source, out, interactive=interactive):
        try:
            conversation.say(text, out, colour=colour)
        except NoAnswer as error:
            failed = True
            print(f"foretoken: {printable(str(error))}", file=sys.stderr)
    return 1 if failed and not interactive else 0


def _messages(source: TextIO, out: TextIO, *, interactive: bool) -> Iterator[str]:
    while True:
        if interactive:
            out.write(PROMPT)
            out.flush()
        try:
            line = source.readline()
        except KeyboardInterrupt:
            line = ""
        if not line or line.strip() in ENDINGS:
            return
        if line.strip():
            yield line.rstrip("\n")


def _events(reply: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Raises NoAnswer for a stream without an end, and ValueError for one that cannot be read."""
    for line in reply:
        data = line.decode("utf-8").strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data.startswith("{"):
            yield json.loads(data)
    raise NoAnswer("the answer broke off: the server closed the connection")


def printable(text: str) -> str:
    """Without control characters, which a terminal would obey, and without invisible ones that reorder the text."""
    return "".join(c if c in HARMLESS or category(c) not in ("Cc", "Cf", "Cs") else "�" for c in text)


def _refusal(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "this server needs an API key: --key KEY"
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        message = error.reason
    return f"{error.code}: {message}"
