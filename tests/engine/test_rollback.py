"""Rollback fuzz: after every round both models' caches hold what a fresh prefill of the committed tokens gives.

This holds whatever was accepted, shared, copied or taken back. All blocks that the prefix indices find hold it, too.
"""

import logging
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.paged import PagedCache
from cache.prefix import PrefixIndex, PrefixNode
from cache.storage import Blocks
from engine import round as round_module
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.draft_columns import DraftLaws
from engine.drafters.model_trees import TreeDraft
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sampling.acceptance import Verdict
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.trees import Growth
from engine.types import Request, SamplingParams
from engine.verification import verify
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.fresh import STORAGES, Checker, memory
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs
from tests.kv import KINDS

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")

K = 4
Run = Callable[[Seq[Feed], Tensor | None], Tensor]
WRONG = 0.3  # of the drafts, where a draft that would always be right is made to err
SEEDS = range(4)
USUAL = {  # seeds of short runs that meet everything
    ("mapped", "twins"): (2, 3),
    ("gathered", "twins"): (2,),
    ("slotted", "twins"): (2,),
    ("mapped", "pair"): (2,),
    ("gathered", "pair"): (1,),
    ("slotted", "pair"): (1,),
}
DEFAULT, DEFAULT_OF_TREES = ("mapped", "twins", 2), ("mapped", "pair", 2)  # the others run in proofs
SHAPES: tuple[tuple[int, ...] | Growth | None, ...] = ((2, 1), (1, 1, 2), (4,), (1, 3), Growth(K, 3), None)


def load_small(pair: Pair, kind: str = "mapped") -> Engine:
    """Memory for hardly more than one of the longest sequences, slots for six; 28 tokens a pass chunk most prompts."""
    engine = load(
        pair, max_model_len=96, max_running=6, max_spec_length=K, max_step_tokens=34, **memory(kind, kv_tokens=120)
    )
    assert type(engine.target.storage) is STORAGES[kind]
    return engine


def make_requests(rng: random.Random, count: int, *, trees: bool = False) -> list[list[Request]]:
    """Groups of 1 to 3 choices of one prompt, which begins like others of its salt. trees: most drafts are trees."""
    beginnings = [[rng.randrange(2, VOCAB) for _ in range(44)] for _ in range(2)]
    groups = []
    for i in range(count):
        shared = rng.choice(beginnings)[: rng.choice((0, 20, 37, 44))]
        prompt = (*shared, *(rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 2, 9, 20)))))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.8)), seed=i, max_tokens=rng.randint(1, 31), ignore_eos=True
        )
        base = Request(
            "",
            prompt,
            params,
            k=rng.choice((0, 1, K, K)),
            verifier=rng.choice(("match", "match", "rejection", "block")),
            cache_salt=rng.choice(("", "", "other")),
        )
        if trees:
            base = with_tree(base, rng)
        choices = rng.choice((1, 1, 2, 3))
        groups.append([replace(base, id=f"r{i}.{c}", choice_index=c) for c in range(choices)])
    return groups


def with_tree(request: Request, rng: random.Random) -> Request:
    """The request with a tree of up to K drafts in place of its chain, if its verifier decides about such a tree."""
    tree = rng.choice(SHAPES)
    if request.verifier == "block" or tree is None or (request.verifier == "rejection" and isinstance(tree, Growth)):
        return request
    return replace(request, k=None, tree=tree)


