"""Chains that one call of compiled code draws are those that a draft model draws step by step."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.models.compiled as compiled_code
from engine.drafters.base import NO_TOKEN, Draft, DraftBatch
from engine.drafters.compiled_chains import CompiledChains
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.heads.eagle_runner import HeadRunner
from engine.kernels import cpu_chains, cpu_layers
from engine.models import attention_plans
from engine.models.attention import Attention
from engine.models.chain_code import ChainCode
from engine.models.runner import Runner
from engine.sampling.noise import GumbelRace
from engine.sampling.sampler import Sampler
from engine.trees import Growth
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load, model_drafter
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.models.reader import in_form
from tests.engine.pairs import VOCAB, Pair, Shape, save_checkpoint

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")

FAMILIES = ("llama", "llama with biases, yarn", "mistral", "qwen3", "phi3")
HEADS = ("safeailab", "speculators")  # whose states enter as they are, or normed
OTHERS = ("gemma2", "gemma3", "granite", "smollm3", "mixtral")  # caps, runs of layers, divisors, experts
ROWS = ((0.0, 4), (0.8, 2), (1.2, 1), (0.7, 5))  # temperature and k of each request


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A target and a draft like it, or its head, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("chains"), dict[str, Pair]()

    def of(name: str) -> Pair:
        if name not in made and name in CASES:
            target = random_checkpoint(CASES[name], folder / name / "target", hidden=64)
            made[name] = Pair(
                target, random_checkpoint(CASES[name], folder / name / "draft", 8, target, 0.1, hidden=64)
            )
        elif name not in made:
            made[name] = save_eagle_pair(folder / name, name)
        return made[name]

    return of


@pytest.fixture(autouse=True)
def all_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All products are compiled and attention reads blocks, whatever is fastest here."""
    monkeypatch.setattr(attention_plans, "measured_lanes", lambda *_: sys.maxsize)
    with in_form("compiled"):
        yield


@dataclass
class Seen:
    """What a drafter proposed, round by round, and in how many of these rounds compiled code drew."""

    drafts: list[tuple[tuple[int, ...], list[list[int]], int, int]]
    compiled: int = 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Seen]:
    """Call it before a run. Argument: whether compiled code may draw."""
    propose, plan = ModelDrafter.propose, CompiledChains.of
    seen, may_draw = Seen([]), True

    def proposed(self: ModelDrafter, batch: DraftBatch, ks: Sequence[int]) -> Draft:
        draft = propose(self, batch, ks)
        if draft.tokens is not None and batch.sequences[0].request_id.startswith("r"):
            tokens = [row[:k] for row, k in zip(draft.tokens.tolist(), draft.ks, strict=True)]
            seen.drafts.append((draft.ks, tokens, draft.steps, draft.read))
        return draft

    def planned(*given: Any) -> CompiledChains | None:
        chains = plan(*given) if may_draw else None
        seen.compiled += chains is not None
        return chains

    monkeypatch.setattr(ModelDrafter, "propose", proposed)
    monkeypatch.setattr(CompiledChains, "of", planned)

    def begin(allowed: bool) -> Seen:
        nonlocal seen, may_draw
        seen, may_draw = Seen([]), allowed
        return seen

    return begin


def requests(**params: Any) -> dict[int, list[Request]]:
    """One arrives every other step."""
    return {
        2 * n: [
            Request(
                f"r{n}",
                tuple(range(2 + n, 9 + 3 * n)),
                SamplingParams(temperature=temperature, seed=n, max_tokens=18, ignore_eos=True, **params),
                k,
            )
        ]
        for n, (temperature, k) in enumerate(ROWS)
    }


def make(pair: Pair, **config: Any) -> Engine:
    return load(pair, **{"dtype": "float32", "max_running": 4, "max_spec_length": 5, **config})


def run(pair: Pair, watched: Callable[[bool], Seen], allowed: bool, **config: Any) -> tuple[Seen, dict[str, list[int]]]:
    engine = make(pair, **config)
    seen = watched(allowed)
    return seen, drive(engine, requests()).tokens


def drawn_columns(given: tuple[Any, ...]) -> int:
    """How many columns a call of the kernel draws; 0: it only compiles."""
    (counts, *_) = given[3]
    return len(counts)


