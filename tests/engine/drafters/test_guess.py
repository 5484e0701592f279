"""What all drafters without a model share: feeding, tables, pauses, and letting go."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from engine.drafters.base import check_draft
from engine.drafters.guess import MAX_PAUSE, GuessDrafter, Guesser
from engine.sequence import Sequence
from engine.trees import ROOT, Parents
from tests.engine.drafters.rounds import make_batch, make_verdict, rows
from tests.engine.driving import make_sequence

CPU = torch.device("cpu")


class Echo(Guesser):
    """Guesses the latest tokens, in order; remembers all it was fed."""

    def __init__(self, most: int = 99) -> None:
        self.fed: list[int] = []
        self.most = most
        self.guessed = 0  # times

    def push(self, token: int) -> None:
        self.fed.append(token)

    def guess(self, k: int) -> list[int]:
        self.guessed += 1
        return self.fed[-min(k, self.most) :] if self.most else []


def echoes(most: int = 99, max_pause: int = MAX_PAUSE) -> tuple[GuessDrafter[Echo], list[Echo]]:
    made: list[Echo] = []

    def make(_: Sequence) -> Echo:
        made.append(Echo(most))
        return made[-1]

    return GuessDrafter(make, max_pause), made


def offered(drafter: GuessDrafter[Echo], sequence: Sequence, accepted: int, k: int = 2) -> int:
    """Tokens offered in one round, of which `accepted` are right."""
    batch = make_batch(sequence)
    draft = drafter.propose(batch, [k])
    drafter.observe(batch, make_verdict(accepted if draft.ks[0] else 0))
    return draft.ks[0]


def test_it_is_fed_every_committed_token_once_whatever_rounds_it_is_asked_in() -> None:
    rng = random.Random(1)
    drafter, made = echoes()
    sequences = [make_sequence(i, [i] * (i + 1)) for i in range(3)]
    fed = [0] * 3
    for _ in range(60):
        batch = make_batch(*sequences)
        ks = [rng.randrange(3) for _ in sequences]
        draft = drafter.propose(batch, ks)
        drafter.observe(batch, make_verdict(*(rng.randint(0, k) for k in draft.ks)))
        for i, sequence in enumerate(sequences):
            if draft.ks[i]:
                fed[i] = len(sequence.tokens)
            sequence.tokens += [rng.randrange(100) for _ in range(rng.randrange(4))]
    assert len(made) == 3
    for sequence, length in zip(sequences, fed, strict=True):
        (echo,) = [e for e in made if e.fed[0] == sequence.handle]
        assert echo.fed == sequence.tokens[:length]
        assert length > 20


def test_tokens_before_the_lookback_are_not_fed() -> None:
    """At the first look, and after rounds in which it was not asked."""
    made: list[Echo] = []

    def make(_: Sequence) -> Echo:
        made.append(Echo())
        return made[-1]

    drafter = GuessDrafter(make, lookback=5)
    sequence = make_sequence(0, [*range(40)])
    for length, fed in ((40, [*range(35, 40)]), (42, [40, 41]), (42, []), (60, [*range(55, 60)])):
        sequence.tokens[:] = range(length)
        before = len(made[0].fed) if made else 0
        drafter.catch_up(sequence)
        assert made[0].fed[before:] == fed


class Pronged(Echo):
    """Knows every latest token as a continuation, if it may branch."""

    def guess_tree(self, nodes: int, shape: Parents | None = None) -> tuple[list[int], Parents]:
        tokens = self.guess(nodes if shape is None else shape.count(ROOT))
        return tokens, (ROOT,) * len(tokens)


def test_trees_where_they_are_allowed() -> None:
    """A tree that is a chain is told as a chain. `block` gets chains."""
    drafter = GuessDrafter(lambda _: Pronged())
    sequences = [make_sequence(i, [1, 2, 3]) for i in range(5)]
    sequences[3].verifier = "block"
    batch = replace(make_batch(*sequences), branches=(True, False, True, True, True))
    draft = drafter.propose(batch, [3, 3, 1, 3, 0])
    check_draft(draft, [3, 3, 1, 3, 0], CPU)
    assert draft.trees == {0: (ROOT,) * 3}
    assert rows(draft) == [[1, 2, 3], [1, 2, 3], [3], [1, 2, 3], []]


def test_trees_of_a_wanted_shape() -> None:
    drafter = GuessDrafter(lambda _: Pronged())
    sequences = [make_sequence(i, [1, 2, 3]) for i in range(3)]
    batch = replace(make_batch(*sequences), shapes=((ROOT, 0, ROOT), None, (ROOT, 0, 0)))
    draft = drafter.propose(batch, [3, 3, 3])
    assert draft.trees == {0: (ROOT, ROOT)}
    assert rows(draft) == [[2, 3], [1, 2, 3], [3]]


def test_an_offer_for_a_wanted_tree_is_not_cut_to_a_chain() -> None:
    drafter = GuessDrafter(lambda _: Echo(most=1))
    chained, branched, silent = make_sequence(0, [1, 2]), make_sequence(1, [1, 2]), make_sequence(2, [])
    branched.tree = silent.tree = (ROOT, ROOT, ROOT)
    assert [drafter.offer(s, 3).max_k for s in (chained, branched, silent)] == [1, 3, 0]


def test_a_guesser_that_knows_no_branches_makes_a_chain() -> None:
    """As long as that of the wanted shape's first children."""
    for wanted in ({"branches": (True,)}, {"shapes": ((ROOT, ROOT, 1, 0),)}):
        drafter, _ = echoes()
        draft = drafter.propose(replace(make_batch(make_sequence(0, [1, 2, 3])), **wanted), [4])
        assert (rows(draft), draft.trees) == ([[1, 2, 3] if "branches" in wanted else [2, 3]], {})


