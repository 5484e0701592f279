"""Trees of drafts as rows of a packed pass: each node's logits are those of its path, and only the path stays."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.layout import Layout
from cache.protocol import CacheFull
from cache.storage import RowMemory
from engine import round as round_module
from engine.kernels import paged_rows
from engine.models import attention
from engine.models.cpu_attention import BlockGroup, VisibleRows
from engine.models.decoder import LanguageModel
from engine.models.feeds import Feed
from engine.models.pass_attention import Scoring
from engine.models.runner import Runner
from engine.models.spans import Span
from engine.trees import ROOT, Parents, branching, chain, seen_pairs
from tests.engine.driving import make_sequence
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.models.forest import BLOCKS, CPU, MAX_LEN, Forest, Part
from tests.engine.models.reader import load_alone
from tests.engine.pairs import VOCAB
from tests.examples import in_proofs, usual_and_proofs

NODES = 8
SHORT = 3  # tokens of a window that ends within a tree
# Attention of every kind: plain, a window in every layer, windows in turn with soft caps, windows in turn with sinks.
VARIED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": SHORT},
    "gemma2": {"sliding_window": SHORT},
    "gpt_oss": {"sliding_window": SHORT},
}
BUSHY = branching([2, 1, 2])
DEEP: Parents = (ROOT, 0, 1, 2, 3, 1, 5, ROOT)


class Decoders(dict[str, LanguageModel]):
    """A tiny random model per case, made when first asked for."""

    def __init__(self, directory: Path, hidden: int = 32) -> None:
        self.directory, self.hidden = directory, hidden

    def __missing__(self, name: str) -> LanguageModel:
        case, _, short = name.partition(", ")
        made = replace(CASES[case], config={**CASES[case].config, **VARIED[case]}) if short == "short" else CASES[name]
        self[name] = load_alone(random_checkpoint(made, self.directory / name, hidden=self.hidden), max_len=MAX_LEN)
        return self[name]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    return Decoders(tmp_path_factory.mktemp("trees"))


def make_texts(seed: int = 3, shared: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    beginning = [draw.randrange(2, VOCAB) for _ in range(shared)]
    return [[*beginning, *(draw.randrange(2, VOCAB) for _ in range(n))] for n in (29, 14, 40 - shared, 12)]


def draw_drafts(count: int, seed: int = 5) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB) for _ in range(count)]


def run_rounds(forest: Forest) -> None:
    """Two rounds of trees beside a chain, a plain token and a prompt. The trees end in another slot, block and window
    each time."""
    forest.feed([Part(0, 28), Part(1, 13), Part(2, 30)])
    bushy, deep, few = draw_drafts(len(BUSHY)), draw_drafts(len(DEEP), seed=6), draw_drafts(3)
    parts = [Part(0, 1, deep, DEEP), Part(1, 1, bushy, BUSHY), Part(2, 5), Part(3, 7)]
    forest.feed(parts)
    forest.accept(parts, [6, 7, ROOT, ROOT])
    forest.commit(7)
    forest.feed(parts := [Part(0, 1, few), Part(1, 1, deep, DEEP), Part(2, 5), Part(3, 5, few, (ROOT, ROOT, 1))])
    forest.accept(parts, [1, ROOT, ROOT, 2])


@pytest.mark.parametrize(
    "name", usual_and_proofs(sorted(CASES), [name for name in CASES if name.isidentifier() or "window" in name])
)
def test_every_family(name: str, decoders: Decoders) -> None:
    """With the family's own windows and ropes. Blocks end within the trees."""
    run_rounds(Forest(decoders[name], "gathered", make_texts()))


# Tried in `make test`: each pair of a kind of attention and a memory, of either with a way to read, once at least.
READ = {
    ("llama", "mapped", True), ("llama", "gathered", False), ("llama", "slotted", True),
    ("mistral", "mapped", False), ("mistral", "gathered", True), ("mistral", "slotted", True),
    ("gemma2", "mapped", True), ("gemma2", "gathered", True), ("gemma2", "slotted", False),
    ("gpt_oss", "mapped", True), ("gpt_oss", "gathered", True), ("gpt_oss", "slotted", False),
}  # fmt: skip
LEVELS = {("llama", "mapped"), ("mistral", "gathered"), ("gemma2", "slotted"), ("gpt_oss", "mapped")}


