"""From the target's logits to a verdict: each sequence by its own verifier, all with one device-to-host copy (R8)."""

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.sampling import acceptance
from engine.sampling.acceptance import OVERLAP_SCALE, DeviceVerdict, Verdict
from engine.types import Verifier


def verify(batch: DraftBatch, draft: Draft, logits: Tensor) -> Verdict:
    """Decide over a round's drafts. logits [Σ (k + 1), vocab] are the target's, sequence-major.

    At temperature 0 the law is one token, and every verifier comes to equality: those sequences go with `match`.
    """
    decision: DeviceVerdict | None = None
    for name, which in _by_verifier(batch).items():
        part = _match(batch, draft, logits, which) if name == "match" else _exact(batch, draft, logits, which, name)
        if len(which) == len(batch.sequences):
            decision = part
            break
        decision = _merge(decision or _blank(draft.ks, logits.device), part, which)
    if decision is None:
        return Verdict([], [], [], [], 0, [])
    return on_host(decision, draft, logits.shape[-1])


def _by_verifier(batch: DraftBatch) -> dict[Verifier, list[int]]:
    parts: dict[Verifier, list[int]] = {}
    for i, sequence in enumerate(batch.sequences):
        parts.setdefault("match" if sequence.coupled else sequence.verifier, []).append(i)
    return parts


def _match(batch: DraftBatch, draft: Draft, logits: Tensor, which: Seq[int]) -> DeviceVerdict:
    ours, rows, ks = _rows(batch, draft, logits, which)
    scores = batch.sampler.scores(ours, rows, draft.tokens)
    drawn = batch.sampler.sample(scores, rows)
    finite = scores.gather(1, drawn[:, None])[:, 0].abs() < torch.inf  # an argmax over NaN picks a NaN
    if draft.tokens is None or len(which) == len(batch.sequences):
        return acceptance.match(drawn, finite, draft.tokens, ks)
    return acceptance.match(drawn, finite, draft.tokens[list(which)], ks)


def _exact(batch: DraftBatch, draft: Draft, logits: Tensor, which: Seq[int], verifier: Verifier) -> DeviceVerdict:
    ours, rows, ks = _rows(batch, draft, logits, which)
    sampler, depth = batch.sampler, max(ks)
    laws = sampler.laws(sampler.scores(ours, rows, draft.tokens), rows)
    if draft.tokens is None or not depth:
        weights, accepted = laws, torch.zeros(len(which), dtype=torch.int64, device=logits.device)
        overlaps = None
    else:
        drafts = draft.tokens[list(which), :depth]
        logp = acceptance.padded(laws, ks)
        logq = draft_laws(draft, which, drafts, logp)
        legal = drafts.clamp(0, logits.shape[-1] - 1)
        coins = sampler.coins(which, depth)
        if verifier == "block":
            decided, overlaps = acceptance.block(logp, logq, legal, ks), acceptance.overlaps(logp, logq)
            accepted = acceptance.last_success(decided.chances, coins)
        else:
            values = [batch.sequences[i].lenience or 1.0 for i in which]
            lenience = torch.tensor(values, dtype=torch.float64, device=logits.device)
            decided = acceptance.rejection(logp, logq, legal, ks, lenience)
            overlaps = acceptance.overlaps(logp, logq, lenience)
            accepted = acceptance.first_failure(decided.chances, coins)
        weights = acceptance.emitted_law(logp, logq, decided.log_scales, accepted, ks)
    # A NaN in an earlier row has made these weights NaN: rejection stops at it, block carries it on in its scales.
    finite = weights.amax(1).abs() < torch.inf
    return DeviceVerdict(accepted, sampler.emit(weights, which, accepted), finite, overlaps)


