"""What HTTP serving costs one stream: an idle server and an engine in this process, in turn.

    python -m benchmarks.serving --target models/demo/target --draft models/demo/draft --url http://127.0.0.1:8000

`first token` is the time from sending the request on an open connection to the first byte of the streamed body, in
process the time from arrival to first token. `tok/s` are the tokens of one text over the time from the first token to
the last. Start the server with the same models, dtype and threads; the policy of both is goodput.
"""

import argparse
import http.client
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from urllib.parse import urlsplit

from benchmarks import common
from benchmarks.measure import Generator
from engine.llm import LLM
from engine.types import SamplingParams

PAUSE_S = 0.05  # between requests, so that each finds both engines idle
WARMUPS = 3


def served_model(connection: http.client.HTTPConnection) -> str:
    """The id of the first model the server lists. Raises RuntimeError if it does not answer with one."""
    connection.request("GET", "/v1/models")
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"GET /v1/models answered {response.status}: {body[:200]!r}")
    return str(json.loads(body)["data"][0]["id"])


@dataclass(frozen=True)
class TimedText:
    """One text."""

    first_s: float  # until its first token
    rest_s: float  # from its first token to its last


def over_http(connection: http.client.HTTPConnection, model: str, prompt: Sequence[int], max_tokens: int) -> TimedText:
    """Stream one greedy completion. Raises RuntimeError when the server does not stream a completion."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    payload = json.dumps(body | {"ignore_eos": True}).encode()
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read(1)
    first = time.perf_counter()
    text += response.read()
    last = time.perf_counter()
    if response.status != 200 or not text.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"POST /v1/completions answered {response.status}: {text[:200]!r}")
    return TimedText(first - start, last - first)


def in_process(llm: Generator, prompt: Sequence[int], max_tokens: int) -> TimedText:
    """Run the same request in this process."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    record = llm.generate([list(prompt)], params)[0].record
    if record.first_token is None or record.finished is None:
        raise RuntimeError("the engine recorded no first token or no end")
    return TimedText(record.first_token - record.arrived, record.finished - record.first_token)


def alternate(
    sides: Sequence[Callable[[Sequence[int]], TimedText]], prompts: Sequence[Sequence[int]]
) -> list[list[TimedText]]:
    """Every side once per prompt, in turn and with a pause; one list of texts per side, without the warm-ups."""
    seconds: list[list[TimedText]] = [[] for _ in sides]
    for prompt in [prompts[0]] * WARMUPS + list(prompts):
        for side, measured in zip(sides, seconds, strict=True):
            time.sleep(PAUSE_S)
            measured.append(side(prompt))
    return [measured[WARMUPS:] for measured in seconds]


def measure(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> list[dict[str, object]]:
    url = urlsplit(args.url)
    llm = LLM(args.target, args.draft, device=args.device, dtype=args.dtype, threads=args.threads)
    local = partial(in_process, llm, max_tokens=args.max_tokens)
    with closing(http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=60)) as connection:
        served = partial(over_http, connection, served_model(connection), max_tokens=args.max_tokens)
        served_texts, local_texts = alternate([served, local], prompts)
    return compare(served_texts, local_texts, args.max_tokens)


def compare(served: Sequence[TimedText], local: Sequence[TimedText], tokens: int) -> list[dict[str, object]]:
    """Both sides, then the median difference of their first tokens and the median ratio of their speeds."""
    pairs = list(zip(served, local, strict=True))
    differences = [(h.first_s - p.first_s) * 1e3 for h, p in pairs]
    ratio = median(p.rest_s / h.rest_s for h, p in pairs)
    both = [_row("http", served, tokens), _row("in process", local, tokens)]
    return [*both, {"side": "difference; ratio", **_first_token(differences), "tok/s": ratio}]


def _row(side: str, texts: Sequence[TimedText], tokens: int) -> dict[str, object]:
    speed = median((tokens - 1) / text.rest_s for text in texts)
    return {"side": side, **_first_token([text.first_s * 1e3 for text in texts]), "tok/s": speed}


def _first_token(ms: Sequence[float]) -> dict[str, object]:
    return {"first token: ms": median(ms), "fastest": min(ms), "slowest": max(ms)}


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.set_defaults(prompts_count=16, max_tokens=128)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    args = p.parse_args(argv)
    workload = common.prepare(args)
    report = common.describe_run(args, "serving", workload.describe(max_tokens=args.max_tokens))
    rows = measure(args, workload.prompts)
    report["results"] = rows
    common.print_report(report, [rows], args.json)


if __name__ == "__main__":
    main()
