"""What int8 and int4 weights gain in time, and what they cost in text, on a CPU.

    python -m benchmarks.weights --target DIR --draft DIR --threads 1 --json

First table, per form of the target's weights: milliseconds of a pass of one token and of 1 + 8 tokens behind a context;
the speed over the other forms; the price of eight more rows; and the share of the machine's copy bandwidth at which one
token reads its weights. Forms take turns; figures are medians over turns, and ratios are taken within turns. The
bandwidth is that of copying 128 MiB, bytes read and written, measured in each turn.
Second table: bits per token of the prompts. Their ratio is also that of bits per byte.
Third table: acceptance of the draft model with its weights in fp32 and int8, under the same target and seeds.
Fourth table: texts of the int8 target that differ from the text alone at k = 0. Compiled layers give a row the same
bits in any company. torch's attention and norms, which long passes have where they are faster, do not, and such a bit
can change to which integer the next product rounds a number; with `deterministic` nothing may differ.
Fifth table: the same passes by the native decoder and by transformers' modules (engine/models/adapter.py), in turn.
Sixth table: loading the target in a process of its own, behind the draft model. Seconds from the disk, and from the
system's cache of files, each over those of plain reading just before; and the peak of the process's memory beyond what
it had before, over the bytes of the weights.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from benchmarks import common
from benchmarks.forced import TextReader, _sequence
from benchmarks.identity import compare, seeded
from benchmarks.measure import timed_run
from benchmarks.prompts import Prompts
from benchmarks.stats import Rows, median_ratio
from cache.layout import Layout
from engine.config import WeightForm
from engine.llm import LLM
from engine.memory.host import give_back_freed_memory, keep_freed_memory
from engine.models.decoder import Decoder, LanguageModel
from engine.models.feeds import Feed
from engine.models.int8_products import Int8Weight
from engine.models.linear import Linear, Product, num_bytes_of
from engine.models.loader import Checkpoint, adapted_checkpoint, load_decoder, load_model, open_checkpoint
from engine.models.products import Weights
from engine.models.runner import Runner

CONTEXT = 128  # tokens before those of a timed pass
ROWS = (1, 9)
LENGTH = CONTEXT + max(ROWS)
COPIED_BYTES = 2**27
TEMPERATURES = (0.0, 0.8)
KS, BATCHES = (0, 4, 8), (1, 8)
PARTS = ("passes", "bits", "acceptance", "texts", "adapter", "loading")
MAX_LOADS = 5  # of each form
READ_BYTES = 2**23  # at once, when a file is only read


class WeightsVariant(NamedTuple):
    name: str
    dtype: str
    weights: Weights


FORMS = (
    WeightsVariant("float32", "float32", Weights()),
    WeightsVariant("bfloat16", "bfloat16", Weights()),
    WeightsVariant("int8", "float32", Weights("int8")),
    WeightsVariant("int8, head as is", "float32", Weights("int8", head=False)),
    WeightsVariant("int4", "float32", Weights("int4")),
)


class TimedModel:
    """A model behind a context, ready for passes of any number of rows."""

    def __init__(self, model: LanguageModel, text: Sequence[int]) -> None:
        self._runner = Runner(model, Layout(1, LENGTH), torch.device("cpu"))
        self._text = list(text)
        self._sequence = _sequence(self._text[:CONTEXT])
        self._runner.run([Feed(self._sequence, CONTEXT)])

    def seconds(self, rows: int) -> float:
        self._sequence.tokens[:] = self._text[: CONTEXT + rows]
        start = time.perf_counter()
        self._runner.run([Feed(self._sequence, rows, outputs=rows)])
        spent = time.perf_counter() - start
        self._runner.cache.truncate_to(self._sequence.handle, CONTEXT)
        return spent


def load(checkpoint: Checkpoint, form: WeightsVariant) -> Decoder:
    dtype, cpu = getattr(torch, form.dtype), torch.device("cpu")
    return load_decoder(checkpoint, dtype=dtype, device=cpu, max_len=LENGTH, weights=form.weights)


def bytes_per_token(decoder: Decoder) -> int:
    """Bytes of weights that one token reads."""
    products = [p for layer in decoder.layers for p in (layer.qkv, layer.out, *layer.mlp.products)]
    return sum(map(_bytes_read, (*products, decoder.head)))


def _bytes_read(product: Product) -> int:
    """Bytes of a product's weight that one token reads, in one form and without steps."""
    weight = next(iter(product.forms.values())) if isinstance(product, Linear) else product.weight
    if isinstance(weight, Int8Weight):
        return weight.num_bytes - weight.steps.nbytes
    return num_bytes_of(weight)


