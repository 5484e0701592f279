"""Captured rounds with a bias, exclusions and a minimum of tokens, while members and texts change. Faults that only a
replay would show are seen."""

from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from engine.device.graphs import Graphs
from engine.engine import Engine
from engine.sampling.device_bans import Bans
from engine.sampling.device_bias import BiasTable, DeviceBias, DeviceBiases
from engine.types import Request, SamplingParams, Verifier
from tests.engine.pairs import Pair
from tests.engine.shadow.emulator import Emulator
from tests.engine.shadow.test_graphs import PARAMS, run
from tests.examples import in_proofs

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("unmeasured")
LOOP = ((20, 30.0), (21, 30.0), (22, 29.0))  # a bias towards three tokens: bad words would occur
WORDS = ((20, 21), (21, 20, 20), (22, 22))
EAGER = {"the first of its kind", "a prompt"}


def member(i: int, *, verifier: Verifier = "match", k: int = 3, **fields: Any) -> Request:
    return Request(f"r{i}", (20 + i, 21, 22), replace(PARAMS, seed=i, **fields), verifier=verifier, k=k)


def members(verifier: Verifier, **fields: Any) -> dict[int, list[Request]]:
    """Those that come later take rows of the table that others had."""
    same: dict[str, Any] = {"verifier": verifier, **fields}
    early: dict[str, Any] = {"min_tokens": 9, "ignore_eos": False, "logit_bias": (*LOOP, (1, 31.0))}
    strict: dict[str, Any] = {"bad_word_ids": ((20,), *WORDS), "logit_bias": LOOP, "repetition_penalty": 1.2}
    return {
        0: [member(0, **same, logit_bias=LOOP, bad_word_ids=WORDS), member(1, **same, k=2)],
        3: [member(2, **same, **early)],
        9: [member(3, **same, k=2, allowed_token_ids=tuple(range(20, 40))), member(4, **same, **strict)],
        14: [member(5, **same, logit_bias=((21, 30.0), (25, 30.0)), bad_word_ids=((25, 21),))],
    }


def check(pair: Pair, arrivals: dict[int, list[Request]]) -> Counter[str]:
    """Returns why parts of rounds were not captured."""
    engines: list[Engine] = []
    both = run(pair, arrivals, act=lambda engine, step: engines.append(engine), max_running=3)
    both.check()
    both.check_drafts()
    graphs = engines[-1].target.staging.graphs
    assert graphs is not None
    return graphs.eager


@pytest.mark.parametrize("verifier", ["match", pytest.param("block", marks=pytest.mark.proofs)])
def test_they_are_captured_once_for_each_bucket(
    pair: Pair, emulator: Emulator, monkeypatch: Patch, verifier: Verifier
) -> None:
    asked, ask = Counter[tuple[int, Hashable]](), Graphs.run

    def running(graphs: Graphs, owner: int, layout: Hashable, region: Callable[[], Any]) -> Any:
        asked[owner, layout] += 1
        return ask(graphs, owner, layout, region)

    monkeypatch.setattr(Graphs, "run", running)
    eager = check(pair, members(verifier, max_tokens=26))
    assert set(eager) == EAGER
    assert eager["the first of its kind"] == len(asked)
    assert len(emulator.tapes) == sum(n > 1 for n in asked.values())
    assert emulator.replays == sum(n - 1 for n in asked.values()) > 10


def test_a_bias_that_is_new_comes_before_the_graph(pair: Pair, emulator: Emulator) -> None:
    """A text whose prefix is known to all but its last token begins with a round that could be captured."""
    prompt = tuple(range(30, 47))
    requests = [replace(member(i, logit_bias=((50 + i, 30.0),)), prompt_ids=prompt) for i in range(2)]
    eager = check(pair, {0: requests[:1], 4: requests[1:]})
    assert eager["a bias that the device does not have"] == 1
    assert set(eager) == EAGER | {"a bias that the device does not have"}


# --- faults ----------------------------------------------------------------------------------------------------------


def a_stale_bias(patch: Patch) -> None:
    """A row that had an owner is not written again."""
    start, owned = BiasTable.start, set[int]()

    def starting(table: BiasTable, params: SamplingParams) -> DeviceBias:
        bias = start(table, params)
        if bias.row in owned:
            del table._new[bias.row]
        owned.add(bias.row)
        return bias

    patch.setattr(BiasTable, "start", starting)


def rows_of_the_round_that_was_captured(patch: Patch) -> None:
    begin, kept = DeviceBiases.__init__, dict[Hashable, list[Any]]()

    def beginning(biases: DeviceBiases, table: BiasTable, rows: Seq[Any], numbers: Any, name: Any) -> None:
        begin(biases, table, kept.setdefault(name, list(rows)), numbers, name)

    patch.setattr(DeviceBiases, "__init__", beginning)


def bans_of_the_round_that_was_captured(patch: Patch) -> None:
    table, kept = Bans._table, dict[Hashable, list[int]]()

    def making(bans: Bans) -> list[int]:
        numbers = table(bans)
        return kept.setdefault((len(numbers), bans._width), numbers)

    patch.setattr(Bans, "_table", making)


@pytest.mark.parametrize(
    "fault",
    [
        a_stale_bias,
        *in_proofs(rows_of_the_round_that_was_captured, bans_of_the_round_that_was_captured),
    ],
)
def test_a_fault_is_seen(pair: Pair, emulator: Emulator, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="the texts differ"):
        check(pair, members("match"))