def every(usual: set[Any], ways: tuple[tuple[bool, ...], ...] = ((),)) -> list[Any]:
    """All attention over all memories, in these ways. Those that are not `usual` are tried in proofs only."""
    found = [(name, kind, *way) for name in VARIED for kind in BLOCKS for way in ways]
    return [pytest.param(*one, marks=[pytest.mark.proofs] * (one not in usual)) for one in found]


@pytest.mark.parametrize(("name", "kind", "blocks"), every(READ, ways=((True,), (False,))))
def test_every_memory(name: str, kind: str, blocks: bool, decoders: Decoders) -> None:
    run_rounds(Forest(decoders[f"{name}, short"], kind, make_texts(), blocks=blocks))


@pytest.mark.parametrize(("name", "kind"), every(LEVELS))
def test_a_tree_that_is_fed_level_by_level(name: str, kind: str, decoders: Decoders) -> None:
    """As a draft model draws it. One tree has fewer levels than the other."""
    forest = Forest(decoders[f"{name}, short"], kind, make_texts())
    forest.feed([Part(0, 29), Part(1, 14), Part(2, 30)])
    high: Parents = (ROOT, ROOT, 0, 0, 1, 3, 4, 6)
    low: Parents = (ROOT, ROOT, ROOT, 2, 2, 0)
    drafts, trees = draw_drafts(8), []
    for end, low_end, fed, low_fed in ((2, 3, 0, 0), (5, 6, 2, 3), (7, 6, 5, 6), (8, 6, 7, 6)):
        trees = [Part(0, 0, drafts[:end], high[:end], fed), Part(1, 0, drafts[:low_end], low[:low_end], low_fed)]
        forest.feed([*(part for part in trees if part.fed < len(part.drafts)), Part(3, 2)])
    assert trees[0].parents == high
    forest.accept(trees, [7, 4])


@st.composite
def shapes(draw: st.DrawFn) -> Parents:
    count = draw(st.integers(1, NODES))
    return tuple(draw(st.integers(ROOT, node - 1)) for node in range(count))


def draw_part(data: st.DataObject, forest: Forest, handle: int) -> Part | None:
    """A chunk of what is uncached, or all of it with a tree, a chain or nothing behind it."""
    held = forest.runner.cache.holds(handle)
    left = len(forest.sequences[handle].tokens) - (forest.length(handle) if held else 0)
    if left > 1 and data.draw(st.booleans(), label="a chunk"):
        return Part(handle, data.draw(st.integers(1, left - 1)))
    parents = data.draw(st.one_of(st.just(()), st.just(chain(3)), shapes()), label="parents")
    drafts = data.draw(st.lists(st.integers(2, 9), min_size=len(parents), max_size=len(parents)), label="drafts")
    return Part(handle, left, drafts, parents)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "mapped"), ("mistral", "gathered"), ("gemma2", "slotted"), ("gpt_oss", "mapped")],
)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_trees_beside_anything(name: str, kind: str, decoders: Decoders, data: st.DataObject) -> None:
    explore(decoders[f"{name}, short"], kind, data)


@pytest.mark.proofs
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("name", VARIED)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_more_trees_beside_anything(name: str, kind: str, decoders: Decoders, data: st.DataObject) -> None:
    explore(decoders[f"{name}, short"], kind, data)


def explore(decoder: LanguageModel, kind: str, data: st.DataObject) -> None:
    """Three rounds. The texts begin alike, so that later sequences find or share what earlier ones hold."""
    texts = [text[: data.draw(st.integers(8, 24))] for text in make_texts(shared=7)]
    forest = Forest(decoder, kind, texts)
    for _ in range(3):
        order = data.draw(st.permutations(range(len(texts))), label="packed order")
        for handle in order:
            begin(forest, handle)
        parts = [part for handle in order if (part := draw_part(data, forest, handle))]
        forest.feed(parts)
        forest.accept(parts, [data.draw(st.integers(ROOT, len(part.drafts) - 1)) for part in parts])
        forest.commit(data.draw(st.integers(2, 5)))


def begin(forest: Forest, handle: int) -> None:
    """Give the sequence a slot, with a prefix that the index finds or that another sequence holds."""
    cache, text = forest.runner.cache, forest.sequences[handle].tokens
    if cache.holds(handle):
        return
    cache.allocate(handle, text)
    for other in forest.sequences:
        if other.handle != handle and cache.holds(other.handle):
            alike = next((n for n, (a, b) in enumerate(zip(text, other.tokens, strict=False)) if a != b), len(text))
            length = min(alike, len(text) - 1, cache.length(other.handle))
            if length > cache.length(handle):
                cache.fork(other.handle, handle, length)


