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
    name = server_context.resolve_model_name(exchange.scope["path_params"]["model"])
    await exchange.respond_json(_model_entry(server_context, name))


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
    state = _health_state(server_context)
    await exchange.respond_json(state, 200 if state["ready"] else 503)


async def show_liveness(server_context: ServingContext, exchange: Exchange) -> None:
    """Answer with 503 if the process should be restarted: a dead engine does not recover."""
    state = _health_state(server_context)
    await exchange.respond_json(state, 200 if state["live"] else 503)


def _health_state(server_context: ServingContext) -> HealthState:
    state = server_context.engine.state
    is_ready = state == "running" and not server_context.is_draining
    return {"status": state, "live": state != "dead", "ready": is_ready}


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
