"""Admission: which limit refuses a request, what the client is told, and how long it should wait."""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import admission as admission_module
from policies.admission import Admission, Ratio, TokenCost
from policies.cost import PASS_S
from policies.observation import Timing
from tests.examples import examples

ROOMY = 10**9  # tokens of memory, where only the places matter


def places(running: int, waiting: int) -> Admission:
    return Admission(running, waiting, ROOMY, 1.0)


def memory(kv_tokens: int, max_demand: float) -> Admission:
    return Admission(10**6, 0, kv_tokens, max_demand)


def test_the_limit_is_running_plus_waiting() -> None:
    admission = places(2, 3)
    assert [admission.refusal(n, 0, 1, 0) is None for n in (0, 4, 5, 6)] == [True, True, False, False]


def test_several_are_taken_together_or_not_at_all() -> None:
    assert [places(2, 3).refusal(2, 0, more, 0) is None for more in (1, 3, 4)] == [True, True, False]


def test_the_limit_of_memory_is_a_multiple_of_what_there_is() -> None:
    admission = memory(1_000, 2.5)
    assert [admission.refusal(1, 2_000, 1, more) is None for more in (1, 500, 501)] == [True, True, False]
    assert [admission.refusal(1, tokens, 1, 100) is None for tokens in (2_400, 2_401)] == [True, False]


def test_nothing_is_refused_for_memory_when_nothing_is_open() -> None:
    admission = memory(1_000, 2.0)
    assert admission.refusal(0, 0, 64, 10**6) is None
    assert admission.refusal(1, 1, 64, 10**6) is not None
    assert places(2, 3).refusal(0, 0, 6, 1) is not None  # places are a limit even then


def test_the_client_is_told_the_numbers() -> None:
    admission = Admission(16, 48, 8_192, 8.0)
    assert [admission.refusal(62, 100, 3, 100), admission.refusal(20, 64_000, 1, 2_100)] == [
        "62 requests are running or waiting; 3 more exceed 64",
        "admitted requests may need 64,000 tokens of KV memory; 2,100 more exceed 8 × 8,192",
    ]
    half = Admission(16, 48, 8_192, 2.5).refusal(1, 20_000, 1, 1_000)
    assert half is not None
    assert half.endswith("exceed 2.5 × 8,192")


LOADS = st.tuples(st.integers(0, 200), st.integers(0, 200_000), st.integers(1, 200), st.integers(1, 200_000))
Load = tuple[int, int, int, int]
ADMISSIONS = st.builds(Admission, st.integers(1, 64), st.integers(0, 64), st.integers(1, 10_000), st.floats(1.0, 16.0))


@given(ADMISSIONS, LOADS)
@examples(80)
def test_refused_is_what_exceeds_a_limit_and_only_that(admission: Admission, load: Load) -> None:
    open_requests, open_tokens, more, more_tokens = load
    too_many = open_requests + more > admission.max_running + admission.max_waiting
    too_large = open_requests > 0 and open_tokens + more_tokens > admission.max_demand * admission.kv_tokens
    refusal = admission.refusal(*load)
    assert (refusal is not None) == (too_many or too_large)
    if refusal is not None:
        told = (open_requests, more) if "running" in refusal else (open_tokens, more_tokens)
        assert all(f"{number:,}" in refusal for number in told)


@given(ADMISSIONS, LOADS, st.integers(0, 200), st.integers(0, 200_000), st.integers(0, 200), st.integers(0, 200_000))
@examples(80)
def test_a_fuller_engine_takes_no_more_and_nobody_gets_in_by_asking_for_more(
    admission: Admission, load: Load, requests: int, tokens: int, more_requests: int, more: int
) -> None:
    if admission.refusal(*load) is not None:
        fuller = (load[0] + requests, load[1] + tokens, load[2] + more_requests, load[3] + more)
        assert admission.refusal(*fuller) is not None


# --- how long the next one would wait --------------------------------------------------------------------------------

WORKS = st.lists(st.floats(0.0, 5.0), max_size=20)


def test_who_is_admitted_waits_for_the_first_free_slot_after_those_that_wait() -> None:
    admission = places(4, 8)
    assert admission.retry_after([2.0, 3.0, 3.0, 3.0], [], 4) == 8  # four share the engine: 2 s of work take 8 s
    assert admission.retry_after([2.0, 3.0, 3.0, 3.0], [0.5], 4) == 10
    assert admission.retry_after([2.0, 3.0, 3.0, 3.0], [5.0], 4) == 12
    assert admission.retry_after([2.0, 3.0], [], 4) == 1
    assert admission.retry_after([2.0, 3.0], [1.0, 1.0, 1.0], 4) == 4


