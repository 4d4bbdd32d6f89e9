"""``/v1/models``, ``/health``, ``/metrics`` and the OpenAPI description."""

from __future__ import annotations

import anyio.to_thread
from prometheus_client import CONTENT_TYPE_LATEST

from asyncllm.serving.answers import HealthState, Model, ModelList
from asyncllm.serving.exchange import Exchange, encode_json
from asyncllm.serving.openapi import openapi
from asyncllm.serving.serving import ServingContext


async def list_models(serving: ServingContext, exchange: Exchange) -> None:
    data = [_model_entry(serving, name) for name in serving.model_names]
    await exchange.respond_json(ModelList(object="list", data=data))


async def get_model(serving: ServingContext, exchange: Exchange) -> None:
    await exchange.respond_json(
        _model_entry(serving, serving.resolve_model_name(exchange.scope["path_params"]["model"]))
    )


def _model_entry(serving: ServingContext, name: str) -> Model:
    return {"id": name, "object": "model", "created": serving.created_at, "owned_by": "asyncllm"}


async def show_health(serving: ServingContext, exchange: Exchange) -> None:
    """Answer whether requests are accepted. The answer has only the state, because anyone may
    ask; reasons are in the log."""
    await exchange.respond_json(_health_state(serving), 200 if _is_ready(serving) else 503)


async def show_liveness(serving: ServingContext, exchange: Exchange) -> None:
    """Answer with 503 if the process should be restarted: a dead engine does not recover."""
    await exchange.respond_json(
        _health_state(serving), 503 if serving.engine.state == "dead" else 200
    )


def _health_state(serving: ServingContext) -> HealthState:
    state = serving.engine.state
    return {"status": state, "live": state != "dead", "ready": _is_ready(serving)}


def _is_ready(serving: ServingContext) -> bool:
    return serving.engine.state == "running" and not serving.is_draining


async def show_metrics(serving: ServingContext, exchange: Exchange) -> None:
    await exchange.respond(200, await serving.metrics_cache.text(), CONTENT_TYPE_LATEST)


async def show_openapi(serving: ServingContext, exchange: Exchange) -> None:
    """Answer with the OpenAPI description. It is made once, on a thread, because pydantic takes
    tenths of a second."""
    async with serving.openapi_lock:
        if serving.openapi_json is None:
            document = await anyio.to_thread.run_sync(
                lambda: encode_json(openapi(needs_bearer_token=serving.needs_bearer_token))
            )
            serving.openapi_json = document.encode()
    await exchange.respond(200, serving.openapi_json)
