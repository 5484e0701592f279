"""Pauses between pieces of long work on the event loop, so that streams and the engine thread are not held up."""

import asyncio
import time

PIECE_TOKENS = 128  # log-probabilities that are written or encoded without a pause: a few milliseconds of work


class Pauses:
    """Rests between two pieces of work for as long as the last piece took.

    `asyncio.sleep(0)` is not enough. The engine thread shares the interpreter lock: while the event loop computes, the
    engine thread waits 5 ms each time that one of its operations returns.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def rest(self) -> None:
        await asyncio.sleep(time.perf_counter() - self._began)
        self._began = time.perf_counter()
