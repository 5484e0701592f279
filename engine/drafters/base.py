"""What a drafter is (architecture R11). A new one is a small class; nothing else learns its name."""

import logging
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.sampling.acceptance import Verdict
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import DrafterName

log = logging.getLogger(__name__)


NO_TOKEN = -1  # a draft that nothing was drawn for, since its law is not finite: an illegal id, which no verifier keeps


class DrafterFault(RuntimeError):
    """A part of the drafter failed to observe or to forget. It is logged and dealt with: the part forgot the round's
    sequences, the others did their work. All that is left is to count it."""


class Offer(NamedTuple):
    """What would be proposed for a sequence in the coming round, as far as that is known before it."""

    source: DrafterName | None  # who would propose; None: nobody
    most: int  # tokens, at most
    gap: int  # committed tokens that a model has to read first, at least 1; 0: it runs no model


NO_OFFER = Offer(None, 0, 0)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences of a round in its order, with the sampling parameters of its rows."""

    sequences: tuple[Sequence, ...]
    sampler: Sampler
    confidences: tuple[float, ...] = ()  # joint confidence below which a model's draft ends; 0: never; (): all 0


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
    steps: int = 0  # sequential forwards it took, those that only read what the draft model had not
    read: int = 0  # tokens that the draft model was fed in them
    forward_us: int = 0  # of the time it took, the forwards alone
    failed: bool = False  # the drafter raised: while proposing (then nothing is proposed) or while observing

    @classmethod
    def none(cls, count: int, *, failed: bool = False) -> "Draft":
        return cls((0,) * count, None, failed=failed)


class Drafter(Protocol):
    needs_hidden: ClassVar[tuple[int, ...]]  # target layers whose outputs it wants with a round's logits

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """What it would propose for the sequence in the coming round, asked for up to k drafts. Cheap, and a function
        of committed tokens and past rounds: k may then be chosen by it under every verifier. The round's `propose` may
        ask for fewer, or not at all, and may come without it. An exception costs the round this one's drafts."""
        ...

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


def check_draft(draft: Draft, wanted: Seq[int], device: torch.device) -> None:
    """Raise ValueError unless the draft is what was asked for, in the form that the pass and the verifier take."""
    if any(not 0 <= k <= most for k, most in zip(draft.ks, wanted, strict=True)):
        raise ValueError(f"the drafter proposed {draft.ks} tokens where at most {tuple(wanted)} were asked for")
    tokens = draft.tokens
    if tokens is None:
        if any(draft.ks):
            raise ValueError(f"the drafter announced {draft.ks} tokens and gave none")
        return
    if tokens.dim() != 2 or tokens.shape[0] != len(wanted) or tokens.shape[1] < max(draft.ks):
        raise ValueError(f"the drafter announced {draft.ks} tokens and gave a table of shape {tuple(tokens.shape)}")
    if tokens.dtype is not torch.int64 or tokens.device.type != device.type:
        raise ValueError(f"the drafter gave {tokens.dtype} on {tokens.device}, not int64 on {device}")
    _check_laws(draft, device)


def _check_laws(draft: Draft, device: torch.device) -> None:
    """The same of logq: a row for every sequence that logq_rows names, as deep as the deepest draft."""
    logq, rows = draft.logq, draft.logq_rows
    if logq is None:
        if rows:
            raise ValueError(f"the drafter announced the laws of sequences {sorted(rows)} and gave none")
        return
    if logq.dim() != 3 or logq.shape[1] < max(draft.ks) or not logq.is_floating_point():
        raise ValueError(f"the drafter announced {draft.ks} tokens and gave {logq.dtype} laws {tuple(logq.shape)}")
    if logq.device.type != device.type:
        raise ValueError(f"the drafter gave laws on {logq.device}, not on {device}")
    if any(not (0 <= i < len(draft.ks) and 0 <= row < logq.shape[0]) for i, row in rows.items()):
        raise ValueError(f"the drafter gave laws {tuple(logq.shape)} of {len(draft.ks)} sequences as {dict(rows)}")


def try_forget(drafter: Drafter, sequence: Sequence) -> bool:
    """Whether the drafter forgot the sequence. Its failure may cost no request (R9); a leak is the audit's to find."""
    try:
        drafter.forget(sequence)
    except Exception:
        log.exception("the drafter failed to forget request %s", sequence.request_id)
        return False
    return True
