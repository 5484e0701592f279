"""Captured rounds whose drafts are trees: one graph verifies all shapes of as many nodes, and moves what it accepts."""

import random
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from engine.device.captured_round import CapturedVerdict
from engine.device.captured_trees import CapturedTrees
from engine.device.staging import Staging
from engine.drafters import lookup
from engine.drafters.base import Draft
from engine.drafters.branching import draw_tree
from engine.drafters.captured_tree_draft import CapturedTreeDraft
from engine.engine import Engine
from engine.kernels.verdict import match_verdict
from engine.models.padded_pass import PaddedPlans
from engine.models.paged_attention import PagedTrees
from engine.trees import Growth, Parents, branching
from engine.types import DrafterName, Request
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.heads.fitted import random_medusa, save_heads
from tests.engine.models.families import CASES, WINDOW, random_checkpoint
from tests.engine.pairs import Pair
from tests.engine.shadow.counting import Counts
from tests.engine.shadow.device import active
from tests.engine.shadow.emulator import Emulator
from tests.engine.shadow.test_graphs import PARAMS, run
from tests.examples import in_proofs

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("unmeasured")
OF_FOUR = ((2, 1), (4,), (1, 3), (1, 1, 2), (1, 1, 1, 1))  # children of each draft by depth: four drafts
SHAPES = (*OF_FOUR, (1, 2), (3,), (2,))


@dataclass(slots=True)
class Watch:
    """The verdicts about trees that an engine with graphs asked for."""

    asked: Counter[Hashable] = field(default_factory=Counter)  # by key
    buckets: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # (sequences, drafts) → keys
    shapes: dict[Hashable, set[tuple[Parents, ...]]] = field(default_factory=dict)  # by key
    replays: int = 0
    drafts: Counter[Hashable] = field(default_factory=Counter)  # of trees by a draft model, by key
    drawn: int = 0  # of them by replays
    drawn_buckets: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # rows and siblings by level → keys
    drawn_shapes: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # by key

    def install(self, patch: Patch) -> None:
        execute, propose = CapturedVerdict.run, CapturedTreeDraft.propose

        def proposing(part: CapturedTreeDraft) -> Draft:
            self.drafts[part._key] += 1
            trees = part._draws.trees
            widths = [draw.coupled and draw.coupled.width for draw in trees._draws]
            bucket = len(trees.shapes), trees.size, tuple(map(len, trees.levels)), tuple(widths), part._gap._width
            self.drawn_buckets.setdefault(bucket, set()).add(part._key)
            self.drawn_shapes.setdefault(part._key, set()).add(tuple(trees.shapes.items()))
            graphs = part._runner.staging.graphs
            assert graphs is not None
            before = graphs.replays
            draft = propose(part)
            self.drawn += graphs.replays - before
            return draft

        patch.setattr(CapturedTreeDraft, "propose", proposing)

        def running(part: CapturedVerdict, draft: Draft) -> Any:
            if part.trees is not None:
                self.asked[part._key] += 1
                self.buckets.setdefault((part._size, part._depth), set()).add(part._key)
                self.shapes.setdefault(part._key, set()).add(tuple(part._shapes.values()))
            graphs = part._target.staging.graphs
            assert graphs is not None
            before = graphs.replays
            result = execute(part, draft)
            self.replays += graphs.replays - before if part.trees is not None else 0
            return result

        patch.setattr(CapturedVerdict, "run", running)


@pytest.fixture
def watch(monkeypatch: Patch) -> Watch:
    watch = Watch()
    watch.install(monkeypatch)
    return watch


