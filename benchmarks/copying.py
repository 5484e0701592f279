"""Drafters without a model, on text with much to copy and on text with nothing to copy.

    python -m benchmarks.copying --target models/demo/target --draft models/demo/draft --threads 2

Workloads, all with the target's own text:
  copy     the prompt ends in --max-tokens of the target's greedy text, and the target then repeats at least 80 % of it
           (share of the continuation's 8-grams that are in the prompt); other prompts are left out and counted
  predict  any prompt at temperature 0; the client's prediction is the target's output with every tenth token replaced
  fresh    any prompt at temperature 1, where text hardly repeats
Every variant continues a group of prompts before the next group's turn; `off again` is the control. Speedups are ratios
of tokens per second, with prefill, within each repeat; `decode speedup` is without prefill.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks import common
from benchmarks.decode import split
from benchmarks.measure import Run, merge, timed_run
from benchmarks.stats import median_ratio, repeated_ngram_share
from benchmarks.stepping import TokenList
from engine.llm import LLM
from engine.types import DrafterName, SamplingParams

WARMUP_TOKENS = 16
GRAM = 8
MIN_COPIED = 0.8  # share of a continuation's 8-grams that must be in its prompt for `copy`
WRONG_EVERY = 10  # every tenth token of a prediction is wrong


@dataclass(frozen=True)
class CopyWork:
    name: str
    prompts: list[TokenList]
    params: SamplingParams
    drafters: tuple[DrafterName, ...]
    guesses: list[TokenList] | None = None
    about: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyVariant:
    name: str
    drafter: DrafterName | None
    runs: list[Run]


def copied_share(prompt: Sequence[int], output: Sequence[int]) -> float:
    """Share of the output's 8-grams that are in the prompt."""
    known = {tuple(prompt[i : i + GRAM]) for i in range(len(prompt) - GRAM + 1)}
    grams = [tuple(output[i : i + GRAM]) for i in range(len(output) - GRAM + 1)]
    return sum(gram in known for gram in grams) / len(grams)


def with_wrong_tokens(output: Sequence[int], vocab: int, seed: int) -> TokenList:
    """The output with every tenth token replaced by another."""
    rng = random.Random(seed)
    return [
        (t + rng.randrange(1, vocab)) % vocab if i % WRONG_EVERY == WRONG_EVERY - 1 else t for i, t in enumerate(output)
    ]


def copied_prompts(prompts: Sequence[TokenList], outputs: Sequence[TokenList], length: int) -> list[TokenList]:
    """Prompts extended by the first `length` tokens of their outputs, if the rest of the output copies from them."""
    extended = [[*p, *out[:length]] for p, out in zip(prompts, outputs, strict=True)]
    shares = [copied_share(p, out[length:]) for p, out in zip(extended, outputs, strict=True)]
    return [p for p, share in zip(extended, shares, strict=True) if share >= MIN_COPIED]


def workloads(llm: LLM, prompts: Sequence[TokenList], length: int) -> list[CopyWork]:
    greedy = SamplingParams(temperature=0, seed=0, max_tokens=length, ignore_eos=True)
    twice = llm.generate(prompts, replace(greedy, max_tokens=2 * length), 0)
    outputs = [list(c.token_ids) for c in twice]
    copied = copied_prompts(prompts, outputs, length)
    vocab = llm.engine.target.vocab_size
    guesses = [with_wrong_tokens(out[:length], vocab, seed) for seed, out in enumerate(outputs)]
    sampled = replace(greedy, temperature=1.0)
    fresh = llm.generate(prompts, sampled, 0)
    share = repeated_ngram_share([list(c.token_ids) for c in fresh])
    return [
        CopyWork(
            "copy",
            copied,
            greedy,
            ("lookup", "ngram"),
            about={"prompts": len(copied), "left out": len(prompts) - len(copied)},
        ),
        CopyWork("predict", list(prompts), greedy, ("prediction", "cascade"), guesses, {"prompts": len(prompts)}),
        CopyWork(
            "fresh",
            list(prompts),
            sampled,
            ("lookup", "ngram"),
            about={"prompts": len(prompts), "repeated 8-grams": round(share, 4)},
        ),
    ]


def measure(llm: LLM, workload: CopyWork, k: int, batch: int, repeats: int) -> list[CopyVariant]:
    """`off`, each drafter, then `off` once more."""
    variants = (
        [CopyVariant("off", None, [])]
        + [CopyVariant(d, d, []) for d in workload.drafters]
        + [CopyVariant("off again", None, [])]
    )
    prompts = workload.prompts
    guesses = workload.guesses or [[]] * len(prompts)
    groups = list(zip(split(prompts, batch), split(guesses, batch), strict=True))
    for repeat in range(-1, repeats):
        runs: list[list[Run]] = [[] for _ in variants]
        for group, group_guesses in groups[:1] if repeat < 0 else groups:
            for variant, done in zip(variants, runs, strict=True):
                predicted = group_guesses if variant.drafter in ("prediction", "cascade") else None
                generate = partial(llm.generate, drafter=variant.drafter, predictions=predicted)
                done.append(timed_run(llm, group, workload.params, k if variant.drafter else 0, generate))
        if repeat >= 0:
            for variant, done in zip(variants, runs, strict=True):
                variant.runs.append(merge(done))
    return variants


def summarise(workload: CopyWork, batch: int, variants: Sequence[CopyVariant]) -> list[dict[str, object]]:
    plain = variants[0].runs
    return [
        {
            "workload": workload.name,
            "batch": batch,
            "drafter": variant.name,
            "speedup": median_ratio([r.tokens_per_s for r in variant.runs], [r.tokens_per_s for r in plain]),
            "decode speedup": median_ratio(
                [r.decode_tokens_per_s for r in variant.runs], [r.decode_tokens_per_s for r in plain]
            ),
            "alpha": variant.runs[0].alpha,
            "tok/round": variant.runs[0].tokens_per_round,
            "rounds with drafts": _share_drafted(variant.runs[0]),
            "same text": variant.runs[0].outputs == plain[0].outputs,
        }
        for variant in variants
    ]


def _share_drafted(run: Run) -> float:
    rounds = [round_.drafted > 0 for record in run.records for round_ in record.rounds]
    return sum(rounds) / len(rounds)


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.add_argument("--k", type=common.positive, default=8)
    p.add_argument("--concurrency", type=common.concurrency_list, default=[1], help="sequences that run together")
    p.add_argument("--repeats", type=common.positive, default=3)
    p.set_defaults(max_tokens=128)
    args = p.parse_args(argv)
    prepared = common.prepare(args)
    report = common.describe_run(args, "copying", prepared.describe(max_tokens=args.max_tokens, k=args.k))
    rows = measure_all(args, prepared.prompts)
    report["results"] = rows
    common.print_report(report, [rows], args.json)


def measure_all(args: argparse.Namespace, prompts: Sequence[TokenList]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for batch in args.concurrency:
        llm = LLM(args.target, args.draft, **common.engine_config(args, [args.k], batch, len(prompts)))
        for workload in workloads(llm, prompts, args.max_tokens):
            print(workload.name, workload.about, flush=True)
            if workload.prompts:
                rows += summarise(workload, batch, measure(llm, workload, args.k, batch, args.repeats))
    return rows


if __name__ == "__main__":
    main()
