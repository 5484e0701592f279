"""How the time of a plain round grows with the number of sequences and the length of their contexts.

Real rounds without drafts (pass, sampling, verification) over throw-away sequences whose caches count as filled: what
attention reads lies in memory as after a prompt, but nobody computed it. With --ragged the contexts of a batch are
spread evenly from an eighth of the length to all of it, as in service; without it they are equal.

Times are wall times, or processor times with one thread: other work on the machine then changes little.
`growth` is the time over that of half as many sequences: up to 2 is linear. `over alone` is the time over that of as
many rounds of one sequence with the longest context.
With --vllm, vLLM (scripts/setup_peers.sh vllm) reads prompts of the same lengths, and its steps behind them are timed.
Example: python -m benchmarks.scale --target models/demo/target --sequences 1,8,64 --contexts 128,1024
"""

import argparse
import json
from collections.abc import Sequence as Seq
from statistics import median
from time import perf_counter, process_time

import torch

from benchmarks import common
from benchmarks.peers.installed import Unavailable, WorkerPool, vllm_worker
from benchmarks.peers.worker import Worker, WorkerError
from benchmarks.stats import table
from engine.config import DTYPES, EngineConfig
from engine.loading.load import load_models
from engine.models.runner import Runner, kv_shape
from engine.profiling.round_profile import ConstantDrafter
from engine.round import run_round
from engine.scheduler import Plan, Slice
from engine.sequence import Sequence, scratch_sequence
from engine.types import SamplingParams

SEQUENCES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONTEXTS = [128, 512, 2046, 8190]  # those that the target allows
SALT = "scale"
PEER_STEPS = 15  # of vLLM, per cell


