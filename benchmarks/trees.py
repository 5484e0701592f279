"""Tokens per round of draft trees and of chains with as many rows, on the same texts.

    python -m benchmarks.trees --target models/demo/target --draft models/demo/draft --rows 8,16 --temperatures 0,0.8

Under match a seeded text does not depend on the drafts, so all shapes write the same texts, and only the numbers of
their rounds differ. A round of r rows checks r − 1 drafts. Even prompts choose: one wide tree tells the chances of
siblings. Those of deeper siblings are not known, so a few guesses of them each give a best tree. The tree and the chain
with the fewest rounds are compared on the odd prompts. The interval resamples prompts.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from benchmarks import common
from benchmarks.lab.tree_shapes import Chances, best_shape, value
from engine.config import EngineConfig
from engine.engine import Engine
from engine.trees import ROOT, Parents, branching, chain, depths, is_chain, ranks
from engine.types import Request, RoundRecord, SamplingParams
from policies.config import PolicyConfig

PROBE = branching([4, 2, 1])  # the tree that tells the chances
DEEPER = 16  # depths, of which the probe tells the first only
DECAYS = (1.0, 0.9, 0.8, 0.7)  # the chances of a depth over those of the depth before it, from the second on
RESAMPLES = 2000
Rounds = Sequence[Sequence[RoundRecord]]  # by prompt


def play(engine: Engine, prompts: Sequence[Sequence[int]], shape: Parents, params: SamplingParams) -> Rounds:
    """The rounds of every prompt, each with a tree of this shape."""
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"{i}", tuple(prompt), params, k=len(shape)))
    for sequence in engine.scheduler.waiting:
        sequence.tree = shape
    done: dict[str, Sequence[RoundRecord]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.record is not None:
                done[output.request_id] = output.record.rounds
    return [done[f"{i}"] for i in range(len(prompts))]


def chances_of(rounds: Rounds, shape: Parents) -> Chances:
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


def count(rounds: Rounds) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Rounds after the one that ended the prompt, by prompt."""
    return np.array([len(parts) - 1 for parts in rounds], np.float64)


def compare(engine: Engine, prompts: Sequence[Sequence[int]], rows: int, params: SamplingParams) -> dict[str, object]:
    even, odd = prompts[::2], prompts[1::2]
    probed = chances_of(play(engine, even, PROBE, params), PROBE)
    guesses = {best_shape(chances, rows - 1): chances for chances in (decayed(probed, decay) for decay in DECAYS)}
    tree = min(guesses, key=lambda shape: float(count(play(engine, even, shape, params)).sum()))
    chains = {k: play(engine, even, chain(k), params) for k in range(1, rows)}
    best = min(chains, key=lambda k: float(count(chains[k]).sum()))
    with_chain, with_tree = count(play(engine, odd, chain(best), params)), count(play(engine, odd, tree, params))
    draws = np.random.default_rng(0).integers(0, len(odd), (RESAMPLES, len(odd)))
    low, high = np.quantile(with_chain[draws].sum(1) / with_tree[draws].sum(1), (0.025, 0.975))
    tokens = params.max_tokens - 1  # the first one ends the prompt
    return {
        "T": params.temperature,
        "rows": rows,
        "best chain": best,
        "tok/round chain": float(tokens * len(odd) / with_chain.sum()),
        "tok/round tree": float(tokens * len(odd) / with_tree.sum()),
        "tree over chain": float(with_chain.sum() / with_tree.sum()),
        "low": float(low),
        "high": float(high),
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
