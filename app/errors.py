"""Everything that can go wrong, as OpenAI's error object: one table from exceptions to status, type and code."""

import logging
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.openai.replies import JSON
from engine.types import EngineStopped, InvalidRequest, Overloaded

log = logging.getLogger(__name__)


class ModelNotFound(Exception):
    """The request names a model that this server does not have."""

    param = "model"


class BodyTooLarge(Exception):
    """The request's body is longer than the limit."""


class BodyTimeout(Exception):
    """The request's body did not come to its end in time."""


class EngineFailure(Exception):
    """The engine could not finish the request; the message is safe to show."""


class DeadlineExceeded(Exception):
    """The request was not finished by its deadline, or within the longest time that this server gives to any."""


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
    """Status and body for an error. One that is not in the table may say anything, so its own words stay inside."""
    kind = next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), INTERNAL)
    message = "the server failed; its log has the details" if kind is INTERNAL else str(error)
    code = getattr(error, "code", None) or kind.code
    param = None if kind is INTERNAL else getattr(error, "param", None)
    return kind.status, error_object(message, kind.type, code, param)


def error_object(message: str, type: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The body of an error reply, and of an error event in a stream."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_reply(error: Exception) -> Response:
    status, body = error_body(error)
    return JSON(body, status, _headers(error))


def _headers(error: Exception) -> dict[str, str] | None:
    if isinstance(error, Overloaded):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, BodyTimeout):
        return {"connection": "close"}  # the rest of the body, should it come, is nobody's
    if isinstance(error, DeadlineExceeded):
        # OpenAI's clients repeat what ended with a status from 500 on, unless told not to: the answer would then come
        # after three deadlines.
        return {"x-should-retry": "false"}
    return None


async def on_known_error(request: Request, error: Exception) -> Response:
    return error_reply(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        message, code = f"{path} is not served here; GET / lists what is", "not_found"
    else:
        message, code = f"{path} does not take {request.method}", "method_not_allowed"
    return JSON(error_object(message, "invalid_request_error", code), error.status_code, error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while its body was being read; nobody will see this reply (499 is what logs call it)."""
    log.debug("request %s: the client left before its body was whole; %r", request.state.request_id, error.__cause__)
    return Response(status_code=499)


HANDLERS = {
    **dict.fromkeys(KINDS, on_known_error),
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
}
