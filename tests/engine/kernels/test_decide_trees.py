"""Rejection on trees as one operation: tree_acceptance.py's decisions, from the reference and the Triton kernels."""

from collections.abc import Iterator
from itertools import product
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staging
from engine.kernels.decide_trees import decide_trees, decide_trees_reference
from engine.sampling import noise, tree_acceptance
from engine.sampling.tree_acceptance import NONE, TreeTable
from engine.trees import ROOT, chain
from tests.engine.kernels.faults import with_fault
from tests.examples import usual_and_proofs

VOCAB = 40
# Siblings in a row, siblings behind other branches, a chain, no drafts, and siblings at every depth.
SHAPES = ((ROOT,) * 3, (ROOT, ROOT, 0, 0, 1, ROOT), chain(3), (), (ROOT, 0, 0, 2, 2))
COUNT, SIZE, WIDTH = len(SHAPES), 6, 3
PARENTS = torch.tensor([[*(p + 1 for p in shape), *[NONE] * (SIZE - len(shape))] for shape in SHAPES])
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}

Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]
Result = tuple[Tensor, Tensor, Tensor, Tensor]


def laws(g: torch.Generator, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, logq, drafts). q near p, equal to it, apart; tokens without mass, a NaN, and illegal drafts."""
    logits = torch.randn(COUNT, SIZE + 1, VOCAB, generator=g, dtype=torch.float64) * 2
    others = logits[:, PARENTS.clamp(min=0)[0]] + torch.randn(COUNT, SIZE, VOCAB, generator=g, dtype=torch.float64)
    others[2, :2] = logits[2, :2]  # nothing is left of p
    others[0, 1], others[0, 2] = logits[0, 0], others[0, 0]
    for values in (logits, others):
        values[torch.rand(values.shape, generator=g) < 0.3] = -inf
        values[..., [0, -1]] = 0.0  # an illegal draft is read as one of these
    logp, logq = logits.log_softmax(-1), others.log_softmax(-1)
    drafts = torch.multinomial(logq.exp().view(-1, VOCAB), 1, generator=g).view(COUNT, SIZE)
    if n % 3 == 1:
        logp[4, n % 4, 3] = nan
        drafts[4, 1], drafts[1, 1] = VOCAB, -1
        logq[4, 1], logq[1, 1] = -inf, -inf
    logq[0, 0] = logp[0, 0].scatter_add(0, drafts[0, :1], torch.ones(1, dtype=torch.float64))  # rejected; none is left
    return logp, logq, drafts


def cases(lenience: float, dtype: torch.dtype, rounds: int) -> Iterator[Args]:
    g = torch.Generator().manual_seed(5)
    for n in range(rounds):
        logp, logq, drafts = laws(g, n)
        logp, logq, column = logp.to(dtype), logq.to(dtype), torch.full((COUNT,), lenience, dtype=torch.float64)
        column[[0, 2]] = 1.0  # only so nothing may be left
        keys = torch.randint(-(2**62), 2**62, (COUNT, SIZE), generator=g)
        positions = torch.randint(5000, (COUNT, SIZE), generator=g)
        # The coin of one node is nearest to its chance, so that small errors of a chance decide otherwise.
        table = TreeTable.of(SHAPES, RoundNumbers(Staging(torch.device("cpu"))))
        law = tree_acceptance.rejection(logp, logq, drafts.clamp(0, VOCAB - 1), table, column)
        coins = noise.uniforms(keys[:, n % SIZE, None], torch.arange(3000))
        positions[:, n % SIZE] = (coins - law.chances[:, n % SIZE, None]).nan_to_num(1.0).abs().argmin(1)
        yield logp, logq, drafts, PARENTS, column, keys, positions, WIDTH


def by_hand(args: Args) -> Result:
    """What the functions of tree_acceptance.py decide, one after the other."""
    logp, logq, drafts, _, lenience, keys, positions, _ = args
    table = TreeTable.of(SHAPES, RoundNumbers(Staging(torch.device("cpu"))))
    law = tree_acceptance.rejection(logp, logq, drafts.clamp(0, VOCAB - 1), table, lenience)
    last = tree_acceptance.walk(noise.uniforms(keys, positions) < law.chances, table)[:, -1]
    weights = tree_acceptance.emitted_law(law, logq, table, last)
    return last, table.depths.gather(1, last[:, None])[:, 0], weights, law.overlaps


def differ(a: Result, b: Result, close: float) -> bool:
    """Whether two results decide differently: laws of the emitted token by more than `close`, overlaps by more than a
    millionth."""
    (last, accepted, weights, overlaps), (others, depths, more, them) = a, b
    if not (torch.equal(last, others) and torch.equal(accepted, depths)):
        return True
    law, other = weights.log_softmax(1), more.log_softmax(1)
    same = torch.equal(law.isnan(), other.isnan()) and torch.equal(law == -inf, other == -inf)
    return (
        not same
        or bool((law.exp() - other.exp()).abs().nan_to_num(0.0).max() > close)
        or bool((overlaps - them).abs().max() > 1)
        or not torch.equal(overlaps == NONE, them == NONE)
    )


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from engine.kernels import decide_trees_kernel

    for name in ("PART", "TILE"):
        monkeypatch.setattr(decide_trees_kernel, name, getattr(decide_trees_kernel, name))  # and back at the end
    return small(decide_trees_kernel)


def small(kernels: Any) -> ModuleType:
    """Several parts to a row, and several tiles to a part."""
    kernels.PART, kernels.TILE = 32, 16
    module: ModuleType = kernels
    return module


def on_device(kernels: Any, args: Args) -> Result:
    device = torch.device("cpu" if kernels.triton.knobs.runtime.interpret else "cuda")
    with np.errstate(all="ignore"):
        found = kernels.decide(*(x.to(device) if isinstance(x, Tensor) else x for x in args))
    last, accepted, weights, overlaps = (x.cpu() for x in found)
    return last, accepted, weights, overlaps


KINDS = list(product((1.0, 0.4), (torch.float64, torch.float32)))  # lenience and type of the laws
USUAL_KINDS = ((1.0, torch.float32), (0.4, torch.float64))


@pytest.mark.parametrize("kind", usual_and_proofs(KINDS, USUAL_KINDS), ids=str)
def test_the_operation_decides_as_tree_acceptance_does(kind: tuple[float, torch.dtype]) -> None:
    lenience, dtype = kind
    rows = set[tuple[int, int]]()
    for args in cases(lenience, dtype, 60):
        found = decide_trees(*args)
        assert not differ(found, by_hand(args), CLOSE[dtype])
        rows |= set(enumerate(found[0].tolist()))
    # Every row of every tree was the last one of some round, but for the children of nodes that are hardly accepted.
    assert len(rows) > 0.7 * sum(len(shape) + 1 for shape in SHAPES)


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds NaN, of which the interpreter warns."""
    empty = torch.empty

    def unwritten(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", unwritten)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("lenience", "dtype", "rounds"),
    [
        (0.4, torch.float32, 2),  # some rows have a lenience of 1
        *(pytest.param(*kind, 2, marks=pytest.mark.proofs) for kind in KINDS),
    ],
)
def test_the_kernels_are_the_reference(lenience: float, dtype: torch.dtype, rounds: int, kernels: ModuleType) -> None:
    """The second round has illegal drafts, and a row that is not finite."""
    for args in cases(lenience, dtype, rounds):
        assert not differ(on_device(kernels, args), decide_trees_reference(*args), CLOSE[dtype])


