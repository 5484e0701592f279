"""The rounds of a record as columns, for replies, traces, the live page and scripts/trace.py."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from engine.types import DRAFTERS, REASONS, RoundRecord

# Public names, in the order of a reply, and the fields of RoundRecord that they show.
COLUMNS = {
    "step": "step",
    "k": "k",
    "reason": "reason",
    "alpha": "alpha",
    "drafted": "drafted",
    "accepted": "accepted",
    "emitted": "emitted",
    "drafter": "proposer",
    "batch": "batch",
    "began_us": "began_us",
    "draft_us": "draft_us",
    "verify_us": "score_us",
    "overhead_us": "overhead_us",
}


def raw_columns(rounds: Sequence[RoundRecord]) -> dict[str, list[int]]:
    """Columns of integers, with codes in place of words."""
    return {name: list(map(attrgetter(field), rounds)) for name, field in COLUMNS.items()}


def public_trees(rounds: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[dict[str, list[int]] | None]:
    """(parents, accepted path) of each round's drafts, by name; None where the drafts were a chain."""
    return [{"parents": list(tree), "accepted": list(path)} if tree else None for tree, path in rounds]


def public_columns(columns: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
    """Raw columns with words in place of codes. Row 0 is the round that ended the prompt; rounds without drafts are
    rows too.

    step        the engine's number of the step; one step runs the rounds of all sequences at once
    k, reason   drafts asked for, and why k was no larger (policies/config.py); null: k was not chosen
    alpha       estimated chance that the first draft is accepted, before the round, per mille
    drafted     drafts that the drafter offered
    accepted    of these, those that the verifier kept, before a stop cut the text
    emitted     tokens that the round added to the text
    drafter     the drafter that proposed; null: there were no drafts
    batch       sequences in the round
    began_us    when the step began, in microseconds after the request's arrival
    draft_us, verify_us, overhead_us    the step's wall clock: proposing, the target's pass with acceptance, the rest
    """
    shown: dict[str, list[Any]] = {name: list(column) for name, column in columns.items()}
    return shown | {
        "reason": [REASONS[code] if code >= 0 else None for code in columns["reason"]],
        "drafter": [DRAFTERS[code] if code >= 0 else None for code in columns["drafter"]],
    }
