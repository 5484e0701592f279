"""Requests from web pages of other origins (CORS). Refused by browsers, unless the operator names the origins."""

import re
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

ANY = "*"
# Scheme, host and perhaps port, as browsers send them (RFC 6454): in small letters. Apps and extensions have schemes of
# their own, such as tauri://localhost.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
EXPOSED = ("x-request-id", "retry-after", "x-should-retry")  # headers of replies that pages may read
MAX_AGE_S = 600  # for which a browser remembers the answer to OPTIONS


def check_origins(origins: Sequence[str]) -> None:
    """Raise ValueError for a text that is no origin: no browser would ever send it."""
    for origin in origins:
        if origin != ANY and not ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin: give {ANY!r}, or scheme://host or scheme://host:port")


def cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that answers OPTIONS and lets pages of these origins read replies; nothing for none.

    It stands in front of the check of keys: browsers send OPTIONS without them. Pages send their key in a header, so no
    cookies or other credentials are allowed.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=(ANY,),
            expose_headers=EXPOSED,
            max_age=MAX_AGE_S,
        )
    ]
