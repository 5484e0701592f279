"""Attention of packed, ragged queries over a KV cache's memory.

A span is one sequence's tokens in a pass: a prefill chunk, one token, or 1 + k verification tokens. Short spans in
neighbouring slots are computed by one batched call over a view of those slots, other spans alone. Only the attention of
such a group is padded, never a matrix product. The storage decides whether K and V are copied for it.

A layer with a sliding window reads the last keys of that view only; the mask hides what lies before a query's window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.storage import Storage

GROUP_WASTE = 3  # a group may compute at most this many times the attention scores that its spans need
SPAN_OVERHEAD = 1500  # attention scores that cost about as much as one more call
EXPLICIT_SCORES = 1 << 22  # scores of one head that are held at once where torch's fused attention cannot be used


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive tokens of one sequence, at positions start … end − 1 of its slot."""

    slot: int
    start: int
    count: int
    end: int

    @classmethod
    def at(cls, slot: int, start: int, count: int) -> "Span":
        return cls(slot, start, count, start + count)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the queries of a layer score keys."""

    scale: float | None = None  # None: 1 / √head_dim
    window: int | None = None  # a query sees so many keys, its own included; None: all up to its own
    softcap: float | None = None  # a score s becomes softcap · tanh(s / softcap)
    sinks: Tensor | None = None  # [heads]: one more score for each head, whose value is zero


PLAIN = Scoring()


@dataclass(frozen=True, slots=True)
class Group:
    """Spans computed by one attention call over slots [first_slot, first_slot + slots)."""

    first_slot: int
    slots: int
    queries: int  # queries per slot, padding included
    keys: int  # keys per slot, padding included
    mask: Tensor | None  # additive [slots, 1, queries·group, keys], for no window; None: every query sees every key
    last_visible: Tensor  # [slots, queries] int64: each query's own key
    first_position: int  # the smallest position of a query
    rows: slice  # the group's rows of the packed input
    gather: Tensor | None  # [slots·queries] packed row of each padded query; None: rows are already in that order
    scatter: Tensor | None  # [rows] padded index of each packed row


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The position of each packed token and how spans are grouped; made once per pass for all layers."""

    positions: Tensor  # [N] int64
    cache_rows: Tensor  # [N] int64: the storage's row of that position
    first_row: int | None  # where the rows are those from this one on, in order; None: they are not
    groups: tuple[Group, ...]