def test_a_tree_that_is_a_chain_costs_and_gives_what_a_chain_does(decoders: Decoders) -> None:
    assert Span.at(0, 5, 4, chain(3)) == Span.at(0, 5, 4)
    logits = []
    for parents in (None, chain(5)):
        runner = Runner(decoders["gemma2"], Layout(2, MAX_LEN), CPU)
        feeds = [Feed(make_sequence(h, make_texts()[h]), 9 + h, 5, 6, parents=parents) for h in (0, 1)]
        with torch.inference_mode():
            logits.append(runner.run(feeds, torch.arange(2, 12).view(2, 5)))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("window", [None, *in_proofs(1), SHORT])
@pytest.mark.parametrize("fed", [1, *in_proofs(2, 3), 4])
def test_nodes_that_earlier_passes_fed_are_not_fed_again(window: int | None, fed: int) -> None:
    """A drafter feeds its tree depth by depth: attention of the last nodes is the same as in one pass."""
    parents: Parents = (ROOT, ROOT, 0, 1, 2)
    heads, base = 2, 6
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(base + len(parents), 2 * heads, 4, generator=generator, dtype=torch.float64)
    results = []
    for pieces in ([base + len(parents)], [base, fed, len(parents) - fed]):
        layout = Layout(2, 16)
        runner = Runner(SimpleNamespace(config=_Config(), dtype=torch.float64), layout, CPU)
        outputs, start = [], 0
        for count in pieces:
            end = start + count
            shape = parents[: end - base] if end > base else None
            plan = attention.plan_attention(
                [Span.at(0, start, count, shape), Span.at(1, 0, 1)],  # padded
                runner.storage,
                num_heads=heads,
                num_kv_heads=1,
                dtype=torch.float64,
                device=CPU,
            )
            rows = torch.cat([packed[start:end], packed[:1]])
            call = attention.Attention(plan, runner.storage)
            outputs.append(call(0, rows[:, :heads], rows[:, heads:], Scoring(window=window))[:count])
            assert plan.positions[:count].tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8][start:end]
            start = end
        results.append(torch.cat(outputs))
    assert (results[0] - results[1]).abs().max() < 1e-12


class _Config:
    """What a Runner's memory depends on."""

    num_layers, num_heads, num_kv_heads, head_dim = 1, 2, 1, 4
    traits = SimpleNamespace(widest_window=None)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_tree_needs_a_place_for_each_node(kind: str, decoders: Decoders) -> None:
    """Its positions would fit into the context, its places do not."""
    text = draw_drafts(MAX_LEN - 3)
    forest = Forest(decoders["llama"], kind, [text])
    forest.feed([Part(0, len(text) - 1)])
    siblings = Part(0, 1, [2, 3, 4, 5], (ROOT,) * 4)
    with pytest.raises(CacheFull):
        forest.feed([siblings])
    assert forest.length(0) == len(text) - 1
    forest.feed([Part(0, 1, [2, 3, 4], (ROOT,) * 3)])


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_path_in_order_moves_nothing(kind: str, decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    forest = Forest(decoders["llama"], kind, make_texts())
    tree = Part(0, 29, draw_drafts(len(DEEP)), DEEP)
    forest.feed([tree])
    monkeypatch.setattr(forest.runner.storage, "move", None)
    forest.accept([tree], [4])  # the first child of the first child …


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_round_keeps_the_path_of_its_verdict(kind: str, decoders: Decoders) -> None:
    """A sequence whose scores are not finite keeps all its memory as it is."""
    forest = Forest(decoders["mistral, short"], kind, make_texts())
    parts = [Part(0, 29, draw_drafts(len(DEEP)), DEEP), Part(1, 14, draw_drafts(3)), Part(2, 40, [5, 6], (ROOT, ROOT))]
    forest.feed(parts)
    batch: Any = SimpleNamespace(sequences=forest.sequences[:3])
    before = forest.runner.storage.read(0, 2, 42)[0].clone()
    verdict: Any = SimpleNamespace(accepted=[4, 1, 1], non_finite=[False, False, True], paths={0: [0, 1, 5, 6], 2: [1]})
    round_module._roll_back(batch, verdict, forest.runner, None)
    assert [forest.length(handle) for handle in range(3)] == [29 + 4, 14 + 1, 42]
    assert torch.equal(forest.runner.storage.read(0, 2, 42)[0], before)
    for part, node in zip(parts, (6, 0, 0), strict=True):
        forest.sequences[part.handle].tokens += part.tokens_to(node)
    forest.runner.release(forest.sequences.pop(2))
    forest.check_caches()


def test_drafts_that_others_can_read_do_not_move(decoders: Decoders) -> None:
    forest = Forest(decoders["llama"], "gathered", make_texts())
    tree = Part(1, 14, draw_drafts(8), (ROOT, ROOT, 1, 1, 3, 4, 5, 6))
    forest.feed([tree])
    forest.runner.cache.publish(1, forest.sequences[1].tokens + tree.drafts)
    with pytest.raises(ValueError, match="others can read the drafts of request sequence-1"):
        forest.accept([tree], [5])


# --- negative controls -----------------------------------------------------------------------------------------------

Fault = Callable[[pytest.MonkeyPatch], None]


def see(monkeypatch: pytest.MonkeyPatch, pairs: Callable[..., Iterable[tuple[int, int]]]) -> None:
    """Let nodes see these pairs, by masks and by bits."""
    for module in (attention, paged_rows):
        monkeypatch.setattr(module, "seen_pairs", pairs)


def sees_the_path_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a node is that of its sibling's child."""

    def wrong(parents: Parents, window: int | None = None) -> Iterable[tuple[int, int]]:
        return seen_pairs(tuple(max(ROOT, min(parent + 1, n - 1)) for n, parent in enumerate(parents)), window)

    see(monkeypatch, wrong)


def sees_no_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, lambda parents, window=None: [(n, n) for n in range(len(parents))])


