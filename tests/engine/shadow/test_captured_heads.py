"""Captured rounds with heads: the verification keeps the target's states, and an EAGLE head's chains are one graph."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.graphs import Graphs
from engine.device.staging import Staged, Staging
from engine.drafters.base import Draft
from engine.drafters.captured_chains import CapturedChains
from engine.engine import Engine
from engine.heads.captured_heads import CapturedHeads
from engine.heads.eagle_runner import HeadChains
from engine.heads.states import TargetStates
from engine.trees import Growth
from engine.types import Request, Verifier
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.heads.fitted import mlp_config, random_medusa, random_mlp, save_heads
from tests.engine.pairs import Pair
from tests.engine.shadow.counting import Counts
from tests.engine.shadow.device import active
from tests.engine.shadow.emulator import Emulator
from tests.engine.shadow.test_graphs import PARAMS, run
from tests.examples import in_proofs

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


@pytest.fixture(params=["medusa", *in_proofs("mlp_speculator")])
def heads(pair: Pair, request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """The target with heads without memory."""
    if request.param == "medusa":
        saved = save_heads(tmp_path / "heads", random_medusa(), medusa_num_heads=3)
    else:
        saved = save_heads(tmp_path / "heads", random_mlp(), **mlp_config())
    return Pair(pair.target, str(saved))


@pytest.fixture
def replayed(monkeypatch: Patch) -> list[int]:
    """Per draft of heads without memory the number of its sequences, if it came from a graph."""
    found, propose = list[int](), CapturedHeads.propose

    def proposing(part: CapturedHeads) -> Draft:
        graphs = part._staging.graphs
        assert graphs is not None
        before = graphs.replays
        draft = propose(part)
        found.extend([len(draft.ks)] * (graphs.replays - before))
        return draft

    monkeypatch.setattr(CapturedHeads, "propose", proposing)
    return found


LOOP: dict[str, Any] = {"logit_bias": ((20, 30.0), (21, 30.0), (22, 30.0)), "top_k": 3}  # so that drafts are accepted


@pytest.mark.parametrize("verifier", ["rejection", *in_proofs("match", "block")])
def test_chains_of_heads_without_memory(
    heads: Pair, emulator: Emulator, replayed: list[int], verifier: Verifier
) -> None:
    graphs = check(heads, requests(verifier, max_tokens=24, frequency_penalty=0.3, **LOOP))
    assert set(graphs.eager) == {"the first of its kind", "a prompt"}
    assert len(replayed) > 8
    assert set(replayed) > {2}


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.proofs), 0.8])
def test_trees_of_heads_without_memory(
    heads: Pair, emulator: Emulator, replayed: list[int], temperature: float
) -> None:
    """Beside a chain, and a sequence that drafts nothing."""
    params = replace(PARAMS, temperature=temperature, max_tokens=24, **LOOP)
    trees: tuple[tuple[int, ...] | None, ...] = ((2, 1), (2, 1), None, None, (2, 1))
    made = [
        Request(f"r{i}", tuple(range(20 + i, 29)), replace(params, seed=i), tree=tree, k=None if tree else 2 * (i % 2))
        for i, tree in enumerate(trees)
    ]
    graphs = check(heads, {0: made[:3], 7: made[3:]})
    assert set(graphs.eager) == {"the first of its kind", "a prompt"}
    assert len(replayed) > 4


def test_levels_whose_numbers_happen_to_be_equal_do_not_change_the_graph(
    pair: Pair, emulator: Emulator, replayed: list[int], tmp_path: Path
) -> None:
    """Beside a tree that goes four drafts deep, chains of other lengths have other rows of padding."""
    saved = save_heads(tmp_path / "heads", random_mlp(count=4), **mlp_config(count=4))
    params = replace(PARAMS, max_tokens=16, **LOOP)
    arrivals = {
        24 * n: [
            Request(f"tree{n}", (20, 21, 22), replace(params, seed=n), tree=(1, 1, 1, 2)),
            Request(f"chain{n}", (21, 22, 23), replace(params, seed=9 + n), k=k),
        ]
        for n, k in enumerate((3, 2, 1))
    }
    run(Pair(pair.target, str(saved)), arrivals, max_spec_length=5, block_size=32).check()
    assert len(replayed) > 8


def test_trees_of_heads_that_grow_are_drawn_operation_by_operation(
    heads: Pair, emulator: Emulator, replayed: list[int]
) -> None:
    params = replace(PARAMS, max_tokens=24, **LOOP)
    made = [Request(f"r{i}", (20, 21, 22), replace(params, seed=i), tree=Growth(4, 2)) for i in range(2)]
    check(heads, {0: made}, parts=1)
    assert not replayed
    assert emulator.replays > 4


def test_graphs_are_not_those_of_heads_that_were_replaced(
    pair: Pair, emulator: Emulator, replayed: list[int], tmp_path: Path
) -> None:
    first = save_heads(tmp_path / "first", random_medusa(), medusa_num_heads=3)
    second = save_heads(tmp_path / "second", random_mlp(), **mlp_config())
    owners, drafted = list[set[int]](), list[int]()

    def act(engine: Engine, step: int) -> None:
        graphs = engine.target.staging.graphs
        if step != 8:
            return
        if graphs is not None:
            owners.append({owner for owner, _ in graphs._graphs})
            drafted.append(len(replayed))
        engine.put_draft(engine.load_draft(str(second))).release()
        if graphs is not None:
            owners.append({owner for owner, _ in graphs._graphs})

    made = [Request(f"r{i}", (20, 21, 22), replace(PARAMS, seed=i, max_tokens=40, **LOOP), k=3) for i in range(2)]
    both = run(Pair(pair.target, str(first)), made, act=act)
    both.check()
    before, after = owners
    assert len(before) == 2, "those of the target and of the heads"
    assert after == {owner for owner in before if owner >= 0}
    assert len(replayed) > drafted[0] > 0


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
        head._states._tensor = torch.zeros_like(head._states.tensor)
        return draw(chains)

    patch.setattr(CapturedChains, "_draw", drawing)


@pytest.mark.parametrize("heads", ["medusa"], indirect=True)
def test_a_fault_of_heads_without_memory_is_seen(heads: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    draw = CapturedHeads.propose

    def proposing(part: CapturedHeads) -> Draft:
        part._rows.tensor.copy_(part._rows.tensor.flip(0))
        return draw(part)

    monkeypatch.setattr(CapturedHeads, "propose", proposing)
    with pytest.raises(AssertionError, match="the texts differ"):
        check(heads, requests("rejection", **LOOP))


@pytest.mark.parametrize("fault", [states_of_another_sequence, *in_proofs(the_same_state_for_all)])
def test_a_fault_is_seen(eagle: Pair, emulator: Emulator, fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="the texts differ"):
        check(eagle, requests("rejection"))
