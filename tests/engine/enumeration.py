"""The exact law of what a round emits: every draft, every outcome of the coins and every emitted token, in fp64.

Texts of n tokens are numbered 0 … vocab^n − 1 in base `vocab`. A tree of laws is a list: entry n holds the log-laws
[vocab^n, vocab] of the token after each text of n tokens. The verifier under test is called as verification.py calls
it, on one ragged batch of all drafts; only the uniform numbers are integrated over, and the emitted token summed over.
"""

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf, log, nan

import torch
from torch import Tensor

from engine.kernels.laws import NO_LAW, draft_laws
from engine.sampling import acceptance
from engine.sampling.ragged import Lengths, lengths
from engine.types import Verifier

VOCAB = 3
EXACT = 1e-12
JUNK = -99  # a draft beyond a sequence's k

Tree = list[Tensor]
Cut = Callable[[Tensor], Tensor]


def is_draft(ks: Lengths, device: torch.device) -> Tensor:
    """[N, K] bool: whether the entry is one of the sequence's k drafts."""
    known = lengths(ks, device)
    return torch.arange(int(known.max()), device=device) < known[:, None]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a round starts for one sequence: the laws from there on, and how its drafts come about."""

    p: Tree  # k + 1 levels at least
    q: Tree  # k levels at least: what its drafts are really drawn from
    k: int
    claimed: Tree | None = (
        None  # what the drafter says they were drawn from; None: q, or nothing where the draft is fixed
    )
    fixed: tuple[int, ...] | None = (
        None  # the one draft of a deterministic drafter, legal or not; q and claimed are unused
    )
    lenience: float = 1.0
    cut: Cut | None = None  # drafts [n, k] → how many of their tokens are submitted [n]; None: all


@dataclass(frozen=True, slots=True)
class Batch:
    """All drafts of all starts, as a verifier sees them; NaN in every law that it has no business with."""

    logp: Tensor  # [N, K + 1, vocab]
    logq: Tensor  # [N, K, vocab]
    drafts: Tensor  # [N, K], within the vocabulary
    ks: list[int]
    masses: Tensor  # [N] probability of the draft, given its start
    owners: Tensor  # [N] number of the start
    leniences: Tensor  # [N]


def texts(n: int) -> Tensor:
    """[vocab^n, n] int64, in the order of their numbers."""
    return torch.tensor(list(itertools.product(range(VOCAB), repeat=n)), dtype=torch.int64)


def number(texts: Tensor) -> Tensor:
    """[N, n] → [N]."""
    powers = VOCAB ** torch.arange(texts.shape[1] - 1, -1, -1)
    return (texts.clamp(0, VOCAB - 1) * powers).sum(1)


def subtree(tree: Tree, length: int, text: int, depth: int) -> Tree:
    """The first `depth` levels of the laws after one text of `length` tokens."""
    return [tree[length + n][text * VOCAB**n : (text + 1) * VOCAB**n] for n in range(depth)]


def batch_of(starts: Seq[Start]) -> Batch:
    depth = max(start.k for start in starts)
    parts = [_rows(start, depth) for start in starts]
    drafts, masses, logp, claimed, lengths = (torch.cat(column) for column in zip(*parts, strict=True))
    counts = torch.tensor([len(part[0]) for part in parts])
    owners = torch.arange(len(starts)).repeat_interleave(counts)
    ks: list[int] = lengths.tolist()
    with_law = [starts[i].claimed or starts[i].fixed is None for i in owners.tolist()]
    rows = torch.tensor([n if has else NO_LAW for n, has in enumerate(with_law)])
    logq = draft_laws(claimed, rows, drafts, logp)
    logq[~is_draft(ks, logq.device)] = nan
    leniences = torch.tensor([starts[i].lenience for i in owners.tolist()])
    return Batch(logp, logq, drafts.clamp(0, VOCAB - 1), ks, masses, owners, leniences)


def _rows(start: Start, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(drafts [n, depth], masses [n], logp [n, depth + 1, vocab], claimed laws [n, depth, vocab], lengths [n]): its
    possible drafts. Those that are the same where they are cut stand there one by one."""
    k = start.k
    x = texts(k) if start.fixed is None else torch.tensor([start.fixed], dtype=torch.int64).view(1, k)
    codes = [number(x[:, :j]) for j in range(k + 1)]
    mass = torch.ones(len(x), dtype=torch.float64)
    logp = torch.full((len(x), depth + 1, VOCAB), nan, dtype=torch.float64)
    claimed = torch.full((len(x), depth, VOCAB), nan, dtype=torch.float64)
    for j, code in enumerate(codes):
        logp[:, j] = start.p[j][code]
        if j < k:
            claimed[:, j] = (start.claimed or start.q)[j][code]
            if start.fixed is None:
                mass = mass * start.q[j][code].gather(1, x[:, j : j + 1])[:, 0].exp()
    drafts = torch.nn.functional.pad(x, (0, depth - k), value=JUNK)
    lengths = torch.full((len(x),), k) if start.cut is None else start.cut(x)
    places = torch.arange(depth + 1)
    logp[places > lengths[:, None]] = nan
    beyond = places[:-1] >= lengths[:, None]
    claimed[beyond] = nan
    drafts[beyond] = JUNK
    possible = mass > 0
    return drafts[possible], mass[possible], logp[possible], claimed[possible], lengths[possible]


