"""Long work on the event loop, in pieces: streams and the engine's thread go on meanwhile."""

import asyncio
import time

PIECE = 128  # tokens whose log-probabilities are written down or encoded at a time: a few milliseconds


class Pauses:
    """Between two pieces of work rests for as long as the last one took.

    A turn for other tasks would not do: the engine's thread shares the interpreter, and whenever one of its operations
    returns it waits for a thread that computes, 5 ms each time.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def rest(self) -> None:
        await asyncio.sleep(time.perf_counter() - self._began)
        self._began = time.perf_counter()