def test_a_guess_that_was_wrong_is_corrected() -> None:
    admission = places(4, 8)
    for _ in range(100):
        admission.slowness.add(0.05, 0.1)
        admission.usage.add(0.2, 0.4)
    assert admission.retry_after([7.8] * 4, [], 4) == 8
    assert math.isclose(admission.slowness.value, 0.5, rel_tol=0.05)


@given(WORKS, WORKS, st.integers(1, 20), st.floats(0.01, 9.0))
def test_the_advice_is_whole_seconds_and_grows_with_the_work(
    running: list[float], waiting: list[float], slots: int, more: float
) -> None:
    admission = places(20, 20)
    advice = admission.retry_after(running, waiting, slots)
    assert 1 <= advice <= 60
    assert admission.retry_after(running, [*waiting, more], slots) >= advice
    assert admission.retry_after([work + more for work in running], waiting, slots) >= advice


def test_what_was_learned_long_ago_is_forgotten() -> None:
    ratio = Ratio()
    for _ in range(500):
        ratio.add(1.0, 0.1)
    for _ in range(500):
        ratio.add(0.1, 0.1)
    assert math.isclose(ratio.value, 1.0, rel_tol=0.1)


def timing(batch: int, drafts: int, score_s: float) -> Timing:
    return Timing(batch, drafts, drafts // batch, 0, 0, 0, 0.0, score_s, 0.0)


def test_work_is_that_of_the_largest_batch() -> None:
    timings = [timing(1, 0, 0.002), timing(8, 0, 0.004), timing(8, 32, 0.008), timing(8, 64, 0.012), timing(1, 8, 0.01)]
    work = TokenCost.measured(timings, 8)
    assert (work.decode_s, work.read_s) == pytest.approx((0.0005, 0.000125))
    assert work.seconds(1000, 100) == pytest.approx(0.175)
    assert TokenCost.measured(timings[:1], 8) == TokenCost(0.002, 0.002)
    few = TokenCost.measured([timings[0], timings[-1]], 8)  # no larger batch was measured: 1 ms a row more
    assert (few.decode_s, few.read_s) == pytest.approx((0.009 / 8, 0.001))
    assert TokenCost.measured([], 8) == TokenCost(PASS_S, PASS_S)


# --- against a queue that is simulated -------------------------------------------------------------------------------

SLOTS, WAITING = 8, 24
STEP_S, READ_S = 0.02, 0.0005  # a step, and a token of a prompt in it
CHUNK = 40


@dataclass(eq=False)
class Job:
    prompt: int
    asked: int
    needed: int  # tokens until it ends by itself
    number: int = 0
    read: int = 0
    said: int = 0


@dataclass
class Refused:
    at: float
    advice: int
    last: int  # number of the last request admitted before it
    wait: float | None = None  # seconds that it would have waited


@dataclass
class Queue:
    """Slots that each emit a token per step, a prompt that is read beside them, and a virtual clock.

    guess: seconds that the engine measured at its start over the seconds of a full engine."""

    guess: float
    now: float = 0.0
    count: int = 0
    admission: Admission = field(default_factory=lambda: places(SLOTS, WAITING))
    running: list[Job] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)
    refused: list[Refused] = field(default_factory=list)

    @property
    def work(self) -> TokenCost:
        return TokenCost(self.guess * READ_S, self.guess * STEP_S / SLOTS)

    def arrive(self, job: Job) -> int | None:
        """The advice in seconds; None: admitted."""
        if self.admission.refusal(len(self.running) + len(self.waiting), 0, 1, 0) is None:
            job.number = self.count = self.count + 1
            self.waiting.append(job)
            return None
        begun = [self.work.seconds(0, j.asked - j.said) for j in self.running if j.said]
        unread = [j for j in self.running if not j.said]
        ahead = [self.work.seconds(j.prompt, j.asked) for j in (*unread, *self.waiting)]
        advice = self.admission.retry_after(begun, ahead, len(self.running) if self.waiting else SLOTS)
        self.refused.append(Refused(self.now, advice, self.count))
        return advice

    def step(self) -> None:
        budget, read, said = CHUNK, 0, 0
        while self.waiting and len(self.running) < SLOTS:
            self.running.append(self.waiting.popleft())
        self._tell_waits()
        full = bool(self.waiting)
        for job in self.running:
            if job.read < job.prompt:
                count = min(budget, job.prompt - job.read)
                budget, read, job.read = budget - count, read + count, job.read + count
            if job.read == job.prompt:
                job.said, said = job.said + 1, said + 1
        took = STEP_S * (0.3 + 0.7 * len(self.running) / SLOTS) + READ_S * read
        self.now += took
        if full:
            self.admission.slowness.add(took, self.work.seconds(read, said))
        for job in [job for job in self.running if job.said >= job.needed]:
            self.running.remove(job)
            needed, asked = self.work.seconds(job.prompt, job.said), self.work.seconds(job.prompt, job.asked)
            self.admission.usage.add(needed, asked)

    def _tell_waits(self) -> None:
        """A refused request would run in this step if all before it run and leave a slot."""
        waiting = self.waiting[0].number if self.waiting else self.count + 1
        for one in self.refused:
            if one.wait is None and one.last < waiting:
                before = sum(job.number <= one.last for job in self.running)
                one.wait = self.now - one.at if before < SLOTS else None


