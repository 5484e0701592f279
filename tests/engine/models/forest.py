"""Passes with trees, chains, chunks and plain tokens over any memory, each row compared with a fresh prefill."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cache.layout import Layout
from engine.models.decoder import LanguageModel
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sequence import Sequence
from engine.trees import ROOT, Parents, chain, path
from tests.engine.driving import make_sequence

TOLERANCE = 1e-9
MAX_LEN = 64
SLOTS = 4
CPU = torch.device("cpu")
BLOCKS = {"mapped": 16, "gathered": 5, "slotted": 0}


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence feeds: so many of its uncached tokens, then drafts."""

    handle: int
    committed: int
    drafts: list[int] = field(default_factory=list)
    parents: Parents | None = None  # None: the drafts are a chain
    fed: int = 0  # drafts that earlier passes have fed; then nothing is committed

    @property
    def shape(self) -> Parents:
        return chain(len(self.drafts)) if self.parents is None else self.parents

    def tokens_to(self, node: int) -> list[int]:
        """The drafts on the path to a node."""
        return [self.drafts[n] for n in path(self.shape, node)]


class Forest:
    """A model with sequences 0, 1, … over memory of one kind."""

    def __init__(self, decoder: LanguageModel, kind: str, texts: Seq[list[int]], *, blocks: bool = True) -> None:
        """blocks: whether the attention of short spans reads blocks."""
        size = BLOCKS[kind]
        count = SLOTS * -(-MAX_LEN // size) if size else 0
        layout = Layout(SLOTS, MAX_LEN, size, count, window=decoder.config.traits.widest_window if size else None)
        self.runner = Runner(decoder, layout, CPU)
        if not blocks:
            self.runner.attention_plans.reader = None
        self.sequences = [make_sequence(handle, text) for handle, text in enumerate(texts)]
        self._fresh = Runner(decoder, Layout(1, MAX_LEN), CPU)

    def length(self, handle: int) -> int:
        return self.runner.cache.length(handle)

    def feed(self, parts: Seq[Part]) -> None:
        """One pass. Every row's logits must be those of a fresh prefill of the text before it."""
        feeds = [
            Feed(self.sequences[p.handle], p.committed, n := len(p.drafts) - p.fed, p.committed + n, parents=p.parents)
            for p in parts
        ]
        table = torch.full((len(parts), 1 + max(len(p.drafts) for p in parts)), -7)
        for row, part in enumerate(parts):
            table[row, : len(part.drafts) - part.fed] = torch.tensor(part.drafts[part.fed :], dtype=torch.int64)
        starts = [self.length(p.handle) if self.runner.cache.holds(p.handle) else 0 for p in parts]
        with torch.inference_mode():
            logits = self.runner.run(feeds, table).split([feed.outputs for feed in feeds])
        for part, start, rows in zip(parts, starts, logits, strict=True):
            text = self.sequences[part.handle].tokens[: start + part.committed - part.fed]
            leaves = set(range(len(part.drafts))) - set(part.shape) or {ROOT}
            for leaf in leaves:
                wanted = self.prefill([*text, *part.tokens_to(leaf)])
                nodes = path(part.shape, leaf)
                of_path = [*range(part.committed), *(part.committed + n - part.fed for n in nodes if n >= part.fed)]
                if not of_path:
                    continue
                error = (rows[of_path] - wanted[-len(of_path) :]).abs().max().item()
                assert error <= TOLERANCE, f"logits differ by {error} on the path to node {leaf}"

    def accept(self, parts: Seq[Part], nodes: Seq[int]) -> None:
        """Keep the path to each part's node, ROOT for no drafts. The caches must be those of fresh prefills."""
        held = [(self.sequences[p.handle], self.length(p.handle) - len(p.drafts), p) for p in parts]
        self.runner.keep_paths((s, base, path(p.shape, n)) for (s, base, p), n in zip(held, nodes, strict=True))
        for (sequence, base, part), node in zip(held, nodes, strict=True):
            accepted = part.tokens_to(node)
            self.runner.cache.truncate_to(sequence.handle, base + len(accepted))
            if part.drafts:
                sequence.tokens[base:] = accepted
        self.check_caches()

    def check_caches(self) -> None:
        cache, storage = self.runner.cache, self.runner.storage
        cache.audit({s.handle for s in self.sequences})
        held = [s for s in self.sequences if cache.holds(s.handle) and cache.length(s.handle)]
        storage.prepare()
        for sequence in held:
            length = self.length(sequence.handle)
            self.prefill(sequence.tokens[:length])
            view = storage.view(cache.slot(sequence.handle), 1, length)
            for layer in range(self.runner.decoder.config.num_layers):
                theirs = self._fresh.storage.read(layer, 0, length)
                for ours in (storage.read(layer, sequence.handle, length), [part[0] for part in view[layer]]):
                    for a, b in zip(ours, theirs, strict=True):
                        left = int((a.abs().sum((0, 2)) == 0).sum())  # what the window has left reads as zeros
                        assert not a[:, :left].any()
                        error = (a[:, left:] - b[:, left:]).abs().max().item() if left < length else 0.0
                        assert error <= TOLERANCE, f"the cache of sequence {sequence.handle} differs by {error}"

    def commit(self, token: int) -> None:
        """Every sequence emits a token and publishes."""
        for sequence in self.sequences:
            if self.runner.cache.holds(sequence.handle) and self.length(sequence.handle) == len(sequence.tokens):
                sequence.tokens.append(token)
                self.runner.mark_finite(sequence)
                assert self.runner.publish(sequence)

    def prefill(self, tokens: list[int]) -> Tensor:
        """Logits [len(tokens), vocab] of a text that is read at once. The fresh runner's sequence 0 then holds it."""
        self._fresh.cache.release(0)
        with torch.inference_mode():
            return self._fresh.run([Feed(self._sequence(tokens), len(tokens), outputs=len(tokens))])

    def _sequence(self, tokens: list[int]) -> Sequence:
        return make_sequence(0, tokens)
