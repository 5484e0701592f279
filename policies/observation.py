"""What the policies see before a round, what they answer, and what they learn from after it.

Arrays have one entry per sequence that decodes, in the order of the round's candidates. K is the largest k that the
server allows. Times are in seconds, lengths in tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from policies.config import Reason
from policies.shapes import Parents
from policies.trees import Bools as Bools
from policies.trees import Floats as Floats
from policies.trees import Ints as Ints
from policies.trees import Nodes, Shapes, best_nodes, node_values

WINDOW = 32  # rounds of one kind that a median is taken over: up to half of them may have been interrupted
FEW = 4  # rounds from which on a median is used: one of them may have been interrupted
SETTLING = 6  # rounds after the first drafts, or after the last ones, that show no usual time: the processor's caches
# take so long to hold what the other rounds need
STALE = 1024  # rounds for which a measurement is believed: then it is forgotten, or made again
UNREAD = 2  # tokens that a round leaves unread at most: its last draft, if all are accepted, and the bonus token


class Candidate(NamedTuple):
    """A sequence that decodes in the coming round, as the engine knows it. The defaults allow no drafts."""

    handle: int
    fixed: int | None  # k that its request asks for; None: the policy chooses
    max_k: int | None = None  # most drafts that its request allows
    left: int = 0  # drafts that would, all accepted, emit all of its tokens
    room: int = 0  # drafts that its KV cache has memory for
    source: str | None = None  # the drafter that would draft for it in this round; None: there is none
    offered: int = 0  # most drafts that the source has; a draft model has as many as asked for
    gap: int = 0  # committed tokens that the draft model has not read; 0: the source runs no model
    tree: Parents | None = None  # the tree that its request asks for, `fixed` nodes
    branches: bool = False  # whether its drafts may be a tree that the policy chooses

    @property
    def guessed(self) -> bool:
        """Whether a drafter without a model offers a guess, and the policy chooses how much of it to take."""
        return self.source is not None and not self.gap and self.fixed is None

    def limit(self, policy_most: int) -> tuple[int, Reason]:
        """(most drafts that it may get, what prevents more). policy_most: the policy's maximum. A fixed k may exceed
        it, and is asked for whatever the drafter offers."""
        if self.fixed is not None:
            most = min(self.fixed, self.left, self.room)
            return most, "user" if most == self.fixed else "cap" if most == self.left else "cache"
        cap = min(policy_most, self.left, self.offered) if self.source is not None else 0
        user = cap if self.max_k is None else self.max_k
        most = min(cap, user, self.room)
        return most, "cache" if most < min(cap, user) else "cap" if most == cap else "user"


class Prefill(NamedTuple):
    """The prompts that are read beside decoding sequences."""

    tokens: int = 0  # that the coming pass reads about
    sequences: int = 0  # whose prompts have memory, and that decode for many rounds after them
    passes: int = 0  # until all prompts that have memory are read


NO_PREFILL = Prefill()


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Predicted seconds of one round of a given batch, as a function of what is drafted in it.

    With n drafts, the largest k being D, a round takes base + verify[n] + padding[D]. Drafts add `drafting`. Drafts of
    the model add model + forwards · step + m · token: it runs as many forwards as its longest path has drafts, and
    reads m tokens: gaps, and the drafts with another one behind them. Where a draft branches, all takes `tree` times
    as long.
    """

    base_s: float  # host work of every round
    drafting_s: float  # additional host work of rounds with drafts
    model_s: float  # once per round in which the draft model runs
    step_s: float  # per forward of the draft model
    token_s: float  # per token that the draft model reads
    verify_s: Floats  # [≥ 1 + most drafts of the round] the target's pass with n tokens more than one per sequence
    padding_s: Floats  # [≥ 1 + K] additional time of the pass if the largest k is D: attention may be computed as if
    # every k were D; non-decreasing, 0 at 0
    tree: float = 1.0
    gap_tokens: float = 0.0  # what gaps cost whatever their length is, as tokens that the draft model reads

    def seconds(
        self,
        drafts: Ints | int,
        longest: Ints | int,
        forwards: Ints | int,
        read: Floats | float,
        *,
        branched: Bools | bool = False,
    ) -> Floats:
        """Seconds of rounds, in the common shape of n, D, the forwards, m, and whether a draft branches."""
        of_chains = self._of_chains(drafts, longest, forwards, read)
        return np.asarray(of_chains * np.where(branched, self.tree, 1.0), np.float64)

    def of_round(self, drafts: int, longest: int, forwards: int, read: float, *, branched: bool = False) -> float:
        """As `seconds`, of one round: a tenth of the time."""
        return float(self._of_chains(drafts, longest, forwards, read)) * (self.tree if branched else 1.0)

    def _of_chains(self, drafts: Any, longest: Any, forwards: Any, read: Any) -> Any:
        once = self.base_s + (forwards > 0) * self.model_s + forwards * self.step_s
        total = once + (drafts > 0) * self.drafting_s + read * self.token_s
        return total + self.verify_s[drafts] + self.padding_s[longest]


