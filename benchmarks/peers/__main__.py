"""The engine against transformers, vLLM and llama.cpp on the same work: plain and with drafts.

    scripts/setup_peers.sh
    python -m benchmarks.peers --target DIR --draft DIR --spec off,2,4,goodput --concurrency 1,8 --threads 2

Greedy, with the same prompts, dtype, threads and number of emitted tokens. transformers' assisted generation and prompt
lookup run in batch 1 only; so do llama.cpp's drafts. For bfloat16 llama.cpp has F16. --weights int8 compares our int8
weights with llama.cpp's Q8_0. A peer that cannot run is listed with the reason.
vLLM and llama.cpp are processes that stand still except in their turn. Within each repeat every system continues one
group of prompts before the next group's turn. First table: `ours/theirs` is the median over repeats and groups of the
ratio of tokens per second at the same k; `ours again` is our plain decoding once more, which shows the noise. Second
table: each of our systems over each peer's plain decoding and over its fastest way. Third table: `agree` is the share
of prompts with the same text as transformers' plain generation, or as ours where transformers is left out.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import get_args

import transformers

from benchmarks import common, reference
from benchmarks.peers import report as peers_report
from benchmarks.peers.installed import Unavailable, WorkerPool, llama_systems, vllm_systems
from benchmarks.peers.systems import (
    BatchSize,
    System,
    our_systems,
    run_group,
    run_repeat,
    transformers_systems,
    whole_groups,
)
from benchmarks.peers.worker import WorkerError
from benchmarks.prompts import Prompts
from benchmarks.stats import Rows
from engine.config import WeightForm

ByBatch = dict[int, list[System]]
StartPeer = Callable[[argparse.Namespace, WorkerPool], ByBatch]


def _transformers(args: argparse.Namespace, _: WorkerPool) -> ByBatch:
    if args.weights != "as_is":
        raise Unavailable("it has no int8 product for a CPU")
    return transformers_systems(args)


PEERS: dict[str, StartPeer] = {
    "transformers": _transformers,
    "vllm": vllm_systems,
    "llama.cpp": llama_systems,
}


def start_peers(args: argparse.Namespace, pool: WorkerPool) -> tuple[ByBatch, Rows]:
    """(systems per batch size, one row per peer that is left out)."""
    systems: ByBatch = {batch: [] for batch in args.concurrency}
    skipped: Rows = []
    for name in args.peers:
        try:
            for batch, of_batch in PEERS[name](args, pool).items():
                systems[batch] += of_batch
        except (Unavailable, WorkerError) as error:
            skipped.append({"left out": name, "reason": str(error)})
    return systems, skipped


def make_sizes(args: argparse.Namespace, prompts: Prompts, theirs: ByBatch) -> list[BatchSize]:
    groups = {batch: whole_groups(prompts, batch) for batch in args.concurrency}
    return [BatchSize(batch, groups[batch], *our_systems(args, batch), theirs[batch]) for batch in args.concurrency]


def measure(sizes: Sequence[BatchSize], max_tokens: int, repeats: int) -> None:
    """Time every system after an uncounted turn."""
    for size in sizes:
        run_group(size.systems, size.groups[0], max_tokens)
        for system in size.systems:
            system.seconds.clear()
    for repeat in range(repeats):
        for size in sizes:
            run_repeat(size, max_tokens, repeat)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = common.parser(__doc__)
    p.add_argument("--spec", type=common.policy_list, default=[0, 2, 4, "goodput"], help="numbers and policies")
    p.add_argument("--weights", choices=get_args(WeightForm), default="as_is")
    p.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    common.add_timing_arguments(p)
    args = p.parse_args(argv)
    if args.temperature:
        p.error("outputs are compared token by token, so the temperature must be 0")
    if args.prompts_count < max(args.concurrency):
        p.error(f"--prompts-count {args.prompts_count} is less than a batch of {max(args.concurrency)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    workload = common.prepare(args)
    about = {name: getattr(args, name) for name in ("max_tokens", "temperature", "repeats", "weights")}
    report = common.describe_run(args, "peers", workload.describe(**about, batches=args.concurrency))
    report["transformers"] = transformers.__version__
    with WorkerPool() as pool:
        theirs, skipped = start_peers(args, pool)
        sizes = make_sizes(args, workload.prompts, theirs)
        measure(sizes, args.max_tokens, args.repeats)
    exact = cache(partial(reference.load, args.target, "float64", args.device))
    tables = peers_report.tables(sizes, args.max_tokens, exact)
    report |= {**tables, "skipped": skipped, "text": common.repetition(sizes[0].ours[0].outputs)}
    common.print_report(report, [rows for rows in (*tables.values(), skipped) if rows], args.json)


if __name__ == "__main__":
    main()
