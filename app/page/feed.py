"""The live page's feed: one task makes its events for all viewers, and nothing is worked out while nobody looks."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from app.openai import stream
from app.page.live import LivePage
from engine.types import Overloaded

EVENT_EVERY_S = 0.25
QUIET_EVENTS = 4  # of which only one is sent while nothing changes
MAX_VIEWERS = 8  # each takes one of the requests that Serve lets a replica have
PATIENCE_S = 10.0  # after FEED_S, with a viewer that does not read
FEED_S = 60.0  # then a viewer comes again: a server that is to end waits for those who are connected

log = logging.getLogger(__name__)


class EventFeed:
    """One task that makes events for all viewers, and runs only while there are some."""

    def __init__(self, live: LivePage) -> None:
        self._live = live
        self._following = 0
        self._ticking: asyncio.Task[None] | None = None
        self._event = b""
        self._told = asyncio.Event()  # set, and replaced by a new one, with each event

    async def follow(self) -> AsyncGenerator[bytes]:
        """The whole state at once, and then each event as it is made, for FEED_S; a viewer that is slow misses some."""
        self._following += 1
        ends = time.monotonic() + FEED_S
        try:
            if self._ticking is None:
                self._make()
                self._ticking = asyncio.create_task(self._tick())
            yield stream.event({"state": self._live.state()})
            while time.monotonic() < ends:
                told = self._told
                yield self._event
                await told.wait()
        finally:
            self._following -= 1
            if not self._following and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    def _make(self) -> None:
        self._event = stream.event(self._live.event())
        told, self._told = self._told, asyncio.Event()
        told.set()

    async def _tick(self) -> None:
        version, quiet = self._live.version, 0
        while True:
            await asyncio.sleep(EVENT_EVERY_S)
            quiet = 0 if version != self._live.version else quiet + 1
            version = self._live.version
            if quiet % QUIET_EVENTS == 0:
                try:
                    self._make()
                except Exception:  # the viewers wait for the next
                    log.exception("no event could be made for the live page")


class Events:
    """GET /ui/events, as a bare ASGI app: its viewer's leaving ends it at once."""

    def __init__(self, live: LivePage, headers: Mapping[str, str]) -> None:
        """`headers`: of the reply, besides those of every event stream."""
        self.viewers = 0  # also those whose request is still being read
        self._feed = EventFeed(live)
        own = {name.encode(): value.encode() for name, value in headers.items()}
        self._headers = list((dict(stream.HEADERS) | own).items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers follow this server already", retry_after=10)
        self.viewers += 1
        try:
            # A viewer that neither reads nor leaves gives its place up, too.
            with suppress(ClientDisconnect, TimeoutError):
                async with asyncio.timeout(FEED_S + PATIENCE_S):
                    await Request(scope, receive).body()
                    await stream.unless_disconnected(receive, self._send(stream.oserror_to_disconnect(send)))
        finally:
            self.viewers -= 1

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async with aclosing(self._feed.follow()) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
