"""What one choice of a request, and one step of the engine, have to say as spans: names, times, attributes, no SDK.

Times are monotonic seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise

from opentelemetry.util.types import AttributeValue

from app.round_columns import raw_columns
from app.telemetry import names as name
from engine.types import DRAFTERS, REASONS, RequestRecord, RoundRecord, StepStats

MAX_COLUMN = 512  # entries; viewers cut long attributes
COLUMN_ENDS = 128  # entries at either end that are always kept; between them, evenly spread ones
MAX_ROUND_SPANS = 64  # of one choice
ROUND_SPAN_ENDS = 16  # of these at either end
SLOWEST = 8  # rounds that have a span before others have
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

Attributes = dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class Piece:
    """A span to be."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, AttributeValue]
    parts: tuple["Piece", ...] = ()

    def within(self, began: float, ended: float) -> "Piece":
        """What of it lies there, its parts within it: viewers draw a part that sticks out as an error of the clocks.

        A step of the engine begins before it admits a request, and ends after it has finished one.
        """
        begin = min(max(self.began, began), ended)
        end = min(max(self.ended, begin), ended)
        return replace(self, began=begin, ended=end, parts=tuple(part.within(begin, end) for part in self.parts))


def choice_pieces(index: int, record: RequestRecord, *, rounds: bool) -> Iterator[Piece]:
    """Queue, prefill and decode of a record that is finished, as far as it came; with spans of rounds, if asked for."""
    assert record.finished is not None, "the engine finished it"
    choice: Attributes = {name.CHOICE: index}
    admitted, first, finished = _admitted(record), record.first_token, record.finished
    spans = {i: _round_piece(i, record.rounds[i], record.arrived) for i in spoken_for(record)} if rounds else {}
    yield Piece(
        name.QUEUE,
        record.arrived,
        finished if admitted is None else admitted,
        choice | {name.QUEUE_AHEAD: record.waiting_ahead},
    )
    if admitted is not None:
        head = (spans.pop(0),) if 0 in spans else ()  # it ended the prompt: it began before the decode span
        yield Piece(name.PREFILL, admitted, finished if first is None else first, choice | _prefill(record), head)
    if first is not None:
        told = choice | columns(record)
        if rounds:
            told[name.ROUNDS_OMITTED] = len(record.rounds) - len(spans) - len(head)
        yield Piece(name.DECODE, first, finished, told, tuple(spans.values()))


def _admitted(record: RequestRecord) -> float | None:
    """When the step began that admitted it, if that is the first of its rounds; else when it did."""
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
    """The rounds, packed. What each emitted is left out: accepted + 1, but for what `truncated` counts at the end."""
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
    """Which of so many rounds the columns hold, ascending, at most MAX_COLUMN: both ends whole, the middle evenly."""
    if rounds <= MAX_COLUMN:
        return range(rounds)
    room, middle = MAX_COLUMN - 2 * COLUMN_ENDS, rounds - 2 * COLUMN_ENDS
    spread = (COLUMN_ENDS + i * middle // room for i in range(room))
    return [*range(COLUMN_ENDS), *spread, *range(rounds - COLUMN_ENDS, rounds)]


def strip(rounds: Sequence[RoundRecord]) -> str:
    """One character per round: "4.0" is four drafts accepted, a plain round, all drafts rejected; z is 35 and more."""
    return "".join(DIGITS[min(part.accepted, len(DIGITS) - 1)] if part.drafted else "." for part in rounds)


def spoken_for(record: RequestRecord) -> list[int]:
    """The rounds that get a span of their own, ascending: the ends, the slowest, then where k changed, then where
    every draft was rejected, then any, until MAX_ROUND_SPANS.
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
    began = arrived + part.began_us / 1e6
    return Piece(name.ROUND, began, began + part.step_us / 1e6, attributes)


def step_piece(step: StepStats, trace_ids: Sequence[str]) -> Piece:
    """`trace_ids`: of the requests that it served, as far as they are traced."""
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
