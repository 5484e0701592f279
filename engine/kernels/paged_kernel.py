"""The Triton kernels of paged attention: a row's keys are attended in parts, and a second kernel joins the parts.

A program of the first kernel computes some packed rows of one sequence, with one kv head, over one part of the keys. It
is launched for the sequences with few rows, whose keys are split, and for those with many, whose keys are one part. The
heads that share a kv head are further rows of its tile: packed row r is row r // GROUP, head r % GROUP. The places of a
sequence are dealt out to the parts in segments of SEGMENT places, in turn: place p belongs to part p // SEGMENT mod
parts. So which keys a part adds up, and in which order, depends on nothing but the row's own keys. Keys that a row does
not see add exact zeros. With the same tile a row has therefore the same bits alone as in the company of any other rows
and sequences.

Scores are in units of log2, because the hardware's exponential has base two. Parts are added up with explicit fma, so
that all callers round in the same way.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from engine.kernels.early_start import begin

SEGMENT = tl.constexpr(256)
LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-float("inf"))  # the score of a key that is not seen, and the greatest of no scores
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# What changes from pass to pass must not change which code is compiled.
NUMBERS = ["parts", "row_count", "block_count", "table_width", "table_stride", "sequences", "table_places"]
NUMBERS += ["fewest", "most"]
ROWS_OF = ["tables", "first_rows", "lengths", "owners", "positions", "last_visible", "paths", "bases"]


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF)
def attend_keys(
    queries: tl.tensor,
    pool: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    query_stride: tl.tensor,
    tables: tl.tensor,
    first_rows: tl.tensor,
    lengths: tl.tensor,
    positions: tl.tensor,
    last_visible: tl.tensor,
    paths: tl.tensor,
    bases: tl.tensor,
    row_count: tl.tensor,
    block_count: tl.tensor,
    table_width: tl.tensor,
    table_stride: tl.tensor,
    parts: tl.tensor,
    fewest: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (sequence and part, tile of packed rows, kv head). Of each sequence there are `most` rows of tops."""
    sequence, part = _begin(parts, EARLY)
    first, length = tl.load(first_rows + sequence), tl.minimum(tl.load(lengths + sequence), table_width * BLOCK_SIZE)
    rows = tl.minimum(tl.load(first_rows + sequence + 1), row_count) - first
    if _is_idle(rows, fewest, most, part, length, tops is not None, GROUP, ROWS):
        return
    packed = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live, row, head = packed < rows * GROUP, first + packed // GROUP, tl.program_id(2) * GROUP + packed % GROUP
    last, position, bits, base = _load_rows(row, live, sequence, positions, last_visible, paths, bases)
    at = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    query = _load_vectors(queries + row.to(tl.int64) * query_stride + head * HEAD_DIM, live, HEAD_DIM, WIDTH)
    low, high = _tiles(last, position, length, part, parts, KEYS, WINDOW, paths is not None)
    sums, total, top = _nothing(ROWS, WIDTH)
    for tile in range(low, high):
        place = _first_place(tile, part, parts, KEYS) + tl.arange(0, KEYS)
        inside, offset = _locate(place, length, tables + sequence * table_stride, block_count, BLOCK_SIZE)
        keys = pool + offset * (2 * KV_HEADS * HEAD_DIM) + tl.program_id(2) * HEAD_DIM
        seen = inside[None, :] & _sees(place, last, position, bits, base, WINDOW, paths is not None)
        scores = tl.where(seen, _rate(query, _load_keys(keys, inside, HEAD_DIM, WIDTH), scale, SOFTCAP), NONE)
        values = _load_vectors(keys + KV_HEADS * HEAD_DIM, inside, HEAD_DIM, WIDTH)
        sums, total, top = _continue(sums, total, top, scores, values)
    if tops is None:
        _store(out + at * HEAD_DIM, _finish(sums, total, top, head, live, sinks), live, HEAD_DIM, WIDTH)
    else:
        at += (sequence.to(tl.int64) * most - first) * (KV_HEADS * GROUP)
        _store_part(out, tops, totals, at * parts + part, sums, total, top, live, HEAD_DIM, WIDTH)


@triton.jit
def _begin(parts: tl.tensor, EARLY: tl.constexpr) -> tl.tensor:
    """(the program's sequence, its part), when the kernel in front has ended."""
    begin(EARLY)
    return tl.program_id(0) // parts, tl.program_id(0) % parts


