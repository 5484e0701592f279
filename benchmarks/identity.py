"""Does speculation change the text? The same seeded requests with and without drafts, alone and in batches.

    python -m benchmarks.identity --target models/demo/target --draft models/demo/draft --prompts-count 64

The reference of each request is its text alone at k = 0. Every other row runs the same requests with the same seeds, at
a fixed k or with a policy. `mismatched` counts requests with another text. `per million` is the number of first
differences per million compared tokens; tokens after a first difference are not compared. For greedy text each first
difference comes with the gap of the target's two largest float64 logits there. With a wide gap it is a bug; with a gap
about as large as the rounding error it is arithmetic. With --deterministic nothing may differ.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import get_args

from transformers import PreTrainedModel

from benchmarks import common, reference
from benchmarks.common import Spec
from benchmarks.stats import first_divergence
from engine.config import EngineConfig, ProductForms
from engine.llm import LLM
from engine.types import SamplingParams

TEMPERATURES = (0.0, 0.8)
SPECS: tuple[Spec, ...] = (0, 1, 4, 8, "goodput")
BATCH = 8

Outputs = list[list[int]]


def seeded(count: int, temperature: float, max_tokens: int) -> list[SamplingParams]:
    """One seed per request, the same in every run."""
    return [
        SamplingParams(temperature=temperature, seed=1000 + i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(count)
    ]


def compare(reference_outputs: Outputs, outputs: Outputs) -> dict[str, object]:
    """Mismatched requests, and first differences per compared token."""
    firsts = [first_divergence(a, b) for a, b in zip(reference_outputs, outputs, strict=True)]
    mismatched = sum(first is not None for first in firsts)
    compared = sum(len(a) if first is None else first + 1 for a, first in zip(reference_outputs, firsts, strict=True))
    return {
        "requests": len(firsts),
        "mismatched": mismatched,
        "mismatch rate": mismatched / len(firsts),
        "tokens compared": compared,
        "per million": mismatched / compared * 1e6,
    }


def run_all(args: argparse.Namespace, prompts: Outputs) -> dict[tuple[float, str, Spec], Outputs]:
    """Outputs by temperature, mode and k. `alone` is an engine that runs one sequence at a time."""
    outputs: dict[tuple[float, str, Spec], Outputs] = {}
    for mode, batch in (("alone", 1), ("batch", BATCH)):
        config = common.engine_config(args, SPECS, batch, len(prompts))
        llm = LLM(args.target, args.draft, products=args.products, deterministic=args.deterministic, **config)
        for temperature in TEMPERATURES:
            params = seeded(len(prompts), temperature, args.max_tokens)
            for spec in SPECS:
                llm.engine.configure(common.policy(spec))
                completions = llm.generate(prompts, params, None if spec else 0)
                outputs[temperature, mode, spec] = [list(c.token_ids) for c in completions]
    return outputs


def rows(
    outputs: dict[tuple[float, str, Spec], Outputs], prompts: Outputs, exact: Callable[[], PreTrainedModel]
) -> list[dict[str, object]]:
    """One row per run, compared with the reference of its temperature."""
    found: list[dict[str, object]] = []
    for (temperature, mode, k), texts in outputs.items():
        base = outputs[temperature, "alone", 0]
        if texts is base:
            continue
        row: dict[str, object] = {"T": temperature, "mode": mode, "k": k} | compare(base, texts)
        gaps = [d.top2_gap for d in reference.divergences(exact, prompts, base, texts)] if temperature == 0 else []
        row["widest top-2 gap"] = max(gaps, default=None)
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.add_argument("--products", choices=get_args(ProductForms), default=EngineConfig("").products)
    p.add_argument("--deterministic", action="store_true", help="rows of a pass do not depend on each other")
    args = p.parse_args(argv)
    workload = common.prepare(args)
    about = {name: getattr(args, name) for name in ("max_tokens", "products", "deterministic")} | {"batch": BATCH}
    report = common.describe_run(args, "identity", workload.describe(**about))
    outputs = run_all(args, workload.prompts)
    exact = cache(partial(reference.load, args.target, "float64", args.device))
    results = rows(outputs, workload.prompts, exact)
    report |= {"results": results, "text": common.repetition(outputs[0.0, "alone", 0])}
    common.print_report(report, [results], args.json)


if __name__ == "__main__":
    main()
