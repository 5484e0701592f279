"""The engine's drafter: asks the drafters of each sequence's chain in turn and merges their drafts into one."""

import logging
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

import torch

from engine.drafters.base import (
    NO_OFFER,
    Draft,
    DraftBatch,
    Drafter,
    DrafterFault,
    Offer,
    try_forget,
    try_offer,
    try_propose,
)
from engine.drafters.merging import merge_drafts
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence
from engine.types import DrafterName

log = logging.getLogger(__name__)

Chain = tuple[tuple[DrafterName, Drafter], ...]  # in the order in which they are asked


@dataclass(frozen=True, slots=True)
class Stage:
    """A drafter and the chains that it is part of."""

    drafter: Drafter
    names: Mapping[DrafterName | None, DrafterName]  # chain → the drafter's name there


class ChainedDrafter:
    """A sequence's `drafter` names its chain. The drafters of the chain are asked in turn until one has an offer.
    Nothing is drafted for a sequence without a chain.

    A drafter is asked once a round, for all sequences that have reached it in their chains. Hence a drafter comes after
    all drafters that precede it in any chain. Raises ValueError (graphlib.CycleError) if two chains contradict each
    other. A drafter that raises costs its sequences its own drafts; the rest of their chains is still asked (R9).
    """

    def __init__(self, chains: Mapping[DrafterName, Chain], device: torch.device) -> None:
        self._device = device
        self._set(chains)

    def _set(self, chains: Mapping[DrafterName, Chain]) -> None:
        self._chains = chains
        self.names = tuple(chains)
        self._stages = _stages(chains)
        self.drafters = tuple(stage.drafter for stage in self._stages)

    @property
    def model(self) -> Drafter | None:
        """The drafter of chain `model`."""
        return next((drafter for _, drafter in self._chains.get("model", ())), None)

    def put_model(self, model: Drafter | None) -> None:
        """Let another draft model, or none, draft from the next round on. The other drafters keep what they know of
        their sequences; the old model is not told."""
        self._set(with_model(self._chains, model))

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """The first offer in the order of the sequence's chain; a drafter that raises is skipped (R9)."""
        for stage in self._stages:
            name = stage.names.get(sequence.drafter)
            if name is not None:
                offer = try_offer(stage.drafter, sequence, k)
                if offer.max_k > 0:
                    return offer._replace(source=name)
        return NO_OFFER

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        open_ks = list(ks)  # 0 for a sequence that has its draft
        drafts: list[Draft] = []
        for stage in self._stages:
            stage_ks = [k if s.drafter in stage.names else 0 for s, k in zip(batch.sequences, open_ks, strict=True)]
            if not any(stage_ks):
                continue
            draft = self._propose_by(stage, batch, stage_ks)
            drafts.append(draft)
            open_ks = [0 if proposed else k for k, proposed in zip(open_ks, draft.ks, strict=True)]
        return drafts[0] if len(drafts) == 1 else merge_drafts(drafts, len(ks))

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        """Raises DrafterFault if a drafter raised. By then it has forgotten the round's sequences, and all others have
        observed."""
        failed = False
        for stage in self._stages:
            try:
                stage.drafter.observe(batch, verdict)
            except DrafterFault:  # it has forgotten them already, as far as it had to
                failed = True
            except Exception:
                log.exception("a drafter failed to observe; it forgets the round's sequences")
                for sequence in batch.sequences:
                    try_forget(stage.drafter, sequence)
                failed = True
        if failed:
            raise DrafterFault("a drafter failed to observe")

    def forget(self, sequence: Sequence) -> None:
        """Raises DrafterFault if a drafter raised, after all others have forgotten."""
        forgotten = [try_forget(stage.drafter, sequence) for stage in self._stages]
        if not all(forgotten):
            raise DrafterFault("a drafter failed to forget")

    def audit(self, live: Set[int]) -> None:
        for stage in self._stages:
            stage.drafter.audit(live)

    def _propose_by(self, stage: Stage, batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft = try_propose(stage.drafter, batch, ks, self._device)
        names = (stage.names[s.drafter] if k else None for s, k in zip(batch.sequences, draft.ks, strict=True))
        return replace(draft, proposers=tuple(names))


def with_model(chains: Mapping[DrafterName, Chain], model: Drafter | None) -> dict[DrafterName, Chain]:
    """The chains with this draft model in place of theirs. None: without one. `cascade` asks it last."""
    found: dict[DrafterName, Chain] = {
        name: tuple(part for part in chain if part[0] != "model") for name, chain in chains.items() if name != "model"
    }
    if model is not None:
        found["cascade"] += (("model", model),)
        found["model"] = (("model", model),)
    return found


def _stages(chains: Mapping[DrafterName, Chain]) -> tuple[Stage, ...]:
    """The distinct drafters, each after all that precede it in any chain."""
    names: dict[int, dict[DrafterName | None, DrafterName]] = {}
    drafters: dict[int, Drafter] = {}
    order: TopologicalSorter[int] = TopologicalSorter()
    for chain_name, chain in chains.items():
        predecessors: list[int] = []
        for name, drafter in chain:
            drafters[id(drafter)] = drafter
            names.setdefault(id(drafter), {})[chain_name] = name
            order.add(id(drafter), *predecessors)
            predecessors = [id(drafter)]
    return tuple(Stage(drafters[key], names[key]) for key in order.static_order())