@triton.jit
def _is_idle(
    rows: tl.tensor,
    fewest: tl.tensor,
    most: tl.tensor,
    part: tl.tensor,
    length: tl.tensor,
    HAS_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Whether the program has no rows of its launch, or no keys."""
    unused = (part * SEGMENT >= length) & HAS_PARTS
    return (rows < fewest) | (rows > most) | (tl.program_id(1) * ROWS >= rows * GROUP) | unused


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """(sums, total, top) over no keys: see _continue()."""
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32), tl.full([ROWS], NONE, tl.float32)


@triton.jit
def _store_part(
    out: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    at: tl.tensor,
    sums: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    live: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Keep what one part of the keys gives, for join_parts()."""
    tl.store(tops + at, top, mask=live)
    tl.store(totals + at, total, mask=live)
    _store(out + at * HEAD_DIM, sums, live & (top != NONE), HEAD_DIM, WIDTH)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS_OF)
def join_parts(
    sums: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    owners: tl.tensor,
    first_rows: tl.tensor,
    lengths: tl.tensor,
    sequences: tl.tensor,
    table_places: tl.tensor,
    parts: tl.tensor,
    most: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (row, head): add up its parts, one after the other, so that their number does not change the bits. A row
    of a sequence with more than `most` rows has no parts and is left as it is."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin(EARLY)
    owner = tl.load(owners + row)
    known = (owner >= 0) & (owner < sequences)
    owner = tl.where(known, owner, 0)
    first, end = tl.load(first_rows + owner), tl.load(first_rows + owner + 1)
    known &= (first <= row) & (row < end)
    if known & (end - first > most):
        return
    length = tl.minimum(tl.load(lengths + owner), table_places)
    used = tl.where(known, tl.minimum(tl.cdiv(length, SEGMENT), parts), 0)
    at = row.to(tl.int64) * tl.num_programs(1) + head
    source_row = (owner.to(tl.int64) * most + tl.where(known, row - first, 0)) * tl.num_programs(1) + head
    one, part = tl.arange(0, 1), tl.arange(0, ROOM)[None, :]
    top = tl.max(tl.load(tops + source_row * parts + part, mask=part < used, other=NONE), 1)
    top, total = _with_sink(top, head + one, known, sinks)
    result = tl.zeros([1, WIDTH], tl.float32)
    for i in range(used):
        source = source_row * parts + i + one
        part_top = tl.load(tops + source)
        more = _load_vectors(sums + source * HEAD_DIM, part_top != NONE, HEAD_DIM, WIDTH)
        result, total = _add(result, total, part_top, top, more, tl.load(totals + source))
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    _store(out + at * HEAD_DIM + one, result, one == 0, HEAD_DIM, WIDTH)


@triton.jit
def _operand(x: tl.tensor) -> tl.tensor:
    """Make x fit for a matrix product. The interpreter would multiply the bit patterns of bf16 numbers."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def _load_rows(
    row: tl.tensor,
    live: tl.tensor,
    sequence: tl.tensor,
    positions: tl.tensor,
    last_visible: tl.tensor,
    paths: tl.tensor,
    bases: tl.tensor,
) -> tl.tensor:
    """(last visible place, position, bits of the path, place of bit 0); a row that is not live sees nothing."""
    last = tl.load(last_visible + row, mask=live, other=-1).to(tl.int32)
    position = tl.load(positions + row, mask=live, other=2147483647).to(tl.int32)
    bits, base = position, sequence  # nobody reads these without trees; Triton 3.6 cannot return None
    if paths is not None:
        bits, base = tl.load(paths + row, mask=live, other=0), tl.load(bases + sequence)
    return last, position, bits, base


@triton.jit
def _tiles(
    last: tl.tensor,
    position: tl.tensor,
    length: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_PATHS: tl.constexpr,
) -> tl.tensor:
    """The range of the part's tiles that hold any place that a row sees."""
    begin, end = 0, length
    if WINDOW > 0:
        begin = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0)
    if not HAS_PATHS:
        end = tl.minimum(tl.max(last, 0) + 1, length)
    return _tile_number(begin, part, parts, KEYS), _tile_number(end + KEYS - 1, part, parts, KEYS)


