"""Shows a request's rounds in the terminal: python -m scripts.trace ID [--url URL] [--key KEY] [--rounds]

ID is the reply's id, with or without "cmpl-", or "last". A round is a column as high as k, filled up to the number of
accepted drafts. A server keeps its latest requests only; each replica of a deployment keeps its own. The exit status is
1, with the reason on stderr, if there is nothing to show.
"""

import argparse
import codecs
import json
import math
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NamedTuple, TextIO
from urllib.parse import quote

ROWS = 16  # the most rows in a strip
SLOWEST = 5  # rounds in the table
LEFT_COLUMNS = 4  # terminal columns left of a strip
TIMEOUT_S = 10.0

WHY = ("policy", "user", "cap", "cache", "acceptance", "load", "probe", None)  # reasons for k; None: k was not chosen
LETTERS: dict[str | None, str] = dict(zip(WHY, "pucmal?-", strict=True))
UNCHOSEN = "not chosen"
TIMES = {"draft": "draft_us", "verify": "verify_us", "rest": "overhead_us"}
GREEN, RED, GREY = "32", "31", "90"


class Failed(Exception):
    """There is nothing to show. The message says why."""


class RoundRow(NamedTuple):
    """One round, in the order of the server's columns. Times in microseconds, alpha per mille."""

    step: int
    k: int
    reason: str | None
    alpha: int
    drafted: int
    accepted: int
    emitted: int
    drafter: str | None
    batch: int
    began_us: int
    draft_us: int
    verify_us: int
    overhead_us: int

    @property
    def total_us(self) -> int:
        return self.draft_us + self.verify_us + self.overhead_us


@dataclass(frozen=True)
class Look:
    """Width, colour and characters of the terminal."""

    width: int
    colour: bool
    accepted: str
    rejected: str
    missing: str  # a draft that was requested and not offered
    edge: str

    @classmethod
    def of(cls, width: int, *, unicode: bool, colour: bool) -> "Look":
        return cls(width, colour, *("█░·│" if unicode else "#-.|"))

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text.strip() else text


def fetch(url: str, key: str | None) -> Any:
    """Raises Failed."""
    if not url.startswith(("http://", "https://")):
        raise Failed(f"{url} is no http:// or https:// address")
    try:
        request = urllib.request.Request(url)
        if key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            data = reply.read()
    except urllib.error.HTTPError as error:
        with error:
            raise Failed(_refusal(error, url, key)) from None
    except (OSError, ValueError, HTTPException) as error:
        raise Failed(f"no answer from {url}: {getattr(error, 'reason', error)}") from None
    try:
        return printable(json.loads(data))
    except ValueError:
        raise Failed(f"{url} answers something else than JSON") from None