class Fuzz:
    """One run with everything checked after every step; counts what it met."""

    def __init__(self, engine: Engine, seed: int, *, trees: bool = False, count: int = 24) -> None:
        """count: groups of requests."""
        self.engine = engine
        self.checker = Checker(engine, logits=False)
        self.forks = 0
        if isinstance(engine.target.cache, PagedCache):
            self._count_forks(engine.target.cache)
        rng = random.Random(seed)
        arrivals: dict[int, list[Request]] = {}
        cancels: dict[int, list[str]] = {}
        for group in make_requests(rng, count, trees=trees):
            step = rng.randint(0, 30)
            arrivals.setdefault(step, []).extend(group)
            if rng.random() < 0.3:
                cancels.setdefault(step + rng.randint(1, 20), []).append(rng.choice(group).id)
        self.run: Drive = drive(engine, arrivals, cancels, self._after_step)
        self.checker.check_index()

    def _after_step(self) -> None:
        self.checker()
        self.engine.audit()
        if self.engine.steps % 2 == 0:
            self.checker.check_index()

    def _count_forks(self, cache: PagedCache) -> None:
        fork = cache.fork

        def counting(parent: int, child: int, length: int) -> int:
            before = cache.length(child)
            after = fork(parent, child, length)
            self.forks += after > before
            return after

        cache.fork = counting  # type: ignore[method-assign]

    @property
    def preempted(self) -> int:
        return sum(s.preempted for s in self.run.steps)

    @property
    def hits(self) -> int:
        return sum(s.cached_tokens > 0 for s in self.run.steps)

    @property
    def acceptances(self) -> set[int]:
        """Drafts accepted of K that were verified."""
        records = [told.record for told in self.run.received.values() if told.record is not None]
        return {a for r in records for d, a in zip(r.column("drafted"), r.column("accepted"), strict=True) if d == K}

    @property
    def moved(self) -> int:
        """Rounds whose accepted path is not the beginning of its tree's nodes."""
        rounds = [part for told in self.run.received.values() if told.record for part in told.record.rounds]
        return sum(part.path != tuple(range(len(part.path))) for part in rounds)


