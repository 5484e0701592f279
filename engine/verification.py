"""Makes a verdict of the target's logits: each sequence by its own verifier. On a device all is one copy (R8)."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.staging import Staged
from engine.draft_laws import draft_laws, expected_law_rows, put_law_rows
from engine.drafters.base import Draft, DraftBatch
from engine.kernels.decide import decide_chains
from engine.kernels.decide_trees import decide_trees
from engine.kernels.verdict import match_verdict
from engine.sampling import matching, tree_acceptance
from engine.sampling.acceptance import OVERLAP_SCALE, DeviceVerdict, Verdict
from engine.sampling.ragged import Ragged, padded
from engine.sampling.tree_acceptance import NONE, TreeTable
from engine.trees import Parents, chain, is_chain, path, ranks, tried
from engine.types import Verifier


def verify(batch: DraftBatch, draft: Draft, logits: Tensor) -> Verdict:
    """Decide which drafts of a round are kept. logits [Σ (k + 1), vocab] are the target's, sequence by sequence: a row
    for the last committed token, then one for each draft.

    Raises ValueError for a tree of several branches under block verification. Here and below, `indices` [n] are the
    sequences of the batch that share a verifier.
    """
    if draft.trees:
        _check_verifiers(batch, draft.trees)
        batch = replace(batch, sampler=batch.sampler.on_trees(draft.trees))
    by_verifier = _by_verifier(batch)
    if list(by_verifier) == ["match"] and not _on_device(batch):
        return _match_on_host(batch, draft, logits, range(len(draft.ks)))
    verdict: DeviceVerdict | None = None
    for name, indices in by_verifier.items():
        if name == "match":
            decided = _match(batch, draft, logits, indices)
        else:
            decided = _reject_or_block(batch, draft, logits, indices, name)
        if len(indices) == len(batch.sequences):
            verdict = decided
            break
        chosen = batch.sampler.numbers.index(indices).tensor
        verdict = _merge(verdict or _blank(draft, logits.device), decided, chosen)
    if verdict is None:
        return Verdict([], [], [], [], 0, [])
    decided_on_host = copy_to_host(verdict, draft, logits.shape[-1])
    if draft.trees and _on_device(batch):
        return replace(decided_on_host, last_rows=verdict.last_rows)
    return decided_on_host


def prepare(batch: DraftBatch, ks: Seq[int], trees: Mapping[int, Parents]) -> None:
    """Put what `verify` needs for ks drafts, of these trees and else chains, on its way to the device, with all else
    that waits. Without it verify sends it in a copy of its own."""
    if not _on_device(batch):
        return
    if trees:
        batch = replace(batch, sampler=batch.sampler.on_trees(trees))
    sampler = batch.sampler
    for name, indices in _by_verifier(batch).items():
        rows, own_ks = _rows(batch, ks, indices)
        if len(indices) < len(batch.sequences):
            sampler.numbers.index(_packed(ks, indices))
            sampler.numbers.index(indices)
        shapes = (_all_shapes if name == "typical" else _shapes)(trees, ks, indices)
        if name == "typical":
            TreeTable.put(shapes, sampler.numbers)
        elif shapes and name != "block":
            _put_parents(batch, shapes)
            if name == "rejection":
                sampler.prepare_tree_coins(indices, shapes)
        if name == "match":
            sampler.prepare(rows)
            _put_first_rows(batch, own_ks)
        else:
            sampler.prepare_laws(rows)
            sampler.prepare_emit(indices)
            if name == "typical":
                _put_limits(batch, indices)
                continue
            _put_lenience(batch, indices)
            put_law_rows(batch, expected_law_rows(batch, ks, trees, indices))


def _match_on_host(batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int]) -> Verdict:
    """The verdict on these sequences under match, without operations on tensors of a few numbers. On a CPU only."""
    logits, rows, ks = _select_rows(batch, draft, logits, indices)
    draws, fine = (found.tolist() for found in batch.sampler.draw(logits, rows, draft.tokens))
    if draft.tokens is None and not draft.trees:
        return Verdict.without_drafts(draws, fine)
    table = [[]] * len(draft.ks) if draft.tokens is None else draft.tokens.tolist()
    drafts = [table[i][:k] for i, k in zip(indices, ks, strict=True)]
    trees = {n: draft.trees[i] for n, i in enumerate(indices) if i in draft.trees}
    verdict = matching.match(draws, fine, drafts, trees, logits.shape[-1])
    if not draft.wants_drawn:
        return verdict
    ends = accumulate([k + 1 for k in ks])
    return replace(verdict, drawn=[draws[end - k - 1 : end] for end, k in zip(ends, ks, strict=True)])


def _on_tensors(verdict: Verdict) -> DeviceVerdict:
    """A verdict of the host beside those of other verifiers."""
    paths, depth = verdict.paths, max(map(len, verdict.drawn), default=0)
    rows = [paths[i][-1] + 1 if paths.get(i) else accepted for i, accepted in enumerate(verdict.accepted)]
    drawn = [[*row, *row[-1:] * (depth - len(row))] for row in verdict.drawn]
    return DeviceVerdict(
        torch.tensor(rows),
        torch.tensor([emitted[-1] for emitted in verdict.emitted]),
        ~torch.tensor(verdict.non_finite),
        drawn=torch.tensor(drawn) if drawn else None,
    )


Way = Verifier | Literal["typical"]  # in which drafts are judged


def _by_verifier(batch: DraftBatch) -> dict[Way, list[int]]:
    """Way → indices. At temperature 0 the law is one token, and every verifier decides as `match` does."""
    indices: dict[Way, list[int]] = {}
    for i, sequence in enumerate(batch.sequences):
        way: Way = "typical" if sequence.typical else sequence.verifier
        indices.setdefault("match" if sequence.coupled else way, []).append(i)
    return indices


def _match(batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int]) -> DeviceVerdict:
    if not _on_device(batch):
        return _on_tensors(_match_on_host(batch, draft, logits, indices))
    logits, rows, ks = _select_rows(batch, draft, logits, indices)
    drawn, finite = batch.sampler.draw(logits, rows, draft.tokens)
    tokens = draft.tokens
    if tokens is None or not max(ks):
        verdict = DeviceVerdict(torch.zeros_like(drawn), drawn, finite)
    else:
        if len(indices) < len(batch.sequences):
            tokens = tokens[batch.sampler.numbers.index(indices).tensor]
        shapes = _shapes(draft.trees, draft.ks, indices)
        parents = _put_parents(batch, shapes).tensor.view(len(ks), -1) if shapes else None
        first_rows = _put_first_rows(batch, ks).tensor
        table = match_verdict(drawn, finite, tokens[:, : max(ks)], first_rows, parents)
        last_rows, emitted, row_finite = table[:, :3].unbind(1)
        verdict = DeviceVerdict(last_rows, emitted, row_finite, table=table)
    return replace(verdict, drawn=padded(drawn, ks)) if draft.wants_drawn else verdict


def _put_first_rows(batch: DraftBatch, ks: Seq[int]) -> Staged:
    """The first row of each sequence, and the end of the last one's, [N + 1]."""
    starts = accumulate((k + 1 for k in ks), initial=0)
    return batch.sampler.numbers.ints(("first rows", tuple(ks)), lambda: list(starts))


