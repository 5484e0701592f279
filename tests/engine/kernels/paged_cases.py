"""Random passes over the blocks of a paged cache, and what each of their rows must get, computed row by row."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.paged_rows import PagedRows, max_split_rows, path_bits
from engine.models.pass_attention import PLAIN, Scoring
from engine.models.spans import Span
from engine.trees import ROOT, Parents, seen_pairs

GARBAGE = (-1, -(2**31), 10**6, 2**31 - 1)  # block numbers where a sequence has no block


@dataclass(frozen=True, slots=True)
class Heads:
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Case:
    """A pass, its queries and the memory that it reads."""

    spans: tuple[Span, ...]
    queries: Tensor  # [N, heads, head_dim]
    pool: Tensor  # [blocks, block_size, 2·kv_heads, head_dim]
    rows: PagedRows

    def args(
        self, scoring: Scoring
    ) -> tuple[Tensor, Tensor, PagedRows, float, int | None, float | None, Tensor | None]:
        """Return the arguments of an implementation of paged attention."""
        scale = scoring.scale or self.queries.shape[-1] ** -0.5
        return self.queries, self.pool, self.rows, scale, scoring.window, scoring.softcap, scoring.sinks

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Case":
        """The case with every tensor changed."""
        values = ((field.name, getattr(self.rows, field.name)) for field in fields(self.rows))
        changed: dict[str, Any] = {name: change(value) for name, value in values if isinstance(value, Tensor)}
        return Case(self.spans, change(self.queries), change(self.pool), replace(self.rows, **changed))

    def to(self, device: torch.device) -> "Case":
        return self.mapped(lambda tensor: tensor.to(device))

    def double(self) -> "Case":
        return replace(self, queries=self.queries.double(), pool=self.pool.double())

    def alone(self, sequence: int, row: int) -> "Case":
        """One row of one sequence; the memory and the bounds on a sequence's rows stay."""
        rows, at = self.rows, int(self.rows.first_rows[sequence]) + row
        one, own = slice(at, at + 1), slice(sequence, sequence + 1)
        single = replace(
            rows,
            tables=rows.tables[own],
            first_rows=torch.tensor([0, 1], dtype=torch.int32),
            lengths=rows.lengths[own],
            owners=torch.zeros(1, dtype=torch.int32),
            positions=rows.positions[one],
            last_visible=rows.last_visible[one],
            paths=None if rows.paths is None else rows.paths[one],
            bases=None if rows.bases is None else rows.bases[own],
            max_keys=max(1, int(rows.lengths[sequence])),
        )
        return replace(self, queries=self.queries[one], rows=single)


