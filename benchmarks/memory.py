"""What the KV cache and the scheduler get out of a fixed memory: paged against slotted.

    python -m benchmarks.memory --threads 2 --part prefix,decode

Without --target and --draft it runs the embedded pair. Every part runs each k of --spec. Parts:
  prefix        two prompts with --shared tokens in common and a tail of their own: the second one finds the blocks of
                the first (hit). The control is the second prompt under another salt, which must cost as much as a miss
  decode        the same prompts through two slotted engines (their difference is noise), a paged one, and a paged one
                whose blocks do not fill pages of the host's memory, so that attention gathers them
  concurrency   how many sequences run at once in the memory of --slots slots while others wait, weighted by time
  interference  streams while a long prompt is read: benchmarks/interference.py
  bookkeeping   what scheduler and cache cost per step: benchmarks/bookkeeping.py
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import common
from benchmarks.bookkeeping import measure_bookkeeping
from benchmarks.interference import measure_interference
from benchmarks.measure import Run, merge, timed_run
from benchmarks.stats import Rows, first_divergence, median_ratio
from benchmarks.stepping import Driver, Text, TokenList, block_size, greedy, make_engine
from engine.config import CacheKind, EngineConfig

CHUNK = EngineConfig("").prefill_chunk  # the engine's own
DEMO = ["--target", "models/demo/target", "--draft", "models/demo/draft"]


@dataclass(frozen=True)
class RequestStart:
    """The start of one request."""

    token_s: float
    draft_s: float | None  # until the end of the first round with drafts; None: no round had any
    cached: int
    output: TokenList


def start_alone(driver: Driver, prompt: TokenList, k: int, salt: str) -> RequestStart:
    """Run one request alone, with enough output for the draft model to read the whole prompt."""
    request = driver.submit(prompt, greedy(2 * k + 8), k, salt)
    draft_s = None
    while driver.engine.has_work:
        result = driver.step()
        if draft_s is None and result.stats.drafted:
            draft_s = time.perf_counter() - request.submitted
    return RequestStart(request.first_token_s, draft_s, request.record.cached_tokens, request.token_ids)


def measure_prefix(args: argparse.Namespace, text: Text) -> Rows:
    """Raises RuntimeError unless exactly the hits find cached tokens."""
    driver = Driver(make_engine(args, "paged", 2, block_size=args.block_size, kv_tokens=4 * args.max_model_len))
    starts: dict[tuple[int, str], list[RequestStart]] = {}
    for repeat, k in itertools.product(range(-1, args.repeats), args.spec):
        shared, salt = text.take(args.shared), f"{repeat}-{k}"
        first, second = [shared + text.take(args.tail) for _ in range(2)]
        turns = {"miss": (first, salt), "hit": (second, salt), "other salt": (second, f"{salt}-other")}
        for name, (prompt, cache_salt) in turns.items():
            start = start_alone(driver, prompt, k, cache_salt)
            if (start.cached > 0) != (name == "hit"):
                raise RuntimeError(f"{name}: {start.cached} tokens of {len(prompt)} were found in the cache")
            if repeat >= 0:
                starts.setdefault((k, name), []).append(start)
    return [_prefix_row(k, name, own, starts[k, "miss"], starts[k, "hit"]) for (k, name), own in starts.items()]


def _prefix_row(
    k: int, name: str, ones: list[RequestStart], misses: list[RequestStart], hits: list[RequestStart]
) -> dict[str, object]:
    drafts, without = ([d.draft_s for d in each if d.draft_s is not None] for each in (ones, misses))
    whole = len(drafts) == len(without) == len(ones)
    return {
        "k": common.spec_name(k),
        "request": name,
        "cached tokens": median(one.cached for one in ones),
        "first token ms": median(one.token_s for one in ones) * 1e3,
        "speedup": median_ratio([one.token_s for one in misses], [one.token_s for one in ones]),
        "first draft ms": median(drafts) * 1e3 if whole else None,
        "draft speedup": median_ratio(without, drafts) if whole else None,
        # A miss has a tail of its own, so there is nothing to compare its text with.
        "same text": None if name == "miss" else [o.output for o in ones] == [h.output for h in hits],
    }


def decode_drivers(args: argparse.Namespace) -> dict[str, Driver]:
    max_running = max(args.concurrency)
    paged = {"paged": args.block_size, "paged, gathered": args.gathered_block}
    drivers = {name: Driver(make_engine(args, "slotted", max_running)) for name in ("slotted", "slotted again")}
    for name, size in paged.items():
        drivers[name] = Driver(
            make_engine(args, "paged", max_running, block_size=size, kv_tokens=max_running * args.max_model_len)
        )
    return drivers


def measure_decode(args: argparse.Namespace, text: Text) -> Rows:
    drivers = decode_drivers(args)
    rows: Rows = []
    for batch, k in itertools.product(args.concurrency, args.spec):
        groups = [[text.take(args.prompt_tokens) for _ in range(batch)] for _ in range(args.groups)]
        runs: dict[str, list[Run]] = {name: [] for name in drivers}
        for repeat in range(-1, args.repeats):
            merged = _in_turn(drivers, groups[:1] if repeat < 0 else groups, args.max_tokens, k, repeat)
            for name, run in merged.items():
                runs[name] += [run] if repeat >= 0 else []
        for name, own in runs.items():
            row: dict[str, object] = {"batch": batch, "k": common.spec_name(k), "cache": name}
            rows.append(row | {"block": block_size(drivers[name].engine)} | _rates(own, runs["slotted"]))
    return rows


def _in_turn(
    drivers: dict[str, Driver], groups: list[list[TokenList]], max_tokens: int, k: int, turn: int
) -> dict[str, Run]:
    """Every engine runs a group before the next group's turn; the first engine changes from group to group."""
    group_runs: dict[str, list[Run]] = {name: [] for name in drivers}
    for index, group in enumerate(groups):
        names = list(drivers)
        shift = (turn + index) % len(names)
        for name in names[shift:] + names[:shift]:
            group_runs[name].append(timed_run(drivers[name], group, greedy(max_tokens), k))
        for name in names[1:]:
            _require_same_text(name, group_runs[name][-1].outputs, group_runs[names[0]][-1].outputs)
    return {name: merge(runs) for name, runs in group_runs.items()}