def sees_ancestors_beyond_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, lambda parents, window=None: seen_pairs(parents))


def is_masked_as_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rotation goes by depth."""
    monkeypatch.setattr(Span, "last_visible", lambda self: range(self.start, self.end))


def has_its_place_as_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Span, "positions", lambda self: range(self.start, self.end))


def slides_by_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window goes by the last visible key, not by the query's position."""
    real = attention._additive_mask
    monkeypatch.setattr(attention, "_additive_mask", lambda *settings: real(*settings[:5]))
    rows_of = BlockGroup._rows

    def by_places(self: BlockGroup, window: int | None) -> VisibleRows:
        first, last, *rest = rows_of(self, window)
        return first if window is None else np.maximum(last - window + 1, 0), last, *rest

    monkeypatch.setattr(BlockGroup, "_rows", by_places)


def moves_one_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    move = RowMemory.move
    monkeypatch.setattr(RowMemory, "move", lambda self, sources, targets: move(self, sources, [t + 1 for t in targets]))


def moves_the_next_node(monkeypatch: pytest.MonkeyPatch) -> None:
    move = RowMemory.move
    monkeypatch.setattr(RowMemory, "move", lambda self, sources, targets: move(self, [s + 1 for s in sources], targets))


def leaves_stale_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowMemory, "move", lambda *_: None)


def truncates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "keep_paths", lambda *_: None)


FAULTS: list[tuple[Fault, str]] = [
    (sees_the_path_of_another, "logits differ"),
    (sees_no_ancestors, "logits differ"),
    (sees_ancestors_beyond_the_window, "logits differ"),
    (is_masked_as_a_chain, "logits differ"),
    (has_its_place_as_position, "logits differ"),
    (slides_by_places, "logits differ"),
    (moves_one_too_far, "the cache of sequence"),
    (moves_the_next_node, "the cache of sequence"),
    (leaves_stale_nodes, "the cache of sequence"),
    (truncates_only, "the cache of sequence"),
]


@pytest.mark.parametrize(
    ("fault", "found", "blocks"),
    [
        pytest.param(
            *fault,
            blocks,
            id=f"{fault[0].__name__}-{'blocks' if blocks else 'torch'}",
            marks=[pytest.mark.proofs] * (n > 5 and blocks == n % 2),  # masks are read in two ways, moves in one
        )
        for n, fault in enumerate(FAULTS)
        for blocks in (True, False)
    ],
)
def test_negative_controls(
    fault: Fault, found: str, blocks: bool, decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    forest = Forest(decoders["mistral, short"], "mapped", make_texts(), blocks=blocks)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        run_rounds(forest)
