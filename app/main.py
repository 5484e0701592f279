"""The HTTP edge: create_app is its table of contents."""

from collections.abc import Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from app import routes
from app.client import EngineClient
from app.cross_origin import cross_origin
from app.errors import HANDLERS
from app.health import health
from app.keys import ApiKeys, RequireKey
from app.metrics.exposition import metrics
from app.metrics.meter import Meter
from app.middleware import (
    MAX_UNFINISHED_BODIES,
    BodyDeadline,
    BodyLimit,
    DisconnectErrors,
    LastResort,
    PageForBrowsers,
    RequestId,
)
from app.openai import tokens
from app.openai.forms import CHAT, COMPLETIONS
from app.openapi.document import OPERATIONS, OpenApi
from app.page.live import LivePage
from app.page.routes import OPEN_PATHS, page_routes
from app.telemetry.exchange import Listener, Telemetry

MAX_BODY_BYTES = 2 * 2**20
BODY_TIMEOUT_S = 10.0


def create_app(
    client: EngineClient,
    listeners: Sequence[Listener] = (),
    *,
    live_page: LivePage | None = None,
    meter: Meter | None = None,
    keys: ApiKeys | None = None,
    allowed_origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    body_timeout_s: float = BODY_TIMEOUT_S,
    max_unfinished_bodies: int = MAX_UNFINISHED_BODIES,
) -> Starlette:
    """Build the application over any EngineClient: a replica's own, a remote one, or the fake.

    listeners: see app/telemetry/exchange.py. live_page and meter: the data of /ui and of /metrics, which are listeners
    too. keys: every client must send one of them; None: no key is needed. allowed_origins: whose web pages may call the
    server (cross_origin.py).
    """
    own_listeners = [listener for listener in (meter, live_page) if listener is not None]
    telemetry = Telemetry(client, (*listeners, *own_listeners))
    operations = tuple(o for o in OPERATIONS if meter is not None or o.path != "/metrics")
    paths = {f"{o.method} {o.path}": o.summary for o in operations} | (routes.PAGE if live_page is not None else {})
    app = Starlette(
        routes=[
            Route("/", partial(routes.index, client, paths)),
            Route("/openapi.json", OpenApi(operations, client.model.name, keys=keys is not None).reply),
            Route("/health", partial(health, client)),
            Route("/v1/models", partial(routes.list_models, client)),
            Route("/v1/models/{id:path}", partial(routes.get_model, client)),
            Route("/v1/completions", routes.Generate(client, telemetry, COMPLETIONS), methods=["POST"]),
            Route("/v1/chat/completions", routes.Generate(client, telemetry, CHAT), methods=["POST"]),
            Route("/tokenize", partial(tokens.tokenize, client), methods=["POST"]),
            Route("/detokenize", partial(tokens.detokenize, client), methods=["POST"]),
            Route("/tokenizer_info", partial(tokens.tokenizer_info, client)),
            Route("/version", routes.version),
            *([Route("/metrics", partial(metrics, meter))] if meter is not None else ()),
            *(page_routes(live_page) if live_page is not None else ()),
        ],
        middleware=[
            Middleware(RequestId),
            *cross_origin(allowed_origins),
            Middleware(LastResort),
            *([Middleware(PageForBrowsers)] if live_page is not None else ()),
            *([Middleware(RequireKey, keys=keys, open_paths=OPEN_PATHS)] if keys is not None else ()),
            Middleware(DisconnectErrors),
            Middleware(BodyDeadline, timeout_s=body_timeout_s, max_unfinished=max_unfinished_bodies),
            Middleware(BodyLimit, max_bytes=max_body_bytes),
        ],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False  # Starlette builds a redirect from the Host header, which any client can forge
    return app
