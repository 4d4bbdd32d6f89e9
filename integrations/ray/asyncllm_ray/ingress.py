"""OpenAI's protocol in front of the replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from ray import serve

from asyncllm import AsyncLLMEngine, EngineConfig, EngineStats, TokenStream
from asyncllm import validation as check
from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.config import make_config
from asyncllm.core.executor import ExecutorInfo
from asyncllm.runtime.loading import LoadedModel
from asyncllm_ray.client import Client
from asyncllm_ray.replica import deployment
from asyncllm_ray.wire import check_sendable

_MAX_ONGOING = 4096
_STATS_INTERVAL = 1.0
_PART_SECONDS = 2.0
_BODY_SECONDS = 30.0


class RemoteEngine(AsyncLLMEngine):
    """The engines of a deployment as one engine, for ``create_app``.

    It loads the tokenizer, and no weights. Replicas tokenise the prompts; the ingress process only
    tokenises the texts of tokenisation requests.

    Args:
        client: client of the deployment; it stays the caller's.
        handle: handle of the deployment.
        info: limits of the replicas' engines.
        config: configuration of the replicas' engines.
    """

    def __init__(self, client: Client, handle: Any, info: ExecutorInfo, config: EngineConfig):
        super().__init__(config=config)
        self._loader = partial(_load_tokenizer, info)
        self._client, self._handle = client, handle
        self._stats = EngineStats()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._task = asyncio.create_task(self._ask_for_stats())

    async def aclose(self, *, drain: float | None = 0.0) -> None:
        if self._task is not None:
            self._task.cancel()
        await super().aclose(drain=drain)

    def stream(self, *args: Any, **options: Any) -> TokenStream:
        return self._client.stream(*args, **options)

    def chat(self, *args: Any, **options: Any) -> TokenStream:
        return self._client.chat(*args, **options)

    async def submit(self, prompt: Any, *args: Any, **options: Any) -> TokenStream:
        """Submit a request. It does not wait for a place in a queue."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        return (self.chat if is_chat else self.stream)(prompt, *args, **options)

    def abort(self, request_id: str | Iterable[str]) -> None:
        self._client.abort(request_id)

    def stats(self) -> EngineStats:
        """Sums of the replicas' statistics, at most a few seconds old."""
        self._require_input_processor()
        return self._stats

    async def _ask_for_stats(self) -> None:
        while True:
            try:
                self._stats = sum_stats(await self._handle.broadcast("stats").results_async())
            except Exception:
                self._stats = EngineStats()  # No replica can be asked now.
            await asyncio.sleep(_STATS_INTERVAL)


def sum_stats(found: Sequence[dict[str, Any]]) -> EngineStats:
    """Sums of replicas' statistics; means of usages and maxima of times."""
    known = [one for one in found if one["state"] == "running"]
    total: dict[str, Any] = {
        one.name: sum(each[one.name] for each in known) for one in fields(EngineStats)
    }
    total["kv_cache_usage"] = 1.0 - total["num_free_blocks"] / max(total["num_blocks"], 1)
    total["is_paused"] = bool(known) and all(each["is_paused"] for each in known)
    total["last_step_time"] = max((each["last_step_time"] for each in known), default=0.0)
    return EngineStats(**total)


class _NoExecutor:
    """Executor of an engine whose requests all go to replicas."""

    def __init__(self, info: ExecutorInfo) -> None:
        self.info = info

    def launch(self, batch: Any) -> None:
        raise RuntimeError("this engine is in front of replicas, and computes nothing")

    def sample(self, masks: Any) -> None:
        self.launch(masks)

    def collect(self) -> Any:
        self.launch(None)

    def discard(self) -> None: ...

    def close(self) -> None: ...


def _load_tokenizer(
    info: ExecutorInfo, config: EngineConfig, progress: ProgressCallback
) -> LoadedModel:
    """Load a model's tokenizer and configuration without its weights."""
    from asyncllm.checkpoint.model_files import resolve_model, resolve_tokenizer
    from asyncllm.gpu.transformers_model.config import read_config
    from asyncllm.runtime.loading import _read_tokenizer

    code = config.trust_remote_code
    path = resolve_model(
        config.model, config.revision, with_weights=False, with_code=code, progress=progress
    )
    tokenizer_path = path
    if config.tokenizer is not None:
        tokenizer_path = resolve_tokenizer(config.tokenizer, progress=progress)
    model_config = read_config(
        path,
        config.model_impl,
        code,
        overrides=config.hf_overrides,
        use_generation_defaults=config.generation_config == "auto",
    )
    tokenizer, formats = _read_tokenizer(tokenizer_path, config)
    return LoadedModel(_NoExecutor(info), tokenizer, model_config, formats)


class _BodyReader:
    """ASGI application that reads the rest of a refused body before it answers.

    Serve's proxy closes the connection after an answer. If bytes of the body were not read by then,
    the client's connection is reset, and the client may lose the answer. Reading ends after 2
    seconds without a byte, and after 30 seconds.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_read = scope["type"] != "http"

        async def read() -> Any:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def answer(message: Any) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_BODY_SECONDS):
                    while not is_read:
                        await asyncio.wait_for(read(), _PART_SECONDS)
            await send(message)

        await self._app(scope, read, answer)


@serve.ingress()
class OpenAIIngress:
    """Callable of the ingress deployment: ``create_app`` over a client of the engines."""

    async def __init__(
        self, handle: Any, config: EngineConfig, retries: int, options: dict[str, Any]
    ) -> None:
        self._client = Client(handle, retries=retries)
        info = await handle.info.remote()
        self._engine = RemoteEngine(self._client, handle, info, config)
        await self._engine.start()
        self._options = options

    def __serve_build_asgi_app__(self) -> Any:
        from asyncllm.serving import create_app

        return _BodyReader(create_app(self._engine, **self._options))

    async def __del__(self) -> None:
        if hasattr(self, "_options"):
            await self._engine.aclose()
            self._client.close()


def openai_app(
    model: str | os.PathLike[str] | None = None,
    config: EngineConfig | None = None,
    *,
    name: str = "asyncllm",
    retries: int = 1,
    app_options: dict[str, Any] | None = None,
    engine_options: dict[str, Any] | None = None,
    serve_options: dict[str, Any] | None = None,
    **overrides: Any,
) -> serve.Application:
    """Make a Serve application that speaks OpenAI's protocol, in front of engines.

        run(openai_app(served_model_name="mia"), "llm", route_prefix="/")

    Args:
        model, config, overrides: as for ``AsyncLLMEngine``.
        name: name of the engines' deployment; that of the ingress has "-openai" after it.
        retries: as for ``Client``.
        app_options: options of ``create_app``: ``token``, ``timeout`` and others.
        engine_options: options of ``deployment``: ``drain``, ``lease``, ``serve_options``.
        serve_options: options of ``serve.deployment`` for the ingress.

    Raises:
        InvalidRequestError: for an option that cannot be used, or cannot be sent to a replica.
    """
    made = make_config(model, config, overrides)
    given = app_options or {}
    for key, value in given.items():
        check_sendable(key, value)
    options: dict[str, Any] = {
        "name": f"{name}-openai",
        "max_ongoing_requests": _MAX_ONGOING,
        "ray_actor_options": {"num_cpus": 0.1},
        "max_constructor_retry_count": 1,
    }
    engines = deployment(None, made, name=name, **(engine_options or {}))
    front = serve.deployment(**(options | (serve_options or {})))(OpenAIIngress)
    return front.bind(engines, made, check.integer("retries", retries, 0, 100), given)
