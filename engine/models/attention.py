"""Attention of packed, ragged queries over a KV cache's memory.

A span is one sequence's tokens in a pass: a prefill chunk, one token, or 1 + k verification tokens. Compiled code that
reads the storage's blocks (cpu_attention.py) computes the spans of as many rows as pay, on many CPUs all of them, and
torch's fused attention the others. There, and wherever that code is not at hand, short spans in neighbouring slots are
computed by one batched call over a view of those slots, other spans alone. Only the attention of such a group is
padded, never a matrix product. The storage decides whether K and V are copied for it.

A layer with a sliding window reads the last keys of that view only; the mask hides what lies before a query's window.

A draft tree lies behind its sequence's committed tokens, one node after the other. Siblings have the same position, so
a key's place in the slot is not its position there. The mask is made as if a node saw the committed tokens only; then
the keys of its path are shown to it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.storage import Storage
from cache.transfer import index_tensor
from engine.kernels.paged_rows import MAX_NODES
from engine.models.cpu_attention import BlockGroup, BlockReader
from engine.models.pass_attention import PLAIN, Scoring
from engine.models.spans import Span
from engine.trees import seen_pairs

GROUP_WASTE = 3  # a group may compute at most this many times the attention scores that its spans need
SPAN_OVERHEAD = 1500  # attention scores that cost about as much as one more call
KEY_BLOCK = 16  # attention adds over keys in vectors of up to this many numbers
EXPLICIT_SCORES = 1 << 22  # scores of one head that are held at once where torch's fused attention cannot be used


@dataclass(frozen=True, slots=True)
class Group:
    """Spans computed by one attention call over slots [first_slot, first_slot + slots)."""

    first_slot: int
    slots: int
    queries: int  # queries per slot, padding included
    keys: int  # keys per slot, padding included
    mask: Tensor | None  # additive [slots, 1, queries·group, keys], for no window; None: every query sees every key
    last_visible: Tensor  # [slots, queries] int64: the last of the keys that each query sees, paths in trees aside
    positions: Tensor  # [slots, queries] int64
    first_position: int  # the smallest position of a query
    trees: tuple[tuple[int, Span], ...]  # (padded index of the span's first query, span) of each span with a tree
    rows: slice  # the group's rows of the packed input
    gather: Tensor | None  # [slots·queries] packed row of each padded query; None: rows are already in that order
    scatter: Tensor | None  # [rows] padded index of each packed row


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The position of each packed token and how spans are grouped; made once per pass for all layers."""

    positions: Tensor  # [N] int64
    cache_rows: Tensor  # [N] int64: the storage's row of that position
    first_row: int | None  # where the rows are those from this one on, in order; None: they are not
    groups: tuple[Group | BlockGroup, ...]
    separate: bool = False  # each query is computed by itself, so that its result does not depend on the others