def printable(value: Any) -> Any:
    """Replace control characters in JSON, which a terminal would obey."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    if isinstance(value, list):
        return [printable(item) for item in value]
    return {name: printable(item) for name, item in value.items()} if isinstance(value, dict) else value


def _refusal(error: urllib.error.HTTPError, url: str, key: str | None) -> str:
    if error.code == 401:
        return "this server needs an API key: --key KEY" if key is None else "this server refuses that API key"
    try:
        message = printable(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        message = error.reason
    return f"{url} answers {error.code}: {message}"


def find(base: str, name: str, key: str | None) -> dict[str, Any]:
    """Return the request as /ui/api/requests/{id} gives it. Raises Failed."""
    api = f"{base.rstrip('/')}/ui/api/requests"
    if name == "last":
        latest = fetch(api, key)["requests"]
        if not latest:
            raise Failed("this server has ended no request yet")
        name = latest[0]["id"]
    return fetch(f"{api}/{quote(name, safe='')}", key)


def rounds_of(choice: dict[str, Any]) -> list[RoundRow]:
    columns = (choice["rounds"][name] for name in RoundRow._fields)
    return [RoundRow(*row) for row in zip(*columns, strict=True)]


def report(request: dict[str, Any], look: Look, *, whole: bool = False) -> Iterator[str]:
    """The lines to print. whole: whether to show all rounds instead of the slowest."""
    yield from header(request, look)
    if not request["choices"]:
        yield "no rounds: the engine ran nothing of this request"
    for choice in request["choices"]:
        yield from ("", about(choice))
        if rounds := rounds_of(choice):
            yield from (*strip(rounds, look), *legend(rounds, look), "")
            yield from (*by_reason(rounds), "")
            yield from (*(every(rounds, choice.get("trees")) if whole else slowest(rounds)), "")
            yield from totals(rounds)
        else:
            yield "no rounds"


def header(request: dict[str, Any], look: Look) -> Iterator[str]:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(request["began_unix_ms"] / 1000))
    status = look.paint(request["status"], GREEN if request["status"] == "ok" else RED)
    error = f" ({request['error']})" if request["error"] else ""
    yield f"{request['id']}  {status}{error}  {request['model']}  {began} UTC"
    keys = {"queue": "queue_ms", "first token": "ttft_ms", "total": "total_ms"}
    times = {name: request[key] for name, key in keys.items()}
    shown = ", ".join(f"{name} {'-' if ms is None else f'{ms:.1f} ms'}" for name, ms in times.items())
    yield f"{request['prompt_tokens']} + {request['output_tokens']} tokens; {shown}"
    yield f"trace {request['trace_id'] or '-'}"


def about(choice: dict[str, Any]) -> str:
    k = f"k at most {choice['k_max']}" if choice["fixed_k"] is None else f"k = {choice['fixed_k']}"
    speculation = f"drafter {choice['drafter']}, verifier {choice['verifier']}, policy {choice['policy']}, {k}"
    end = choice["finish_reason"] or "not finished"
    return f"choice {choice['index']}: {end}; {speculation if choice['drafter'] else 'speculation off'}"


def strip(rounds: Sequence[RoundRow], look: Look) -> Iterator[str]:
    """Yield the strip, wrapped to the width. Below a column are the reason for k and the number of each tenth round."""
    most = max(max(r.k, r.drafted) for r in rounds)
    unit = per_row(rounds)
    width = max(10, look.width - LEFT_COLUMNS - 1)
    for first in range(0, len(rounds), width):
        part = rounds[first : first + width]
        for row in range(math.ceil(most / unit), 0, -1):
            cells = "".join(_cell(r, (row - 1) * unit, look) for r in part)
            yield f"{row * unit:>{LEFT_COLUMNS - 1}} {look.edge}{cells}".rstrip()
        reasons = "".join(LETTERS.get(r.reason, "*") for r in part)
        yield f"{'':{LEFT_COLUMNS}}{look.edge}{look.paint(reasons, GREY)}"
        yield f"{'':{LEFT_COLUMNS}}{look.edge}{_numbers(first, len(part))}".rstrip()


def per_row(rounds: Sequence[RoundRow]) -> int:
    """Return the number of drafts per row of the strip."""
    return max(1, math.ceil(max(max(r.k, r.drafted) for r in rounds) / ROWS))


def _cell(r: RoundRow, below: int, look: Look) -> str:
    """Return the character of a row. below: number of drafts in the rows under it."""
    if r.accepted > below:
        return look.paint(look.accepted, GREEN)
    if r.drafted > below:
        return look.paint(look.rejected, RED)
    return look.missing if r.k > below else " "


def _numbers(first: int, count: int) -> str:
    """Return the numbers of every tenth round, as far as they fit."""
    text = ""
    for i in range(first + -first % 10, first + count, 10):
        if i - first + len(str(i)) <= count:
            text = f"{text:{i - first}}{i}"
    return text


def legend(rounds: Sequence[RoundRow], look: Look) -> Iterator[str]:
    unit = per_row(rounds)
    scale = f"; a row is {unit} drafts" if unit > 1 else ""
    yield f"{look.accepted} accepted  {look.rejected} rejected  {look.missing} asked for, not offered{scale}"
    seen = {r.reason for r in rounds}
    yield "k: " + "  ".join(f"{letter} {why or UNCHOSEN}" for why, letter in LETTERS.items() if why in seen)


def by_reason(rounds: Sequence[RoundRow]) -> Iterator[str]:
    rows = []
    for why in (*WHY, *sorted({r.reason for r in rounds} - set(WHY), key=str)):
        mine = [r for r in rounds if r.reason == why]
        if mine:
            drafted, accepted = _sum(mine, "drafted"), _sum(mine, "accepted")
            mean_k, share = f"{_sum(mine, 'k') / len(mine):.1f}", _share(accepted, drafted)
            rows.append((why or UNCHOSEN, len(mine), mean_k, drafted, accepted, share, _sum(mine, "emitted")))
    yield from table(("why k", "rounds", "mean k", "drafted", "accepted", "share", "tokens"), rows)


def slowest(rounds: Sequence[RoundRow]) -> Iterator[str]:
    order = sorted(range(len(rounds)), key=lambda i: (-rounds[i].total_us, i))[:SLOWEST]
    names = ("slowest", "step", "at ms", "total ms", "draft", "verify", "rest", "k", "accepted", "batch", "drafter")
    rows = []
    for i in order:
        r = rounds[i]
        times = (_ms(us) for us in (r.began_us, r.total_us, r.draft_us, r.verify_us, r.overhead_us))
        rows.append((i, r.step, *times, r.k, f"{r.accepted}/{r.drafted}", r.batch, r.drafter or "-"))
    yield from table(names, rows)


def every(rounds: Sequence[RoundRow], trees: Sequence[Any] | None) -> Iterator[str]:
    """trees: by round, None for a chain; None: no round had a tree."""
    names = ["round", "at ms", "ms", "k", "why", "drafted", "accepted", "tokens", "batch", "drafter"]
    rows: list[tuple[Any, ...]] = []
    for i, r in enumerate(rounds):
        times, drafts = (_ms(r.began_us), _ms(r.total_us)), (r.drafted, r.accepted, r.emitted)
        rows.append((i, *times, r.k, r.reason or "-", *drafts, r.batch, r.drafter or "-"))
    if trees:
        drawings = [drawing(tree) if tree else "-" for tree in trees]
        longest = max(map(len, drawings))
        rows = [(*row, f"{text:<{longest}}") for row, text in zip(rows, drawings, strict=True)]
        names.append("tree")
    yield from table(names, rows)
    if trees:
        yield "tree: + accepted, 2 to 9 accepted as that sibling, x rejected, . not reached, / next branch"


def drawing(tree: dict[str, list[int]]) -> str:
    """One sign per draft. A draft that does not follow the one before it begins a branch."""
    accepted, children, signs = tree["accepted"], dict[int, int](), ""
    decided = set[int]()  # drafts whose accepted child has come
    for node, parent in enumerate(tree["parents"]):
        rank = children[parent] = children.get(parent, 0) + 1
        tried = (parent < 0 or parent in accepted) and parent not in decided
        signs += "/" if 0 < node != parent + 1 else ""
        if node in accepted:
            decided.add(parent)
            signs += "+" if rank == 1 else str(min(rank, 9))
        else:
            signs += "x" if tried else "."
    return signs


def totals(rounds: Sequence[RoundRow]) -> Iterator[str]:
    emitted, drafted, accepted = _sum(rounds, "emitted"), _sum(rounds, "drafted"), _sum(rounds, "accepted")
    verified = sum(1 for r in rounds if r.drafted)
    yield (
        f"{emitted} tokens in {len(rounds)} rounds, {verified} of them with drafts: {emitted / len(rounds):.2f} tokens "
        f"per round; {accepted} of {drafted} drafts accepted ({_share(accepted, drafted)})"
    )
    parts = ", ".join(f"{name} {_ms(_sum(rounds, column))}" for name, column in TIMES.items())
    yield f"steps took {_ms(_sum(rounds, 'total_us'))} ms: {parts}"


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Align the first column to the left and the others to the right."""
    cells = [names, *([str(item) for item in row] for row in rows)]
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for head, *items in cells:
        yield "  ".join([f"{head:<{first}}", *(f"{item:>{w}}" for item, w in zip(items, widths, strict=True))])


