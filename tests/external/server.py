"""A real server of this process, on a port of the loopback interface."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from app.client import EngineClient
from app.keys import ApiKeys
from app.main import create_app
from app.page.live import LivePage
from app.telemetry.exchange import Listener


@contextmanager
def serving(
    client: EngineClient,
    keys: ApiKeys | None = None,
    port: int = 0,
    around: Callable[[ASGIApp], ASGIApp] | None = None,
    *,
    listeners: Sequence[Listener] = (),
    trace_viewer_url: str | None = None,
) -> Iterator[str]:
    """The server's URL; it ends with the block. `around`: what stands between the network and the application."""
    live_page = LivePage(client, trace_viewer_url=trace_viewer_url)
    app: ASGIApp = create_app(client, listeners, live_page=live_page, keys=keys)
    app = around(app) if around is not None else app
    config = uvicorn.Config(app, port=port, log_level="warning", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
