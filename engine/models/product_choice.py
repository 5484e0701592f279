"""Chooses the forms of a model's products by measuring them at load, on the machine that will run them.

Each shape is timed in every usable form at every bucket of rows. The calls go through the weights of all layers in
turn, as a forward does. Between two uses of a weight the others pass through the caches, so a weight is read from the
cache or memory that it is read from in service.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from pathlib import Path
from time import perf_counter, perf_counter_ns, thread_time_ns
from typing import NamedTuple

import torch
from torch import Tensor

from engine.memory.host import give_back_freed_memory
from engine.models.compiled import one_part
from engine.models.linear import (
    BUCKETS,
    COMPILED,
    FormChoice,
    GainSource,
    Given,
    Laid,
    LayerGain,
    Linear,
    ProductForm,
    bytes_in,
    laid_out,
    lay_out,
    narrow_of,
    product_of,
    usable_forms,
)
from engine.models.product_times import TimesFile
from engine.models.quantize import CodedWeight
from engine.profiling.quartile import lower_quartile

log = logging.getLogger(__name__)

BUDGET_S = 0.5  # for the sweeps of one model
SAMPLE_BYTES = 32 * 2**20  # bytes of a larger model or weight that are measured in each form, about
CHANNELS = 64  # a part of a weight has a multiple of this many channels, as kernels compute them in blocks
MIN_SWEEPS, MAX_SWEEPS = 2, 8
SETTLING = 6  # passes through a model until a cache holds what it can: 4 on a Xeon, twice as slow at first
STEADY = 1.15  # the second fastest sweep of an undisturbed measurement takes at most this many times the fastest
PACKERS = 2  # threads: each lays out one weight at a time, so two weights are in memory twice at most
# Forms must make the products faster by this factor for each time that the smallest form would fit into the memory that
# they take more.
MEMORY_GAIN = 1.03
# Weight of each bucket: plain decoding has 1 row, verification of a text 3 to 9. The last bucket is that of prompts,
# whose passes take as long as many others.
IMPORTANCE = (4, 1, 2, 3, 2, 1, 0.5, 0.5, 3)


class ProductShape(NamedTuple):
    """Products that take the same time."""

    out: int
    inner: int
    bias: bool
    narrow: torch.dtype | None = None  # as narrow_of

    def __str__(self) -> str:
        stored = "" if self.narrow is None else f" from {str(self.narrow).removeprefix('torch.')}"
        return f"{self.out} × {self.inner}{' + bias' if self.bias else ''}{stored}"


TimesByForm = Mapping[ProductForm, Sequence[float]]  # seconds of one product, for each of BUCKETS
# (shape, form, rows, call) → seconds of the call
TimedCall = Callable[[ProductShape, ProductForm, int, Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Measurement:
    times: dict[ProductShape, TimesByForm]  # of layers: as `with_layers` gives them
    steady: bool  # whether the sweeps agree; if not, something else kept the machine busy


def clocked(shape: ProductShape, form: ProductForm, rows: int, call: Callable[[], object]) -> float:
    # One thread's processor time leaves out what other processes take. Several threads wait for each other.
    clock = thread_time_ns if torch.get_num_threads() == 1 else perf_counter_ns
    started = clock()
    call()
    return (clock() - started) / 1e9


def choose_forms(
    products: Sequence[Linear],
    *,
    copies_bytes: int | None = None,
    cache: Path | None = None,
    timed: TimedCall = clocked,
) -> int:
    """Lay out the weights of `products`, whose forms are not chosen yet, in those that make the products fastest.

    Returns the bytes that second forms take.
    products: all have weights of one dtype.
    copies_bytes: how much memory second forms may take; None: no limit. If they need more, each weight has one form.
    cache: the folder that keeps measurements; None: measure.
    """
    groups = _groups(products)
    if not groups:
        return 0
    began = perf_counter()
    times, source = _known_or_measured(groups, cache, timed)
    give_back_freed_memory()  # the sample's
    choices = _choices(groups, times)
    if copies_bytes is not None and _copied_bytes(groups, choices) > copies_bytes:
        choices = _choices(groups, times, most_forms=1)
    copied, count = _copied_bytes(groups, choices), len(groups)
    for shape in groups:
        log.debug("products of %s: %s", shape, describe(choices[shape]))
    pool = ThreadPoolExecutor(PACKERS, thread_name_prefix="weights")
    try:
        list(pool.map(lambda product: product.use(choices[_shape(product)]), products))
    finally:
        pool.shutdown(cancel_futures=True)
    twice = sum(_copies(choice) > 1 for choice in choices.values())
    log.info(
        "products are %s (%.1f s): %d of %d shapes have a second form for some numbers of rows, %.1f MB in all",
        *(source, perf_counter() - began, twice, count, copied / 1e6),
    )
    return copied


def _choices(
    groups: Mapping[ProductShape, Sequence[Linear]], times: Mapping[ProductShape, TimesByForm], most_forms: int = 2
) -> dict[ProductShape, FormChoice]:
    """The choice of each shape. Those of compiled layers are chosen together."""
    layered = {shape: len(members) for shape, members in groups.items() if _gain_of(members) is not None}
    alone = [shape for shape in groups if shape not in layered]
    choices = {shape: best_choice(times[shape], most_forms, narrow=shape.narrow is not None) for shape in alone}
    if layered:
        choices |= best_layers({shape: times[shape] for shape in layered}, layered, most_forms)
    return choices


def best_layers(
    times: Mapping[ProductShape, TimesByForm], counts: Mapping[ProductShape, int], most_forms: int = 2
) -> dict[ProductShape, FormChoice]:
    """The choice of each shape of a decoder's layers, with counts[shape] products each.

    A compiled layer computes all its products, so up to some number of rows all are compiled or none. Beyond, each has
    the forms that are best for itself.
    """
    (compiled,) = {form for forms in times.values() for form in forms if form in COMPILED}
    others = {shape: {f: spent for f, spent in forms.items() if f != compiled} for shape, forms in times.items()}
    if not all(others.values()):
        return dict.fromkeys(times, (compiled,))

    def forms_up_to(end: int) -> dict[ProductShape, FormChoice]:
        """With compiled layers for the first `end` buckets."""
        left = most_forms - (end > 0)
        rest = {shape: best_choice(forms, left, end) if left else () for shape, forms in others.items()}
        return {shape: (*(compiled,) * end, *choice[end:]) for shape, choice in rest.items()}

    def seconds(choices: Mapping[ProductShape, FormChoice], i: int) -> float:
        return sum(counts[shape] * times[shape][choice[i]][i] for shape, choice in choices.items())

    ends = range(len(BUCKETS) + 1) if most_forms > 1 else (0, len(BUCKETS))
    options = {end: forms_up_to(end) for end in ends}
    spent = {end: [seconds(choices, i) for i in range(len(BUCKETS))] for end, choices in options.items()}
    fastest = [min(column) for column in zip(*spent.values(), strict=True)]

    def cost(end: int) -> float:
        """As in best_choice, and more if it needs more memory."""
        ratios = (weight * a / b for weight, a, b in zip(IMPORTANCE, spent[end], fastest, strict=True))
        more = max(_more_memory(choice, shape.narrow is not None) for shape, choice in options[end].items())
        return float(sum(ratios) * MEMORY_GAIN**more)

    return options[min(options, key=cost)]


def _more_memory(forms: Collection[ProductForm], narrow: bool) -> int:
    """How often the smallest form of a weight fits into the memory that these take beside one. narrow: whether the
    compiled form has half of the bytes."""
    return sum(2 if narrow and form not in COMPILED else 1 for form in set(forms)) - 1


def best_choice(times: TimesByForm, most_forms: int = 2, first: int = 0, *, narrow: bool = False) -> FormChoice:
    """The form for each bucket, of which those from `first` on count. At most `most_forms` different forms are used.
    narrow: as in _more_memory."""

    def cost(forms: tuple[ProductForm, ...]) -> float:
        """The weighted sum over the buckets of: time with these forms over time with the fastest form. And more for
        memory."""
        return MEMORY_GAIN ** _more_memory(forms, narrow) * sum(
            weight * min(times[form][i] for form in forms) / min(spent[i] for spent in times.values())
            for i, weight in enumerate(IMPORTANCE)
            if i >= first
        )

    kept = min(combinations(times, 1), key=cost)
    for number in range(2, most_forms + 1):
        more = min(combinations(times, number), key=cost, default=kept)
        kept = more if cost(more) < cost(kept) else kept
    return tuple(min(kept, key=lambda form: times[form][i]) for i in range(len(BUCKETS)))


def describe(choice: FormChoice) -> str:
    """The text "transposed to 1 row, packed beyond"."""
    ends = [i for i in range(len(choice) - 1) if choice[i] != choice[i + 1]]
    parts = [f"{choice[i]} to {BUCKETS[i]} row{'s' if BUCKETS[i] > 1 else ''}, " for i in ends]
    return "".join(parts) + (f"{choice[-1]} beyond" if parts else choice[-1])


def _groups(products: Sequence[Linear]) -> dict[ProductShape, list[Linear]]:
    groups: dict[ProductShape, list[Linear]] = {}
    for product in products:
        groups.setdefault(_shape(product), []).append(product)
    return groups


def _shape(product: Linear) -> ProductShape:
    out, inner = _given(product).shape
    return ProductShape(out, inner, product.bias is not None, narrow_of(_given(product)))


def _given(product: Linear) -> Given:
    assert product.given is not None  # no form is chosen yet
    return product.given


def _copied_bytes(groups: Mapping[ProductShape, Sequence[Linear]], choices: Mapping[ProductShape, FormChoice]) -> int:
    return sum(_extra_bytes(_given(p), choices[shape]) for shape, members in groups.items() for p in members)


def _extra_bytes(weight: Given, choice: FormChoice) -> int:
    """What these forms take beside the bytes of one, at most."""
    return max(0, sum(bytes_in(weight, form) for form in set(choice)) - weight.nbytes)


def _copies(choice: FormChoice) -> int:
    """How often a weight is in memory in these forms."""
    return len(set(choice))


def _known_or_measured(
    groups: Mapping[ProductShape, Sequence[Linear]], cache: Path | None, timed: TimedCall
) -> tuple[dict[ProductShape, TimesByForm], str]:
    """(times of each shape, where they come from)."""
    model_bytes = sum(_given(product).nbytes for members in groups.values() for product in members)
    dtype = _given(next(iter(groups.values()))[0]).dtype
    file = None if cache is None else TimesFile(cache, dtype, model_bytes)
    known = {} if file is None else file.read()
    forms = {shape: usable_forms(_given(members[0])) for shape, members in groups.items()}
    keys = {shape: _key(shape, members) for shape, members in groups.items()}
    if file is not None and all(set(known.get(keys[shape], ())) == set(forms[shape]) for shape in groups):
        return {shape: known[keys[shape]] for shape in groups}, f"as measured before, {file.path}"
    measured = measure(groups, model_bytes, timed)
    if not measured.steady:
        return measured.times, "measured on a busy machine, so the next start measures again"
    if file is not None:
        file.write(known | {keys[shape]: times for shape, times in measured.times.items()})
    return measured.times, "measured"


def _key(shape: ProductShape, members: Sequence[Linear]) -> str:
    """What names a shape's times in the file. Those of layers are taken in another way."""
    source = _gain_of(members)
    return str(shape) if source is None else f"{shape} in layers {source.name}"


