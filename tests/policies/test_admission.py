"""Admission: which limit refuses whom, what the client is told, and how long it should wait."""

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission import Admission, Refusal

ROOMY = 10**9  # tokens of memory, where the places are what matters


def places(running: int, waiting: int, mean_duration_s: float = 0.0) -> Admission:
    return Admission(running, waiting, ROOMY, 1.0, mean_duration_s)


def memory(kv_tokens: int, max_demand: float, mean_duration_s: float = 0.0) -> Admission:
    return Admission(10**6, 0, kv_tokens, max_demand, mean_duration_s)


def wait(refusal: Refusal | None) -> int | None:
    return None if refusal is None else refusal.retry_after


def test_the_limit_is_running_plus_waiting() -> None:
    admission = places(2, 3)
    assert [admission.refusal(n, 0, 1, 0) is None for n in (0, 4, 5, 6)] == [True, True, False, False]


def test_several_are_taken_together_or_not_at_all() -> None:
    admission = places(2, 3, mean_duration_s=8.0)
    assert [admission.refusal(2, 0, more, 0) is None for more in (1, 3, 4)] == [True, True, False]
    assert [wait(admission.refusal(4, 0, more, 0)) for more in (2, 3)] == [2, 4]  # places to come free, 2 s each


def test_retry_after_is_the_time_until_a_place_is_free() -> None:
    admission = places(2, 0)
    assert wait(admission.refusal(2, 0, 1, 0)) == 1  # nothing is known yet
    for _ in range(100):
        admission.finished(9.0)
    assert wait(admission.refusal(2, 0, 1, 0)) == 5  # two open requests of 9 s each: one ends every 4.5 s


def test_requests_that_wait_do_not_lengthen_the_wait_for_a_place() -> None:
    """A request's 12 s contain its waiting, so six open ones end one every 2 s, however few run at once."""
    assert wait(places(2, 4, mean_duration_s=12.0).refusal(6, 0, 1, 0)) == 2


def test_the_limit_of_memory_is_a_multiple_of_what_there_is() -> None:
    admission = memory(1_000, 2.5)
    assert [admission.refusal(1, 2_000, 1, more) is None for more in (1, 500, 501)] == [True, True, False]
    assert [admission.refusal(1, tokens, 1, 100) is None for tokens in (2_400, 2_401)] == [True, False]


def test_retry_after_is_the_time_until_enough_tokens_have_left() -> None:
    """10,000 open tokens leave within the mean 20 s of their requests, 500 a second, however many requests they are."""
    admission = memory(10_000, 1.0, mean_duration_s=20.0)
    assert [wait(admission.refusal(n, 10_000, 1, more)) for n in (1, 8) for more in (500, 501, 2_000)] == [1, 2, 4] * 2


def test_nothing_is_refused_for_memory_when_nothing_is_open() -> None:
    admission = memory(1_000, 2.0)
    assert admission.refusal(0, 0, 64, 10**6) is None
    assert admission.refusal(1, 1, 64, 10**6) is not None
    assert places(2, 3).refusal(0, 0, 6, 1) is not None  # but for places it is


def test_the_client_is_told_the_numbers() -> None:
    admission = Admission(16, 48, 8_192, 8.0)
    refusals = [admission.refusal(62, 100, 3, 100), admission.refusal(20, 64_000, 1, 2_100)]
    assert [refusal and refusal.reason for refusal in refusals] == [
        "62 requests are running or waiting; 3 more exceed 64",
        "admitted requests may need 64,000 tokens of KV memory; 2,100 more exceed 8 × 8,192",
    ]
    half = Admission(16, 48, 8_192, 2.5).refusal(1, 20_000, 1, 1_000)
    assert half is not None
    assert half.reason.endswith("exceed 2.5 × 8,192")


def test_of_two_limits_the_one_that_takes_longer_is_told() -> None:
    """Four open requests of 100 tokens, 40 s each: a place every 10 s, a token every 0.1 s."""
    admission = Admission(4, 0, 400, 1.0, mean_duration_s=40.0)
    for more_tokens, retry_after, word in ((50, 10, "running"), (150, 15, "memory"), (100, 10, "running")):
        refusal = admission.refusal(4, 400, 1, more_tokens)
        assert refusal is not None
        assert refusal.retry_after == retry_after
        assert word in refusal.reason


def test_retry_after_stays_within_a_minute() -> None:
    admission = places(1, 0)
    admission.finished(10_000.0)
    assert wait(admission.refusal(1, 0, 1, 0)) == 60
    assert wait(memory(1, 1.0, mean_duration_s=10_000.0).refusal(1, 1, 1, 1)) == 60


def test_the_mean_duration_follows_what_finishes() -> None:
    admission = places(1, 0)
    for duration, mean in ((10.0, 10.0), (20.0, 11.0), (1.0, 10.0)):
        admission.finished(duration)
        assert abs(admission.mean_duration_s - mean) < 1e-9


ADMISSIONS = st.builds(
    Admission,
    st.integers(1, 64),
    st.integers(0, 64),
    st.integers(1, 10_000),
    st.floats(1.0, 16.0),
    st.floats(0.0, 1e4),
)
LOADS = st.tuples(st.integers(0, 200), st.integers(0, 200_000), st.integers(1, 200), st.integers(1, 200_000))
Load = tuple[int, int, int, int]


@given(ADMISSIONS, LOADS)
@settings(max_examples=500, deadline=None)
def test_refused_is_what_exceeds_a_limit_and_only_that(admission: Admission, load: Load) -> None:
    open_requests, open_tokens, more, more_tokens = load
    too_many = open_requests + more > admission.max_running + admission.max_waiting
    too_large = open_requests > 0 and open_tokens + more_tokens > admission.max_demand * admission.kv_tokens
    refusal = admission.refusal(*load)
    assert (refusal is not None) == (too_many or too_large)
    if refusal is not None:
        assert 1 <= refusal.retry_after <= 60
        told = (open_requests, more) if "running" in refusal.reason else (open_tokens, more_tokens)
        assert all(f"{number:,}" in refusal.reason for number in told)


@given(ADMISSIONS, LOADS, st.integers(0, 200), st.integers(0, 200_000))
@settings(max_examples=500, deadline=None)
def test_who_asks_for_more_is_not_taken_sooner(admission: Admission, load: Load, requests: int, tokens: int) -> None:
    open_requests, open_tokens, more, more_tokens = load
    less = admission.refusal(*load)
    greater = admission.refusal(open_requests, open_tokens, more + requests, more_tokens + tokens)
    if less is not None:
        assert greater is not None
        assert greater.retry_after >= less.retry_after


@given(ADMISSIONS, LOADS, st.integers(0, 200), st.integers(0, 200_000))
@settings(max_examples=500, deadline=None)
def test_a_fuller_engine_takes_no_more(admission: Admission, load: Load, requests: int, tokens: int) -> None:
    open_requests, open_tokens, more, more_tokens = load
    if admission.refusal(*load) is not None:
        assert admission.refusal(open_requests + requests, open_tokens + tokens, more, more_tokens) is not None


@given(ADMISSIONS, LOADS, st.floats(0.0, 1e4))
@settings(max_examples=500, deadline=None)
def test_slower_requests_mean_a_longer_wait(admission: Admission, load: Load, longer: float) -> None:
    before = wait(admission.refusal(*load))
    admission.mean_duration_s += longer
    after = wait(admission.refusal(*load))
    assert (before is None) == (after is None)
    assert before is None or after is None or after >= before
