"""What HTTP serving adds to the time to first token: an idle server and an engine in this process, in turn.

    python -m benchmarks.serving --target models/demo/target --draft models/demo/draft --url http://127.0.0.1:8000

`http` is the time from sending the request on an open connection to the first byte of the streamed body. `in process`
is the time from arrival to first token in an engine of this process. Start the server with the same models and dtype.
"""

import argparse
import http.client
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
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


def first_byte_s(connection: http.client.HTTPConnection, model: str, prompt: Sequence[int], max_tokens: int) -> float:
    """Seconds to the first byte of one streamed greedy completion, which is then read to its end.

    Raises RuntimeError when the server does not stream a completion.
    """
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    payload = json.dumps(body).encode()
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.read(1)
    elapsed = time.perf_counter() - start
    text = first + response.read()
    if response.status != 200 or not text.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"POST /v1/completions answered {response.status}: {text[:200]!r}")
    return elapsed


def first_token_s(llm: Generator, prompt: Sequence[int], max_tokens: int) -> float:
    """Seconds from arrival to first token of the same request in process."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    record = llm.generate([list(prompt)], params)[0].record
    if record.first_token is None:
        raise RuntimeError("the engine recorded no first token")
    return record.first_token - record.arrived


def alternate(sides: Sequence[Callable[[Sequence[int]], float]], prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Every side once per prompt, in turn and with a pause; one list of seconds per side, without the warm-ups."""
    seconds: list[list[float]] = [[] for _ in sides]
    for prompt in [prompts[0]] * WARMUPS + list(prompts):
        for side, measured in zip(sides, seconds, strict=True):
            time.sleep(PAUSE_S)
            measured.append(side(prompt))
    return [measured[WARMUPS:] for measured in seconds]


def measure(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> list[dict[str, object]]:
    """Median, fastest and slowest of both sides, and the difference of the medians, in milliseconds."""
    url = urlsplit(args.url)
    llm = LLM(args.target, args.draft, device=args.device, dtype=args.dtype, threads=args.threads)
    in_process = partial(first_token_s, llm, max_tokens=args.max_tokens)
    with closing(http.client.HTTPConnection(url.hostname or "127.0.0.1", url.port, timeout=60)) as connection:
        over_http = partial(first_byte_s, connection, served_model(connection), max_tokens=args.max_tokens)
        http_s, local_s = alternate([over_http, in_process], prompts)
    rows: list[dict[str, object]] = [
        {"side": name, "median ms": median(s) * 1e3, "fastest ms": min(s) * 1e3, "slowest ms": max(s) * 1e3}
        for name, s in (("http", http_s), ("in process", local_s))
    ]
    differences = [h - local for h, local in zip(http_s, local_s, strict=True)]
    spread = {"fastest ms": min(differences) * 1e3, "slowest ms": max(differences) * 1e3}
    return [*rows, {"side": "difference", "median ms": (median(http_s) - median(local_s)) * 1e3, **spread}]


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.set_defaults(prompts_count=30, max_tokens=16)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    args = p.parse_args(argv)
    workload = common.prepare(args)
    report = common.describe_run(args, "serving", workload.describe(max_tokens=args.max_tokens))
    rows = measure(args, workload.prompts)
    report["results"] = rows
    common.print_report(report, [rows], args.json)


if __name__ == "__main__":
    main()
