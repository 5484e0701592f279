"""Chains of drafts on a CPU, compiled by Numba for the CPU that it runs on: the pass that reads the gaps, all steps of
a draft model and all draws in one call.

A step of a small draft model is some 300 µs of arithmetic. To plan it, to call its operations and to draw from its
logits one by one takes twice as long, because the weights that pass in between drive Python out of the caches.

Rows of a step are sequences, the longest chain first, so that those which still draft are the first ones. Rows of the
gaps are tokens, in the order of the pass.
"""

from typing import Any

import numpy as np

from engine.kernels.cpu_compile import compiled_exactly
from engine.kernels.cpu_layers import STAGES, add_layers, join, normalise, product
from engine.kernels.cpu_meeting import meet
from engine.kernels.cpu_products import bounds
from engine.kernels.cpu_race import LARGEST_SCORE, LEAST_TEMPERATURE, NUMBERS, run
from engine.kernels.cpu_reductions import largest
from engine.kernels.cpu_vectors import store_row

MEETINGS = 3  # of the threads in a step, beside those of its layers
NO_TOKEN = -1  # as in engine/drafters/base.py


@compiled_exactly
def winner(scores: Any, row: int, key: Any, temperature: float, room: Any) -> int:
    """The token of scores fp32 [n, vocab] that wins the race with this key, or at temperature 0 has the largest score.
    Noise is in fp32 here, so another token may win where two are as good as equal.

    room: (sums fp32, vectors int64 [1, ≥ vocab]).
    """
    sums, vectors = room
    if temperature >= LEAST_TEMPERATURE:
        lowest = np.float32(-np.inf)
        top, best, count = run(scores, row, key, np.float32(temperature), lowest, sums, vectors)
        if abs(best) <= LARGEST_SCORE * temperature:
            whole = scores.shape[1] // NUMBERS * NUMBERS
            for first in vectors[0, :count]:
                for token in range(first, first + (NUMBERS if first < whole else 1)):
                    if sums[0, token] == top:
                        return token
    best = largest(scores, row)
    for token in range(scores.shape[1]):
        if scores[row, token] == best:
            return token
    return 0  # what is not a number has no largest


@compiled_exactly
def begin(tokens: Any, entry: Any, states: Any, x: Any, added: Any, inputs: Any) -> None:
    """What enters the layers of a pass that reads tokens [n]: x + added [n, hidden], and inputs [n, 2 · hidden] of a
    head's first product.

    entry: (embedding [vocab, hidden], its factor, norms of embedding and states, whether it is a head, whether the
    normed states enter). states [n, hidden]: what a head reads beside the tokens, the target's states or its own
    outputs of the step before.
    """
    embedding, factor, token_norm, state_norm, is_head, enters_normed = entry
    number, width = x.dtype.type, x.shape[1]
    for row in range(len(tokens)):
        store_row(embedding, max(tokens[row], 0), 0, x, row)
        for i in range(width):
            x[row, i] *= number(factor)
            added[row, i] = number(0)
    if not is_head:
        return
    normalise(x, token_norm, x)
    for row in range(len(tokens)):
        for i in range(width):
            inputs[row, i] = x[row, i]
    normalise(states, state_norm, x)
    for row in range(len(tokens)):
        for i in range(width):
            inputs[row, width + i] = x[row, i]
            if not enters_normed:
                x[row, i] = states[row, i]


@compiled_exactly
def draw_column(scores: Any, count: int, following: int, draws: Any, room: Any, tokens: Any) -> None:
    """Draw tokens [≥ count] for `count` rows, of which `following` draft on. What is drawn last for a row becomes
    NO_TOKEN if its best score is not finite: memory that is not finite makes all later scores so.

    draws: (keys uint64, temperatures fp64 [≥ count]). room: as in `winner`.
    """
    keys, temperatures = draws
    for row in range(count):
        tokens[row] = winner(scores, row, keys[row], temperatures[row], room)
        if row >= following and not np.isfinite(largest(scores, row)):  # which a NaN makes NaN
            tokens[row] = NO_TOKEN