def test_it_is_one_operation_of_torch() -> None:
    args = next(cases(1.0, torch.float64, 1))
    torch.library.opcheck(torch.ops.foretoken.decide_trees.default, args, test_utils=["test_schema", "test_faketensor"])


FAULTS = {
    "a later sibling counts as an older one": ("(family == parent) & (nodes < node)).to", "(family == parent)).to"),
    "siblings are tried against p": ("found = tl.max(tl.where((family == parent) & (nodes < node)",
                                     "found = tl.max(tl.where((family == parent) & (nodes < 0)"),
    "what is left is not normalised": ("rest - total", "rest"),
    "a node without mass left counts": ("searching = searching & (whole == 0)", "searching = searching & (whole < 0)"),
    "a lenience of 1": ("source, ids, vocab) + scale", "source, ids, vocab)"),
    "the chance is not scaled": ("tl.exp((ratio + scale)", "tl.exp((ratio)"),
    "another node's coin": ("tl.load(positions + at)", "tl.load(positions + n)"),
    "an excluded draft passes": ('tl.where(q == float("-inf"), float("-inf"), p - q)', "(p - q)"),
    "any node follows": ("(parent == last) & (uniform", "(parent <= last) & (uniform"),
    "the first part's mass": ("tl.log(whole) + level", "tl.log(tl.max(mass).to(tl.float64)) + level"),
    "overlaps of nodes that are none": ("OVERLAP_SCALE), NONE)", "OVERLAP_SCALE), 0)"),
    "the law of the root": ("vocab\n    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):\n"
                            "        ids = start + tl.arange(0, TILE)\n        weight = load_law(law",
                            "vocab\n    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):\n"
                            "        ids = start + tl.arange(0, TILE)\n        weight = load_law(logp"),
}  # fmt: skip


# A fault of each kernel.
USUAL_FAULTS = ("what is left is not normalised", "any node follows", "the law of the root")


@pytest.mark.parametrize("fault", usual_and_proofs(FAULTS, USUAL_FAULTS))
def test_a_fault_in_the_kernels_shows(fault: str, kernels: ModuleType, tmp_path: Path) -> None:
    with with_fault(kernels, *FAULTS[fault], tmp_path) as faulty:
        small(faulty)
        assert any(
            differ(on_device(faulty, args), decide_trees_reference(*args), CLOSE[torch.float64])
            for args in cases(0.7, torch.float64, 4)
        )
