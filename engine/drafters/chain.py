"""The engine's one drafter: asks the right ones for each sequence, in turn, and makes one draft of what they offer."""

import logging
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.drafters.base import (
    NO_OFFER,
    Draft,
    DraftBatch,
    Drafter,
    DrafterFault,
    Offer,
    check_draft,
    try_forget,
)
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence
from engine.types import DrafterName

log = logging.getLogger(__name__)

Chain = tuple[tuple[DrafterName, Drafter], ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """One distinct drafter."""

    drafter: Drafter
    names: Mapping[DrafterName | None, DrafterName]  # chain that it is part of → its own name there


class ChainedDrafter:
    """A sequence's `drafter` names its chain, the drafters that are asked for it one after the other until one offers
    something; without a chain nothing is ever drafted for it.

    A drafter is asked once a round, for all sequences whose turn has come to it, so it stands behind everything that
    stands before it in any chain. Raises ValueError (graphlib.CycleError) if two chains contradict each other there.
    A drafter that fails costs its own sequences its own offers; who comes later in their chains is still asked (R9).
    """

    needs_hidden: ClassVar[tuple[int, ...]] = ()

    def __init__(self, chains: Mapping[DrafterName, Chain], device: torch.device) -> None:
        self._device = device
        self.names = tuple(chains)
        self._stages = _stages(chains)
        self.drafters = tuple(stage.drafter for stage in self._stages)

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """That of the first in its chain who has any; one that fails is passed over (R9)."""
        for stage in self._stages:
            name = stage.names.get(sequence.drafter)
            if name is not None:
                offer = _try_offer(stage.drafter, sequence, k)
                if offer.max_k > 0:
                    return offer._replace(source=name)
        return NO_OFFER

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        left = list(ks)
        drafts: list[Draft] = []
        for stage in self._stages:
            wanted = [k if k and s.drafter in stage.names else 0 for s, k in zip(batch.sequences, left, strict=True)]
            if not any(wanted):
                continue
            draft = self._ask(stage, batch, wanted)
            drafts.append(draft)
            left = [0 if offered else k for k, offered in zip(left, draft.ks, strict=True)]
        return drafts[0] if len(drafts) == 1 else _merged(drafts, len(ks))

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        """Raises DrafterFault after all of them have observed, or forgotten the round's sequences if they could not."""
        failed = False
        for stage in self._stages:
            try:
                stage.drafter.observe(batch, verdict)
            except Exception:
                log.exception("a drafter failed to observe; it forgets the round's sequences")
                for sequence in batch.sequences:
                    try_forget(stage.drafter, sequence)
                failed = True
        if failed:
            raise DrafterFault("a drafter failed to observe")

    def forget(self, sequence: Sequence) -> None:
        """Raises DrafterFault after all of them have been asked, if one could not."""
        forgotten = [try_forget(stage.drafter, sequence) for stage in self._stages]
        if not all(forgotten):
            raise DrafterFault("a drafter failed to forget")

    def audit(self, live: Set[int]) -> None:
        for stage in self._stages:
            stage.drafter.audit(live)

    def _ask(self, stage: Stage, batch: DraftBatch, wanted: Seq[int]) -> Draft:
        try:
            draft = stage.drafter.propose(batch, wanted)
            check_draft(draft, wanted, self._device)
        except Exception:
            log.exception("a drafter failed; its sequences go without its drafts this round")
            return Draft.none(len(wanted), failed=True)
        names = (stage.names[s.drafter] if k else None for s, k in zip(batch.sequences, draft.ks, strict=True))
        return replace(draft, proposers=tuple(names))


def _try_offer(drafter: Drafter, sequence: Sequence, k: int) -> Offer:
    try:
        return drafter.offer(sequence, k)
    except Exception:
        log.exception("a drafter failed to say what it offers; it counts as nothing")
        return NO_OFFER


def _stages(chains: Mapping[DrafterName, Chain]) -> tuple[Stage, ...]:
    """The distinct drafters, each behind all that stand before it in a chain."""
    names: dict[int, dict[DrafterName | None, DrafterName]] = {}
    drafters: dict[int, Drafter] = {}
    order: TopologicalSorter[int] = TopologicalSorter()
    for chain_name, chain in chains.items():
        before: list[int] = []
        for name, drafter in chain:
            drafters[id(drafter)] = drafter
            names.setdefault(id(drafter), {})[chain_name] = name
            order.add(id(drafter), *before)
            before = [id(drafter)]
    return tuple(Stage(drafters[key], names[key]) for key in order.static_order())


def _merged(drafts: Seq[Draft], count: int) -> Draft:
    """One draft of several, at most one of which offers anything for any one sequence. Those that offer nothing lend
    their steps, reading, time and failure only; a single one that offers keeps its tensors."""
    offers = [d for d in drafts if any(d.ks)]
    if not offers:
        merged = Draft.none(count)
    elif len(offers) == 1:
        merged = offers[0]
    else:
        merged = _combined(offers, count)
    return replace(
        merged,
        steps=sum(d.steps for d in drafts),
        read=sum(d.read for d in drafts),
        forward_us=sum(d.forward_us for d in drafts),
        failed=any(d.failed for d in drafts),
    )


def _combined(offers: Seq[Draft], count: int) -> Draft:
    owners = [next((d for d in offers if d.ks[i]), offers[0]) for i in range(count)]
    ks = tuple(owner.ks[i] for i, owner in enumerate(owners))
    logq, logq_rows = _merged_laws(offers, max(ks))
    proposers = tuple(owner.proposers[i] if owner.proposers else None for i, owner in enumerate(owners))
    return Draft(ks, _merged_tokens(offers, owners, max(ks)), logq, logq_rows, proposers)


def _merged_tokens(offers: Seq[Draft], owners: Seq[Draft], depth: int) -> Tensor:
    """[B, depth]: row i of its owner's table."""
    tables = torch.cat([_deep(d.tokens, depth, 0) for d in offers if d.tokens is not None])
    start = {id(d): n * len(owners) for n, d in enumerate(offers)}
    rows = [start[id(owner)] + i for i, owner in enumerate(owners)]
    return tables.index_select(0, torch.tensor(rows, device=tables.device))


def _merged_laws(offers: Seq[Draft], depth: int) -> tuple[Tensor | None, dict[int, int]]:
    """[n, depth, vocab], one after the other, and the rows of the sequences that each offers for."""
    laws: list[Tensor] = []
    rows: dict[int, int] = {}
    first = 0
    for draft in offers:
        if draft.logq is not None:
            laws.append(_deep(draft.logq.transpose(1, 2), depth, -torch.inf).transpose(1, 2))
            rows |= {i: first + row for i, row in draft.logq_rows.items() if draft.ks[i]}
            first += len(draft.logq)
    return (laws[0] if len(laws) == 1 else torch.cat(laws) if laws else None), rows


def _deep(values: Tensor, depth: int, fill: float) -> Tensor:
    """Exactly `depth` entries in the last dimension: cut, or filled up where no draft of this drafter reaches."""
    missing = depth - values.shape[-1]
    return F.pad(values, (0, missing), value=fill) if missing > 0 else values[..., :depth]