def plan_attention(
    spans: Sequence[Span],
    storage: Storage,
    *,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Plan a pass. Spans are in packed order, one per slot; short spans should be sorted by slot."""
    index: list[int] = []  # positions, then cache rows: one transfer for both
    for s in spans:
        index += range(s.start, s.end)
    for s in spans:
        index += storage.row_numbers(s.slot, s.start, s.end)
    positions, cache_rows = torch.tensor(index, device=device).view(2, -1).unbind(0)
    rows_used = index[len(index) // 2 :]
    in_order = len(spans) == 1 and rows_used == list(range(rows_used[0], rows_used[0] + len(rows_used)))
    groups, row = [], 0
    for members in _grouped(spans):
        rows = slice(row, row + sum(s.count for s in members))
        groups.append(_make_group(members, rows, positions[rows], num_heads // num_kv_heads, dtype))
        row = rows.stop
    return AttentionPlan(positions, cache_rows, rows_used[0] if in_order else None, tuple(groups))


class Attention:
    """The attention of one pass. The views of the cache's memory and the masks are made once, not once per layer."""

    def __init__(self, plan: AttentionPlan, storage: Storage) -> None:
        self.plan = plan
        self._rows = storage.rows
        # A copy into a view costs half of a copy by row numbers.
        self._run = None if plan.first_row is None else storage.run(plan.first_row, plan.cache_rows.shape[0])
        self._views = [storage.view(g.first_slot, g.slots, g.keys) for g in plan.groups]
        self._slid: dict[tuple[int, int], tuple[int, Tensor | None]] = {}  # (group, window) → (first key, mask)

    def __call__(self, layer: int, queries: Tensor, kv: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Store kv [N, 2·kv_heads, head_dim], then attend with queries [N, heads, head_dim] → [N, heads·head_dim].

        Queries and keys must be rotated already.
        """
        if self._run is None:
            self._rows[layer].index_copy_(0, self.plan.cache_rows, kv)
        else:
            self._run[layer].copy_(kv)
        if len(self._views) == 1:
            return self._attend(0, layer, queries, scoring)
        groups = enumerate(self.plan.groups)
        return torch.cat([self._attend(number, layer, queries[group.rows], scoring) for number, group in groups])

    def _attend(self, number: int, layer: int, queries: Tensor, scoring: Scoring) -> Tensor:
        group = self.plan.groups[number]
        keys, values = self._views[number][layer]
        mask, window = group.mask, scoring.window
        if window is not None and window < group.keys:
            if (number, window) not in self._slid:
                self._slid[number, window] = _slide(group, window, queries.shape[1] // keys.shape[1], queries.dtype)
            first, mask = self._slid[number, window]
            keys, values = keys[:, :, first:], values[:, :, first:]
        return _attend_group(queries, keys, values, mask, group, scoring)


def _attend_group(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, group: Group, scoring: Scoring
) -> Tensor:
    if group.gather is not None:
        queries = queries[group.gather]
    slots, count, heads, head_dim = group.slots, group.queries, queries.shape[-2], queries.shape[-1]
    kv_heads = keys.shape[1]
    group_size = heads // kv_heads
    attend = _fused if scoring.softcap is None and scoring.sinks is None else _explicit
    # Heads that share k and v become further queries, so grouped-query attention does not repeat K and V.
    stacked = (slots, kv_heads, count * group_size, head_dim)
    if count == 1 or kv_heads == 1:  # the packed order is the right one
        out = attend(queries.reshape(stacked), keys, values, mask, scoring)
    else:
        q = queries.reshape(slots, count, kv_heads, group_size, head_dim).transpose(1, 2).reshape(stacked)
        out = attend(q, keys, values, mask, scoring)
        out = out.view(slots, kv_heads, count, group_size, head_dim).transpose(1, 2)
    out = out.reshape(slots * count, heads * head_dim)
    return out if group.scatter is None else out[group.scatter]


def _fused(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scoring.scale)


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


def _grouped(spans: Sequence[Span]) -> list[list[Span]]:
    """Split the packed order into runs, one call each. A span joins a run if its padding costs less than a call."""
    runs: list[list[Span]] = []
    count = end = needed = 0
    for span in spans:
        if runs and span.slot > runs[-1][-1].slot:
            run = runs[-1]
            joined_count, joined_end = max(count, span.count), max(end, span.end)
            joined_needed = needed + span.count * span.end
            padded = (span.slot - run[0].slot + 1) * joined_count * joined_end
            if padded <= GROUP_WASTE * joined_needed + SPAN_OVERHEAD * (len(run) + 1):
                run.append(span)
                count, end, needed = joined_count, joined_end, joined_needed
                continue
        runs.append([span])
        count, end, needed = span.count, span.end, span.count * span.end
    return runs


def _make_group(members: Sequence[Span], rows: slice, positions: Tensor, group_size: int, dtype: torch.dtype) -> Group:
    """positions [rows]: the positions of the group's queries. A query sees the keys up to its own position."""
    first, slots = members[0].slot, members[-1].slot - members[0].slot + 1
    queries, keys = max(s.count for s in members), max(s.end for s in members)
    if positions.shape[0] < slots * queries:
        last_visible, gather, scatter = _padded(members, slots, queries, positions.device)
    else:
        last_visible, gather, scatter = positions.view(slots, queries), None, None
    mask = None
    if queries > 1 or any(s.end < keys for s in members) or gather is not None:
        mask = _additive_mask(last_visible, keys, group_size, dtype)
    first_position = min(s.start for s in members)
    return Group(first, slots, queries, keys, mask, last_visible, first_position, rows, gather, scatter)


def _slide(group: Group, window: int, group_size: int, dtype: torch.dtype) -> tuple[int, Tensor | None]:
    """(first key that a query of the group sees, mask [slots, 1, queries·group_size, keys from there on])."""
    first = max(0, group.first_position - window + 1)
    if group.mask is None:  # all queries are at one position
        return first, None
    # Padding queries, whose own key is 0, see the first key that is read.
    last_visible = group.last_visible.clamp(min=first) - first
    return first, _additive_mask(last_visible, group.keys - first, group_size, dtype, window)


def _padded(members: Sequence[Span], slots: int, queries: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(last visible key [slots, queries], gather, scatter) of a group that needs padding.

    Padding queries, and those of idle slots between the spans, see key 0: a softmax over no key would be NaN.
    """
    visible, gather, packed = [0] * (slots * queries), [0] * (slots * queries), 0
    scatter: list[int] = []
    for span in members:
        first = (span.slot - members[0].slot) * queries
        visible[first : first + span.count] = range(span.start, span.end)
        gather[first : first + span.count] = range(packed, packed + span.count)
        scatter.extend(range(first, first + span.count))
        packed += span.count
    last_visible = torch.tensor(visible, device=device).view(slots, queries)
    return last_visible, torch.tensor(gather, device=device), torch.tensor(scatter, device=device)


def _additive_mask(
    last_visible: Tensor, keys: int, group_size: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """last_visible [slots, queries] → [slots, 1, queries·group_size, keys]: 0 for the last `window` keys up to that
    one, −inf elsewhere."""
    numbers = torch.arange(keys, device=last_visible.device)
    last = last_visible.repeat_interleave(group_size, 1)[..., None]
    hidden = numbers > last
    if window is not None:
        hidden |= numbers <= last - window
    return torch.zeros(hidden.shape, dtype=dtype, device=last_visible.device).masked_fill_(hidden, -torch.inf)[:, None]