def random_requests(count: int) -> dict[int, list[Request]]:
    """Trees and chains beside each other, of several drafters. Some rows see the drafts on their paths."""
    choose, step = random.Random(3), 0
    arrivals: dict[int, list[Request]] = {}
    for i in range(count):
        params = replace(
            PARAMS,
            seed=i,
            temperature=choose.choice([0.0, 0.7, 1.2]),
            top_p=choose.choice([1.0, 1.0, 0.8]),
            logprobs=choose.choice([None, None, 2]),
            max_tokens=choose.choice([12, 30]),
        )
        if i % 4 == 3:
            params = replace(params, frequency_penalty=1.5, bad_word_ids=((20, 21),))
        prompt = (*range(20, 26), *range(20, 20 + choose.randrange(1, 6)))
        drafter, tree = choose.choice(["model", "model", "model", "lookup"]), choose.choice([*SHAPES, None])
        k = 3 if tree is None else None
        request = Request(f"r{i}", prompt, params, drafter=drafter, tree=tree, k=k)  # type: ignore[arg-type]
        arrivals.setdefault(step, []).append(request)
        step += choose.choice([0, 0, 12])
    return arrivals


@pytest.mark.parametrize(("requests", "replays"), [(16, 25), pytest.param(60, 150, marks=pytest.mark.proofs)])
def test_rounds_with_trees_say_what_the_cpu_says(
    pair: Pair, emulator: Emulator, watch: Watch, requests: int, replays: int
) -> None:
    both = run(pair, random_requests(requests), max_running=4, kv_tokens=1600)
    both.check()
    both.check_drafts()
    assert watch.replays >= replays
    assert watch.replays == sum(n - 1 for n in watch.asked.values()), "a key was captured twice, or never"


def requests_of_four_nodes(
    apart: int, shapes: Seq[tuple[int, ...]] = OF_FOUR, **fields: Any
) -> dict[int, list[Request]]:
    """So many steps apart."""
    params = replace(PARAMS, max_tokens=20, **fields)
    return {
        apart * i: [Request(f"r{i}", (*range(20, 24),), replace(params, seed=i), tree=shape)]
        for i, shape in enumerate(shapes)
    }


