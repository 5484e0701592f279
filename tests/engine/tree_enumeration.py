"""The exact law of what a round over a draft tree emits: every draft, all coins and every emitted token, in fp64.

As enumeration.py, whose numbering of texts and trees of laws it uses.

The functions under test are called as verification.py calls them, on one ragged batch of all drafts of all shapes.
"""

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from engine import trees
from engine.device.staging import RoundNumbers, Staging
from engine.kernels.laws import NO_LAW, draft_laws
from engine.sampling import tree_acceptance
from engine.sampling.tree_acceptance import TreeTable
from engine.trees import ROOT, Parents
from tests.engine.enumeration import (
    JUNK,
    NOTHING,
    VOCAB,
    Tree,
    completed,
    number,
    pairs,
    random_tree,
    target_law,
    texts,
)

# (number of drafts on the parent's path, numbers of these paths [n], tokens of the siblings before [n, rank]) → the
# log-laws [n, vocab] that the sibling of this rank is drawn from.
ChildLaw = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TreeStart:
    """Where a round starts for one sequence, and how the nodes of its draft come about."""

    p: Tree  # as many levels as the tree's height, and one more
    parents: Parents
    drawn: ChildLaw
    claimed: ChildLaw | None = None  # what the drafter says they were drawn from; None: what they were
    fixed: tuple[int, ...] | None = None  # the one draft of a drafter that gives no laws; drawn is unused
    lenience: float = 1.0


@dataclass(frozen=True, slots=True)
class TreeDrafts:
    """All drafts of all starts; NaN in every law that a verifier has no business with."""

    logp: Tensor  # [N, K + 1, vocab]
    logq: Tensor  # [N, K, vocab]
    drafts: Tensor  # [N, K], within the vocabulary
    shapes: list[Parents]
    masses: Tensor  # [N] probability of the draft, given its start
    owners: Tensor  # [N] number of the start
    leniences: Tensor  # [N]


def with_replacement(q: Tree) -> ChildLaw:
    """SpecInfer: siblings are independent draws."""
    return several([q])


def several(models: Seq[Tree]) -> ChildLaw:
    """Sibling r is drawn from model r, then from the first one again."""
    return lambda depth, code, before: models[before.shape[1] % len(models)][depth][code]


def without_replacement(q: Tree) -> ChildLaw:
    """RSD: no token is drawn twice. Where none is left, the first sibling is repeated."""

    def law(depth: int, code: Tensor, before: Tensor) -> Tensor:
        left = q[depth][code].scatter(1, before, -inf)
        empty = (left == -inf).all(1, keepdim=True)
        repeated = torch.full_like(left, -inf).scatter(1, before[:, :1], 0.0) if before.shape[1] else left
        return torch.where(empty, repeated, left).log_softmax(1)

    return law


def one_hot(q: Tree, rank: int) -> Tree:
    """The law that is certain of q's likeliest token; rank: of the next ones."""
    ids = [law.argsort(dim=1, descending=True, stable=True)[:, rank : rank + 1] for law in q]
    return [torch.full_like(law, -inf).scatter(1, best, 0.0) for law, best in zip(q, ids, strict=True)]


def likeliest(q: Tree) -> ChildLaw:
    """EAGLE: the best tokens of q, which are certain."""
    return several([one_hot(q, rank) for rank in range(VOCAB)])


CHILD_LAWS: dict[str, Callable[[Tree, torch.Generator], ChildLaw]] = {
    "with replacement": lambda q, g: with_replacement(q),
    "without replacement": lambda q, g: without_replacement(q),
    "three models": lambda q, g: several([q, random_tree(g, len(q), zeros=0.3), random_tree(g, len(q), sharpness=4)]),
    "the likeliest tokens": lambda q, g: likeliest(q),
    "a model and guesses": lambda q, g: several([q, one_hot(random_tree(g, len(q)), 0), one_hot(q, 1)]),
}


def all_shapes(size: int, height: int = 3) -> list[Parents]:
    """All trees of `size` nodes up to this height, each in one order: depth first."""
    return [
        shape
        for shape in itertools.product(*(range(ROOT, node) for node in range(size)))
        if max(trees.depths(shape), default=0) <= height
        and all(parent in (node - 1, *_ancestors(shape, node - 1)) for node, parent in enumerate(shape) if node)
    ]


def all_orders(size: int, height: int = 3) -> list[Parents]:
    """All trees of `size` nodes up to this height, in every order of their nodes."""
    shapes = itertools.product(*(range(ROOT, node) for node in range(size)))
    return [shape for shape in shapes if max(trees.depths(shape), default=0) <= height]


def _ancestors(shape: Parents, node: int) -> list[int]:
    return [ROOT, *trees.path(shape, node)[:-1]]