def emissions(starts: Seq[Start], verifier: Verifier) -> list[Tensor]:
    """Entry a [S, vocab^(a + 1)]: the probability that the round emits exactly this text, a drafts and one token."""
    batch = batch_of(starts)
    ks = torch.tensor(batch.ks)
    if verifier == "block":
        decided = acceptance.block(batch.logp, batch.logq, batch.drafts, batch.ks)
        chance = outcomes(decided.chances, acceptance.last_success)
    else:
        decided = acceptance.rejection(batch.logp, batch.logq, batch.drafts, batch.ks, batch.leniences)
        chance = outcomes(decided.chances, acceptance.first_failure)
    result = []
    for count in range(int(ks.max()) + 1):
        accepted = torch.full_like(ks, count).minimum(ks)  # where k is smaller, its mass is 0
        weights = acceptance.emitted_law(batch.logp, batch.logq, decided.log_scales, accepted, batch.ks)
        masses = (batch.masses * chance[:, count])[:, None] * weights.softmax(1)
        places = batch.owners * VOCAB**count + number(batch.drafts[:, :count])
        table = torch.zeros(len(starts) * VOCAB**count, VOCAB, dtype=torch.float64)
        result.append(table.index_add_(0, places, masses).view(len(starts), -1))
    return result


def outcomes(chances: Tensor, accept: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[N, K + 1]: how likely each number of accepted drafts is, over independent uniform coins.

    A coin matters only by whether it lies below its chance. Chances that are NaN stand where there is no draft.
    """
    sure = chances.nan_to_num(0.0)
    result = torch.zeros(len(chances), chances.shape[1] + 1, dtype=torch.float64)
    for pattern in itertools.product((True, False), repeat=chances.shape[1]):
        below = torch.tensor(pattern, dtype=torch.bool)
        coins = torch.where(below, sure / 2, sure)
        weights = torch.where(below, sure, 1 - sure).prod(1)
        result.scatter_add_(1, accept(chances, coins)[:, None], weights[:, None])
    return result


def completed(masses: Seq[Tensor], p: Tree, length: int) -> Tensor:
    """The law [vocab^length] of a text that stands at exactly n tokens with masses[n] [vocab^n], and goes on by p."""
    law = masses[0]
    for n in range(length):
        law = (law[:, None] * p[n].exp()).flatten()
        if n + 1 < len(masses):
            law = law + masses[n + 1]
    return law


NOTHING = torch.zeros(1, dtype=torch.float64)


def target_law(p: Tree, length: int) -> Tensor:
    return completed([NOTHING + 1], p, length)


def worst(starts: Seq[Start], verifier: Verifier) -> float:
    """The largest error of any text's probability, over all starts: one round, then p up to max k + 1 tokens. A NaN is
    an infinite error."""
    emitted = emissions(starts, verifier)
    length = max(start.k for start in starts) + 1
    laws = [completed([NOTHING, *(part[i] for part in emitted)], start.p, length) for i, start in enumerate(starts)]
    exact = [target_law(start.p, length) for start in starts]
    return (torch.stack(laws) - torch.stack(exact)).abs().nan_to_num(inf).max().item()


def expected_accepted(starts: Seq[Start], verifier: Verifier) -> Tensor:
    """[S]"""
    return torch.stack([part.sum(1) * count for count, part in enumerate(emissions(starts, verifier))]).sum(0)


# How drafts come to be cut.


def unsure(q: Tree, limit: float, *, peeking: bool = False) -> Cut:
    """Before the position at which the product of the largest probabilities so far falls below `limit`, as a draft
    model does that is asked for confidence. peeking: of the drawn tokens' probabilities in place of the largest."""

    def cut(drafts: Tensor) -> Tensor:
        joint = torch.zeros(len(drafts), dtype=torch.float64)
        kept = torch.ones(len(drafts), dtype=torch.bool)
        lengths = torch.zeros(len(drafts), dtype=torch.int64)
        for j in range(drafts.shape[1]):
            laws = q[j][number(drafts[:, :j])]
            joint = joint + (laws.gather(1, drafts[:, j : j + 1])[:, 0] if peeking else laws.amax(1))
            kept = kept & (joint >= log(limit))
            lengths += kept
        return lengths

    return cut


# How pairs of trees (p, q) come about.


def random_tree(generator: torch.Generator, depth: int, zeros: float = 0.0, sharpness: float = 1.0) -> Tree:
    """Laws drawn uniformly from the simplex; a token gets probability 0 with probability `zeros`, never all of them;
    logarithms are multiplied by `sharpness` before they are normalised."""
    tree = []
    for n in range(depth):
        weights = torch.empty(VOCAB**n, VOCAB, dtype=torch.float64).exponential_(generator=generator)
        gone = torch.rand(weights.shape, generator=generator, dtype=torch.float64) < zeros
        gone &= weights < weights.amax(1, keepdim=True)
        tree.append((weights.log() * sharpness).masked_fill(gone, -inf).log_softmax(1))
    return tree


def _equal_rows(g: torch.Generator, depth: int) -> tuple[Tree, Tree]:
    p, q = (random_tree(g, 1)[0] for _ in range(2))
    return [p.repeat(VOCAB**n, 1) for n in range(depth)], [q.repeat(VOCAB**n, 1) for n in range(depth)]


def _same(g: torch.Generator, depth: int) -> tuple[Tree, Tree]:
    p = random_tree(g, depth, zeros=0.3)
    return p, p


def _nearly_same(g: torch.Generator, depth: int) -> tuple[Tree, Tree]:
    """p and q differ by rounding: chances next to 1, residuals of next to no mass."""
    p = random_tree(g, depth)
    return p, [(law + 3e-16 * torch.randn(law.shape, generator=g, dtype=torch.float64)) for law in p]


def _disjoint(g: torch.Generator, depth: int) -> tuple[Tree, Tree]:
    p, q = random_tree(g, depth, zeros=0.6), random_tree(g, depth)
    apart = []
    for ours, theirs in zip(p, q, strict=True):
        least = torch.arange(VOCAB) == ours.argmin(1, keepdim=True)  # one token at least is left to q
        apart.append(ours.masked_fill(least, -inf).log_softmax(1))
        theirs.masked_fill_(apart[-1] > -inf, -inf).copy_(theirs.log_softmax(1))
    return apart, q


KINDS: dict[str, Callable[[torch.Generator, int], tuple[Tree, Tree]]] = {
    "random": lambda g, n: (random_tree(g, n), random_tree(g, n)),
    "zeros in p": lambda g, n: (random_tree(g, n, zeros=0.5), random_tree(g, n)),
    "zeros in q": lambda g, n: (random_tree(g, n), random_tree(g, n, zeros=0.5)),
    "zeros in both": lambda g, n: (random_tree(g, n, zeros=0.5), random_tree(g, n, zeros=0.5)),
    "p near one-hot": lambda g, n: (random_tree(g, n, sharpness=40), random_tree(g, n)),
    "q near one-hot": lambda g, n: (random_tree(g, n), random_tree(g, n, sharpness=40)),
    "both near one-hot": lambda g, n: (random_tree(g, n, sharpness=40), random_tree(g, n, sharpness=40)),
    "equal rows": _equal_rows,
    "p is q": _same,
    "p is q but for rounding": _nearly_same,
    "disjoint": _disjoint,
}


def pairs(kind: str, count: int, depth: int = 4) -> Iterator[tuple[Tree, Tree]]:
    """Reproducible (p, q)."""
    generator = torch.Generator().manual_seed(sorted(KINDS).index(kind))
    for _ in range(count):
        yield KINDS[kind](generator, depth)


def starts_of(kind: str, count: int = 12) -> list[Start]:
    """k = 3, 0, 1, 2, 3, … in one ragged batch."""
    return [Start(p, q, (3 + i) % 4) for i, (p, q) in enumerate(pairs(kind, count))]
