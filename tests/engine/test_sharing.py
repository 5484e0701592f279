"""What one sequence has computed another need not: prompts in common are read once, and only the clock shows it."""

import logging
import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.paged import PagedCache
from cache.prefix import PrefixIndex, PrefixNode
from cache.storage import Blocks
from engine import scheduler as scheduler_module
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.scheduler import MIN_SHARED, Scheduler
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.fresh import BLOCK_SIZES, Checker, memory
from tests.engine.pairs import VOCAB, Pair
from tests.engine.sampling.test_logprobs import equal, hear
from tests.examples import in_proofs, usual_and_proofs

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXT = tuple(random.Random(9).choices(range(2, VOCAB), k=96))

every_kind = pytest.mark.parametrize("kind", ["mapped", "gathered"])  # what copies or clears blocks
usual_kind = pytest.mark.parametrize("kind", ["mapped", pytest.param("gathered", marks=pytest.mark.proofs)])


def load_with(pair: Pair, kind: str, **config: Any) -> Engine:
    settings = {"max_running": 4, "max_spec_length": 4, "max_step_tokens": 24, **memory(kind, 420), **config}
    return load(pair, **settings)


def paged(engine: Engine) -> PagedCache:
    cache = engine.target.cache
    assert isinstance(cache, PagedCache)
    return cache


def cached(run: Drive, name: str) -> int:
    record = run.received[name].record
    assert record is not None
    return record.cached_tokens


def found_at_once(engine: Engine, request: Request) -> int:
    """Tokens of its prompt that the cache had."""
    run = drive(engine, [request])
    assert sum(s.cached_tokens for s in run.steps) == cached(run, request.id)
    return cached(run, request.id)