def watched_gaps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of gaps that each call of the kernel reads from now on."""
    real, read = cpu_chains.draw_chains, list[int]()

    def draw_chains(*given: Any) -> None:
        read.append(len(given[2][0]))
        real(*given)

    monkeypatch.setattr(cpu_chains, "draw_chains", draw_chains)
    return read


# --- the same drafts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *HEADS])
def test_drafts_are_those_of_single_steps(
    name: str, pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]
) -> None:
    """With several lengths and temperatures in a round, and sequences that come and go."""
    (one, texts), (other, same) = (run(pair_of(name), watched, allowed) for allowed in (True, False))
    assert one.drafts == other.drafts
    assert texts == same
    assert (one.compiled > 10, other.compiled) == (True, 0)
    assert {len({k for k in ks if k}) for ks, *_ in one.drafts} >= {1, 2, 3}


@pytest.mark.parametrize("name", ["mistral", "speculators"])
@pytest.mark.parametrize("elsewhere", ["by rows", "by torch"])
def test_gaps_that_are_read_elsewhere(
    elsewhere: str,
    name: str,
    pair_of: Callable[[str], Pair],
    watched: Callable[[bool], Seen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains are drawn behind their pass."""
    other, texts = run(pair_of(name), watched, False)
    if elsewhere == "by rows":
        monkeypatch.setattr(ChainCode, "most_read", 0)
    else:
        monkeypatch.setattr(Attention, "by_blocks", None)
    read = watched_gaps(monkeypatch)
    one, same = run(pair_of(name), watched, True)
    assert (one.drafts, same) == (other.drafts, texts)
    assert one.compiled > 10
    assert set(read) == {0}


