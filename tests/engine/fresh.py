"""What caches must hold: the keys and values that a fresh prefill of the same committed tokens gives."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from cache.gathered import GatheredStorage
from cache.layout import Layout
from cache.mapped import MappedStorage
from cache.paged import HIDDEN, PagedCache
from cache.prefix import PrefixNode
from cache.storage import Blocks, SlottedStorage
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sequence import Sequence
from tests.engine.driving import make_sequence, model_drafters

TOLERANCE = 1e-9  # in fp64
STORAGES = {"mapped": MappedStorage, "gathered": GatheredStorage, "slotted": SlottedStorage}
BLOCK_SIZES = {"mapped": 8, "gathered": 5}  # a page of the tiny pair's fp64 rows, and no whole pages


def memory(kind: str, kv_tokens: int) -> dict[str, Any]:
    """Fields of an EngineConfig, whatever `--kv` says; slots cannot honour kv_tokens."""
    if kind == "slotted":
        return {"cache": "slotted", "block_size": None}
    return {"cache": "paged", "block_size": BLOCK_SIZES[kind], "kv_tokens": kv_tokens}


class Checker:
    """Compares what an engine's sequences and prefix indices hold with a fresh prefill over the same weights.

    It changes nothing, except with `logits`: then every sequence's next logits are computed and compared too, which
    takes memory that an engine short of it may need. every: compares after one of so many steps, because a row that is
    wrong stays so until its sequence ends; how many rows there are is checked after each.
    """

    def __init__(self, engine: Engine, *, logits: bool = True, every: int = 1) -> None:
        self.engine = engine
        self._every, self._calls = every, 0
        names = ("target", "draft", "second draft")
        drafts = (model.runner for model in model_drafters(engine))
        self.runners = dict(zip(names, (engine.target, *drafts), strict=False))
        slots = engine.config.max_running
        self.fresh = {n: Runner(r.decoder, Layout(slots, r.cache.max_len), r.device) for n, r in self.runners.items()}
        self.compared = dict.fromkeys(self.runners, 0)  # positions of sequences
        self.indexed = dict.fromkeys(self.runners, 0)  # and of the indices
        self._logits = logits
        self._seen: list[Sequence] = []  # every sequence there ever was
        add = engine.scheduler.add

        def adding(sequence: Sequence) -> None:
            self._seen.append(sequence)
            add(sequence)

        engine.scheduler.add = adding  # type: ignore[method-assign]

    def __call__(self) -> None:
        self._calls += 1
        for name, runner in self.runners.items():
            held = [s for s in self.engine.scheduler.running if runner.cache.holds(s.handle)]
            for sequence in held:
                _check_length(name, runner, sequence)
            if held and self._calls % self._every == 0:
                self._check(name, runner, held)

    def check_index(self) -> None:
        """I6: whatever can be found is a beginning of some sequence's committed tokens, under that sequence's salt, and
        its blocks hold these tokens."""
        for name, runner in self.runners.items():
            if isinstance(runner.cache, PagedCache):
                paths = list(_paths(runner.cache))
                for salt, tokens, _ in paths:
                    texts = (runner.tokens(s) for s in self._seen if s.cache_salt == salt)
                    assert any(text[: len(tokens)] == tokens for text in texts), (
                        f"{name}: {tokens} can be found, and nobody with salt {salt!r} committed them"
                    )
                at_once = self.engine.config.max_running
                for first in range(0, len(paths), at_once):
                    self._check_blocks(name, runner, paths[first : first + at_once])

    def _check(self, name: str, runner: Runner, held: list[Sequence]) -> None:
        fresh = self.fresh[name]
        wanted = _prefill(fresh, [runner.tokens(s) for s in held])
        for i, sequence in enumerate(held):
            length = runner.cache.length(sequence.handle)
            runner.storage.prepare()
            left = _left_behind(runner, sequence.handle)
            window = runner.storage.view(runner.cache.slot(sequence.handle), 1, length)
            for layer in range(runner.decoder.config.num_layers):
                read = runner.storage.read(layer, sequence.handle, length)
                seen = [tensor[0] for tensor in window[layer]]  # as attention sees it
                theirs = fresh.storage.read(layer, i, length)
                for what, a, b, c in zip(("keys", "values"), read, seen, theirs, strict=True):
                    same = _close(a[:, left:], c[:, left:]) and _close(b[:, left:], c[:, left:])
                    assert not b[:, :left].any(), f"{name}: {what} that the window has left are read"
                    assert same, f"{name}: {what} of layer {layer} are not those of the committed tokens"
            self.compared[name] += length
        _release(fresh, len(held))
        if self._logits:
            lengths = [runner.cache.length(s.handle) for s in held]
            given = _next_logits(runner, held)
            for sequence, length in zip(held, lengths, strict=True):
                runner.cache.truncate_to(sequence.handle, length)
            assert _close(given, wanted), f"{name}: the next logits are not those of the committed tokens"

    def _check_blocks(self, name: str, runner: Runner, paths: Seq[tuple[str, list[int], list[int]]]) -> None:
        fresh, storage = self.fresh[name], runner.storage
        assert isinstance(storage, Blocks)
        _prefill(fresh, [tokens for _, tokens, _ in paths])
        for i, (_, tokens, blocks) in enumerate(paths):
            for layer in range(runner.decoder.config.num_layers):
                rows = storage.pool[layer, blocks].flatten(0, 1).transpose(0, 1)  # [2·kv_heads, length, head_dim]
                theirs = torch.cat(fresh.storage.read(layer, i, len(tokens)))
                assert _close(rows, theirs), f"{name}: blocks {blocks} can be found, and hold other tokens than theirs"
            self.indexed[name] += len(tokens)
        _release(fresh, len(paths))


def _left_behind(runner: Runner, handle: int) -> int:
    """Positions that the sequence's window has left."""
    cache = runner.cache
    return cache.table(handle).count(HIDDEN) * cache.block_size if isinstance(cache, PagedCache) else 0


def _paths(cache: PagedCache) -> Iterator[tuple[str, list[int], list[int]]]:
    """(salt, tokens, blocks) of all that the index finds, one for each leaf."""
    index = cache._index
    for leaf in index.nodes.values():
        if leaf.children:
            continue
        tokens: list[int] = []
        blocks: list[int] = []
        node: PrefixNode = leaf
        while node.parent is not None:
            tokens[:0], blocks[:0] = node.key, [node.block]
            node = node.parent
        yield index._salts[node], tokens, blocks


def _check_length(name: str, runner: Runner, sequence: Sequence) -> None:
    length, most = runner.cache.length(sequence.handle), len(runner.tokens(sequence)) - 1
    assert length <= most, f"{name}: {length} cached of {most + 1} tokens"
    if name == "target" and sequence.num_output and not sequence.record.preemptions:
        assert length == len(sequence.tokens) - 1


def _prefill(runner: Runner, texts: Seq[list[int]]) -> Tensor:
    """Logits [texts, vocab] of the next tokens; text i is then held as sequence i."""
    feeds = [Feed(make_sequence(i, tokens), len(tokens)) for i, tokens in enumerate(texts)]
    with torch.inference_mode():
        return Runner.run(runner, feeds)


def _next_logits(runner: Runner, held: Seq[Sequence]) -> Tensor:
    with torch.inference_mode():
        return Runner.run(runner, [Feed(s, runner.uncached(s)) for s in held])  # whatever a test did to its own run


def _release(runner: Runner, count: int) -> None:
    for i in range(count):
        runner.cache.release(i)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (not a.numel() or bool((a - b).abs().max() <= TOLERANCE))