def _require_same_text(name: str, outputs: list[TokenList], expected: list[TokenList]) -> None:
    for i, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
        position = first_divergence(output, reference)
        if position is not None:
            raise RuntimeError(f"{name}: sequence {i} differs from the slotted engine's text from token {position} on")


def _rates(runs: list[Run], slotted: list[Run]) -> dict[str, object]:
    return {
        "tok/s": median(r.tokens_per_s for r in runs),
        "decode tok/s": median(r.decode_tokens_per_s for r in runs),
        "target ms": median(r.target_s for r in runs) * 1e3,
        "throughput ratio": median_ratio([r.tokens_per_s for r in runs], [r.tokens_per_s for r in slotted]),
        "decode ratio": median_ratio([r.decode_tokens_per_s for r in runs], [r.decode_tokens_per_s for r in slotted]),
    }


@dataclass(frozen=True)
class ConcurrencyRun:
    """One run of the workload of `concurrency`."""

    mean_running: float  # while others wait, weighted by time
    peak: int
    preempted: int
    tokens_per_s: float


def run_together(driver: Driver, requests: Sequence[tuple[TokenList, int]], k: int) -> ConcurrencyRun:
    """Run requests (prompt, output tokens) that all arrive at once. Raises RuntimeError if none had to wait."""
    for prompt, output in requests:
        driver.submit(prompt, greedy(output), k)
    backlog: list[tuple[int, float]] = []
    peak = preempted = 0
    started = time.perf_counter()
    while driver.engine.has_work:
        result = driver.step()
        stats = result.stats
        # The statistics count sequences that are left after the step; those that it ended ran in it too.
        running = stats.running + sum(o.finish_reason is not None for o in result.outputs)
        peak, preempted = max(peak, running), preempted + stats.preempted
        if stats.waiting:
            backlog.append((running, stats.step_us))
    seconds = time.perf_counter() - started
    if not backlog:
        raise RuntimeError(f"all {len(requests)} requests ran at once: raise --requests")
    mean = sum(running * us for running, us in backlog) / sum(us for _, us in backlog)
    return ConcurrencyRun(mean, peak, preempted, sum(output for _, output in requests) / seconds)


