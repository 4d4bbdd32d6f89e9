"""Replicas: an engine in each replica of a Serve deployment."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields
from typing import Any

import ray
from ray import serve

from asyncllm import (
    AsyncLLMEngine,
    Delta,
    EngineClosedError,
    EngineConfig,
    EngineDeadError,
    TokenStream,
)
from asyncllm import validation as check
from asyncllm.config import make_config
from asyncllm.core.executor import ExecutorInfo
from asyncllm.outputs import EngineStats, TokenLogprobs
from asyncllm_ray.metrics import ReplicaMetrics
from asyncllm_ray.traces import in_trace
from asyncllm_ray.wire import Batch, Call, Heard, check_sendable, portable

Prepare = Callable[[AsyncLLMEngine], object]

_DEFAULT_SEQS = 64

_REPORT_INTERVAL = 1.0
_LAST_ITEM = 4096
"""Tokens in an item of what is left of a stream that has ended."""


class EngineReplica:
    """Callable of a deployment: one engine, and the streams that clients read of it.

    Args:
        config: the engine's configuration.
        lease: seconds after which the request of a client that is not heard from is aborted.
        interval: least number of seconds between two items of one stream.
        prepare: function called with the engine before it starts.
    """

    async def __init__(
        self, config: EngineConfig, lease: float, interval: float, prepare: Prepare | None
    ) -> None:
        self._engine = AsyncLLMEngine(config=config)
        self._metrics = ReplicaMetrics()
        self._engine.add_observer(self._metrics)
        self._prepared = None if prepare is None else prepare(self._engine)
        await self._engine.start()
        self._loop = asyncio.get_running_loop()
        self._held: dict[str, _HeldStream] = {}
        self._lease = lease
        self._interval = interval
        self._is_draining = False
        self._num_expired = 0
        self._actor = ray.get_runtime_context().current_actor
        self._tasks = [
            asyncio.create_task(self._end_lost_streams()),
            asyncio.create_task(self._report()),
        ]

    async def stream(self, call: Call) -> AsyncIterator[Batch]:
        """Answer one attempt of a request. An error is the last item."""
        first = Batch(replica=self._actor)
        if call.is_aborted:
            return
        options = call.options
        request_id = options["request_id"]
        if any(held.request_id == request_id for held in self._held.values()):
            # Ids are unique for each client only.
            options = options | {"request_id": f"{request_id}@{call.key}"}
        try:
            make: Any = self._engine.chat if call.is_chat else self._engine.stream
            with in_trace(call.trace):
                stream: TokenStream = make(call.prompt, call.params, **options)
        except Exception as error:
            yield first._replace(error=portable(error))
            return
        held = self._held[call.key] = _HeldStream(request_id, stream, call.window, time.monotonic())
        try:
            yield first
            async for batch in held.batches(self._interval, call.options["on_slow"]):
                yield batch
        finally:
            stream.close()
            self._held.pop(call.key, None)

    def hear(self, news: Sequence[Heard]) -> None:
        """Handle a client's messages about its attempts. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._hear, news)

    def _hear(self, news: Sequence[Heard]) -> None:
        for one in news:
            held = self._held.get(one.key)
            if held is not None:
                held.hear(one, time.monotonic())

    async def _end_lost_streams(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 8)
            now = time.monotonic()
            for held in list(self._held.values()):
                if now - held.heard_at > self._lease:
                    self._num_expired += 1
                    held.give_up(self._lease)

    async def _report(self) -> None:
        while True:
            if self._engine.state == "running":
                self._metrics.update(self._engine.stats(), self._num_expired)
            await asyncio.sleep(_REPORT_INTERVAL)

    # --- called by Serve ---------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise unless the engine runs."""
        if self._engine.state != "running":
            raise self._engine.error or RuntimeError(f"the engine is {self._engine.state}")

    def record_routing_stats(self) -> dict[str, Any]:
        """The engine's statistics, for the routers of all clients."""
        return self.stats()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The engine's load, for ``LoadPolicy``."""
        stats = self._engine.stats()
        return {
            "queued_tokens": float(stats.num_queued_tokens),
            "kv_cache_usage": stats.kv_cache_usage,
        }

    def stats(self) -> dict[str, Any]:
        """The engine's statistics, whether it accepts requests, and the streams held."""
        state = self._engine.state
        if state != "running":
            return {"accepts": False, "state": state}
        stats = self._engine.stats()
        return {one.name: getattr(stats, one.name) for one in fields(EngineStats)} | {
            "accepts": not self._is_draining,
            "state": state,
            "pid": os.getpid(),
            "num_streams": len(self._held),
            "num_expired": self._num_expired,
        }

    def info(self) -> ExecutorInfo:
        """Limits of the engine, for clients that check requests."""
        return self._engine._require_started().loaded_model.executor.info

    async def __del__(self) -> None:
        # Serve calls this method when the last request of a stopped replica has ended.
        if hasattr(self, "_tasks"):
            self._is_draining = True
            for task in self._tasks:
                task.cancel()
            await self._engine.aclose()