def _sum(rounds: Sequence[RoundRow], column: str) -> int:
    return sum(getattr(r, column) for r in rounds)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _ms(us: int) -> str:
    return f"{us / 1000:.1f}"


def look_of(stream: TextIO) -> Look:
    """Use colour only on a terminal without NO_COLOR, and ASCII if the encoding is not UTF-8."""
    unicode = codecs.lookup(stream.encoding or "ascii").name == "utf-8"
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    return Look.of(shutil.get_terminal_size().columns, unicode=unicode, colour=colour)


def show(lines: Sequence[str], stream: TextIO) -> None:
    text = "".join(f"{line}\n" for line in lines)
    encoding = stream.encoding or "ascii"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts.trace", description="A request's rounds in the terminal.")
    parser.add_argument("id", help='of the reply, with or without its prefix, or "last"')
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    parser.add_argument("--key", help="an API key, where the server needs one")
    parser.add_argument("--rounds", action="store_true", help="a table of all rounds in place of the slowest ones")
    asked = parser.parse_args(argv)
    try:
        request = find(asked.url, asked.id, asked.key)
        show(list(report(request, look_of(sys.stdout), whole=asked.rounds)), sys.stdout)
    except Failed as failed:
        print(f"trace: {failed}", file=sys.stderr)
        return 1
    except (KeyError, TypeError, ValueError) as error:
        print(f"trace: {asked.url} answers what this script cannot read: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
