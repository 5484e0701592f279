"""Times the parts of a round by the device that does the work.

On a CPU the work is done when a call returns, so the host's clock tells. On CUDA a call only queues the work, and by
the host's clock drafts would seem to cost nothing. There the marks between the parts are events in the device's stream.
They are read once the round has waited for the device: its download of the verdict comes behind all of them.
"""

from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import NamedTuple

import torch

QUEUES = ("cuda",)  # types of devices on which calls return before their work is done
HostClock = Callable[[], int]  # gives nanoseconds
Mark = int | torch.cuda.Event  # nanoseconds of the host's clock, or an event in the device's stream


class Forward(NamedTuple):
    """A forward of a model: where it begins and ends, and the tokens that it reads."""

    begin: Mark
    end: Mark
    tokens: int


class RoundClock:
    """Times one round. It begins when the clock is made, on a device that has done all that was asked of it before."""

    def __init__(self, device: torch.device, host_ns: HostClock | None = None) -> None:
        """host_ns: the host's clock; None: the time that passes."""
        self._device = device
        self._host_ns = perf_counter_ns if host_ns is None else host_ns
        self._began_ns = self._host_ns()
        self._began = self._mark()
        self._drafted = self._began

    def mark_drafted(self) -> None:
        """The drafters have asked the device for all their work."""
        self._drafted = self._mark()

    def stop(self, *, downloaded: bool) -> tuple[int, int]:
        """(microseconds of the drafts, microseconds of the rest). downloaded: whether the round has waited for the
        device by a download. A round without one, such as a chunk of a prompt, waits here: its time and its faults
        would appear in the next round otherwise."""
        if not downloaded:
            wait(self._device)
        whole_ns = self._host_ns() - self._began_ns
        draft_ns = min(whole_ns, elapsed_ns(self._began, self._drafted))  # an event rounds to half a microsecond
        return draft_ns // 1000, (whole_ns - draft_ns) // 1000

    def _mark(self) -> Mark:
        return mark(self._device) if self._device.type in QUEUES else self._host_ns()


def mark(device: torch.device) -> Mark:
    """The point in the device's work behind all calls so far."""
    if device.type not in QUEUES:
        return perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device.index))  # given a device, torch looks it up
    return event


def wait(device: torch.device) -> None:
    """Return when the device has done all that was asked of it."""
    if device.type in QUEUES:
        torch.cuda.current_stream(device).synchronize()


def elapsed_ns(begin: Mark, end: Mark) -> int:
    """Nanoseconds between two marks of one device. The device must have passed both."""
    if isinstance(begin, int):
        assert isinstance(end, int), "the marks are of one clock"
        return end - begin
    assert not isinstance(end, int), "the marks are of one clock"
    return round(1e6 * begin.elapsed_time(end))


def forwards_us(forwards: Iterable[Forward]) -> int:
    """Microseconds of these forwards together. The device must have done them."""
    return sum([elapsed_ns(begin, end) for begin, end, _ in forwards]) // 1000
