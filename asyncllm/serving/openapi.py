"""The description of the application, for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncllm import __version__
from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.request_body import RequestBody
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.tokenization import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_BODIES = (ChatRequest, CompletionRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest)

_ERRORS = {
    400: "A request that cannot be served as it is; ``param`` names the field.",
    401: "No token, or a wrong one.",
    403: "A page of another origin, or a host that is not this one.",
    404: "A model or a response that is not here.",
    408: "A body that did not come in time.",
    413: "A body that is too long, or holds too many values.",
    422: "A request that was well-formed and could not be carried out.",
    429: "The queue is full; ``Retry-After`` says when a place is likely.",
    500: "A failure of the server's own.",
    503: "The engine is not running, or is about to close.",
    504: "The answer took longer than the server allows.",
}


def openapi(*, needs_token: bool) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        needs_token: clients have to send a bearer token.
    """
    schemas = dict(_SCHEMAS)
    for body in (
        ChatRequest,
        CompletionRequest,
        ResponseRequest,
        TokenizeRequest,
        DetokenizeRequest,
    ):
        schema = body.openapi_schema(_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "asyncllm", "version": __version__},
        "paths": _paths(),
        "components": {"schemas": schemas},
    }
    if needs_token:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return described


def _paths() -> dict[str, Any]:
    response_id = {"name": "response_id", "in": "path", "required": True, "schema": _TEXT}
    model = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    state = _answer("HealthState")
    health = {"get": {**_operation("Whether requests are taken.", state, ()), "security": []}}
    health["get"]["responses"]["503"] = {**state, "description": "Not now."}
    return {
        "/v1/chat/completions": {
            "post": _posted("A chat completion.", ChatRequest, "ChatCompletion", streams=True)
        },
        "/v1/completions": {
            "post": _posted("A completion.", CompletionRequest, "Completion", streams=True)
        },
        "/v1/responses": {
            "post": _posted("A response.", ResponseRequest, "Response", streams=True)
        },
        "/v1/responses/{response_id}": {
            "parameters": [response_id],
            "get": _operation("A stored response.", _answer("Response"), (404,)),
            "delete": _operation("Forgets a response.", _answer("DeletedResponse"), (404,)),
        },
        "/tokenize": {"post": _posted("Token ids of a text.", TokenizeRequest, "Tokens")},
        "/detokenize": {"post": _posted("The text of token ids.", DetokenizeRequest, "Text")},
        "/v1/models": {"get": _operation("The models.", _answer("ModelList"), ())},
        "/v1/models/{model}": {
            "parameters": [model],
            "get": _operation("A model.", _answer("Model"), (404,)),
        },
        "/health": health,
        "/health/ready": health,
        "/health/live": health,
        "/metrics": {
            "get": _operation("Metrics, for Prometheus.", {"content": {"text/plain": {}}}, ())
        },
    }


def _posted(
    summary: str, body: type[RequestBody], answer: str, *, streams: bool = False
) -> dict[str, Any]:
    found = _answer(answer)
    if streams:
        found["content"]["text/event-stream"] = {"schema": _EVENT}
    errors = (400, 404, 408, 413, 422, 429, 504)
    return {
        **_operation(summary, found, errors),
        "requestBody": {"required": True, "content": _json(body.__name__)},
    }


def _operation(summary: str, answer: dict[str, Any], errors: Iterable[int]) -> dict[str, Any]:
    statuses = sorted({*errors, 400, 401, 403, 500, 503})
    refusals = {
        str(status): {"description": _ERRORS[status], "content": _json("Error")}
        for status in statuses
    }
    return {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", **answer}, **refusals},
    }


def _answer(name: str) -> dict[str, Any]:
    return {"content": _json(name)}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}


def _object(optional: Iterable[str] = (), **properties: Any) -> dict[str, Any]:
    """An object that has these properties, and may have others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _enum(*values: Any) -> dict[str, Any]:
    return {"enum": [*values]}


_TEXT = {"type": "string"}
# Before OpenAPI 3.2 the schema of a stream of events describes each of them.
_EVENT = {
    "type": "object",
    "description": "An event, whose data is JSON; the last one of completions is [DONE].",
    "properties": {"event": _TEXT, "data": _TEXT},
    "required": ["data"],
}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_REASON = _enum("stop", "length", "tool_calls")
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_LOGPROB = _object(token=_TEXT, logprob=_NUMBER, bytes=_list(_COUNT))
_TOKEN_LOGPROB = {
    **_LOGPROB,
    "properties": {**_LOGPROB["properties"], "top_logprobs": _list(_LOGPROB)},
    "required": [*_LOGPROB["required"], "top_logprobs"],
}
_CALL = _object(id=_TEXT, type=_enum("function"), function=_object(name=_TEXT, arguments=_TEXT))
_CHAT_CHOICE = _object(
    index=_COUNT,
    message=_object(
        ("reasoning_content", "tool_calls"),
        role=_enum("assistant"),
        content=_or_null(_TEXT),
        reasoning_content=_TEXT,
        tool_calls=_list(_CALL),
    ),
    logprobs=_or_null(_object(content=_list(_TOKEN_LOGPROB))),
    finish_reason=_REASON,
)
_LEGACY_LOGPROBS = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list(_or_null(_NUMBER)),
    top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=_list(_COUNT),
)
_MODEL = _object(id=_TEXT, object=_enum("model"), created=_COUNT, owned_by=_TEXT)
_ITEM = _object(
    id=_TEXT,
    type=_enum("message", "reasoning", "function_call"),
    status=_enum("in_progress", "completed", "incomplete"),
)
_SCHEMAS: dict[str, Any] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_TEXT)),
    "ChatCompletion": _object(
        id=_TEXT,
        object=_enum("chat.completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(_CHAT_CHOICE),
        usage=_USAGE,
    ),
    "Completion": _object(
        id=_TEXT,
        object=_enum("text_completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(
                index=_COUNT,
                text=_TEXT,
                logprobs=_or_null(_LEGACY_LOGPROBS),
                finish_reason=_REASON,
            )
        ),
        usage=_USAGE,
    ),
    "Response": _object(
        id=_TEXT,
        object=_enum("response"),
        created_at=_NUMBER,
        status=_enum("completed", "incomplete"),
        model=_TEXT,
        output=_list(_ITEM),
        usage=_or_null(_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT)),
    ),
    "DeletedResponse": _object(id=_TEXT, object=_enum("response"), deleted=_enum(True)),
    "Model": _MODEL,
    "ModelList": _object(object=_enum("list"), data=_list(_MODEL)),
    "HealthState": _object(
        status=_enum("new", "starting", "running", "dead", "closed"),
        live={"type": "boolean"},
        ready={"type": "boolean"},
    ),
    "Tokens": _object(count=_COUNT, tokens=_list(_COUNT), token_strs=_or_null(_list(_TEXT))),
    "Text": _object(prompt=_TEXT),
}
"""Of answers. They are made by the writers, which pydantic has no part in."""
