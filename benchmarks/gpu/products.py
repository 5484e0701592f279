"""Products by weights of 8 and 4 bits: checked against their numbers in fp64, and timed against bf16."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.machine import bandwidth, wait
from benchmarks.gpu.steps import Recorder, Skipped
from engine.models.coded_linear import CodedLinear, coded_products_reason
from engine.models.quantize import CodedWeight, quantise_as_fp8, quantise_in_groups, quantise_weight

QUANTISE: dict[str, Callable[[Tensor], CodedWeight]] = {
    "int8": quantise_weight,
    "int4": quantise_in_groups,
    "fp8": quantise_as_fp8,
}
SHAPES = ((4096, 14336), (6144, 4096), (896, 4864))  # [out, in]: of an 8B model, and of a 0.5B draft
ROWS = (1, 5, 16, 64, 512)
FEW_ROWS = 64  # up to which a row has the same bits alone and in company
COPIES_BYTES = 2**28  # weights that are used in turn, so that none is found in a cache
CALLS = 20
BF16_EPS = 2.0**-8


def compare(recorder: Recorder) -> None:
    """Fails if a product is wrong, or if a row of few has other bits alone."""
    device = torch.device(recorder.device)
    if device.type != "cpu" and (reason := coded_products_reason(device)):
        raise Skipped(reason)
    for out, inner in ((64, 96),) if recorder.dry else SHAPES:
        generator = torch.Generator().manual_seed(out)
        weight = torch.randn(out, inner, generator=generator).to(device).bfloat16()
        x = torch.randn(ROWS[-1], inner, generator=generator).to(device).bfloat16()
        for form, quantise in QUANTISE.items():
            recorder.check_time(5)
            coded = quantise(weight)
            product = CodedLinear(coded, None, device)
            _check(recorder, f"{form}, {out} × {inner}", product, coded, x)
            _time(recorder, f"{form}, {out} × {inner}", product, weight, x)


def _check(recorder: Recorder, name: str, product: CodedLinear, coded: CodedWeight, x: Tensor) -> None:
    numbers = coded.codes.double().unflatten(1, (-1, coded.group)) * coded.steps.double()[..., None]
    if coded.offsets is not None:
        numbers += coded.offsets.double()[..., None]
    exact = F.linear(x.double(), numbers.flatten(1)[:, : x.shape[1]])
    results = {rows: product(x[:rows]) for rows in ROWS}
    worst = max(float(((y - exact[:rows]).abs() / (1 + exact[:rows].abs())).max()) for rows, y in results.items())
    recorder.at_most(f"{name}: error over 1 + size", worst, BF16_EPS)
    few = [y for rows, y in results.items() if rows <= FEW_ROWS]
    recorder.at_most(f"{name}: first rows that differ by their company", sum(not y[0].equal(few[0][0]) for y in few), 0)


def _time(recorder: Recorder, name: str, product: CodedLinear, weight: Tensor, x: Tensor) -> None:
    copies = 1 if recorder.dry else max(1, -(-COPIES_BYTES // product.num_bytes))
    coded = [product, *(_copy(product) for _ in range(copies - 1))]
    plain = [weight.clone() for _ in range(copies)]
    speed = bandwidth(recorder.device) if not recorder.dry else 1e10
    for rows in ROWS[:1] if recorder.dry else ROWS:
        part = x[:rows]
        calls = [partial(p, part) for p in coded], [partial(F.linear, part, w) for w in plain]
        times = [_seconds(each, recorder.device, 1 if recorder.dry else CALLS) for each in calls]
        recorder.note(f"{name}, {rows} rows: µs", 1e6 * times[0])
        recorder.note(f"{name}, {rows} rows: bf16's time over it", times[1] / times[0])
        if rows == 1:
            recorder.note(f"{name}, {rows} rows: time over reading its bytes", times[0] * speed / product.num_bytes)


def _copy(product: CodedLinear) -> CodedLinear:
    copy = CodedLinear.__new__(CodedLinear)
    copy.weight, copy.steps, copy.bias = product.weight.clone(), product.steps.clone(), product.bias
    copy.offsets = None if product.offsets is None else product.offsets.clone()
    return copy


def _seconds(calls: Sequence[Callable[[], Tensor]], device: str, count: int) -> float:
    """Median seconds of one of the calls, which take turns. On a GPU they are captured: a host that asks for each of
    them would be timed instead."""
    chosen = [calls[i % len(calls)] for i in range(count)]
    chosen[0]()

    def run() -> None:
        for call in chosen:
            call()

    again: Callable[[], object] = run
    if device != "cpu":
        graph = torch.cuda.CUDAGraph()
        wait(device)
        with torch.cuda.graph(graph):
            run()
        again = graph.replay
    again()
    times = []
    for _ in range(3):
        wait(device)
        began = perf_counter()
        again()
        wait(device)
        times.append((perf_counter() - began) / count)
    return median(times)
