"""Requests that need four times the memory there is: all finish with the tokens of a run with memory to spare."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import exp, log

import pytest

from engine.engine import Engine
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, State
from engine.types import Request, SamplingParams
from tests.engine.driving import Drive, drive, load
from tests.engine.pairs import VOCAB, Pair, Shape, save_pair

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


LONGEST, SHORTER = 1500, 320  # tokens of the longest prompt: in proofs, and by default
MAX_LENS = {LONGEST: 2048, SHORTER: 512}
OVERLOAD = 4  # demand over memory
ALONE = 6  # requests that are run one at a time
BLOCK_SIZES = {"mapped": 64, "gathered": 50}

Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("long"), Shape(layers=1, max_positions=MAX_LENS[LONGEST]))


def make_requests(count: int, longest: int) -> list[Request]:
    """Prompts of 1 to `longest` tokens, log-uniform, of which a third begin alike; greedy and sampled, k = 0, 3 or 5.

    Outputs have up to 2/15 as many tokens. Most of them are long, so that what runs grows before much of it ends.
    """
    most = longest * 2 // 15
    rng = random.Random(7)
    beginnings = [[rng.randrange(2, VOCAB) for _ in range(longest)] for _ in range(4)]
    requests = []
    for i in range(count):
        length = (1, longest)[i] if i < 2 else round(exp(rng.uniform(0, log(longest))))
        shared = rng.choice(beginnings)[: rng.randint(0, length)] if i % 3 == 0 else []
        prompt = (*shared, *(rng.randrange(2, VOCAB) for _ in range(length - len(shared))))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.8)),
            seed=i,
            max_tokens=rng.randint(1, 10) if i % 10 == 0 else rng.randint(most * 3 // 5, most),
        )
        salt = rng.choice(("", "", "one", "two"))
        requests.append(Request(f"r{i}", prompt, params, k=rng.choice((0, 3, 5)), cache_salt=salt))
    return requests


def max_len(requests: Seq[Request]) -> int:
    return MAX_LENS[max(len(r.prompt_ids) for r in requests)]


def demand(requests: Seq[Request]) -> int:
    return sum(len(r.prompt_ids) + r.params.max_tokens for r in requests)


def load_tight(pair: Pair, requests: Seq[Request], kind: str, max_running: int) -> Engine:
    """Enough slots for sequences that need more than the memory there is, and chunks that fill them."""
    return load(
        pair,
        max_model_len=max_len(requests),
        max_running=max_running,
        max_step_tokens=6 * max_running,
        max_spec_length=5,
        prefill_chunk=1024,
        cache="paged",
        block_size=BLOCK_SIZES[kind],
        kv_tokens=demand(requests) // OVERLOAD,
    )


@dataclass(frozen=True, slots=True)
class Before:
    """A sequence that held memory after a step."""

    sequence: Sequence
    cached: int
    tokens: int
    preemptions: int


class Watch:
    """After every step: whoever held memory has advanced, or was preempted, and the oldest was not. Audits, too.

    Its own plan wraps the scheduler's, to count drafts that were given up for want of memory.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shrunk = 0
        self._before: list[Before] = []
        self._plan = engine.scheduler.plan
        engine.scheduler.plan = self._counting  # type: ignore[method-assign]

    def _counting(self) -> Plan:
        plan = self._plan()
        started = {s.handle for s, _ in plan.started}
        for part in plan.slices:
            sequence = part.sequence
            if part.emits and part.committed == 1 and sequence.handle not in started:
                assert sequence.k is not None
                self.shrunk += part.k < min(sequence.k, sequence.remaining - 1)
        return plan

    def __call__(self) -> None:
        cache, running = self.engine.target.cache, self.engine.scheduler.running
        for i, before in enumerate(self._before):
            sequence = before.sequence
            if sequence.record.preemptions > before.preemptions:
                assert i > 0, f"{sequence.request_id} was preempted, and was the oldest"
                assert sequence.state is State.WAITING
            elif sequence.state is State.RUNNING:
                grown = cache.length(sequence.handle) > before.cached or len(sequence.tokens) > before.tokens
                assert grown, f"{sequence.request_id} holds memory, and did not advance"
        self._before = [Before(s, cache.length(s.handle), len(s.tokens), s.record.preemptions) for s in running]
        if self.engine.steps % 20 == 0:
            self.engine.audit()


