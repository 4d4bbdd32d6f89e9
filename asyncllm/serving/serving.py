"""ServingContext: the engine and settings that all endpoints of an application share."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import anyio

from asyncllm.engine import AsyncLLMEngine
from asyncllm.runtime.event_loop import post_when_freed
from asyncllm.runtime.worker_thread import WorkerThread
from asyncllm.serving.byte_budget import ByteBudget, ByteClaim
from asyncllm.serving.client import Client, call_while_connected
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.metrics_cache import MetricsCache
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import UnsupportedFieldPolicy
from asyncllm.serving.response_store import ResponseStore, SharedResponseBytes
from asyncllm.serving.sampling_fields import SamplingFields
from asyncllm.serving.token_logprobs import packed_logprobs_bytes
from asyncllm.stream import TokenStream
from asyncllm.validation import describe

T = TypeVar("T")

MIN_WORKER_JSON_BYTES = 4096
"""JSON of at least this many bytes is read or written on a worker thread, so that the event loop
does not wait. A byte takes up to a quarter of a microsecond."""

WRITE_PARSE_SPEED_RATIO = 10
"""Bytes of JSON that are written in the time of parsing one byte. The ratio is for estimating the
cost of answers that repeat a request's texts and tools."""

MIN_LARGE_JSON_BYTES = 1 << 16
"""JSON of at least this many bytes counts in ``large_body_budget`` and ``answer_budget``."""

MAX_UNSTORED_RESPONSES_BYTES = 1 << 26
"""Maximum bytes of all responses with ``store=false`` that WebSockets keep for continuation."""

MIN_PACKED_LOGPROBS_BUDGET = 1 << 27
"""Bytes of packed log-probabilities of all answers, besides those of the sequences that run."""

NUM_LOGPROBS_IN_BUDGET = 20
"""Number of alternatives per token that the budget assumes for the sequences that run."""

COPIES_OF_LOGPROBS = 3
"""Number of copies of log-probabilities in memory while their events are sent: their JSON, the
event that is being made, and the event that the client has not read yet."""


