"""How much of a large checkpoint has been read is told every two seconds; a small one gets no line."""

import pytest

from engine.models import progress
from engine.models.progress import Progress


def test_shares_are_told_at_intervals_and_never_all_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = iter([0.0, 1.0, 2.5, 3.0, 5.0, 9.0])
    monkeypatch.setattr(progress, "perf_counter", lambda: next(now))
    caplog.set_level("INFO", "engine")
    counted = Progress("/m", 10 * 2**30)
    for gib in (1, 3, 1, 2, 3):
        counted.add(gib * 2**30)
    assert caplog.messages == ["/m: 40 % of 10.00 GiB are read (2 s)", "/m: 70 % of 10.00 GiB are read (5 s)"]
