"""The decoder's logits equal those of transformers' modules at every position, however the tokens are fed."""

import dataclasses
from collections.abc import Sequence as Seq
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.models.attention as attention
import engine.models.attention_plans as attention_plans
from cache.storage import Storage
from engine.models.attention import AttentionPlan, plan_attention
from engine.models.cpu_attention import UNMEASURED_LANES, BlockGroup, VisibleRows
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.models.spans import Span
from tests.engine.driving import make_sequence
from tests.engine.models.reader import LENGTH, SLOTS, Reader, load_alone
from tests.engine.pairs import LLAMA3, VOCAB, Shape, reference_model, save_checkpoint
from tests.examples import usual_and_proofs
from tests.kv import kv_layout

SHAPES = {
    "llama": Shape(),
    "llama-tied": Shape(tied=True, layers=3),
    "llama-scaled": Shape(rope=LLAMA3),
    "llama-linear": Shape(rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}),
    "qwen2": Shape(kind="qwen2"),
    "qwen2-tied": Shape(kind="qwen2", tied=True),
}


WAYS = {  # number type, and whether attention reads blocks
    "fp64": (torch.float64, False),
    "fp64-blocks": (torch.float64, True),
    "fp32": (torch.float32, False),
    "fp32-blocks": (torch.float32, True),
}
# `make test` tries llama in all ways, each other shape in one.
OTHERS = (
    "llama-tied-fp64",
    "llama-scaled-fp64-blocks",
    "llama-linear-fp32-blocks",
    "qwen2-fp32",
    "qwen2-tied-fp64-blocks",
)
USUAL = {*(f"llama-{way}" for way in WAYS), *OTHERS}
assert {f"{shape}-{way}" for shape in SHAPES for way in WAYS} >= USUAL


class Made(dict[str, tuple[str, Tensor]]):
    """By shape: (checkpoint, transformers' logits [slots, length, vocab] in fp64), made when first asked for."""

    def __init__(self, texts: list[list[int]], directory: Path) -> None:
        self.texts, self.directory = texts, directory

    def __missing__(self, name: str) -> tuple[str, Tensor]:
        checkpoint = save_checkpoint(self.directory / name, SHAPES[name], seed=7)
        with torch.inference_mode():
            logits: Tensor = reference_model(checkpoint)(torch.tensor(self.texts)).logits
            untouched = reference_model(checkpoint, exact=False)(torch.tensor(self.texts)).logits
        assert (logits - untouched).abs().max() < 1e-4  # lifting the norms to fp64 changes rounding only
        assert logits.std() > 1  # a flat law would agree with anything
        self[name] = checkpoint, logits
        return self[name]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (SLOTS, LENGTH), generator=generator).tolist()