def _gain_of(members: Sequence[Linear]) -> GainSource | None:
    """What measures the gain of the compiled layers that these products belong to; None: they belong to none."""
    first = members[0]
    return first.layer_gain if set(COMPILED) & set(usable_forms(_given(first))) else None


def with_layers(times: TimesByForm, gain: LayerGain) -> TimesByForm:
    """Seconds of a product with what is done around it, which compiled layers save."""
    return {
        form: [s / threads for s, threads in zip(spent, gain.threads, strict=True)]
        if form in COMPILED
        else [s + saved_s for s, saved_s in zip(spent, gain.saved_s, strict=True)]
        for form, spent in times.items()
    }


@torch.inference_mode()
def measure(groups: Mapping[ProductShape, Sequence[Linear]], model_bytes: int, timed: TimedCall) -> Measurement:
    """Time every shape in every form at every bucket. A sweep is one pass through the sample for each of them.

    The passes come in the order of `_Sample.turns`.
    """
    sample = _Sample(groups, model_bytes)
    sample.warm_up()
    gains = {shape: source for shape, members in groups.items() if (source := _gain_of(members)) is not None}
    seconds: dict[tuple[ProductShape, ProductForm, int], list[float]] = {}
    sweeps: list[float] = []
    deadline = perf_counter() + BUDGET_S
    while len(sweeps) < MIN_SWEEPS or (perf_counter() < deadline and len(sweeps) < MAX_SWEEPS):
        spent = 0.0
        for form, i, settling in sample.turns():
            for _ in range(settling):
                for _, call in sample.calls(form, BUCKETS[i]):
                    call()
            for shape, call in sample.calls(form, BUCKETS[i]):
                # Threads of a compiled layer are woken once, so a product that wakes them says nothing.
                alone = form in COMPILED and shape in gains and i < len(BUCKETS) - 1
                with one_part() if alone else nullcontext():
                    each = timed(shape, form, BUCKETS[i], call)
                seconds.setdefault((shape, form, i), []).append(each)
                spent += each
        sweeps.append(spent)
    times: dict[ProductShape, TimesByForm] = {
        shape: {
            form: [lower_quartile(seconds[shape, form, i]) for i in range(len(BUCKETS))]
            for form in sample.forms
            if (shape, form, 0) in seconds
        }
        for shape in groups
    }
    fastest, second = sorted(sweeps)[:2]
    times |= {shape: with_layers(times[shape], source.measure()) for shape, source in gains.items()}
    return Measurement(times, second <= STEADY * fastest)


