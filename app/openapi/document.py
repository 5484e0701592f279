"""/openapi.json, from the schemas that validate requests, and from the table of errors."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from app.errors import INTERNAL, KINDS
from app.openai import chat, request, tokens
from app.openai.replies import JSON
from app.openapi import replies
from app.telemetry.names import SCOPE, VERSION

KEY_STATUS = 401
REF = "#/components/schemas/{model}"

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestSchema:
    """A request body: the model that validates it, and the fields beside it."""

    model: type[Any]
    inert: Set[str] = frozenset()
    neutral: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    reply: type[Any] | None  # of status 200; None: text
    bodies: tuple[RequestSchema, ...] = ()  # a request has one of them
    statuses: tuple[int, ...] = ()  # of errors, besides those of every operation
    chunk: type[Any] | None = None  # what the events of a stream hold; None: there are no streams
    media: str = "application/json"  # of the reply
    failed: type[Any] = replies.ErrorReply  # the reply with these statuses


EVERY_KIND = tuple(sorted({kind.status for kind in KINDS.values()}))
TOKENIZE = (400, 404, 408, 413, 429, 503)

OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "the next message of a chat, whole or streamed",
        replies.ChatCompletion,
        (RequestSchema(chat.ChatBody, chat.INERT, chat.NEUTRAL),),
        EVERY_KIND,
        chunk=replies.ChatChunk,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "text completions, whole or streamed",
        replies.TextCompletion,
        (RequestSchema(request.Body, request.INERT, request.NEUTRAL),),
        EVERY_KIND,
        chunk=replies.CompletionChunk,
    ),
    Operation("GET", "/v1/models", "the model of this server, with its limits and defaults", replies.ModelList),
    Operation("GET", "/v1/models/{id}", "one model by its name", replies.ModelObject, statuses=(404,)),
    Operation(
        "POST",
        "/tokenize",
        "the token ids of a text or a chat",
        replies.TokenIds,
        (
            RequestSchema(tokens.TokenizeText, neutral=tokens.NEUTRAL),
            RequestSchema(tokens.TokenizeChat, neutral=tokens.NEUTRAL),
        ),
        TOKENIZE,
    ),
    Operation(
        "POST",
        "/detokenize",
        "the text of token ids",
        replies.DetokenizedText,
        (RequestSchema(tokens.Detokenize),),
        (400, 404, 408, 413),
    ),
    Operation("GET", "/tokenizer_info", "special tokens and the chat template", replies.TokenizerInfo),
    Operation("GET", "/version", "the version of this server", replies.Version),
    Operation(
        "GET", "/health", "whether the engine makes progress", replies.Health, statuses=(503,), failed=replies.Health
    ),
    Operation("GET", "/metrics", "this replica's metrics, for Prometheus", None, media="text/plain"),
    Operation("GET", "/openapi.json", "the description of this server", dict[str, Any]),
    Operation("GET", "/", "the paths of this server", replies.PathIndex),
)


def openapi_document(operations: tuple[Operation, ...], model: str, *, keys: bool) -> Schema:
    """model: the served one, which every request must name. keys: whether the server demands API keys."""
    models = [body.model for operation in operations for body in operation.bodies]
    shapes = [shape for o in operations for shape in (o.reply, o.failed, o.chunk) if shape is not None]
    adapters = [
        *((model, "validation", TypeAdapter(model)) for model in dict.fromkeys(models)),
        *((shape, "serialization", TypeAdapter(shape)) for shape in dict.fromkeys(shapes)),
    ]
    by_type, definitions = TypeAdapter.json_schemas(adapters, ref_template=REF)  # type: ignore[arg-type, type-var]
    schemas = {of: schema for (of, _), schema in by_type.items()}
    components: Schema = {"schemas": definitions["$defs"]}
    for operation in operations:
        for body in operation.bodies:
            _complete(components["schemas"][body.model.__name__], body, model)
    for name in ("SpeculationOptions", "StreamOptions", "Message"):
        _allow_nulls(components["schemas"][name])  # which the server drops here too
    paths: Schema = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas, keys=keys)
    document: Schema = {"openapi": "3.1.0", "info": {"title": SCOPE, "version": VERSION}, "paths": paths}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document | {"components": components}


def _complete(schema: Schema, body: RequestSchema, model: str) -> None:
    """Add the fields that take no effect, the model's name, and null, which means that a field is left out."""
    if "model" in schema["properties"]:
        schema["properties"]["model"] = {"const": model}
    _allow_nulls(schema)
    unsupported = {name: {"enum": [None] if value is None else [value, None]} for name, value in body.neutral.items()}
    schema["properties"] |= {name: {} for name in sorted(body.inert)} | unsupported


def _allow_nulls(schema: Schema) -> None:
    for name, of in schema["properties"].items():
        nullable = {"type": "null"} in of.get("anyOf", ())
        if name not in schema.get("required", ()) and not nullable:
            schema["properties"][name] = {"anyOf": [of, {"type": "null"}]}


def _operation(operation: Operation, schemas: Mapping[Any, Schema], *, keys: bool) -> Schema:
    shape = {"type": "string"} if operation.reply is None else schemas[operation.reply]
    content: Schema = {operation.media: {"schema": shape}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(schemas[operation.chunk])}
    failed = {"application/json": {"schema": schemas[operation.failed]}}
    error = {"application/json": {"schema": {"$ref": REF.format(model="ErrorReply")}}}
    responses: Schema = {"200": {"description": "OK", "content": content}}
    responses |= {str(status): {"description": "see the error", "content": failed} for status in operation.statuses}
    for status in (INTERNAL.status, *((KEY_STATUS,) if keys else ())):
        responses[str(status)] = {"description": "see the error", "content": error}
    said: Schema = {"summary": operation.summary, "responses": responses}
    if operation.bodies:
        bodies = [schemas[body.model] for body in operation.bodies]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{id}" in operation.path:
        named = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        said["parameters"] = [named]
    return said


def _event(chunk: Schema) -> Schema:
    """Return the schema of each event of a stream, whose data are JSON but for the last event's."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [chunk, {"$ref": REF.format(model="ErrorReply")}]},
    }
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}


class OpenApi:
    """The endpoint. The document is made at the first request."""

    def __init__(self, operations: tuple[Operation, ...], model: str, *, keys: bool) -> None:
        self._operations, self._model, self._keys = operations, model, keys
        self._document: Schema | None = None

    async def reply(self, http_request: Request) -> Response:
        if self._document is None:
            self._document = openapi_document(self._operations, self._model, keys=self._keys)
        return JSON(self._document)
