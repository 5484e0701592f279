"""What stands around Serve's HTTP proxy: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.proxy:middlewares."""

import os

from starlette.middleware import Middleware

from app.proxy import CleanHeaders, Draining, ErrorShape, HiddenPaths

DRAIN_TOKEN = "FORETOKEN_DRAIN_TOKEN"  # environment variable: who knows its value may drain the proxy


def middlewares() -> list[Middleware]:
    """Called by Serve in the proxy's process. Serve puts each around those before it: the last sees a request first."""
    token = os.environ.get(DRAIN_TOKEN)
    return [
        Middleware(ErrorShape),
        Middleware(HiddenPaths),
        Middleware(Draining, token=token),
        Middleware(CleanHeaders),
    ]
