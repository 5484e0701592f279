"""The live page's event stream. One task makes the events for all viewers; without viewers nothing is computed."""

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
QUIET_EVENTS = 4  # while nothing changes, one event in this many is sent
MAX_VIEWERS = 8  # each viewer takes one of the requests that Serve allows per replica
FEED_S = 60.0  # then the stream ends and the viewer connects again: a server that shuts down waits for connections
SLOW_VIEWER_S = 10.0  # additional time for a viewer that does not read

log = logging.getLogger(__name__)


class EventFeed:
    """Makes the events for all viewers in one task, which runs only while there are viewers."""

    def __init__(self, live_page: LivePage) -> None:
        self._live_page = live_page
        self._viewers = 0
        self._ticker: asyncio.Task[None] | None = None
        self._event = b""
        self._next_event = asyncio.Event()  # set when the next event is made, and then replaced

    async def follow(self) -> AsyncGenerator[bytes]:
        """Yield the whole state, then each event as it is made, for FEED_S. A slow viewer misses some events."""
        self._viewers += 1
        deadline = time.monotonic() + FEED_S
        try:
            if self._ticker is None:
                self._make_event()
                self._ticker = asyncio.create_task(self._tick())
            yield stream.event({"state": self._live_page.state()})
            while time.monotonic() < deadline:
                next_event = self._next_event
                yield self._event
                await next_event.wait()
        finally:
            self._viewers -= 1
            if not self._viewers and self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None

    def _make_event(self) -> None:
        self._event = stream.event(self._live_page.event())
        made, self._next_event = self._next_event, asyncio.Event()
        made.set()

    async def _tick(self) -> None:
        version, quiet = self._live_page.version, 0
        while True:
            await asyncio.sleep(EVENT_EVERY_S)
            quiet = 0 if version != self._live_page.version else quiet + 1
            version = self._live_page.version
            if quiet % QUIET_EVENTS == 0:
                try:
                    self._make_event()
                except Exception:  # the viewers wait for the next event
                    log.exception("making an event for the live page failed")


class EventsEndpoint:
    """GET /ui/events as a bare ASGI application, so that it ends as soon as the viewer leaves."""

    def __init__(self, live_page: LivePage, headers: Mapping[str, str]) -> None:
        """headers: further headers of the reply, beside the usual ones of an event stream."""
        self.viewers = 0  # includes viewers whose request is still being read
        self._feed = EventFeed(live_page)
        page_headers = {name.encode(): value.encode() for name, value in headers.items()}
        self._headers = list((dict(stream.HEADERS) | page_headers).items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers follow this server already; try again later", retry_after=10)
        self.viewers += 1
        try:
            # The timeout also ends a viewer that neither reads nor disconnects.
            with suppress(ClientDisconnect, TimeoutError):
                async with asyncio.timeout(FEED_S + SLOW_VIEWER_S):
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