@dataclass(frozen=True)
class Observation:
    """What a policy decides on. It includes sequences whose request fixed k: their drafts are made in any case."""

    fixed: Ints  # [B] k that a request fixed, within its limit; −1: the policy chooses
    limits: Ints  # [B] most drafts that each may get
    bounds: tuple[Reason, ...]  # [B] reason of a k at its limit: user, cap or cache
    survival: Floats  # [B, K] chance that the first j + 1 drafts of a chain are all accepted
    # [B, RANKS − 1] chance that this further sibling is accepted if the first one is not, over the chance of the first;
    # 0: the drafts may not branch
    sibling_chances: Floats
    gaps: Ints  # [B] as Candidate.gap
    left: Ints  # [B] most rounds that are left; at least 1
    # [B] most rounds over which reading a gap pays off; at least 1. Behind a doubling of the batch nobody knows whether
    # drafts go on
    horizon: Ints
    cost: RoundCost
    alone: RoundCost  # of a round of one sequence, without prompts
    change_s: float  # seconds that drafts cost the rounds behind them, if these have none
    trees: Shapes  # [B] that requests fixed, within their limits
    held: tuple[Ints, Shapes] | None  # [B] drafts of the last plan, within the limits; None: it was for other sequences
    # [B] (drafted, accepted) of each one's last round with drafts; a tree with a whole path accepted counts as accepted
    last: tuple[tuple[int, int] | None, ...]
    rounds: int  # since the last choice
    round_s: float  # their mean duration; 0: there was none
    choice_s: float = 0.0  # seconds by which a choice lengthens a round; 0: unknown

    @property
    def nodes(self) -> Nodes:
        """What drafts may be made of: the K nodes of a chain, then those of branches."""
        return best_nodes(self.survival.shape[1])

    @cached_property
    def values(self) -> Floats:
        """[B, U] chance that a round accepts each node, or [B, K] where no drafts may branch."""
        return (
            node_values(self.survival, self.sibling_chances, self.nodes)
            if self.sibling_chances.any()
            else self.survival
        )

    @cached_property
    def open(self) -> Ints:
        """[B] most drafts that the policy may add."""
        return np.where(self.fixed < 0, self.limits, 0)

    @property
    def free(self) -> Ints:
        """[F] places of the sequences that the policy decides about and that may get any draft."""
        return np.flatnonzero(self.open)

    @cached_property
    def behind(self) -> Floats:
        """[B] tokens of a gap beyond what every round reads, per round over which reading it pays off."""
        return self.unread / self.horizon

    @cached_property
    def unread(self) -> Floats:
        """[B] as beyond_usual(). The gaps of a round are read together."""
        return beyond_usual(self.gaps, self.cost, max(1, int((self.gaps > UNREAD).sum())))


def beyond_usual(gaps: Ints, cost: RoundCost, readers: int = 1) -> Floats:
    """[B] tokens of a gap beyond what every round reads, and its share of `gap_tokens`. readers: sequences that have
    such gaps."""
    beyond = np.maximum(gaps - UNREAD, 0)
    return beyond + (beyond > 0) * cost.gap_tokens / readers


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer."""

    ks: Ints  # [B]
    reasons: tuple[Reason, ...]  # [B]
    shapes: Shapes  # [B]
    confidence: float = 0.0  # a model's draft ends before a position at which the drafts' joint confidence is lower
    holds: int = 1  # rounds that it may be used for
    surprises: bool = False  # whether it ends once far more or far fewer drafts are accepted than expected
    newcomer_k: int = 0  # k of sequences that join in these rounds
    rests: int = 0  # rounds before them in which no policy needs to be asked, because nothing would be drafted


class Drafted(NamedTuple):
    """What became of a sequence's drafts in a round. A sequence without drafts has none."""

    handle: int
    source: str
    drafted: int
    accepted: int
    # Σ min(p, q) at the positions that were reached; (): unknown. In a tree: 1 where the first child was accepted, 0
    # where it was not, at the nodes that were reached and have children.
    overlaps: tuple[float, ...] = ()
    sibling_counts: tuple[
        tuple[int, int], ...
    ] = ()  # by rank, from 1 on: (how many were tried, how many were accepted)

    @property
    def whole(self) -> bool:
        """Whether no draft was rejected, or in a tree a path was accepted to its end."""
        return len(self.overlaps) == self.accepted if self.overlaps else self.accepted == self.drafted


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured round."""

    batch: int  # sequences that emit
    drafts: int  # of all sequences
    depth: int  # the largest k
    prefill: int  # tokens of prompts in the target's pass
    forwards: int  # of the draft model
    read: int  # tokens that the draft model read in them
    draft_s: float  # the drafters' time
    score_s: float  # the target's pass: input, forward, sampling, acceptance
    host_s: float  # the work around both: scheduling, committing, publishing; 0: unknown
    branched_drafts: int = (
        0  # drafts in trees that were asked for that are not first children; 0: only chains were asked for
    )

    @property
    def has_gap(self) -> bool:
        """Whether the draft model read more than the drafts and one token more of each sequence."""
        return self.read > self.drafts + self.batch
