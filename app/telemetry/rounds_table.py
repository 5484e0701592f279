"""Draws the rounds of a choice as a table of text. Viewers show the columns of a decode span as lists of numbers."""

from collections.abc import Sequence

from engine.trees import ranks, tried
from engine.types import DRAFTERS, REASONS, RoundRecord

MAX_LENGTH = 2_048  # characters; Tempo cuts longer attributes
MAX_ROWS = 25  # rounds with a row; the last LAST_ROWS rounds always have one
LAST_ROWS = 8
MAX_DRAWN = 16  # drafts that a row draws
SIGNS = "+ accepted, 2 to 9 as that sibling, x rejected, . not reached, / next branch"
HEADING = f"round   k accepted tokens     ms drafter    reason     drafts: {SIGNS}"


def rounds_table(rounds: Sequence[RoundRecord]) -> str:
    """Return a heading and one line per round. If there are too many, one line sums up those in the middle.

    Columns: round, k, accepted/drafted, emitted tokens, milliseconds of the step, drafter, reason for k, a drawing.
    """
    lines = [_line(i, part) for i, part in enumerate(rounds[:MAX_ROWS])]
    if len(rounds) > MAX_ROWS:
        first, last = MAX_ROWS - LAST_ROWS, len(rounds) - LAST_ROWS
        ends = (_line(i, rounds[i]) for i in range(last, len(rounds)))
        lines[first:] = [_sum(rounds[first:last]), *ends]
    return "\n".join([HEADING, *lines])[:MAX_LENGTH]


def _line(index: int, part: RoundRecord) -> str:
    k = "-" if part.reason < 0 else str(part.k)
    drafter = DRAFTERS[part.proposer] if part.proposer >= 0 else "-"
    reason = REASONS[part.reason] if part.reason >= 0 else "-"
    numbers = f"{index:5} {k:>3} {_share(part.accepted, part.drafted):>8} {part.emitted:6} {part.step_us / 1000:6.1f}"
    return f"{numbers} {drafter:10} {reason:10} {_drawing(part)[:MAX_DRAWN]}".rstrip()


def _drawing(part: RoundRecord) -> str:
    """One sign per draft. A draft of a tree whose parent is not the draft before it begins a branch."""
    if not part.tree:
        return "+" * part.accepted + "x" * (part.drafted - part.accepted)
    signs, siblings_before = ["."] * part.drafted, ranks(part.tree)
    for node in tried(part.tree, part.path):
        signs[node] = "x"
    for node in part.path:
        signs[node] = str(min(9, 1 + siblings_before[node])) if siblings_before[node] else "+"
    branches = ("/" if 0 < node != parent + 1 else "" for node, parent in enumerate(part.tree))
    return "".join(branch + sign for branch, sign in zip(branches, signs, strict=True))


def _sum(rounds: Sequence[RoundRecord]) -> str:
    accepted, drafted, emitted, step_us = (
        sum(column)
        for column in zip(*((part.accepted, part.drafted, part.emitted, part.step_us) for part in rounds), strict=True)
    )
    numbers = f"  ...     {_share(accepted, drafted):>8} {emitted:6} {step_us / 1000:6.1f}"
    return f"{numbers} sum of {len(rounds)} rounds"


def _share(accepted: int, drafted: int) -> str:
    return f"{accepted}/{drafted}"
