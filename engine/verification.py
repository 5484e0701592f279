"""From the target's logits to a verdict: each sequence by its own verifier, all in one device-to-host copy (R8)."""

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
    """Decide which drafts of a round are kept. logits [Σ (k + 1), vocab] are the target's, sequence-major.

    Here and below, `indices` [n] are the sequences of the batch that share a verifier.
    """
    verdict: DeviceVerdict | None = None
    for name, indices in _by_verifier(batch).items():
        if name == "match":
            decided = _match(batch, draft, logits, indices)
        else:
            decided = _reject_or_block(batch, draft, logits, indices, name)
        if len(indices) == len(batch.sequences):
            verdict = decided
            break
        verdict = _merge(verdict or _blank(draft.ks, logits.device), decided, indices)
    if verdict is None:
        return Verdict([], [], [], [], 0, [])
    return copy_to_host(verdict, draft, logits.shape[-1])


def _by_verifier(batch: DraftBatch) -> dict[Verifier, list[int]]:
    """Verifier → indices. At temperature 0 the law is one token, and every verifier decides as `match` does."""
    indices: dict[Verifier, list[int]] = {}
    for i, sequence in enumerate(batch.sequences):
        indices.setdefault("match" if sequence.coupled else sequence.verifier, []).append(i)
    return indices


def _match(batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int]) -> DeviceVerdict:
    logits, rows, ks = _select_rows(batch, draft, logits, indices)
    drawn, finite = batch.sampler.draw(logits, rows, draft.tokens)
    if draft.tokens is None or len(indices) == len(batch.sequences):
        return acceptance.match(drawn, finite, draft.tokens, ks)
    return acceptance.match(drawn, finite, draft.tokens[list(indices)], ks)


def _reject_or_block(
    batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int], verifier: Verifier
) -> DeviceVerdict:
    logits, rows, ks = _select_rows(batch, draft, logits, indices)
    sampler, depth = batch.sampler, max(ks)
    laws = sampler.laws(sampler.scores(logits, rows, draft.tokens), rows)
    if draft.tokens is None or not depth:
        weights, accepted = laws, torch.zeros(len(indices), dtype=torch.int64, device=logits.device)
        overlaps = None
    else:
        drafts = draft.tokens[list(indices), :depth]
        logp = acceptance.padded(laws, ks)
        logq = draft_laws(draft, indices, drafts, logp)
        legal = drafts.clamp(0, logits.shape[-1] - 1)
        coins = sampler.coins(indices, depth)
        if verifier == "block":
            decided, overlaps = acceptance.block(logp, logq, legal, ks), acceptance.overlaps(logp, logq)
            accepted = acceptance.last_success(decided.chances, coins)
        else:
            values = [batch.sequences[i].lenience or 1.0 for i in indices]
            lenience = torch.tensor(values, dtype=torch.float64, device=logits.device)
            decided = acceptance.rejection(logp, logq, legal, ks, lenience)
            overlaps = acceptance.overlaps(logp, logq, lenience)
            accepted = acceptance.first_failure(decided.chances, coins)
        weights = acceptance.emitted_law(logp, logq, decided.log_scales, accepted, ks)
    # A NaN in an earlier row makes these weights NaN too: rejection stops at that row, block multiplies it on.
    finite = weights.amax(1).abs() < torch.inf
    return DeviceVerdict(accepted, sampler.emit(weights, indices, accepted), finite, overlaps)


def draft_laws(draft: Draft, indices: Seq[int], drafts: Tensor, logp: Tensor) -> Tensor:
    """log q [N, K, vocab] of the drafts [N, K] of these sequences, in the dtype and vocabulary of logp.

    One-hot for a token that came without a law, and for a token that its law gives no finite probability (a draft
    model's NaN). −inf everywhere for an id outside the vocabulary.
    """
    count, depth = drafts.shape
    vocab = logp.shape[-1]
    logq = logp.new_full((count, depth, vocab), -torch.inf)
    pairs = [(n, draft.logq_rows[i]) for n, i in enumerate(indices) if i in draft.logq_rows]
    if pairs and draft.logq is not None:
        rows, sources = torch.tensor(pairs, device=logp.device).unbind(1)
        laws = draft.logq[sources, :depth, :vocab]  # ids beyond the target's vocabulary are cut off: p excludes them
        logq[rows, :, : laws.shape[-1]] = laws.to(logp.dtype)
    legal = drafts.clamp(0, vocab - 1)
    of_drafts = logq.gather(2, legal[..., None])
    outside = (legal != drafts)[..., None]
    one_hot = outside | ~torch.isfinite(of_drafts)
    logq.masked_fill_(one_hot, -torch.inf)
    return logq.scatter_(2, legal[..., None], of_drafts.masked_fill_(one_hot, 0.0).masked_fill_(outside, -torch.inf))


