"""ChainedDrafter: which drafters are asked, how drafts are merged, and what a failing drafter costs."""

import logging
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import replace
from graphlib import CycleError
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import trees
from engine.device.round_clock import Forward
from engine.drafters.base import NO_OFFER, Draft, DraftBatch, Drafter, DrafterFault, Offer, check_draft
from engine.drafters.chain import ChainedDrafter
from engine.sequence import Sequence
from engine.types import DrafterName
from tests.engine.drafters.rounds import make_batch, make_verdict, rows
from tests.engine.driving import make_sequence
from tests.examples import examples

CPU = torch.device("cpu")
VOCAB = 5
CHAINS: tuple[DrafterName | None, ...] = (
    None,
    "ngram",
    "lookup",
    "prediction",
    "model",
    "suffix",
    "lookahead",
    "cascade",
)


class Fake:
    """Offers what its script says, its own tokens and, if `lawful`, its own laws; writes down what it is asked."""

    def __init__(self, number: int, script: Mapping[int, int], *, lawful: bool = False, wider: int = 0) -> None:
        self.number, self.script, self.lawful, self.wider = number, script, lawful, wider
        self.offered: list[int] = []
        self.asked: list[list[int]] = []
        self.observed: list[DraftBatch] = []
        self.forgotten: list[int] = []
        self.fails: Set[str] = frozenset()
        self.spoil: Callable[[Draft], Draft] = lambda draft: draft

    def offer(self, sequence: Sequence, k: int) -> Offer:
        self.offered.append(sequence.handle)
        self._may_fail("offer")
        return Offer(sequence.drafter, min(k, self.script.get(sequence.handle, 0)), 5 * self.number)

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        self.asked.append(list(ks))
        self._may_fail("propose")
        offered = [min(k, self.script.get(s.handle, 0)) for s, k in zip(batch.sequences, ks, strict=True)]
        n = self.number
        nothing = replace(Draft.none(len(ks)), steps=n + 1, read=7 * n, forwards=(Forward(0, n, n),))
        if not any(offered):
            return nothing
        depth = max(offered) + self.wider
        sequences = [i for i, k in enumerate(offered) if k] if self.lawful else []
        law = torch.stack([self.law(batch.sequences[i], depth) for i in sequences]) if sequences else None
        table = torch.tensor([self.tokens(s, depth) for s in batch.sequences])
        places = {i: row for row, i in enumerate(sequences)}
        shapes = {i: self.tree(k) for i, k in enumerate(offered) if k > 1 and n % 2}
        return self.spoil(replace(nothing, ks=tuple(offered), tokens=table, logq=law, logq_rows=places, trees=shapes))

    def tokens(self, sequence: Sequence, depth: int) -> list[int]:
        return [1000 * self.number + 100 * sequence.handle + j for j in range(depth)]

    def tree(self, k: int) -> trees.Parents:
        """Unlike any other drafter's."""
        return (*(trees.ROOT for _ in range(min(self.number, k))), *range(k - self.number))

    def law(self, sequence: Sequence, depth: int) -> torch.Tensor:
        """[depth, VOCAB], unlike any other drafter's or sequence's."""
        return torch.arange(depth * VOCAB).view(depth, VOCAB) + 1000.0 * self.number + 100 * sequence.handle

    def observe(self, batch: DraftBatch, verdict: Any) -> None:
        self.observed.append(batch)
        self._may_fail("observe")

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.handle)
        self._may_fail("forget")

    def audit(self, live: Set[int]) -> None:
        assert "audit" not in self.fails, f"drafter {self.number} leaks"

    def _may_fail(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError(f"drafter {self.number} cannot {what}")


def make_chains(fakes: Mapping[DrafterName, Fake]) -> ChainedDrafter:
    """A chain of each one alone, and the cascade of all that are no n-grams."""
    chains: dict[DrafterName, tuple[tuple[DrafterName, Drafter], ...]] = {n: ((n, f),) for n, f in fakes.items()}
    chains["cascade"] = tuple((n, fakes[n]) for n in ("prediction", "lookup", "model"))
    return ChainedDrafter(chains, CPU)


def make_sequences(*drafters: DrafterName | None) -> tuple[Sequence, ...]:
    sequences = tuple(make_sequence(i, [1]) for i in range(len(drafters)))
    for sequence, drafter in zip(sequences, drafters, strict=True):
        sequence.drafter = drafter
    return sequences


def make_fakes(**scripts: Mapping[int, int]) -> dict[DrafterName, Fake]:
    names: tuple[DrafterName, ...] = ("ngram", "lookup", "prediction", "model", "suffix", "lookahead")
    return {n: Fake(i, scripts.get(n, {}), lawful=n == "model") for i, n in enumerate(names)}


SCRIPTS = st.dictionaries(st.integers(0, 5), st.integers(0, 4))


@given(
    st.lists(st.tuples(st.sampled_from(CHAINS), st.integers(0, 4)), min_size=1, max_size=6),
    st.tuples(*[SCRIPTS] * 6),
    st.sets(st.integers(0, 5)),
    st.tuples(*[st.integers(0, 2)] * 6),
)
@settings(examples(200), derandomize=True)
def test_every_mix_of_chains_offers_and_laws(
    asked: list[tuple[DrafterName | None, int]],
    scripts: tuple[Mapping[int, int], ...],
    lawful: set[int],
    wider: tuple[int, ...],
) -> None:
    names: tuple[DrafterName, ...] = ("ngram", "lookup", "prediction", "model", "suffix", "lookahead")
    fakes = {n: Fake(i, scripts[i], lawful=i in lawful, wider=wider[i]) for i, n in enumerate(names)}
    sequences, ks = make_sequences(*(drafter for drafter, _ in asked)), [k for _, k in asked]
    draft = make_chains(fakes).propose(make_batch(*sequences), ks)
    check_draft(draft, ks, CPU)
    chains: dict[DrafterName | None, tuple[DrafterName, ...]] = {None: (), **{n: (n,) for n in names}}
    chains["cascade"] = ("prediction", "lookup", "model")
    wanted = {n: [0] * len(ks) for n in names}
    for i, (sequence, k) in enumerate(zip(sequences, ks, strict=True)):
        owner: DrafterName | None = None
        for name in chains[sequence.drafter]:
            wanted[name][i] = k
            if min(k, fakes[name].script.get(i, 0)):
                owner = name
                break
        assert (draft.proposers or [None] * len(ks))[i] == owner
        if owner is None:
            assert draft.ks[i] == 0
            assert i not in draft.logq_rows
            assert i not in draft.trees
            continue
        fake, offered = fakes[owner], draft.ks[i]
        assert offered == min(k, fake.script[i])
        assert rows(draft)[i] == fake.tokens(sequence, offered)
        assert draft.trees.get(i) == (fake.tree(offered) if offered > 1 and fake.number % 2 else None)
        assert (i in draft.logq_rows) == fake.lawful
        if fake.lawful:
            assert draft.logq is not None
            assert draft.logq[draft.logq_rows[i], :offered].equal(fake.law(sequence, offered))
    for name, fake in fakes.items():
        assert fake.asked == ([wanted[name]] if any(wanted[name]) else [])
    called = [fake for fake in fakes.values() if fake.asked]
    assert draft.steps == sum(fake.number + 1 for fake in called)
    assert draft.read == sum(7 * fake.number for fake in called)
    assert sorted(forward.tokens for forward in draft.forwards) == sorted(fake.number for fake in called)
    assert not draft.failed


def test_a_model_behind_a_cascade_is_asked_once_for_all() -> None:
    """Its own sequences wait until the earlier drafters of `cascade` have been asked for theirs."""
    fakes = make_fakes(lookup={0: 4}, model={0: 4, 1: 4, 2: 4})
    draft = make_chains(fakes).propose(make_batch(*make_sequences("cascade", "cascade", "model")), [4, 4, 4])
    assert draft.proposers == ("lookup", "model", "model")
    assert fakes["model"].asked == [[0, 4, 4]]
    assert fakes["prediction"].asked == fakes["lookup"].asked[:1] == [[4, 4, 0]]


@pytest.mark.parametrize("chain", ["model", "cascade"])
def test_a_single_offer_is_not_copied(chain: DrafterName) -> None:
    fakes = make_fakes(model={0: 3, 1: 2})
    given: list[Draft] = []

    def keep(draft: Draft) -> Draft:
        given.append(draft)
        return draft

    fakes["model"].spoil = keep
    draft = make_chains(fakes).propose(make_batch(*make_sequences(chain, "model")), [4, 4])
    assert draft.tokens is given[0].tokens
    assert draft.logq is given[0].logq
    assert draft.ks == (3, 2)
    assert draft.proposers == ("model", "model")


# --- offers ----------------------------------------------------------------------------------------------------------


def test_the_first_in_the_chain_that_has_any_offers() -> None:
    """The offer carries that drafter's name. Later drafters of the chain are not asked."""
    fakes = make_fakes(lookup={0: 2, 2: 9}, model={0: 9, 1: 9, 3: 9})
    sequences = make_sequences("cascade", "cascade", "lookup", "lookup", "model")
    offers = [make_chains(fakes).offer(s, 4) for s in sequences]
    assert offers == [Offer("lookup", 2, 5), Offer("model", 4, 15), Offer("lookup", 4, 5), NO_OFFER, NO_OFFER]
    asked = {name: fake.offered for name, fake in fakes.items()}
    assert asked == {
        "ngram": [],
        "prediction": [0, 1],
        "lookup": [0, 1, 2, 3],
        "model": [1, 4],
        "suffix": [],
        "lookahead": [],
    }


def test_a_sequence_without_a_chain_gets_no_offer() -> None:
    fakes = make_fakes(model={0: 4})
    assert make_chains(fakes).offer(make_sequences(None)[0], 4) == NO_OFFER
    assert not any(fake.offered for fake in fakes.values())


@given(
    st.sampled_from(CHAINS),
    st.integers(1, 4),
    st.tuples(*[st.integers(0, 4)] * 6),
    st.sets(st.integers(0, 5)),
)
@settings(deadline=None, derandomize=True)
def test_who_offers_is_who_proposes(
    chain: DrafterName | None, k: int, scripts: tuple[int, ...], failing: set[int]
) -> None:
    names: tuple[DrafterName, ...] = ("ngram", "lookup", "prediction", "model", "suffix", "lookahead")
    fakes = {n: Fake(i, {0: scripts[i]}) for i, n in enumerate(names)}
    for i in failing:
        fakes[names[i]].fails = {"offer", "propose"}
    drafters, (sequence,) = make_chains(fakes), make_sequences(chain)
    offer, draft = drafters.offer(sequence, k), drafters.propose(make_batch(sequence), [k])
    assert (draft.proposers or (None,)) == (offer.source,)
    assert draft.ks == (offer.max_k,)


def test_two_contradicting_chains() -> None:
    a, b = Fake(0, {}), Fake(1, {})
    ChainedDrafter({"cascade": (("ngram", a), ("lookup", b)), "model": (("lookup", b),)}, CPU)
    with pytest.raises(CycleError):
        ChainedDrafter({"cascade": (("ngram", a), ("lookup", b)), "model": (("lookup", b), ("ngram", a))}, CPU)


def test_a_drafter_named_differently_in_two_chains() -> None:
    """It is one drafter still, asked once."""
    fake = Fake(0, {0: 2, 1: 2})
    drafters = ChainedDrafter({"cascade": (("lookup", fake),), "ngram": (("ngram", fake),)}, CPU)
    draft = drafters.propose(make_batch(*make_sequences("cascade", "ngram")), [2, 2])
    assert draft.proposers == ("lookup", "ngram")
    assert fake.asked == [[2, 2]]


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


def law_of_nobody(draft: Draft) -> Draft:
    return replace(draft, logq_rows={99: 0})


def raising(draft: Draft) -> Draft:
    raise RuntimeError("no idea")


def shallow_law(draft: Draft) -> Draft:
    return replace(draft, logq=None if draft.logq is None else draft.logq[:, :-1])


BROKEN: list[Callable[[Draft], Draft]] = [
    lambda draft: replace(draft, ks=tuple(k + 1 for k in draft.ks)),
    lambda draft: replace(draft, ks=(*draft.ks, 0)),
    lambda draft: replace(draft, tokens=None),
    lambda draft: replace(draft, tokens=torch.zeros(9, 9)),
    law_of_nobody,
    lambda draft: replace(draft, logq_rows={0: 7}),
    lambda draft: replace(draft, logq=None),
    lambda draft: replace(draft, logq=torch.zeros(2, 9, VOCAB, dtype=torch.int64)),
    lambda draft: replace(draft, logq=torch.zeros(2, 9, VOCAB, device="meta")),
    shallow_law,
    raising,
]


@pytest.mark.parametrize("broken", range(len(BROKEN)))
def test_a_bad_draft_costs_its_own_sequences_theirs(broken: int) -> None:
    """The others' offers stand, and the next in the chain may still help."""
    fakes = make_fakes(ngram={1: 2}, lookup={0: 3, 2: 3}, model={2: 1})
    fakes["lookup"].lawful = True
    sequences = make_sequences("lookup", "ngram", "cascade")
    sound = make_chains(fakes).propose(make_batch(*sequences), [4, 4, 4])
    assert (sound.ks, sound.failed) == ((3, 2, 3), False)
    fakes["lookup"].spoil = BROKEN[broken]
    draft = make_chains(fakes).propose(make_batch(*sequences), [4, 4, 4])
    assert draft.ks == (0, 2, 1)
    assert draft.failed
    assert draft.proposers == (None, "ngram", "model")
    assert rows(draft) == [[], fakes["ngram"].tokens(sequences[1], 2), fakes["model"].tokens(sequences[2], 1)]
    check_draft(draft, [4, 4, 4], CPU)


def test_a_failing_offer_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "engine")
    fakes = make_fakes(lookup={0: 4}, model={0: 3})
    (sequence,) = make_sequences("cascade")
    fakes["lookup"].fails = {"offer"}
    assert make_chains(fakes).offer(sequence, 4) == Offer("model", 3, 15)
    assert "cannot offer" in caplog.text
    fakes["model"].fails = {"offer"}
    assert make_chains(fakes).offer(sequence, 4) == NO_OFFER


