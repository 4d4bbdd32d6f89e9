"""openapi: the application's OpenAPI description, for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from asyncllm import __version__
from asyncllm.serving.answers import (
    ChatCompletion,
    Completion,
    DeletedResponse,
    DetokenizeResponse,
    ErrorResponse,
    HealthState,
    Model,
    ModelList,
    Response,
    ServerSentEvent,
    TokenizeResponse,
)
from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.request_body import RequestBody
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.tokenization import DetokenizeRequest, TokenizeRequest

_REF_TEMPLATE = "#/components/schemas/{model}"
_BODY_TYPES = (ChatRequest, CompletionRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest)
_ANSWER_TYPES: tuple[Any, ...] = (
    ChatCompletion, Completion, Response, DeletedResponse, TokenizeResponse, DetokenizeResponse,
    ModelList, Model, HealthState, ErrorResponse, ServerSentEvent,
)  # fmt: skip

_ERROR_DESCRIPTIONS = {
    400: "A request that cannot be served as it is; ``param`` names the field.",
    401: "No token, or a wrong one.",
    403: "A page of another origin, or a host that is not this one.",
    404: "A model or a response that is not here.",
    408: "A body that did not come in time.",
    413: "A body that is too long, or holds too many values.",
    415: "A body with a Content-Encoding.",
    422: "A request that was well-formed and could not be carried out.",
    429: "The queue is full; ``Retry-After`` says when a place is likely.",
    500: "A failure of the server's own.",
    503: "The engine is not running, or is about to close.",
    504: "The answer took longer than the server allows.",
}


def openapi(*, needs_bearer_token: bool) -> dict[str, Any]:
    """OpenAPI 3.1 description of the application.

    Args:
        needs_bearer_token: whether clients have to send a bearer token.
    """
    schemas: dict[str, Any] = {}
    by_name = {body.__name__: body.openapi_schema(_REF_TEMPLATE) for body in _BODY_TYPES}
    for answer in _ANSWER_TYPES:
        by_name[answer.__name__] = TypeAdapter(answer).json_schema(ref_template=_REF_TEMPLATE)
    for name, schema in by_name.items():
        schemas.update(schema.pop("$defs", {}))
        schemas[name] = schema
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "asyncllm", "version": __version__},
        "paths": _describe_paths(),
        "components": {"schemas": schemas},
    }
    if needs_bearer_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _describe_paths() -> dict[str, Any]:
    state = _json_content(HealthState)
    health = {"get": {**_describe_operation("Whether requests are taken.", state), "security": []}}
    health["get"]["responses"]["503"] = {**state, "description": "Not now."}
    metrics = {"content": {"text/plain": {}}}
    return {
        "/v1/chat/completions": _describe_post(
            "A chat completion.", ChatRequest, ChatCompletion, ServerSentEvent
        ),
        "/v1/completions": _describe_post(
            "A completion.", CompletionRequest, Completion, ServerSentEvent
        ),
        "/v1/responses": _describe_post("A response.", ResponseRequest, Response, ServerSentEvent),
        "/v1/responses/{response_id}": {
            "parameters": [_path_parameter("response_id")],
            "get": _describe_operation("A stored response.", _json_content(Response), (404,)),
            "delete": _describe_operation(
                "Forgets a response.", _json_content(DeletedResponse), (404,)
            ),
        },
        "/tokenize": _describe_post("Token ids of a text.", TokenizeRequest, TokenizeResponse),
        "/detokenize": _describe_post(
            "The text of token ids.", DetokenizeRequest, DetokenizeResponse
        ),
        "/v1/models": {"get": _describe_operation("The models.", _json_content(ModelList))},
        "/v1/models/{model}": {
            "parameters": [_path_parameter("model")],
            "get": _describe_operation("A model.", _json_content(Model), (404,)),
        },
        "/health": health,
        "/health/ready": health,
        "/health/live": health,
        "/metrics": {"get": _describe_operation("Metrics, for Prometheus.", metrics)},
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _describe_post(
    summary: str, body_type: type[RequestBody], answer_type: type, event_type: type | None = None
) -> dict[str, Any]:
    """Describe a path that takes a body, and answers with events if the body has ``stream``."""
    content = _json_content(answer_type)
    if event_type is not None:
        # In OpenAPI before 3.2, the schema of an event stream describes a single event.
        content["content"]["text/event-stream"] = {"schema": _schema_reference(event_type)}
    operation = _describe_operation(summary, content, (400, 404, 408, 413, 415, 422, 429, 504))
    operation["requestBody"] = {"required": True, **_json_content(body_type)}
    return {"post": operation}


def _describe_operation(
    summary: str, answer_content: dict[str, Any], error_statuses: Iterable[int] = ()
) -> dict[str, Any]:
    refusals = {
        str(status): {"description": _ERROR_DESCRIPTIONS[status], **_json_content(ErrorResponse)}
        for status in sorted({*error_statuses, 400, 401, 403, 500, 503})
    }
    return {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", **answer_content}, **refusals},
    }


def _json_content(body_type: type) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": _schema_reference(body_type)}}}


def _schema_reference(body_type: type) -> dict[str, Any]:
    return {"$ref": _REF_TEMPLATE.format(model=body_type.__name__)}