def _select_rows(
    batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int]
) -> tuple[Tensor, list[int], list[int]]:
    """(logits, rows of the sampler, ks) of these sequences."""
    ks = [draft.ks[i] for i in indices]
    rows = [batch.sampler.offsets[i] + j for i, k in zip(indices, ks, strict=True) for j in range(k + 1)]
    if len(indices) == len(batch.sequences):
        return logits, rows, ks
    starts = tuple(accumulate((k + 1 for k in draft.ks), initial=0))
    packed = [starts[i] + j for i, k in zip(indices, ks, strict=True) for j in range(k + 1)]
    return logits[torch.tensor(packed, device=logits.device)], rows, ks


def _blank(ks: Seq[int], device: torch.device) -> DeviceVerdict:
    zeros = torch.zeros(len(ks), dtype=torch.int64, device=device)
    return DeviceVerdict(zeros, zeros, zeros.bool(), zeros.new_full((len(ks), max(ks)), -1))


def _merge(whole: DeviceVerdict, decided: DeviceVerdict, indices: Seq[int]) -> DeviceVerdict:
    """The whole batch's verdict with what was decided for these sequences."""
    rows = torch.tensor(indices, device=whole.accepted.device)
    return DeviceVerdict(
        whole.accepted.index_copy(0, rows, decided.accepted),
        whole.tokens.index_copy(0, rows, decided.tokens),
        whole.finite.index_copy(0, rows, decided.finite),
        _merge_overlaps(whole.overlaps, decided.overlaps, rows),
    )


def _merge_overlaps(whole: Tensor | None, decided: Tensor | None, rows: Tensor) -> Tensor | None:
    if whole is None or decided is None:
        return whole
    return whole.index_copy(0, rows, F.pad(decided, (0, whole.shape[1] - decided.shape[1]), value=-1))


def copy_to_host(verdict: DeviceVerdict, draft: Draft, vocab_size: int) -> Verdict:
    """The verdict as Python lists, in one copy together with the drafts."""
    columns = [verdict.accepted, verdict.tokens, verdict.finite]
    if draft.tokens is None:
        accepted, tokens, finite = torch.stack(columns).tolist()
        non_finite = [not row_finite for row_finite in finite]
        return Verdict(accepted, [[t] for t in tokens], non_finite, [()] * len(tokens), 0, [[]] * len(tokens))
    depth = max(draft.ks)
    overlaps = [] if verdict.overlaps is None else [verdict.overlaps]
    rows = torch.cat([torch.stack(columns, 1), draft.tokens[:, :depth], *overlaps], 1).tolist()  # the round's one copy
    drafts = [row[3 : 3 + k] for row, k in zip(rows, draft.ks, strict=True)]
    return Verdict(
        accepted=[row[0] for row in rows],
        emitted=[[*tokens[: row[0]], row[1]] for row, tokens in zip(rows, drafts, strict=True)],
        non_finite=[not row[2] for row in rows],
        overlaps=_overlaps(rows, 3 + depth, draft.ks) if overlaps else [()] * len(rows),
        num_illegal=sum(min(tokens) < 0 or max(tokens) >= vocab_size for tokens in drafts if tokens),
        drafts=drafts,
    )


def _overlaps(rows: Seq[Seq[int]], first: int, ks: Seq[int]) -> list[tuple[float, ...]]:
    """Overlaps of the reached drafts, from column `first` of the rows on; () for a sequence without any."""
    return [
        tuple(value / OVERLAP_SCALE for value in row[first : first + min(row[0] + 1, k)] if value >= 0)
        for row, k in zip(rows, ks, strict=True)
    ]
