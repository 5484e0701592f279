"""Turns exceptions into OpenAI's error object. One table maps each exception to its status, type and code."""

import logging
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.client import ModelCard
from app.openai.replies import JSON
from app.refusals import log_refusal
from engine.types import EngineStopped, InvalidRequest, Overloaded

log = logging.getLogger(__name__)


class ModelNotFound(Exception):
    """The request names a model that this server does not serve."""

    param = "model"


def require_model(name: str | None, card: ModelCard) -> None:
    """Raise ModelNotFound for another model's name. None names none."""
    if name is not None and name != card.name:
        raise ModelNotFound(f"the model {name!r} does not exist; this server serves {card.name!r}")


class BodyTooLarge(Exception):
    """The request body is longer than the limit."""


class BodyTimeout(Exception):
    """The request body did not arrive completely in time."""


class EngineFailure(Exception):
    """The engine could not finish the request. Clients may read the message."""


class DeadlineExceeded(Exception):
    """The request did not finish before its own deadline or the server's request_timeout_s."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    status: int
    type: str
    code: str | None = None


KINDS: dict[type[Exception], ErrorKind] = {
    InvalidRequest: ErrorKind(400, "invalid_request_error"),
    ModelNotFound: ErrorKind(404, "invalid_request_error", "model_not_found"),
    BodyTimeout: ErrorKind(408, "invalid_request_error", "request_timeout"),
    BodyTooLarge: ErrorKind(413, "invalid_request_error", "request_too_large"),
    Overloaded: ErrorKind(429, "rate_limit_error", "engine_overloaded"),
    EngineFailure: ErrorKind(500, "server_error", "engine_error"),
    EngineStopped: ErrorKind(503, "server_error", "engine_stopped"),
    DeadlineExceeded: ErrorKind(504, "server_error", "deadline_exceeded"),
}
INTERNAL = ErrorKind(500, "server_error", "internal_error")


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body for an error.

    An exception outside the table gets a fixed message, because its own text may reveal internals.
    """
    kind = next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), INTERNAL)
    message = "the server failed; its log has the details" if kind is INTERNAL else str(error)
    code = getattr(error, "code", None) or kind.code
    param = None if kind is INTERNAL else getattr(error, "param", None)
    return kind.status, error_object(message, kind.type, code, param)


def error_object(message: str, type: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error reply or of an error event in a stream."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_reply(error: Exception) -> Response:
    status, body = error_body(error)
    return JSON(body, status, _headers(error))


def _headers(error: Exception) -> dict[str, str] | None:
    if isinstance(error, Overloaded):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, BodyTimeout):
        return {"connection": "close"}  # nobody will read the rest of the body
    if isinstance(error, DeadlineExceeded):
        # OpenAI's clients retry every status from 500 on unless this header forbids it. The error would then reach the
        # caller only after three deadlines.
        return {"x-should-retry": "false"}
    return None


async def on_known_error(request: Request, error: Exception) -> Response:
    status, body = error_body(error)
    log_refusal(request.scope, status, body["error"]["message"], body["error"]["code"])
    return error_reply(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer what Starlette itself refuses: an unknown path, or a method that the path does not accept."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        message, code = f"the path {path} does not exist; GET / lists the paths of this server", "not_found"
    else:
        message, code = f"{path} does not accept {request.method}", "method_not_allowed"
    log_refusal(request.scope, error.status_code, code, code)
    return JSON(error_object(message, "invalid_request_error", code), error.status_code, error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while the server read its body. Nobody sees this reply; access logs show the status 499."""
    log.debug("request %s: the client left before its body was complete: %r", request.state.request_id, error.__cause__)
    return Response(status_code=499)


HANDLERS = {
    **dict.fromkeys(KINDS, on_known_error),
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
}