def _put_parents(batch: DraftBatch, shapes: Seq[Parents]) -> Staged:
    """The row of each node's parent. Every sequence has as many entries as the largest tree has nodes."""
    size = max(map(len, shapes))
    return batch.sampler.numbers.ints(
        ("parents", tuple(shapes)),
        lambda: [row for shape in shapes for row in (*(p + 1 for p in shape), *[NONE] * (size - len(shape)))],
    )


def _on_device(batch: DraftBatch) -> bool:
    return batch.sampler.numbers.staging.deferred


def _reject_or_block(
    batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int], verifier: Way
) -> DeviceVerdict:
    logits, rows, ks = _select_rows(batch, draft, logits, indices)
    sampler, depth = batch.sampler, max(ks)
    laws = sampler.laws(sampler.scores(logits, rows, draft.tokens), rows)
    if draft.tokens is None or not depth:
        nothing = torch.zeros(len(indices), dtype=torch.int64, device=logits.device)
        decided = Decided(nothing, nothing, laws, None)
    else:
        drafts = draft.tokens[:, :depth]
        if len(indices) < len(batch.sequences):
            drafts = drafts[sampler.numbers.index(indices).tensor]
        logp = padded(laws, ks)
        shapes = _shapes(draft.trees, draft.ks, indices) if verifier == "rejection" else []
        logq = None if verifier == "typical" else draft_laws(batch, draft, indices, drafts, logp)
        if logq is None:
            shapes = _all_shapes(draft.trees, draft.ks, indices)
            decided = _judge_typical(batch, indices, logp, drafts, shapes)
        elif shapes:
            reject = _reject_trees_in_one if _on_device(batch) else _reject_trees
            decided = reject(batch, indices, logp, logq, drafts, shapes)
        else:
            decided = _decide_chains(batch, indices, logp, logq, drafts, ks, verifier)
    # A NaN in an earlier row makes these weights NaN too: rejection stops at that row, block multiplies it on.
    finite = decided.weights.amax(1).abs() < torch.inf
    emitted = sampler.emit(decided.weights, indices, decided.accepted)
    likely = padded(laws.argmax(1), ks) if draft.wants_drawn else None
    return DeviceVerdict(decided.last_rows, emitted, finite, decided.overlaps, likely)


