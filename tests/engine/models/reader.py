"""Feeds texts to a Runner in any manner and compares every row of logits with expected ones."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch
from torch import Tensor

from engine.models.attention import AttentionPlan, plan_attention
from engine.models.compiled_layers import CompiledLayers, products_of
from engine.models.compiled_products import LEAST_CHANNELS, panels_of
from engine.models.decoder import Decoder, LanguageModel
from engine.models.feeds import Feed
from engine.models.linear import COMPILED, Linear, ProductForm
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.runner import Runner
from engine.models.spans import Span
from tests.engine.driving import make_sequence
from tests.kv import kv_layout

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
SLOTS = 8
LENGTH = 64


@cache
def load_alone(checkpoint: str, dtype: torch.dtype = torch.float64, max_len: int = LENGTH) -> Decoder:
    """One decoder for all tests of a checkpoint: it keeps nothing of what it computes."""
    return load_decoder(open_checkpoint(checkpoint), dtype=dtype, device=torch.device("cpu"), max_len=max_len)


def all_compiled(decoder: Decoder) -> Decoder:
    """The decoder with compiled layers for all passes that they could serve, whatever is fastest here."""
    few_rows = CompiledLayers.of(decoder.layers, decoder.config, decoder.rotations, decoder.dtype)
    assert few_rows is not None
    for product in chain.from_iterable(map(products_of, decoder.layers)):
        in_panels(product)
    few_rows.block_rows = sys.maxsize
    return replace(decoder, few_rows=few_rows)


@contextmanager
def in_form(form: ProductForm) -> Iterator[None]:
    """Products whose forms are chosen meanwhile have this one, or are plain if they have too few channels for it."""

    def choose(products: Sequence[Linear], **_: object) -> int:
        for product in products:
            product.use([form if product.shape[0] >= LEAST_CHANNELS else "plain"])
        return 0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("engine.models.products.choose_forms", choose)
        yield


def in_panels(product: Linear) -> Linear:
    """The product, with what compiled layers read: fp64 has only plain products otherwise."""
    if not set(COMPILED) & set(product.forms):
        assert "plain" in product.forms
        product.forms["compiled"] = panels_of(product.weight)
    return product


class Reader:
    """Feeds texts to a Runner, text s in slot s, and compares each row of logits with the expected ones."""

    def __init__(
        self, decoder: LanguageModel, texts: list[list[int]], expected: Tensor, *, blocks: bool = True
    ) -> None:
        """expected [slots, length, vocab] fp64. blocks: whether the attention of short spans reads blocks."""
        self.runner = Runner(decoder, kv_layout(SLOTS, LENGTH), torch.device("cpu"))
        if not blocks:
            self.runner.attention_plans.reader = None
        self.expected = expected
        self.tolerance = TOLERANCE[decoder.dtype]
        self.sequences = [make_sequence(slot, text) for slot, text in enumerate(texts)]
        for slot in range(SLOTS):
            self.runner.cache.allocate(slot)
            assert self.runner.cache.slot(slot) == slot

    def plan(self, counts: Mapping[int, int]) -> AttentionPlan:
        """How a pass of these many tokens per slot will be computed, in this order."""
        config, cache = self.runner.decoder.config, self.runner.cache
        for slot, count in counts.items():
            cache.reserve(slot, count)
        self.runner.storage.prepare()
        return plan_attention(
            [Span.at(slot, cache.length(slot), count) for slot, count in counts.items()],
            self.runner.storage,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dtype=self.runner.decoder.dtype,
            device=self.runner.device,
            reader=self.runner.attention_plans.reader,
        )

    def feed(self, counts: Mapping[int, int], drafts: Mapping[int, int] = {}) -> None:
        """One pass: counts[s] committed tokens of slot s, then drafts[s] more as drafts. Every row is compared."""
        starts = {slot: self.runner.cache.length(slot) for slot in counts}
        feeds = [
            Feed(self.sequences[slot], count, drafts.get(slot, 0), outputs=count + drafts.get(slot, 0))
            for slot, count in counts.items()
        ]
        table = self._draft_table(counts, drafts, starts) if drafts else None
        with torch.inference_mode():
            logits = self.runner.run(feeds, table)
        ends = {slot: starts[slot] + count + drafts.get(slot, 0) for slot, count in counts.items()}
        wanted = torch.cat([self.expected[slot, starts[slot] : ends[slot]] for slot in counts])
        error = (logits.double() - wanted).abs().max().item()
        assert error <= self.tolerance, f"logits differ by {error}"
        assert all(self.runner.cache.length(slot) == end for slot, end in ends.items())

    def _draft_table(self, counts: Mapping[int, int], drafts: Mapping[int, int], starts: Mapping[int, int]) -> Tensor:
        table = torch.full((len(counts), max(drafts.values())), -7)  # what lies beyond a row's drafts is never used
        for row, slot in enumerate(counts):
            first = starts[slot] + counts[slot]
            table[row, : drafts.get(slot, 0)] = torch.tensor(
                self.sequences[slot].tokens[first : first + drafts.get(slot, 0)], dtype=torch.int64
            )
        return table
