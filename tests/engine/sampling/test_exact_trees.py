"""Rejection over draft trees emits exactly p: every draft, coin and emitted token enumerated in fp64.

Siblings may be drawn with or without replacement, by several models, or be certain. Each promise has a fault beside it
that breaks it.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor

from engine import trees
from engine.device.staging import RoundNumbers, Staging
from engine.sampling import acceptance, tree_acceptance
from engine.sampling.tree_acceptance import TreeLaw, TreeTable
from engine.trees import ROOT, Parents
from tests.engine.enumeration import (
    EXACT,
    KINDS,
    NOTHING,
    VOCAB,
    Tree,
    batch_of,
    completed,
    is_draft,
    pairs,
    random_tree,
    starts_of,
    subtree,
    target_law,
)
from tests.engine.tree_enumeration import (
    CHILD_LAWS,
    ChildLaw,
    TreeStart,
    all_orders,
    all_shapes,
    drafts_of,
    likeliest,
    starts_over,
    tree_emissions,
    with_replacement,
    without_replacement,
    worst_of_trees,
)

SMALL = [shape for size in range(4) for shape in all_shapes(size)]
CPU = torch.device("cpu")
every_law = pytest.mark.parametrize("children", sorted(CHILD_LAWS))
some_kinds = pytest.mark.parametrize(
    "kind", ["random", "zeros in both", "both near one-hot", "p is q but for rounding"]
)
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


@every_law
def test_one_round_emits_p(children: str) -> None:
    """All shapes of up to three nodes and all kinds of laws in one ragged batch; NaN wherever there is no draft."""
    assert worst_of_trees([start for kind in KINDS for start in starts_over(SMALL, kind, children)]) < EXACT


@every_law
def test_larger_trees_emit_p(children: str) -> None:
    """Six nodes: four siblings in two orders, two siblings on each of two levels, two chains, a chain beside leaves."""
    shapes = [(-1, -1, 1, 1, -1, -1), (-1, 0, 0, -1, 3, 3), (-1, -1, 0, 1, 2, 3), (-1, 0, 1, -1, -1, 1)]
    assert worst_of_trees(list(starts_over(shapes, "zeros in both", children))) < EXACT


@pytest.mark.proofs
@every_law
@every_kind
def test_all_shapes_emit_p(kind: str, children: str) -> None:
    """All shapes of up to six nodes, depth first; up to five nodes in every order."""
    for size in range(1, 7):
        shapes = all_shapes(size) if size > 5 else all_orders(size)
        for first in range(0, len(shapes), 32):
            assert worst_of_trees(list(starts_over(shapes[first : first + 32], kind, children))) < EXACT


def test_the_shapes_are_all_there_are() -> None:
    """Ordered trees by their size: the Catalan numbers, without those of more than three levels."""
    assert [len(all_shapes(size, height=9)) for size in range(7)] == [1, 1, 2, 5, 14, 42, 132]
    assert [len(all_shapes(size)) for size in range(7)] == [1, 1, 2, 5, 13, 34, 89]
    assert [len(all_orders(size, height=9)) for size in range(6)] == [1, 1, 2, 6, 24, 120]


def test_a_node_comes_after_its_younger_cousins() -> None:
    """Nodes in every order, siblings between the nodes of other branches."""
    assert worst_of_trees(list(starts_over(all_orders(4)[::2], "zeros in q", "without replacement"))) < EXACT


# Two rounds


FIRST = ((ROOT, 0, ROOT, 0), (ROOT, ROOT, 1, 1), (ROOT, 0, 0, ROOT), (ROOT, ROOT, ROOT))  # trees of a first round


def two_rounds(kind: str, children: str, first_shape: Parents) -> float:
    """The largest error of any text's probability after two rounds, whose second tree depends on what was emitted."""
    ((p, q),) = pairs(kind, 1, depth=6)
    generator = torch.Generator().manual_seed(7)
    length, masses = 6, [torch.zeros(VOCAB**n, dtype=torch.float64) for n in range(7)]
    places, starts = [], []
    first = TreeStart(p, first_shape, CHILD_LAWS[children](q, generator))
    for n, part in enumerate(tree_emissions([first]), 1):
        for text in part[0].nonzero()[:, 0].tolist():
            shape = ((ROOT, ROOT), (ROOT,), (), (ROOT, 0, 0), (ROOT, ROOT, 1))[(n + text) % 5]
            places.append((n, text, part[0, text]))
            drawn = CHILD_LAWS[children](random_tree(generator, 2, zeros=0.2), generator)
            starts.append(TreeStart(subtree(p, n, text, 3), shape, drawn))
    for m, part in enumerate(tree_emissions([*starts, first]), 1):  # beside another, so that not all can be empty
        for (n, text, mass), row in zip(places, part[:-1], strict=True):
            masses[n + m].view(VOCAB**n, -1)[text] += mass * row
    return (completed(masses, p, length) - target_law(p, length)).abs().max().item()