def contexts_of(count: int, longest: int, *, ragged: bool) -> list[int]:
    """Cached tokens of each sequence."""
    if not ragged or count == 1:
        return [longest] * count
    shortest = max(1, longest // 8)
    # A step that is coprime with most counts mixes short and long neighbours.
    return [shortest + (i * 37 % count) * (longest - shortest) // (count - 1) for i in range(count)]


class Batch:
    """Sequences whose cached tokens nobody computed."""

    def __init__(self, target: Runner, contexts: Seq[int]) -> None:
        """Raises CacheFull."""
        self._target = target
        self._drafter = ConstantDrafter(target.device)
        self.sequences: list[Sequence] = []
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        for i, context in enumerate(contexts):
            sequence = scratch_sequence(f"scale-{i}", -1 - i, [0] * (context + 1), params, cache_salt=SALT)
            target.cache.allocate(sequence.handle, (), SALT)
            self.sequences.append(sequence)
            target.cache.reserve(sequence.handle, context + 1)
            target.cache.extend(sequence.handle, context)

    def round(self) -> float:
        """Seconds of a round. The next one is the same."""
        clock = process_time if torch.get_num_threads() == 1 else perf_counter
        started = clock()
        run_round(Plan(tuple(Slice(s, 1, 0, emits=True) for s in self.sequences)), self._target, self._drafter)
        spent = clock() - started
        for sequence in self.sequences:
            self._target.cache.truncate_to(sequence.handle, len(sequence.tokens) - 1)
            self._target.cache.reserve(sequence.handle, 1)
        return spent

    def free(self) -> None:
        for sequence in self.sequences:
            self._target.cache.discard(sequence.handle)
            self._target.release(sequence)


def measure(target: Runner, contexts: Seq[int], seconds: float) -> float:
    """Median seconds of a round, over at least 3 rounds and about `seconds`."""
    batch = Batch(target, contexts)
    try:
        batch.round()  # maps the memory
        times: list[float] = []
        while len(times) < 3 or sum(times) < seconds:
            times.append(batch.round())
    finally:
        batch.free()
    return median(times)


def peer_step(worker: Worker, contexts: Seq[int], vocab: int) -> float | None:
    """Median seconds of vLLM's steps behind prompts of these lengths; None: no room is left for them. Raises
    WorkerError."""
    prompts = [[(7 * i + j) % vocab for j in range(context)] for i, context in enumerate(contexts)]
    seconds: list[float] = worker.ask(prompts=prompts, steps=PEER_STEPS)["seconds"]
    return median(seconds) if seconds else None


@torch.inference_mode()
def run(target: Runner, args: argparse.Namespace, peer: Worker | None = None) -> list[dict[str, object]]:
    """A row for each context and number of sequences that the memory holds."""
    rows: list[dict[str, object]] = []
    for context in args.contexts:
        alone = measure(target, [context], args.seconds)
        last: tuple[int, float] | None = None
        for count in args.sequences:
            contexts = contexts_of(count, context, ragged=args.ragged)
            if sum(contexts) + count * target.layout.block_size > target.layout.tokens:
                continue
            spent = measure(target, contexts, args.seconds)
            doubled = last is not None and count == 2 * last[0]
            row: dict[str, object] = {
                "context": context,
                "sequences": count,
                "ms": round(spent * 1e3, 3),
                "us per sequence": round(spent / count * 1e6, 1),
                "growth": round(spent / last[1], 2) if doubled and last else None,
                "over alone": round(spent / (count * alone), 3),
            }
            if peer is not None:
                theirs = peer_step(peer, contexts, target.vocab_size)
                row["vLLM ms"] = None if theirs is None else round(theirs * 1e3, 3)
                row["vLLM over ours"] = None if theirs is None else round(theirs / spent, 2)
            rows.append(row)
            last = count, spent
    return rows


def arguments(argv: Seq[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, help="directory of a Hugging Face checkpoint")
    p.add_argument("--sequences", type=common.concurrency_list, default=SEQUENCES, help="such as 1,8,64")
    p.add_argument("--contexts", type=common.concurrency_list, help="tokens, such as 128,2048")
    p.add_argument("--kv-tokens", type=common.positive, default=2**18, help="positions in the cache (default 262144)")
    p.add_argument("--ragged", action="store_true", help="contexts of different lengths in a batch")
    p.add_argument("--seconds", type=float, default=0.2, help="measured seconds per cell (default %(default)s)")
    p.add_argument("--threads", type=common.positive, default=1)
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--cache", choices=("paged", "slotted"), default="paged")
    p.add_argument("--vllm", action="store_true", help="time vLLM's steps as well")
    p.add_argument("--json", action="store_true", help="end with the report as one JSON line")
    args = p.parse_args(argv)
    args.most = max(args.sequences)
    args.limit = None if args.contexts is None else max(args.contexts) + 2
    return args


def main(argv: Seq[str] | None = None) -> None:
    args = arguments(argv)
    config = EngineConfig(
        args.target,
        dtype=args.dtype,
        threads=args.threads,
        cache=args.cache,
        max_running=args.most,
        max_model_len=args.limit,
        max_spec_length=1,
        max_step_tokens=max(common.STEP_TOKENS, 2 * args.most),
        kv_tokens=args.kv_tokens if args.cache == "paged" else None,
        prefix_cache=False,
    )
    target = load_models(config).target
    args.contexts = args.contexts or [c for c in CONTEXTS if c + 2 <= target.cache.max_len]
    kv = kv_shape(target.decoder.config, target.decoder.dtype, target.device)
    kv_gib = 1 + target.layout.tokens * kv.token_bytes // 2**30
    with WorkerPool() as pool:
        try:
            peer = vllm_worker(pool, args.target, args.dtype, args.most, kv_gib=kv_gib) if args.vllm else None
            rows = run(target, args, peer)
        except (Unavailable, WorkerError) as error:
            raise SystemExit(f"vLLM: {error}") from None
    report = {
        "benchmark": "scale",
        "machine": common.describe_machine("cpu"),
        "model": common.describe_model(args.target, args.dtype),
        "workload": {"ragged": args.ragged, "cache": args.cache, "kv_tokens": target.layout.tokens},
        "rows": rows,
    }
    print("machine  ", report["machine"])
    print("model    ", report["model"])
    print("workload ", report["workload"])
    print("\n" + table(report["rows"]))  # type: ignore[arg-type]
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
