"""What compiled code reads of a draft model to draw whole chains (engine/kernels/cpu_chains.py)."""

import logging
from collections.abc import Sequence as Seq
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cache.storage import Storage
from engine.models.attention import Attention
from engine.models.compiled import as_stored, compiled_module
from engine.models.compiled_layers import CompiledLayers, compiled_to
from engine.models.cpu_attention import BlockGroup, BlockReader
from engine.models.decoder import Decoder, rounded
from engine.models.layer import Norm, no_norm
from engine.models.linear import Linear
from engine.models.norm import RMSNorm

log = logging.getLogger(__name__)


class ChainModel(NamedTuple):
    """A draft model, or a head that also reads its own outputs of the step before."""

    body: Decoder
    states_norm: Norm | None = None  # of these outputs; None: not a head
    enters_normed: bool = False  # whether they enter the layers behind that norm
    reads_normed: bool = False  # whether they are those behind the final norm


class ChainRows(NamedTuple):
    """The sequences that a chain is drawn for, the longest chain first."""

    slots: Seq[int]
    lengths: Seq[int]  # positions that the memory holds of each, with its gap
    depths: Seq[int]  # drafts of each


class ChainNoise(NamedTuple):
    """What the draws of chains need beside scores."""

    keys: Any  # uint64 [columns, S]: of the noise
    temperatures: Any  # fp64 [S]


class Gaps(NamedTuple):
    """A pass that reads committed tokens in front of chains."""

    ids: Tensor  # [N] int64
    attention: Attention  # by blocks
    begins: Seq[int]  # the row behind which each chain begins, in the order of ChainRows


