"""The engine against transformers `generate` on the same work: plain, with a draft model, with prompt lookup.

    python -m benchmarks.peers --target models/demo/target --draft models/demo/draft --spec off,4 --max-tokens 64

Batch 1 (the only size of transformers' assisted generation), greedy, with the same prompts, dtype, threads and number
of emitted tokens. Within each repeat every system continues one prompt before the next prompt's turn. `ours/theirs` is
the median over repeats of the ratio of tokens per second: our plain decoding to theirs, and our k to their assisted
generation and prompt lookup with the same k. `agree` is the share of prompts with the same text as transformers' plain
generation.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median

import transformers
from transformers import PreTrainedModel

from benchmarks import common, reference
from engine.llm import LLM
from engine.types import SamplingParams

Prompts = Sequence[Sequence[int]]


@dataclass
class System:
    """One way to continue a prompt, and its times."""

    name: str
    k: int
    run: reference.Continue
    seconds: list[float] = field(default_factory=list)  # per repeat, all prompts together
    outputs: list[list[int]] = field(default_factory=list)  # of the last repeat


def run_repeat(systems: Sequence[System], prompts: Prompts, max_tokens: int) -> None:
    """Every system once per prompt. Raises RuntimeError for an output that does not have max_tokens tokens."""
    for system in systems:
        system.seconds.append(0.0)
        system.outputs = []
    for prompt in prompts:
        for system in systems:
            start = time.perf_counter()
            tokens = system.run(prompt)
            system.seconds[-1] += time.perf_counter() - start
            if len(tokens) != max_tokens:
                raise RuntimeError(f"{system.name} at k = {system.k} emitted {len(tokens)} tokens, not {max_tokens}")
            system.outputs.append(tokens)


def our_systems(args: argparse.Namespace) -> list[System]:
    llm = LLM(args.target, args.draft, **common.engine_config(args, args.spec, 1, 0))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)

    def run(k: int, prompt: Sequence[int]) -> list[int]:
        return llm.generate([prompt], params, k)[0].token_ids

    return [System("ours", k, partial(run, k)) for k in args.spec]


def their_systems(args: argparse.Namespace) -> list[System]:
    target = reference.load(args.target, args.dtype, args.device)
    draft = reference.load(args.draft, args.dtype, args.device)
    systems = [System("transformers plain", 0, reference.greedy(target, args.max_tokens))]
    for k in args.spec[1:]:
        lookup = reference.greedy(target, args.max_tokens, prompt_lookup_num_tokens=k)
        assisted = reference.assisted(target, draft, k, args.max_tokens)
        systems.append(System("transformers assisted", k, assisted))
        systems.append(System("transformers lookup", k, lookup))
    return systems


def ratio_rows(ours: Sequence[System], theirs: Sequence[System], emitted: int) -> list[dict[str, object]]:
    """One row per system of transformers, beside ours with the same k. `lowest` and `highest` show the noise."""
    ours_by_k = {system.k: system for system in ours}
    rows: list[dict[str, object]] = []
    for peer in theirs:
        mine = ours_by_k[peer.k]
        ratios = [their_s / our_s for their_s, our_s in zip(peer.seconds, mine.seconds, strict=True)]
        rows.append(
            {
                "peer": peer.name,
                "k": common.spec_name(peer.k),
                "their tok/s": median(emitted / s for s in peer.seconds),
                "our tok/s": median(emitted / s for s in mine.seconds),
                "ours/theirs": median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    return rows


def agreement_rows(
    systems: Sequence[System], baseline: System, prompts: Prompts, exact: Callable[[], PreTrainedModel]
) -> list[dict[str, object]]:
    """Per system: the share of prompts with the baseline's text, and the widest fp64 gap at a first difference."""
    rows: list[dict[str, object]] = []
    for system in systems:
        found = reference.divergences(exact, prompts, baseline.outputs, system.outputs)
        rows.append(
            {
                "system": system.name,
                "k": common.spec_name(system.k),
                "agree": 1 - len(found) / len(prompts),
                "divergences": len(found),
                "widest top-2 gap": max((d.top2_gap for d in found), default=None),
            }
        )
    return rows


def measure(args: argparse.Namespace, prompts: Prompts) -> tuple[list[System], list[System]]:
    """Ours and theirs after a warm-up, each timed once per repeat, in turn."""
    ours, theirs = our_systems(args), their_systems(args)
    for system in (*ours, *theirs):
        system.run(prompts[0])
    for _ in range(args.repeats):
        run_repeat([*ours, *theirs], prompts, args.max_tokens)
    return ours, theirs


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.add_argument("--spec", type=common.spec_list, default=[0, 2, 4, 8], help="drafts per round; off is always there")
    common.add_timing_arguments(p)
    args = p.parse_args(argv)
    if args.temperature:
        p.error("outputs are compared token by token, so the temperature must be 0")
    if skipped := [batch for batch in args.concurrency if batch > 1]:
        print(f"batch {skipped} left out: assisted generation of transformers takes one sequence at a time")
    workload = common.prepare(args)
    about = workload.describe(max_tokens=args.max_tokens, temperature=0.0, repeats=args.repeats, batch=1)
    report = common.describe_run(args, "peers", about)
    report["transformers"] = transformers.__version__
    ours, theirs = measure(args, workload.prompts)
    rows = ratio_rows(ours, theirs, args.max_tokens * len(workload.prompts))
    exact = cache(partial(reference.load, args.target, "float64", args.device))
    agreement = agreement_rows([*ours, *theirs[1:]], theirs[0], workload.prompts, exact)
    report |= {"results": rows, "agreement": agreement, "text": common.repetition(ours[0].outputs)}
    common.print_report(report, [rows, agreement], args.json)


if __name__ == "__main__":
    main()