def copy_bandwidth(source: torch.Tensor, destination: torch.Tensor) -> float:
    """Bytes read and written per second."""
    start = time.perf_counter()
    destination.copy_(source)
    return 2 * source.numel() / (time.perf_counter() - start)


def in_turns(models: Mapping[str, TimedModel], turns: int) -> Iterator[dict[tuple[str, int], float]]:
    """Seconds of a pass of each model with each of ROWS, turn by turn. One turn before compiles products."""
    for turn in range(turns + 1):
        spent = {(name, rows): model.seconds(rows) for name, model in models.items() for rows in ROWS}
        if turn:
            yield spent


@torch.inference_mode()
def passes(target: str, text: Sequence[int], turns: int) -> Rows:
    decoders = {form.name: load(open_checkpoint(target), form) for form in FORMS}
    models = {name: TimedModel(decoder, text) for name, decoder in decoders.items()}
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    destination = torch.ones_like(source)
    seconds: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in models for rows in ROWS}
    bandwidth = []
    for spent in in_turns(models, turns):
        bandwidth.append(copy_bandwidth(source, destination))
        for key, value in spent.items():
            seconds[key].append(value)
    return [_pass_row(name, bytes_per_token(decoder), seconds, bandwidth) for name, decoder in decoders.items()]


def _pass_row(
    name: str, token_bytes: int, seconds: dict[tuple[str, int], list[float]], bandwidth: list[float]
) -> dict[str, object]:
    one, nine = (seconds[name, rows] for rows in ROWS)
    read = [token_bytes / s for s in one]
    return {
        "weights": name,
        "MB": token_bytes / 1e6,
        "1 row ms": median(one) * 1e3,
        "9 rows ms": median(nine) * 1e3,
        "9 over 1": median_ratio(nine, one),
        "over float32": median_ratio(seconds["float32", 1], one),
        "over bfloat16": median_ratio(seconds["bfloat16", 1], one),
        "read GB/s": median(read) / 1e9,
        "of copy bandwidth": median_ratio(read, bandwidth),
    }


@torch.inference_mode()
def adapter(target: str, text: Sequence[int], turns: int) -> Rows:
    checkpoint = open_checkpoint(target)
    adapted = adapted_checkpoint(checkpoint.path, checkpoint.raw["model_type"])
    native = load(checkpoint, FORMS[0])
    modules = load_model(adapted, dtype=torch.float32, device=torch.device("cpu"), max_len=LENGTH)
    models = {"native": TimedModel(native, text), "adapter": TimedModel(modules, text)}
    found = list(in_turns(models, turns))
    table: Rows = []
    for rows in ROWS:
        seconds = {name: [spent[name, rows] for spent in found] for name in models}
        times = {f"{name} ms": median(spent) * 1e3 for name, spent in seconds.items()}
        over = median_ratio(seconds["adapter"], seconds["native"])
        table.append({"rows": rows, **times, "adapter over native": over})
    return table


@torch.inference_mode()
def bits(target: str, texts: Prompts) -> Rows:
    longest = max(map(len, texts))
    rows: Rows = []
    for form in FORMS:
        reader = TextReader(target, form.dtype, "cpu", longest, form.weights)
        nats = [
            cross_entropy(reader.logits(text[:1], text[1:]), torch.tensor(text[1:]), reduction="sum").item()
            for text in texts
        ]
        value = sum(nats) / math.log(2) / sum(len(text) - 1 for text in texts)
        base = rows[0]["bits per token"] if rows else value
        change = value / float(str(base)) - 1
        rows.append({"weights": form.name, "bits per token": value, "change": f"{change:+.3%}"})
    return rows


def acceptance(args: argparse.Namespace, prompts: Prompts) -> Rows:
    forms: tuple[WeightForm, ...] = ("as_is", "int8")
    rows: Rows = []
    for form in forms:
        config = common.engine_config(args, [KS[1]], BATCHES[1], len(prompts))
        llm = LLM(args.target, args.draft, **config, draft_weights=form)
        for temperature in TEMPERATURES:
            run = timed_run(llm, prompts, seeded(len(prompts), temperature, args.max_tokens), KS[1])
            rows.append({"T": temperature, "k": KS[1], "draft": form, "alpha": run.alpha, "texts": len(run.records)})
    return rows


def texts(args: argparse.Namespace, prompts: Prompts) -> Rows:
    rows: Rows = []
    for deterministic in (False, True):
        outputs = {(t, batch, k): tokens for t, batch, k, tokens in _texts(args, prompts, deterministic)}
        rows += [
            {"deterministic": deterministic, "T": t, "batch": batch, "k": k} | compare(outputs[t, 1, 0], tokens)
            for (t, batch, k), tokens in outputs.items()
            if (batch, k) != (1, 0)
        ]
    return rows


