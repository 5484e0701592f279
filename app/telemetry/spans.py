"""Names, times and attributes of the spans of one choice of a request and of one engine step. Uses no SDK.

Times are monotonic seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise

from opentelemetry.util.types import AttributeValue

from app.round_columns import raw_columns
from app.telemetry import names as name
from app.telemetry.rounds_table import rounds_table
from engine.types import DRAFTERS, REASONS, RequestRecord, RoundRecord, StepStats

MAX_COLUMN = 512  # entries; viewers cut long attributes
COLUMN_ENDS = 128  # entries at either end that are always kept; between them evenly spread ones are
MAX_ROUND_SPANS = 64  # per choice
ROUND_SPAN_ENDS = 16  # rounds at either end that always have a span
SLOWEST = 8  # slowest rounds that always have a span
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

Attributes = dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class Piece:
    """A span that is not written yet. Times are monotonic seconds."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, AttributeValue]
    parts: tuple["Piece", ...] = ()

    def within(self, began: float, ended: float) -> "Piece":
        """Cut the span and its parts to this interval. Viewers draw a part that sticks out as an error of the clocks.

        An engine step begins before it admits a request and ends after it has finished one.
        """
        begin = min(max(self.began, began), ended)
        end = min(max(self.ended, begin), ended)
        return replace(self, began=begin, ended=end, parts=tuple(part.within(begin, end) for part in self.parts))


def choice_pieces(index: int, record: RequestRecord, *, rounds: bool) -> Iterator[Piece]:
    """Yield queue, prefill and decode of a finished record, as far as it came. rounds: whether rounds get spans of
    their own."""
    assert record.finished is not None, "the engine finished it"
    choice: Attributes = {name.CHOICE: index}
    admitted, first, finished = _admitted(record), record.first_token, record.finished
    spans = {i: _round_piece(i, record.rounds[i], record.arrived) for i in rounds_with_spans(record)} if rounds else {}
    yield Piece(
        name.QUEUE,
        record.arrived,
        finished if admitted is None else admitted,
        choice | {name.QUEUE_AHEAD: record.waiting_ahead},
    )
    if admitted is not None:
        head = (spans.pop(0),) if 0 in spans else ()  # the round that ended the prompt began before the decode span
        yield Piece(name.PREFILL, admitted, finished if first is None else first, choice | _prefill(record), head)
    if first is not None:
        table: Attributes = {name.OUTPUT: rounds_table(record.rounds), name.OUTPUT_TYPE: name.PLAIN_TEXT}
        attributes = choice | columns(record) | table
        if rounds:
            attributes[name.ROUNDS_OMITTED] = len(record.rounds) - len(spans) - len(head)
        yield Piece(name.DECODE, first, finished, attributes, tuple(spans.values()))


def _admitted(record: RequestRecord) -> float | None:
    """Return when the request was admitted, or when its first round's step began if that was earlier."""
    if record.admitted is None or not record.rounds:
        return record.admitted
    return min(record.admitted, max(record.arrived, record.arrived + record.rounds[0].began_us / 1e6))


def _prefill(record: RequestRecord) -> Attributes:
    return {
        name.PREFILL_TOKENS: record.prompt_tokens,
        name.PREFILL_CACHED: record.cached_tokens,
        name.PREFILL_PASSES: record.prefill_passes + bool(record.rounds),
    }


def columns(record: RequestRecord) -> Attributes:
    """Return the rounds as columns. Emitted tokens are omitted: accepted + 1, apart from `truncated` at the end."""
    count = len(record.rounds)
    attributes: Attributes = {
        name.DRAFTERS: (name.NOBODY, *DRAFTERS),
        name.REASONS: (name.NOBODY, *REASONS),
        name.ROUNDS_TOTAL: count,
    }
    index = kept(count)
    if len(index) < count:
        attributes[name.ROUNDS_INDEX] = index
    parts = [record.rounds[i] for i in index]
    raw = raw_columns(parts)
    table = {
        name.COLUMN_STEP: raw["step"],
        name.COLUMN_K: raw["k"],
        name.COLUMN_REASON: [1 + code for code in raw["reason"]],
        name.COLUMN_ALPHA: raw["alpha"],
        name.COLUMN_DRAFTED: raw["drafted"],
        name.COLUMN_ACCEPTED: raw["accepted"],
        name.COLUMN_DRAFTER: [1 + code for code in raw["drafter"]],
        name.COLUMN_BATCH: raw["batch"],
        name.COLUMN_BEGAN_US: raw["began_us"],
        name.COLUMN_DRAFT_US: raw["draft_us"],
        name.COLUMN_VERIFY_US: raw["verify_us"],
        name.COLUMN_OVERHEAD_US: raw["overhead_us"],
    }
    return attributes | table | {name.ROUNDS_STRIP: strip(parts)}