def test_all_of_them_failing() -> None:
    fakes = make_fakes()
    for fake in fakes.values():
        fake.fails = {"propose"}
    draft = make_chains(fakes).propose(make_batch(*make_sequences("cascade", "ngram")), [2, 2])
    assert (draft.ks, draft.tokens, draft.failed) == ((0, 0), None, True)


def test_all_observe_though_one_of_them_cannot() -> None:
    """Only that drafter forgets, even if forgetting fails too. The caller gets a DrafterFault."""
    fakes = make_fakes(model={0: 1})
    drafters, batch = make_chains(fakes), make_batch(*make_sequences("model", "cascade"))
    drafters.observe(batch, make_verdict(0, 0))
    fakes["lookup"].fails = {"observe", "forget"}
    with pytest.raises(DrafterFault):
        drafters.observe(batch, make_verdict(0, 0))
    assert all(fake.observed == [batch, batch] for fake in fakes.values())
    assert {name: fake.forgotten for name, fake in fakes.items() if fake.forgotten} == {"lookup": [0, 1]}


def test_all_forget_though_one_of_them_cannot() -> None:
    fakes = make_fakes()
    drafters, (sequence,) = make_chains(fakes), make_sequences("ngram")
    drafters.forget(sequence)
    fakes["ngram"].fails = {"forget"}
    with pytest.raises(DrafterFault):
        drafters.forget(sequence)
    assert all(fake.forgotten == [0, 0] for fake in fakes.values())


@pytest.mark.parametrize("leaking", ["ngram", "lookup", "prediction", "model", "suffix", "lookahead"])
def test_an_audit_looks_at_all(leaking: DrafterName) -> None:
    fakes = make_fakes()
    make_chains(fakes).audit({1})
    fakes[leaking].fails = {"audit"}
    with pytest.raises(AssertionError, match="leaks"):
        make_chains(fakes).audit({1})
