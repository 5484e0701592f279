"""From the target's logits to a verdict: each sequence by its own verifier, all in one device-to-host copy (R8)."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.sampling import acceptance, tree_acceptance
from engine.sampling.acceptance import OVERLAP_SCALE, DeviceVerdict, Verdict
from engine.sampling.sampler import Sampler
from engine.sampling.tree_acceptance import TreeTable
from engine.trees import Parents, chain, is_chain, path, tried
from engine.types import Verifier


def verify(batch: DraftBatch, draft: Draft, logits: Tensor) -> Verdict:
    """Decide which drafts of a round are kept. logits [Σ (k + 1), vocab] are the target's, sequence-major: of the last
    committed token, then of each draft.

    Raises ValueError for a tree of several branches under block verification. Here and below, `indices` [n] are the
    sequences of the batch that share a verifier.
    """
    if draft.trees:
        _check_verifiers(batch, draft.trees)
        batch = replace(batch, sampler=batch.sampler.on_trees(draft.trees))
    verdict: DeviceVerdict | None = None
    for name, indices in _by_verifier(batch).items():
        if name == "match":
            decided = _match(batch, draft, logits, indices)
        else:
            decided = _reject_or_block(batch, draft, logits, indices, name)
        if len(indices) == len(batch.sequences):
            verdict = decided
            break
        verdict = _merge(verdict or _blank(draft, logits.device), decided, indices)
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
    tokens = draft.tokens
    if tokens is not None and len(indices) < len(batch.sequences):
        tokens = tokens[list(indices)]
    shapes = _shapes(draft, indices)
    if tokens is None or not shapes:
        verdict = acceptance.match(drawn, finite, tokens, ks)
    else:
        verdict = tree_acceptance.match(drawn, finite, tokens, TreeTable.of(shapes, logits.device), ks)
    return replace(verdict, drawn=acceptance.padded(drawn, ks)) if draft.wants_drawn else verdict


def _reject_or_block(
    batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int], verifier: Verifier
) -> DeviceVerdict:
    logits, rows, ks = _select_rows(batch, draft, logits, indices)
    sampler, depth = batch.sampler, max(ks)
    laws = sampler.laws(sampler.scores(logits, rows, draft.tokens), rows)
    if draft.tokens is None or not depth:
        nothing = torch.zeros(len(indices), dtype=torch.int64, device=logits.device)
        decided = Decided(nothing, nothing, laws, None)
    else:
        drafts = draft.tokens[list(indices), :depth]
        logp = acceptance.padded(laws, ks)
        logq = draft_laws(draft, indices, drafts, logp)
        legal = drafts.clamp(0, logits.shape[-1] - 1)
        shapes = _shapes(draft, indices)
        if verifier == "block":
            decided = _block(sampler, indices, logp, logq, legal, ks)
        elif shapes:
            decided = _reject_trees(batch, indices, logp, logq, legal, shapes)
        else:
            decided = _reject(batch, indices, logp, logq, legal, ks)
    # A NaN in an earlier row makes these weights NaN too: rejection stops at that row, block multiplies it on.
    finite = decided.weights.amax(1).abs() < torch.inf
    emitted = sampler.emit(decided.weights, indices, decided.accepted)
    likely = acceptance.padded(laws.argmax(1), ks) if draft.wants_drawn else None
    return DeviceVerdict(decided.last_rows, emitted, finite, decided.overlaps, likely)


class Decided(NamedTuple):
    """What the coins decided for N sequences."""

    last_rows: Tensor  # [N] see DeviceVerdict
    accepted: Tensor  # [N] number of accepted drafts
    weights: Tensor  # [N, vocab] log-weights of the recovered or bonus token
    overlaps: Tensor | None  # [N, K]


def _reject(batch: DraftBatch, indices: Seq[int], logp: Tensor, logq: Tensor, drafts: Tensor, ks: Seq[int]) -> Decided:
    lenience = _lenience(batch, indices)
    law = acceptance.rejection(logp, logq, drafts, ks, lenience)
    accepted = acceptance.first_failure(law.chances, batch.sampler.coins(indices, max(ks)))
    weights = acceptance.emitted_law(logp, logq, law.log_scales, accepted, ks)
    return Decided(accepted, accepted, weights, acceptance.overlaps(logp, logq, lenience))


def _block(sampler: Sampler, indices: Seq[int], logp: Tensor, logq: Tensor, drafts: Tensor, ks: Seq[int]) -> Decided:
    law = acceptance.block(logp, logq, drafts, ks)
    accepted = acceptance.last_success(law.chances, sampler.coins(indices, max(ks)))
    weights = acceptance.emitted_law(logp, logq, law.log_scales, accepted, ks)
    return Decided(accepted, accepted, weights, acceptance.overlaps(logp, logq))


def _reject_trees(
    batch: DraftBatch, indices: Seq[int], logp: Tensor, logq: Tensor, drafts: Tensor, shapes: Seq[Parents]
) -> Decided:
    table, lenience = TreeTable.of(shapes, logp.device), _lenience(batch, indices)
    law = tree_acceptance.rejection(logp, logq, drafts, table, lenience)
    coins = batch.sampler.tree_coins(indices, shapes)
    last_rows = tree_acceptance.walk(coins < law.chances, table)[:, -1]
    weights = tree_acceptance.emitted_law(law, logq, table, last_rows)
    return Decided(last_rows, table.depths.gather(1, last_rows[:, None])[:, 0], weights, law.overlaps)


def _lenience(batch: DraftBatch, indices: Seq[int]) -> Tensor:
    values = [batch.sequences[i].lenience or 1.0 for i in indices]
    return torch.tensor(values, dtype=torch.float64, device=batch.sampler.device)


def _shapes(draft: Draft, indices: Seq[int]) -> list[Parents]:
    """The shapes of these sequences' drafts; [] if all of them are chains."""
    if not any(i in draft.trees for i in indices):
        return []
    return [draft.trees.get(i, chain(draft.ks[i])) for i in indices]


