"""Estimates how much sooner each request came than with plain decoding.

The engine tells of a step up to a quarter of a second after it, so a request's estimate comes after the request's end.
"""

from array import array
from collections import deque
from collections.abc import Sequence

from app.page.recent_requests import KeptRequest
from engine.types import StepStats

MAX_STEPS = 20_000  # the latest steps whose figures are kept: 12 bytes each
MAX_WAITING = 200  # requests whose last steps have not been told yet


class RequestSpeedups:
    """Fills in `speedup` of kept requests: time of plain decoding for their tokens over the time of their rounds.

    Rounds of steps that also read prompts are left out of both: reading costs the same either way.
    """

    def __init__(self) -> None:
        self.settled = 0  # number of requests whose estimate was made so far
        self._steps = array("q", [-1]) * MAX_STEPS  # number of the step that each slot holds
        self._plain_us = array("f", [0.0]) * MAX_STEPS  # of plain decoding, per token of each sequence in the step
        self._latest = -1  # number of the latest step
        self._waiting: deque[KeptRequest] = deque(maxlen=MAX_WAITING)

    def add(self, kept: KeptRequest) -> None:
        """Take a request that has ended. Its estimate is made when its last step is told."""
        if kept.rounds:
            self._waiting.append(kept)

    def stepped(self, steps: Sequence[StepStats]) -> None:
        for step in steps:
            self._note(step)
        self._latest = max(self._latest, *(step.step for step in steps)) if steps else self._latest
        waiting, self._waiting = self._waiting, deque(maxlen=MAX_WAITING)
        for kept in waiting:
            if kept.last_step > self._latest:
                self._waiting.append(kept)
            else:
                kept.row["speedup"] = self._speedup(kept)
                self.settled += 1

    def _note(self, step: StepStats) -> None:
        """plain_us is for all tokens of the step, which plain decoding would emit one per sequence at a time."""
        if step.decode_only and step.emitted:
            slot = step.step % MAX_STEPS
            self._steps[slot] = step.step
            self._plain_us[slot] = step.plain_us * len(step.parts) / step.emitted

    def _speedup(self, kept: KeptRequest) -> float | None:
        """Return None without a round that only decoded."""
        plain_us = took_us = 0.0
        for columns in kept.columns:
            times = zip(columns["draft_us"], columns["verify_us"], columns["overhead_us"], strict=True)
            for step, emitted, spent in zip(columns["step"], columns["emitted"], times, strict=True):
                slot = step % MAX_STEPS
                if self._steps[slot] == step:
                    plain_us += emitted * self._plain_us[slot]
                    took_us += sum(spent)
        return round(plain_us / took_us, 3) if took_us else None
