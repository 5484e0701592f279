"""What a drafter is (architecture R11), and what it proposes."""

import logging
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.device.round_clock import Forward
from engine.sampling.acceptance import Verdict
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.trees import Parents
from engine.trees import check as check_tree
from engine.types import DrafterName

log = logging.getLogger(__name__)


NO_TOKEN = -1  # in place of a draft whose law is not finite; an illegal id, which every verifier rejects


class DrafterFault(RuntimeError):
    """One of several drafters failed to observe or to forget. The error is logged, the drafter has forgotten the
    round's sequences, and the others did their work. The caller only counts the fault."""


class Offer(NamedTuple):
    """What a drafter could propose for a sequence in the coming round, as far as it knows before the round."""

    source: DrafterName | None  # the drafter that would propose; None: none
    max_k: int  # the most tokens that it would propose
    gap: int  # committed tokens that a draft model has to read first, at least 1; 0: it runs no model
    trees: bool = False  # whether it draws trees of any shape, which the policy may choose


NO_OFFER = Offer(None, 0, 0)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences of a round, in its order, and the sampler of its rows."""

    sequences: tuple[Sequence, ...]
    sampler: Sampler
    confidences: tuple[float, ...] = ()  # joint confidence below which the draft model stops; 0: never; (): all 0
    shapes: tuple[Parents | None, ...] = ()  # the tree that is wanted of each sequence; None: a chain; (): all chains
    branches: tuple[bool, ...] = ()  # whether sequence i may get any tree of up to ks[i] nodes; (): none may
    depths: tuple[int, ...] = ()  # the depth of a tree that grows for sequence i; 0: its shape is given; (): none grows
    captured: bool = False  # whether parts of the round may be captured graphs: device/captured_round.py

    def wants_tree(self, i: int) -> bool:
        """Whether sequence i gets a tree of its shape in `shapes`, or any tree. `block` decides on chains only."""
        wanted = self.shape(i) is not None or (bool(self.branches) and self.branches[i])
        return wanted and self.sequences[i].verifier != "block"

    def grows(self, i: int) -> bool:
        """Whether sequence i gets a tree of up to ks[i] nodes that grows by the draft's own probabilities."""
        return bool(self.depths) and self.depths[i] > 0

    def shape(self, i: int) -> Parents | None:
        return self.shapes[i] if self.shapes else None


@dataclass(frozen=True, slots=True)
class Draft:
    """The proposals of a round. ks may be smaller than the requested ks: a drafter offers what it has."""

    ks: tuple[int, ...]
    tokens: Tensor | None  # [B, ≥ max k] int64; row i holds ks[i] ids, then anything. None: no proposals
    logq: Tensor | None = None  # [n, ≥ max k, vocab]: log of the laws q that tokens were drawn from
    # Index in the batch → row of logq. A sequence that is not in here has a q that is one-hot at each of its drafts.
    logq_rows: Mapping[int, int] = field(default_factory=dict)
    proposers: tuple[DrafterName | None, ...] | None = None  # by sequence; None: the drafter that was asked
    steps: int = 0  # sequential forwards of the draft model, also those that only read
    read: int = 0  # tokens that these forwards fed
    forwards: tuple[Forward, ...] = ()  # their times, which can be read once the device has done them
    failed: bool = False  # the drafter raised while proposing (then nothing is proposed) or while observing
    # Index in the batch → the shape of its draft, ks[i] parents. A sequence that is not in here has a chain. A node's
    # row of logq is the law that it was drawn from, given its siblings before it.
    trees: Mapping[int, Parents] = field(default_factory=dict)
    wants_drawn: bool = False  # whether the drafter reads Verdict.drawn
    law_owner: int | None = None  # logq is [≥ B, …] where this runner's captured graphs always write laws

    @classmethod
    def none(cls, count: int, *, failed: bool = False) -> "Draft":
        return cls((0,) * count, None, failed=failed)


