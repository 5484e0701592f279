"""How a replica's memory grows under a long, mixed load: one row a minute, and the slope of the last third.

    python -m benchmarks.soak --target models/demo/target --draft models/demo/draft --url http://127.0.0.1:8000 --json

The server runs on this machine, with the same models. --concurrency clients ask for streams and whole replies, several
choices, logprobs, echoes and predictions. They leave some streams, send bad requests and open the live page. No two
prompts are the same. Sizes are MB of 10^6 bytes:
  rss    as the kernel counts it: a page of KV memory counts once per mapping
  anon   heaps, stacks and tensors: leaks would show here
  kv     pages of the KV caches' memory files: a page counts from its block's first use on; the budget limits them
  files  libraries and other mapped files
The slope is that of `anon` over requests, by least squares over the samples of the last third, with a 95 % interval
(Student's t; it is too narrow, because samples of one process are not independent).
"""

import argparse
import asyncio
import itertools
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import common
from benchmarks.compare import Interval
from benchmarks.stats import table

SAMPLE_S = 10.0
PROC = Path("/proc")
REPLICA = "ray::ServeReplica"  # begins the names of Serve's replicas
KV_FILE = "memfd:kv-cache"
PAGES = ("/ui/api/state", "/ui/api/requests", "/health", "/v1/models", "/nowhere")
# 97.5 % points of Student's t for 1, 2, … degrees of freedom, then every 30 or more.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True)
class Sample:
    seconds: float
    requests: int
    rss: float
    anon: float
    kv: float
    files: float
    threads: int
    descriptors: int


def measure(pid: int, seconds: float, requests: int, proc: Path = PROC) -> Sample:
    """A sample of the process. Raises OSError if the process has ended or belongs to another user."""
    process = proc / str(pid)
    sizes = _sizes(process / "smaps_rollup")
    threads = _sizes(process / "status")["Threads"]
    descriptors = list((process / "fd").iterdir())
    files = [d for d in descriptors if d.is_symlink() and KV_FILE in str(d.readlink())]
    return Sample(
        seconds=round(seconds, 1),
        requests=requests,
        rss=sizes["Rss"] * 1024 / 1e6,
        anon=sizes["Pss_Anon"] * 1024 / 1e6,
        kv=sum(d.stat().st_blocks for d in files) * 512 / 1e6,
        files=sizes["Pss_File"] * 1024 / 1e6,
        threads=threads,
        descriptors=len(descriptors),
    )