def _channels(shape: ProductShape, dtype: torch.dtype) -> int:
    """The products of at most SAMPLE_BYTES. A head in every form would take seconds, and more memory than the model."""
    fitting = SAMPLE_BYTES // (shape.inner * dtype.itemsize)
    return min(shape.out, max(CHANNELS, fitting - fitting % CHANNELS))


def _ones(out: int, inner: int, dtype: torch.dtype, coded: bool) -> Tensor | CodedWeight:
    ones = torch.ones(out, inner, dtype=dtype)
    return CodedWeight(ones, torch.ones(out, 1)) if coded else ones


def _made_up(weight: Tensor | CodedWeight, form: ProductForm, narrow: torch.dtype | None) -> Laid:
    """The weight in a form as a model's weights have it. narrow: as narrow_of."""
    if narrow is None or isinstance(weight, CodedWeight):
        return laid_out(weight, [form])[form]
    return lay_out(weight, form, narrow)


class _Sample:
    """Weights of each shape in every form, in the order of a forward. They are made up: all numbers are 1."""

    def __init__(self, groups: Mapping[ProductShape, Sequence[Linear]], model_bytes: int) -> None:
        share = min(1.0, SAMPLE_BYTES / model_bytes)
        self.whole = share == 1
        first = _given(next(iter(groups.values()))[0])
        usable = {shape: usable_forms(_given(members[0])) for shape, members in groups.items()}
        self.forms = max(usable.values(), key=len)
        drawn = {shape: members[: ceil(share * len(members))] for shape, members in groups.items()}
        rounds = max(map(len, drawn.values()))
        ordered = [shape for i in range(rounds) for shape, members in drawn.items() if i < len(members)]
        coded = first.dtype is torch.int8
        parts = [(shape, _ones(_channels(shape, first.dtype), shape.inner, first.dtype, coded)) for shape in ordered]
        dtype = torch.float32 if coded else first.dtype  # of activations
        self._products = {
            form: [
                (
                    shape,
                    product_of(
                        form,
                        _made_up(part, form, shape.narrow),
                        torch.ones(part.shape[0], dtype=dtype) if shape.bias else None,
                    ),
                )
                for shape, part in parts
                if form in usable[shape]
            ]
            for form in self.forms
        }
        widths = {shape.inner for shape in groups}
        self._inputs = {(width, rows): torch.ones(rows, width, dtype=dtype) for width in widths for rows in BUCKETS}

    def turns(self) -> Iterator[tuple[ProductForm, int, int]]:
        """(form, bucket, passes before the one that counts), in an order that leaves weights where service has them.

        If the sample is the whole model, one form goes through all buckets, behind passes that let the caches settle.
        Otherwise the forms take turns: the passes of the others evict the sample, as a larger model's own weights do.
        """
        if self.whole:
            yield from ((form, i, 0 if i else SETTLING) for form in self.forms for i in range(len(BUCKETS)))
        else:
            yield from ((form, i, 0) for i in range(len(BUCKETS)) for form in self.forms)

    def calls(self, form: ProductForm, rows: int) -> list[tuple[ProductShape, Callable[[], Tensor]]]:
        def call(product: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
            return lambda: product(x)

        return [(shape, call(product, self._inputs[shape.inner, rows])) for shape, product in self._products[form]]

    def warm_up(self) -> None:
        """oneDNN compiles a product at its first call."""
        for form in self.forms:
            for rows in BUCKETS:
                for call in dict(self.calls(form, rows)).values():
                    call()
