"""What a steady decode round of eight sequences with four drafts each asks of the device.

By hand: `python -m tests.engine.shadow.report [KIND …]` prints the table, and for each kind the crossings, the
operations outside of the models by line, and what the project's operations launch. An operation may launch several
kernels; the table has both numbers.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils import logging

from engine.config import WeightForm
from engine.engine import Engine
from engine.types import DrafterName, Request, SamplingParams, Verifier
from policies.config import PolicyConfig
from tests.engine.driving import drive, load
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.heads.fitted import random_medusa, save_heads
from tests.engine.pairs import Pair, save_pair
from tests.engine.shadow.both import without_measurements
from tests.engine.shadow.counting import Counts
from tests.engine.shadow.cuda import launching, shadow_cuda

BATCH, K = 8, 4
TREE = (2, 1)  # children of each draft by depth: four drafts


@dataclass(frozen=True, slots=True)
class RoundKind:
    """What all requests of a round ask for."""

    params: SamplingParams
    verifier: Verifier = "match"
    drafter: DrafterName = "model"
    tree: tuple[int, ...] | None = None
    head: Literal["eagle", "medusa"] | None = None  # in place of the draft model
    beside: bool = False  # whether every second request asks for a chain of as many drafts


_DRAWN = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
_GREEDY = replace(_DRAWN, temperature=0.0)
KINDS: dict[str, RoundKind] = {
    "greedy": RoundKind(_GREEDY),
    "match": RoundKind(_DRAWN),
    "rejection": RoundKind(_DRAWN, "rejection"),
    "block, top-p, penalties": RoundKind(
        replace(_DRAWN, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1), "block"
    ),
    "bias, bad words": RoundKind(
        replace(_DRAWN, logit_bias=((20, 4.0), (21, 4.0)), bad_word_ids=((22,), (20, 21)), min_tokens=2)
    ),
    "match, logprobs": RoundKind(replace(_DRAWN, logprobs=2)),
    "lookup": RoundKind(replace(_GREEDY, max_tokens=40), drafter="lookup"),
    "tree": RoundKind(_DRAWN, tree=TREE),
    "tree, rejection": RoundKind(_DRAWN, "rejection", tree=TREE),
    "tree, chains": RoundKind(_DRAWN, tree=TREE, beside=True),
    "tree, chains, rejection": RoundKind(_DRAWN, "rejection", tree=TREE, beside=True),
    "eagle": RoundKind(_DRAWN, head="eagle"),
    "eagle, tree": RoundKind(_DRAWN, tree=TREE, head="eagle"),
    "eagle, tree, chains": RoundKind(_DRAWN, tree=TREE, head="eagle", beside=True),
    "medusa": RoundKind(_DRAWN, head="medusa"),
    "medusa, tree": RoundKind(_DRAWN, tree=TREE, head="medusa"),
}


def requests(kind: RoundKind) -> list[Request]:
    found = []
    for i in range(BATCH):
        prompt = tuple(range(10 + i, 22 + i))
        if kind.drafter == "lookup":
            prompt = prompt[:6] * 2
        params, tree = replace(kind.params, seed=100 + i), None if kind.beside and i % 2 else kind.tree
        found.append(Request(f"request-{i}", prompt, params, verifier=kind.verifier, drafter=kind.drafter, tree=tree))
    return found


def start(pair: Pair, **config: Any) -> Engine:
    """The engine of the rounds, on a CUDA device."""
    settings = {
        "device": "cuda",
        "dtype": "bfloat16",
        "policy": PolicyConfig("fixed", k=K),
        "max_running": BATCH,
        "max_spec_length": K,
        "cache": "paged",
        "block_size": 16,
        "kv_tokens": 1600,
    }
    return load(pair, **settings | config)


def measure(pair: Pair, kind: RoundKind, weights: WeightForm = "as_is") -> Counts:
    """The counts of a round in which all requests decode, with as many drafts as any round had. Of several the one that
    crosses most often, and then the one with the most operations."""
    rounds: list[Counts] = []
    with shadow_cuda() as device, without_measurements(), launching(device):
        engine = start(pair, target_weights=weights, draft_weights=weights)
        before = device.counts.copy()

        def after_step() -> None:
            nonlocal before
            rounds.append(device.counts.since(before))
            before = device.counts.copy()

        run = drive(engine, requests(kind), after_step=after_step)
    full = [(stats.drafted, i) for i, stats in enumerate(run.steps) if stats.decode_only and len(stats.parts) == BATCH]
    most = max(drafted for drafted, _ in full)
    assert most, "no round had drafts"
    steady = [rounds[i] for drafted, i in full if drafted == most]
    return max(steady, key=lambda counts: (counts.uploads + counts.downloads, counts.outside))


def pair_of(kind: RoundKind, folder: Path) -> Pair:
    """The models that the round runs, written below the folder unless they are there."""
    place = folder / str(kind.head)
    draft = place / ("draft" if kind.head is None else "head")
    if not draft.exists() and kind.head == "eagle":
        save_eagle_pair(place)
    elif not draft.exists():
        save_pair(place)
    if not draft.exists():
        save_heads(draft, random_medusa(heads=K), medusa_num_heads=K)
    return Pair(str(place / "target"), str(draft))


def row(name: str, *cells: object) -> str:
    return f"{name:24}" + "".join(f"{cell!s:>11}" for cell in cells)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        kinds = {name: KINDS[name] for name in names or KINDS}
        found = {name: measure(pair_of(kind, Path(folder)), kind) for name, kind in kinds.items()}
    print(row("round", "uploads", "downloads", "stalls", "outside", "launches", "in models", "launches"))
    for name, counts in found.items():
        operations = counts.outside, counts.launched_outside, counts.inside, counts.launched_inside
        print(row(name, counts.uploads, counts.downloads, counts.stalls, *operations))
    for name, counts in found.items():
        print(f"\n{name}:", *counts.lines(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
