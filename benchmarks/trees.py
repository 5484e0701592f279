"""Tokens per round of draft trees, trees that grow, and chains with as many rows, on the same texts.

    python -m benchmarks.trees --target models/demo/target --draft models/demo/draft --rows 8,16 --temperatures 0,0.8

Under match a seeded text does not depend on the drafts, so all shapes write the same texts, and only the numbers of
their rounds differ. A round of r rows checks r − 1 drafts. Even prompts choose: one wide tree tells the chances of
siblings. The chances of deeper siblings are not known. So a few guesses of them each give a best tree. A tree that
grows by the draft's own probabilities needs a depth only. The chain, the tree and the depth with the fewest rounds are
compared on the odd prompts. The intervals resample prompts. A round's processor time counts all threads,
per round of one sequence.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import process_time
from typing import TypeVar

import numpy as np

from benchmarks import common
from benchmarks.lab.tree_shapes import Chances, best_shape, value
from engine.config import EngineConfig
from engine.engine import Engine
from engine.trees import ROOT, Growth, Parents, branching, chain, depths, is_chain, ranks
from engine.types import Request, RoundRecord, SamplingParams
from policies.config import PolicyConfig

PROBE = branching([4, 2, 1])  # the tree that tells the chances
DEEPER = 16  # depths, of which the probe tells the first only
DECAYS = (1.0, 0.9, 0.8, 0.7)  # the chances of a depth over those of the depth before it, from the second on
RESAMPLES = 2000
PATIENCE = 2  # shapes in a row without fewer rounds end a search
S = TypeVar("S", Parents, Growth)
RoundsByPrompt = Sequence[Sequence[RoundRecord]]  # by prompt


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """What came of all prompts with drafts of one shape."""

    rounds: RoundsByPrompt
    cpu_s: float  # processor time, prompts included

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Rounds after the one that ended the prompt, by prompt."""
        return np.array([len(parts) - 1 for parts in self.rounds], np.float64)

    @property
    def total(self) -> float:
        return float(self.counts.sum())


