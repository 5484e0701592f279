"""A load that rises and falls, half of it copying: plain decoding, fixed k and policies that choose k, in turn.

    python -m benchmarks.load --target models/demo/target --draft models/demo/draft --threads 2 \\
        --spec 1,2,4,8,goodput --repeats 10

A stage is a number of requests of which so many are always running (--stages; as soon as one ends the next one comes).
Every other request is copy-like: its prompt ends in --max-tokens of the target's greedy text, of which it goes on to
repeat at least 80 % (see copying.py). The others are free text at temperature 1. All have the drafter `cascade`, which
looks for what can be copied and else asks the draft model. Requests, seeds and lengths are the same for every variant;
no prompt shares memory with another. One engine runs all variants, each a whole stage before the next stage's turn, and
who goes first changes. Before what is counted every variant has one turn at the largest stage that is not. What is
learned of acceptance and cost is kept, as in a server, and each variant learns from its own rounds only.

First table: tokens per second of all stages together, prompts included; their ratio to `off` and to the best single
fixed k (off being k = 0), with 95 % intervals: repeats are resampled within each stage (some 8 are needed for that),
and the best fixed k is chosen on other repeats than those compared, see compare.py; `best k` is the choice for even and
for odd repeats. `off again` is `off` measured twice: what it differs from 1 by is noise. Then, of copy-like and of free
requests: mean k, and tokens per round with drafts. Second table: tokens per second by stage, medians over repeats.
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
from benchmarks.compare import Floats, ratio_of_totals, totals_to_best
from benchmarks.copying import copied_prompts
from benchmarks.measure import Run
from benchmarks.stepping import Driver, Ids, Told, greedy, make_engine
from engine.types import SamplingParams

LEAST = 4  # requests of a stage, which else has two per place
Rows = list[dict[str, object]]


@dataclass(frozen=True)
class Ask:
    """A request to be."""

    prompt: Ids
    params: SamplingParams
    copies: bool


@dataclass(frozen=True)
class LoadVariant:
    name: str
    spec: Spec
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by place of the stage
    told: dict[bool, list[Told]] = field(default_factory=lambda: defaultdict(list))  # by whether they copy

    @property
    def table(self) -> Floats:
        """[repeats, stages]"""
        return np.array([self.seconds[stage] for stage in sorted(self.seconds)]).T

    def run(self, copies: bool) -> Run:
        """Its requests of one kind, of all stages; without steps and times, which they share with the other kind."""
        told = self.told[copies]
        return Run(0.0, [each.token_ids for each in told], [each.record for each in told], [])


def make_asks(driver: Driver, prompts: Sequence[Ids], max_tokens: int) -> Iterator[Ask]:
    """Copy-like and free text in turn, without end. Raises ValueError if the target copies from none of the prompts."""
    texts = [list(told.token_ids) for told in _alone(driver, prompts, greedy(2 * max_tokens))]
    copied = copied_prompts(prompts, texts, max_tokens)
    if not copied:
        raise ValueError(f"the target goes on to repeat none of its {len(prompts)} texts: ask for more prompts")
    print(f"copy-like prompts: {len(copied)} of {len(prompts)}", flush=True)
    return _alternate(copied, prompts, max_tokens)


def _alternate(copied: Sequence[Ids], free: Sequence[Ids], max_tokens: int) -> Iterator[Ask]:
    for seed, (copy, prompt) in enumerate(zip(cycle(copied), cycle(free), strict=False)):
        yield Ask(copy, greedy(max_tokens), copies=True)
        yield Ask(prompt, replace(greedy(max_tokens), temperature=1.0, seed=seed), copies=False)


def _alone(driver: Driver, prompts: Sequence[Ids], params: SamplingParams) -> list[Told]:
    """Plain, as many at a time as the engine runs."""
    most = driver.engine.config.max_running
    return [t for i in range(0, len(prompts), most) for t in driver.generate(prompts[i : i + most], params, 0)]


def make_stages(asks: Iterator[Ask], sizes: Sequence[int]) -> list[list[Ask]]:
    return [[next(asks) for _ in range(max(LEAST, 2 * size))] for size in sizes]


def run_stage(driver: Driver, asks: Sequence[Ask], size: int, k: int | None) -> tuple[float, list[Told]]:
    """(seconds, what became of each request), `size` at a time. k None: the policy's."""
    waiting = iter(asks)
    told: list[Told] = []
    running: list[Told] = []
    started = time.perf_counter()
    while len(told) < len(asks) or running:
        while len(running) < size and (ask := next(waiting, None)) is not None:
            running.append(driver.submit(ask.prompt, ask.params, k, drafter="cascade"))
            told.append(running[-1])
        driver.step()
        running = [each for each in running if each.ended is None]
    return time.perf_counter() - started, told


def run_variant(
    driver: Driver, chooser: Chooser, variant: LoadVariant, asks: Sequence[Ask], size: int
) -> tuple[float, list[Told]]:
    """A drafter that is named acts even where the policy is off, so plain requests ask for k = 0."""
    chooser.use(variant.name, variant.spec)
    return run_stage(driver, asks, size, None if variant.spec else 0)


def measure(args: argparse.Namespace, prompts: Sequence[Ids]) -> tuple[list[LoadVariant], list[list[Ask]]]:
    """Every variant once per stage and repeat. Raises RuntimeError for an output of another length than asked."""
    driver = Driver(make_engine(args, "paged", max(args.stages)))
    chooser = Chooser(driver.engine)
    stages = make_stages(make_asks(driver, prompts, args.max_tokens), args.stages)
    variants = [*(LoadVariant(common.spec_name(spec), spec) for spec in args.spec), LoadVariant("off again", 0)]
    largest = args.stages.index(max(args.stages))
    for variant in variants:
        run_variant(driver, chooser, variant, stages[largest], args.stages[largest])
    for repeat in range(args.repeats):
        print(f"repeat {repeat + 1} of {args.repeats}", file=sys.stderr, flush=True)
        for place, (asks, size) in enumerate(zip(stages, args.stages, strict=True)):
            shift = (repeat * len(stages) + place) % len(variants)
            for variant in [*variants[shift:], *variants[:shift]]:
                seconds, told = run_variant(driver, chooser, variant, asks, size)
                if any(len(each.token_ids) != args.max_tokens for each in told):
                    raise RuntimeError(f"{variant.name}: an output has not {args.max_tokens} tokens")
                variant.seconds[place].append(seconds)
                for ask, each in zip(asks, told, strict=True):
                    variant.told[ask.copies].append(each)
    return variants, stages


def speed_rows(variants: Sequence[LoadVariant], tokens: int) -> Rows:
    """tokens: of one repeat, all stages together."""
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


def stage_rows(variants: Sequence[LoadVariant], stages: Sequence[Sequence[Ask]], sizes: Sequence[int]) -> Rows:
    return [
        {
            "stage": place + 1,
            "at once": size,
            "requests": len(asks),
            **{v.name: median(sum(a.params.max_tokens for a in asks) / s for s in v.seconds[place]) for v in variants},
        }
        for place, (asks, size) in enumerate(zip(stages, sizes, strict=True))
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
