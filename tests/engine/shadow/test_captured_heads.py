"""Captured rounds with heads: the verification keeps the target's states, and an EAGLE head's chains are one graph."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafters.captured_chains import CapturedChains
from engine.engine import Engine
from engine.graphs import Graphs
from engine.heads.eagle_runner import HeadChains
from engine.heads.states import TargetStates
from engine.staging import Staged, Staging
from engine.types import Request, Verifier
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.heads.fitted import random_medusa, save_heads
from tests.engine.pairs import Pair
from tests.engine.shadow.counting import Counts
from tests.engine.shadow.device import active
from tests.engine.shadow.emulator import Emulator
from tests.engine.shadow.test_graphs import PARAMS, run

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_eagle_pair(tmp_path_factory.mktemp("eagle"))


def requests(verifier: Verifier, **fields: Any) -> dict[int, list[Request]]:
    """Members change, and one does not draft."""
    params = replace(PARAMS, temperature=0.5, **fields)
    made = [
        Request(f"r{i}", tuple(range(20 + i, 29)), replace(params, seed=i), verifier=verifier, k=k)
        for i, k in enumerate((3, 2, 0, 3, 3))
    ]
    return {0: made[:3], 7: made[3:]}


def check(pair: Pair, arrivals: dict[int, list[Request]], parts: int = 2) -> Graphs:
    """parts: graphs of a round in which nothing else asks for operations of a model."""
    found: list[Graphs] = []
    rounds, before, replays = list[tuple[int, Counts]](), Counts(), 0

    def act(engine: Engine, step: int) -> None:
        nonlocal before, replays
        if engine.target.staging.graphs is not None:
            found.append(engine.target.staging.graphs)
            counts = active().counts.copy()
            rounds.append((found[-1].replays - replays, counts.since(before)))
            before, replays = counts, found[-1].replays

    both = run(pair, arrivals, act=act)
    both.check()
    both.check_drafts()
    replayed = {(c.uploads, c.downloads, c.stalls, c.inside) for n, c in rounds if n == parts}
    assert parts != 2 or (1, 1, 1, 0) in replayed  # a round that captures a graph also counts its operations
    return found[-1]


@pytest.mark.parametrize("verifier", [pytest.param("match", marks=pytest.mark.proofs), "rejection"])
def test_chains_of_an_eagle_head(eagle: Pair, emulator: Emulator, monkeypatch: Patch, verifier: Verifier) -> None:
    drawn, propose = list[int](), CapturedChains.propose

    def proposing(chains: CapturedChains) -> Any:
        drawn.append(len(chains._ks))
        return propose(chains)

    monkeypatch.setattr(CapturedChains, "propose", proposing)
    graphs = check(eagle, requests(verifier, max_tokens=24))
    assert set(graphs.eager) == {"the first of its kind", "a prompt"}
    assert len(drawn) > 8
    assert emulator.replays > 8


def test_verification_for_heads_without_memory(pair: Pair, emulator: Emulator, tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "medusa", random_medusa(), medusa_num_heads=3)
    biased = requests("match", logit_bias=((20, 30.0), (21, 30.0)), top_k=3)
    graphs = check(Pair(pair.target, str(heads)), biased, parts=1)
    assert set(graphs.eager) == {"the first of its kind", "a prompt"}
    assert emulator.replays > 2


# --- faults ----------------------------------------------------------------------------------------------------------


def states_of_another_sequence(patch: Patch) -> None:
    prepare = TargetStates.prepare_padded

    def preparing(
        states: TargetStates, feeds: Seq[Any], starts: Seq[int], rows: int, sequences: int, staging: Staging
    ) -> Staged:
        prepare(states, feeds, starts, rows, sequences, staging)
        assert states._planned is not None
        taken = states._planned.rows
        return staging.ints([*taken[rows:], *taken[:rows], *[states.unread] * (rows * sequences - len(taken))])

    patch.setattr(TargetStates, "prepare_padded", preparing)


def the_same_state_for_all(patch: Patch) -> None:
    draw = CapturedChains._draw

    def drawing(chains: CapturedChains) -> Any:
        head = chains._runner.chains
        assert isinstance(head, HeadChains)
        assert head._states is not None
        head._states.arrive(torch.zeros_like(head._states.tensor))
        return draw(chains)

    patch.setattr(CapturedChains, "_draw", drawing)


@pytest.mark.parametrize("fault", [states_of_another_sequence, the_same_state_for_all])
def test_a_fault_is_seen(eagle: Pair, emulator: Emulator, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="the texts differ"):
        check(eagle, requests("rejection"))
