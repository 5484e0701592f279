"""Events in captured rounds with trees: faults, sequences that end early or lose their memory, and less memory than was
planned. The texts are the CPU's, and so are the drafts where nothing fails."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.device.captured_round import CapturedVerdict
from engine.device.graphs import Graphs
from engine.device.round_limits import RoundLimits
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models.tree_moves import PlannedMoves
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import Request
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.heads.fitted import random_medusa, save_heads
from tests.engine.pairs import Pair
from tests.engine.shadow.emulator import Emulator
from tests.engine.shadow.test_captured_heads import LOOP
from tests.engine.shadow.test_failed_rounds import sometimes_failing
from tests.engine.shadow.test_graphs import PARAMS, run
from tests.examples import in_proofs

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("unmeasured")
SHARED = tuple(range(30, 47))  # blocks that all sequences read and none may write


@pytest.fixture(params=["eagle", *in_proofs("draft model", "medusa")])
def served(pair: Pair, request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    if request.param == "eagle":
        return save_eagle_pair(tmp_path)
    if request.param == "medusa":
        return Pair(pair.target, str(save_heads(tmp_path / "heads", random_medusa(), medusa_num_heads=3)))
    return pair


def requests(**fields: Any) -> dict[int, list[Request]]:
    """Trees and a chain that begin alike, of which two come later."""
    params = replace(PARAMS, max_tokens=30, **{**LOOP, **fields})
    trees: tuple[tuple[int, ...] | None, ...] = ((2, 1), None, (2, 1), (1, 3), (2, 2))
    made = [
        Request(f"r{i}", (*SHARED, 20 + i), replace(params, seed=i), tree=tree, k=None if tree else 3)
        for i, tree in enumerate(trees)
    ]
    return {0: made[:3], 6: made[3:]}


SMALL = 200  # numbers: enough for a round of one sequence
SETTINGS: dict[str, Any] = {"max_spec_length": 6, "block_size": 8}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (Graphs, "_replay"),
        *(pytest.param(*at, marks=pytest.mark.proofs) for at in ((CapturedVerdict, "__init__"), (PlannedMoves, "run"))),
    ],
)
def test_faults_change_no_text(served: Pair, emulator: Emulator, where: type, name: str, monkeypatch: Patch) -> None:
    asked, work = list[bool](), sometimes_failing(getattr(where, name), 0.2)

    def working(*args: Any) -> Any:
        asked.append(True)
        return work(*args)

    monkeypatch.setattr(where, name, working)
    both = run(served, requests(), **SETTINGS)
    assert bool(asked) is bool(both.shadow.warnings)
    assert both.shadow.run.tokens == both.cpu.run.tokens
    assert both.shadow.run.accepted > 10
    assert {received.error for received in both.shadow.run.received.values()} == {None}
    assert emulator.replays > 4


def preempt_once(patch: Patch) -> None:
    """Each sequence behind the first, at its tenth token."""
    reserve = Scheduler._reserve_next_tokens

    def reserving(scheduler: Scheduler) -> list[Sequence]:
        preempted, youngest = reserve(scheduler), scheduler.running[-1:]
        is_due = any(s.num_output > 9 and not s.record.preemptions for s in youngest if len(scheduler.running) > 1)
        return [*preempted, scheduler._preempt()] if is_due else preempted

    patch.setattr(Scheduler, "_reserve_next_tokens", reserving)


def test_sequences_that_are_preempted_cancelled_or_stopped(
    served: Pair, emulator: Emulator, monkeypatch: Patch
) -> None:
    preempt_once(monkeypatch)

    def act(engine: Engine, step: int) -> None:
        if step == 4:
            engine.cancel("r2")

    arrivals = requests(ignore_eos=False, stop_token_ids=(21,), min_tokens=24)
    both = run(served, arrivals, act=act, **SETTINGS)
    both.check()
    both.check_drafts()
    told = both.shadow.run.received
    assert {received.reason for received in told.values()} == {"stop", "length", "cancelled"}
    assert sum(step.preempted for step in both.shadow.run.steps) > 1
    assert emulator.replays > 4


def test_less_memory_than_was_planned(pair: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    """The draft model draws the first nodes of the planned trees."""
    reserve: Callable[[ModelDrafter, Sequence, int], int] = ModelDrafter._reserve

    def reserving(drafter: ModelDrafter, sequence: Sequence, k: int) -> int:
        return reserve(drafter, sequence, min(k, 3 + len(sequence.tokens) % 4))

    monkeypatch.setattr(ModelDrafter, "_reserve", reserving)
    arrivals = [
        Request(f"r{i}", (20, 21), replace(PARAMS, seed=i, max_tokens=40, **LOOP), tree=(2, 2)) for i in range(2)
    ]
    both = run(pair, arrivals, **SETTINGS)
    both.check()
    both.check_drafts()
    assert emulator.replays > 4


@pytest.mark.proofs
def test_trees_of_other_sizes_whose_levels_are_as_wide(served: Pair, emulator: Emulator) -> None:
    """Two nodes, then three, where the end of a text cuts its tree. A guesser's drafts make the verifications alike."""
    params = replace(PARAMS, max_tokens=26)
    shapes: tuple[tuple[int, ...], ...] = ((2,), (2, 1))
    arrivals = {
        30 * n: [
            Request(f"tree{n}", (20, 21), replace(params, seed=n), tree=shape),
            Request(f"chain{n}", (20, 22), replace(params, seed=n + 2), k=2),
            Request(f"guess{n}", (20, 21, 22) * 3, replace(params, seed=n + 4), k=3, drafter="lookup"),
        ]
        for n, shape in enumerate(shapes)
    }
    both = run(served, arrivals, max_spec_length=4, block_size=32)
    both.check()
    both.check_drafts()
    assert emulator.replays > 4


@pytest.mark.parametrize("served", [*in_proofs("draft model"), "medusa"], indirect=True)
def test_rounds_that_the_fixed_memory_does_not_hold(served: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    """They are not captured, because their numbers lie anywhere."""
    of, engines = RoundLimits.of, list[Engine]()
    monkeypatch.setattr(RoundLimits, "of", lambda config, layout: replace(of(config, layout), numbers=SMALL))
    both = run(served, requests(), act=lambda engine, step: engines.append(engine), **SETTINGS)
    both.check()
    both.check_drafts()
    graphs = engines[-1].target.staging.graphs
    assert graphs is not None
    assert graphs.eager["the fixed memory is too small"] > 4


def test_drafts_of_several_drafters_keep_the_law(pair: Pair, emulator: Emulator) -> None:
    """Nobody knows before the round who of a cascade drafts. Rounds in which that is known have graphs of their own."""
    params, drafters = replace(PARAMS, max_tokens=30), ("model", "cascade")
    arrivals = {
        50 * n: [
            Request(f"{name}{i}", (20 + i, 21), replace(params, seed=i), k=3, verifier="rejection", drafter=name)  # type: ignore[arg-type]
            for i in range(2)
        ]
        for n, name in enumerate(drafters)
    }
    both = run(pair, arrivals, **SETTINGS)
    both.check()
    both.check_drafts()
    assert emulator.replays > 16