@compiled_exactly
def draw_chains(
    model: Any, memory: Any, gaps: Any, steps: Any, drawing: Any, given: Any, room: Any, meeting: Any
) -> None:
    """Read the gaps, draw tokens [columns, S], and read all but each row's last one.

    model: (entry, as in `begin`; a layer and the addresses of all, as add_layers has them; (norm of what the last layer
    adds, factor, final norm, the head's product); whether a head reads normed outputs).
    memory: (pool, addresses of the layers' pools, turns, watched layers: none), as add_layers has them.
    gaps: (tokens, positions and places in memory [N], what they see, as add_layers has it, the row [S] behind which
    each chain begins). N = 0: they were read before.
    steps: (counts [columns]: rows that each column draws for; positions, places in memory, first and last visible
    places, ends of the sequences [columns − 1, S]; zeros [S]; tables [S, width], first_rows [S + 1]).
    drawing: (keys uint64 [columns, S], temperatures fp64 [S], tokens [columns, S]).
    given: (scores of the first column [S, vocab] if N = 0; a head's states [max(N, S), hidden], room for others; they
    change).
    room: (x, added, joined [max(N, S), hidden], inputs of a head [.., 2 · hidden], scores [S, vocab], the layers' room,
    the race's room). meeting: (where the parts meet, part, parts).
    """
    entry, layer, addresses, (joining, factor, norm, head), reads_normed = model
    (pool, pools, turns, nobody), (read, read_at, read_to, read_seen, begins) = memory, gaps
    counts, positions, places, firsts, ends, nothing, tables, first_rows = steps
    (keys, temperatures, tokens), (scores, states) = drawing, given
    (x, added, joined, inputs, logits, (qkv, queries, attended, gated), of_race), met = room, 0
    numbers, part, parts = meeting
    for column in range(-1 if len(read) else 0, len(counts)):
        if column < 0:
            ids, at, to, rows, count = read, read_at, read_to, read_seen, len(begins)
        else:
            count = counts[column + 1] if column + 1 < len(counts) else 0
            if part == 0:
                row_scores = scores if column == 0 and len(read) == 0 else logits
                draws = keys[column], temperatures
                draw_column(row_scores, counts[column], count, draws, of_race, tokens[column])
            if count == 0:
                break
            ids, at, to = tokens[column, :count], positions[column, :count], places[column, :count]
            seen = firsts[column, :count], at, nothing[:count], ends[column, :count], ends[column, :count]
            rows = tables[:count], first_rows[: count + 1], seen
        n = len(ids)
        start, end = (n * part // parts, n * (part + 1) // parts) if column < 0 else (0, n if part == 0 else 0)
        if end > start:
            begin(ids[start:end], entry, states[start:end], x[start:end], added[start:end], inputs[start:end])
        meet(numbers, met + 1, parts)
        own, space = (x[:n], added[:n], joined[:n]), (qkv[:n], queries[:n], attended[:n], gated[:n])
        where, waits = (pool, (turns, at, to), rows), (numbers, met + 1, np.int64(0))  # a literal is a type of its own
        add_layers(own, layer, (addresses, pools), inputs[:n], where, nobody, space, waits, part, parts)
        met += MEETINGS + STAGES * len(addresses)
        if part == 0:
            for row in range(count):
                of = begins[row] if column < 0 else row
                join(x[of : of + 1], added[of : of + 1], joining, factor, states[row : row + 1])
            normalise(states[:count], norm, joined[:count])
            if reads_normed:
                for row in range(count):
                    for i in range(x.shape[1]):
                        states[row, i] = joined[row, i]
        meet(numbers, met - 1, parts)
        first, last = bounds(logits.shape[1], part, parts)
        product(joined[:count], head, first, last, logits[:count])
        meet(numbers, met, parts)