def plan_attention(
    spans: Sequence[Span],
    storage: Storage,
    *,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    separate_to: int | None = None,
    reader: BlockReader | None = None,
    few_rows: int = 0,
) -> AttentionPlan:
    """Plan a pass. Spans are in packed order, one per slot; short spans should be sorted by slot.

    separate_to: compute each query by itself; no sequence has more positions than that. None: together.
    reader: what computes the spans that it takes, or all where a query must not depend on others. None: torch does.
    few_rows: a pass with at most so many rows is all the reader's.
    """
    trees = [s.parents for s in spans] != [None] * len(spans)
    index: list[int] = []  # positions, then cache rows, then, with trees, the last visible keys: one transfer for all
    for s in spans:
        index += s.positions()
    count = len(index)
    for s in spans:
        index += storage.row_numbers(s.slot, s.start, s.end)
    rows_used = index[count:]
    if trees:
        for s in spans:
            index += s.last_visible()
    positions, cache_rows, *visible = index_tensor(index, device).view(2 + trees, -1).unbind(0)
    in_order = len(spans) == 1 and rows_used == list(range(rows_used[0], rows_used[0] + len(rows_used)))
    groups: list[Group | BlockGroup] = []
    row, group_size = 0, num_heads // num_kv_heads
    few = 0 < count <= few_rows and all(len(s.parents or ()) <= MAX_NODES for s in spans)
    all_by_blocks = separate_to is not None or few
    for by_blocks, members in _parted(spans, group_size, all_by_blocks, reader):
        rows = slice(row, row + sum([s.size for s in members]))
        row = rows.stop
        queries = positions if len(members) == len(spans) else positions[rows]
        last_visible = visible[0][rows] if trees else queries
        if by_blocks:
            groups.append(BlockGroup.of(rows, members, group_size, storage, queries, last_visible))
            continue
        end = max([s.end for s in members])
        keys = end if separate_to is None else max(end, min(separate_to, -(-end // KEY_BLOCK) * KEY_BLOCK))
        masked = separate_to is not None  # a call without a mask would take another kernel
        groups.append(_make_group(members, keys, rows, queries, last_visible, group_size, dtype, masked))
    first_row = rows_used[0] if in_order else None
    return AttentionPlan(positions, cache_rows, first_row, tuple(groups), separate_to is not None)


class Attention:
    """The attention of one pass over views of a cache's memory. The views and the masks are made once, not once per
    layer."""

    def __init__(self, plan: AttentionPlan, storage: Storage, reader: BlockReader | None = None) -> None:
        """reader: the plan's."""
        self.plan = plan
        self._reader, self._storage = reader, storage
        self._views = [
            storage.view(g.first_slot, g.slots, g.keys) if isinstance(g, Group) else None for g in plan.groups
        ]
        self._slid: dict[tuple[int, int], tuple[int, Tensor | None]] = {}  # (group, window) → (first key, mask)

    @cached_property
    def _run(self) -> Sequence[Tensor] | None:
        """Where a pass whose rows are in order stores them: a copy into a view costs half of a copy by row numbers."""
        first = self.plan.first_row
        return None if first is None else self._storage.run(first, self.plan.cache_rows.shape[0])

    @property
    def positions(self) -> Tensor:
        return self.plan.positions

    @property
    def rotates(self) -> bool:
        return False

    @property
    def by_blocks(self) -> tuple[BlockReader, BlockGroup] | None:
        """What computes the whole pass, if it reads blocks; None: torch computes some spans."""
        group = self.plan.groups[0]
        if self._reader is None or len(self.plan.groups) > 1 or not isinstance(group, BlockGroup):
            return None
        return self._reader, group

    def __call__(
        self, layer: int, queries: Tensor, kv: Tensor, scoring: Scoring = PLAIN, factors: Tensor | None = None
    ) -> Tensor:
        """As PassAttention."""
        assert factors is None, "queries and keys are rotated"
        if self._run is None:
            self._storage.rows[layer].index_copy_(0, self.plan.cache_rows, kv)
        else:
            self._run[layer].copy_(kv)
        if len(self._views) == 1:
            return self._attend(0, layer, queries, scoring)
        groups = enumerate(self.plan.groups)
        return torch.cat([self._attend(number, layer, queries[group.rows], scoring) for number, group in groups])

    def _attend(self, number: int, layer: int, queries: Tensor, scoring: Scoring) -> Tensor:
        group, view = self.plan.groups[number], self._views[number]
        if isinstance(group, BlockGroup):
            assert self._reader is not None, "the plan was made for a reader of blocks"
            return self._reader.attend(group, layer, queries, scoring)
        assert view is not None
        keys, values = view[layer]
        mask, window = group.mask, scoring.window
        if window is not None and window < group.keys:
            if (number, window) not in self._slid:
                self._slid[number, window] = _slide(group, window, queries.shape[1] // keys.shape[1], queries.dtype)
            first, mask = self._slid[number, window]
            keys, values = keys[:, :, first:], values[:, :, first:]
        if self.plan.separate:
            return _attend_group(queries, keys, values, mask, group, scoring, partial(_separate, count=group.queries))
        attend = _fused if scoring.softcap is None and scoring.sinks is None else _explicit
        return _attend_group(queries, keys, values, mask, group, scoring, attend)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scoring], Tensor]


def _attend_group(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    group: Group,
    scoring: Scoring,
    attend: Attend,
) -> Tensor:
    if group.gather is not None:
        queries = queries.index_select(0, group.gather)
    slots, count, heads, head_dim = group.slots, group.queries, queries.shape[-2], queries.shape[-1]
    kv_heads = keys.shape[1]
    group_size = heads // kv_heads
    # Heads that share k and v become further queries, so grouped-query attention does not repeat K and V.
    stacked = (slots, kv_heads, count * group_size, head_dim)
    if count == 1 or kv_heads == 1:  # the packed order is the right one
        out = attend(queries.reshape(stacked), keys, values, mask, scoring)
    else:
        q = queries.reshape(slots, count, kv_heads, group_size, head_dim).transpose(1, 2).reshape(stacked)
        out = attend(q, keys, values, mask, scoring)
        out = out.view(slots, kv_heads, count, group_size, head_dim).transpose(1, 2)
    out = out.reshape(slots * count, heads * head_dim)
    return out if group.scatter is None else out.index_select(0, group.scatter)


def _fused(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scoring.scale)


def _separate(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring, count: int) -> Tensor:
    """Attention of `count` queries per slot in which a query's result does not depend on the others of the pass.

    q [slots, kv_heads, count·group, head_dim]. torch's fused attention adds over keys in vectors and in blocks that
    depend on the number of queries in a call, not on the size of its batch. So each query is an entry of the batch, and
    the number of keys is a multiple of KEY_BLOCK: masked keys behind a query's own add zeros at the end.
    """
    assert mask is not None
    slots, kv_heads, rows, width = q.shape
    group_size = rows // count
    out = torch.empty_like(q)
    if count <= slots:
        for first in range(0, rows, group_size):
            part = slice(first, first + group_size)
            out[:, :, part] = _fused(q[:, :, part], keys, values, mask[:, :, part], scoring)
        return out
    for slot in range(slots):
        queries = q[slot].view(kv_heads, count, group_size, width).transpose(0, 1)
        masks = mask[slot].view(count, 1, group_size, -1)
        k, v = (x[slot].expand(count, *x.shape[1:]) for x in (keys, values))
        out[slot] = _fused(queries, k, v, masks, scoring).transpose(0, 1).reshape(kv_heads, rows, width)
    return out


def _explicit(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention with soft-capped scores or sinks, a few queries at a time.

    q [slots, kv_heads, queries·group, head_dim], with the heads of a group next to each other.
    """
    rows = max(1, EXPLICIT_SCORES // keys.shape[2])
    sinks = None
    if scoring.sinks is not None:
        kv_heads, group_size = keys.shape[1], scoring.sinks.shape[0] // keys.shape[1]
        by_query = scoring.sinks.view(kv_heads, 1, group_size).expand(-1, q.shape[2] // group_size, -1)
        sinks = by_query.reshape(1, kv_heads, -1, 1)
    parts = []
    for first in range(0, q.shape[2], rows):
        part = slice(first, first + rows)
        scores = q[:, :, part] @ keys.transpose(2, 3) * (scoring.scale or q.shape[-1] ** -0.5)
        if scoring.softcap is not None:
            scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if mask is not None:
            scores += mask[:, :, part]
        if sinks is not None:
            sink = sinks[:, :, part].expand(scores.shape[0], -1, -1, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1, dtype=_softmax_dtype(q.dtype)).to(q.dtype)
        parts.append(weights[..., : keys.shape[2]] @ values)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


def _parted(
    spans: Sequence[Span], group_size: int, all_by_blocks: bool, reader: BlockReader | None
) -> Iterator[tuple[bool, Sequence[Span]]]:
    """Split the packed order into runs: (whether the reader computes it, its spans)."""
    if reader is None:
        yield from ((False, run) for run in _grouped(spans))
        return
    for short, run in groupby(spans, lambda span: all_by_blocks or reader.takes(span, group_size)):
        if short:
            yield True, list(run)
        else:
            yield from ((False, long) for long in _grouped(list(run)))


def _grouped(spans: Sequence[Span]) -> list[list[Span]]:
    """Split the packed order into runs, one call each. A span joins a run if its padding costs less than a call."""
    runs: list[list[Span]] = []
    count = end = needed = 0
    for span in spans:
        if runs and span.slot > runs[-1][-1].slot:
            run = runs[-1]
            joined_count, joined_end = max(count, span.size), max(end, span.end)
            joined_needed = needed + span.size * span.end
            padded = (span.slot - run[0].slot + 1) * joined_count * joined_end
            if padded <= GROUP_WASTE * joined_needed + SPAN_OVERHEAD * (len(run) + 1):
                run.append(span)
                count, end, needed = joined_count, joined_end, joined_needed
                continue
        runs.append([span])
        count, end, needed = span.size, span.end, span.size * span.end
    return runs


def _make_group(
    members: Sequence[Span],
    keys: int,
    rows: slice,
    positions: Tensor,
    last_visible: Tensor,
    group_size: int,
    dtype: torch.dtype,
    masked: bool,
) -> Group:
    """positions and last_visible [rows] are those of the group's queries: one tensor if no span has a tree."""
    first, slots = members[0].slot, members[-1].slot - members[0].slot + 1
    queries = max([s.size for s in members])
    first_position = min([s.start if s.parents is None else min(s.positions()) for s in members])
    trees = tuple([((s.slot - first) * queries, s) for s in members if s.parents is not None])
    gather = scatter = None
    by_query = [positions, last_visible] if trees else [positions]
    if positions.shape[0] < slots * queries:
        gather, scatter = _padded(members, slots, queries, positions.device)
        # Padding queries, and those of idle slots between the spans, see some key: a softmax over none would be NaN.
        by_query = [x.new_full((slots * queries,), first_position).index_copy_(0, scatter, x) for x in by_query]
    positions = by_query[0].view(slots, queries)
    last_visible = by_query[1].view(slots, queries) if trees else positions
    mask = None
    if masked or queries > 1 or trees or min([s.end for s in members]) < keys or gather is not None:
        mask = _additive_mask(last_visible, keys, group_size, dtype)
        _show_paths(mask, trees, group_size)
    return Group(
        first, slots, queries, keys, mask, last_visible, positions, first_position, trees, rows, gather, scatter
    )


def _slide(group: Group, window: int, group_size: int, dtype: torch.dtype) -> tuple[int, Tensor | None]:
    """(first key that a query of the group sees, mask [slots, 1, queries·group_size, keys from there on])."""
    first = max(0, group.first_position - window + 1)
    if group.mask is None:  # all queries are at one position
        return first, None
    last_visible, positions = group.last_visible - first, group.positions - first if group.trees else None
    mask = _additive_mask(last_visible, group.keys - first, group_size, dtype, window, positions)
    _show_paths(mask, group.trees, group_size, first, window)
    return first, mask


def _padded(members: Sequence[Span], slots: int, queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(gather, scatter) of a group that needs padding."""
    gather, packed = [0] * (slots * queries), 0
    scatter: list[int] = []
    for span in members:
        first = (span.slot - members[0].slot) * queries
        gather[first : first + span.size] = range(packed, packed + span.size)
        scatter.extend(range(first, first + span.size))
        packed += span.size
    return index_tensor(gather, device), index_tensor(scatter, device)


def _additive_mask(
    last_visible: Tensor,
    keys: int,
    group_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """last_visible [slots, queries] → [slots, 1, queries·group_size, keys]: 0 for the keys up to that one, −inf
    elsewhere. With a window: 0 only for the last `window` keys before each query's own, which is included.

    positions [slots, queries] of the queries; None: a query's own key is the last visible one.
    """
    numbers = torch.arange(keys, device=last_visible.device)
    last = last_visible.repeat_interleave(group_size, 1)[..., None]
    hidden = numbers > last
    if window is not None:
        own = last if positions is None else positions.repeat_interleave(group_size, 1)[..., None]
        hidden |= numbers <= own - window
    return torch.zeros(hidden.shape, dtype=dtype, device=last_visible.device).masked_fill_(hidden, -torch.inf)[:, None]


def _show_paths(
    mask: Tensor, trees: Sequence[tuple[int, Span]], group_size: int, first: int = 0, window: int | None = None
) -> None:
    """Let each node of the trees see its path, within the window. mask [slots, 1, queries·group_size, keys from `first`
    on]."""
    queries: list[int] = []
    keys: list[int] = []
    for row, span in trees:
        assert span.parents is not None
        fed = max(0, span.start - span.base)  # nodes that earlier passes have fed
        pairs = [pair for pair in seen_pairs(span.parents, window) if pair[0] >= fed]
        queries += [row + span.base - span.start + node for node, _ in pairs]
        keys += [span.base - first + seen for _, seen in pairs]
    if queries:
        index = index_tensor(queries + keys, mask.device).view(2, -1)
        mask.view(-1, group_size, mask.shape[-1])[index[0], :, index[1]] = 0
