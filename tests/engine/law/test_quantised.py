"""The law under weights of 8 and 4 bits: that of the quantised target, however many drafts a round checks."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import WeightForm
from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.products import Weights
from engine.models.runner import Runner
from engine.types import Request, SamplingParams, Verifier
from tests.engine.driving import drive, load, make_sequence
from tests.engine.law.statistics import g_test
from tests.engine.models.test_int4_linear import needs_int4
from tests.engine.models.test_linear import needs_int8
from tests.engine.pairs import Pair
from tests.kv import kv_layout

CPU = torch.device("cpu")
LEVEL = 1e-3  # of each decision; seeds are fixed, so an outcome repeats
PROMPT = (5, 9, 7, 30, 12)
TOP, TEMPERATURE = 3, 1.2
TEXTS = 240
Law = dict[tuple[int, ...], float]


def law_of(target: str, form: WeightForm) -> Law:
    """The law of two tokens, by the target alone."""
    decoder = load_decoder(open_checkpoint(target), dtype=torch.float32, device=CPU, max_len=64, weights=Weights(form))

    def step(text: tuple[int, ...]) -> dict[int, float]:
        values, ids = logits_of(decoder, text).double().topk(TOP)
        return dict(zip(ids.tolist(), (values / TEMPERATURE).softmax(0).tolist(), strict=True))

    return {(a, b): p * q for a, p in step(PROMPT).items() for b, q in step((*PROMPT, a)).items()}


def logits_of(decoder: Decoder, text: tuple[int, ...]) -> Tensor:
    """Behind the text, [vocab]."""
    feed = Feed(make_sequence(0, list(text)), len(text), outputs=1)
    with torch.inference_mode():
        return Runner(decoder, kv_layout(1, 64), CPU).run([feed])[-1]


def texts_of(pair: Pair, form: WeightForm, verifier: Verifier) -> Counter[tuple[int, ...]]:
    engine = load(pair, dtype="float32", target_weights=form, draft_weights=form, max_running=8, max_spec_length=3)
    params = [SamplingParams(TEMPERATURE, top_k=TOP, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(TEXTS)]
    requests = [Request(f"r{p.seed}", PROMPT, p, k=3, verifier=verifier) for p in params]
    run = drive(engine, requests)
    assert 0 < run.accepted < run.drafted
    return Counter(tuple(tokens[:2]) for tokens in run.tokens.values())


@pytest.mark.parametrize(
    ("form", "verifier"),
    [
        pytest.param("int8", "block", marks=needs_int8),
        pytest.param("int4", "rejection", marks=needs_int4),
        *(pytest.param("int8", v, marks=[needs_int8, pytest.mark.proofs]) for v in ("match", "rejection")),
        *(pytest.param("int4", v, marks=[needs_int4, pytest.mark.proofs]) for v in ("match", "block")),
    ],
)
def test_the_law_is_that_of_the_quantised_target(pair: Pair, form: WeightForm, verifier: Verifier) -> None:
    counts = texts_of(pair, form, verifier)
    law = law_of(pair.target, form)
    assert g_test(counts, law) > LEVEL


@pytest.mark.parametrize(
    "form", [pytest.param("int8", marks=needs_int8), pytest.param("int4", marks=[needs_int4, pytest.mark.proofs])]
)
def test_the_law_of_other_weights_is_refused(pair: Pair, form: WeightForm, tmp_path: Path) -> None:
    """The negative control: the law of the draft's weights in the same form."""
    law = law_of(pair.draft, form)
    counts = texts_of(pair, form, "match")
    assert not set(counts) <= set(law) or g_test(counts, law) < LEVEL
