"""What a drafter is (architecture R11). A new one is a small class; nothing else learns its name."""

import logging
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from deployments.engine.acceptance import Verdict
from deployments.engine.sampling import Sampler
from deployments.engine.sequence import Sequence
from deployments.engine.types import DrafterName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences of a round in its order, with the sampling parameters and noise of its rows."""

    sequences: tuple[Sequence, ...]
    sampler: Sampler
    offsets: tuple[int, ...]  # first row of each sequence in the sampler


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposals. ks may be smaller than what was asked for: a drafter offers what it has."""

    ks: tuple[int, ...]
    tokens: Tensor | None  # [B, ≥ max k] int64; row i holds ks[i] ids, then anything. None: nothing proposed
    logq: Tensor | None = None  # [n, ≥ max k, vocab] log-laws that tokens were drawn from, for verifiers that need it
    logq_rows: Mapping[int, int] = field(default_factory=dict)  # sequence of the batch → its row in logq
    # A sequence that is not in logq_rows was not drawn for: its q is one-hot at each token.
    proposers: tuple[DrafterName | None, ...] | None = None  # who proposed for each sequence; None: the drafter itself
    parents: Tensor | None = None  # [B, max k] for trees; None: a chain
    steps: int = 0  # sequential forwards it took
    forward_us: int = 0  # of the time it took, the forwards alone
    failed: bool = False  # the drafter raised: while proposing (then nothing is proposed) or while observing

    @classmethod
    def none(cls, count: int, *, failed: bool = False) -> "Draft":
        return cls((0,) * count, None, failed=failed)


class Drafter(Protocol):
    needs_hidden: ClassVar[tuple[int, ...]]  # target layers whose outputs it wants with a round's logits

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        """Up to ks[i] tokens for sequence i. An exception costs the round its drafts, nothing else (R9)."""
        ...

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        """What became of the proposals, before the tokens are committed: roll back to the agreed prefix."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is gone: free what it held. Idempotent."""
        ...

    def audit(self, live: Set[int]) -> None:
        """Raise AssertionError unless everything it holds is accounted for, and held for these handles only."""
        ...


class NoDrafter:
    """Every round is plain."""

    needs_hidden: ClassVar[tuple[int, ...]] = ()

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        return Draft.none(len(ks))

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def audit(self, live: Set[int]) -> None:
        pass


def try_forget(drafter: Drafter, sequence: Sequence) -> bool:
    """Whether the drafter forgot the sequence. Its failure may cost no request (R9); a leak is the audit's to find."""
    try:
        drafter.forget(sequence)
    except Exception:
        log.exception("the drafter failed to forget request %s", sequence.request_id)
        return False
    return True
