"""Rounds are added up, packed and selected: properties that hold for any rounds."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from starlette.datastructures import Headers

from app.telemetry.exchange import Exchange
from app.telemetry.request_span import request_attributes
from app.telemetry.spans import MAX_COLUMN, MAX_ROUND_SPANS, columns, kept, rounds_with_spans, strip
from engine.types import Output, Request, RoundRecord
from tests.app.harness import PROMPT, call
from tests.app.telemetry.test_spans import COLUMNS
from tests.app.telemetry.tracing import Traced, record_of


def noise(rng: random.Random, length: int) -> list[Any]:
    """Rounds as an engine may have them, the last one perhaps cut."""
    rounds: list[Any] = []
    for i in range(length):
        drafted = rng.choice([0, rng.randint(1, 8)]) if i else 0
        accepted = rng.randint(0, drafted)
        emitted = accepted + 1 if i < length - 1 else rng.randint(0, accepted + 1)
        times = rng.randint(0, 999), rng.randint(1, 999), 3000
        rounds.append((drafted, "policy", 500, drafted, accepted, emitted, "model", 1, i * 4000, *times))
    return rounds


@pytest.mark.parametrize("seed", range(20))
def test_identities_of_the_totals(seed: int) -> None:
    """I8, and no token is lost between the counts."""
    rng = random.Random(seed)
    request = Request("r", (1, 2, 3))
    record = record_of(request, noise(rng, rng.randint(1, 40)))
    exchange = Exchange("cmpl-r", Headers(), requests=[request], finished=1.0)
    exchange.last_outputs = {"r": Output("r", (), "", "stop", record=record)}
    said: Any = request_attributes(exchange, "m")
    column: Any = columns(record)
    total = {name.removeprefix("specdec.tokens."): n for name, n in said.items() if name.startswith("specdec.tokens.")}
    rounds, plain = said["specdec.rounds.count"], said["specdec.steps.plain"]
    assert total["drafted"] == sum(column["specdec.rounds.drafted"]) == total["accepted"] + total["rolled_back"]
    assert total["accepted"] == sum(column["specdec.rounds.accepted"])
    assert total["emitted"] == said["gen_ai.usage.output_tokens"]
    assert total["emitted"] + total["truncated"] == rounds + plain + total["accepted"]
    assert rounds == total["recovered"] + total["bonus"]
    assert rounds + plain == column["specdec.rounds.total"] == len(column["specdec.rounds.strip"])
    if rounds:
        histogram = said["specdec.acceptance.histogram"]
        assert len(histogram) == said["specdec.k.max"] + 1
        assert sum(histogram) == rounds
        assert sum(j * count for j, count in enumerate(histogram)) == total["accepted"]
        assert said["specdec.acceptance.rate"] * total["drafted"] == pytest.approx(total["accepted"])
        assert (said["specdec.acceptance.length"] - 1) * rounds == pytest.approx(total["accepted"])


@pytest.mark.parametrize("rounds", [0, 1, 511, 512, 513, 514, 700, 5000])
def test_long_columns_keep_both_ends_and_an_even_middle(rounds: int) -> None:
    index = list(kept(rounds))
    assert len(index) == min(rounds, MAX_COLUMN)
    assert index == sorted(set(index))
    assert set(index) <= set(range(rounds))
    assert {*range(min(rounds, 128)), *range(max(0, rounds - 128), rounds)} <= set(index)
    middle = [i for i in index if 128 <= i < rounds - 128]
    gaps = {after - before for before, after in pairwise(middle)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_long_columns_hold() -> None:
    record = record_of(Request("r", (1,)), noise(random.Random(1), 700))
    said: Any = columns(record)
    index = said["specdec.rounds.index"]
    assert said["specdec.rounds.total"] == 700
    assert said["specdec.rounds.accepted"] == [record.rounds[i].accepted for i in index]
    assert said["specdec.rounds.step"] == [record.rounds[i].step for i in index]
    assert {len(said[name]) for name in COLUMNS} == {MAX_COLUMN} == {len(said["specdec.rounds.strip"])}


def test_the_strip_has_a_character_per_round() -> None:
    fates = [(4, 4), (0, 0), (3, 0), (35, 35), (36, 36), (40, 40)]
    assert strip([RoundRecord(d, 0, 0, d, a, a + 1, 0) for d, a in fates]) == "4.0zzz"


def test_which_rounds_have_spans() -> None:
    """The first, the last and the slowest rounds are always picked; then rounds in which something happened."""
    assert rounds_with_spans(record_of(Request("r", (1,)))) == [0, 1, 2, 3, 4]
    dull = [(4, "policy", 500, 4, 2, 3, "model", 1, i * 4000, 300, 400, 1000) for i in range(200)]
    slow = {40, 41, 42, 43, 44, 45, 46, 47}
    rounds = [(*row[:11], 2000) if i in slow else row for i, row in enumerate(dull)]
    rounds[100] = (3, *rounds[100][1:])  # k changed there and back
    rounds[150] = (*rounds[150][:4], 0, *rounds[150][5:])  # every draft rejected
    chosen = rounds_with_spans(record_of(Request("r", (1,)), rounds))
    assert len(chosen) == MAX_ROUND_SPANS
    assert chosen == sorted(set(chosen))
    assert {*range(16), *range(184, 200), *slow, 100, 101, 150} <= set(chosen)


def test_how_many_rounds_have_no_span_is_told() -> None:
    def long(request: Request) -> Iterator[Output]:
        yield Output(request.id, (1,), "a", "stop", record=record_of(request, noise(random.Random(2), 100)))

    traced = Traced(long, level="rounds")
    call(traced.app, PROMPT)
    assert len(traced.spans("specdec.round")) == 64
    assert traced.attributes("specdec.decode")["specdec.rounds.spans_omitted"] == 36