def _check_verifiers(batch: DraftBatch, trees: Mapping[int, Parents]) -> None:
    for i, parents in trees.items():
        sequence = batch.sequences[i]
        if sequence.verifier == "block" and not sequence.coupled and not is_chain(parents):
            raise ValueError(
                f"block verification decides about chains only; the draft of request {sequence.request_id} is a tree "
                f"with the parents {parents}: draft a chain, or use the verifier match or rejection"
            )


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


def _blank(draft: Draft, device: torch.device) -> DeviceVerdict:
    count, depth = len(draft.ks), max(draft.ks)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    drawn = zeros.new_full((count, depth + 1), -1) if draft.wants_drawn else None
    return DeviceVerdict(zeros, zeros, zeros.bool(), zeros.new_full((count, depth), -1), drawn)


def _merge(whole: DeviceVerdict, decided: DeviceVerdict, indices: Seq[int]) -> DeviceVerdict:
    """The whole batch's verdict with what was decided for these sequences."""
    rows = torch.tensor(indices, device=whole.last_rows.device)
    return DeviceVerdict(
        whole.last_rows.index_copy(0, rows, decided.last_rows),
        whole.tokens.index_copy(0, rows, decided.tokens),
        whole.finite.index_copy(0, rows, decided.finite),
        _merge_columns(whole.overlaps, decided.overlaps, rows),
        _merge_columns(whole.drawn, decided.drawn, rows),
    )


def _merge_columns(whole: Tensor | None, decided: Tensor | None, rows: Tensor) -> Tensor | None:
    if whole is None or decided is None:
        return whole
    return whole.index_copy(0, rows, F.pad(decided, (0, whole.shape[1] - decided.shape[1]), value=-1))


def copy_to_host(verdict: DeviceVerdict, draft: Draft, vocab_size: int) -> Verdict:
    """The verdict as Python lists, in one copy together with the drafts."""
    columns = [verdict.last_rows, verdict.tokens, verdict.finite]
    if draft.tokens is None:
        accepted, tokens, finite = torch.stack(columns).tolist()
        non_finite = [not row_finite for row_finite in finite]
        paths: dict[int, list[int]] = {i: [] for i in draft.trees}
        return Verdict(accepted, [[t] for t in tokens], non_finite, [()] * len(tokens), 0, [[]] * len(tokens), paths)
    depth = max(draft.ks)
    drawn, overlaps = ([] if part is None else [part] for part in (verdict.drawn, verdict.overlaps))
    parts = [torch.stack(columns, 1), draft.tokens[:, :depth], *drawn, *overlaps]
    rows = torch.cat(parts, 1).tolist()  # the round's one copy
    end = 3 + depth
    first_overlap = end + sum(part.shape[1] for part in drawn)
    drafts = [row[3 : 3 + k] for row, k in zip(rows, draft.ks, strict=True)]
    paths = {i: path(parents, rows[i][0] - 1) for i, parents in draft.trees.items()}
    accepted_tokens = [tokens[: row[0]] for row, tokens in zip(rows, drafts, strict=True)]
    for i, nodes in paths.items():
        accepted_tokens[i] = [drafts[i][node] for node in nodes]
    return Verdict(
        accepted=list(map(len, accepted_tokens)),
        emitted=[[*tokens, row[1]] for row, tokens in zip(rows, accepted_tokens, strict=True)],
        non_finite=[not row[2] for row in rows],
        overlaps=_overlaps([row[first_overlap:] for row in rows], draft, accepted_tokens, paths)
        if overlaps
        else [()] * len(rows),
        num_illegal=sum(min(tokens) < 0 or max(tokens) >= vocab_size for tokens in drafts if tokens),
        drafts=drafts,
        paths=paths,
        drawn=[row[end:first_overlap] for row in rows] if drawn else [],
    )


def _overlaps(
    rows: Seq[Seq[int]], draft: Draft, accepted: Seq[Seq[int]], paths: Mapping[int, Seq[int]]
) -> list[tuple[float, ...]]:
    """Overlaps of the drafts that were tried, from rows with an entry per draft; () for a sequence without any."""
    pairs = zip(accepted, draft.ks, strict=True)
    columns: list[Seq[int]] = [range(min(len(tokens) + 1, k)) for tokens, k in pairs]
    for i, nodes in paths.items():
        columns[i] = tried(draft.trees[i], nodes)
    return [
        tuple(row[column] / OVERLAP_SCALE for column in chosen if row[column] >= 0)
        for row, chosen in zip(rows, columns, strict=True)
    ]
