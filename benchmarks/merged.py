"""Two draft models merged into one tree over each of them alone, with as many rows in a round, on the same texts.

    python -m benchmarks.merged --target models/demo/target --draft models/demo/draft --second DIR/draft2

`python -m scripts.train_demo_pair draft2 --out DIR` trains such a second draft.

Under match a seeded text does not depend on the drafts, so all variants write the same texts, and only the number and
the time of their rounds differ. A round of r rows checks r − 1 drafts: one model's chain, or the tree of both chains.
One sequence runs at a time, and the variants take turns by prompt. The interval resamples prompts.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from benchmarks import common
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import VERIFIERS, DrafterName, Request, RoundRecord, SamplingParams, Verifier
from policies.config import PolicyConfig

RESAMPLES = 2000


@dataclass(slots=True)
class DraftVariant:
    """One way to draft, and its rounds so far."""

    name: str
    engine: Engine
    drafter: DrafterName
    rounds: list[Sequence[RoundRecord]] = field(default_factory=list)  # by prompt

    def play(self, prompt: Sequence[int], k: int, params: SamplingParams, verifier: Verifier) -> tuple[int, ...]:
        """Write one text, and return it."""
        request = Request("r", tuple(prompt), params, k=k, drafter=self.drafter, verifier=verifier)
        self.engine.submit(request)
        tokens: list[int] = []
        while self.engine.has_work:
            for output in self.engine.step().outputs:
                tokens += output.token_ids
                if output.record is not None:
                    self.rounds.append(output.record.rounds)
        return tuple(tokens)

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Rounds after the one that ended the prompt, by prompt."""
        return np.array([len(parts) - 1 for parts in self.rounds], np.float64)

    @property
    def round_ms(self) -> float:
        """The median over rounds in which no model reads a prompt: the first two of each prompt are left out."""
        return median(part.step_us for parts in self.rounds for part in parts[2:]) / 1000


def compare(
    variants: Sequence[DraftVariant], prompts: Sequence[Sequence[int]], rows: int, params: SamplingParams, by: Verifier
) -> dict[str, object]:
    """variants: the merged one, then those of one model."""
    for variant in variants:
        variant.rounds.clear()
    for prompt in prompts:
        texts = {variant.play(prompt, rows - 1, params, by) for variant in variants}
        assert len(texts) == 1 or by != "match", "the drafts changed a text"
    merged, *alone = variants
    best = min(alone, key=lambda variant: float(variant.counts.sum()))
    draws = np.random.default_rng(0).integers(0, len(prompts), (RESAMPLES, len(prompts)))
    low, high = np.quantile(best.counts[draws].sum(1) / merged.counts[draws].sum(1), (0.025, 0.975))
    tokens = (params.max_tokens - 1) * len(prompts)  # the first one ends the prompt
    figures: dict[str, object] = {"T": params.temperature, "verifier": by, "rows": rows}
    figures |= {f"tok/round {v.name}": float(tokens / v.counts.sum()) for v in variants}
    figures |= {f"ms/round {v.name}": v.round_ms for v in variants}
    ratio = float(best.counts.sum() / merged.counts.sum())
    return figures | {
        "merged over best": ratio,
        "low": float(low),
        "high": float(high),
        "per second": ratio * best.round_ms / merged.round_ms,
    }


def main(argv: Sequence[str]) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--second", required=True, help="directory of the second draft model")
    parser.add_argument("--rows", type=common.concurrency_list, default=[8, 16], help="rows of a round, such as 8,16")
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.8])
    parser.add_argument("--verifier", choices=VERIFIERS, default="match")
    args: argparse.Namespace = parser.parse_args(argv)
    workload = common.prepare(args)
    report = common.describe_run(args, "merged", {"prompts": workload.source, "count": len(workload.prompts)})
    report["second"] = common.describe_model(args.second, args.dtype)

    def engine(*drafts: str) -> Engine:
        return Engine.from_config(
            EngineConfig(
                target=args.target,
                drafts=drafts,
                dtype=args.dtype,
                device=args.device,
                threads=args.threads,
                max_spec_length=max(args.rows) - 1,
                max_running=1,
                policy=PolicyConfig("off"),
            )
        )

    both = engine(args.draft, args.second)
    variants = [
        DraftVariant("merged", both, "merged"),
        DraftVariant("first", both, "model"),
        DraftVariant("second", engine(args.second), "model"),
    ]
    rows = []
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
        rows += [compare(variants, workload.prompts, size, params, args.verifier) for size in args.rows]
    report["merged"] = rows
    common.print_report(report, [rows], args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