def test_a_pause_and_an_offer_hold_for_trees_too() -> None:
    made: list[Pronged] = []

    def make(_: Sequence) -> Pronged:
        made.append(Pronged())
        return made[-1]

    drafter = GuessDrafter(make)
    sequence = make_sequence(0, [1, 2])
    told = []
    for _ in range(5):
        offer = drafter.offer(sequence, 2)
        batch = replace(make_batch(sequence), branches=(True,))
        draft = drafter.propose(batch, [2])
        assert draft.ks == (offer.max_k,)
        drafter.observe(batch, make_verdict(0))
        told.append(draft.trees.get(0))
    branches = (ROOT, ROOT)
    assert told == [branches, None, branches, None, None]


def test_a_ragged_table() -> None:
    drafter, made = echoes()
    batch = make_batch(make_sequence(0, [1, 2, 3]), make_sequence(1, [4, 5]), make_sequence(2, [6]))
    draft = drafter.propose(batch, [3, 0, 2])
    assert draft.ks == (3, 0, 1)
    assert draft.tokens is not None
    assert draft.tokens.dtype is torch.int64
    assert draft.tokens.shape == (3, 3)
    assert rows(draft) == [[1, 2, 3], [], [6]]
    assert draft.logq is None
    assert not draft.logq_rows
    assert len(made) == 2  # nothing is kept for whom it was never asked


@pytest.mark.parametrize("ks", [[3, 3], [0, 0]], ids=["asked", "not asked"])
def test_no_table_where_there_is_nothing_to_offer(ks: Seq[int]) -> None:
    drafter, _ = echoes(most=0)
    draft = drafter.propose(make_batch(make_sequence(0, [1]), make_sequence(1, [2])), ks)
    assert draft.ks == (0, 0)
    assert draft.tokens is None
    assert not draft.failed


def test_pauses_double_while_nothing_is_accepted() -> None:
    drafter, _ = echoes()
    sequence = make_sequence(0, [1, 2])
    said = "".join("x" if offered(drafter, sequence, 0) else "." for _ in range(130))
    assert [len(pause) for pause in said.split("x")][1:-1] == [1, 2, 4, 8, 16, 32, 32]


def test_any_acceptance_ends_the_pauses() -> None:
    drafter, _ = echoes()
    sequence = make_sequence(0, [1, 2])
    said = [offered(drafter, sequence, 0) for _ in range(5)]
    assert said == [2, 0, 2, 0, 0]
    assert [offered(drafter, sequence, 1) for _ in range(4)] == [2] * 4
    assert [offered(drafter, sequence, 0) for _ in range(3)] == [2, 0, 2]  # from one round again


def test_a_drafter_without_pauses() -> None:
    drafter, _ = echoes(max_pause=0)
    sequence = make_sequence(0, [1, 2])
    assert [offered(drafter, sequence, 0) for _ in range(9)] == [2] * 9


def test_a_pause_is_of_its_own_sequence_and_counts_the_rounds_it_was_asked_in() -> None:
    drafter, _ = echoes()
    batch = make_batch(make_sequence(0, [1, 2]), make_sequence(1, [3, 4]))
    assert drafter.propose(batch, [1, 1]).ks == (1, 1)
    drafter.observe(batch, make_verdict(0, 1))
    for _ in range(5):
        assert drafter.propose(make_batch(*batch.sequences), [0, 1]).ks == (0, 1)
    assert drafter.propose(make_batch(*batch.sequences), [1, 1]).ks == (0, 1)
    assert drafter.propose(make_batch(*batch.sequences), [1, 1]).ks == (1, 1)


def test_a_sequence_without_a_draft_gets_no_pause() -> None:
    """Another drafter's failure is not its own."""
    drafter, _ = echoes()
    first, second = make_sequence(0, [1, 2]), make_sequence(1, [3, 4])
    batch = make_batch(first, second)
    drafter.propose(batch, [0, 1])
    drafter.observe(batch, make_verdict(0, 1))
    assert drafter.propose(make_batch(first, second), [1, 1]).ks == (1, 1)