@pytest.mark.parametrize(
    "fields", [{}, *in_proofs({"temperature": 0.0, "frequency_penalty": 1.0, "bad_word_ids": ((20, 21),)})]
)
def test_one_graph_verifies_all_shapes_of_as_many_nodes(
    pair: Pair, emulator: Emulator, watch: Watch, fields: dict[str, Any]
) -> None:
    run(pair, requests_of_four_nodes(24, **fields), block_size=32).check()
    assert len(watch.buckets[1, 4]) == 1, "the key depends on more than the number of nodes"
    (key,) = watch.buckets[1, 4]
    assert len(watch.shapes[key]) == len(OF_FOUR) - 1, "a tree of one branch is a chain"
    assert watch.replays > 12


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_eagle_pair(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(params=["eagle head", *in_proofs("draft model")])
def served(pair: Pair, eagle: Pair, request: pytest.FixtureRequest) -> Pair:
    return pair if request.param == "draft model" else eagle


def test_a_replayed_round_with_trees_crosses_twice_and_asks_for_few_operations(
    served: Pair, eagle: Pair, emulator: Emulator
) -> None:
    """The graph of the drafts, two copies of its result, and the graph of the verdict. Three more move what a draft
    model's memory holds of the accepted nodes."""
    rounds, before, replays = list[tuple[int, Counts]](), Counts(), 0

    def act(engine: Engine, step: int) -> None:
        nonlocal before, replays
        if engine.config.graphs:
            counts = active().counts.copy()
            rounds.append((emulator.replays - replays, counts.since(before)))
            before, replays = counts, emulator.replays

    requests = [Request(f"r{i}", (20 + i, 21), replace(PARAMS, seed=i, max_tokens=24), tree=(2, 1)) for i in range(2)]
    run(served, requests, act=act, block_size=32).check()
    replayed = [counts for graphs, counts in rounds if graphs == 2]
    assert len(replayed) > 2
    found = {(counts.uploads, counts.downloads, counts.stalls, counts.inside, counts.outside) for counts in replayed}
    assert (
        1,
        1,
        1,
        0,
        4 if served is eagle else 7,
    ) in found  # a round that captures a graph also counts the operations of the capture
    assert all(counts[:3] == (1, 1, 1) for counts in found)


@pytest.mark.parametrize("fields", [*in_proofs({}), {"frequency_penalty": 1.0, "bad_word_ids": ((20, 21),)}])
def test_trees_are_drawn_by_a_graph(served: Pair, emulator: Emulator, watch: Watch, fields: dict[str, Any]) -> None:
    """Trees of several shapes and a chain, of sequences that come and go."""
    arrivals = requests_of_four_nodes(3, (*OF_FOUR[:3], (1, 1), *OF_FOUR[:2]), **fields)
    arrivals[4] = [Request("chain", (20, 21), replace(PARAMS, seed=9, max_tokens=40), k=3)]
    both = run(served, arrivals, block_size=32, max_running=3)
    both.check()
    both.check_drafts()
    assert watch.drawn == sum(n - 1 for n in watch.drafts.values())
    assert watch.drawn > 8


def test_one_graph_draws_trees_whose_levels_are_as_wide(served: Pair, emulator: Emulator, watch: Watch) -> None:
    """A tree beside a chain, and a chain beside a tree."""
    params = replace(PARAMS, max_tokens=20)
    tree: dict[str, Any] = {"tree": (2, 1)}
    chain: dict[str, Any] = {"k": 2}
    requests = [
        Request(f"r{i}", (20, 21, 22), replace(params, seed=i), **how)
        for i, how in enumerate((tree, chain, chain, tree))
    ]
    both = run(served, {0: requests[:2], 24: requests[2:]}, block_size=32)
    both.check()
    both.check_drafts()
    assert max(map(len, watch.drawn_shapes.values())) > 1
    assert {len(keys) for keys in watch.drawn_buckets.values()} == {1}, "the key depends on more than the levels"


@pytest.fixture
def free_guesses(monkeypatch: Patch) -> None:
    """Guessers draw trees of another shape than the one that is wanted: they may leave out nodes, too."""
    wider = branching((3, 1))

    def draw(root: Any, following: Any, nodes: int, shape: Parents) -> tuple[list[int], Parents]:
        return draw_tree(root, following, nodes, wider[: len(shape)])

    monkeypatch.setattr(lookup, "draw_tree", draw)


def unforeseen(drafter: DrafterName) -> list[Request]:
    loop = ((20, 30.0), (21, 30.0), (22, 30.0))  # a bias towards three tokens: guesses from the text come true
    params = replace(PARAMS, max_tokens=40, temperature=2.0, logit_bias=loop if drafter == "lookup" else ())
    how: dict[str, Any] = {"tree": (2, 2)} if drafter == "lookup" else {"k": 4}
    return [Request(f"r{i}", (20, 21, 22) * 2, replace(params, seed=i), drafter=drafter, **how) for i in range(2)]


@pytest.mark.parametrize("drafter", [*in_proofs("merged"), "lookup"])
def test_trees_that_nobody_planned_are_verified_by_a_graph(
    pair: Pair, drafts: tuple[str, str], emulator: Emulator, watch: Watch, free_guesses: None, drafter: DrafterName
) -> None:
    """Several models' chains are merged, and a guesser's tree is not the one that was asked for."""
    both = run(pair, unforeseen(drafter), max_spec_length=6, **({"drafts": drafts} if drafter == "merged" else {}))
    both.check()
    both.check_drafts()
    assert watch.replays > 1
    assert len(set().union(*watch.shapes.values())) > 2


def growing() -> list[Request]:
    params = replace(PARAMS, max_tokens=30, frequency_penalty=0.5)
    return [Request(f"r{i}", (20 + i, 21), replace(params, seed=i), tree=Growth(4, 3)) for i in range(2)]


def test_trees_that_grow_are_verified_by_a_graph(pair: Pair, emulator: Emulator, watch: Watch) -> None:
    """What they read before differs from round to round."""
    both = run(pair, growing(), block_size=32)
    both.check()
    both.check_drafts()
    assert watch.replays > 4
    assert max(map(len, watch.shapes.values())) > 2


@pytest.mark.parametrize("tree", [(2, 1), *in_proofs(Growth(4, 3))])
def test_the_fixed_memory_holds_the_largest_round(pair: Pair, emulator: Emulator, tree: Any) -> None:
    """All sequences, the longest context, the most nodes, every filter, and penalties."""
    params = replace(PARAMS, max_tokens=50, top_p=0.9, top_k=5, min_p=0.01, frequency_penalty=0.5)
    requests = [Request(f"r{i}", (20 + i, 21), replace(params, seed=i), tree=tree) for i in range(3)]
    engines: list[Engine] = []
    run(pair, requests, act=lambda engine, step: engines.append(engine)).check()
    graphs = engines[-1].target.staging.graphs
    assert graphs is not None
    assert graphs.replays > 4
    assert "the fixed memory is too small" not in graphs.eager


@pytest.mark.parametrize("family", ["gemma2"])
def test_windows_cut_the_paths_of_captured_trees(tmp_path: Path, emulator: Emulator, watch: Watch, family: str) -> None:
    case = CASES[family]
    target = random_checkpoint(case, tmp_path / "target")
    served = Pair(target, random_checkpoint(case, tmp_path / "draft", seed=8, like=target))
    run(served, requests_of_four_nodes(3, temperature=0.3), block_size=5).check()
    assert watch.replays > 4


@pytest.mark.proofs
def test_windows_cut_the_paths_that_a_draft_model_reads(tmp_path: Path, emulator: Emulator, watch: Watch) -> None:
    """They are longer than the window, and longer than the levels are wide."""
    case = CASES["mistral"]
    target = random_checkpoint(case, tmp_path / "target")
    served = Pair(target, random_checkpoint(case, tmp_path / "draft", seed=8, like=target))
    params, deep = replace(PARAMS, temperature=0.3, max_tokens=48), (2, *[1] * (WINDOW + 2))
    settings: dict[str, Any] = {"max_spec_length": 24, "kv_tokens": 1600, "prefill_chunk": 100, "max_model_len": 96}
    run(served, [Request("deep", (20, 21, 22), params, tree=deep)], block_size=32, **settings).check()
    assert watch.drawn > 4


@pytest.mark.parametrize("how", [{"tree": (64,)}, *in_proofs({"k": 66, "drafter": "merged"})])
def test_trees_of_too_many_nodes_are_verified_operation_by_operation(
    pair: Pair, drafts: tuple[str, str], emulator: Emulator, watch: Watch, how: dict[str, Any]
) -> None:
    """Paged attention has a bit for each of 63 nodes."""
    settings = {"max_spec_length": 66, "max_model_len": 96, "kv_tokens": 1600, "prefill_chunk": 200}

    def act(engine: Engine, step: int) -> None:
        if step == 3:
            engine.cancel("wide")

    request = Request("wide", (20, 21, 22), replace(PARAMS, max_tokens=80), **how)
    both = run(pair, [request], act=act, drafts=drafts, **settings)
    both.check()
    assert both.shadow.run.drafted > 63
    assert all(len(shape) <= 63 for shapes in watch.shapes.values() for (shape,) in shapes)


@pytest.mark.parametrize("heads", [False, *in_proofs(True)])
def test_captures_that_fail_cost_the_graphs_only(pair: Pair, tmp_path: Path, monkeypatch: Patch, heads: bool) -> None:
    def refusing(memory: Any, region: Any, *, fresh: bool) -> Any:
        raise RuntimeError("no captures today")

    monkeypatch.setattr("engine.device.graphs.GraphMemory.capture", refusing)
    if heads:
        pair = Pair(pair.target, str(save_heads(tmp_path / "heads", random_medusa(), medusa_num_heads=3)))
    requests = [Request(f"r{i}", (20, 21), replace(PARAMS, seed=i, max_tokens=24), tree=(2, 1)) for i in range(2)]
    engines: list[Engine] = []
    both = run(pair, requests, block_size=32, act=lambda engine, step: engines.append(engine))
    graphs = engines[-1].target.staging.graphs
    assert graphs is not None
    assert (graphs.replays, graphs.stats["failed captures"]) == (0, 2)
    assert both.shadow.run.tokens == both.cpu.run.tokens
    assert both.shadow.run.accepted == both.cpu.run.accepted
    assert not any(step.draft_faults or step.failed for step in both.shadow.run.steps)


# --- faults ----------------------------------------------------------------------------------------------------------


def nothing_moves(patch: Patch) -> None:
    def deciding(trees: CapturedTrees, drawn: Any, finite: Any, drafts: Any, first_rows: Any) -> Any:
        parents = trees._numbers.tensor.view(3, trees._size, -1)[0]
        return match_verdict(drawn, finite, drafts, first_rows, parents)

    patch.setattr(CapturedTrees, "decide", deciding)


def nodes_without_their_paths(patch: Patch) -> None:
    put = PaddedPlans._put_trees

    def putting(plans: PaddedPlans, spans: Any, rows: int, windows: Any) -> PagedTrees:
        trees = put(plans, spans, rows, windows)
        return replace(trees, paths=plans._staging.ints([0] * (rows * len(spans))))

    patch.setattr(PaddedPlans, "_put_trees", putting)


def shapes_that_were_planned(patch: Patch) -> None:
    """Whatever was drafted."""
    patch.setattr(CapturedVerdict, "holds", lambda part, draft: True)


def unforeseen_numbers_anywhere(patch: Patch) -> None:
    """Behind the others, whose layout the key does not name."""
    begin = Staging.begin_last_part

    def beginning(staging: Staging) -> None:
        staging.send()
        used = staging._used
        begin(staging)
        staging._used = used

    patch.setattr(Staging, "begin_last_part", beginning)


def every_node_behind_the_first(patch: Patch) -> None:
    put = CapturedTreeDraft._put_level

    def putting(part: CapturedTreeDraft, number: int) -> Any:
        level = part._draws.trees.levels[number]
        return replace(put(part, number), parents=part._runner.staging.ints([0] * len(level)))

    patch.setattr(CapturedTreeDraft, "_put_level", putting)


def drafts_of_other_places(patch: Patch) -> None:
    put = CapturedTreeDraft._put_level

    def putting(part: CapturedTreeDraft, number: int) -> Any:
        level = part._draws.trees.levels[number]
        return replace(put(part, number), places=part._runner.staging.ints([1] * len(level)))

    patch.setattr(CapturedTreeDraft, "_put_level", putting)


def test_a_fault_of_a_draft_is_seen(eagle: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    """It changes what is accepted."""
    arrivals = {0: [Request(f"r{i}", (20, 21), replace(PARAMS, seed=i, max_tokens=40), tree=(2, 1)) for i in range(2)]}
    run(eagle, arrivals, block_size=32).check()
    for fault in (every_node_behind_the_first, drafts_of_other_places):
        with monkeypatch.context() as patch:
            fault(patch)
            both = run(eagle, arrivals, block_size=32)
        assert both.shadow.run.tokens == both.cpu.run.tokens
        assert both.shadow.run.accepted != both.cpu.run.accepted, fault.__name__


OTHER = "the texts differ"
FAULTS: list[tuple[Callable[[Patch], None], dict[int, list[Request]], str]] = [
    (nothing_moves, requests_of_four_nodes(3), OTHER),
    (nodes_without_their_paths, requests_of_four_nodes(3), OTHER),
    (shapes_that_were_planned, {0: unforeseen("lookup")}, OTHER),
    (unforeseen_numbers_anywhere, {0: growing()}, "IndexError"),
]


@pytest.mark.parametrize(
    ("fault", "requests", "told"),
    [
        pytest.param(*fault, marks=() if fault[0] is shapes_that_were_planned else pytest.mark.proofs)
        for fault in FAULTS
    ],
)
def test_a_fault_is_seen(
    pair: Pair,
    emulator: Emulator,
    fault: Callable[[Patch], None],
    requests: dict[int, list[Request]],
    told: str,
    free_guesses: None,
    monkeypatch: Patch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=told):
        run(pair, requests, block_size=32, max_spec_length=6).check()