class ChainCode:
    """Draws chains with one model over one storage. Not for fp64."""

    def __init__(self, model: ChainModel, layers: CompiledLayers, head: Linear, storage: Storage) -> None:
        self._model, self._layers, self._head = model, layers, head
        self._storage, self._window = storage, model.body.layers[0].scoring.window
        reader = BlockReader.over(storage)
        assert reader is not None, "the storage of compiled layers has blocks"
        self._reader = reader
        self._kernel: Any = compiled_module("cpu_chains")

    @classmethod
    def of(cls, model: ChainModel | None, storage: Storage) -> Self | None:
        """None: something of the model is not known to the code."""
        if model is None:
            return None
        body, traits = model.body, model.body.config.traits
        layers, head = body.few_rows, body.head
        if not isinstance(layers, CompiledLayers) or not isinstance(head, Linear) or body.dtype is torch.float64:
            return None
        norms = [body.norm]
        if model.states_norm is not None:
            norms += [model.states_norm, body.layers[0].before_attention]
        plain = traits.logit_divisor == 1 and traits.logit_softcap is None
        if not plain or not all(isinstance(norm, RMSNorm) for norm in norms):
            return None
        return cls(model, layers, head, storage)

    @property
    def most_rows(self) -> int:
        """Sequences that it draws for at most: with more, other products are faster. 0: there are no compiled products,
        or layers differ in more than their weights."""
        rows = min(self._layers.block_rows, compiled_to(self._head.choice))
        return rows if rows > 0 and self._layers.is_one_run else 0

    @property
    def vocab_size(self) -> int:
        return self._head.shape[0]

    def draw(self, rows: ChainRows, noise: ChainNoise, before: Gaps | Tensor, states: Tensor | None) -> Any:
        """Draw the chains and read all of each but its last draft. Returns tokens int64 [columns, S], with NO_TOKEN for
        a last draft whose score is not finite.

        The memory for what is read is reserved and prepared. before: gaps, which are read first; or the scores [S,
        vocab] fp32 of the first column. states: what a head reads beside the gaps [N, hidden], or beside the first
        column [S, hidden].
        """
        layers, steps = self._layers, self._steps(rows)
        tokens, count = np.zeros((len(steps[0]), len(rows.slots)), np.int64), len(rows.slots)
        most = max(count, len(before.ids)) if isinstance(before, Gaps) else count
        room, of_gaps, work = self._room(count, most), self._gaps(before), self._work(rows)
        carried = np.empty_like(room[0])
        if states is not None:
            carried[: len(states)] = states.to(layers.wide).numpy()
        if isinstance(before, Gaps):
            work = max(work, layers.work(most, self._reader.read_bytes(_group_of(before))))
        given = room[4] if isinstance(before, Gaps) else before.numpy(), carried
        drawing = noise.keys, noise.temperatures, tokens

        def compute(numbers: Any, part: int, parts: int) -> None:
            meeting = numbers, part, parts
            self._kernel.draw_chains(self._of_model, self._memory, of_gaps, steps, drawing, given, room, meeting)

        layers.in_meetings(compute, work)
        return tokens

    def compile(self) -> None:
        """Compile the code, if it can be asked for: draw nothing."""
        if self.most_rows == 0:
            return
        began, nothing, none = perf_counter(), np.zeros((0, 1), np.int64), np.zeros(0, np.int64)
        steps = (none, *[nothing] * 4, none, np.zeros((0, 0), np.int32), none)
        room, drawing = self._room(1, 1), (np.zeros((0, 1), np.uint64), np.zeros(1), nothing)
        given, meeting = (room[4], room[0]), (np.zeros((1, 2), np.int64), 0, 1)
        of_gaps = self._gaps(torch.empty(0))
        self._kernel.draw_chains(self._of_model, self._memory, of_gaps, steps, drawing, given, room, meeting)
        log.info("compiled chains are ready (%.1f s)", perf_counter() - began)

    @property
    def most_read(self) -> int:
        """Tokens of gaps that the chains' call reads at most: with more, other products are faster."""
        return self._layers.block_rows

    def _work(self, rows: ChainRows) -> int:
        """Bytes for each layer, with a share of the head's product: threads meet in a step six times for each layer,
        and three times beside them."""
        layers, count = self._layers, len(rows.slots)
        of_layer = layers.work(count, self._reader.row_bytes * sum(rows.lengths))
        of_head, number = self._head.work * -(-count // layers.tile_rows), layers.count
        return 2 * (number * of_layer + of_head) // (2 * number + 1)

    @cached_property
    def _of_model(self) -> tuple[Any, ...]:
        """See the kernel. The forms of the products must be chosen."""
        model, layers = self._model, self._layers
        body, norm_of, run = model.body, layers.norm_of, layers.first_run
        is_head = model.states_norm is not None
        token_norm = norm_of(body.layers[0].before_attention if is_head else no_norm)
        states_norm = norm_of(no_norm if model.states_norm is None else model.states_norm)
        factor = rounded(body.config.traits.embedding_multiplier, body.dtype)
        entry = (as_stored(body.embedding), factor, token_norm, states_norm, is_head, model.enters_normed)
        ending = layers.last_norm, layers.factor, norm_of(body.norm), layers.product_of(self._head)
        return entry, run.given, run.addresses, ending, model.reads_normed

    def _steps(self, rows: ChainRows) -> tuple[Any, ...]:
        """See the kernel."""
        count, columns = len(rows.slots), rows.depths[0]
        counts = np.array([sum(depth > column for depth in rows.depths) for column in range(columns)])
        places = np.zeros((columns - 1, count), np.int64)
        for s, (slot, length, depth) in enumerate(zip(*rows, strict=True)):
            places[: depth - 1, s] = list(self._storage.row_numbers(slot, length, length + depth - 1))
        positions = np.arange(columns - 1)[:, None] + np.array(rows.lengths, np.int64)
        nothing = np.zeros(count, np.int64)
        firsts = np.zeros_like(positions) if self._window is None else np.maximum(positions - (self._window - 1), 0)
        tables = [self._storage.table(slot) for slot in rows.slots]
        padded = np.zeros((count, max(map(len, tables))), np.int32)
        for s, table in enumerate(tables):
            padded[s, : len(table)] = table
        return counts, positions, places, firsts, positions + 1, nothing, padded, np.arange(count + 1)

    def _gaps(self, before: Gaps | Tensor) -> tuple[Any, ...]:
        """See the kernel."""
        if not isinstance(before, Gaps):
            none = np.zeros(0, np.int64)
            return none, none, none, (np.zeros((0, 0), np.int32), none, (none,) * 5), none
        attention = before.attention
        seen = self._reader.seen(_group_of(before), self._window)
        places = attention.positions.numpy(), attention.plan.cache_rows.numpy()
        return before.ids.numpy(), *places, seen, np.array(before.begins, np.int64)

    @cached_property
    def _memory(self) -> tuple[Any, ...]:
        """See the kernel."""
        nobody, reader = (np.zeros(0, np.int64), np.empty((0, 0), self._layers.number)), self._reader
        return reader.blocks(0), reader.addresses, self._layers.first_run.turns, nobody

    def _room(self, count: int, most: int) -> tuple[Any, ...]:
        """See the kernel. The budget has room for it: it is less than what the pass of a prompt takes, and single steps
        with filters."""
        layers, hidden = self._layers, self._model.body.config.hidden_size
        inputs = layers.nothing if self._model.states_norm is None else np.empty((most, 2 * hidden), layers.number)
        states = [np.empty((most, hidden), layers.number) for _ in range(3)]
        race = np.empty((1, self.vocab_size), np.float32), np.empty((1, self.vocab_size), np.int64)
        return *states, inputs, np.empty((count, self.vocab_size), layers.number), layers.room(most), race


def _group_of(gaps: Gaps) -> BlockGroup:
    assert gaps.attention.by_blocks is not None, "who plans the gaps asks first"
    return gaps.attention.by_blocks[1]