def err_now_and_then(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Drafts become other tokens at random before the draft model is fed them: it holds what it proposes.

    For engines that are loaded: profiling would draw from the same generator."""
    draw, put, rng = DraftLaws.draw, TreeDraft._put, random.Random(seed)

    def err(drawn: Tensor) -> Tensor:
        wrong = torch.tensor([rng.randrange(1, VOCAB) * (rng.random() < WRONG) for _ in drawn])
        return (drawn + wrong) % VOCAB

    def draw_wrongly(self: DraftLaws, batch: DraftBatch, active: Seq[int], logits: Tensor, drafts: Tensor) -> Tensor:
        return err(draw(self, batch, active, logits, drafts))

    def put_wrongly(self: TreeDraft, children: Any, drawn: Tensor, logits: Tensor) -> None:
        later = torch.cat([err(drawn[:, 0])[:, None], drawn[:, :-1]], 1)  # the right token has a sibling before it
        moved = torch.tensor([rng.random() < WRONG for _ in drawn])
        put(self, children, torch.where(moved[:, None], later, drawn), logits)

    monkeypatch.setattr(DraftLaws, "draw", draw_wrongly)
    monkeypatch.setattr(TreeDraft, "_put", put_wrongly)


@pytest.mark.parametrize(
    ("kind", "which", "seed"),
    [
        pytest.param(kind, which, seed, marks=() if (kind, which, seed) == DEFAULT else pytest.mark.proofs)
        for kind, which in USUAL
        for seed in SEEDS
    ],
)
def test_caches_hold_the_committed_tokens_after_every_round(
    kind: str, which: str, seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`twins`, made to err: every number of drafts is accepted; `pair`: the real draft model."""
    engine = load_small(request.getfixturevalue(which), kind)
    if which == "twins":
        err_now_and_then(monkeypatch, seed)
    fuzz = Fuzz(engine, seed, count=16 if (kind, which, seed) == DEFAULT else 24)
    assert min(fuzz.checker.compared.values()) > 2000
    assert 0 < fuzz.run.accepted < fuzz.run.drafted
    assert any(told.reason == "cancelled" for told in fuzz.run.received.values())
    if which == "twins" and seed in USUAL[kind, which]:
        assert fuzz.acceptances == set(range(K + 1))
    if kind == "slotted":
        assert (fuzz.preempted, fuzz.hits, fuzz.forks) == (0, 0, 0)
    else:
        assert min(fuzz.preempted, fuzz.hits, fuzz.forks) > 0
        assert min(fuzz.checker.indexed.values()) > 0


@pytest.mark.parametrize(
    ("kind", "which", "seed"),
    [
        pytest.param(kind, which, seed, marks=() if (kind, which, seed) == DEFAULT_OF_TREES else pytest.mark.proofs)
        for kind, which in USUAL
        for seed in SEEDS
    ],
)
def test_caches_hold_the_committed_tokens_after_rounds_with_trees(
    kind: str, which: str, seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, trees of given shapes and trees that grow share rounds. Accepted nodes move in both caches."""
    engine = load_small(request.getfixturevalue(which), kind)
    if which == "twins":
        err_now_and_then(monkeypatch, seed)
    fuzz = Fuzz(engine, seed, trees=True, count=19 if (kind, which, seed) == DEFAULT_OF_TREES else 24)
    assert min(fuzz.checker.compared.values()) > 2000
    assert fuzz.moved
    assert any(told.reason == "cancelled" for told in fuzz.run.received.values())
    if kind != "slotted":
        assert min(fuzz.preempted, fuzz.hits, fuzz.forks) > 0
        assert min(fuzz.checker.indexed.values()) > 0


def failing(run: Run, rng: random.Random) -> Run:
    """A quarter of the passes raise, before they begin or once they are done; never two in a row, which would end their
    requests."""
    failed = False

    def sometimes(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        nonlocal failed
        failed = not failed and rng.random() < 0.25
        if failed and rng.random() < 0.5:
            raise RuntimeError("not now")
        logits = run(feeds, drafts)
        if failed:
            raise RuntimeError("too late")
        return logits

    return sometimes


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=() if (kind, seed) == ("gathered", 1) else pytest.mark.proofs)
        for kind in KINDS
        for seed in range(3)
    ],
)
def test_passes_that_fail_under_pressure(
    twins: Pair, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a failed pass reserved, wrote or copied is rolled back as well."""
    caplog.set_level(logging.CRITICAL, "engine")
    engine = load_small(twins, kind)
    err_now_and_then(monkeypatch, seed)
    for runner in (engine.target, model_drafter(engine).runner):
        monkeypatch.setattr(runner, "run", failing(runner.run, random.Random(seed)))
    fuzz = Fuzz(engine, seed, count=14 if (kind, seed) == ("gathered", 1) else 24)
    assert {told.reason for told in fuzz.run.received.values()} == {"length", "cancelled"}
    assert sum(s.draft_faults for s in fuzz.run.steps) > 10
    assert kind == "slotted" or min(fuzz.preempted, fuzz.hits, fuzz.forks) > 0


# --- negative controls -----------------------------------------------------------------------------------------------

usual_kind = pytest.mark.parametrize("kind", ["mapped", pytest.param("gathered", marks=pytest.mark.proofs)])


def frees_the_partial_block(monkeypatch: pytest.MonkeyPatch) -> None:
    truncate_to = PagedCache.truncate_to

    def eager(self: PagedCache, handle: int, length: int) -> None:
        truncate_to(self, handle, length)
        self._drop(self._held[handle], length // self.block_size)

    monkeypatch.setattr(PagedCache, "truncate_to", eager)


def hits_blocks_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    match = PrefixIndex.match

    def careless(self: PrefixIndex, tokens: Seq[int], salt: str, limit: int) -> list[PrefixNode]:
        path = match(self, tokens, salt, limit)
        if path and len(path) < limit:
            path += list(path[-1].children.values())[:1]
        return path

    monkeypatch.setattr(PrefixIndex, "match", careless)


def skips_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedCache, "_must_copy", lambda *_: False)


def forgets_to_fill_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "copy_shared_blocks", lambda self: list(self._cache.take_copies()))


def keeps_the_old_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted sequence comes back as if its memory still held what it had."""
    preempt, allocate, lengths = Scheduler._preempt, PagedCache.allocate, dict[int, int]()

    def keeping(self: Scheduler) -> Sequence:
        lengths.update({s.handle: self._cache.length(s.handle) for s in self.running})
        return preempt(self)

    def resuming(self: PagedCache, handle: int, tokens: Seq[int] = (), salt: str = "") -> int:
        found = allocate(self, handle, tokens, salt)
        more = lengths.get(handle, 0) - found
        if len(tokens) > found + more > found and self.room(handle) >= more:
            self.reserve(handle, lengths[handle] - found)
            self.extend(handle, lengths[handle] - found)
        return self.length(handle)

    monkeypatch.setattr(Scheduler, "_preempt", keeping)
    monkeypatch.setattr(PagedCache, "allocate", resuming)


def publishes_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, with_own_tokens: bool) -> None:
    """Before the round's verdict is known: under the drafts' own tokens, which are right but were never committed, or
    after it and before the rollback, under tokens that were committed in the drafts' place."""

    def early(batch: DraftBatch, draft: Draft, logits: Tensor) -> Verdict:
        verdict = verify(batch, draft, logits)
        for i, sequence in enumerate(batch.sequences):
            own = [] if draft.tokens is None else draft.tokens[i, : draft.ks[i]].tolist()
            added = own if with_own_tokens else verdict.emitted[i]
            engine.target.cache.publish(sequence.handle, sequence.tokens + added)
        return verdict

    monkeypatch.setattr(round_module, "verify", early)


Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: list[tuple[Fault, str]] = [
    (frees_the_partial_block, "(keys|values) of layer"),
    (hits_blocks_of_other_tokens, "(keys|values) of layer"),
    (forgets_to_fill_the_copy, "(keys|values) of layer"),
    (skips_the_copy, "(keys|values) of layer|blocks in the tree"),
    (keeps_the_old_length, "target: keys of layer"),
]


def leaves_accepted_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "keep_paths", lambda self, paths: list(paths))