@triton.jit
def _tile_number(place: tl.tensor, part: tl.tensor, parts: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """How many whole tiles of the part lie before a place."""
    turn = place // (parts * SEGMENT)
    own = place - (turn * parts + part) * SEGMENT
    return turn * (SEGMENT // KEYS) + tl.minimum(tl.maximum(own, 0), SEGMENT) // KEYS


@triton.jit
def _first_place(tile: tl.tensor, part: tl.tensor, parts: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    per_segment: tl.constexpr = SEGMENT // KEYS
    turn = tile // per_segment
    return (turn * parts + part) * SEGMENT + (tile - turn * per_segment) * KEYS


@triton.jit
def _locate(
    place: tl.tensor, length: tl.tensor, table: tl.tensor, block_count: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """(which places have a block, int64 numbers of their rows in the pool)."""
    inside = place < length
    block = tl.load(table + place // BLOCK_SIZE, mask=inside, other=-1)
    inside &= (block >= 0) & (block < block_count)
    return inside, block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE


@triton.jit
def _load_keys(source: tl.tensor, inside: tl.tensor, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """[WIDTH, keys]"""
    d = tl.arange(0, WIDTH)
    kept = inside[None, :] & (d < HEAD_DIM)[:, None]
    return _operand(tl.load(source[None, :] + d[:, None], mask=kept, other=0.0))


@triton.jit
def _load_vectors(source: tl.tensor, inside: tl.tensor, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """A vector of HEAD_DIM numbers from each source that is inside: [sources, WIDTH], with zeros elsewhere."""
    d = tl.arange(0, WIDTH)
    kept = inside[:, None] & (d < HEAD_DIM)[None, :]
    return _operand(tl.load(source[:, None] + d[None, :], mask=kept, other=0.0))


@triton.jit
def _store(
    target: tl.tensor, vectors: tl.tensor, inside: tl.tensor, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    d = tl.arange(0, WIDTH)
    kept = inside[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(target[:, None] + d[None, :], vectors.to(target.dtype.element_ty), mask=kept)


@triton.jit
def _sees(
    place: tl.tensor,
    last: tl.tensor,
    position: tl.tensor,
    bits: tl.tensor,
    base: tl.tensor,
    WINDOW: tl.constexpr,
    HAS_PATHS: tl.constexpr,
) -> tl.tensor:
    """[rows, keys]: whether a row sees a place."""
    seen = place[None, :] <= last[:, None]
    if WINDOW > 0:
        seen &= place[None, :] > (position - WINDOW)[:, None]
    if HAS_PATHS:
        bit = place - base
        node = (bit >= 0) & (bit < 63)
        on_path = (bits[:, None] >> tl.where(node, bit, 0).to(tl.int64)[None, :]) & 1
        seen |= node[None, :] & (on_path == 1)
    return seen


@triton.jit
def _rate(queries: tl.tensor, keys: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores in units of log2, [rows, keys]. Without a soft cap, `scale` brings them into that unit."""
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    if SOFTCAP > 0:  # tanh x = sign x · (1 − e) / (1 + e) with e = exp(−2·|x|), which cannot overflow
        e = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / SOFTCAP))
        size = (1.0 - e) / (1.0 + e) * (SOFTCAP * LOG2_E)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def _continue(sums: tl.tensor, total: tl.tensor, top: tl.tensor, scores: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Add a tile of values [keys, WIDTH] with these scores to sums that are relative to `top`."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    zero = tl.where(new_top == NONE, 0.0, new_top)
    weights = tl.exp2(scores - zero[:, None])
    kept = tl.exp2(top - zero)
    sums = tl.dot(weights.to(values.dtype), values, sums * kept[:, None], input_precision="ieee")
    return sums, total * kept + tl.sum(weights, 1), new_top


@triton.jit
def _with_sink(top: tl.tensor, head: tl.tensor, live: tl.tensor, sinks: tl.tensor) -> tl.tensor:
    """(the greatest of the scores and the head's sink, the sink's weight relative to it)."""
    weight = tl.zeros_like(top)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        weight = tl.exp2(sink - top)
    return top, weight


@triton.jit
def _add(
    sums: tl.tensor, total: tl.tensor, top: tl.tensor, new_top: tl.tensor, more: tl.tensor, more_total: tl.tensor
) -> tl.tensor:
    """Add `more` sums, relative to `top`, to sums that are relative to new_top."""
    weight = tl.exp2(top - tl.where(new_top == NONE, 0.0, new_top))
    sums = tl.fma(more, tl.broadcast_to(weight[:, None], more.shape), sums)
    return sums, tl.fma(more_total, weight, total)


@triton.jit
def _finish(
    sums: tl.tensor, total: tl.tensor, top: tl.tensor, head: tl.tensor, live: tl.tensor, sinks: tl.tensor
) -> tl.tensor:
    """What `join_parts` makes of a single part."""
    new_top, sink_weight = _with_sink(top, head, live, sinks)
    sums, total = _add(tl.zeros_like(sums), sink_weight, top, new_top, sums, total)
    return sums / tl.where(total == 0, 1.0, total)[:, None]
