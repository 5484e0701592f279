"""Every family's logits equal those of transformers' modules, however the tokens are fed; no trait can be left out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.runner import Feed, Runner
from tests.engine.driving import make_sequence
from tests.engine.models.families import CASES, WINDOW, random_checkpoint, reference
from tests.engine.models.reader import LENGTH, SLOTS, Reader, load_alone
from tests.engine.pairs import VOCAB
from tests.kv import kv_layout

Made = dict[str, tuple[str, Tensor]]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (SLOTS, LENGTH), generator=generator).tolist()


@pytest.fixture(scope="module")
def made(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """{case: (checkpoint, transformers' logits [slots, length, vocab])}, made when first asked for."""
    return Cases(texts, tmp_path_factory.mktemp("families"))


class Cases(dict[str, tuple[str, Tensor]]):
    def __init__(self, texts: list[list[int]], directory: Path) -> None:
        self.texts, self.directory = texts, directory

    def __missing__(self, name: str) -> tuple[str, Tensor]:
        checkpoint = random_checkpoint(CASES[name], self.directory / name)
        with reference(checkpoint) as logits:
            expected = logits(self.texts)
        with reference(checkpoint, exact=False) as logits:
            untouched = logits(self.texts)
        assert (expected - untouched).abs().max() < 1e-4  # fp64 in place of fp32 changes rounding only
        assert expected.std() > 0.5  # a flat law would agree with anything
        self[name] = checkpoint, expected
        return self[name]


@pytest.fixture(params=sorted(CASES))
def reader(request: pytest.FixtureRequest, made: Made, texts: list[list[int]]) -> Reader:
    checkpoint, expected = made[request.param]
    return Reader(load_alone(checkpoint), texts, expected)


def test_prefill_whole_and_in_chunks(reader: Reader) -> None:
    reader.feed({2: LENGTH})
    for chunk in (1, 7, 2, 19, 5, 30):
        reader.feed({5: chunk})


def test_token_by_token(reader: Reader) -> None:
    for _ in range(LENGTH):
        reader.feed({0: 1})


def test_verification_and_rollback(reader: Reader) -> None:
    """Five drafts, of which the last three are taken back: the rollback crosses windows and blocks."""
    reader.feed({1: 3})
    while reader.runner.cache.length(1) + 6 <= LENGTH:
        reader.feed({1: 1}, {1: 5})
        reader.runner.cache.truncate_to(1, reader.runner.cache.length(1) - 3)


def test_batches(reader: Reader) -> None:
    """Ragged spans with idle slots between them, and decodes at lengths on both sides of a window."""
    for slot, count in {0: 30, 1: 4, 2: WINDOW, 3: 11, 4: 40, 5: WINDOW - 1, 6: 12}.items():
        reader.feed({slot: count})
    reader.feed({0: 1, 1: 1, 2: 1, 4: 1}, {0: 5, 1: 2, 4: 3})
    reader.feed({1: 1, 3: 1, 6: 1})
    reader.feed({5: 1, 2: 1, 7: 25})
    reader.feed({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(CASES))
def test_lower_precision(name: str, dtype: torch.dtype, made: Made, texts: list[list[int]]) -> None:
    checkpoint, expected = made[name]
    runner = Runner(load_alone(checkpoint, dtype), kv_layout(2, LENGTH), torch.device("cpu"))
    with torch.inference_mode():
        logits = runner.run([Feed(make_sequence(s, texts[s]), LENGTH, outputs=LENGTH) for s in (0, 1)])
    assert logits.dtype is dtype
    similar = torch.nn.functional.cosine_similarity(logits.double().flatten(0), expected[:2].flatten(), dim=0)
    assert similar > (0.99 if dtype.itemsize == 2 else 1 - 1e-7)
