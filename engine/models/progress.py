"""Lines in the log about how much of a checkpoint has been read."""

import logging
from time import perf_counter

INTERVAL_S = 2.0  # between two lines; what is read sooner gets none

log = logging.getLogger(__name__)


class Progress:
    """Counts the bytes that are read of a checkpoint."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self._name = name
        self._total = num_bytes
        self._read = 0
        self._began = self._last_logged = perf_counter()

    def add(self, num_bytes: int) -> None:
        self._read += num_bytes
        now = perf_counter()
        if now - self._last_logged >= INTERVAL_S and self._read < self._total:
            self._last_logged = now
            share, gib = 100 * self._read / self._total, self._total / 2**30
            log.info("%s: %.0f %% of %.2f GiB are read (%.0f s)", self._name, share, gib, now - self._began)