def test_a_round_that_failed_is_no_verdict() -> None:
    """Its second attempt runs without drafts, and accepts none."""
    drafter, _ = echoes()
    sequence = make_sequence(0, [1, 2])
    drafter.propose(make_batch(sequence), [2])
    retried = make_batch(sequence)
    drafter.observe(retried, make_verdict(0))
    drafter.observe(make_batch(sequence), make_verdict(0))
    assert offered(drafter, sequence, 0) == 2
    assert offered(drafter, sequence, 0) == 0  # a verdict on the round itself counts


# Offers


def planned(drafter: GuessDrafter[Echo], sequence: Sequence, k: int, accepted: int = 0, *, ahead: bool = True) -> int:
    """What a round in which k is chosen says beforehand, or (not `ahead`) proposes unannounced; it emits a token."""
    offer = drafter.offer(sequence, 3) if ahead else None
    batch, draft = make_batch(sequence), None
    if k:
        draft = drafter.propose(batch, [k])
        assert offer is None or draft.ks[0] == min(k, offer.max_k)
    drafter.observe(batch, make_verdict(accepted if draft and draft.ks[0] else 0))
    sequence.tokens.append(7)
    if offer is None:
        return draft.ks[0] if draft else 0
    assert (offer.source, offer.gap) == (sequence.drafter, 0)
    return offer.max_k


def test_a_proposal_is_cut_from_what_was_offered() -> None:
    drafter, _ = echoes()
    sequence = make_sequence(0, [1, 2, 3, 4])
    assert drafter.offer(sequence, 3).max_k == 3
    assert drafter.offer(sequence, 1).max_k == 1  # asked again in the same round
    assert rows(drafter.propose(make_batch(sequence), [2])) == [[2, 3]]


def test_a_round_guesses_once() -> None:
    drafter, made = echoes()
    sequence = make_sequence(0, [1, 2, 3, 4])
    for _ in range(5):
        drafter.offer(sequence, 2)
        drafter.offer(sequence, 2)
        drafter.propose(make_batch(sequence), [2])
        sequence.tokens.append(5)
    assert made[0].guessed == 5


def test_what_was_offered_for_an_earlier_round_is_not_proposed() -> None:
    drafter, _ = echoes(most=2)
    sequence = make_sequence(0, [1, 2])
    drafter.offer(sequence, 2)
    sequence.tokens += [3, 4]
    assert rows(drafter.propose(make_batch(sequence), [2])) == [[3, 4]]


def test_no_offer_for_k_of_0() -> None:
    """Nor is that a round of a pause."""
    drafter, made = echoes()
    sequence = make_sequence(0, [1, 2])
    assert drafter.offer(sequence, 0).max_k == 0
    assert not made
    planned(drafter, sequence, 2)
    for _ in range(9):
        assert drafter.offer(sequence, 0).max_k == 0
    assert planned(drafter, sequence, 2) == 0  # the pause of one round


@pytest.mark.parametrize("ahead", [True, False])
def test_a_round_counts_once_whether_or_not_it_was_offered_for(ahead: bool) -> None:
    drafter, _ = echoes()
    sequence = make_sequence(0, [1, 2, 3])
    said = "".join("x" if planned(drafter, sequence, 3, ahead=ahead) else "." for _ in range(66))
    assert [len(pause) for pause in said.split("x")][1:-1] == [1, 2, 4, 8, 16]


def test_a_pause_ends_even_if_no_proposal_is_requested() -> None:
    """k is 0 while nothing is offered, and may be 0 after that."""
    drafter, _ = echoes()
    sequence = make_sequence(0, [1, 2, 3])
    for _ in range(4):  # doubles the pause, to 8 rounds
        while not planned(drafter, sequence, 0):
            pass
        sequence.tokens.pop()  # the same round again, as if k had been chosen
        drafter.forget(make_sequence(99, []))
        batch = make_batch(sequence)
        assert drafter.propose(batch, [3]).ks == (3,)
        drafter.observe(batch, make_verdict(0))
        sequence.tokens.append(7)
    said = [planned(drafter, sequence, 0) for _ in range(12)]
    assert said == [0] * 8 + [3] * 4


def test_an_offer_after_a_round_that_failed() -> None:
    """It is made anew, for the same tokens."""
    drafter, _ = echoes()
    sequence = make_sequence(0, [1, 2, 3])
    drafter.offer(sequence, 3)
    drafter.propose(make_batch(sequence), [3])
    drafter.observe(make_batch(sequence), make_verdict(0))  # the second attempt, without drafts
    assert planned(drafter, sequence, 2, accepted=2) == 3


def test_forgetting() -> None:
    drafter, made = echoes()
    first, second = make_sequence(0, [1, 2]), make_sequence(1, [3])
    drafter.propose(make_batch(first, second), [1, 1])
    drafter.audit({0, 1})
    with pytest.raises(AssertionError, match=r"gone: \[1\]"):
        drafter.audit({0})
    drafter.forget(second)
    drafter.forget(second)
    drafter.audit({0})
    second.tokens.append(5)
    assert offered(drafter, second, 1) == 2
    assert made[-1].fed == [3, 5]