def play(engine: Engine, prompts: Sequence[Sequence[int]], shape: Parents | Growth, params: SamplingParams) -> ShapeRun:
    """Every prompt, each round with a tree of this shape, or with one that grows to it."""
    began = process_time()
    for i, prompt in enumerate(prompts):
        engine.submit(
            Request(f"{i}", tuple(prompt), params, k=shape.nodes if isinstance(shape, Growth) else len(shape))
        )
    for sequence in engine.scheduler.waiting:
        if isinstance(shape, Growth):
            sequence.tree_depth = shape.depth
        else:
            sequence.tree = shape
    done: dict[str, Sequence[RoundRecord]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.record is not None:
                done[output.request_id] = output.record.rounds
    return ShapeRun([done[f"{i}"] for i in range(len(prompts))], process_time() - began)


def chances_of(rounds: RoundsByPrompt, shape: Parents) -> Chances:
    """Per depth and rank how often a sibling was accepted where its parent was, in whole trees.

    All depths but the first are alike: the first sibling's chance is measured there; the others keep their ratio to it.
    """
    found, reached = Counter[tuple[bool, int]](), Counter[bool]()
    node_ranks = ranks(shape)
    for part in (part for parts in rounds for part in parts if part.tree == shape):
        for parent, node in pairwise((ROOT, *part.path)):
            found[parent != ROOT, node_ranks[node]] += 1
        reached.update(node != ROOT for node in (ROOT, *part.path) if node in shape)  # those with children
    first = [found[False, rank] / reached[False] for rank in range(shape.count(ROOT))]
    deeper = found[True, 0] / reached[True] / first[0]
    return [_falling(first), *([_falling([share * deeper for share in first])] * DEEPER)]


def decayed(chances: Chances, decay: float) -> Chances:
    return [[share * decay ** max(0, depth - 1) for share in row] for depth, row in enumerate(chances)]


def _falling(row: Sequence[float]) -> list[float]:
    """The row with no chance above the one before it."""
    return np.minimum.accumulate(row).tolist()


def fewest(engine: Engine, prompts: Sequence[Sequence[int]], shapes: Iterable[S], params: SamplingParams) -> S:
    """The shape with the fewest rounds. The search ends after PATIENCE shapes in a row that need more."""
    totals: dict[S, float] = {}
    for shape in shapes:
        totals[shape] = play(engine, prompts, shape, params).total
        if min(totals.values()) < min([*totals.values()][-PATIENCE:]):
            break
    return min(totals, key=totals.__getitem__)


def ratio(name: str, over: ShapeRun, under: ShapeRun) -> dict[str, float]:
    """How many times as many tokens per round the second one has, with its interval."""
    draws = np.random.default_rng(0).integers(0, len(over.rounds), (RESAMPLES, len(over.rounds)))
    low, high = np.quantile(over.counts[draws].sum(1) / under.counts[draws].sum(1), (0.025, 0.975))
    return {name: over.total / under.total, f"{name} low": float(low), f"{name} high": float(high)}


def compare(engine: Engine, prompts: Sequence[Sequence[int]], rows: int, params: SamplingParams) -> dict[str, object]:
    even, odd = prompts[::2], prompts[1::2]
    probed = chances_of(play(engine, even, PROBE, params).rounds, PROBE)
    guesses = {best_shape(chances, rows - 1): chances for chances in (decayed(probed, decay) for decay in DECAYS)}
    tree = min(guesses, key=lambda shape: play(engine, even, shape, params).total)
    best = fewest(engine, even, (chain(k) for k in range(1, rows)), params)
    growth = fewest(engine, even, (Growth(rows - 1, depth) for depth in range(min(3, rows - 1), rows)), params)
    shapes: dict[str, Parents | Growth] = {"chain": best, "tree": tree, "grown": growth}
    played = {name: play(engine, odd, shape, params) for name, shape in shapes.items()}
    tokens = (params.max_tokens - 1) * len(odd)  # the first one of each text ends the prompt
    return {
        "T": params.temperature,
        "rows": rows,
        "best chain": len(best),
        "grown depth": growth.depth,
        **{f"tok/round {name}": tokens / run.total for name, run in played.items()},
        **ratio("tree over chain", played["chain"], played["tree"]),
        **ratio("grown over chain", played["chain"], played["grown"]),
        **ratio("grown over tree", played["tree"], played["grown"]),
        **{f"cpu ms/round {name}": run.cpu_s / run.total * 1e3 for name, run in played.items()},
        "expected": 1 + value(tree, guesses[tree]),
        "leaves": sum(node not in tree for node in range(len(tree))),
        "depth": max(depths(tree)),
        "parents": " ".join(map(str, tree)),
        "is a chain": is_chain(tree),
    }


def main(argv: Sequence[str]) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=common.concurrency_list, default=[8, 16], help="rows of a round, such as 8,16")
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.8])
    args: argparse.Namespace = parser.parse_args(argv)
    workload = common.prepare(args)
    most = max(*args.rows, len(PROBE) + 1) - 1
    report = common.describe_run(args, "trees", {"prompts": workload.source, "count": len(workload.prompts)})
    engine = Engine.from_config(
        EngineConfig(
            target=args.target,
            draft=args.draft,
            dtype=args.dtype,
            device=args.device,
            threads=args.threads,
            max_spec_length=most,
            max_running=8,
            max_waiting=len(workload.prompts),
            max_step_tokens=max(common.STEP_TOKENS, 8 * (1 + most)),
            policy=PolicyConfig("off"),
        )
    )
    rows = []
    for temperature in args.temperatures:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
        rows += [compare(engine, workload.prompts, size, params) for size in args.rows]
    report["trees"] = rows
    shown = [{name: figure for name, figure in row.items() if name not in ("parents", "is a chain")} for row in rows]
    common.print_report(report, [shown], args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
