"""Products with unquantised weights, in the layout that is fastest for the number of rows.

A weight can be laid out in several forms. No form is the fastest on every machine, for every shape and number of rows.
So product_choice.py measures them at load.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.compiled_products import (
    LEAST_CHANNELS,
    Panels,
    compiled_product,
    has_compiled_products,
    panels_of,
)
from engine.models.int8_products import Int8Form, Int8Weight, int8_forms, int8_product, pack_int8
from engine.models.quantize import CodedWeight
from engine.models.shards import StoredWeight, UnroundedWeight

ProductForm = Literal[
    "packed",  # reordered into oneDNN's blocked layout, [out, in]
    "transposed",  # [in, out], contiguous
    "plain",  # [out, in], as it is stored
    "compiled",  # in panels, for code that is compiled for this CPU
    "onednn_int8",  # codes of 8 bits, in oneDNN's layout
    "fbgemm_int8",  # codes of 8 bits, in FBGEMM's layout
    "compiled_int8",  # codes of 8 bits, in panels
]
Given = Tensor | StoredWeight | CodedWeight | UnroundedWeight
Laid = Tensor | Panels | Int8Weight
FORMS: tuple[ProductForm, ...] = get_args(ProductForm)
COMPILED: tuple[ProductForm, ...] = ("compiled", "compiled_int8")
# Largest number of rows of each bucket, at which forms are measured. The last one holds all larger numbers too. Some
# kernels become twice as fast at 16 rows. Compiled layers may be faster than torch's with 16 rows and slower with 40.
# And code that is fast for 40 rows may be slow for a prompt.
BUCKETS = (1, 2, 3, 5, 9, 15, 24, 40, 96)
FormChoice = Sequence[ProductForm]  # a form for each bucket


class LayerGain(NamedTuple):
    """What a compiled layer gains beside its products' own time. The last bucket holds prompts, beside whose arithmetic
    nothing else counts, and its products are timed with all threads."""

    saved_s: tuple[float, ...]  # seconds around each product, for each of BUCKETS
    threads: tuple[float, ...]  # threads that share a layer make it faster by this factor, for each of BUCKETS


class GainSource(NamedTuple):
    """What measures the gain of the compiled layers that a product belongs to."""

    name: str  # the same for layers of the same structure
    measure: Callable[[], LayerGain]


class Product(Protocol):
    """y = x Wᵀ + b for x [rows, in] → [rows, out]."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def num_bytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class Linear:
    """y = x Wᵀ + b for x [rows, in] → [rows, out]. The number of rows decides which form of W is used."""

    def __init__(self, weight: Given, bias: Tensor | None = None, choice: FormChoice | None = None) -> None:
        """weight [out, in]; codes have 8 bits and one step per output channel. choice None: one form for all rows,
        packed where oneDNN can. Empty: `use` chooses later."""
        self.given: Given | None = weight  # until it is laid out
        self.shape = weight.shape  # [out, in]
        self.work = weight.nbytes  # bytes of its codes, or of its numbers as they are multiplied
        self.layer_gain: GainSource | None = None  # None: no compiled layer has the product
        self.bias = bias
        self.forms: dict[ProductForm, Laid] = {}
        if choice is None or choice:
            self.use(choice or [usable_forms(weight)[0]])

    def use(self, choice: FormChoice) -> None:
        """Lay W out in the forms of `choice`, once. Raises ConfigError if it cannot be read."""
        assert self.given is not None
        self.choice = tuple(choice)
        self.forms, self.given = laid_out(self.given, choice), None
        self.layer_gain = None  # it refers to all layers
        products = {form: product_of(form, weight, self.bias) for form, weight in self.forms.items()}
        by_bucket = [products[form] for form in choice]
        largest = BUCKETS[: len(choice) - 1]
        self._by_rows = [by_bucket[bucket_of(rows, largest)] for rows in range((largest or [0])[-1] + 1)]
        self._beyond = by_bucket[-1]

    @property
    def weight(self) -> Tensor:
        """W as it is stored, if that form is kept; else what another form keeps, in its own layout."""
        kept = self.forms.get("plain", next(iter(self.forms.values())))
        if isinstance(kept, Panels):
            return kept.numbers
        return cast(Tensor, kept.packed) if isinstance(kept, Int8Weight) else kept

    @property
    def num_bytes(self) -> int:
        """One form is counted until the forms are chosen."""
        return num_bytes_of(*self.forms.values(), self.bias) + (0 if self.given is None else self.given.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        return self._by_rows[rows](x) if rows < len(self._by_rows) else self._beyond(x)


def bucket_of(rows: int, largest: Sequence[int] = BUCKETS[:-1]) -> int:
    return sum(rows > limit for limit in largest)


def narrow_of(weight: Given) -> torch.dtype | None:
    """The dtype in which the compiled form keeps the numbers of a float32 weight exactly, with half of the bytes. None:
    the weight's own."""
    return weight.narrow if isinstance(weight, StoredWeight) else None


def bytes_in(weight: Given, form: ProductForm) -> int:
    narrow = narrow_of(weight) if form == "compiled" else None
    return weight.nbytes if narrow is None else weight.nbytes * narrow.itemsize // weight.dtype.itemsize


def usable_forms(weight: Given) -> tuple[ProductForm, ...]:
    """The forms that this weight can have. The first one is used where no measurement says otherwise."""
    if isinstance(weight, CodedWeight | UnroundedWeight):
        return int8_forms()
    if weight.device.type != "cpu" or weight.dtype is torch.float64:  # fp64 is for exactness, not for speed
        return ("plain",)
    enough = weight.shape[0] >= LEAST_CHANNELS
    compiled: tuple[ProductForm, ...] = ("compiled",) if enough and has_compiled_products() else ()
    if _onednn_packs(weight.dtype):
        return ("packed", "transposed", "plain", *compiled)
    return ("plain", "transposed", *compiled)


def _onednn_packs(dtype: torch.dtype) -> bool:
    """torch.compile's freezing on CPUs needs these operators, so they come with oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:  # which needs AVX-512 or AVX-NE-CONVERT
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def laid_out(weight: Given, forms: Sequence[ProductForm]) -> dict[ProductForm, Laid]:
    """The weight [out, in] in these forms. A stored one is read into memory of its own only if it stays plain."""
    if isinstance(weight, UnroundedWeight):
        weight = weight.rounded()
    if isinstance(weight, CodedWeight):
        return {form: pack_int8(weight, form) for form in int8_forms() if form in forms}
    narrow = narrow_of(weight)
    if isinstance(weight, StoredWeight):
        if narrow is not None and set(forms) == {"compiled"}:
            return {"compiled": panels_of(weight.narrowed(), exact=True)}
        weight = weight.read() if "plain" in forms else weight.passing()
    return {form: lay_out(weight, form, narrow) for form in FORMS if form in forms}


def lay_out(weight: Tensor, form: ProductForm, narrow: torch.dtype | None = None) -> Tensor | Panels:
    """A plain weight [out, in] in a form. All but the plain one have memory of their own. narrow: as narrow_of."""
    if form == "compiled":
        return panels_of(weight) if narrow is None else panels_of(weight.to(narrow), exact=True)
    if form == "packed":
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return weight.t().clone(memory_format=torch.contiguous_format) if form == "transposed" else weight


def product_of(form: ProductForm, weight: Laid, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product by a weight in this form."""
    if isinstance(weight, Int8Weight):
        return int8_product(weight, cast(Int8Form, form), bias)
    if isinstance(weight, Panels):
        return compiled_product(weight, bias)
    if form == "packed":
        product = torch.ops.mkldnn._linear_pointwise.default  # a torch without oneDNN has no such operator
        return lambda x: product(x, weight, bias, "none", [], "")
    if form == "plain":
        return lambda x: F.linear(x, weight, bias)
    if bias is None:
        return lambda x: torch.mm(x, weight)
    return lambda x: torch.addmm(bias, x, weight)


def num_bytes_of(*kept: Laid | None) -> int:
    """Bytes of the weights and tensors that are kept."""
    return sum(t.numel() * t.element_size() if isinstance(t, Tensor) else t.num_bytes for t in kept if t is not None)
