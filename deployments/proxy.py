"""The middleware around Serve's HTTP proxy: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.proxy:middlewares."""

import os

from starlette.middleware import Middleware

from app.proxy import CleanHeaders, Draining, ErrorShape, HiddenPaths

DRAIN_TOKEN = "FORETOKEN_DRAIN_TOKEN"  # environment variable with the token that a drain command must carry


def middlewares() -> list[Middleware]:
    """Return the middleware; Serve calls this in the proxy's process. The last one sees a request first."""
    token = os.environ.get(DRAIN_TOKEN)
    return [
        Middleware(ErrorShape),
        Middleware(HiddenPaths),
        Middleware(Draining, token=token),
        Middleware(CleanHeaders),
    ]
