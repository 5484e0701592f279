"""Attention over blocks of KV memory on a CPU, compiled by Numba for the CPU that it runs on.

torch's fused attention multiplies matrices. With one to some dozen queries per sequence it reads memory at a sixth of
its speed, and bfloat16 slower still (docs/log.md has the figures). Here each key is read once, where it lies, for all
queries that share it. The softmax is kept online (Milakov and Gimelshein 2018, arXiv 1805.02867): keys come in tiles,
and a sum made so far is scaled when a larger score comes.

cpu_code.py tells how numbers of 16 bits arrive. Sums are fp32, or fp64 for fp64 memory.
"""

import math
from typing import Any

import numpy as np

from engine.kernels.cpu_code import KEYS, LANES
from engine.kernels.cpu_compile import compiled, inlined
from engine.kernels.cpu_exponentials import NOTHING, weigh
from engine.kernels.cpu_vectors import BLOCK, add_rows, prefetch, score_block, score_keys, store_row

TILE = 64  # keys, in whole blocks and vectors: with fewer the work that each tile brings would count
SHARING = 6  # queries of a position that share a key, from which on whole blocks of queries are scored: a row by itself
# fills too little of a block otherwise. It is the same for all rows of a model, since both ways round differently
READING = 8  # scores that take as long as reading a key and its value