def kept(rounds: int) -> Sequence[int]:
    """Return the indices of the rounds in the columns, ascending, at most MAX_COLUMN: both ends, the middle thinned."""
    if rounds <= MAX_COLUMN:
        return range(rounds)
    room, middle = MAX_COLUMN - 2 * COLUMN_ENDS, rounds - 2 * COLUMN_ENDS
    spread = (COLUMN_ENDS + i * middle // room for i in range(room))
    return [*range(COLUMN_ENDS), *spread, *range(rounds - COLUMN_ENDS, rounds)]


def strip(rounds: Sequence[RoundRecord]) -> str:
    """Return one character per round: accepted drafts in base 36, z for 35 and more; a dot for a plain round."""
    return "".join(DIGITS[min(part.accepted, len(DIGITS) - 1)] if part.drafted else "." for part in rounds)


def rounds_with_spans(record: RequestRecord) -> list[int]:
    """Return the indices of the rounds that get a span, ascending, at most MAX_ROUND_SPANS.

    In order of preference: both ends, the slowest, where k changed, where every draft was rejected, any other.
    """
    count = len(record.rounds)
    slowest = sorted(range(count), key=lambda i: record.rounds[i].step_us, reverse=True)[:SLOWEST]
    changes = (i for i, (before, now) in enumerate(pairwise(record.rounds), start=1) if before.k != now.k)
    fruitless = (i for i, part in enumerate(record.rounds) if part.drafted and not part.accepted)
    ends = chain(range(min(ROUND_SPAN_ENDS, count)), range(max(0, count - ROUND_SPAN_ENDS), count))
    wanted = dict.fromkeys(chain(ends, slowest, changes, fruitless, range(count)))
    return sorted(islice(wanted, MAX_ROUND_SPANS))


def _round_piece(i: int, part: RoundRecord, arrived: float) -> Piece:
    attributes: Attributes = {
        name.ROUND_INDEX: i,
        name.STEP_INDEX: part.step,
        name.ROUND_K: part.k,
        name.ROUND_DRAFTED: part.drafted,
        name.ROUND_ACCEPTED: part.accepted,
        name.ROUND_EMITTED: part.emitted,
        name.ROUND_DRAFT_US: part.draft_us,
        name.ROUND_VERIFY_US: part.score_us,
        name.ROUND_ALPHA: part.alpha / 1000,
        name.ROUND_BATCH: part.batch,
    }
    if part.reason >= 0:
        attributes[name.ROUND_REASON] = REASONS[part.reason]
    if part.proposer >= 0:
        attributes[name.ROUND_DRAFTER] = DRAFTERS[part.proposer]
    if part.tree:
        attributes[name.ROUND_TREE] = part.tree
        attributes[name.ROUND_PATH] = part.path
    began = arrived + part.began_us / 1e6
    return Piece(name.ROUND, began, began + part.step_us / 1e6, attributes)


def step_piece(step: StepStats, trace_ids: Sequence[str]) -> Piece:
    """trace_ids: the traces of the requests in the step."""
    attributes: Attributes = {
        name.STEP_INDEX: step.step,
        name.STEP_BATCH: step.sequences,
        name.STEP_PREFILL_TOKENS: step.prefill_tokens,
        name.STEP_DRAFTED: step.drafted,
        name.STEP_ACCEPTED: step.accepted,
        name.STEP_EMITTED: step.emitted,
        name.STEP_DRAFT_US: step.draft_us,
        name.STEP_VERIFY_US: step.score_us,
        name.STEP_POLICY_US: step.policy_us,
        name.STEP_RUNNING: step.running,
        name.STEP_WAITING: step.waiting,
        name.STEP_PREEMPTED: step.preempted,
        name.STEP_FAILED: step.failed,
        name.STEP_TRACES: trace_ids,
    }
    if step.predicted_us:
        attributes[name.STEP_PREDICTED_US] = step.predicted_us
        attributes[name.STEP_PREDICTED_TOKENS] = step.predicted_tokens
    return Piece(name.ENGINE_STEP, step.began, step.began + step.step_us / 1e6, attributes)
