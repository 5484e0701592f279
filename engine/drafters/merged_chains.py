"""The drafts of several models as one: chains that begin alike share these nodes, others are siblings."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cache.transfer import index_tensor
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.merging import merge_drafts, with_costs_of
from engine.trees import ROOT, Parents, is_chain

DraftColumn = tuple[int, int]  # (model, column of its draft)


@dataclass(frozen=True, slots=True)
class OwnChain:
    """One model's part of a sequence's tree."""

    nodes: list[int] | None  # the nodes of its chain that the tree has; None: the whole draft is this model's
    tokens: list[int] | None = None  # the tokens of its whole chain, if they are on the host

    def count_kept(self, accepted: Seq[int]) -> int:
        """How many drafts of the chain are on the accepted path."""
        assert self.nodes is not None
        kept = 0
        for node, other in zip(self.nodes, accepted, strict=False):
            if node != other:
                break
            kept += 1
        return kept


@dataclass(frozen=True, slots=True)
class MergedTree:
    """One sequence's tree of several chains."""

    parents: Parents
    paths: list[list[int]]  # the nodes of each chain, as far as the tree has them

    @classmethod
    def sharing(cls, chains: Seq[Seq[int]], most: int) -> "MergedTree":
        """Merge chains of tokens: equal beginnings share their nodes. If there are more than `most` nodes, the deepest
        are cut first. Among equally deep nodes those of later chains are cut first."""
        lengths = _lengths_within(chains, most)
        parents, paths, children = list[int](), list[list[int]](), dict[tuple[int, int], int]()
        for tokens, length in zip(chains, lengths, strict=True):
            node, nodes = ROOT, list[int]()
            for token in tokens[:length]:
                if (node, token) not in children:
                    children[node, token] = len(parents)
                    parents.append(node)
                node = children[node, token]
                nodes.append(node)
            paths.append(nodes)
        return cls(tuple(parents), paths)

    @classmethod
    def apart(cls, lengths: Seq[int]) -> "MergedTree":
        """Chains of these lengths that have only the root in common."""
        starts = accumulate(lengths, initial=0)
        paths = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)]
        return cls(tuple(node - 1 if at else ROOT for nodes in paths for at, node in enumerate(nodes)), paths)

    def places(self) -> list[DraftColumn]:
        """The place of each node's token: in the first chain that has the node."""
        found: dict[int, DraftColumn] = {}
        for model, nodes in enumerate(self.paths):
            for column, node in enumerate(nodes):
                found.setdefault(node, (model, column))
        return [found[node] for node in range(len(self.parents))]


def _lengths_within(chains: Seq[Seq[int]], most: int) -> list[int]:
    """How much of each chain the tree has if it has `most` nodes at most, the shallow ones first."""
    lengths, found = [0] * len(chains), set[tuple[int, ...]]()
    for depth in range(1, max(map(len, chains)) + 1):
        for n, tokens in enumerate(chains):
            beginning = tuple(tokens[:depth])
            if len(beginning) == depth and (beginning in found or len(found) < most):
                found.add(beginning)
                lengths[n] = depth
    return lengths


Chains = tuple[OwnChain | None, ...]  # by model; None: it drafted nothing


def merge_chains(batch: DraftBatch, drafts: Seq[Draft], ks: Seq[int]) -> tuple[Draft, dict[int, Chains]]:
    """(one draft of at most ks[i] nodes from those of several models, index in the batch → what each model drafted).

    Chains of a coupled sequence share equal beginnings, for which the drafts are copied to the host, once for all.
    Other chains are siblings at the root, whose nodes keep the laws that they were drawn from. A sequence for which one
    model drafts gets its draft as it is.
    """
    trees: dict[int, MergedTree] = {}
    chains: dict[int, Chains] = {}
    shared = [i for i in range(len(ks)) if sum(draft.ks[i] > 0 for draft in drafts) > 1]
    on_host = _on_host(drafts, [i for i in shared if batch.sequences[i].coupled])
    for i in range(len(ks)):
        lengths = [draft.ks[i] for draft in drafts]
        if i not in shared:
            chains[i] = tuple(OwnChain(None) if length else None for length in lengths)
            continue
        tokens = on_host.get(i)
        trees[i] = MergedTree.apart(lengths) if tokens is None else MergedTree.sharing(tokens, ks[i])
        chains[i] = tuple(
            OwnChain(path, None if tokens is None else tokens[n]) if lengths[n] else None
            for n, path in enumerate(trees[i].paths)
        )
    return (_assemble(drafts, trees) if trees else merge_drafts(drafts, len(ks))), chains