def measure_concurrency(args: argparse.Namespace, text: Text) -> Rows:
    """The same memory as --slots slots of max_model_len and as the same number of positions in blocks."""
    positions = args.slots * args.max_model_len
    drivers: dict[CacheKind, Driver] = {
        "slotted": Driver(make_engine(args, "slotted", args.slots)),
        "paged": Driver(make_engine(args, "paged", args.most_running, block_size=args.block_size, kv_tokens=positions)),
    }
    lengths = random.Random(0)
    requests = []
    for _ in range(args.requests):
        length = lengths.randint(*args.lengths)
        requests.append((text.take(length // 2), length - length // 2))
    runs: dict[tuple[int, CacheKind], list[ConcurrencyRun]] = {}
    for _, k, name in itertools.product(range(args.passes), args.spec, drivers):
        runs.setdefault((k, name), []).append(run_together(drivers[name], requests, k))
    return [_concurrency_row(k, name, own, runs[k, "slotted"], positions) for (k, name), own in runs.items()]


def _concurrency_row(
    k: int, name: CacheKind, own: list[ConcurrencyRun], slotted: list[ConcurrencyRun], positions: int
) -> dict[str, object]:
    return {
        "k": common.spec_name(k),
        "cache": name,
        "positions": positions,
        "mean running": median(c.mean_running for c in own),
        "running ratio": median_ratio([c.mean_running for c in own], [c.mean_running for c in slotted]),
        "peak": max(c.peak for c in own),
        "preempted": max(c.preempted for c in own),
        "tok/s": median(c.tokens_per_s for c in own),
        "throughput ratio": median_ratio([c.tokens_per_s for c in own], [c.tokens_per_s for c in slotted]),
    }


PARTS: dict[str, Callable[[argparse.Namespace, Text], Rows]] = {
    "prefix": measure_prefix,
    "decode": measure_decode,
    "concurrency": measure_concurrency,
    "interference": measure_interference,
    "bookkeeping": measure_bookkeeping,
}


def part_list(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(PARTS)}")
    return names


def pair_of_lengths(text: str) -> tuple[int, int]:
    low, high = map(int, text.split("-"))
    if not 2 <= low <= high:
        raise argparse.ArgumentTypeError("must be LOW-HIGH, from 2 on: a prompt and an output token")
    return low, high


def add_arguments(p: argparse.ArgumentParser) -> None:
    number = common.positive
    p.add_argument("--part", type=part_list, default=list(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    p.add_argument("--spec", type=common.spec_list, default=[0, 4], help="drafts per round (default off,4)")
    p.add_argument("--repeats", type=number, default=10, help="medians are over repeats (default %(default)s)")
    p.add_argument("--max-model-len", type=number, default=2048)
    p.add_argument("--block-size", type=number, help="of paged caches; default: the engine's own")
    p.add_argument("--prompt-tokens", type=number, default=96, help="of prompts in decode, interference, bookkeeping")
    p.add_argument("--shared", type=number, default=1024, help="prefix: tokens in common")
    p.add_argument("--tail", type=number, default=16, help="prefix: tokens after them")
    p.add_argument("--concurrency", type=common.concurrency_list, default=[1, 8], help="decode: batch sizes")
    p.add_argument("--groups", type=number, default=4, help="decode: batches per repeat")
    p.add_argument("--gathered-block", type=number, default=12, help="decode: a block size that fills no whole pages")
    p.add_argument("--slots", type=number, default=4, help="concurrency: slots whose memory there is")
    p.add_argument("--most-running", type=number, default=64, help="concurrency: max_running of the paged engine")
    p.add_argument("--requests", type=number, default=96, help="concurrency: requests, all there from the beginning")
    p.add_argument("--lengths", type=pair_of_lengths, default=(64, 512), help="concurrency: LOW-HIGH, half is prompt")
    p.add_argument("--passes", type=number, default=3, help="concurrency, bookkeeping: runs of the workload")
    p.add_argument("--streams", type=number, default=8, help="interference: sequences that run already")
    p.add_argument("--long-prompt", type=number, default=1500, help="interference: tokens of the prompt that comes")
    p.add_argument("--window", type=number, default=40, help="interference: steps without it, before it comes")
    p.add_argument(
        "--prefill-chunk", type=common.concurrency_list, default=[CHUNK], help="interference: such as 64,128"
    )
    p.add_argument("--sequences", type=number, default=64, help="bookkeeping: sequences that run together")
    p.add_argument("--steps", type=number, default=64, help="bookkeeping: steps timed per pass")
    p.set_defaults(prompts_count=64)


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    add_arguments(p)
    args = p.parse_args([*DEMO, *(sys.argv[1:] if argv is None else argv)])
    workload = common.prepare(args)
    settings = {name: value for name, value in vars(args).items() if name not in ("target", "draft", "prompts", "json")}
    report = common.describe_run(args, "memory", workload.describe(**settings))
    text = Text(workload.prompts)
    results: dict[str, Rows] = {}
    for part in args.part:
        print(f"{part} ...", file=sys.stderr, flush=True)
        results[part] = PARTS[part](args, text)
    common.print_report(report | {"results": results}, list(results.values()), args.json)


if __name__ == "__main__":
    main()
