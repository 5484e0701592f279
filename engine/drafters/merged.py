"""Several draft models at once: the chain of each, merged into one token tree (merge-based speculation: SpecInfer, Miao
et al. 2023, arXiv 2305.09781)."""

import logging
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import replace

from engine.drafters.base import (
    NO_OFFER,
    Draft,
    DraftBatch,
    DrafterFault,
    Offer,
    try_forget,
    try_offer,
    try_propose,
)
from engine.drafters.merged_chains import OwnChain, merge_chains
from engine.drafters.model import ModelDrafter
from engine.heads.state_drafter import StateDrafter
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence
from engine.types import DrafterName

log = logging.getLogger(__name__)

MERGED: DrafterName = "merged"


class MergedDrafter:
    """All draft models draft for a sequence whose drafter is MERGED. The first model drafts alone for other sequences,
    under `block`, which decides about chains only, and where the batch wants a tree of a given shape.

    Each model has its own memory, which holds the model's own chain only. After the verdict it keeps what was accepted
    of that chain. It reads accepted tokens of other chains with its next gap (R1).

    Lengths: of n models each but the first draws a share of k / n tokens. Coupled chains that begin alike share nodes,
    so the first model draws k tokens, and the deepest nodes beyond k are cut. The cut looks at drawn tokens, which
    changes no text: a coupled text is the target's own draws. Under `rejection` the lengths depend on no drawn token.
    Only the first token of another model's chain can save a round there, so the share is half as long.

    A model that has no offer leaves its nodes to the others. A model that raises costs its own chain (R9).
    """

    def __init__(self, models: Seq[ModelDrafter]) -> None:
        """models: at least two. The n-th draws with noise of rank n."""
        self.models = tuple(models)
        self._device = models[0].runner.device
        self._chains: dict[int, tuple[OwnChain | None, ...]] = {}  # by handle: each model's part of the latest draft

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """At most k drafts. The gap counts what a model has to read beyond one token, summed over the models."""
        if sequence.drafter != MERGED:
            return self.models[0].offer(sequence, k)
        offers = self._offers(sequence, k)
        pairs = zip(_divide(sequence, k, [offer.max_k > 0 for offer in offers]), offers, strict=True)
        taken = [(min(length, offer.max_k), offer.gap) for length, offer in pairs if length]
        if not taken:
            return NO_OFFER
        return Offer(sequence.drafter, min(k, sum(n for n, _ in taken)), 1 + sum(gap - 1 for _, gap in taken))

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        lengths = [self._lengths(batch, i, k) for i, k in enumerate(ks)]
        drafts = [
            try_propose(model, batch, [of[n] for of in lengths], self._device) for n, model in enumerate(self.models)
        ]
        draft, chains = merge_chains(batch, drafts, ks)
        self._chains = {batch.sequences[i].handle: parts for i, parts in chains.items()}
        return draft

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        """Raises DrafterFault if a model raised. By then it has forgotten the round's sequences, and all others have
        observed."""
        chains, self._chains = self._chains, {}
        failed = False
        for n, model in enumerate(self.models):
            parts = [chains[s.handle][n] if s.handle in chains else None for s in batch.sequences]
            try:
                model.observe(batch, _own_verdict(verdict, parts))
            except Exception:
                log.exception("a draft model failed to observe; it forgets the round's sequences")
                for sequence in batch.sequences:
                    try_forget(model, sequence)
                failed = True
        if failed:
            raise DrafterFault("a draft model failed to observe")

    def forget(self, sequence: Sequence) -> None:
        """Raises DrafterFault if a model raised, after all others have forgotten."""
        forgotten = [try_forget(model, sequence) for model in self.models]
        if not all(forgotten):
            raise DrafterFault("a draft model failed to forget")

    def audit(self, live: Set[int]) -> None:
        for model in self.models:
            model.audit(live)

    def _offers(self, sequence: Sequence, k: int) -> list[Offer]:
        return [try_offer(model, sequence, k) for model in self.models]

    def _lengths(self, batch: DraftBatch, i: int, k: int) -> list[int]:
        """The length of each model's chain for sequence i. If the batch wants a tree, the first model's length is that
        of the tree."""
        sequence = batch.sequences[i]
        if not k or sequence.drafter != MERGED or batch.shape(i) is not None or batch.grows(i):
            return [k, *(0 for _ in self.models[1:])]
        return _divide(sequence, k, [offer.max_k > 0 for offer in self._offers(sequence, k)])


def draft_models(models: Seq[ModelDrafter] | Seq[StateDrafter]) -> ModelDrafter | StateDrafter | MergedDrafter:
    """The drafter of one or several draft models, or of heads without memory."""
    if len(models) == 1:
        return models[0]
    return MergedDrafter([model for model in models if isinstance(model, ModelDrafter)])


def _divide(sequence: Sequence, k: int, able: Seq[bool]) -> list[int]:
    """The length of each model's chain for a sequence that gets k nodes; 0 for a model that is not able to draft."""
    if sequence.verifier == "block" and not sequence.coupled:
        able = [able[0], *(False for _ in able[1:])]
    order, lengths = [n for n, is_able in enumerate(able) if is_able], [0] * len(able)
    if not order:
        return lengths
    share, left = max(1, k // (len(order) * (1 if sequence.coupled else 2))), k - 1
    for n in order[1:]:
        lengths[n] = min(share, left)
        left -= lengths[n]
    lengths[order[0]] = k if sequence.coupled else left + 1
    return lengths


def _own_verdict(verdict: Verdict, parts: Seq[OwnChain | None]) -> Verdict:
    """The verdict on one model's chains, given its part of each sequence's draft; None: it has none."""
    drafts, emitted, paths = list[list[int]](), list[list[int]](), dict[int, list[int]]()
    for i, part in enumerate(parts):
        tokens, path = verdict.drafts[i], verdict.paths.get(i)
        if part is None or not tokens:
            drafts.append([])
            emitted.append(verdict.emitted[i][-1:])
            continue
        if part.nodes is None:
            drafts.append(tokens)
            emitted.append(verdict.emitted[i])
            if path is not None:
                paths[i] = path
            continue
        followed = path if path is not None else range(verdict.accepted[i])
        kept = part.count_kept(followed)
        drafts.append(part.tokens if part.tokens is not None else [tokens[node] for node in part.nodes])
        emitted.append([*verdict.emitted[i][:kept], verdict.emitted[i][-1]])
    return replace(verdict, drafts=drafts, emitted=emitted, paths=paths)