@pytest.fixture(scope="module")
def made(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(texts, tmp_path_factory.mktemp("parity"))


@pytest.fixture(
    params=[
        pytest.param((shape, *WAYS[way]), id=name, marks=[pytest.mark.proofs] * (name not in USUAL))
        for shape in sorted(SHAPES)
        for way in WAYS
        for name in [f"{shape}-{way}"]
    ]
)
def reader(made: Made, texts: list[list[int]], request: pytest.FixtureRequest) -> Reader:
    shape, dtype, blocks = request.param
    checkpoint, expected = made[shape]
    return Reader(load_alone(checkpoint, dtype), texts, expected, blocks=blocks)


def kinds(plan: AttentionPlan) -> list[str]:
    """What each group of a pass is: blocks; or solo, dense (no padding) or padded (gathered), and -masked or not."""
    names = []
    for group in plan.groups:
        if isinstance(group, BlockGroup):
            names.append("blocks")
            continue
        name = "padded" if group.gather is not None else "dense" if group.slots > 1 else "solo"
        names.append(name if group.mask is None else f"{name}-masked")
    return names


def test_full_prefill(reader: Reader) -> None:
    assert kinds(reader.plan({2: LENGTH})) == ["solo-masked"]
    reader.feed({2: LENGTH})


def test_chunked_prefill(reader: Reader) -> None:
    for chunk in (1, 7, 2, 19, 5, 30):
        reader.feed({5: chunk})
    assert reader.runner.cache.length(5) == LENGTH


def test_token_by_token(reader: Reader) -> None:
    for _ in range(LENGTH):
        assert kinds(reader.plan({0: 1})) == ["solo" if reader.runner.attention_plans.reader is None else "blocks"]
        reader.feed({0: 1})


@pytest.mark.parametrize("k", [1, 4, 8])
def test_verification(reader: Reader, k: int) -> None:
    reader.feed({1: 9})
    while reader.runner.cache.length(1) + 1 + k <= LENGTH:
        reader.feed({1: 1}, {1: k})
        reader.runner.cache.truncate_to(1, reader.runner.cache.length(1) - k // 2)


def test_rejected_drafts_leave_nothing_behind(reader: Reader) -> None:
    reader.feed({1: 9})
    with torch.inference_mode():
        reader.runner.run([Feed(reader.sequences[1], 1, 5)], torch.tensor([[3, 1, 4, 1, 5]]))
    reader.runner.cache.truncate_to(1, 10)
    reader.feed({1: LENGTH - 10})


BATCHES: dict[str, tuple[dict[int, int], dict[int, int], list[str]]] = {
    # name: tokens already there per slot, tokens fed per slot in packed order, the groups it must be computed in
    "decode, equal lengths": ({2: 8, 3: 8, 4: 8}, {2: 1, 3: 1, 4: 1}, ["dense"]),
    "decode, ragged lengths": ({2: 8, 3: 21, 4: 3}, {2: 1, 3: 1, 4: 1}, ["dense-masked"]),
    "verification, equal k": ({0: 5, 1: 9}, {0: 5, 1: 5}, ["dense-masked"]),
    "verification, ragged k": ({0: 5, 1: 9, 2: 30}, {0: 5, 1: 2, 2: 9}, ["padded-masked"]),
    "idle slots between": ({1: 5, 3: 9, 6: 12}, {1: 1, 3: 1, 6: 1}, ["padded-masked"]),
    "prefill among decodes": ({0: 30, 1: 0, 2: 13}, {0: 1, 1: 60, 2: 1}, ["padded-masked"]),
    "far apart": ({0: 0, 7: 3}, {0: 60, 7: 1}, ["solo-masked", "solo"]),
    "descending slots": ({6: 4, 5: 0, 1: 7, 2: 20}, {6: 1, 5: 9, 1: 3, 2: 1}, ["solo", "solo-masked", "padded-masked"]),
    "two batches": (
        {3: 9, 4: 9, 0: 2, 1: 11},
        {3: 1, 4: 1, 0: 4, 1: 4},
        ["dense", "dense-masked"],
    ),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_packed_ragged_batches(reader: Reader, name: str) -> None:
    before, counts, expected_kinds = BATCHES[name]
    for slot in range(SLOTS):  # idle slots hold something too, which nobody may see
        reader.feed({slot: before.get(slot, 11)} if before.get(slot, 11) else {slot: 1})
        reader.runner.cache.truncate_to(slot, before.get(slot, 11))
    if reader.runner.attention_plans.reader is None:
        assert kinds(reader.plan(counts)) == expected_kinds
    else:  # a long span splits the packed order
        group_size = reader.runner.decoder.config.num_heads // reader.runner.decoder.config.num_kv_heads
        runs = [short for short, _ in groupby(counts.values(), lambda count: count * group_size <= UNMEASURED_LANES)]
        assert [kind == "blocks" for kind in kinds(reader.plan(counts))] == runs
    reader.feed(counts)
    rest = dict.fromkeys(counts, 1)
    reader.feed(rest, dict(zip(counts, (3, 0, 2, 1), strict=False)))  # ragged verification on top


def test_only_the_rows_asked_for(reader: Reader) -> None:
    sequences = reader.sequences
    with torch.inference_mode():
        logits = reader.runner.run(
            [Feed(sequences[0], 12, outputs=0), Feed(sequences[1], 6), Feed(sequences[2], 9, outputs=3)]
        )
    wanted = torch.cat([reader.expected[1, 5:6], reader.expected[2, 6:9]])
    assert (logits.double() - wanted).abs().max() <= reader.tolerance
    reader.feed({0: 3})  # what had no outputs is cached all the same


def test_negative_control_position(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.feed({0: 9})

    def shifted(spans: Seq[Span], storage: Storage, **settings: Any) -> AttentionPlan:
        plan = plan_attention(spans, storage, **settings)
        return dataclasses.replace(plan, positions=plan.positions + 1)

    monkeypatch.setattr(attention_plans, "plan_attention", shifted)
    with pytest.raises(AssertionError, match="logits differ"):
        reader.feed({0: 1})


@pytest.mark.parametrize("counts", [{0: 9}, {0: 5, 1: 5}, {0: 5, 1: 2}], ids=["solo", "dense", "padded"])
def test_negative_control_mask(reader: Reader, monkeypatch: pytest.MonkeyPatch, counts: dict[int, int]) -> None:
    real = attention._additive_mask

    def off_by_one(last_visible: Tensor, *rest: Any) -> Tensor:
        return real(last_visible + 1, *rest)

    rows_of = BlockGroup._rows

    def rows_off_by_one(self: BlockGroup, window: int | None) -> VisibleRows:
        first, last, *rest = rows_of(self, window)
        return first, last + 1, *rest

    reader.feed({1: 1})  # so that keys beyond the first group's reach exist
    monkeypatch.setattr(attention, "_additive_mask", off_by_one)
    monkeypatch.setattr(BlockGroup, "_rows", rows_off_by_one)
    with pytest.raises(AssertionError, match="logits differ"):
        reader.feed(counts)


@pytest.mark.parametrize("shape", usual_and_proofs(sorted(SHAPES), ("llama", "qwen2-tied")))
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.bfloat16, 0.995), pytest.param(torch.float16, 0.9999, marks=pytest.mark.proofs)]
)
def test_16_bits(made: Made, texts: list[list[int]], shape: str, dtype: torch.dtype, least: float) -> None:
    checkpoint, expected = made[shape]
    runner = Runner(load_alone(checkpoint, dtype), kv_layout(2, LENGTH), torch.device("cpu"))
    with torch.inference_mode():
        logits = runner.run([Feed(make_sequence(s, texts[s]), LENGTH, outputs=LENGTH) for s in (0, 1)])
    assert logits.dtype is dtype
    similar = torch.nn.functional.cosine_similarity(logits.double().flatten(0), expected[:2].flatten(), dim=0)
    assert similar > least