def draft_laws(draft: Draft, which: Seq[int], drafts: Tensor, logp: Tensor) -> Tensor:
    """log q [N, K, vocab] of the drafts [N, K] of sequences `which`, like logp in dtype and vocabulary.

    One-hot for tokens that no law came with, and for those whose law does not hold them (a draft model's NaN; the token
    was then not drawn from it). −inf throughout for an id outside the vocabulary: q gives no token anything.
    """
    count, depth = drafts.shape
    vocab = logp.shape[-1]
    logq = logp.new_full((count, depth, vocab), -torch.inf)
    given = [(n, draft.logq_rows[i]) for n, i in enumerate(which) if i in draft.logq_rows]
    if given and draft.logq is not None:
        places, sources = torch.tensor(given, device=logp.device).unbind(1)
        given_laws = draft.logq[sources, :depth, :vocab]  # what a larger table holds beyond is drawn, and excluded by p
        logq[places, :, : given_laws.shape[-1]] = given_laws.to(logp.dtype)
    legal = drafts.clamp(0, vocab - 1)
    own = logq.gather(2, legal[..., None])
    outside = (legal != drafts)[..., None]
    certain = outside | ~torch.isfinite(own)
    logq.masked_fill_(certain, -torch.inf)
    return logq.scatter_(2, legal[..., None], own.masked_fill_(certain, 0.0).masked_fill_(outside, -torch.inf))


def _rows(batch: DraftBatch, draft: Draft, logits: Tensor, which: Seq[int]) -> tuple[Tensor, list[int], list[int]]:
    """(logits, rows of the sampler, ks) of the sequences `which`."""
    ks = [draft.ks[i] for i in which]
    rows = [batch.sampler.offsets[i] + j for i, k in zip(which, ks, strict=True) for j in range(k + 1)]
    if len(which) == len(batch.sequences):
        return logits, rows, ks
    starts = tuple(accumulate((k + 1 for k in draft.ks), initial=0))
    packed = [starts[i] + j for i, k in zip(which, ks, strict=True) for j in range(k + 1)]
    return logits[torch.tensor(packed, device=logits.device)], rows, ks


def _blank(ks: Seq[int], device: torch.device) -> DeviceVerdict:
    zeros = torch.zeros(len(ks), dtype=torch.int64, device=device)
    return DeviceVerdict(zeros, zeros, zeros.bool(), zeros.new_full((len(ks), max(ks)), -1))


def _merge(whole: DeviceVerdict, part: DeviceVerdict, which: Seq[int]) -> DeviceVerdict:
    at = torch.tensor(which, device=whole.accepted.device)
    return DeviceVerdict(
        whole.accepted.index_copy(0, at, part.accepted),
        whole.tokens.index_copy(0, at, part.tokens),
        whole.finite.index_copy(0, at, part.finite),
        _merge_overlaps(whole.overlaps, part.overlaps, at),
    )


def _merge_overlaps(whole: Tensor | None, part: Tensor | None, at: Tensor) -> Tensor | None:
    if whole is None or part is None:
        return whole
    return whole.index_copy(0, at, F.pad(part, (0, whole.shape[1] - part.shape[1]), value=-1))


def on_host(decision: DeviceVerdict, draft: Draft, vocab_size: int) -> Verdict:
    columns = [decision.accepted, decision.tokens, decision.finite]
    if draft.tokens is None:
        accepted, tokens, finite = torch.stack(columns).tolist()
        bad = [not good for good in finite]
        return Verdict(accepted, [[t] for t in tokens], bad, [()] * len(tokens), 0, [[]] * len(tokens))
    depth = max(draft.ks)
    told = [] if decision.overlaps is None else [decision.overlaps]
    rows = torch.cat([torch.stack(columns, 1), draft.tokens[:, :depth], *told], 1).tolist()  # the round's one copy
    drafts = [row[3 : 3 + k] for row, k in zip(rows, draft.ks, strict=True)]
    return Verdict(
        accepted=[row[0] for row in rows],
        emitted=[[*tokens[: row[0]], row[1]] for row, tokens in zip(rows, drafts, strict=True)],
        non_finite=[not row[2] for row in rows],
        overlaps=_overlaps(rows, 3 + depth, draft.ks) if told else [()] * len(rows),
        num_illegal=sum(min(tokens) < 0 or max(tokens) >= vocab_size for tokens in drafts if tokens),
        drafts=drafts,
    )


def _overlaps(rows: Seq[Seq[int]], first: int, ks: Seq[int]) -> list[tuple[float, ...]]:
    """From column `first` on, of the drafts that were looked at; () for a sequence that has none there."""
    return [
        tuple(part / OVERLAP_SCALE for part in row[first : first + min(row[0] + 1, k)] if part >= 0)
        for row, k in zip(rows, ks, strict=True)
    ]