class Drafter(Protocol):
    """Proposes tokens for sequences. Whatever it raises costs drafts and nothing else (R9)."""

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """How many drafts, up to k, it could propose for the sequence in the coming round. Cheap.

        A function of committed tokens and past rounds only, so that every verifier stays lossless when k depends on it.
        `propose` may follow with a smaller k or not at all, and may come without an `offer` before it.
        """
        ...

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        """Propose up to ks[i] tokens for sequence i."""
        ...

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        """Learn the verdict on the proposals and roll back to the accepted prefix. Tokens are committed afterwards."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or lost its memory: free what is held for it. Idempotent."""
        ...

    def audit(self, live: Set[int]) -> None:
        """Raise AssertionError unless all memory is accounted for and held for the handles in `live` only."""
        ...


def check_draft(draft: Draft, max_ks: Seq[int], device: torch.device) -> None:
    """Raise ValueError unless the draft has at most max_ks[i] tokens for sequence i, in the form of `Draft`."""
    if any(not 0 <= k <= max_k for k, max_k in zip(draft.ks, max_ks, strict=True)):
        raise ValueError(f"the drafter proposed {draft.ks} tokens; at most {tuple(max_ks)} were requested")
    tokens = draft.tokens
    if tokens is None:
        if any(draft.ks):
            raise ValueError(f"the drafter proposed {draft.ks} tokens without a table of their ids")
        return
    if tokens.dim() != 2 or tokens.shape[0] != len(max_ks) or tokens.shape[1] < max(draft.ks):
        raise ValueError(f"the drafter proposed {draft.ks} tokens in a table of shape {tuple(tokens.shape)}")
    if tokens.dtype is not torch.int64 or tokens.device.type != device.type:
        raise ValueError(f"the drafter's ids must be int64 on {device}, not {tokens.dtype} on {tokens.device}")
    _check_trees(draft)
    _check_laws(draft, device)


def _check_trees(draft: Draft) -> None:
    """Raise ValueError unless each tree has one parent for each draft of its sequence."""
    for i, parents in draft.trees.items():
        if not 0 <= i < len(draft.ks) or len(parents) != draft.ks[i]:
            raise ValueError(f"the drafter's tree {parents} of sequence {i} does not fit its drafts {draft.ks}")
        check_tree(parents)


def _check_laws(draft: Draft, device: torch.device) -> None:
    """Raise ValueError unless logq has a row for every sequence in logq_rows, as deep as the longest draft."""
    logq, rows = draft.logq, draft.logq_rows
    if logq is None:
        if rows:
            raise ValueError(f"the drafter named laws for sequences {sorted(rows)} without a table of them")
        return
    if logq.dim() != 3 or logq.shape[1] < max(draft.ks) or not logq.is_floating_point():
        raise ValueError(f"the drafter proposed {draft.ks} tokens with {logq.dtype} laws of shape {tuple(logq.shape)}")
    if logq.device.type != device.type:
        raise ValueError(f"the drafter's laws must be on {device}, not on {logq.device}")
    if any(not (0 <= i < len(draft.ks) and 0 <= row < logq.shape[0]) for i, row in rows.items()):
        raise ValueError(
            f"the drafter's rows of laws {dict(rows)} do not fit {len(draft.ks)} sequences and laws {tuple(logq.shape)}"
        )


def try_offer(drafter: Drafter, sequence: Sequence, k: int) -> Offer:
    """The drafter's offer. One that raises offers nothing (R9)."""
    try:
        return drafter.offer(sequence, k)
    except Exception:
        log.exception("a drafter failed to make an offer; it is skipped")
        return NO_OFFER


def try_propose(drafter: Drafter, batch: DraftBatch, ks: Seq[int], device: torch.device) -> Draft:
    """The drafter's draft. One that raises, or whose draft has not the form of `Draft`, proposes nothing (R9)."""
    if not any(ks):
        return Draft.none(len(ks))
    try:
        draft = drafter.propose(batch, ks)
        check_draft(draft, ks, device)
    except Exception:
        log.exception("a drafter failed; this round runs without its drafts")
        return Draft.none(len(ks), failed=True)
    return draft


def try_forget(drafter: Drafter, sequence: Sequence) -> bool:
    """Whether the drafter forgot the sequence. If it raised, no request pays for it (R9); the audit finds a leak."""
    try:
        drafter.forget(sequence)
    except Exception:
        log.exception("the drafter failed to forget request %s", sequence.request_id)
        return False
    return True
