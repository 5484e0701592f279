from policies.admission import Admission


def test_the_limit_is_running_plus_waiting() -> None:
    admission = Admission(max_running=2, max_waiting=3)
    assert [admission.refusal(n) is None for n in (0, 4, 5, 6)] == [True, True, False, False]


def test_several_are_taken_together_or_not_at_all() -> None:
    admission = Admission(max_running=2, max_waiting=3)
    assert [admission.refusal(2, more) is None for more in (1, 3, 4)] == [True, True, False]
    for _ in range(100):
        admission.finished(8.0)
    assert [admission.refusal(4, more) for more in (2, 3)] == [2, 4]  # places that must come free, 2 s each


def test_retry_after_is_the_time_until_a_place_is_free() -> None:
    admission = Admission(max_running=2, max_waiting=0)
    assert admission.refusal(2) == 1  # nothing is known yet
    for _ in range(100):
        admission.finished(9.0)
    assert admission.refusal(2) == 5  # two open requests of 9 s each: one ends every 4.5 s


def test_requests_that_wait_do_not_lengthen_the_wait_for_a_place() -> None:
    """A request's 12 s contain its waiting, so six open ones end one every 2 s, however few run at once."""
    admission = Admission(max_running=2, max_waiting=4)
    for _ in range(100):
        admission.finished(12.0)
    assert admission.refusal(6) == 2


def test_retry_after_stays_within_a_minute() -> None:
    admission = Admission(max_running=1, max_waiting=0)
    admission.finished(10_000.0)
    assert admission.refusal(1) == 60