def moves_one_node_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Runner.keep_paths

    def short(self: Runner, paths: Iterable[tuple[Sequence, int, Seq[int]]]) -> None:
        keep(self, [(sequence, base, nodes[:-1]) for sequence, base, nodes in paths])

    monkeypatch.setattr(Runner, "keep_paths", short)


@usual_kind
@pytest.mark.parametrize("fault", [leaves_accepted_nodes, *in_proofs(moves_one_node_too_few)], ids=["leave", "move"])
def test_negative_controls_with_trees(pair: Pair, monkeypatch: pytest.MonkeyPatch, fault: Fault, kind: str) -> None:
    engine = load_small(pair, kind)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"(keys|values) of layer"):
        Fuzz(engine, 2, trees=True)


def several(engines: list[Engine]) -> None:
    for seed, engine in enumerate(engines):
        Fuzz(engine, seed, count=12)


@usual_kind
@pytest.mark.parametrize(
    ("fault", "found"),
    [pytest.param(*fault, marks=[pytest.mark.proofs] * (n > 2)) for n, fault in enumerate(FAULTS)],
    ids=[fault.__name__ for fault, _ in FAULTS],
)
def test_negative_controls(twins: Pair, monkeypatch: pytest.MonkeyPatch, fault: Fault, found: str, kind: str) -> None:
    engines = [load_small(twins, kind) for _ in SEEDS]  # in case a run does not meet the fault
    err_now_and_then(monkeypatch, 0)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        several(engines)


@pytest.mark.parametrize("with_own_tokens", [True, *in_proofs(False)], ids=["own", "others"])
@usual_kind
def test_negative_control_drafts_are_published(
    twins: Pair, monkeypatch: pytest.MonkeyPatch, kind: str, with_own_tokens: bool
) -> None:
    engine = load_small(twins, kind)
    err_now_and_then(monkeypatch, 0)
    publishes_drafts(engine, monkeypatch, with_own_tokens=with_own_tokens)
    with pytest.raises(AssertionError, match=r"can be found, and|(keys|values) of layer"):
        Fuzz(engine, 0)