@pytest.mark.parametrize("first", FIRST, ids=str)
@every_law
def test_two_rounds_emit_p(children: str, first: Parents) -> None:
    assert two_rounds("zeros in both", children, first) < EXACT


@pytest.mark.proofs
@every_law
@every_kind
def test_two_rounds_emit_p_whatever_the_first_tree(kind: str, children: str) -> None:
    """All trees of one to four nodes and at most two levels."""
    for shape in (shape for size in range(1, 5) for shape in all_shapes(size, height=2)):
        assert two_rounds(kind, children, shape) < EXACT, shape


def test_a_fault_in_one_of_two_rounds_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_the_residual_between_siblings(monkeypatch)
    assert min(two_rounds("random", "with replacement", first) for first in FIRST) > 1e-3


# A chain is a tree


@every_kind
def test_a_chain_given_as_a_tree_decides_as_the_chain(kind: str) -> None:
    """The same chances, overlaps and weights to the last bit, with k = 0 … 3 and lenience."""
    batch = batch_of([replace(start, lenience=0.7 if n % 3 else 1.0) for n, start in enumerate(starts_of(kind))])
    table = TreeTable.of([trees.chain(k) for k in batch.ks], RoundNumbers(Staging(CPU)))
    law = tree_acceptance.rejection(batch.logp, batch.logq, batch.drafts, table, batch.leniences)
    chain = acceptance.rejection(batch.logp, batch.logq, batch.drafts, batch.ks, batch.leniences)
    assert torch.equal(law.chances, chain.chances)
    within = is_draft(batch.ks, CPU)
    overlaps = acceptance.overlaps(batch.logp, batch.logq, batch.leniences)
    assert torch.equal(law.overlaps[within], overlaps[within])
    for pattern in itertools.product((0.1, 0.9), repeat=3):
        coins = torch.tensor(pattern, dtype=torch.float64)
        last = tree_acceptance.walk(coins < law.chances, table)[:, -1]
        assert torch.equal(last, acceptance.first_failure(chain.chances, coins))
        weights = tree_acceptance.emitted_law(law, batch.logq, table, last)
        assert torch.equal(weights, acceptance.emitted_law(batch.logp, batch.logq, chain.log_scales, last, batch.ks))


# How much is accepted


def accepted_first(start: TreeStart) -> float:
    return 1 - tree_emissions([start])[0][0].sum().item()


@some_kinds
def test_certain_children_are_accepted_with_the_sum_of_their_probabilities(kind: str) -> None:
    """As if the target drew its token and went down where a child has it: no law accepts more of a fixed set."""
    for p, q in pairs(kind, 4, depth=2):
        for width in (1, 2):
            start = TreeStart(p, (ROOT,) * width, likeliest(q))
            best = q[0][0].argsort(descending=True, stable=True)[:width]
            assert accepted_first(start) == pytest.approx(p[0][0, best].exp().sum().item(), abs=EXACT)
            twice = TreeStart(p, (ROOT,) * (width + 1), start.drawn, fixed=(*best.tolist(), int(best[0])))
            assert accepted_first(twice) == pytest.approx(accepted_first(start), abs=EXACT)


@some_kinds
def test_more_siblings_are_accepted_more_often(kind: str) -> None:
    """The first with Σ min(p, q), as in a chain; without replacement at least as often as with it, for these laws."""
    gains = []
    for p, q in pairs(kind, 6, depth=2):
        first = torch.minimum(p[0], q[0]).exp().sum().item()
        found = [accepted_first(TreeStart(p, (ROOT,) * width, without_replacement(q))) for width in (1, 2, 3)]
        assert found[0] == pytest.approx(first, abs=EXACT)
        assert sorted(found) == pytest.approx(found, abs=EXACT)
        gains.append(found[1] - accepted_first(TreeStart(p, (ROOT, ROOT), with_replacement(q))))
    if kind == "random":
        assert max(gains) > 0.01


