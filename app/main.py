"""The HTTP edge: create_app is its table of contents."""

from collections.abc import Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from app import routes
from app.client import EngineClient
from app.errors import HANDLERS
from app.health import health
from app.middleware import BodyLimit, LastResort, RequestId
from app.telemetry import Listener, Telemetry

MAX_BODY_BYTES = 2 * 2**20


def create_app(
    client: EngineClient, listeners: Sequence[Listener] = (), *, max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """The application over any engine: a replica's own, a remote one, or the fake. listeners: see app/telemetry.py."""
    telemetry = Telemetry(client, listeners)
    app = Starlette(
        routes=[
            Route("/", partial(routes.index, client)),
            Route("/health", partial(health, client)),
            Route("/v1/models", partial(routes.list_models, client)),
            Route("/v1/models/{id:path}", partial(routes.get_model, client)),
            Route("/v1/completions", routes.Completions(client, telemetry), methods=["POST"]),
        ],
        middleware=[
            Middleware(RequestId),
            Middleware(LastResort),
            Middleware(BodyLimit, max_bytes=max_body_bytes),
        ],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False  # a redirect would be built from the Host header, which is the client's word
    return app