def _sizes(path: Path) -> dict[str, int]:
    """The first number after each line's name; in smaps_rollup they are kB."""
    lines = (line.split() for line in path.read_text("utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def find_replica(proc: Path = PROC) -> int:
    """The process id of the only replica on this machine. Raises RuntimeError if there are none or several."""
    found = []
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                name = (folder / "cmdline").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            if name.startswith(REPLICA.encode()):
                found.append(int(folder.name))
    if len(found) != 1:
        raise RuntimeError(f"there are {len(found)} replicas on this machine {sorted(found)}: give one as --pid")
    return found[0]


def slope(samples: Sequence[Sample]) -> Interval | None:
    """MB of `anon` per 1,000 requests. None: too few samples, or no requests between them."""
    x = np.array([sample.requests / 1000 for sample in samples])
    y = np.array([sample.anon for sample in samples])
    freedom = len(x) - 2
    if freedom < 1 or np.ptp(x) == 0:
        return None
    spread = float(((x - x.mean()) ** 2).sum())
    value = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    rest = y - y.mean() - value * (x - x.mean())
    error = (float((rest**2).sum()) / freedom / spread) ** 0.5 * STUDENT[min(freedom, len(STUDENT)) - 1]
    return Interval(value, value - error, value + error)


def make_bodies(prompts: Sequence[Sequence[int]], model: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Bodies of /v1/completions, without end. `get`: fetch this path instead. `leave`: close after the first event."""
    draw = random.Random(seed)
    for number in itertools.count():
        prompt = list(draw.choice(prompts))
        prompt = (prompt[draw.randrange(len(prompt) // 2) :] * draw.choice((1, 1, 2, 4)))[: draw.randint(16, 512)]
        draw.shuffle(head := prompt[:8])
        body: dict[str, Any] = {
            "model": model,
            "prompt": head + prompt[8:],
            "max_tokens": draw.choice((8, 32, 64, 128, 256)),
            "temperature": draw.choice((0.0, 0.7, 1.0)),
            "seed": number,
        }
        yield body | _variant(draw, number)


def _variant(draw: random.Random, number: int) -> dict[str, Any]:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
        {"stream": True, "leave": True, "max_tokens": 400, "ignore_eos": True},
        {"n": draw.randint(2, 4)},
        {"n": 2, "stream": True, "logprobs": draw.randint(0, 5)},
        {"logprobs": 5, "echo": True, "max_tokens": 8},
        {"speculation": {"steps": True, "tokens": True}, "stop": [f"# {number}", "\n\n\n"]},
        {"speculation": {"k": 0}, "ignore_eos": True},
        {"speculation": {"k": draw.randint(1, 8), "drafter": "cascade"}, "stream": True},
        {"prediction": {"type": "content", "content": f"x = {number}\n" * 20}},
        {"deadline_s": 0.05, "max_tokens": 400},
        {"max_tokens": 100_000},
        {f"unknown_{number}": 1},
        {"model": f"none-{number}"},
        {"get": draw.choice(PAGES)},
    )
    return kinds[number % len(kinds)]


class Load:
    """Clients that send one request after another until they are cancelled."""

    def __init__(self, client: httpx.AsyncClient, bodies: Iterator[dict[str, Any]], pause_s: float) -> None:
        self.statuses: Counter[str] = Counter()  # of replies, and the names of errors
        self._client, self._bodies, self._pause_s = client, bodies, pause_s

    @property
    def requests(self) -> int:
        return self.statuses.total()

    async def run(self) -> None:
        while True:
            try:
                self.statuses[await self._ask(next(self._bodies))] += 1
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1
            await asyncio.sleep(self._pause_s)

    async def _ask(self, body: dict[str, Any]) -> str:
        headers = {"x-request-id": str(uuid.uuid4())}
        if "get" in body:
            return str((await self._client.get(body["get"], headers=headers)).status_code)
        leave = body.pop("leave", False)
        async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            async for _ in response.aiter_lines():
                if leave:
                    return "left"
        return str(response.status_code)


async def served_model(client: httpx.AsyncClient) -> str:
    """The id of the first model that the server lists. Raises httpx.HTTPError if it does not answer with one."""
    return str((await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"])


async def soak(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> tuple[list[Sample], Counter[str]]:
    """(samples, replies by status); prints a row a minute."""
    pid = args.pid or find_replica()
    async with httpx.AsyncClient(base_url=args.url, timeout=120) as client:
        load = Load(client, make_bodies(prompts, await served_model(client), args.seed), args.pause)
        began = time.monotonic()
        samples = [measure(pid, 0.0, 0)]
        print(table([row(samples[0])]), flush=True)
        tasks = [asyncio.create_task(load.run()) for _ in range(args.concurrency)]
        try:
            while samples[-1].seconds < 60 * args.minutes:
                await asyncio.sleep(SAMPLE_S)
                for task in tasks:
                    if task.done():
                        task.result()
                samples.append(measure(pid, time.monotonic() - began, load.requests))
                if len(samples) % 6 == 1:
                    print(table([row(samples[-1])]).splitlines()[-1], flush=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return samples, load.statuses


def row(sample: Sample) -> dict[str, object]:
    sizes = {name: f"{getattr(sample, name):.1f}".rjust(7) for name in ("rss", "anon", "kv", "files")}
    return {
        "minute": f"{sample.seconds / 60:.1f}".rjust(6),
        "requests": f"{sample.requests:,}".rjust(8),
        **sizes,
        "threads": f"{sample.threads}".rjust(7),
        "descriptors": f"{sample.descriptors}".rjust(11),
    }


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.set_defaults(prompts_count=64)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--pid", type=common.positive, help="of the replica; default: the one replica of this machine")
    p.add_argument("--minutes", type=float, default=30.0)
    p.add_argument("--concurrency", type=common.positive, default=4, help="clients (default %(default)s)")
    p.add_argument("--pause", type=float, default=0.0, help="seconds of a client between requests")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    workload = common.prepare(args)
    about = {name: getattr(args, name) for name in ("minutes", "concurrency", "pause", "seed")}
    report = common.describe_run(args, "soak", workload.describe(**about))
    samples, statuses = asyncio.run(soak(args, workload.prompts))
    last = samples[-(len(samples) // 3) :]
    replies: dict[str, object] = dict(statuses)
    growth: dict[str, object] = {
        "anon MB": samples[-1].anon - samples[0].anon,
        "of it in the last third": last[-1].anon - last[0].anon,
        "MB per 1,000 requests": slope(last),
    }
    report |= {"results": [asdict(sample) for sample in samples], "replies": replies, "growth": growth}
    common.print_report(report, [[replies], [growth]], args.json)


if __name__ == "__main__":
    main()