@compiled
def score(queries: Any, sizes: tuple[int, int, int], tile: Any, head: int, wide: Any, scores: Any) -> None:
    """scores[lane, i] = query `lane` · key i.

    sizes: (number of keys, of lanes, of lanes per row). Scores of further keys and lanes, up to whole blocks, mean
    nothing. queries [whole blocks, head_dim], or from SHARING lanes per row on turned, [head_dim, whole blocks]. tile:
    (rows, the numbers of its keys' rows for head 0, those of the next tile). wide [TILE, head_dim]: room for the keys
    as the queries' numbers.
    """
    (count, lanes, group), (rows, numbers, behind) = sizes, tile
    if group >= SHARING:
        for i in range(count):
            prefetch(rows, behind[0, i] + head)
            store_row(rows, numbers[0, i] + head, 0, wide, i)
        for lane in range(0, lanes, BLOCK):
            for i in range(0, count, BLOCK):
                score_block(queries, lane, wide, i, scores)
        return
    passes = (lanes + LANES - 1) // LANES
    for i in range(0, count, KEYS):
        for n in range(i, i + KEYS):
            prefetch(rows, behind[0, n] + head)
        for n in range(passes):
            lane = lanes * n // passes
            score_keys(queries, lane, lanes * (n + 1) // passes - lane, rows, numbers, i, head, scores)


@compiled
def sees(key: int, first: int, last: int, path: int, base: int) -> bool:
    """Whether a row sees a place: up to its last one, within its window, or as a node of its path."""
    if first <= key <= last:
        return True
    node = key - base
    return 0 <= node < 63 and (path >> node) & 1 == 1


@compiled
def soften(
    scores: Any, lane: int, start: int, count: int, row: tuple[int, int, int, int], cap: float, top: float
) -> Any:
    """Turn a lane's scores of the places from `start` on into weights, 0 for what the row does not see.

    row: (first, last, path, base) as `sees` has them. Returns (the largest score so far, the weights' sum).
    """
    first, last, path, base = row
    begin, end = max(first - start, 0), min(last + 1 - start, count)
    if cap > 0:
        for i in range(count):
            scores[lane, i] = cap * math.tanh(scores[lane, i] / cap)
    if path != 0 and start + count > base:
        begin, end = 0, count
        for i in range(count):
            if not sees(start + i, first, last, path, base):
                scores[lane, i] = NOTHING
    return weigh(scores, lane, begin, end, top)


@inlined
def whole_blocks(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


@inlined
def end_of_tile(start: int, high: int) -> int:
    """Where the tile of place `start` ends, of a sequence that ends at `high`."""
    return min(start - start % TILE + TILE, high)


@compiled
def find_rows(table: Any, size: int, start: int, end: int, step: int, numbers: Any) -> None:
    """The numbers of the rows that hold places start … end − 1, each place being `step` rows. The last one fills the
    rest of numbers [1, TILE], as keys come in groups."""
    count = end - start
    block, offset = start // size, start % size
    for i in range(count):
        numbers[0, i] = (table[block] * size + offset) * step
        offset += 1
        if offset == size:
            block, offset = block + 1, 0
    for i in range(count, TILE):
        numbers[0, i] = numbers[0, count - 1]


@compiled
def attend_tile(
    tile: Any, start: int, sizes: Any, head: tuple[int, int], rows: Any, cap: float, lanes: Any, room: Any
) -> None:
    """Attend with all lanes of one kv head to the keys of a tile, from place `start` on.

    sizes: as in `score`. rows: (firsts, lasts, paths, base), as `attend` has
    them. lanes: (queries, sums [lanes, head_dim], tops, totals [lanes]). room: (the keys wide, scores [whole blocks,
    TILE]), as `score` has them.
    """
    count, most, group = sizes
    firsts, lasts, paths, base = rows
    (queries, sums, tops, totals), (wide, scores) = lanes, room
    score(queries, sizes, tile, head[0], wide, scores)
    for lane in range(most):
        r = lane // group
        top, total = soften(scores, lane, start, count, (firsts[r], lasts[r], paths[r], base), cap, tops[lane])
        if top > tops[lane]:
            factor = queries.dtype.type(math.exp(tops[lane] - top))
            totals[lane] *= factor
            tops[lane] = top
            for x in range(sums.shape[1]):
                sums[lane, x] *= factor
        totals[lane] += total
    flat, numbers, behind = tile  # a value's row is as far behind its key's as there are kv heads
    add_rows(scores, most, flat, (numbers, behind), head[0] + head[1], count, sums)


@inlined
def attend_heads(
    pool: Any,
    table: Any,
    bounds: tuple[int, int],
    heads: tuple[int, int],
    group: int,
    rows: Any,
    cap: float,
    lanes: Any,
    following: tuple[Any, int, int],
) -> None:
    """Attend with the lanes of one sequence to places bounds[0] … bounds[1] − 1, for kv heads heads[0] … heads[1] − 1.

    lanes: as in `attend_tile`, for each head. group, rows, cap: as there. following: (table, bounds) of the sequence
    that comes next. The last tile asks for as many keys of its first one: most of a short sequence is in that.
    """
    queries, sums, tops, totals = lanes
    size, step = pool.shape[1], pool.shape[2]
    most = len(rows[0]) * group
    room = np.empty((TILE, pool.shape[3]), queries.dtype), np.empty((whole_blocks(most), TILE), queries.dtype)
    flat = pool.reshape(pool.shape[0] * size * step, pool.shape[3])
    numbers, behind = np.empty((1, TILE), np.intp), np.empty((1, TILE), np.intp)
    start, high = bounds
    stop = end_of_tile(start, high)
    find_rows(table, size, start, stop, step, numbers)
    while start < high:
        after = min(stop + TILE, high)
        if after > stop:
            find_rows(table, size, stop, after, step, behind)
        else:
            find_rows(following[0], size, following[1], end_of_tile(following[1], following[2]), step, behind)
        for n in range(heads[1] - heads[0]):
            of_head = (queries[n], sums[n], tops[n], totals[n])
            sizes, head = (stop - start, most, group), (heads[0] + n, step // 2)
            attend_tile((flat, numbers, behind), start, sizes, head, rows, cap, of_head, room)
        numbers, behind = behind, numbers
        start, stop = stop, after


@inlined
def work_of(keys: int, lanes: int) -> int:
    """What a kv head's keys cost, in scores. To read a key costs as much as to compute some."""
    return keys * (lanes + READING)


@inlined
def heads_of_part(before: int, cost: int, kv_heads: int, begin: int, end: int) -> tuple[int, int]:
    """The kv heads of a sequence whose work begins at begin … end − 1. The first begins at `before`."""
    first = min(max(-(-(begin - before) // cost), 0), kv_heads)
    return first, min(max(-(-(end - before) // cost), 0), kv_heads)


@compiled
def finish(sums: Any, top: Any, total: Any, sink: Any, out: Any) -> None:
    """out = sums / total, with one more score `sink` that has no value; NOTHING: there is none."""
    factor = sums.dtype.type(1)
    if sink > top:
        factor, total, top = sums.dtype.type(math.exp(top - sink)), total * math.exp(top - sink), sink
    if sink > NOTHING:
        total += math.exp(sink - top)
    factor = sums.dtype.type(factor / total)
    for x in range(sums.size):
        out[x] = sums[x] * factor


@compiled
def attend(
    queries: Any,
    pool: Any,
    tables: Any,
    first_rows: Any,
    rows: Any,
    scale: float,
    cap: float,
    sinks: Any,
    out: Any,
    part: int,
    parts: int,
) -> None:
    """queries [N, heads, head_dim] → out of the same shape: one part of the work, which `parts` calls do together.

    pool [blocks, block_size, 2·kv_heads, head_dim], with integers for numbers of 16 bits; queries and out are fp32
    then. tables [S, width], first_rows [S + 1]. rows: (firsts, lasts, paths [N], bases, ends [S]) int64: row n sees
    places firsts[n] … lasts[n], and base + j for the bits j of paths[n]; all lie before its sequence's end. Each
    sequence has a row. cap: of the scores; 0: none. sinks [heads], or [0] for none.
    """
    firsts, lasts, paths, bases, ends = rows
    width, kv_heads = queries.shape[2], pool.shape[2] // 2
    group, number = queries.shape[1] // kv_heads, queries.dtype.type
    lows = ends.copy()  # the first place that some row of each sequence sees
    most, whole, before = 0, 0, 0
    for s in range(len(ends)):
        begin, end = first_rows[s], first_rows[s + 1]
        for n in range(begin, end):
            lows[s] = min(lows[s], firsts[n])
        most = max(most, (end - begin) * group)
        whole += work_of(ends[s] - lows[s], (end - begin) * group) * kv_heads
    turned, places = group >= SHARING, whole_blocks(most)
    q = np.zeros((kv_heads, width if turned else places, places if turned else width), queries.dtype)
    sums = np.empty((kv_heads, most, width), queries.dtype)
    tops, totals = np.empty((kv_heads, most), queries.dtype), np.empty((kv_heads, most), queries.dtype)
    for s in range(len(ends)):
        cost = work_of(ends[s] - lows[s], (first_rows[s + 1] - first_rows[s]) * group)
        first, last = heads_of_part(before, cost, kv_heads, whole * part // parts, whole * (part + 1) // parts)
        before += cost * kv_heads
        begin, count = first_rows[s], (first_rows[s + 1] - first_rows[s]) * group
        if first == last:
            continue
        for n in range(last - first):
            for lane in range(count):
                query = queries[begin + lane // group, (first + n) * group + lane % group]
                tops[n, lane], totals[n, lane] = NOTHING, number(0)
                for x in range(width):
                    i, j = (x, lane) if turned else (lane, x)
                    q[n, i, j], sums[n, lane, x] = query[x] * number(scale), number(0)
        of = slice(begin, first_rows[s + 1])
        seen = (firsts[of], lasts[of], paths[of], bases[s])
        bounds, heads = (lows[s], ends[s]), (first, last)
        goes_on = s + 1 < len(ends) and before < whole * (part + 1) // parts
        following = (tables[s + 1], lows[s + 1], ends[s + 1]) if goes_on else (tables[s], ends[s] - 1, ends[s])
        attend_heads(pool, tables[s], bounds, heads, group, seen, cap, (q, sums, tops, totals), following)
        for n in range(last - first):
            for lane in range(count):
                head = (first + n) * group + lane % group
                sink = sinks[head] if len(sinks) else number(NOTHING)
                finish(sums[n, lane], tops[n, lane], totals[n, lane], sink, out[begin + lane // group, head])