class Decided(NamedTuple):
    """What the coins decided for N sequences."""

    last_rows: Tensor  # [N] see DeviceVerdict
    accepted: Tensor  # [N] number of accepted drafts
    weights: Tensor  # [N, vocab] log-weights of the recovered or bonus token
    overlaps: Tensor | None  # [N, K]


def _decide_chains(
    batch: DraftBatch,
    indices: Seq[int],
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    ks: Seq[int],
    verifier: Way,
) -> Decided:
    """By rejection or block verification."""
    lenience = None if verifier == "block" else _lenience(batch, indices)
    keys, positions = batch.sampler.coin_numbers(indices)
    lengths = batch.sampler.numbers.index(ks).tensor
    accepted, weights, overlaps = decide_chains(logp, logq, drafts, lengths, lenience, keys, positions)
    return Decided(accepted, accepted, weights, overlaps)


def _reject_trees(
    batch: DraftBatch, indices: Seq[int], logp: Tensor, logq: Tensor, drafts: Tensor, shapes: Seq[Parents]
) -> Decided:
    table, lenience = TreeTable.of(shapes, batch.sampler.numbers), _lenience(batch, indices)
    law = tree_acceptance.rejection(logp, logq, drafts.clamp(0, logp.shape[-1] - 1), table, lenience)
    coins = batch.sampler.tree_coins(indices, shapes)
    last_rows = tree_acceptance.walk(coins < law.chances, table)[:, -1]
    weights = tree_acceptance.emitted_law(law, logq, table, last_rows)
    return Decided(last_rows, table.depths.gather(1, last_rows[:, None])[:, 0], weights, law.overlaps)


def _reject_trees_in_one(
    batch: DraftBatch, indices: Seq[int], logp: Tensor, logq: Tensor, drafts: Tensor, shapes: Seq[Parents]
) -> Decided:
    """As _reject_trees(), by one operation."""
    parents = _put_parents(batch, shapes).tensor.view(len(indices), -1)
    numbers = batch.sampler.tree_coin_numbers(indices, shapes)
    width = 1 + max(max(ranks(shape), default=0) for shape in shapes)
    return Decided(*decide_trees(logp, logq, drafts, parents, _lenience(batch, indices), *numbers, width))


def _judge_typical(batch: DraftBatch, indices: Seq[int], logp: Tensor, drafts: Tensor, shapes: Seq[Parents]) -> Decided:
    """The token behind the kept drafts is drawn from the target's law. No chance of acceptance is told."""
    table, legal = TreeTable.of(shapes, batch.sampler.numbers), drafts.clamp(0, logp.shape[-1] - 1)
    limits = _put_limits(batch, indices).tensor.view(-1, 2)
    last_rows = tree_acceptance.typical(logp, legal, legal == drafts, table, limits)
    weights = logp[torch.arange(len(logp), device=logp.device), last_rows]
    return Decided(last_rows, table.depths.gather(1, last_rows[:, None])[:, 0], weights, None)


def _put_limits(batch: DraftBatch, indices: Seq[int]) -> Staged:
    return batch.sampler.numbers.floats(
        ("typical", tuple(indices)), lambda: [x for i in indices for x in batch.sequences[i].typical or (1.0, 1.0)]
    )


