"""How long the host works on a round of captured graphs, on a device that takes no time.

By hand: `python -m tests.engine.shadow.host [SEQUENCES …]` prints a table, for some numbers of sequences and drafts. On
a GPU the host works while the device waits, so this is what a round takes longer than its kernels. Operations outside
of graphs take another time on the shadow device than on CUDA.

Each graph is replayed once. Later replays give the same results and do nothing, so all rounds accept alike.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.utils import logging

from engine.device.graphs import Captured, Graphs
from engine.engine import Engine
from engine.types import Request, SamplingParams
from policies.config import PolicyConfig
from tests.engine.driving import load
from tests.engine.pairs import Pair, save_pair
from tests.engine.shadow.both import without_measurements
from tests.engine.shadow.cuda import shadow_cuda
from tests.engine.shadow.emulator import emulated_graphs

PROMPT, NEW_TOKENS = 10, 90
ROUNDS = 14  # that are measured


@contextmanager
def idle_replays() -> Iterator[None]:
    """A graph does its work at its first replay only."""
    results: dict[int, Any] = {}
    replay = Graphs._replay

    def replaying(graphs: Graphs, graph: Captured) -> Any:
        if id(graph) not in results:
            results[id(graph)] = _kept(replay(graphs, graph))
        return results[id(graph)]

    with patch.object(Graphs, "_replay", replaying):
        yield


def _kept(result: Any) -> Any:
    """The results in memory that no other graph writes."""
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(map(_kept, result)) if isinstance(result, tuple | list) else result


def start(pair: Pair, sequences: int, k: int) -> Engine:
    return load(
        pair,
        device="cuda",
        dtype="bfloat16",
        graphs=True,
        policy=PolicyConfig("fixed", k=k) if k else PolicyConfig("off"),
        max_running=sequences,
        max_spec_length=max(k, 1),
        max_model_len=128,
        max_step_tokens=max(512, sequences * (1 + k)),
        cache="paged",
        block_size=64,
        kv_tokens=192 * sequences + 400,
    )


def round_seconds(pair: Pair, sequences: int, k: int, rounds: int = ROUNDS) -> list[float]:
    """Time rounds that only replay graphs, and in which all sequences decode."""
    found = list[float]()
    with shadow_cuda(), without_measurements(), emulated_graphs(), idle_replays():
        engine = start(pair, sequences, k)
        graphs = engine.target.staging.graphs
        assert graphs is not None
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        for i in range(sequences):
            engine.submit(Request(f"request-{i}", tuple(range(10, 10 + PROMPT)), params))
        while engine.has_work and len(found) < rounds:
            before = graphs.discovered, graphs.eager.total()
            began = perf_counter()
            result = engine.step()
            spent = perf_counter() - began
            if (graphs.discovered, graphs.eager.total()) == before and result.stats.decoding == sequences:
                found.append(spent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sequences", type=int, nargs="*", default=[1, 8, 32, 128])
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    print("| sequences | drafts | ms of a round, median | fastest |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        pair = save_pair(Path(folder))
        for sequences in parser.parse_args().sequences:
            for k in (0, 4):
                found = [1000 * s for s in round_seconds(pair, sequences, k)]
                print(f"| {sequences} | {k} | {median(found):.2f} | {min(found):.2f} |", flush=True)


if __name__ == "__main__":
    main()
