"""A load that rises and falls: plain decoding, fixed k and policies that choose k, in turn.

    python -m benchmarks.load --target models/demo/target --draft models/demo/draft --threads 2 \\
        --spec 1,2,4,8,goodput --repeats 10

A stage keeps a number of requests running (--stages): as soon as one ends, the next one starts. Every other request is
copy-like: its prompt ends in --max-tokens of the target's greedy text, and the target then repeats at least 80 % of it
(see copying.py). The others are free text at temperature 1. All use the drafter `cascade`, which copies where it can
and asks the draft model otherwise. Requests, seeds and lengths are the same for every variant; no prompt shares memory
with another. One engine runs all variants. Each runs a whole stage before the next variant's turn; the first one
changes. Every variant first has one uncounted turn at the largest stage. As in a server, each variant keeps what it has
learned of acceptance and cost from its own rounds.

First table: tokens per second of all stages together, with prefill; their ratio to `off` and to the best single fixed
k (off is k = 0), with 95 % intervals. Repeats are resampled within each stage, which needs about 8 of them. The best
fixed k is chosen on other repeats than those compared, see compare.py; `best k` is the choice for even and for odd
repeats. `off again` is `off` measured twice: its difference from 1 is noise. Then, for copy-like and for free requests:
mean k and tokens per round with drafts. Second table: tokens per second by stage, medians over repeats.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from statistics import median

import numpy as np

from benchmarks import common
from benchmarks.common import Chooser, Spec
from benchmarks.compare import ratio_of_totals, totals_to_best
from benchmarks.copying import copied_prompts
from benchmarks.measure import Run
from benchmarks.stats import Rows
from benchmarks.stepping import DrivenRequest, Driver, TokenList, greedy, make_engine
from engine.types import SamplingParams
from policies.observation import Floats

MIN_REQUESTS = 4  # of a stage; larger stages have two requests per running one


@dataclass(frozen=True)
class PlannedRequest:
    """A request that every variant will run."""

    prompt: TokenList
    params: SamplingParams
    copies: bool  # whether it is copy-like


@dataclass(frozen=True)
class LoadVariant:
    name: str
    spec: Spec
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by index of the stage
    requests: dict[bool, list[DrivenRequest]] = field(default_factory=lambda: defaultdict(list))  # by whether they copy

    @property
    def table(self) -> Floats:
        """[repeats, stages]"""
        return np.array([self.seconds[stage] for stage in sorted(self.seconds)]).T

    def run(self, copies: bool) -> Run:
        """Its requests of one kind, in all stages. Steps and seconds are left out: both kinds share them."""
        requests = self.requests[copies]
        return Run(0.0, [r.token_ids for r in requests], [r.record for r in requests], [])


def plan_requests(driver: Driver, prompts: Sequence[TokenList], max_tokens: int) -> Iterator[PlannedRequest]:
    """Copy-like and free requests in turn, without end. Raises ValueError if the target copies from no prompt."""
    texts = [list(request.token_ids) for request in _run_plain(driver, prompts, greedy(2 * max_tokens))]
    copied = copied_prompts(prompts, texts, max_tokens)
    if not copied:
        raise ValueError(f"the target repeats none of its {len(prompts)} texts: raise --prompts-count")
    print(f"copy-like prompts: {len(copied)} of {len(prompts)}", flush=True)
    return _alternate(copied, prompts, max_tokens)


def _alternate(copied: Sequence[TokenList], free: Sequence[TokenList], max_tokens: int) -> Iterator[PlannedRequest]:
    for seed, (copy, prompt) in enumerate(zip(cycle(copied), cycle(free), strict=False)):
        yield PlannedRequest(copy, greedy(max_tokens), copies=True)
        yield PlannedRequest(prompt, replace(greedy(max_tokens), temperature=1.0, seed=seed), copies=False)


def _run_plain(driver: Driver, prompts: Sequence[TokenList], params: SamplingParams) -> list[DrivenRequest]:
    """Run the prompts at k = 0, as many at a time as the engine runs."""
    size = driver.engine.config.max_running
    return [r for i in range(0, len(prompts), size) for r in driver.generate(prompts[i : i + size], params, 0)]


def make_stages(planned: Iterator[PlannedRequest], sizes: Sequence[int]) -> list[list[PlannedRequest]]:
    return [[next(planned) for _ in range(max(MIN_REQUESTS, 2 * size))] for size in sizes]


def run_stage(
    driver: Driver, planned: Sequence[PlannedRequest], size: int, k: int | None
) -> tuple[float, list[DrivenRequest]]:
    """(seconds, the requests), with `size` running at a time. k None: the policy chooses."""
    waiting = iter(planned)
    requests: list[DrivenRequest] = []
    running: list[DrivenRequest] = []
    started = time.perf_counter()
    while len(requests) < len(planned) or running:
        while len(running) < size and (plan := next(waiting, None)) is not None:
            running.append(driver.submit(plan.prompt, plan.params, k, drafter="cascade"))
            requests.append(running[-1])
        driver.step()
        running = [request for request in running if request.ended is None]
    return time.perf_counter() - started, requests


def run_variant(
    driver: Driver, chooser: Chooser, variant: LoadVariant, planned: Sequence[PlannedRequest], size: int
) -> tuple[float, list[DrivenRequest]]:
    """Plain requests ask for k = 0, because a request that names a drafter drafts even if the policy is off."""
    chooser.use(variant.name, variant.spec)
    return run_stage(driver, planned, size, None if variant.spec else 0)


def measure(
    args: argparse.Namespace, prompts: Sequence[TokenList]
) -> tuple[list[LoadVariant], list[list[PlannedRequest]]]:
    """Every variant once per stage and repeat. Raises RuntimeError for an output without max_tokens tokens."""
    driver = Driver(make_engine(args, "paged", max(args.stages)))
    chooser = Chooser(driver.engine)
    stages = make_stages(plan_requests(driver, prompts, args.max_tokens), args.stages)
    variants = [*(LoadVariant(common.spec_name(spec), spec) for spec in args.spec), LoadVariant("off again", 0)]
    largest = args.stages.index(max(args.stages))
    for variant in variants:
        run_variant(driver, chooser, variant, stages[largest], args.stages[largest])
    for repeat in range(args.repeats):
        print(f"repeat {repeat + 1} of {args.repeats}", file=sys.stderr, flush=True)
        for index, (planned, size) in enumerate(zip(stages, args.stages, strict=True)):
            shift = (repeat * len(stages) + index) % len(variants)
            for variant in [*variants[shift:], *variants[:shift]]:
                seconds, requests = run_variant(driver, chooser, variant, planned, size)
                if any(len(request.token_ids) != args.max_tokens for request in requests):
                    raise RuntimeError(f"{variant.name}: an output does not have {args.max_tokens} tokens")
                variant.seconds[index].append(seconds)
                for plan, request in zip(planned, requests, strict=True):
                    variant.requests[plan.copies].append(request)
    return variants, stages


def speed_rows(variants: Sequence[LoadVariant], tokens: int) -> Rows:
    """tokens: emitted in one repeat of all stages."""
    off = variants[0].table
    folds = [repeat % 2 for repeat in range(len(off))]
    rivals = {v.name: v.table for v in variants[:-1] if isinstance(v.spec, int)}
    rows: Rows = []
    for variant in variants:
        against = totals_to_best(variant.table, rivals, folds) if len(off) > 1 else None
        row: dict[str, object] = {
            "spec": variant.name,
            "tok/s": tokens * len(off) / variant.table.sum(),
            "over off": ratio_of_totals(variant.table, off, folds).interval,
            "over best": against and against.estimate.interval,
            "best k": ", ".join(dict.fromkeys(against.best)) if against else "-",
        }
        for kind, copies in (("copy", True), ("free", False)):
            run = variant.run(copies)
            row |= {f"{kind}: k": run.mean_k if variant.spec else None, f"{kind}: tok/round": run.tokens_per_round}
        rows.append(row)
    return rows


def stage_rows(
    variants: Sequence[LoadVariant], stages: Sequence[Sequence[PlannedRequest]], sizes: Sequence[int]
) -> Rows:
    return [
        {
            "stage": index + 1,
            "at once": size,
            "requests": len(planned),
            **{
                v.name: median(sum(a.params.max_tokens for a in planned) / s for s in v.seconds[index])
                for v in variants
            },
        }
        for index, (planned, size) in enumerate(zip(stages, sizes, strict=True))
    ]


def stage_list(text: str) -> list[int]:
    return [common.positive(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.add_argument("--spec", type=common.policy_list, default=[0, 1, 2, 4, 8, "goodput"], help="numbers and policies")
    p.add_argument("--stages", type=stage_list, default=[1, 2, 4, 8, 16, 8, 4, 2, 1], help="requests at once")
    p.add_argument("--repeats", type=common.positive, default=10, help="of all stages (default %(default)s)")
    p.add_argument("--max-model-len", type=common.positive, default=512)
    p.set_defaults(prompts_count=64)
    args = p.parse_args(argv)
    workload = common.prepare(args)
    about = {name: getattr(args, name) for name in ("max_tokens", "stages", "repeats")}
    report = common.describe_run(args, "load", workload.describe(**about))
    variants, stages = measure(args, workload.prompts)
    tokens = args.max_tokens * sum(map(len, stages))
    tables = {"results": speed_rows(variants, tokens), "stages": stage_rows(variants, stages, args.stages)}
    common.print_report(report | tables, list(tables.values()), args.json)


if __name__ == "__main__":
    main()
