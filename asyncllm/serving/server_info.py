"""``/v1/models``, ``/health``, ``/metrics`` and the OpenAPI description."""

from __future__ import annotations

import anyio.to_thread
from prometheus_client import CONTENT_TYPE_LATEST

from asyncllm.serving.answers import HealthState, Model, ModelList
from asyncllm.serving.exchange import Exchange, encode_json
from asyncllm.serving.openapi import openapi
from asyncllm.serving.serving import ServingContext


async def list_models(server_context: ServingContext, exchange: Exchange) -> None:
    data = [_model_entry(server_context, name) for name in server_context.model_names]
    await exchange.respond_json(ModelList(object="list", data=data))


async def get_model(server_context: ServingContext, exchange: Exchange) -> None:
    await exchange.respond_json(
        _model_entry(
            server_context,
            server_context.resolve_model_name(exchange.scope["path_params"]["model"]),
        )
    )


def _model_entry(server_context: ServingContext, name: str) -> Model:
    return {
        "id": name,
        "object": "model",
        "created": server_context.created_at,
        "owned_by": "asyncllm",
    }


async def show_health(server_context: ServingContext, exchange: Exchange) -> None:
    """Answer whether requests are accepted. The answer has only the state, because anyone may
    ask; reasons are in the log."""
    await exchange.respond_json(
        _health_state(server_context), 200 if _is_ready(server_context) else 503
    )


async def show_liveness(server_context: ServingContext, exchange: Exchange) -> None:
    """Answer with 503 if the process should be restarted: a dead engine does not recover."""
    await exchange.respond_json(
        _health_state(server_context), 503 if server_context.engine.state == "dead" else 200
    )


def _health_state(server_context: ServingContext) -> HealthState:
    state = server_context.engine.state
    return {"status": state, "live": state != "dead", "ready": _is_ready(server_context)}


def _is_ready(server_context: ServingContext) -> bool:
    return server_context.engine.state == "running" and not server_context.is_draining


async def show_metrics(server_context: ServingContext, exchange: Exchange) -> None:
    await exchange.respond(200, await server_context.metrics_cache.text(), CONTENT_TYPE_LATEST)


async def show_openapi(server_context: ServingContext, exchange: Exchange) -> None:
    """Answer with the OpenAPI description. It is made once, on a thread, because pydantic takes
    tenths of a second."""
    async with server_context.openapi_lock:
        if server_context.openapi_json is None:
            document = await anyio.to_thread.run_sync(
                lambda: encode_json(openapi(needs_bearer_token=server_context.needs_bearer_token))
            )
            server_context.openapi_json = document.encode()
    await exchange.respond(200, server_context.openapi_json)
