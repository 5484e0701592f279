"""The tables of the peers benchmark."""

from collections.abc import Callable, Sequence
from statistics import median

from transformers import PreTrainedModel

from benchmarks import common, reference
from benchmarks.peers.systems import BatchSize, System
from benchmarks.prompts import Prompts
from benchmarks.stats import Rows, median_ratio


def rate(size: BatchSize, system: System, max_tokens: int) -> float:
    """Median over repeats and groups of emitted tokens per second."""
    return median(size.batch * max_tokens / s for s in system.seconds)


def ratio_rows(size: BatchSize, max_tokens: int) -> Rows:
    """One row per peer, beside ours with the same k. The row `ours again` and the bounds show the noise."""
    ours_by_k = {system.spec: system for system in size.ours}
    rows: Rows = []
    for peer in [*size.theirs, size.again]:
        mine = ours_by_k[peer.spec]
        ratios = [theirs / ours for theirs, ours in zip(peer.seconds, mine.seconds, strict=True)]
        rows.append(
            {
                "batch": size.batch,
                "peer": peer.name,
                "k": common.spec_name(peer.spec),
                "their tok/s": rate(size, peer, max_tokens),
                "our tok/s": rate(size, mine, max_tokens),
                "ours/theirs": median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    return rows


def best_rows(size: BatchSize, max_tokens: int) -> Rows:
    """Each of our systems over each peer's plain decoding, and over the peer's fastest way."""
    rows: Rows = []
    for mine in size.ours:
        for name in dict.fromkeys(system.peer for system in size.theirs):
            systems = [system for system in size.theirs if system.peer == name]
            plain, best = systems[0], min(systems, key=lambda system: median(system.seconds))
            rows.append(
                {
                    "batch": size.batch,
                    "our k": common.spec_name(mine.spec),
                    "our tok/s": rate(size, mine, max_tokens),
                    "peer": name,
                    "over its plain": median_ratio(plain.seconds, mine.seconds),
                    "its best": f"{best.name}, k {common.spec_name(best.spec)}",
                    "over its best": median_ratio(best.seconds, mine.seconds),
                }
            )
    return rows


def agreement_rows(size: BatchSize, exact: Callable[[], PreTrainedModel]) -> Rows:
    """Per system: the share of prompts with the baseline's text, and the widest fp64 gap at a first difference.

    The baseline is transformers' plain generation where it runs, else ours.
    """
    baseline = next((s for s in size.theirs if s.name == "transformers plain"), size.ours[0])
    prompts: Prompts = [prompt for group in size.groups for prompt in group]
    return [
        _agreement(size.batch, system, baseline, prompts, exact) for system in size.systems if system is not baseline
    ]


def _agreement(
    batch: int, system: System, baseline: System, prompts: Prompts, exact: Callable[[], PreTrainedModel]
) -> dict[str, object]:
    found = reference.divergences(exact, prompts, baseline.outputs, system.outputs)
    return {
        "batch": batch,
        "system": system.name,
        "k": common.spec_name(system.spec),
        "as": baseline.name,
        "agree": 1 - len(found) / len(prompts),
        "divergences": len(found),
        "widest top-2 gap": max((d.top2_gap for d in found), default=None),
    }


def tables(sizes: Sequence[BatchSize], max_tokens: int, exact: Callable[[], PreTrainedModel]) -> dict[str, Rows]:
    return {
        "results": [row for size in sizes for row in ratio_rows(size, max_tokens)],
        "best": [row for size in sizes for row in best_rows(size, max_tokens)],
        "agreement": [row for size in sizes for row in agreement_rows(size, exact)],
    }