def _texts(
    args: argparse.Namespace, prompts: Prompts, deterministic: bool
) -> Iterator[tuple[float, int, int, list[list[int]]]]:
    forms = {"target_weights": "int8", "draft_weights": "int8", "deterministic": deterministic}
    for batch in BATCHES:
        config = common.engine_config(args, KS, batch, len(prompts))
        llm = LLM(args.target, args.draft, **config, **forms)
        for temperature in TEMPERATURES:
            for k in KS:
                completions = llm.generate(prompts, seeded(len(prompts), temperature, args.max_tokens), k)
                yield temperature, batch, k, [list(c.token_ids) for c in completions]


def loading(target: str, draft: str, threads: int | None, turns: int) -> Rows:
    rows: Rows = []
    for form in FORMS:
        loads = []
        for _ in range(turns):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                loads.append(pool.submit(measure_load, target, draft, form, threads).result())
        rows.append(
            {
                "weights": form.name,
                "load s": median(load.seconds for load in loads),
                "over reading": median(load.seconds / load.reading_s for load in loads),
                "cached load s": median(load.cached_seconds for load in loads),
                "over cached reading": median(load.cached_seconds / load.cached_reading_s for load in loads),
                "peak over weights": median(load.peak_bytes / load.weight_bytes for load in loads),
            }
        )
    return rows


class MeasuredLoad(NamedTuple):
    seconds: float
    reading_s: float  # of all weight files, without keeping anything
    cached_seconds: float  # with the files in the system's cache
    cached_reading_s: float
    peak_bytes: int
    weight_bytes: int


def measure_load(target: str, draft: str, form: WeightsVariant, threads: int | None) -> MeasuredLoad:
    """Only right in a process that has loaded nothing before. The draft is loaded first: libraries and compiled code,
    which take as much time and memory for a small model, are there then."""
    if threads is not None:
        torch.set_num_threads(threads)
    keep_freed_memory()

    def timed(checkpoint: Checkpoint) -> tuple[float, int]:
        """(seconds, bytes of the weights, which are freed)."""
        start = time.perf_counter()
        decoder = load(checkpoint, form)
        return time.perf_counter() - start, decoder.weight_bytes

    load(open_checkpoint(draft), form)
    give_back_freed_memory()
    checkpoint = open_checkpoint(target)
    forget_cached(checkpoint.path)
    reading_s, cached_reading_s = _read_all(checkpoint.path), _read_all(checkpoint.path)
    forget_cached(checkpoint.path)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # forgets the peak
    seconds, weight_bytes = timed(checkpoint)
    peak_bytes = max(0, _memory("VmHWM") - before)  # memory that the process had free is none
    cached_seconds, _ = timed(checkpoint)
    return MeasuredLoad(seconds, reading_s, cached_seconds, cached_reading_s, peak_bytes, weight_bytes)


def forget_cached(directory: Path) -> None:
    """Let the system forget the weight files, so that the disk is read."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(directory: Path) -> float:
    """Seconds."""
    buffer, start = bytearray(READ_BYTES), time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def _memory(name: str) -> int:
    """Bytes of this process, as Linux names them: VmRSS, resident now; VmHWM, the most that were."""
    status = Path("/proc/self/status").read_text("utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(name))


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.add_argument("--turns", type=common.positive, default=15, help="of the timed passes (default %(default)s)")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="tables to make")
    args = p.parse_args(argv)
    workload = common.prepare(args)
    context = [token for prompt in workload.prompts for token in prompt][:LENGTH]
    if len(context) < LENGTH:
        raise SystemExit(f"the prompts must have {LENGTH} tokens together, not {len(context)}")
    about = {"max_tokens": args.max_tokens, "turns": args.turns, "context": CONTEXT}
    report = common.describe_run(args, "weights", workload.describe(**about))
    make = {
        "passes": lambda: passes(args.target, context, args.turns),
        "bits": lambda: bits(args.target, workload.prompts),
        "acceptance": lambda: acceptance(args, workload.prompts),
        "texts": lambda: texts(args, workload.prompts),
        "adapter": lambda: adapter(args.target, context, args.turns),
        "loading": lambda: loading(args.target, args.draft, args.threads, min(args.turns, MAX_LOADS)),
    }
    tables = {part: make[part]() for part in PARTS if part in args.parts}
    common.print_report(report | tables, list(tables.values()), args.json)


if __name__ == "__main__":
    main()
