"""The table models read their context from the cache, and the exact law is what the definitions say."""

from itertools import product
from math import log
from typing import cast

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, make_sequence
from tests.engine.law.checking import LENGTH, PREDICTION, PROMPT
from tests.engine.law.configurations import SETTINGS
from tests.engine.law.exact import exact_law, next_law
from tests.engine.law.tables import CPU, DRAFT, END, MAX_LEN, ROWS, TARGET, VOCAB, TableDecoder, row_of, table_engine
from tests.kv import kv_layout

TEXTS = [(0, 1, 2, 3, 3, 2, 1, 0, 0), (3,), (2, 2, 1), (1, 0, 3, 1, 2)]


def make_runner() -> Runner:
    return Runner(cast(Decoder, TableDecoder(TARGET)), kv_layout(len(TEXTS), MAX_LEN), CPU)


def expected(text: tuple[int, ...], last: int) -> torch.Tensor:
    return TARGET[[row_of(text[: len(text) - n]) for n in reversed(range(last))]]


def test_logits_are_looked_up_by_the_prefix() -> None:
    """Ragged texts together, in one piece and in two."""
    sequences = [make_sequence(n, text) for n, text in enumerate(TEXTS)]
    runner = make_runner()
    logits = runner.run([Feed(s, len(s.tokens), outputs=len(s.tokens)) for s in sequences])
    assert torch.equal(logits, torch.cat([expected(text, len(text)) for text in TEXTS]))
    for sequence in sequences:
        runner.cache.truncate_to(sequence.handle, len(sequence.tokens) // 2)
    logits = runner.run([Feed(s, runner.uncached(s)) for s in sequences])
    assert torch.equal(logits, torch.cat([expected(text, 1) for text in TEXTS]))


def test_the_longest_text_is_still_told_apart() -> None:
    text = (END,) * (MAX_LEN - 1)
    for last in range(VOCAB):
        sequence = make_sequence(0, (*text, last))
        assert torch.equal(make_runner().run([Feed(sequence, MAX_LEN)]), expected((*text, last), 1))


@pytest.mark.parametrize("fault", ["token lost", "position too high", "rejected draft kept", "cache overwritten"])
def test_a_fault_in_the_cache_changes_the_row(fault: str) -> None:
    text = TEXTS[0]
    sequence = make_sequence(0, text)
    runner = make_runner()
    runner.run([Feed(sequence, len(text) - 1, outputs=0)])
    if fault == "token lost":
        runner.cache.truncate_to(0, len(text) - 2)
    elif fault == "cache overwritten":
        (row,) = runner.storage.row_numbers(runner.cache.slot(0), 2, 3)
        runner.storage.rows[0][row, 1] += 1
    else:
        runner.cache.reserve(0, 1)
        runner.cache.extend(0, 1)
        if fault == "rejected draft kept":
            kept = (*text[:-1], 1, text[-1])
            runner = make_runner()
            runner.run([Feed(make_sequence(0, kept), len(kept) - 1, outputs=0)])
    logits = runner.step([sequence], torch.tensor([text[-1]]))
    assert not torch.equal(logits, expected(text, 1))


def test_what_may_follow_the_prompt_has_rows_of_its_own() -> None:
    """Two prefixes with one row would hide that one is taken for the other; a few of the 341 do share one."""
    prefixes = [PROMPT + text for n in range(LENGTH + 1) for text in product(range(VOCAB), repeat=n)]
    assert len({row_of(prefix) for prefix in prefixes}) > 0.95 * len(prefixes)
    assert len({row_of(prefix[:-2]) for prefix in prefixes} & {row_of(prefix) for prefix in prefixes}) < 120


def test_residuals_have_two_tokens_or_more() -> None:
    p, q = TARGET.softmax(-1), DRAFT.softmax(-1)
    supports = ((p - q) > 1e-12).sum(-1)
    same = (TARGET == DRAFT).all(-1)
    assert supports[~same].ge(2).all()
    assert 0.04 * ROWS < same.sum() < 0.06 * ROWS
    assert 0.03 * ROWS < (p.amax(-1) > 0.95).sum() < 0.06 * ROWS
    assert p.amin() > 1e-5
    assert 0.6 < torch.minimum(p, q).sum(-1).mean() < 0.8  # acceptance by rejection


def test_a_greedy_engine_follows_the_table() -> None:
    """Through the whole engine, drafts and all, against a walk through the table."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = [
        Request(f"{k}-{n}", (n % 3, *PROMPT[: 2 * n]), params, k=k, drafter="model") for k in (0, 3) for n in range(6)
    ]
    run = drive(table_engine(max_running=4), requests)
    assert 0 < run.accepted < run.drafted
    for request in requests:
        text = request.prompt_ids
        for _ in range(6):
            text += (int(TARGET[row_of(text)].argmax()),)
        assert tuple(run.tokens[request.id]) == text[len(request.prompt_ids) :]


def test_the_prediction_is_the_likeliest_text() -> None:
    law = exact_law(PROMPT, SETTINGS["plain"], len(PREDICTION))
    assert law[PREDICTION] == max(p for text, p in law.items() if len(text) == len(PREDICTION))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_a_law_of_its_own(name: str) -> None:
    law = exact_law(PROMPT, SETTINGS[name], LENGTH)
    plain = exact_law(PROMPT, SETTINGS["plain"], LENGTH)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    distance = sum(abs(law.get(t, 0.0) - plain.get(t, 0.0)) for t in law.keys() | plain.keys()) / 2
    assert (distance < 1e-12) if name == "plain" else (distance > 0.05)


def test_texts_end_where_they_should() -> None:
    def texts(**settings: object) -> set[tuple[int, ...]]:
        return set(exact_law(PROMPT, SamplingParams(**settings), 2))  # type: ignore[arg-type]

    every = set(product(range(VOCAB), repeat=2))
    with_end = {(END,)} | {text for text in every if text[0] != END}
    assert texts() == with_end
    assert texts(ignore_eos=True) == every
    assert texts(ignore_eos=True, stop_token_ids=(0,)) == {(0,)} | {t for t in every if t[0] != 0}
    assert texts(min_tokens=1) == {t for t in every if t[0] != END}
    assert texts(min_tokens=2, stop=("A",)) == {t for t in every if END not in t}
    assert texts(stop=("A", "BC")) == with_end - {(0, t) for t in range(VOCAB)} | {(0,)}


@pytest.mark.parametrize(
    ("settings", "law"),
    [
        ({}, (0.5, 0.25, 0.125, 0.125)),
        ({"temperature": 0.5}, (0.25 / 0.34375, 0.0625 / 0.34375, 0.015625 / 0.34375, 0.015625 / 0.34375)),
        ({"top_k": 2}, (2 / 3, 1 / 3, 0, 0)),
        ({"top_p": 0.5}, (1, 0, 0, 0)),
        ({"top_p": 0.51}, (2 / 3, 1 / 3, 0, 0)),
        ({"min_p": 0.4}, (2 / 3, 1 / 3, 0, 0)),
        ({"logit_bias": ((0, -log(4)), (2, log(2)))}, (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
        ({"presence_penalty": log(2)}, (1 / 3, 1 / 3, 1 / 6, 1 / 6)),  # token 0 is in the output, twice
        ({"frequency_penalty": log(2)}, (0.125 / 0.625, 0.4, 0.2, 0.2)),
        ({"repetition_penalty": 2.0}, (0.25 / 0.5625, 0.0625 / 0.5625, 0.125 / 0.5625, 0.125 / 0.5625)),  # 0, 1 seen
        ({"min_tokens": 3}, (4 / 7, 2 / 7, 1 / 7, 0)),
    ],
)
def test_next_laws_by_hand(settings: dict[str, object], law: tuple[float, ...]) -> None:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    logits = [log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert next_law(logits, (1,), (0, 0), params) == pytest.approx(law, abs=1e-12)


def test_next_laws_agree_with_transformers() -> None:
    """For the parameters that it has, all at once, on 200 random rows in fp64."""
    random = np.random.default_rng(0)
    for logits in random.normal(scale=2, size=(200, VOCAB)):
        prompt, output = tuple(random.integers(VOCAB, size=2).tolist()), tuple(random.integers(VOCAB, size=2).tolist())
        warp = [round(float(x), 3) for x in random.uniform(0.3, 0.95, size=4)]
        params = SamplingParams(
            temperature=warp[0], top_p=warp[1], top_k=3, min_p=warp[2] / 4, repetition_penalty=1 + warp[3],
            logit_bias=((1, 0.5), (3, -0.25)),
        )  # fmt: skip
        processors = LogitsProcessorList(
            [
                SequenceBiasLogitsProcessor([[[1], 0.5], [[3], -0.25]]),
                RepetitionPenaltyLogitsProcessor(1 + warp[3]),
                TemperatureLogitsWarper(warp[0]),
                TopKLogitsWarper(3),
                TopPLogitsWarper(warp[1]),
                MinPLogitsWarper(warp[2] / 4),
            ]
        )
        ids = cast(torch.LongTensor, torch.tensor([prompt + output]))
        scores = processors(ids, torch.from_numpy(logits)[None])
        assert next_law(logits.tolist(), prompt, output, params) == pytest.approx(
            scores.softmax(-1)[0].tolist(), abs=1e-9
        )
