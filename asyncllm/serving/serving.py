"""Serving: the engine and settings that all endpoints of an application share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import AsyncLLMError
from asyncllm.runtime.event_loop import post_when_done
from asyncllm.runtime.worker_thread import WorkerThread
from asyncllm.serving.byte_budget import ByteBudget, ByteClaim
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.metrics_cache import MetricsCache
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import UnsupportedFields
from asyncllm.serving.response_store import ResponseStore
from asyncllm.stream import TokenStream
from asyncllm.validation import describe

T = TypeVar("T")

LONG_JSON_BYTES = 4096
"""Minimum number of bytes of JSON that a worker thread reads or writes, so that the event loop does
not wait. A byte takes up to a quarter of a microsecond."""

LARGE_JSON_BYTES = 1 << 16
"""Minimum number of bytes of JSON that count in ``large_bodies`` instead of ``small_bodies``."""


@dataclass(eq=False, repr=False)
class Serving:
    """State that the endpoints of an application share.

    Attributes:
        model_names: names of the model; the first is used for requests that name none.
        timeout: maximum duration of an answer in seconds; None sets no limit.
        ping_interval: seconds of silence after which a stream of events sends a comment.
        pacer: limits the frame rate of all streamed answers together.
        store: responses that can be continued.
        stats_interval: seconds between two snapshots of the statistics.
        needs_bearer_token: whether clients have to send a bearer token.
        description: OpenAPI description as JSON, made at first use.
        unsupported_fields: policy that refuses or ignores unsupported fields.
        max_body_size: maximum number of bytes of a request's body.
        body_timeout: seconds that a client has to send the body.
        draining: whether the server is about to close, and refuses requests.
        sessions: sessions of the open WebSockets.
        worker: thread that reads and writes long JSON. It pauses together with the engine's threads
            for long texts, so that streams keep half their speed under any load of long bodies.
        small_bodies, large_bodies: budgets of the bytes of bodies that are being read, checked or
            tokenised: of those from LONG_JSON_BYTES on, and of those from LARGE_JSON_BYTES on. A
            request of many small tools takes 8 times its bytes meanwhile. A small body waits for
            no large one.
        answer_bytes: budget of the JSON of answers that clients have not read yet, and of requests
            that an answer repeats event by event; only those from LARGE_JSON_BYTES on count.
    """

    engine: AsyncLLMEngine
    model_names: tuple[str, ...]
    timeout: float | None
    ping_interval: float
    pacer: FramePacer
    store: ResponseStore
    stats_interval: float
    metrics_cache: MetricsCache
    needs_bearer_token: bool
    unsupported_fields: UnsupportedFields
    max_body_size: int
    body_timeout: float
    draining: bool = False
    description: bytes | None = None
    description_lock: anyio.Lock = field(default_factory=anyio.Lock)
    sessions: set[object] = field(default_factory=set)
    created_at: int = field(default_factory=lambda: int(time.time()))
    worker: WorkerThread = field(init=False)
    small_bodies: ByteBudget = field(default_factory=lambda: ByteBudget(1 << 21))
    large_bodies: ByteBudget = field(default_factory=lambda: ByteBudget(3 << 22))
    answer_bytes: ByteBudget = field(default_factory=lambda: ByteBudget(3 << 23))

    def __post_init__(self) -> None:
        self.worker = WorkerThread("asyncllm-json", self.engine._cooldown)

    async def run(self, job: Callable[[], T], size: int) -> T:
        """Run a job, on the worker thread if it is long; returns its result.

        Args:
            size: approximate number of JSON bytes that the job reads or writes.
        """
        return job() if size < LONG_JSON_BYTES else await self.worker.call(job, size)

    async def claim(self, size: int) -> ByteClaim | None:
        """Wait until ``size`` bytes of JSON may be read and checked; returns the claim, which the
        caller releases. None if they are so few that they need no claim."""
        if size < LONG_JSON_BYTES:
            return None
        granted = anyio.Event()
        budget = self.small_bodies if size < LARGE_JSON_BYTES else self.large_bodies
        claim = budget.claim(size, granted.set)
        try:
            await granted.wait()
        except BaseException:
            claim.release()
            raise
        return claim

    def claim_answer(self, size: int) -> ByteClaim:
        """Claim memory for an answer that has, or repeats, ``size`` bytes of JSON. The caller
        releases the claim once the client has read the answer.

        Raises:
            ProtocolError: if the answers under way take too much.
        """
        claim = self.answer_bytes.claim(size if size >= LARGE_JSON_BYTES else 0, lambda: None)
        if not claim.granted:
            claim.release()
            raise ProtocolError(
                "too many long answers are still being read by their clients; ask again later",
                code="server_overloaded",
                status=429,
                headers={"Retry-After": "1"},
            )
        return claim

    def release(self, claim: ByteClaim | None, streams: Sequence[TokenStream] = ()) -> None:
        """Release a claim once the prompts of its request's streams are tokenised."""
        if claim is None:
            return
        prompts: list[Future[None]] = []
        if not all(stream.prompt_token_ids for stream in streams):
            with suppress(AsyncLLMError):  # The engine may have closed.
                prompts = self.engine._require_input_processor().submitter.pending_prompt_futures()
        num_left = len(prompts)

        def release_after_last() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left <= 0:
                claim.release()

        for prompt in prompts:
            post_when_done(prompt, release_after_last)
        if not prompts:
            claim.release()

    def model_name(self, requested: str | None) -> str:
        """Name of the model in an answer.

        Raises:
            ProtocolError: for a name that is not one of ``model_names``.
        """
        if requested is None:
            return self.model_names[0]
        if requested not in self.model_names:
            served = " or ".join(map(describe, self.model_names))
            raise ProtocolError(
                f"model: {describe(requested)} is not served here, expected {served}, or none; "
                "served_model_name gives the model other names",
                code="model_not_found",
                param="model",
                status=404,
            )
        return requested

    def request_options(self, owner: str) -> dict[str, Any]:
        """Options of a client's requests, for ``AsyncLLMEngine.stream`` and ``chat``.

        Args:
            owner: digest of the client's token; "" (no token required) becomes ``owner=None``.
        """
        return {"timeout": self.timeout, "owner": owner or None}

    def check_open(self) -> None:
        """Raise ProtocolError while the server drains."""
        if self.draining:
            raise ProtocolError(
                "the server is about to close; ask another",
                code="server_shutting_down",
                status=503,
                headers={"Retry-After": "1"},
            )


def default_model_names(engine: AsyncLLMEngine) -> Sequence[str]:
    """Names of the model for clients: ``EngineConfig.served_model_name``, else that of
    ``EngineConfig.model``; for a path its last part."""
    config = engine.config
    if config.served_model_name is not None:
        return config.served_model_name
    name = config.model_name
    is_path = config.model is not None and os.path.exists(name)
    return (os.path.basename(name.rstrip("/")) or name,) if is_path else (name,)
