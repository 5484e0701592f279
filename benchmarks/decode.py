"""Speed of the engine in process: plain decoding, fixed k and policies that choose k, on the same work in turn.

    python -m benchmarks.decode --target models/demo/target --draft models/demo/draft --threads 2 \\
        --spec off,1,2,4,8,goodput --concurrency 1,4,8,16 --repeats 20 --plot decode.svg

--spec takes off, numbers (a fixed k), policies, and trees, which is goodput that may draw trees; each is a variant. One
engine per batch size runs all variants. In a turn every variant continues the same group of prompts, three batches of
them; the first variant changes from turn to turn. No prompt shares memory with another, and prompts are read in large
chunks, so that most steps only decode. Outputs have from half to one and a half of --max-tokens, so that they do not
end all at once. Every variant first has one uncounted turn. As in a server, each variant keeps what it has learned of
acceptance and cost from its own rounds.

First table, of full batches, with prefill and for decode steps alone: tokens per second; their ratio to `off` and to
the best fixed k of that batch size (off is k = 0). Once a request has ended and none takes its place, what is left to
emit counts at the speed of decode steps. Ratios are medians of the ratios within turns, with 95 % intervals. Turns are
resampled, which needs about 20 of them. The best fixed k is chosen on other turns than those compared, see compare.py;
`best k` is the choice for even and for odd repeats. `off again` is `off` measured twice: its difference from 1 is
noise.
Second table: geometric means over the batch sizes, the lowest ratio, and the lowest lower bound.
Third table: α of reached drafts; tokens per sequence and round; milliseconds per draft step and per target forward;
overhead, the wall time of a step over that of its forwards; the decode speedup predicted from α and the two times;
achieved over predicted.
Fourth table, for policies: mean k; the share of rounds by the reason for k (see policies/config.py); predicted over
realised seconds and tokens, as sums over steps without prompts; the median error of a step's predicted seconds;
microseconds per step in the policy's code.

On other devices than the CPU a forward returns before it is done, so figures from its time are left out (-).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from benchmarks import common
from benchmarks.common import Chooser, Spec
from benchmarks.compare import Estimate, geometric_mean, ratio, ratio_to_best
from benchmarks.measure import Run, merge, timed_run
from benchmarks.plot import chart
from benchmarks.prompts import Prompts
from benchmarks.stats import Rows, median_ratio, predicted_speedup
from engine.llm import LLM
from engine.types import REASONS, SamplingParams

FROM_FORWARD_TIMES = ("draft ms", "target ms", "overhead", "predicted", "achieved/predicted")
RATES = {"": "busy_tokens_per_s", "decode ": "decode_tokens_per_s"}
WAVES = 3  # batches in a group of prompts
LENGTH_QUARTERS = (4, 2, 5, 3, 6)  # output lengths in quarters of max_tokens, in turn


@dataclass(frozen=True)
class Decoding:
    name: str
    spec: Spec
    runs: list[Run] = field(default_factory=list)  # one per turn

    def rates(self, name: str) -> list[float]:
        return [getattr(run, name) for run in self.runs]


@dataclass(frozen=True)
class Cell:
    """All variants at one batch size; `off` is the first, `off again` the last."""

    batch: int
    variants: list[Decoding]
    folds: list[int]  # per turn: 1 if its repeat is odd, else 0

    @property
    def fixed(self) -> list[Decoding]:
        return [v for v in self.variants[:-1] if isinstance(v.spec, int)]

    def over_off(self, variant: Decoding, rate: str) -> Estimate:
        return ratio(variant.rates(rate), self.variants[0].rates(rate), self.folds)

    def over_best(self, variant: Decoding, rate: str) -> tuple[Estimate | None, str]:
        """(ratio to the best fixed k, its name); None unless there are even and odd repeats."""
        if set(self.folds) != {0, 1}:
            return None, "-"
        rivals = {fixed.name: fixed.rates(rate) for fixed in self.fixed}
        against = ratio_to_best(variant.rates(rate), rivals, self.folds)
        return against.estimate, ", ".join(dict.fromkeys(against.best))


def make_variants(specs: Sequence[Spec]) -> list[Decoding]:
    """`off` first, then the others, then `off` once more as the control."""
    return [*(Decoding(common.spec_name(spec), spec) for spec in specs), Decoding("off again", 0)]


def split(prompts: Prompts, batch: int) -> list[Prompts]:
    """Groups of WAVES batches: later prompts take the places of those that finish early."""
    return [prompts[i : i + WAVES * batch] for i in range(0, len(prompts), WAVES * batch)]


def whole_groups(prompts: Prompts, batch: int) -> list[Prompts]:
    """Groups of the same size, so that turns weigh the same; one smaller group if there are too few prompts."""
    groups = split(prompts, batch)
    return [group for group in groups if len(group) == WAVES * batch] or groups


def spread(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Output lengths from half to one and a half of max_tokens. With equal lengths all plain requests would end at
    once and wait for each other's prompts, which those of other variants never do."""
    return [
        replace(params, max_tokens=max(1, params.max_tokens * share // 4))
        for share in islice(cycle(LENGTH_QUARTERS), count)
    ]


def run_turn(
    llm: LLM, chooser: Chooser, group: Prompts, params: SamplingParams, variants: Sequence[Decoding], first: int
) -> list[Run]:
    """One run of every variant on the same prompts, returned in the order of the variants; index `first` runs first."""
    runs: dict[str, Run] = {}
    shift = first % len(variants)
    for variant in [*variants[shift:], *variants[:shift]]:
        chooser.use(variant.name, variant.spec)
        runs[variant.name] = timed_run(llm, group, spread(params, len(group)), None if variant.spec else 0)
    return [runs[variant.name] for variant in variants]


def measure(args: argparse.Namespace, prompts: Prompts) -> list[Cell]:
    """One engine per batch size, all loaded at once. Every batch size has its turns within each repeat."""
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
    alone = {"prefix_cache": False, "prefill_chunk": common.STEP_TOKENS}
    engines = {
        batch: LLM(args.target, args.draft, **common.engine_config(args, args.spec, batch, len(prompts)), **alone)
        for batch in args.concurrency
    }
    choosers = {batch: Chooser(llm.engine) for batch, llm in engines.items()}
    cells = [Cell(batch, make_variants(args.spec), []) for batch in engines]
    groups = {batch: whole_groups(prompts, batch) for batch in engines}
    for cell in cells:
        run_turn(engines[cell.batch], choosers[cell.batch], groups[cell.batch][-1], params, cell.variants, 0)
    for repeat in range(args.repeats):
        print(f"repeat {repeat + 1} of {args.repeats}", file=sys.stderr, flush=True)
        for cell in cells:
            for turn in range(repeat * args.groups, (repeat + 1) * args.groups):
                group = groups[cell.batch][turn % len(groups[cell.batch])]
                runs = run_turn(engines[cell.batch], choosers[cell.batch], group, params, cell.variants, turn)
                for variant, run in zip(cell.variants, runs, strict=True):
                    variant.runs.append(run)
                cell.folds.append(repeat % 2)
    return cells


def speed_rows(cells: Sequence[Cell]) -> Rows:
    rows: Rows = []
    for cell in cells:
        for variant in cell.variants:
            row: dict[str, object] = {"batch": cell.batch, "spec": variant.name}
            for label, rate in RATES.items():
                best, name = cell.over_best(variant, rate)
                row[f"{label}tok/s"] = median(variant.rates(rate))
                row[f"{label}over off"] = cell.over_off(variant, rate).interval
                row[f"{label}over best"] = best and best.interval
                row[f"{label}best k"] = name
            rows.append(row)
    return rows


def mean_rows(cells: Sequence[Cell]) -> Rows:
    """A row per figure and variant except `off`, over all cells. Only policies are compared with the best fixed k."""
    rows: Rows = []
    for index, variant in enumerate(cells[0].variants[1:], 1):
        for label, rate in RATES.items():
            over_off = [cell.over_off(cell.variants[index], rate) for cell in cells]
            over_best = [cell.over_best(cell.variants[index], rate)[0] for cell in cells]
            known = [best for best in over_best if best is not None and isinstance(variant.spec, str)]
            rows.append({"spec": variant.name, "figure": f"{label}over off", **_means(over_off)})
            rows += [{"spec": variant.name, "figure": f"{label}over best", **_means(known)}] if known else []
    return rows


def _means(cells: Sequence[Estimate]) -> dict[str, object]:
    return {
        "cells": len(cells),
        "geometric mean": geometric_mean(cells).interval,
        "lowest": min(cell.value for cell in cells),
        "lowest bound": min(cell.interval.low for cell in cells),
    }


def round_row(cell: Cell, variant: Decoding, device: str = "cpu") -> dict[str, object]:
    """Figures of a round: medians over turns; ratios are to `off` within each turn."""
    runs = variant.runs
    row: dict[str, object] = {
        "batch": cell.batch,
        "spec": variant.name,
        "alpha": _median([r.alpha for r in runs]),
        "tok/round": _median([r.tokens_per_round for r in runs]),
        "draft ms": _median([None if r.draft_step_s is None else r.draft_step_s * 1e3 for r in runs]),
        "target ms": median(r.target_s * 1e3 for r in runs),
        "overhead": median(r.overhead for r in runs),
        "predicted": None,
        "achieved/predicted": None,
    }
    plain = cell.variants[0]
    predicted = _predictions(variant, plain)
    if predicted:
        row["predicted"] = median(predicted)
        expected = [p * base for p, base in zip(predicted, plain.rates("decode_tokens_per_s"), strict=True)]
        row["achieved/predicted"] = median_ratio(variant.rates("decode_tokens_per_s"), expected)
    return row if device.startswith("cpu") else row | dict.fromkeys(FROM_FORWARD_TIMES)


def _predictions(variant: Decoding, plain: Decoding) -> list[float]:
    """The predicted speedup of each turn; none for a policy, whose k varies, or if a turn had no drafts."""
    predicted = [
        predicted_speedup(run.alpha, variant.spec, base.target_s, run.draft_step_s, run.target_s)
        for run, base in zip(variant.runs, plain.runs, strict=True)
        if isinstance(variant.spec, int) and run.alpha is not None and run.draft_step_s is not None
    ]
    return predicted if len(predicted) == len(variant.runs) else []


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def policy_row(cell: Cell, variant: Decoding) -> dict[str, object]:
    """Figures of a policy, over all turns together."""
    run = merge(variant.runs)
    rounds = run.reasons.total()
    shares: dict[str, object] = {reason: run.reasons[reason] / rounds if rounds else None for reason in REASONS}
    seconds, tokens = run.predicted_over_real or (None, None)
    return {
        "batch": cell.batch,
        "spec": variant.name,
        "mean k": run.mean_k,
        **shares,
        "seconds pred/real": seconds,
        "median error": run.time_error,
        "tokens pred/real": tokens,
        "policy us": run.policy_s * 1e6,
    }


def tree_rows(cells: Sequence[Cell]) -> Rows:
    """Tokens per second of goodput with trees over those without, where both ran."""
    rows: Rows = []
    for cell in cells:
        found = {variant.name: variant for variant in cell.variants}
        if "trees" in found and "goodput" in found:
            trees, chains = found["trees"], found["goodput"]
            ratios = {
                f"{name}over chains": ratio(trees.rates(r), chains.rates(r), cell.folds) for name, r in RATES.items()
            }
            rows.append({"batch": cell.batch, **{name: estimate.interval for name, estimate in ratios.items()}})
    return rows


def scaling(cells: Sequence[Cell]) -> Rows:
    """Throughput of each batch size over that of the smallest one, per variant."""
    smallest, *others = cells
    return [
        {
            "batch": cell.batch,
            "over batch": smallest.batch,
            "spec": wide.name,
            "throughput ratio": median_ratio(wide.rates("busy_tokens_per_s"), narrow.rates("busy_tokens_per_s")),
        }
        for cell in others
        for wide, narrow in zip(cell.variants, smallest.variants, strict=True)
    ]


def draw(cells: Sequence[Cell], title: str) -> str:
    """The plot as SVG: speedup over `off`, with prefill, by batch size."""
    names = [variant.name for variant in cells[0].variants[1:]]
    lines = {
        name: [cell.over_off(cell.variants[index], "busy_tokens_per_s").interval for cell in cells]
        for index, name in enumerate(names, 1)
    }
    labels = [str(cell.batch) for cell in cells]
    return chart(lines, labels, title=title, x_title="sequences that run together", y_title="tokens/s over off")


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.add_argument("--spec", type=common.policy_list, default=[0, 1, 2, 4, 8, "goodput"], help="numbers and policies")
    p.add_argument("--groups", type=common.positive, default=2, help="turns per repeat and batch (default %(default)s)")
    p.add_argument("--plot", type=Path, help="write the speedups over off as SVG")
    common.add_timing_arguments(p)
    p.set_defaults(prompts_count=64)
    args = p.parse_args(argv)
    workload = common.prepare(args)
    about = {name: getattr(args, name) for name in ("max_tokens", "temperature", "repeats", "groups")}
    report = common.describe_run(args, "decode", workload.describe(**about))
    cells = measure(args, workload.prompts)
    tables = {
        "results": speed_rows(cells),
        "means": mean_rows(cells),
        "rounds": [round_row(cell, v, args.device) for cell in cells for v in cell.variants],
        "policies": [policy_row(cell, v) for cell in cells for v in cell.variants if isinstance(v.spec, str)],
        "trees": tree_rows(cells),
        "scaling": scaling(cells),
    }
    report |= tables
    report["text"] = common.repetition([output for run in cells[0].variants[0].runs for output in run.outputs])
    common.print_report(report, [rows for rows in tables.values() if rows], args.json)
    if args.plot:
        models = report["models"]
        title = f"{models['target']['name']}, {report['machine']['threads']} threads"  # type: ignore[index]
        args.plot.write_text(draw(cells, title), "utf-8")


if __name__ == "__main__":
    main()