@dataclass(frozen=True, slots=True)
class Result:
    run: Drive
    shrunk: int

    @property
    def preempted(self) -> int:
        return sum(s.preempted for s in self.run.steps)

    @property
    def cached(self) -> int:
        return sum(s.cached_tokens for s in self.run.steps)


def run_tight(engine: Engine, requests: Seq[Request]) -> Result:
    """A twentieth of the requests arrives with each of the first steps."""
    watch, arrivals = Watch(engine), dict[int, list[Request]]()
    for i, request in enumerate(requests):
        arrivals.setdefault(20 * i // len(requests), []).append(request)
    run = drive(engine, arrivals, after_step=watch)
    return Result(run, watch.shrunk)


def expected_tokens(pair: Pair, requests: Seq[Request]) -> Tokens:
    """Plain decoding with memory for everybody, few at a time, and some of them alone."""
    limits = {"max_model_len": max_len(requests), "max_running": 8, "max_step_tokens": 512}
    engine = load(pair, **limits, cache="slotted", block_size=None)
    plain = [replace(r, k=0) for r in requests]
    expected = drive(engine, plain).tokens
    for request in plain[:ALONE]:
        assert drive(engine, [request]).tokens[request.id] == expected[request.id]
    return expected


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and what they must give."""

    pair: Pair
    requests: list[Request]
    expected: Tokens

    def check(self, kind: str, max_running: int) -> Result:
        result = run_tight(load_tight(self.pair, self.requests, kind, max_running), self.requests)
        assert result.run.tokens == self.expected
        assert 0 < result.run.accepted < result.run.drafted
        assert min(result.preempted, result.cached, result.shrunk) > 0
        return result


def make_load(pair: Pair, count: int, longest: int) -> Load:
    requests = make_requests(count, longest)
    assert {1, longest} <= {len(r.prompt_ids) for r in requests}
    return Load(pair, requests, expected_tokens(pair, requests))


@pytest.fixture(scope="module")
def fifty(long_pair: Pair) -> Load:
    return make_load(long_pair, 50, SHORTER)


@pytest.mark.parametrize("kind", ["mapped", pytest.param("gathered", marks=pytest.mark.proofs)])
def test_fifty_requests(fifty: Load, kind: str) -> None:
    fifty.check(kind, max_running=32)


@pytest.mark.proofs
@pytest.mark.parametrize(
    ("count", "max_running", "kind"), [(100, 64, "mapped"), (100, 64, "gathered"), (500, 256, "mapped")]
)
def test_many_requests(long_pair: Pair, count: int, max_running: int, kind: str) -> None:
    make_load(long_pair, count, LONGEST).check(kind, max_running)


# --- negative controls -----------------------------------------------------------------------------------------------


def test_negative_control_the_oldest_gives_way(fifty: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def oldest(self: Scheduler) -> Sequence:
        self.running.append(self.running.pop(0))
        return preempt(self)

    monkeypatch.setattr(Scheduler, "_preempt", oldest)
    with pytest.raises(AssertionError, match="was preempted, and was the oldest"):
        fifty.check("mapped", max_running=32)


def test_negative_control_somebody_is_left_out(fifty: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def unfair(self: Scheduler) -> Plan:
        made = plan(self)
        keep = made.slices[1:] if len(made.slices) == 9 else made.slices
        return replace(made, slices=keep)

    monkeypatch.setattr(Scheduler, "plan", unfair)
    with pytest.raises(AssertionError, match="holds memory, and did not advance"):
        fifty.check("mapped", max_running=32)