@dataclass(eq=False, repr=False)
class ServingContext:
    """State that the endpoints of an application share.

    Attributes:
        model_names: names of the model; the first is used for requests that name none.
        timeout: maximum duration of an answer in seconds; None sets no limit.
        ping_interval: seconds of silence after which a stream of events sends a comment.
        frame_pacer: limits the frame rate of all streamed answers together.
        response_store: responses that can be continued.
        stats_interval: seconds between two snapshots of the statistics.
        needs_bearer_token: whether clients have to send a bearer token.
        openapi_json: OpenAPI description as JSON, made at first use.
        unsupported_fields: policy that refuses or ignores unsupported fields.
        max_body_size: maximum number of bytes of a request's body.
        body_timeout: seconds that a client may take to send the body.
        is_draining: whether the server is about to close, and refuses requests.
        sessions: sessions of the open WebSockets.
        json_worker: thread that reads and writes long JSON. After a job, it pauses together with
            the engine's threads for long texts, so that streams keep half their speed under any
            load of long bodies.
        small_body_budget: budget for bodies from MIN_WORKER_JSON_BYTES to MIN_LARGE_JSON_BYTES,
            while they are read, checked or tokenised. No small body waits for a large one.
        large_body_budget: the same for larger bodies. A body of many small tools takes 8 times its
            size once it is parsed.
        answer_budget: budget for answers that clients have not read yet, and for the fields of
            requests that the events of an answer repeat. JSON below MIN_LARGE_JSON_BYTES does not
            count.
        conversation_budget: budget for the conversations of responses under way, by their memory,
            until their clients have read the answers. A conversation below MIN_LARGE_JSON_BYTES
            does not count. ``response_store`` bounds only those that it holds itself.
        logprobs_budget: budget for long events with log-probabilities, until clients have read
            them.
        packed_logprobs_budget: budget for the log-probabilities that answers may hold in the
            engine's packed form, from the request until the answer's end. Answers that hold less
            than MIN_LARGE_JSON_BYTES do not count. Made at the first request, for the engines that
            run then.
        unstored_response_bytes: bound on the responses with ``store=false`` of all connections.
        large_chunk_turn: budget of one, claimed by the answer that makes a large chunk, until
            memory is reserved for the chunk.
    """

    engine: AsyncLLMEngine
    model_names: tuple[str, ...]
    timeout: float | None
    ping_interval: float
    frame_pacer: FramePacer
    response_store: ResponseStore
    stats_interval: float
    metrics_cache: MetricsCache
    needs_bearer_token: bool
    unsupported_fields: UnsupportedFieldPolicy
    max_body_size: int
    body_timeout: float
    is_draining: bool = False
    openapi_json: bytes | None = None
    openapi_lock: anyio.Lock = field(default_factory=anyio.Lock)
    sessions: set[object] = field(default_factory=set)
    created_at: int = field(default_factory=lambda: int(time.time()))
    json_worker: WorkerThread = field(init=False)
    small_body_budget: ByteBudget = field(default_factory=lambda: ByteBudget(1 << 21))
    large_body_budget: ByteBudget = field(default_factory=lambda: ByteBudget(3 << 22))
    answer_budget: ByteBudget = field(default_factory=lambda: ByteBudget(3 << 23))
    conversation_budget: ByteBudget = field(default_factory=lambda: ByteBudget(1 << 26))
    logprobs_budget: ByteBudget = field(default_factory=lambda: ByteBudget(3 << 23))
    unstored_response_bytes: SharedResponseBytes = field(
        default_factory=lambda: SharedResponseBytes(MAX_UNSTORED_RESPONSES_BYTES)
    )
    large_chunk_turn: ByteBudget = field(default_factory=lambda: ByteBudget(1))

    def __post_init__(self) -> None:
        self.json_worker = WorkerThread("asyncllm-json", self.engine._cooldown)

    @cached_property
    def packed_logprobs_budget(self) -> ByteBudget:
        # Sequences that run may all be long, so that answers that are read are not refused.
        engine = self.engine
        num_tokens = engine._num_slots * engine.max_model_len
        running = packed_logprobs_bytes(num_tokens, NUM_LOGPROBS_IN_BUDGET)
        return ByteBudget(MIN_PACKED_LOGPROBS_BUDGET + running)

    async def run_json_job(self, job: Callable[[], T], num_bytes: int, client: Client) -> T:
        """Run a job here, or on the worker thread if it is long; returns its result.

        Args:
            num_bytes: approximate number of JSON bytes that the job reads or writes.

        Raises:
            ClientGoneError: if the client goes while a long job waits or runs.
        """
        if num_bytes < MIN_WORKER_JSON_BYTES:
            return job()
        call = partial(self.json_worker.call, job, num_bytes, client.owner or None)
        return await call_while_connected(client, call)

    async def claim_body_bytes(self, num_bytes: int, owner: str) -> ByteClaim | None:
        """Reserve memory for a request body, waiting until ``num_bytes`` are free. The caller
        releases the returned claim, which is None for a body below MIN_WORKER_JSON_BYTES."""
        if num_bytes < MIN_WORKER_JSON_BYTES:
            return None
        budget = (
            self.small_body_budget if num_bytes < MIN_LARGE_JSON_BYTES else self.large_body_budget
        )
        return await _wait_for_claim(budget, num_bytes, owner)

    @asynccontextmanager
    async def claimed_logprobs_bytes(self, num_bytes: int, owner: str) -> AsyncIterator[None]:
        """Context manager that waits for, and reserves, memory for events that contain
        ``num_bytes`` of log-probabilities. Below MIN_LARGE_JSON_BYTES, it reserves none."""
        if num_bytes < MIN_LARGE_JSON_BYTES:
            yield
            return
        num_bytes *= COPIES_OF_LOGPROBS
        claim = await _wait_for_claim(self.logprobs_budget, num_bytes, owner)
        try:
            yield
        finally:
            claim.release()

    @asynccontextmanager
    async def claimed_chunk(
        self,
        make_chunk: Callable[[], T],
        measure: Callable[[T], int],
        num_bytes: int,
        client: Client,
    ) -> AsyncIterator[T]:
        """Context manager that makes a chunk and reserves memory for it. A chunk's length is known
        only once it is made, so only one large chunk at a time is made and waits for memory.

        Args:
            measure: function that returns a chunk's number of bytes.
            num_bytes: approximate number of bytes of log-probabilities in the chunk.
        """
        async with AsyncExitStack() as claims:
            is_large = num_bytes >= MIN_LARGE_JSON_BYTES
            turn = None
            if is_large:
                turn = await _wait_for_claim(self.large_chunk_turn, 1, client.owner)
            try:
                chunk = await self.run_json_job(make_chunk, num_bytes, client)
                claim = self.claimed_logprobs_bytes(measure(chunk), client.owner)
                await claims.enter_async_context(claim)
            finally:
                if turn is not None:
                    turn.release()
            yield chunk

    def claim_answer_bytes(self, num_bytes: int) -> ByteClaim:
        """Reserve ``num_bytes`` of the answer budget: the JSON of an answer, or of the fields of a
        request that the answer repeats. The caller releases the claim once the client has read the
        answer.

        Raises:
            ProtocolError: if the answers that clients have not read leave too few bytes.
        """
        return _claim_at_once(self.answer_budget, num_bytes)

    def claim_conversation_bytes(self, num_bytes: int) -> ByteClaim:
        """Reserve ``num_bytes`` of the conversation budget for a response. The caller releases the
        returned claim once the client has read the answer.

        Raises:
            ProtocolError: if the conversations of other responses leave too few bytes.
        """
        return _claim_at_once(self.conversation_budget, num_bytes)

    def max_packed_logprobs_bytes(self, request: SamplingFields) -> int:
        """Maximum memory of the log-probabilities of an answer in packed form."""
        num_top, limit = request.num_logprobs, self.engine.config.max_logprobs
        if num_top is None:
            return 0
        return packed_logprobs_bytes(
            request.max_logprobs_tokens(self.engine.max_model_len),
            num_top if limit < 0 else min(num_top, limit),  # The engine refuses a larger number.
        )

    def claim_packed_logprobs_bytes(self, num_bytes: int) -> ByteClaim:
        """Reserve memory for the packed log-probabilities of an answer. The caller releases the
        claim at the end of the answer.

        Raises:
            ProtocolError: if the answers that clients have not read leave too few bytes.
        """
        return _claim_at_once(self.packed_logprobs_budget, num_bytes)

    def release_claim(
        self, claim: ByteClaim | None, untokenized_streams: Sequence[TokenStream] = ()
    ) -> None:
        """Release the memory claimed for a body, once the prompts of ``untokenized_streams`` are
        tokenised, or their requests have ended."""
        if claim is None:
            return
        num_left = 1

        def release_after_last_prompt() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                claim.release()

        for stream in untokenized_streams:
            raw_prompt = stream._group.raw_prompt
            if raw_prompt is not None:
                num_left += 1
                post_when_freed(raw_prompt, release_after_last_prompt)
            del raw_prompt
        release_after_last_prompt()

    def resolve_model_name(self, requested: str | None) -> str:
        """Find the model's name for an answer.

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

    def check_not_draining(self) -> None:
        """Raise ProtocolError while the server drains."""
        if self.is_draining:
            raise ProtocolError(
                "the server is about to close; ask another",
                code="server_shutting_down",
                status=503,
                headers={"Retry-After": "1"},
            )


def check_room(budget: ByteBudget, num_bytes: int) -> None:
    """Check whether an answer can claim bytes of a budget. Fewer than MIN_LARGE_JSON_BYTES do not
    count. Any thread may call this.

    Raises:
        ProtocolError: if the answers that clients have not read leave too few bytes.
    """
    if num_bytes >= MIN_LARGE_JSON_BYTES and not budget.has_room(num_bytes):
        raise ProtocolError(
            "too many long answers and conversations are under way, until their clients have read "
            "the answers; ask again later",
            code="server_overloaded",
            status=429,
            headers={"Retry-After": "1"},
        )


def _claim_at_once(budget: ByteBudget, num_bytes: int) -> ByteClaim:
    """Claim bytes of a budget for an answer; raises ProtocolError like ``check_room``."""
    check_room(budget, num_bytes)
    return budget.claim(num_bytes if num_bytes >= MIN_LARGE_JSON_BYTES else 0, lambda: None)


async def _wait_for_claim(budget: ByteBudget, num_bytes: int, owner: str) -> ByteClaim:
    """Claim bytes of a budget, waiting until they are granted, in turns by owner."""
    granted = anyio.Event()
    claim = budget.claim(num_bytes, granted.set, owner)
    try:
        await granted.wait()
    except BaseException:
        claim.release()
        raise
    return claim


def default_model_names(engine: AsyncLLMEngine) -> Sequence[str]:
    """Names of the model for clients: ``EngineConfig.served_model_name``, else the name of
    ``EngineConfig.model``, or the last part of its path."""
    config = engine.config
    if config.served_model_name is not None:
        return config.served_model_name
    name = config.model_name
    is_path = config.model is not None and os.path.exists(name)
    return (os.path.basename(name.rstrip("/")) or name,) if is_path else (name,)