@every_law
def test_overlaps_are_the_chances_of_the_siblings_that_are_tried(children: str) -> None:
    """Summed over the drafts of a node: Σ min(P_r, q_r), given the siblings before it and their rejection."""
    for start in (next(starts_over([(ROOT, ROOT, ROOT)], kind, children, depth=2)) for kind in KINDS):
        batch = drafts_of([start])
        table = TreeTable.of(batch.shapes, RoundNumbers(Staging(CPU)))
        law = tree_acceptance.rejection(batch.logp, batch.logq, batch.drafts, table, batch.leniences)
        before = torch.zeros(len(batch.drafts), dtype=torch.int64)
        for rank in range(3):
            none = torch.zeros(VOCAB**rank, dtype=torch.float64)
            accepted = none.index_add(0, before, batch.masses * law.chances[:, rank])
            told = none.index_add(0, before, batch.masses * law.overlaps[:, rank] / acceptance.OVERLAP_SCALE)
            assert torch.allclose(accepted, told, rtol=0, atol=1e-6)
            before = before * VOCAB + batch.drafts[:, rank]


# Lenience


@every_law
def test_lenience_accepts_more_and_stays_below_its_bound(children: str) -> None:
    """Every token is at most 1/l times as likely as under p, whatever came before it."""
    shapes = [(ROOT, ROOT), (ROOT, 0, ROOT, 0), (ROOT, ROOT, ROOT)]
    for lenience in (0.5, 0.25):
        exact = [start for kind in KINDS for start in starts_over(shapes, kind, children)]
        starts = [replace(start, lenience=lenience) for start in exact]
        emitted, plain = tree_emissions(starts), tree_emissions(exact)
        assert (emitted[0].sum(1) <= plain[0].sum(1) + EXACT).all()
        for i, start in enumerate(starts):
            parts = emitted[: max(trees.depths(start.parents)) + 1]
            law = completed([NOTHING, *(part[i] for part in parts)], start.p, len(parts))
            assert law.sum() == pytest.approx(1, abs=EXACT)
            for n in range(1, len(parts) + 1):
                mass = law.view(VOCAB**n, -1).sum(1).view(-1, VOCAB)
                assert (mass <= mass.sum(1, keepdim=True) * start.p[n - 1].exp() / lenience + EXACT).all()


def test_lenience_changes_the_law_and_only_its_own() -> None:
    starts = list(starts_over(SMALL[1:], "random", "with replacement"))
    assert worst_of_trees([replace(starts[2], lenience=0.5), *starts]) > 1e-3
    assert worst_of_trees(starts) < EXACT


# Drafts that are no draws


def test_ids_that_are_no_tokens() -> None:
    """They are never accepted, nor is anything below them; their siblings decide as if they were not there."""
    shape = (ROOT, ROOT, 1)
    drafts = [x for x in itertools.product([-1, 0, 1, VOCAB], repeat=3) if any(not 0 <= t < VOCAB for t in x)]
    starts = [
        TreeStart(p, shape, with_replacement(q), fixed=x)
        for x, (p, q) in zip(drafts, pairs("random", len(drafts)), strict=True)
    ]
    assert worst_of_trees(starts) < EXACT
    emitted = tree_emissions(starts)
    for i, x in enumerate(drafts):
        legal = {t for t in x[:2] if 0 <= t < VOCAB}
        expected = starts[i].p[0][0, list(legal)].exp().sum()
        assert abs(1 - emitted[0][i].sum() - expected) < EXACT


# Faults, each of which must break the law

Fault = Callable[[pytest.MonkeyPatch], None]
walk, rejection = tree_acceptance.walk, tree_acceptance.rejection