class _HeldStream:
    """Stream of a replica, and how far its client has read it.

    Attributes:
        request_id: the client's id of the request.
        heard_at: time in seconds when the client was last heard from.
    """

    def __init__(self, request_id: str, stream: TokenStream, window: int, now: float) -> None:
        self.request_id = request_id
        self.heard_at = now
        self._stream = stream
        self._channel = stream._channel
        self._window = window
        self._num_sent = self._num_read = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def hear(self, news: Heard, now: float) -> None:
        self.heard_at = now
        self._num_read = max(self._num_read, news.num_read)
        if news.is_aborted:
            self._stream.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def give_up(self, lease: float) -> None:
        """End the request of a client that is lost."""
        self._error = EngineDeadError(f"the client was not heard from for {lease:.1f} s")
        self._stream.close()

    @property
    def _credit(self) -> int:
        """Tokens that may be sent now. The rest of a stream that has ended is sent without regard
        to its reader, because until then it has a place among Serve's ongoing requests."""
        if self._channel.ended:
            return _LAST_ITEM
        return self._window - (self._num_sent - self._num_read)

    async def _wait(self, seconds: float | None = None) -> None:
        """Wait for the stream's end, or for news of the client, but at most ``seconds``."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._stream._register_end_waiter(self._waiter, None):
            await asyncio.wait([self._waiter], timeout=seconds)

    async def batches(self, interval: float, on_slow: str) -> AsyncIterator[Batch]:
        """Output of the stream, while there is credit. Items are at least ``interval`` seconds
        apart, except after the stream's end."""
        stream, sent_at = self._stream, -interval
        knows_prompt = False
        while stream.finish_reason is None:
            while self._credit <= 0:
                await self._wait()
            while on_slow == "coalesce" and not self._channel.ended:
                # During the wait the engine merges new deltas.
                wait = sent_at + interval - time.monotonic()
                if wait <= 0:
                    break
                await self._wait(wait)
            deltas, error = [], None
            try:
                await self._read(deltas, sent_at + interval, on_slow)
            except StopAsyncIteration:
                error = EngineClosedError("the engine was closed")
            except Exception as failure:
                error = portable(failure)
            prompt: Sequence[int] = ()
            logprobs: Sequence[TokenLogprobs] = ()
            if deltas and not knows_prompt:
                knows_prompt = True
                prompt = stream.prompt_token_ids or ()
                logprobs = [one for one in stream.prompt_logprobs or () if one is not None]
            self._num_sent += sum(len(delta.token_ids) for delta in deltas)
            sent_at = time.monotonic()
            yield Batch(tuple(deltas), self._error or error, None, prompt, logprobs)
            if error is not None or self._error is not None:
                return

    async def _read(self, deltas: list[Delta], until: float, on_slow: str) -> None:
        """Read into ``deltas`` as many deltas as there is credit for. These are the next delta,
        other unread ones and, unless the engine merges them, those that arrive before ``until``."""
        stream, left = self._stream, self._credit
        deltas.append(await anext(stream))
        left -= len(deltas[0].token_ids)
        while stream.finish_reason is None and left > 0:
            wait = until - time.monotonic()
            if not stream._has_unread and (wait <= 0 or on_slow == "coalesce"):
                break
            delta = await stream.__anext__(max(wait, 0.001))
            if delta is None:
                break
            deltas.append(delta)
            left -= len(delta.token_ids)


def control(_: Any, news: Sequence[Heard]) -> None:
    """Hand a client's messages to this process's replica. Clients run it by ``__ray_call__``."""
    replica: Any = serve.get_replica_context().servable_object
    replica.hear(news)


def deployment(
    model: str | os.PathLike[str] | None = None,
    config: EngineConfig | None = None,
    *,
    name: str = "asyncllm",
    drain: float = 30.0,
    lease: float = 10.0,
    interval: float = 0.05,
    prepare: Prepare | None = None,
    serve_options: dict[str, Any] | None = None,
    **overrides: Any,
) -> serve.Application:
    """Make a Serve application whose replicas run an engine each.

        handle = serve.run(deployment(num_threads=1), name="llm", route_prefix=None)
        client = Client(handle)

    Args:
        model, config, overrides: as for ``AsyncLLMEngine``. Files are read by the replicas.
        name: name of the deployment.
        drain: seconds that the streams of a stopped replica may continue.
        lease: seconds after which a replica aborts the request of a client that is not heard from.
        interval: least number of seconds between two items of one stream; the first token is sent
            at once. Each item takes 1 to 2 ms of both processes.
        prepare: function that each replica calls with its engine before it starts, such as
            ``asyncllm.tracing.trace_engine``; its result is kept.
        serve_options: further options of ``serve.deployment``: ``num_replicas``,
            ``ray_actor_options``, ``autoscaling_config`` and others.

    Raises:
        InvalidRequestError: for an argument that is invalid, or cannot be sent to a replica.
    """
    made = make_config(model, config, overrides)
    sent = {one.name: getattr(made, one.name) for one in fields(made)} | {"prepare": prepare}
    for field_name, value in sent.items():
        check_sendable(field_name, value)
    lease = check.seconds("lease", lease, exclusive_low=True)
    interval = check.seconds("interval", interval, exclusive_low=True)
    seqs = made.max_num_seqs or _DEFAULT_SEQS
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": seqs + made.max_queued_requests,
        "max_queued_requests": made.max_queued_requests,
        "graceful_shutdown_timeout_s": check.seconds("drain", drain),
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "max_constructor_retry_count": 1,
        "request_router_config": {
            "request_router_class": "asyncllm_ray.router.PrefixRouter",
            "request_routing_stats_period_s": 1.0,
        },
    }
    made_class = serve.deployment(**(options | (serve_options or {})))(EngineReplica)
    return made_class.bind(made, lease, interval, prepare)
