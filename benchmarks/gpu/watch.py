"""Lets a step fail where its engines met a fault and went on.

The engine repeats a round without drafts if its drafter fails, and runs a part of a round as it is if it cannot be
captured. The texts stay right, so nothing else of a step would tell.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.gpu.steps import Recorder
from engine.engine import Engine, StepResult

WATCHED = ("engine", "cache", "policies")  # loggers
MOST_TOLD = 5


def watching(run: Callable[[Recorder], None], recorder: Recorder) -> None:
    """Run a step. Raises RuntimeError at its end if a drafter or a round failed, or if there was a warning: a capture
    that fails gives one."""
    with _watched() as found:
        run(recorder)
    recorder.at_most("faults after which an engine went on", len(found), 0)
    for number, fault in enumerate(found[:MOST_TOLD], 1):
        recorder.note(f"fault {number}", fault)
    if found:
        raise RuntimeError(f"{len(found)} faults: {found[0]}")


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Fills with the faults of all engines of this process."""
    found: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record).strip().replace("\n", " "))

    step = Engine.step

    def stepping(engine: Engine) -> StepResult:
        result = step(engine)
        found.extend(["a drafter failed"] * result.stats.draft_faults)
        if result.stats.failed:
            found.append("a round failed")
        return result

    keeper = Keeper(logging.WARNING)
    loggers = [logging.getLogger(name) for name in WATCHED]
    for logger in loggers:
        logger.addHandler(keeper)
    try:
        with patch.object(Engine, "step", stepping):
            yield found
    finally:
        for logger in loggers:
            logger.removeHandler(keeper)
