"""Speed of the engine in process: plain decoding against k drafts per round, interleaved within each repeat.

    python -m benchmarks.decode --target models/demo/target --draft models/demo/draft --spec off,2,4,8 --concurrency 1,8

Columns: tok/s with prefill; speedup over `off` of the same repeat, as a whole and for decode steps alone; α of reached
drafts; tokens per sequence and round; milliseconds per draft step and per target forward; overhead, the wall time of a
step over that of its forwards; the decode speedup predicted from α and the two times; and achieved over predicted.
`off again` is `off` measured twice: what its speedup differs from 1 is noise.

On other devices than the CPU a forward returns before it is done, so what is derived from its time is left out (-).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import common
from benchmarks.measure import Generator, Run, merge, timed_run
from benchmarks.stats import median_ratio, predicted_speedup
from deployments.engine.llm import LLM
from deployments.engine.types import SamplingParams

WARMUP_TOKENS = 16
FROM_FORWARD_TIMES = ("draft ms", "target ms", "overhead", "predicted", "achieved/predicted")
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Variant:
    name: str
    k: int
    runs: list[Run]  # one per repeat


def make_variants(specs: Sequence[int]) -> list[Variant]:
    """`off` first, then each k, then `off` once more as the control."""
    names = [(common.spec_name(k), k) for k in specs] + [("off again", 0)]
    return [Variant(name, k, []) for name, k in names]


def run_repeat(llm: Generator, groups: Sequence[Prompts], params: SamplingParams, variants: list[Variant]) -> None:
    """One run of every variant: each variant continues one group of prompts before the next group's turn."""
    parts: list[list[Run]] = [[] for _ in variants]
    for group in groups:
        for variant, done in zip(variants, parts, strict=True):
            done.append(timed_run(llm, group, params, variant.k))
    for variant, done in zip(variants, parts, strict=True):
        variant.runs.append(merge(done))


def split(prompts: Prompts, batch: int) -> list[Prompts]:
    """Groups of two batches: the second fills the places that the first one's early finishers leave."""
    return [prompts[i : i + 2 * batch] for i in range(0, len(prompts), 2 * batch)]


def summarise(concurrency: int, variant: Variant, plain: Variant, device: str = "cpu") -> dict[str, object]:
    """A row of the table: medians over repeats, ratios taken within each repeat against `plain`."""
    runs = variant.runs
    decode_speedup = median_ratio([r.decode_tokens_per_s for r in runs], [r.decode_tokens_per_s for r in plain.runs])
    row: dict[str, object] = {
        "batch": concurrency,
        "spec": variant.name,
        "tok/s": median(r.tokens_per_s for r in runs),
        "speedup": median_ratio([r.tokens_per_s for r in runs], [r.tokens_per_s for r in plain.runs]),
        "decode speedup": decode_speedup,
        "alpha": _median([r.alpha for r in runs]),
        "tok/round": _median([r.tokens_per_round for r in runs]),
        "draft ms": _median([None if r.draft_step_s is None else r.draft_step_s * 1e3 for r in runs]),
        "target ms": median(r.target_s * 1e3 for r in runs),
        "overhead": median(r.overhead for r in runs),
    }
    predicted = _predictions(variant, plain)
    row["predicted"] = median(predicted) if predicted else None
    row["achieved/predicted"] = median(_achieved(variant, plain, predicted)) if predicted else None
    return row if device.startswith("cpu") else row | dict.fromkeys(FROM_FORWARD_TIMES)


def _predictions(variant: Variant, plain: Variant) -> list[float]:
    return [
        predicted_speedup(run.alpha, variant.k, base.target_s, run.draft_step_s, run.target_s)
        for run, base in zip(variant.runs, plain.runs, strict=True)
        if run.alpha is not None and run.draft_step_s is not None
    ]


def _achieved(variant: Variant, plain: Variant, predicted: Sequence[float]) -> list[float]:
    pairs = zip(variant.runs, plain.runs, predicted, strict=True)
    return [run.decode_tokens_per_s / base.decode_tokens_per_s / p for run, base, p in pairs]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def scaling(by_batch: dict[int, list[Variant]]) -> list[dict[str, object]]:
    """Throughput of each batch size over the smallest one, per variant (same k, same repeat)."""
    smallest, *others = by_batch
    speeds = {batch: [[run.tokens_per_s for run in v.runs] for v in by_batch[batch]] for batch in by_batch}
    return [
        {
            "batch": batch,
            "over batch": smallest,
            "spec": variant.name,
            "throughput ratio": median_ratio(wide, narrow),
        }
        for batch in others
        for variant, narrow, wide in zip(by_batch[batch], speeds[smallest], speeds[batch], strict=True)
    ]


def measure(args: argparse.Namespace, prompts: Prompts, params: SamplingParams) -> dict[int, list[Variant]]:
    """Every variant at every batch size, once per repeat. One engine per batch size; all of them stay loaded."""
    engines = {
        batch: LLM(args.target, args.draft, **common.engine_config(args, args.spec, batch, len(prompts)))
        for batch in args.concurrency
    }
    results = {batch: make_variants(args.spec) for batch in engines}
    warmup = SamplingParams(temperature=args.temperature, seed=0, max_tokens=WARMUP_TOKENS, ignore_eos=True)
    for batch, llm in engines.items():
        for k in args.spec:
            llm.generate(prompts[:batch], warmup, k)
    for _ in range(args.repeats):
        for batch, llm in engines.items():
            run_repeat(llm, split(prompts, batch), params, results[batch])
    return results


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    common.add_timing_arguments(p)
    args = p.parse_args(argv)
    workload = common.prepare(args)
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
    about = workload.describe(max_tokens=args.max_tokens, temperature=args.temperature, repeats=args.repeats)
    report = common.describe_run(args, "decode", about)
    results = measure(args, workload.prompts, params)
    rows = [summarise(batch, v, variants[0], args.device) for batch, variants in results.items() for v in variants]
    report |= {"results": rows, "scaling": scaling(results)}
    report["text"] = common.repetition(next(iter(results.values()))[0].runs[0].outputs)
    common.print_report(report, [rows, scaling(results)], args.json)


if __name__ == "__main__":
    main()