def make_job(rng: random.Random) -> Job:
    asked = rng.randint(40, 200)
    return Job(rng.randint(5, 100), asked, round(asked * rng.uniform(0.6, 1.0)))


def run(queue: Queue, arrivals: Sequence[float], seed: int) -> list[Refused]:
    """Run until no request is left. Returns the refused ones."""
    rng, times = random.Random(seed), deque(sorted(arrivals))
    while times or queue.running or queue.waiting or any(one.wait is None for one in queue.refused):
        while times and times[0] <= queue.now:
            times.popleft()
            queue.arrive(make_job(rng))
        if not queue.running and not queue.waiting and times:
            queue.now = max(queue.now, times[0])
        else:
            queue.step()
    return queue.refused


def burst(rng: random.Random) -> list[float]:
    """All requests come at once, at an engine that has just started."""
    return [0.0] * 100


def after_an_idle_period(rng: random.Random) -> list[float]:
    """For a while one short request at a time, then all at once."""
    return [20.0 * i for i in range(50)] + [1000.0] * 100


def overload(rng: random.Random) -> list[float]:
    """Twice the load that the engine can serve, for a minute."""
    return [rng.uniform(0, 60) for _ in range(60 * 6)]


def drain(rng: random.Random) -> list[float]:
    """A full engine, to which requests come for ten seconds and then none."""
    return [0.0] * 32 + [rng.uniform(0, 10) for _ in range(100)]


PATTERNS = [burst, after_an_idle_period, overload, drain]


def honest(one: Refused) -> bool:
    """The advice is right within a factor of 2, but never below 1 s."""
    assert one.wait is not None
    return one.advice / 2 <= max(one.wait, 1.0) and one.wait <= 2 * one.advice


def share_of_honest(refused: Sequence[Refused]) -> float:
    return sum(map(honest, refused)) / len(refused)


@pytest.mark.parametrize("guess", [0.7, 1.0, 1.25])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_advice_is_what_waiting_costs(pattern: Callable[[random.Random], list[float]], guess: float) -> None:
    for seed in range(3):
        refused = run(Queue(guess), pattern(random.Random(seed)), seed)
        assert len(refused) > 20
        assert max(one.wait or 0.0 for one in refused) > 4
        assert share_of_honest(refused) >= 0.9


def test_negative_control_the_time_until_a_place_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "retry_after", lambda *_: 1)
    assert share_of_honest(run(Queue(1.0), overload(random.Random(0)), 0)) < 0.1


def test_negative_control_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ratio, "add", lambda *_: None)
    assert share_of_honest(run(Queue(4.0), overload(random.Random(0)), 0)) < 0.5
    monkeypatch.undo()
    assert share_of_honest(run(Queue(4.0), overload(random.Random(0)), 0)) >= 0.9


@pytest.mark.parametrize("crowd", [60, 100])
def test_who_obeys_is_admitted_after_few_attempts(crowd: int) -> None:
    """All come at once, and again when told to: at most half need more than three attempts, and all get in."""
    rng, queue = random.Random(3), Queue(1.0)
    due = [(0.0, 1)] * crowd
    attempts: list[int] = []
    while due or queue.running or queue.waiting:
        now, due = [d for d in due if d[0] <= queue.now], [d for d in due if d[0] > queue.now]
        for _, attempt in now:
            advice = queue.arrive(make_job(rng))
            if advice is None:
                attempts.append(attempt)
            else:
                due.append((queue.now + advice, attempt + 1))
        if queue.running or queue.waiting:
            queue.step()
        elif due:
            queue.now = min(at for at, _ in due)
    assert len(attempts) == crowd
    assert sum(attempts) / crowd <= 3
    assert max(attempts) <= 1 + 2 * math.ceil(crowd / WAITING)


def test_the_advice_stays_within_a_minute() -> None:
    assert places(1, 0).retry_after([1000.0], [], 1) == admission_module.LONGEST_WAIT_S == 60
