"""What an operator reads: the log in short lines, and the lines of other processes."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from deployments.console import PACKAGES, WorkerLines, show_logs


@pytest.fixture
def _own_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("_own_loggers")
def test_a_line_is_short_and_has_its_level_from_warnings_on(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", console)
    show_logs(logging.StreamHandler(file))
    log = logging.getLogger("engine.loading.load")
    log.info("read in %.1f s", 0.25)
    log.debug("unseen")
    log.warning("%s is odd", "this")
    assert console.getvalue() == "foretoken: read in 0.2 s\nforetoken: warning: this is odd\n"
    assert file.getvalue() == "read in 0.2 s\nthis is odd\n"


def test_the_first_replicas_lines_stand_alone_and_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = WorkerLines()
    lines.show({"pid": 5, "lines": ["Fatal: out of stack"], "actor_name": "Controller"})
    lines.show({"pid": 7, "lines": ["foretoken: memory:", "  cpu  8 MiB"]})
    lines.show({"pid": 8, "lines": ["foretoken: memory:"], "actor_name": "ServeReplica:a:Replica"})
    lines.show({"pid": "autoscaler", "lines": ["Resources"]})
    lines.show({"pid": 7, "lines": ["foretoken: policy: off"]})
    assert capsys.readouterr().out.splitlines() == [
        "Controller 5: Fatal: out of stack",
        "foretoken: memory:",
        "  cpu  8 MiB",
        "ServeReplica:a:Replica 8: foretoken: memory:",
        "foretoken: policy: off",
    ]