def drafts_of(starts: Seq[TreeStart]) -> TreeDrafts:
    size = max(len(start.parents) for start in starts)
    parts = [_rows(start, size) for start in starts]
    drafts, masses, logp, claimed = (torch.cat(column) for column in zip(*parts, strict=True))
    counts = [len(part[0]) for part in parts]
    owners = torch.arange(len(starts)).repeat_interleave(torch.tensor(counts))
    shapes = [starts[i].parents for i in owners.tolist()]
    ks = tuple(map(len, shapes))
    rows = torch.tensor([n if starts[i].fixed is None else NO_LAW for n, i in enumerate(owners.tolist())])
    logq = draft_laws(claimed, rows, drafts, logp)
    logq[torch.arange(size) >= torch.tensor(ks)[:, None]] = nan
    leniences = torch.tensor([starts[i].lenience for i in owners.tolist()])
    return TreeDrafts(logp, logq, drafts.clamp(0, VOCAB - 1), shapes, masses, owners, leniences)


def _rows(start: TreeStart, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(drafts [n, size], masses [n], logp [n, size + 1, vocab], claimed laws [n, size, vocab]): its possible drafts."""
    shape = start.parents
    k = len(shape)
    x = texts(k) if start.fixed is None else torch.tensor([start.fixed], dtype=torch.int64).view(1, k)
    mass = torch.ones(len(x), dtype=torch.float64)
    logp = torch.full((len(x), size + 1, VOCAB), nan, dtype=torch.float64)
    claimed = torch.full((len(x), size, VOCAB), nan, dtype=torch.float64)
    logp[:, 0] = start.p[0]
    for node, parent in enumerate(shape):
        above, own = trees.path(shape, parent), trees.path(shape, node)
        before = [n for n in range(node) if shape[n] == parent]
        logp[:, node + 1] = start.p[len(own)][number(x[:, own])]
        if start.fixed is None:
            given = (len(above), number(x[:, above]), x[:, before])
            claimed[:, node] = (start.claimed or start.drawn)(*given)
            mass = mass * start.drawn(*given).gather(1, x[:, node : node + 1])[:, 0].exp()
    drafts = torch.nn.functional.pad(x, (0, size - k), value=JUNK)
    possible = mass > 0
    return drafts[possible], mass[possible], logp[possible], claimed[possible]


def tree_emissions(starts: Seq[TreeStart]) -> list[Tensor]:
    """Entry a [S, vocab^(a + 1)]: the probability that the round emits exactly this text, a drafts and one token."""
    batch = drafts_of(starts)
    table = TreeTable.of(batch.shapes, RoundNumbers(Staging(batch.logp.device)))
    law = tree_acceptance.rejection(batch.logp, batch.logq, batch.drafts, table, batch.leniences)
    chance = _ends(law.chances, table)
    sizes, heights = (
        torch.tensor([len(s) for s in batch.shapes]),
        [max(trees.depths(s), default=0) for s in batch.shapes],
    )
    result = [torch.zeros(len(starts) * VOCAB**n, VOCAB, dtype=torch.float64) for n in range(max(heights) + 1)]
    for row in range(batch.drafts.shape[1] + 1):
        weights = tree_acceptance.emitted_law(law, batch.logq, table, torch.full_like(sizes, row).minimum(sizes))
        masses = (batch.masses * chance[:, row])[:, None] * weights.softmax(1)
        for shape in dict.fromkeys(s for s in batch.shapes if len(s) >= row):
            picked = torch.tensor([s == shape for s in batch.shapes])
            nodes = trees.path(shape, row - 1)
            places = batch.owners[picked] * VOCAB ** len(nodes) + number(batch.drafts[picked][:, nodes])
            result[len(nodes)].index_add_(0, places, masses[picked])
    return [part.view(len(starts), -1) for part in result]


def _ends(chances: Tensor, table: TreeTable) -> Tensor:
    """[N, K + 1]: how likely the round ends at each row, over independent uniform coins."""
    result = torch.zeros(len(chances), chances.shape[1] + 1, dtype=torch.float64)
    for pattern in itertools.product((True, False), repeat=chances.shape[1]):
        below = torch.tensor(pattern, dtype=torch.bool)
        coins = torch.where(below, chances / 2, chances)
        weights = torch.where(below, chances, 1 - chances).prod(1)
        last = tree_acceptance.walk(coins < chances, table)[:, -1:]
        result.scatter_add_(1, last, weights[:, None])
    return result


def worst_of_trees(starts: Seq[TreeStart]) -> float:
    """The largest error of any text's probability, over all starts. A NaN is an infinite error."""
    emitted = tree_emissions(starts)
    errors = []
    for i, start in enumerate(starts):
        parts = emitted[: max(trees.depths(start.parents), default=0) + 1]
        law = completed([NOTHING, *(part[i] for part in parts)], start.p, len(parts))
        errors.append((law - target_law(start.p, len(parts))).abs().nan_to_num(inf).max().item())
    return max(errors)


def starts_over(shapes: Seq[Parents], kind: str, children: str, depth: int = 4) -> Iterator[TreeStart]:
    """A start for each shape, with laws of its own."""
    generator = torch.Generator().manual_seed(len(kind) + 31 * len(children))
    for shape, (p, q) in zip(shapes, pairs(kind, len(shapes), depth), strict=True):
        yield TreeStart(p, shape, CHILD_LAWS[children](q, generator))