def make_case(spans: Sequence[Span], heads: Heads, seed: int = 0, window: int | None = None) -> Case:
    """Memory in random order, with garbage block numbers behind the lengths; spans are in packed order."""
    generator = torch.Generator().manual_seed(seed)
    size = heads.block_size
    needed = [-(-s.end // size) for s in spans]
    blocks = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    width = max(needed, default=0) + 1
    table = [own + [GARBAGE[i % len(GARBAGE)] for i in range(width - len(own))] for own in tables]
    count, row = sum(s.size for s in spans), (2 * heads.kv_heads, heads.head_dim)
    pool = torch.randn(sum(needed) + 2, size, *row, generator=generator, dtype=torch.float64)
    queries = torch.randn(count, heads.kv_heads * heads.group, heads.head_dim, generator=generator, dtype=torch.float64)
    rows = make_rows(spans, torch.tensor(table, dtype=torch.int32).view(len(spans), width), window)
    return Case(tuple(spans), queries.to(heads.dtype), pool.to(heads.dtype), rows)


def make_rows(spans: Sequence[Span], tables: Tensor, window: int | None = None) -> PagedRows:
    trees = any(s.parents is not None for s in spans)
    owners = [number for number, s in enumerate(spans) for _ in range(s.size)]
    firsts = [sum(s.size for s in spans[:number]) for number in range(len(spans) + 1)]
    paths = [bits for s in spans for bits in span_bits(s, window)]
    return PagedRows(
        tables,
        torch.tensor(firsts, dtype=torch.int32),
        torch.tensor([s.end for s in spans], dtype=torch.int32),
        torch.tensor(owners, dtype=torch.int32),
        torch.tensor([p for s in spans for p in s.positions()], dtype=torch.int64),
        torch.tensor([p for s in spans for p in s.last_visible()], dtype=torch.int64),
        torch.tensor(paths, dtype=torch.int64) if trees else None,
        torch.tensor([s.base for s in spans], dtype=torch.int32) if trees else None,
        max((s.size for s in spans), default=0),
        max_split_rows(s.size for s in spans),
        max((s.end for s in spans), default=0),
    )


def span_bits(span: Span, window: int | None) -> list[int]:
    if span.parents is None:
        return [0] * span.size
    committed = max(0, span.base - span.start)
    return [0] * committed + path_bits(span.parents, window)[max(0, span.start - span.base) :]


def poisoned(case: Case) -> Tensor:
    """The pool with NaN wherever no sequence has a key."""
    pool = torch.full_like(case.pool, torch.nan)
    size = pool.shape[1]
    for table, length in zip(case.rows.tables.tolist(), case.rows.lengths.tolist(), strict=True):
        for place in range(length):
            at = table[place // size], place % size
            pool[at] = case.pool[at]
    return pool


def padded(case: Case) -> Case:
    """Seven more rows: two of an empty sequence, two of one without blocks, three of none with strange owners."""
    rows, s = case.rows, case.rows.lengths.shape[0]
    nothing, first = torch.full_like(rows.tables[:1], 10**9), rows.first_rows[-1:]
    owners = torch.tensor([s, s, s + 1, s + 1, 0, -1, 10**9], dtype=torch.int32)
    more = replace(
        rows,
        tables=torch.cat([rows.tables, nothing, nothing]),
        first_rows=torch.cat([rows.first_rows, first + 2, first + 4]),
        lengths=torch.cat([rows.lengths, torch.tensor([0, 9], dtype=torch.int32)]),
        owners=torch.cat([rows.owners, owners]),
        positions=torch.cat([rows.positions, torch.arange(7)]),
        last_visible=torch.cat([rows.last_visible, torch.arange(7)]),
        paths=None if rows.paths is None else torch.cat([rows.paths, torch.arange(7)]),
        bases=None if rows.bases is None else torch.cat([rows.bases, torch.zeros(2, dtype=torch.int32)]),
        max_rows=max(rows.max_rows, 2),
        split_rows=max(rows.split_rows, 2),
    )
    queries = torch.cat([case.queries, torch.ones_like(case.queries[:1]).repeat(7, 1, 1)])
    return replace(case, queries=queries, rows=more)


def visible(span: Span, window: int | None) -> list[list[int]]:
    """Per row of a span the places that it sees, by the definition of positions, trees and windows."""
    found = []
    for place, position in zip(range(span.start, span.end), span.positions(), strict=True):
        committed = [p for p in range(min(place + 1, span.base)) if window is None or p > position - window]
        if place >= span.base:
            assert span.parents is not None
            pairs = seen_pairs(span.parents, window)
            committed += [span.base + seen for node, seen in pairs if node == place - span.base]
        found.append(committed)
    return found


def by_hand(case: Case, scoring: Scoring = PLAIN) -> Tensor:
    """[N, heads·head_dim] in fp64: a softmax over the keys of each row, one after the other."""
    queries, pool = case.queries.double(), case.pool.double()
    (heads, head_dim), kv_heads = queries.shape[1:], pool.shape[2] // 2
    numbers = ((number, places) for number, s in enumerate(case.spans) for places in visible(s, scoring.window))
    results = []
    for query, (sequence, places) in zip(queries, numbers, strict=True):
        index = torch.tensor(places, dtype=torch.int64)
        blocks = case.rows.tables[sequence, index // pool.shape[1]].long()
        seen = pool[blocks, index % pool.shape[1]].repeat_interleave(heads // kv_heads, 1)  # [keys, 2·heads, head_dim]
        scores = torch.einsum("hd,khd->hk", query, seen[:, :heads]) * (scoring.scale or head_dim**-0.5)
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
        weights = scores.softmax(1)[:, : len(places)]
        results.append(torch.einsum("hk,khd->hd", weights, seen[:, heads:]).flatten())
    return torch.stack(results) if results else queries.new_zeros(0, heads * head_dim)


def random_spans(draw: random.Random, most: int, *, trees: bool = True) -> list[Span]:
    """Sequences of up to `most` places: empty ones, single rows, chains, trees after committed rows, and chunks."""
    spans = []
    for slot in range(draw.randint(1, 5)):
        start = draw.choice((0, draw.randint(0, most)))
        kind = draw.choice(("empty", "row", "chain", "chunk", "tree"))
        if kind == "tree" and trees:
            parents = random_tree(draw, 12)
            spans.append(Span.at(slot, start, draw.choice((0, 1, 1, 3)) + len(parents), parents))
        else:
            count = {"empty": 0, "row": 1, "chain": draw.randint(2, 6)}.get(kind, draw.randint(7, 40))
            spans.append(Span.at(slot, start if count else 0, count))
    return spans


def random_tree(draw: random.Random, most: int) -> Parents:
    return tuple(draw.randrange(ROOT, node) for node in range(draw.randint(1, most)))


def random_scoring(draw: random.Random, heads: int) -> Scoring:
    generator = torch.Generator().manual_seed(draw.randrange(1000))
    return Scoring(
        scale=draw.choice((None, 0.3)),
        window=draw.choice((None, 1, 3, 20)),
        softcap=draw.choice((None, 1.5)),
        sinks=draw.choice((None, torch.randn(heads, generator=generator, dtype=torch.float64))),
    )