def skip_the_residual_between_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sibling is tried against p."""

    def plain(logp: Tensor, logq: Tensor, drafts: Tensor, table: TreeTable, lenience: Tensor) -> TreeLaw:
        whole = rejection(logp, logq, drafts, table, lenience)
        p = logp.gather(1, table.parent_rows.clamp(min=0)[..., None].expand(-1, -1, logp.shape[-1]))
        chances = acceptance.log_ratios(p, logq, drafts).clamp(max=0).exp()
        return replace(whole, chances=torch.where(table.parent_rows < 0, 0.0, chances))

    monkeypatch.setattr(tree_acceptance, "rejection", plain)


def skip_the_residual_after_the_last_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    def remaining(law: TreeLaw, logq: Tensor, table: TreeTable, last: Tensor) -> Tensor:
        return law.remaining[torch.arange(len(last)), last]

    monkeypatch.setattr(tree_acceptance, "emitted_law", remaining)


def take_the_residual_of_the_first_sibling_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(law: TreeLaw, logq: Tensor, table: TreeTable, last: Tensor) -> Tensor:
        n, child = torch.arange(len(last)), table.last_children[torch.arange(len(last)), last]
        p = law.remaining[n, last]
        removed = p.scatter(1, logq[n, child.clamp(min=0)].argmax(1, keepdim=True), -inf)
        return torch.where((child >= 0)[:, None], removed, p)

    monkeypatch.setattr(tree_acceptance, "emitted_law", once)


def go_down_below_a_rejected_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that passes is reached through its parent's sibling too."""

    def careless(passes: Tensor, table: TreeTable) -> Tensor:
        visited = walk(passes, table)
        below = (passes & (table.parent_rows > 0)).byte()
        return torch.where(below.bool().any(1, keepdim=True), below.argmax(1, keepdim=True) + 1, visited)

    monkeypatch.setattr(tree_acceptance, "walk", careless)


def try_the_last_sibling_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(passes: Tensor, table: TreeTable) -> Tensor:
        size = passes.shape[1]
        flipped = replace(table, parent_rows=table.parent_rows.flip(1))
        row = torch.zeros(len(passes), dtype=torch.int64)
        for _ in range(table.height):
            goes = passes.flip(1) & (flipped.parent_rows == row[:, None])
            row = torch.where(goes.any(1), size - goes.byte().argmax(1), row)
        return row[:, None]

    monkeypatch.setattr(tree_acceptance, "walk", backwards)


def compare_with_the_wrong_rows_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """p of the row before, as if the tree were a chain."""

    def shifted(logp: Tensor, logq: Tensor, drafts: Tensor, table: TreeTable, lenience: Tensor) -> TreeLaw:
        chain = acceptance.rejection(logp, logq, drafts, (table.parent_rows >= 0).sum(1).tolist(), lenience)
        return replace(rejection(logp, logq, drafts, table, lenience), chances=chain.chances.nan_to_num(0.0))

    monkeypatch.setattr(tree_acceptance, "rejection", shifted)


FAULTS: Seq[Fault] = (
    skip_the_residual_between_siblings,
    skip_the_residual_after_the_last_sibling,
    take_the_residual_of_the_first_sibling_only,
    go_down_below_a_rejected_node,
    try_the_last_sibling_first,
    compare_with_the_wrong_rows_law,
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_a_fault_of_the_verifier_shows(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = list(starts_over([(ROOT, ROOT, 0, 1)] * 3, "random", "with replacement"))
    assert worst_of_trees(starts) < EXACT
    fault(monkeypatch)
    assert worst_of_trees(starts) > 1e-3


def drawn_twice(q: Tree) -> ChildLaw:
    """Every sibling is the first one again."""

    def law(depth: int, code: Tensor, before: Tensor) -> Tensor:
        first = q[depth][code]
        return torch.full_like(first, -inf).scatter(1, before[:, :1], 0.0) if before.shape[1] else first

    return law


@pytest.mark.parametrize("shape", [(ROOT, ROOT), (ROOT, ROOT, 0, 0)])
@pytest.mark.parametrize("drawn", [without_replacement, drawn_twice])
def test_a_sibling_whose_law_is_not_conditioned_on_those_before_it_shows(
    drawn: Callable[[Tree], ChildLaw], shape: Parents
) -> None:
    starts = [TreeStart(p, shape, drawn(q)) for p, q in pairs("random", 3)]
    claims = [TreeStart(p, shape, drawn(q), claimed=with_replacement(q)) for p, q in pairs("random", 3)]
    assert worst_of_trees(starts) < EXACT
    assert worst_of_trees(claims) > 1e-3


def test_the_sum_over_texts_is_one() -> None:
    """The yardstick itself: a round without drafts is p, and nothing is lost in a tree."""
    (start,) = starts_over([(ROOT, 0, ROOT)], "random", "with replacement")
    plain = tree_emissions([replace(start, parents=()), start])
    assert torch.allclose(plain[0][0], start.p[0][0].exp(), rtol=0, atol=EXACT)
    assert sum(part[1].sum().item() for part in plain) == pytest.approx(1, abs=EXACT)
