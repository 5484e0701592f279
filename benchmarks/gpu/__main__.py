"""Check and measure the engine on a machine with a GPU, in less than nine minutes.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --dry-run

Steps: the machine; parity with transformers over several families, in fp32 and bf16; the text with drafts against the
text without and against the CPU's; captured graphs against none; how often a round lets the host wait for the device;
products of 8 and 4 bits against their numbers and against bf16; and the speed of generated pairs with the shapes of
0.5B → 7B, 1B → 3B and 1B → 8B in bf16 at a set acceptance, with graphs and at batch 1 without.

Each step is a process of its own, so none suffers from another's failure. Those that time nothing run side by side. A
step's limit has room for a machine that has compiled no kernel yet; all steps have one deadline. A step fails if an
engine met a fault and went on. The output ends with a Markdown table and one JSON line. Exit status 1: a step failed.
A speed that misses its aim is only told. --dry-run does all of it with tiny shapes.

Needs torch, transformers, tokenizers, safetensors and numpy; on CUDA also triton.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import machine, parity, products, rounds, speed, texts
from benchmarks.gpu.steps import Recorder, Step, json_line, markdown, run_steps
from benchmarks.gpu.watch import watching

BUDGET_S = 9 * 60.0 - 20  # of all steps; the rest is for the start and the report


def all_steps(*, dry: bool) -> list[Step]:
    pairs = {"tiny pair": speed.DRY_PAIR} if dry else speed.PAIRS
    return [
        Step("machine", machine.describe, 40),
        _watched("parity with transformers", parity.compare_families, 150),
        _watched("text with drafts", texts.compare_texts, 150),
        _watched("captured graphs", rounds.compare_graphs, 120),
        _watched("waits for the device", rounds.count_waits, 150),
        _watched("products of 8 and 4 bits", products.compare, 90, is_timed=True),
        *(
            Step(f"speed, {name}", partial(watching, partial(speed.measure_pair, pair)), 150)
            for name, pair in pairs.items()
        ),
    ]


def _watched(name: str, run: Callable[[Recorder], None], limit_s: float, *, is_timed: bool = False) -> Step:
    return Step(name, partial(watching, run), limit_s, must_meet=True, is_timed=is_timed)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default cuda)")
    p.add_argument("--dry-run", action="store_true", help="tiny shapes, to see that all steps run")
    p.add_argument("--only", help="steps whose names hold this text")
    args = p.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # all checkpoints are made here
    steps = [step for step in all_steps(dry=args.dry_run) if (args.only or "") in step.name]
    if not steps:
        p.error(f"no step's name holds {args.only!r}")
    results = run_steps(steps, args.device, dry=args.dry_run, budget_s=BUDGET_S)
    print("\n" + markdown(results))
    print(json_line(results, torch=torch.__version__, device=args.device, dry_run=args.dry_run))
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
