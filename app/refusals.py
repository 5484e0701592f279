"""Why a request was refused: one line in the log, with its id, and never a part of a prompt."""

import logging

from starlette.datastructures import Headers
from starlette.types import Scope

MAX_SHOWN = 200  # characters of what a client sent, such as a path
SILENT_CODES = ("chat_template_error",)  # codes of refusals whose message may hold a part of the chat

log = logging.getLogger(__name__)


def log_refusal(scope: Scope, status: int, message: str, code: str | None) -> None:
    """Log why a request gets an error. Its id is the reply's x-request-id."""
    given = Headers(scope=scope).get("x-request-id")
    reason = code if code in SILENT_CODES else printable(message)
    path = printable(scope["path"])
    log.info("%s %d %s %s: %s", given or scope["state"]["request_id"], status, scope["method"], path, reason)


def printable(text: str) -> str:
    """The beginning of what a client sent, on one line."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:MAX_SHOWN])
    return shown + ("…" if len(text) > MAX_SHOWN else "")