def _on_host(drafts: Seq[Draft], indices: Seq[int]) -> dict[int, list[list[int]]]:
    """Index of a sequence → each model's tokens for it."""
    if not indices:
        return {}
    tables = [draft.tokens for draft in drafts if draft.tokens is not None]
    rows = torch.cat(tables, 1)[index_tensor(indices, tables[0].device)].tolist()
    starts = _starts(drafts)
    cuts = [[(start, start + draft.ks[i]) for start, draft in zip(starts, drafts, strict=True)] for i in indices]
    return {i: [row[a:b] for a, b in cut] for i, row, cut in zip(indices, rows, cuts, strict=True)}


def _starts(drafts: Seq[Draft]) -> list[int]:
    """The first column of each draft if their tables stand side by side."""
    widths = (0 if draft.tokens is None else draft.tokens.shape[1] for draft in drafts)
    return list(accumulate(widths, initial=0))[:-1]


def _assemble(drafts: Seq[Draft], trees: Mapping[int, MergedTree]) -> Draft:
    places: list[list[DraftColumn]] = []
    shapes = {i: tree.parents for i, tree in trees.items() if not is_chain(tree.parents)}
    for i in range(len(drafts[0].ks)):
        if i in trees:
            places.append(trees[i].places())
            continue
        places.append([(n, column) for n, draft in enumerate(drafts) for column in range(draft.ks[i])])
        owner = next((draft for draft in drafts if draft.ks[i]), None)
        if owner is not None and i in owner.trees:
            shapes[i] = owner.trees[i]
    laws, rows = _laws(drafts, places)
    draft = Draft(tuple(map(len, places)), _tokens(drafts, places), laws, rows, trees=shapes)
    return with_costs_of(draft, drafts)


def _tokens(drafts: Seq[Draft], places: Seq[Seq[DraftColumn]]) -> Tensor:
    """[B, most nodes] the token at each place."""
    table = torch.cat([draft.tokens for draft in drafts if draft.tokens is not None], 1)
    starts, width = _starts(drafts), max(map(len, places))
    columns = [[*(starts[n] + column for n, column in row), *([0] * (width - len(row)))] for row in places]
    return table.gather(1, index_tensor([x for row in columns for x in row], table.device).view(-1, width))


def _laws(drafts: Seq[Draft], places: Seq[Seq[DraftColumn]]) -> tuple[Tensor | None, dict[int, int]]:
    """(logq [n, most nodes, vocab] of the tokens at these places, index in the batch → row of logq)."""
    with_law = [i for i in range(len(places)) if any(i in draft.logq_rows for draft in drafts)]
    rows = {i: row for row, i in enumerate(with_law)}
    tables = [draft.logq for draft in drafts if draft.logq is not None]
    if not rows or not tables:
        return None, {}
    merged = tables[0].new_full((len(rows), max(map(len, places)), max(table.shape[2] for table in tables)), -torch.inf)
    for n, draft in enumerate(drafts):
        if draft.logq is None:
            continue
        entries = [
            (row, node, draft.logq_rows[i], column)
            for i, row in rows.items()
            for node, (owner, column) in enumerate(places[i])
            if owner == n
        ]
        to_rows, nodes, from_rows, columns = index_tensor([x for e in entries for x in e], merged.device).view(-1, 4).T
        merged[to_rows, nodes, : draft.logq.shape[2]] = draft.logq[from_rows, columns]
    return merged, rows