def read_tokens(runner: Runner) -> list[int]:
    """Filled with how many committed tokens each of the model's passes reads."""
    run, counts = runner.run, list[int]()

    def counting(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        counts.append(sum(feed.committed for feed in feeds))
        return run(feeds, drafts)

    runner.run = counting  # type: ignore[method-assign]
    return counts


# --- several choices of one prompt -----------------------------------------------------------------------------------


def choices(length: int, count: int = 4, k: int = 4) -> list[Request]:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    return [Request(f"c{i}", TEXT[:length], params, k=k, choice_index=i, group="c") for i in range(count)]


@usual_kind
@pytest.mark.parametrize(
    ("length", "k"),
    [
        pytest.param(length, k, marks=() if (length, k) in ((17, 0), (41, 4)) else pytest.mark.proofs)
        for length in (1, 17, 41, 70)
        for k in (0, 4)
    ],
)
def test_choices_of_one_prompt_read_it_once(pair: Pair, kind: str, length: int, k: int) -> None:
    """41 tokens take two passes, 70 three, and the others wait for them."""
    requests = choices(length, k=k)
    engine = load_with(pair, kind)
    run = drive(engine, requests, after_step=Checker(engine))
    unshared = drive(load_with(pair, kind, prefix_cache=False), requests)
    assert run.tokens == unshared.tokens
    assert len({tuple(ids) for ids in run.tokens.values()}) == len(requests)
    worth = length > MIN_SHARED
    assert sum(s.prefill_tokens for s in run.steps) == (length if worth else 0)
    assert sum(s.prefill_tokens for s in unshared.steps) == (4 * length if worth else 0)
    assert [cached(run, r.id) for r in requests] == [0] + 3 * [length - 1 if worth else 0]


@usual_kind
@pytest.mark.parametrize("length", [40, *in_proofs(60)])
def test_a_few_tokens_are_not_worth_a_wait(pair: Pair, kind: str, length: int) -> None:
    """The last pass of the leader leaves tokens for another, who begins with what is there."""
    requests = choices(length)
    run = drive(load_with(pair, kind), requests)
    assert run.tokens == drive(load_with(pair, kind, prefix_cache=False), requests).tokens
    assert length < sum(s.prefill_tokens for s in run.steps) < length + MIN_SHARED + 1


@every_kind
@pytest.mark.parametrize("length", [40, 43])
def test_a_partial_block_is_copied_when_it_is_written(pair: Pair, kind: str, length: int) -> None:
    """40 tokens are whole blocks of either size: their copies are all the same in the end, and one of them is kept."""
    engine, size = load_with(pair, kind), BLOCK_SIZES[kind]
    cache, copies, take_copies = paged(engine), list[tuple[int, int]](), paged(engine).take_copies
    tables: list[list[list[int]]] = []

    def counting() -> Iterator[tuple[int, int]]:
        for pair in take_copies():
            copies.append(pair)
            yield pair

    def after_step() -> None:
        tables.append([list(cache.table(s.handle)) for s in engine.scheduler.running])

    cache.take_copies = counting  # type: ignore[method-assign]
    drive(engine, choices(length), after_step=after_step)
    together = [table for table in tables if len(table) == 4]
    assert together
    assert len(copies) >= 2
    for mine in together:
        full = length // size
        assert len({tuple(table[:full]) for table in mine}) == 1
        own = [block for table in mine for block in table[full:]]
        assert len(set(own)) == len(own)
    assert max(len(table) for table in together[-1]) > length // size


# --- hits ------------------------------------------------------------------------------------------------------------


def check_hits(engine: Engine, size: int) -> None:
    """Prompts that are the beginning of a text whose sequence has finished, of all lengths next to a block's end."""
    drive(engine, [Request("first", TEXT[:60], PARAMS, k=0)])
    lengths = [n for n in range(1, 61) if n % size < 2 or n % size == size - 1]
    requests = [Request(f"r{n}", TEXT[:n], replace(PARAMS, max_tokens=3), k=3) for n in lengths]
    expected = drive(load_plain(engine), requests).tokens
    for request in requests:
        run = drive(engine, [request])
        assert cached(run, request.id) == (len(request.prompt_ids) - 1) // size * size
        assert run.tokens[request.id] == expected[request.id]


def load_plain(engine: Engine) -> Engine:
    """The same pair without sharing."""
    config = replace(engine.config, prefix_cache=False)
    return Engine.from_config(config)


@usual_kind
def test_a_hit_never_covers_the_last_token_of_a_prompt(pair: Pair, kind: str) -> None:
    """Its logits are wanted."""
    check_hits(load_with(pair, kind), BLOCK_SIZES[kind])


@usual_kind
def test_negative_control_hits_of_whole_prompts(
    pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "engine")
    match = PrefixIndex.match

    def greedy(self: PrefixIndex, tokens: Seq[int], salt: str, limit: int) -> list[PrefixNode]:
        return match(self, tokens, salt, len(tokens) // self.block_size)

    monkeypatch.setattr(PrefixIndex, "match", greedy)
    with pytest.raises(AssertionError):
        check_hits(load_with(pair, kind), BLOCK_SIZES[kind])


@usual_kind
def test_without_a_prefix_cache_nothing_is_found(pair: Pair, kind: str) -> None:
    engine = load_with(pair, kind, prefix_cache=False)
    request = Request("r", TEXT[:50], PARAMS)
    assert [found_at_once(engine, request) for _ in range(2)] == [0, 0]
    assert cached(drive(engine, [request, replace(request, id="s")]), "s") == 0
    with_one = load_with(pair, kind)
    assert [found_at_once(with_one, request) for _ in range(2)] == [0, 49 // BLOCK_SIZES[kind] * BLOCK_SIZES[kind]]


@usual_kind
def test_the_next_turn_finds_what_the_last_one_said(pair: Pair, kind: str) -> None:
    engine, size = load_with(pair, kind), BLOCK_SIZES[kind]
    first = Request("first", TEXT[:30], replace(PARAMS, max_tokens=21), k=4)
    said = drive(engine, [first]).tokens["first"]
    second = Request("second", (*TEXT[:30], *said, *TEXT[60:70]), PARAMS, k=4)
    run = drive(engine, [second])
    assert cached(run, "second") == 50 // size * size  # the last token of an output is never fed
    assert run.tokens == drive(load_plain(engine), [second]).tokens


def turned_away(engine: Engine) -> tuple[int, int]:
    """Tokens that a request of another salt finds: of one that is running, and of one that has finished."""
    first = Request("first", TEXT[:50], PARAMS, cache_salt="one")
    second = replace(first, id="second", cache_salt="two")
    running = drive(engine, {0: [first], 4: [second]})
    assert found_at_once(engine, replace(first, id="again")) > 0
    return cached(running, "second"), found_at_once(engine, replace(first, id="other", cache_salt="three"))


@usual_kind
def test_salts_are_kept_apart(pair: Pair, kind: str) -> None:
    assert turned_away(load_with(pair, kind)) == (0, 0)


@usual_kind
def test_the_draft_keeps_salts_apart(pair: Pair, kind: str) -> None:
    engine = load_with(pair, kind)
    read = read_tokens(model_drafter(engine).runner)
    first = Request("first", TEXT[:50], PARAMS, k=2, cache_salt="one")
    drive(engine, [first])
    for salt, least in (("one", 0), ("two", 50)):
        read.clear()
        drive(engine, [replace(first, cache_salt=salt)])
        assert (max(read) >= 18) == bool(least)
        assert sum(read) >= least


@usual_kind
@pytest.mark.parametrize("guard", ["index", "scheduler"])
def test_negative_control_salts_that_nobody_looks_at(
    pair: Pair, kind: str, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_with(pair, kind)
    if guard == "index":
        root = PrefixIndex._root
        monkeypatch.setattr(PrefixIndex, "_root", lambda self, salt: root(self, ""))
        match = PrefixIndex.match
        monkeypatch.setattr(PrefixIndex, "match", lambda self, tokens, _, limit: match(self, tokens, "", limit))
        assert turned_away(engine)[1] > 0
        return
    monkeypatch.setattr(Sequence, "cache_salt", property(lambda _: "", lambda *_: None))
    assert min(turned_away(engine)) > 0


# --- prompt_logprobs -------------------------------------------------------------------------------------------------


def echoes() -> tuple[Request, Request]:
    echo = Request("echo", TEXT[:50], replace(PARAMS, prompt_logprobs=2), k=2)
    return Request("plain", TEXT[:50], PARAMS, k=2), echo


@usual_kind
def test_a_request_for_prompt_logprobs_reads_its_prompt_and_publishes_it(pair: Pair, kind: str) -> None:
    plain, echo = echoes()
    alone = hear(load_with(pair, kind), [echo])
    engine = load_with(pair, kind)
    assert found_at_once(engine, replace(echo, id="first")) == 0
    assert found_at_once(engine, plain) > 0
    heard = hear(engine, [plain, echo])
    assert cached(heard.run, "plain") > 0
    assert cached(heard.run, "echo") == 0
    assert equal(heard.prompts["echo"], alone.prompts["echo"])
    assert len(heard.prompts["echo"]) == 49
    assert heard.run.tokens["echo"] == alone.run.tokens["echo"]


@usual_kind
def test_negative_control_prompt_logprobs_of_a_hit(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_reusable_tokens", lambda sequence: sequence.tokens)
    plain, echo = echoes()
    engine = load_with(pair, kind)
    drive(engine, [plain])
    assert len(hear(engine, [echo]).prompts["echo"]) < 49


# --- waiting for a leader --------------------------------------------------------------------------------------------


class Starts:
    """At which step each request first ran."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.at: dict[str, int] = {}
        self._first = engine.steps

    def __call__(self) -> None:
        for sequence in self.engine.scheduler.running:
            self.at.setdefault(sequence.request_id, self.engine.steps - self._first)


# (leader's tokens, tokens in common) → (step in which the follower runs, tokens that it then has of the leader's)
WAITS = {
    (40, 0): (1, 0),
    (40, 15): (1, 0),  # not worth it
    (40, 16): (2, 16),
    (40, 39): (2, 39),
    (90, 0): (1, 0),  # they share what a pass reads
    (90, 64): (2, 64),
    (90, 79): (2, 64),  # 15 are missing
    (90, 80): (3, 80),  # 16 are
    (90, 89): (3, 89),
}


def follow(pair: Pair, kind: str, length: int, common: int) -> tuple[int, int]:
    engine = load_with(pair, kind, max_model_len=128, max_step_tokens=64)
    starts = Starts(engine)
    leader = Request("leader", TEXT[:length], PARAMS, k=2)
    follower = Request("follower", (*TEXT[:common], *reversed(TEXT[: 92 - common])), PARAMS, k=2)
    run = drive(engine, [leader, follower], after_step=starts)
    assert run.tokens == drive(load_plain(engine), [leader, follower]).tokens
    assert starts.at["leader"] == 1
    return starts.at["follower"], cached(run, "follower")


@usual_kind
@pytest.mark.parametrize("asked", usual_and_proofs(WAITS, ((40, 15), (40, 16), (90, 79), (90, 80))), ids=str)
def test_a_follower_waits_while_it_pays(pair: Pair, kind: str, asked: tuple[int, int]) -> None:
    """As long as 16 or more of the tokens in common are about to be computed, and no longer."""
    assert follow(pair, kind, *asked) == WAITS[asked]


@usual_kind
def test_negative_control_nobody_waits(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_worth_waiting", lambda *_: False)
    assert follow(pair, kind, 40, 39) == (1, 0)


@usual_kind
def test_a_follower_goes_on_when_its_leader_is_cancelled(pair: Pair, kind: str) -> None:
    engine = load_with(pair, kind)
    starts = Starts(engine)
    leader, follower = Request("leader", TEXT[:80], PARAMS), Request("follower", TEXT[:79], PARAMS)
    run = drive(engine, [leader, follower], cancels={2: ["leader"]}, after_step=starts)
    assert starts.at["follower"] == 3
    assert run.received["leader"].reason == "cancelled"
    size = BLOCK_SIZES[kind]
    assert cached(run, "follower") == 48 // size * size  # what the leader's two steps left behind
    assert run.tokens["follower"] == drive(load_plain(engine), [follower]).tokens["follower"]


@usual_kind
def test_a_follower_goes_on_when_its_leader_is_preempted(pair: Pair, kind: str) -> None:
    """The leader is the youngest that runs; an older sequence takes its memory while it reads."""
    engine = load_with(pair, kind)
    older = Request("older", TEXT[80:90], replace(PARAMS, max_tokens=60), k=0)
    leader, follower = Request("leader", TEXT[:80], PARAMS), Request("follower", TEXT[:79], PARAMS)
    secure, done = engine.scheduler._reserve_next_tokens, list[int]()

    def forced() -> list[Sequence]:
        preempted = secure()
        running = engine.scheduler.running
        if not done and running and running[-1].request_id == "leader" and engine.steps > 1:
            done.append(paged(engine).length(running[-1].handle))
            preempted.append(engine.scheduler._preempt())
        return preempted

    engine.scheduler._reserve_next_tokens = forced  # type: ignore[method-assign]
    run = drive(engine, [older, leader, follower], after_step=engine.audit)
    assert 0 < done[0] < 80
    assert cached(run, "follower") > 48
    assert cached(run, "leader") == 0  # of its first admission
    assert run.tokens == drive(load_plain(engine), [older, leader, follower]).tokens


# --- each model for itself -------------------------------------------------------------------------------------------


@usual_kind
def test_a_hit_of_the_target_alone_costs_only_the_draft_its_reading(pair: Pair, kind: str) -> None:
    engine, size = load_with(pair, kind), BLOCK_SIZES[kind]
    plain = Request("plain", TEXT[:50], PARAMS, k=0)
    drive(engine, [plain])
    target, draft = read_tokens(engine.target), read_tokens(model_drafter(engine).runner)
    run = drive(engine, [replace(plain, id="drafted", k=4)], after_step=Checker(engine, logits=False))
    rest = 50 - 49 // size * size
    assert cached(run, "drafted") == 50 - rest
    assert target[0] == rest
    assert sum(draft) > 50
    assert run.drafted


@usual_kind
def test_a_hit_of_the_draft_alone_costs_only_the_target_its_reading(pair: Pair, kind: str) -> None:
    engine, size = load_with(pair, kind), BLOCK_SIZES[kind]
    request = Request("r", TEXT[:50], PARAMS, k=4)
    expected = drive(engine, [request]).tokens
    forget_all(paged(engine))
    target, draft = read_tokens(engine.target), read_tokens(model_drafter(engine).runner)
    run = drive(engine, [request], after_step=Checker(engine, logits=False))
    assert cached(run, "r") == 0
    assert target[:3] == [24, 24, 2]
    assert draft[0] == 51 - 50 // size * size
    assert run.tokens == expected


def forget_all(cache: PagedCache) -> None:
    for leaf in [node for node in cache._index.nodes.values() if not node.children]:
        for block in cache._index.remove(leaf.block):
            cache._pool.withhold_cached(block)
    cache.restore()
    if cache._index.nodes:
        forget_all(cache)


# --- what is not to be trusted ---------------------------------------------------------------------------------------


def poison_published(engine: Engine) -> None:
    """All that can be found becomes NaN."""
    storage = engine.target.storage
    assert isinstance(storage, Blocks)
    for block in paged(engine)._index.nodes:
        storage.pool[:, block] = torch.nan


def after_poison(engine: Engine, length: int) -> list[Drive]:
    """A request that meets NaN in what it found, and two that come after it."""
    request = Request("r", TEXT[:length], PARAMS, k=2)
    drive(engine, [replace(request, prompt_ids=TEXT[:60])])
    poison_published(engine)
    return [drive(engine, [request]) for _ in range(3)]


@every_kind
@pytest.mark.parametrize("length", [50, 60])
def test_what_is_not_finite_is_found_only_once(
    pair: Pair, kind: str, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "engine")
    engine, size = load_with(pair, kind), BLOCK_SIZES[kind]
    first, second, third = after_poison(engine, length)
    assert first.received["r"].error == "the model gave no valid distribution for this request"
    assert (cached(second, "r"), cached(third, "r")) == (0, (length - 1) // size * size)
    expected = drive(load_plain(engine), [Request("r", TEXT[:length], PARAMS, k=2)]).tokens
    assert second.tokens == third.tokens == expected


@every_kind
def test_what_is_not_finite_harms_nobody_else(pair: Pair, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks below those that were found are forgotten with them, and given to others."""
    caplog.set_level(logging.CRITICAL, "engine")
    engine = load_with(pair, kind)
    long = Request("long", TEXT[:80], PARAMS, k=2)
    drive(engine, [long])
    poison_published(engine)
    short = drive(engine, [replace(long, prompt_ids=TEXT[: BLOCK_SIZES[kind] + 1])])
    assert short.received["long"].reason == "error"
    others = [replace(long, id=f"r{i}", prompt_ids=TEXT[i : i + 3]) for i in range(10, 30)]
    assert {told.reason for told in drive(engine, others).received.values()} == {"length"}
    for rows in engine.target.storage.rows:
        assert rows.isfinite().all()


@usual_kind
def test_negative_control_what_is_not_finite_stays_to_be_found(
    pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "engine")
    engine = load_with(pair, kind)
    monkeypatch.setattr(engine.target.cache, "discard", lambda _: None)
    monkeypatch.setattr(engine.target.storage, "clear", lambda _: None)
    assert [run.received["r"].reason for run in after_poison(engine, 50)] == ["error"] * 3
