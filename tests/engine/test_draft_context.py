"""A draft model of a shorter context: sequences run to the target's limit, and no draft lies beyond the draft's."""

import random
from dataclasses import replace
from typing import Any

import pytest

from engine.drafters.base import NO_OFFER
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.types import Request, SamplingParams
from policies.config import PolicyConfig
from tests.engine.driving import Drive, drive, load, make_sequence, model_drafter
from tests.engine.pairs import VOCAB, Pair, copy_of, edit_json
from tests.examples import in_proofs

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")

BORDER = 48  # positions of the draft
MAX_LEN = 128  # of the target


@pytest.fixture(scope="module")
def short_pair(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    draft = copy_of(pair.draft, tmp_path_factory.mktemp("short") / "draft")
    edit_json(draft / "config.json", max_position_embeddings=BORDER)
    return Pair(pair.target, str(draft))


@pytest.fixture(scope="module")
def engine(short_pair: Pair) -> Engine:
    return load(short_pair, max_model_len=None, max_running=6, max_step_tokens=64, max_spec_length=8)


def make_requests(temperature: float, k: int | None, **changes: Any) -> list[Request]:
    """Most end far beyond the border. Some begin there, at it, one token before and one after it."""
    rng = random.Random(3)
    lengths = [*(rng.randint(1, 40) for _ in range(8)), BORDER - 1, BORDER, BORDER + 1, 90]
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(2, VOCAB) for _ in range(length)),
            SamplingParams(temperature, seed=i, max_tokens=min(70, MAX_LEN - length), ignore_eos=True),
            k,
            **changes,
        )
        for i, length in enumerate(lengths)
    ]


def drafted_positions(run: Drive, requests: list[Request]) -> set[int]:
    """The positions that were drafted for, of all requests."""
    found: set[int] = set()
    for request in requests:
        record, length = run.received[request.id].record, len(request.prompt_ids)
        assert record is not None
        for part in record.rounds:
            found |= set(range(length, length + part.drafted))
            length += part.emitted
    return found


def test_the_drafts_tables_end_with_its_context(engine: Engine) -> None:
    decoders = engine.target.decoder, model_drafter(engine).runner.decoder
    assert all(isinstance(decoder, Decoder) for decoder in decoders)
    assert [len(decoder.rotations[0]) for decoder in decoders if isinstance(decoder, Decoder)] == [MAX_LEN, BORDER]


@pytest.mark.parametrize(
    ("temperature", "k"),
    [pytest.param(*asked, marks=pytest.mark.proofs) for asked in ((0.0, 4), (0.8, 1), (0.8, 4))] + [(0.8, 8)],
)
def test_the_text_is_that_of_plain_decoding_on_both_sides_of_the_border(
    temperature: float, k: int, engine: Engine
) -> None:
    assert engine.max_model_len == MAX_LEN
    plain = drive(engine, make_requests(temperature, 0))
    assert max(len(r.prompt_ids) + len(plain.tokens[r.id]) for r in make_requests(temperature, 0)) == MAX_LEN
    requests = make_requests(temperature, k)
    for _ in range(2):  # the second time with prefix hits
        run = drive(engine, requests)
        assert run.tokens == plain.tokens
        assert max(drafted_positions(run, requests)) == BORDER  # a draft that is not fed needs no position
    engine.audit()


@pytest.mark.parametrize("verifier", [*in_proofs("rejection"), "block"])
def test_every_verifier_crosses_the_border(verifier: Any, engine: Engine) -> None:
    requests = make_requests(1.0, 4, verifier=verifier)
    run = drive(engine, requests)
    assert [len(run.tokens[r.id]) for r in requests] == [r.params.max_tokens for r in requests]
    assert max(drafted_positions(run, requests)) == BORDER


@pytest.mark.parametrize("cache", ["slotted", "paged"])
def test_the_policy_expects_no_drafts_beyond_the_border(cache: Any, short_pair: Pair) -> None:
    policy = PolicyConfig("fixed", k=4)
    size = 16 if cache == "paged" else None
    engine = load(short_pair, max_model_len=MAX_LEN, policy=policy, cache=cache, max_running=6, block_size=size)
    beyond = [replace(r, prompt_ids=(5,) * (BORDER + 1)) for r in make_requests(0.8, None)]
    run = drive(engine, [replace(r, params=replace(r.params, max_tokens=20)) for r in beyond])
    records = [told.record for told in run.received.values() if told.record is not None]
    assert {part.k for record in records for part in record.rounds} == {0}
    assert sum(step.draft_steps for step in run.steps) == 0
    assert not model_drafter(engine).runner.cache.used


def test_another_drafter_of_the_chain_goes_on_beyond_the_border(engine: Engine) -> None:
    params = SamplingParams(0, max_tokens=40, ignore_eos=True)
    plain = drive(engine, [Request("r", (5,) * BORDER, params, 0)]).tokens
    request = Request("r", (5,) * BORDER, params, 4, drafter="cascade", prediction_ids=tuple(plain["r"]))
    run = drive(engine, [request])
    assert max(drafted_positions(run, [request])) > BORDER + 30
    assert run.tokens == plain


def test_memory_beyond_the_border_is_given_back(engine: Engine) -> None:
    """The draft's memory is only as long as its context, and a sequence that has passed it holds none."""
    drafter = model_drafter(engine)
    assert drafter.runner.cache.max_len == BORDER
    assert drafter.runner.layout.tokens < engine.target.layout.tokens
    request = Request("r", (5,) * 40, SamplingParams(0.8, seed=1, max_tokens=60, ignore_eos=True), 4)
    engine.submit(request)
    held = []
    while engine.has_work:
        sequence = engine._sequences["r"]
        beyond = len(sequence.tokens) > BORDER  # before the round
        engine.step()
        if engine.has_work:
            held.append((beyond, drafter.runner.cache.holds(sequence.handle)))
    assert set(held) >= {(False, True), (True, False)}
    assert (True, True) not in held


def test_an_offer_ends_at_the_border(engine: Engine) -> None:
    drafter = model_drafter(engine)
    for length, expected in ((BORDER - 9, 8), (BORDER - 2, 3), (BORDER, 1)):
        assert drafter.offer(make_sequence(900, [5] * length), 8).max_k == expected
    assert drafter.offer(make_sequence(900, [5] * (BORDER + 1)), 8) == NO_OFFER


def test_a_draft_of_a_longer_context_has_as_much_memory_as_the_target(short_pair: Pair) -> None:
    engine = load(Pair(short_pair.draft, short_pair.target), max_model_len=None)
    assert engine.max_model_len == BORDER
    assert model_drafter(engine).runner.layout == engine.target.layout
