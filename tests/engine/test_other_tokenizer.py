"""A pair whose draft has another tokenizer: the same text for any k, memory that holds what was committed, its context,
and what is said at the start."""

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.drafters.draft_columns import DraftLaws
from engine.drafters.shared_tokens import SharedTokens
from engine.drafters.translation import Spellings, Translation
from engine.engine import Engine
from engine.loading.load import load_models
from engine.models.tokenizer import Tokenizer
from engine.types import Request, SamplingParams, Verifier
from tests.engine.driving import Drive, drive, load, make_sequence, model_drafter
from tests.engine.foreign import save_foreign
from tests.engine.fresh import Checker
from tests.engine.pairs import Pair, Shape, copy_of, edit_json, save_checkpoint
from tests.engine.test_rollback import Fuzz, load_small
from tests.examples import in_proofs
from tests.kv import KINDS, kv_kind

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")

ROWS = 318  # of the tables: as many as the tokenizer has tokens
DROPPED = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("target") / "target"
    path = save_checkpoint(directory, Shape(vocab=ROWS), seed=1)
    assert len(Tokenizer(path).vocab) == ROWS
    return path


@pytest.fixture(scope="module")
def other(target: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The target's weights a little disturbed. The draft lacks 8 tokens, has 8 of its own, and begins with BOS."""
    folder = tmp_path_factory.mktemp("other")
    near = save_checkpoint(folder / "near", Shape(vocab=ROWS), seed=2, like=Path(target), noise=0.02)
    return Pair(target, save_foreign(near, folder / "draft", dropped=DROPPED, bos=True))


@pytest.fixture(scope="module")
def renamed(target: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The target itself under other ids: what it drafts is right."""
    return Pair(target, save_foreign(target, tmp_path_factory.mktemp("renamed") / "draft"))


@pytest.fixture(scope="module")
def engine(other: Pair) -> Engine:
    return load(other, max_model_len=None, max_running=5, max_step_tokens=60, max_spec_length=6)


def make_requests(
    temperature: float, k: int, verifier: Verifier = "match", max_tokens: int = 16, **params: Any
) -> list[Request]:
    """Prompts with a common beginning, one of them long, of any tokens at all."""
    rng = random.Random(2)
    begin = tuple(rng.randrange(ROWS) for _ in range(20))
    requests = []
    for n in range(10):
        prompt = begin[: rng.choice((0, 20))] + tuple(rng.randrange(ROWS) for _ in range(45 if n == 5 else 1 + n))
        settings = SamplingParams(temperature, seed=n, max_tokens=max_tokens, ignore_eos=n % 2 == 0, **params)
        requests.append(Request(f"r{n}", prompt, settings, k, verifier=verifier))
    return requests


CUT = {"top_p": 0.9, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("temperature", "params"),
    [
        pytest.param(0.0, {}, id="greedy"),
        pytest.param(0.8, CUT, id="sampled and cut"),
        pytest.param(0.8, {}, id="sampled", marks=pytest.mark.proofs),
        pytest.param(0.0, CUT, id="greedy and cut", marks=pytest.mark.proofs),
    ],
)
def test_the_text_is_that_of_plain_decoding(temperature: float, params: dict[str, Any], engine: Engine) -> None:
    plain = drive(engine, make_requests(temperature, 0, **params)).tokens
    # In a batch of others, with a part of the prompts found in the index.
    mixed = [replace(r, k=n % 7) for n, r in enumerate(make_requests(temperature, 0, **params))]
    run = drive(engine, {n: [r] for n, r in enumerate(mixed)})
    assert run.tokens == plain
    assert 0.03 < run.accepted / run.drafted < 0.95


@pytest.mark.parametrize("verifier", ["rejection", *in_proofs("block")])
def test_every_verifier_runs_to_the_end(verifier: Verifier, engine: Engine) -> None:
    """At temperature 0 the text is the same; above it the law is, which tests/engine/law proves."""
    greedy, sampled = make_requests(0.0, 4, verifier), make_requests(0.8, 4, verifier)
    run = drive(engine, [*greedy[::2], *sampled[1::2]])
    plain = drive(engine, make_requests(0.0, 0)[::2]).tokens
    assert {name: run.tokens[name] for name in plain} == plain
    records = [told.record for name, told in run.received.items() if name not in plain and told.record]
    accepted, drafted = (sum(sum(record.column(name)) for record in records) for name in ("accepted", "drafted"))
    assert 0.03 < accepted / drafted < 0.95
    assert sum(step.draft_faults for step in run.steps) == 0


def test_drafts_are_shared_tokens(engine: Engine) -> None:
    shared = model_drafter(engine).runner.translation
    assert shared is not None
    drafted = set[int]()
    for request in make_requests(0.8, 4):
        engine.submit(request)
    while engine.has_work:
        for output in engine.step().outputs:
            drafted |= set(output.drafts)
    assert len(drafted) > 100
    assert drafted <= shared.shared.keys()
    assert len(shared.shared) == ROWS - 2 - DROPPED


def run_greedy(pair: Pair) -> Drive:
    return drive(load(pair, max_running=5), make_requests(0.0, 4, max_tokens=24))


def test_a_draft_that_is_the_target_under_other_ids_is_always_right(renamed: Pair) -> None:
    run = run_greedy(renamed)
    assert run.accepted / run.drafted > 0.9  # a special token can be read, but not drafted


def test_a_wrong_map_costs_drafts_and_no_text(renamed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run_greedy(renamed)

    def shifted(target: Spellings, draft: Spellings) -> Translation:
        ids, values = list(draft.data), list(draft.data.values())
        return Translation(target, Spellings(dict(zip(ids, [*values[1:], values[0]], strict=True)), draft.special))

    monkeypatch.setattr("engine.loading.pair.Translation", shifted)
    wrong = run_greedy(renamed)
    assert wrong.tokens == right.tokens
    assert wrong.accepted / wrong.drafted < 0.1


# Memory


@pytest.fixture(scope="module")
def padded(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With tables of more rows than there are tokens; the target emits these too."""
    return Pair(pair.target, save_foreign(pair.draft, tmp_path_factory.mktemp("padded") / "draft", dropped=DROPPED))


@pytest.mark.parametrize("kind", ["mapped", *(pytest.param(kind, marks=pytest.mark.proofs) for kind in KINDS[1:])])
def test_caches_hold_the_committed_tokens_after_every_round(kind: str, padded: Pair) -> None:
    """Under pressure: chunks, prefix hits, choices that share blocks, preemption and rollback."""
    fuzz = Fuzz(load_small(padded, kind), seed=1, count=16 if kind == "mapped" else 24)
    assert min(fuzz.checker.compared.values()) > 1000
    assert 0 < fuzz.run.accepted < fuzz.run.drafted
    if kind != "slotted":
        assert min(fuzz.preempted, fuzz.hits, fuzz.forks) > 0
        assert min(fuzz.checker.indexed.values()) > 0


def feed_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is fed a wrong id for each draft, although the map says which is right."""
    to_draft = SharedTokens.to_draft
    monkeypatch.setattr(SharedTokens, "to_draft", lambda self, tokens: (to_draft(self, tokens) + 1) % ROWS)


def keep_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are not shared, were fed as any token and were accepted stay in the memory."""
    monkeypatch.setattr(Translation, "num_fed", lambda self, drafts: len(drafts))


def draft_anything(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Every draft is what the target will say, shared or not; only a faulty drafter does that."""
    texts = {r.prompt_ids: tokens for r, tokens in _greedy_texts(engine)}

    def knowing(self: DraftLaws, batch: Any, active: Any, logits: Any, drafts: Any) -> Any:
        ahead = drafts.shape[1]
        known = []
        for i in active:
            sequence = batch.sequences[i]
            known.append(texts[tuple(sequence.tokens[: sequence.num_prompt])][sequence.num_output + ahead])
        return logits.argmax(1).new_tensor(known)

    monkeypatch.setattr(DraftLaws, "draw", knowing)


def _greedy_texts(engine: Engine) -> list[tuple[Request, list[int]]]:
    requests = make_requests(0.0, 0)
    tokens = drive(engine, requests).tokens
    return [(r, [*tokens[r.id], *[5] * 10]) for r in requests]


@pytest.mark.parametrize("fault", [None, feed_another, keep_every_draft])
def test_drafts_in_memory_are_the_tokens_as_they_are_read(
    fault: Callable[[pytest.MonkeyPatch], None] | None, other: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a drafter draws what it cannot feed; and two negative controls."""
    engine = load(other, max_running=5, max_spec_length=6)
    draft_anything(monkeypatch, engine)
    checker = Checker(engine, logits=False)
    requests = make_requests(0.0, 4)
    if fault is None:
        run = drive(engine, requests, after_step=checker)
        assert run.accepted > 0.9 * run.drafted
        assert checker.compared["draft"] > 500
        return
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"draft: (keys|values) of layer|cached of"):
        drive(engine, requests, after_step=checker)


def test_prefixes_are_found_in_the_drafts_tokens(other: Pair) -> None:
    """The second request finds what the first has read, all but the last block."""
    if kv_kind() == "slotted":
        pytest.skip("slots share nothing")
    engine = load(other, max_running=1)
    drafter = model_drafter(engine)
    prompt = tuple(range(ROWS - 40, ROWS - 1))
    params = SamplingParams(0, max_tokens=12, ignore_eos=True)
    drive(engine, [Request("first", prompt, params, 2)])
    text = drafter.runner.tokens(make_sequence(900, prompt))
    assert len(text) > len(prompt) + 5
    found = drafter.runner.cache.allocate(901, text)
    drafter.runner.cache.release(901)
    assert found > len(text) - 20
    run = drive(engine, [Request("second", prompt, params, 2)])
    assert run.steps[0].draft_tokens < 25


# Its context


def test_drafts_end_at_the_end_of_the_drafts_context_in_its_own_tokens(other: Pair, tmp_path: Path) -> None:
    draft = copy_of(other.draft, tmp_path / "short")
    edit_json(draft / "config.json", max_position_embeddings=48)
    engine = load(Pair(other.target, str(draft)), max_model_len=None, max_running=2, max_spec_length=4)
    runner = model_drafter(engine).runner
    assert runner.cache.max_len == 48
    prompt = make_requests(0.8, 0)[5].prompt_ids[:20]
    request = Request("r", prompt, SamplingParams(0.8, seed=1, max_tokens=60, ignore_eos=True), 4)
    plain = drive(engine, [replace(request, k=0)])
    held, beyond = list[tuple[bool, bool]](), [False]  # before the round

    def watch() -> None:
        for sequence in engine.scheduler.running:
            held.append((beyond[-1], runner.cache.holds(sequence.handle)))
            beyond.append(len(runner.tokens(sequence)) > 48)

    assert drive(engine, [request], after_step=watch).tokens == plain.tokens
    assert (False, True) in held
    assert (True, False) in held
    assert (True, True) not in held


# What is said


def test_a_pair_with_different_tokenizers_is_told(other: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine.loading.pair")
    load_models(EngineConfig(other.target, other.draft, dtype="float64"))
    own, shared = ROWS - 2, ROWS - 2 - DROPPED
    assert (
        f"draft {other.draft} has another tokenizer: {shared} of {own} of its tokens ({100 * shared / own:.1f} %) are "
        "shared; drafts are restricted to them"
    ) in caplog.text


def test_a_pair_without_common_tokens_is_refused(target: str, tmp_path: Path) -> None:
    draft = copy_of(target, tmp_path / "draft")
    content = json.loads((draft / "tokenizer.json").read_text("utf-8"))
    content["model"]["merges"] = []
    content["model"]["vocab"] = {s if i < 4 else "zq" + s: i for s, i in content["model"]["vocab"].items()}
    (draft / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(ConfigError) as refusal:
        load_models(EngineConfig(target, str(draft), dtype="float64"))
    assert f"target {target} and draft {draft} share 2 of the target's 316 tokens, and at least 1%" in str(
        refusal.value
    )


def test_a_twin_is_read_as_it_is(target: str) -> None:
    """Without a translation no token is looked at."""
    engine = load(Pair(target, target))
    assert model_drafter(engine).runner.translation is None
    sequence = make_sequence(900, [3, 4, 5])
    assert model_drafter(engine).runner.tokens(sequence) is sequence.tokens