def test_long_gaps_are_read_in_parts(
    pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a stage computes at once; alone, and by threads that have rows of their own."""
    monkeypatch.setattr(compiled_code, "PART_BYTES", 1)
    prompts, read, results = [tuple(range(n, n + 100)) for n in (2, 50)], watched_gaps(monkeypatch), list[Seen]()
    for allowed, threads in ((False, 1), (True, 1), (True, 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        engine = make(pair_of("speculators"), max_model_len=128, max_step_tokens=256, prefill_chunk=256)
        seen, (every, other, *_) = watched(allowed), (given for (given,) in requests().values())
        drive(engine, [replace(r, prompt_ids=ids) for r, ids in zip((every, other), prompts, strict=True)])
        results.append(seen)
    assert results[0].drafts == results[1].drafts == results[2].drafts
    assert max(read) > 3 * cpu_layers.OWN_ROWS


def test_threads_share_the_work(
    pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama", "speculators"):
        alone, _ = run(pair_of(name), watched, True)
        parts, real = set[tuple[int, int]](), cpu_chains.draw_chains

        def shared(*given: Any, parts: set[tuple[int, int]] = parts, real: Any = real) -> None:
            if drawn_columns(given):
                parts.add(given[-1][1:])
            real(*given)

        with monkeypatch.context() as patched:
            patched.setattr(torch, "get_num_threads", lambda: 3)
            patched.setattr(compiled_code, "PART_BYTES", 1)
            patched.setattr(cpu_chains, "draw_chains", shared)
            together, _ = run(pair_of(name), watched, True)
        assert parts == {(0, 3), (1, 3), (2, 3)}
        assert together.drafts == alone.drafts


@pytest.mark.parametrize("name", ["llama", "safeailab"])
def test_a_model_of_16_bits_rounds_less_within_a_chain(
    name: str, pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]
) -> None:
    (one, _), (other, _) = (run(pair_of(name), watched, allowed, dtype="bfloat16") for allowed in (True, False))
    assert one.compiled > 10
    pairs = [
        (a, b)
        for (ks, ours, *_), (same_ks, theirs, *_) in zip(one.drafts[:8], other.drafts[:8], strict=True)
        for a, b in zip(ours, theirs, strict=True)
        if ks == same_ks
    ]
    agree = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
    assert agree > 0.6 * sum(len(a) for a, _ in pairs)


def faults() -> dict[str, Callable[[pytest.MonkeyPatch], None]]:
    keys, steps, states = Sampler.noise_keys, ChainCode._steps, HeadRunner.chain_states

    def later_keys(self: Sampler, rows: Sequence[int]) -> Any:
        found = keys(self, rows)
        return None if found is None else found + np.uint64(1)

    def later(self: ChainCode, rows: Any) -> tuple[Any, ...]:
        counts, positions, *rest = steps(self, rows)
        return counts, positions + 1, *rest

    def elsewhere(self: ChainCode, rows: Any) -> tuple[Any, ...]:
        counts, positions, places, *rest = steps(self, rows)
        return counts, positions, np.roll(places, 1, 0), *rest

    def other_states(self: HeadRunner, *given: Any) -> Tensor | None:
        found = states(self, *given)
        return None if found is None else found.roll(1, 1)

    return {
        "noise": lambda patched: patched.setattr(Sampler, "noise_keys", later_keys),
        "positions": lambda patched: patched.setattr(ChainCode, "_steps", later),
        "places": lambda patched: patched.setattr(ChainCode, "_steps", elsewhere),
        "states": lambda patched: patched.setattr(HeadRunner, "chain_states", other_states),
    }


@pytest.mark.parametrize("fault", faults())
def test_negative_control_each_fault_changes_drafts(
    fault: str, pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("safeailab")
    right, texts = run(pair, watched, True)
    faults()[fault](monkeypatch)
    wrong, same = run(pair, watched, True)
    assert wrong.compiled > 10
    assert wrong.drafts != right.drafts
    assert texts == same  # a wrong draft costs time only


# --- what is left to single steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_the_code_does_not_know_draft_step_by_step(
    name: str, pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]
) -> None:
    seen, _ = run(pair_of(name), watched, True)
    assert seen.compiled == 0
    assert any(max(ks) == 5 for ks, *_ in seen.drafts)


def test_fp64_drafts_step_by_step(pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]) -> None:
    assert run(pair_of("llama"), watched, True, dtype="float64")[0].compiled == 0


def test_a_head_of_some_tokens_drafts_step_by_step(tmp_path: Path, watched: Callable[[bool], Seen]) -> None:
    for form in ("small vocabulary", "eagle"):
        seen, _ = run(save_eagle_pair(tmp_path / form, form), watched, True)
        assert (seen.compiled, bool(seen.drafts)) == (0, True)


PARAMS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"logit_bias": ((7, 2.0),)},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"min_tokens": 18, "stop_token_ids": (7,)},
    {"bad_word_ids": ((7,),)},
    {"allowed_token_ids": tuple(range(2, 60))},
)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_request_that_needs_more_than_noise_is_drawn_step_by_step(
    params: dict[str, Any], pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]
) -> None:
    """Its neighbours of the same rounds too."""
    engine = make(pair_of("llama"))
    seen = watched(True)
    every = requests(**params)
    plain = requests()[0][0]
    sampling = replace(plain.params, max_tokens=60)
    drive(engine, {0: [replace(plain, params=sampling)], 1: [every[2][0]], 2: [every[6][0]]})
    shared = [ks for ks, *_ in seen.drafts if sum(k > 0 for k in ks) > 1]
    alone = [ks for ks, *_ in seen.drafts if sum(k > 0 for k in ks) == 1]
    assert len(shared) > 3
    assert 0 < seen.compiled <= len(alone)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_laws_are_made_step_by_step(
    verifier: Any, pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]
) -> None:
    """At temperature 0 no verifier needs any."""
    engine = make(pair_of("llama"))
    seen = watched(True)
    for temperature, expected in ((0.8, False), (0.0, True)):
        request = replace(requests()[0][0], verifier=verifier)
        drive(engine, [replace(request, params=replace(request.params, temperature=temperature))])
        assert (seen.compiled > 0) is expected


@pytest.mark.parametrize("name", ["llama", "safeailab"])
def test_models_without_compiled_products_draft_step_by_step(
    name: str, pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen], shared_weights: dict[Any, Any]
) -> None:
    shared_weights.clear()
    try:
        with in_form("plain"):
            seen, _ = run(pair_of(name), watched, True)
    finally:
        shared_weights.clear()
    assert (seen.compiled, bool(seen.drafts)) == (0, True)


def test_a_batch_that_is_faster_elsewhere_is_drawn_step_by_step(
    pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChainCode, "most_rows", 1)
    seen, _ = run(pair_of("llama"), watched, True)
    assert 0 < seen.compiled <= sum(sum(k > 0 for k in ks) == 1 for ks, *_ in seen.drafts)


# --- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 400, 4096])
def test_winners_are_those_of_the_race(vocab: int) -> None:
    count, generator = 60, torch.Generator().manual_seed(vocab)
    scores = 3 * torch.randn(count, vocab, generator=generator)
    scores[::7, : vocab // 2] = -torch.inf
    keys, positions = torch.arange(count) * 7919, torch.arange(count)
    temperatures = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    race = GumbelRace(keys, positions, temperatures, vocab)
    expected, own = race.run(scores, range(count)), race.keys(range(count))
    assert own is not None
    room = np.empty((1, vocab), np.float32), np.empty((1, vocab), np.int64)
    given = [(n, own[n], float(temperatures[n])) for n in range(count)]
    assert [cpu_chains.winner(scores.numpy(), *each, room) for each in given] == expected.tolist()
    for temperature in (0.0, 1e-35):
        greedy = [cpu_chains.winner(scores.numpy(), n, own[n], temperature, room) for n in range(count)]
        assert greedy == scores.argmax(1).tolist()
    huge = scores * 1e30
    assert cpu_chains.winner(huge.numpy(), 1, own[1], 1.0, room) == int(huge[1].argmax())
    assert GumbelRace(keys, positions, temperatures, 20_000).keys([0]) is None  # whose noise is made in blocks


def test_the_last_draft_tells_of_scores_that_are_not_finite() -> None:
    scores = torch.zeros(3, 40)
    scores[:, 5] = 1
    scores[1] = torch.nan
    scores[2, 7] = torch.nan  # not the best of the others
    room = np.empty((1, 40), np.float32), np.empty((1, 40), np.int64)
    for temperature in (0.0, 0.5):
        tokens, draws = np.full(3, 9), (np.zeros(3, np.uint64), np.array([0.0, temperature, temperature]))
        cpu_chains.draw_column(scores.numpy(), 3, 2, draws, room, tokens)
        assert tokens[0] == 5
        assert tokens[1] >= 0  # it drafts on
        assert tokens[2] == NO_TOKEN


def test_memory_that_is_not_finite_ends_the_drafts_of_its_request(
    pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]
) -> None:
    engine = make(pair_of("llama"))
    runner: Runner = model_drafter(engine).runner
    seen = watched(True)

    def spoil() -> None:
        if engine.scheduler.running and seen.compiled == 2:
            rows = runner.storage.row_numbers(runner.cache.slot(engine.scheduler.running[0].handle), 0, 3)
            runner.storage.rows[0][list(rows)] = torch.nan

    run = drive(engine, [requests()[0][0]], after_step=spoil)
    record = run.received["r0"].record
    assert record is not None
    assert [bool(k) for k in record.column("drafted")].count(True) <= 4
    assert run.received["r0"].reason == "length"
    assert NO_TOKEN in seen.drafts[-1][1][0]


def test_a_call_that_fails_costs_its_drafts_only(
    pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, texts = run(pair_of("safeailab"), watched, True)
    real, calls = cpu_chains.draw_chains, [0]

    def failing(*given: Any) -> None:
        real(*given)
        calls[0] += drawn_columns(given) > 0
        if calls[0] % 3 == 2:
            raise MemoryError("there is no room")

    monkeypatch.setattr(cpu_chains, "draw_chains", failing)
    seen, same = run(pair_of("safeailab"), watched, True)
    assert calls[0] > 10
    assert seen.compiled == calls[0]
    assert texts == same


def test_trees_beside_chains(pair_of: Callable[[str], Pair], watched: Callable[[bool], Seen]) -> None:
    """A tree that grows. Both begin with the same outputs of the head."""
    results = []
    for allowed in (True, False):
        engine = make(pair_of("safeailab"))
        seen, every = watched(allowed), requests()
        tree = replace(every[0][0], k=None, tree=Growth(4, 2))
        drive(engine, {0: [tree, every[2][0]], 1: [every[6][0]]})
        results.append(seen)
    assert results[0].drafts == results[1].drafts
    assert (results[0].compiled > 5, results[1].compiled) == (True, 0)


def test_a_draft_with_rows_beyond_the_targets_vocabulary_drafts_step_by_step(
    tmp_path: Path, watched: Callable[[bool], Seen]
) -> None:
    target = save_checkpoint(tmp_path / "target", Shape(), seed=1)
    pair = Pair(target, save_checkpoint(tmp_path / "draft", Shape(vocab=VOCAB + 40), seed=1))
    seen, _ = run(pair, watched, True)
    assert (seen.compiled, bool(seen.drafts)) == (0, True)


def test_the_code_is_compiled_when_a_model_is_loaded(
    pair_of: Callable[[str], Pair], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        for name, compiled in (("llama", True), ("gemma2", False)):
            caplog.clear()
            make(pair_of(name))
            assert ("compiled chains are ready" in caplog.text) is compiled