def _lenience(batch: DraftBatch, indices: Seq[int]) -> Tensor:
    return _put_lenience(batch, indices).tensor


def _put_lenience(batch: DraftBatch, indices: Seq[int]) -> Staged:
    return batch.sampler.numbers.floats(
        ("lenience", tuple(indices)), lambda: [batch.sequences[i].lenience or 1.0 for i in indices]
    )


def _shapes(trees: Mapping[int, Parents], ks: Seq[int], indices: Seq[int]) -> list[Parents]:
    """The shapes of these sequences' drafts; [] if all of them are chains."""
    return _all_shapes(trees, ks, indices) if any(i in trees for i in indices) else []


def _all_shapes(trees: Mapping[int, Parents], ks: Seq[int], indices: Seq[int]) -> list[Parents]:
    return [trees.get(i, chain(ks[i])) for i in indices]


def _check_verifiers(batch: DraftBatch, trees: Mapping[int, Parents]) -> None:
    for i, parents in trees.items():
        sequence = batch.sequences[i]
        if sequence.verifier == "block" and not sequence.coupled and not is_chain(parents):
            raise ValueError(
                f"block verification decides about chains only; the draft of request {sequence.request_id} is a tree "
                f"with the parents {parents}: draft a chain, or use the verifier match or rejection"
            )


def _select_rows(
    batch: DraftBatch, draft: Draft, logits: Tensor, indices: Seq[int]
) -> tuple[Tensor, list[int], Seq[int]]:
    """(logits, rows of the sampler, ks) of these sequences."""
    rows, ks = _rows(batch, draft.ks, indices)
    if len(indices) < len(batch.sequences):
        logits = logits[batch.sampler.numbers.index(_packed(draft.ks, indices)).tensor]
    return logits, rows, ks


def _rows(batch: DraftBatch, ks: Seq[int], indices: Seq[int]) -> tuple[list[int], Seq[int]]:
    """(rows of the sampler, ks) of these sequences, of all the batch's ks."""
    sampler, own = batch.sampler, [ks[i] for i in indices]
    if not any(own):  # plain rounds
        return [sampler.offsets[i] for i in indices], Ragged.put(own, sampler.numbers)
    rows = [sampler.offsets[i] + j for i, k in zip(indices, own, strict=True) for j in range(k + 1)]
    return rows, Ragged.put(own, sampler.numbers)


def _packed(ks: Seq[int], indices: Seq[int]) -> list[int]:
    """The rows of the logits that belong to these sequences."""
    starts = tuple(accumulate((k + 1 for k in ks), initial=0))
    return [starts[i] + j for i in indices for j in range(ks[i] + 1)]


def _blank(draft: Draft, device: torch.device) -> DeviceVerdict:
    count, depth = len(draft.ks), max(draft.ks)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    drawn = zeros.new_full((count, depth + 1), -1) if draft.wants_drawn else None
    return DeviceVerdict(zeros, zeros, zeros.bool(), zeros.new_full((count, depth), -1), drawn)


def _merge(whole: DeviceVerdict, decided: DeviceVerdict, rows: Tensor) -> DeviceVerdict:
    """The whole batch's verdict with what was decided for the sequences `rows`."""
    return DeviceVerdict(
        whole.last_rows.index_copy(0, rows, decided.last_rows),
        whole.tokens.index_copy(0, rows, decided.tokens),
        whole.finite.index_copy(0, rows, decided.finite.bool()),
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
        table = torch.stack(columns, 1) if verdict.table is None else verdict.table
        rows = table.tolist()
        without = Verdict.without_drafts([row[1] for row in rows], [row[2] for row in rows])
        return replace(without, paths={i: [] for i in draft.trees})
    depth = max(draft.ks)
    drawn, overlaps = ([] if part is None else [part] for part in (verdict.drawn, verdict.overlaps))
    decided = [torch.stack(columns, 1), draft.tokens[:, :depth]] if verdict.table is None else [verdict.table]
    parts = [*decided, *drawn, *overlaps]
    rows = (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).tolist()  # the round's one copy
    end = sum(part.shape[1] for part in decided)
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
