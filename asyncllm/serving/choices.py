"""Answers of completions and chat completions: one or several streams, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import anyio

from asyncllm.outputs import Completion, Delta
from asyncllm.sampling_params import INTEGER_FIELD_BOUNDS
from asyncllm.serving.byte_budget import ByteClaim
from asyncllm.serving.choices_writer import ChoicesWriter
from asyncllm.serving.client import ClientGoneError, task_group
from asyncllm.serving.event_sender import (
    EventSender,
    abort_on_disconnect,
    open_event_sender,
)
from asyncllm.serving.exchange import Exchange, encode_json
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.sampling_fields import ChoicesRequest
from asyncllm.serving.serving import (
    MIN_LARGE_JSON_BYTES,
    MIN_WORKER_JSON_BYTES,
    WRITE_PARSE_SPEED_RATIO,
    ServingContext,
    check_room,
)
from asyncllm.stream import TokenStream

MAX_MERGED_DELTAS = 1024
"""Maximum number of ready deltas that are merged into one write."""

MAX_FULL_ANSWER_LOGPROBS_BYTES = 3 << 24
"""Maximum number of JSON bytes of a whole answer with log-probabilities. While it is joined and
sent, two copies are in memory."""

_BYTES_PER_OUTPUT = 256
"""Estimated time to submit one output, expressed as the bytes of JSON that are parsed in that time.
``run_json_job`` chooses the thread by this number."""

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=ChoicesRequest)


async def handle_completion_request(
    request_type: type[RequestT],
    writer_type: Callable[[str, RequestT, Any], ChoicesWriter],
    server_context: ServingContext,
    exchange: Exchange,
) -> None:
    """Handle a request for a completion or a chat completion.

    Args:
        request_type: type of the request's body.
        writer_type: makes a writer from the model's name, the request and the tokenizer.
    """

    num_logprobs_bytes = num_echoed_bytes = 0
    # Make the budget here: only the event loop's thread may claim from it.
    logprobs_budget = server_context.packed_logprobs_budget

    def submit(request: RequestT) -> tuple[bool | None, Sequence[TokenStream], ChoicesWriter]:
        nonlocal num_logprobs_bytes, num_echoed_bytes
        model = server_context.resolve_model_name(request.model)
        num_logprobs_bytes = server_context.max_packed_logprobs_bytes(request)
        num_echoed_bytes = request.num_echoed_bytes
        # Many outputs take milliseconds to submit, even if they are refused afterwards.
        check_room(logprobs_budget, num_logprobs_bytes)
        check_room(server_context.answer_budget, num_echoed_bytes)
        streams = request.submit(
            server_context.engine, server_context.request_options(exchange.owner)
        )
        return request.stream, streams, writer_type(model, request, server_context.engine.tokenizer)

    def submit_bytes(request: RequestT) -> int:
        """Estimate the time to submit a request, as a number of JSON bytes parsed in that time."""
        num_outputs = min(request.num_outputs, INTEGER_FIELD_BOUNDS["n"][1])  # More are refused.
        return request.num_prompts * num_outputs * _BYTES_PER_OUTPUT

    def parse_and_submit_small(body: bytes) -> Any:
        request = request_type.parse(parse_json(body), server_context.unsupported_fields)
        is_on_worker = len(body) >= MIN_WORKER_JSON_BYTES
        if is_on_worker or submit_bytes(request) < MIN_WORKER_JSON_BYTES:
            return submit(request)
        return request

    submitted = await exchange.process_body(parse_and_submit_small)
    if isinstance(submitted, request_type):
        job = partial(submit, submitted)
        submitted = await server_context.run_json_job(job, submit_bytes(submitted), exchange)
        del job  # It refers to the prompts, which may take megabytes.
    is_streamed, streams, writer = submitted
    exchange.release_body(untokenized_streams=streams)
    with ExitStack() as held:
        for stream in streams:
            held.callback(stream.close)
        # Claim on this thread, because budgets belong to the event loop, and only now, because the
        # engine has checked the request: an invalid request must not take memory from others.
        claim = server_context.claim_packed_logprobs_bytes(num_logprobs_bytes)
        held.callback(claim.release)
        echo_claim = server_context.claim_answer_bytes(num_echoed_bytes)
        held.callback(echo_claim.release)
        if is_streamed:
            async with open_event_sender(
                server_context, exchange, streams, writer.first_chunks().encode(), _error_event
            ) as sender:
                await _send_chunks(server_context, streams, writer, exchange, sender)
        else:
            await _send_full_answer(server_context, exchange, streams, writer, echo_claim)


def _error_event(error: ProtocolError) -> bytes:
    return f"data: {encode_json(error.body())}\n\n".encode()


async def _send_full_answer(
    server_context: ServingContext,
    exchange: Exchange,
    streams: Sequence[TokenStream],
    writer: ChoicesWriter,
    echo_claim: ByteClaim,
) -> None:
    """Send a whole answer. If ProtocolError or AsyncLLMError is raised, nothing was sent.

    Args:
        echo_claim: claim for the prompts that the answer repeats.
    """
    answer = await _make_full_answer(
        server_context, exchange, streams, writer, echo_claim.num_bytes
    )
    # Free the outputs and prompts: the answer has copies, and the client may read it slowly.
    for stream in streams:
        stream._drop_read_output()
        stream._drop_prompt()
    echo_claim.release()  # ``respond`` claims the whole answer.
    await exchange.respond(200, answer)


async def _make_full_answer(
    server_context: ServingContext,
    exchange: Exchange,
    streams: Sequence[TokenStream],
    writer: ChoicesWriter,
    num_echoed_bytes: int,
) -> bytes:
    """Make a whole answer once all outputs have ended."""
    completion_of: dict[TokenStream, Completion] = {}

    async def read(stream: TokenStream) -> None:
        completion_of[stream] = await stream.result()

    # Read the streams concurrently, so that the first failed request ends the others.
    async with abort_on_disconnect(exchange, streams), task_group() as readers:
        for stream in streams:
            readers.start_soon(read, stream)
    completions = [completion_of[stream] for stream in streams]
    for completion in completions:
        if any(output.finish_reason == "abort" for output in completion.outputs):
            raise aborted_error()
    num_logprobs_bytes = writer.num_full_answer_logprobs_bytes(completions)
    _check_answer_size(num_logprobs_bytes)

    def write() -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        for part in writer.full_answer(completions):
            parts.append(part)
            num_bytes += len(part)
            if num_logprobs_bytes:  # The estimate is too low where tokens are long.
                _check_answer_size(num_bytes)
        return b"".join(parts)

    num_job_bytes = num_logprobs_bytes + num_echoed_bytes // WRITE_PARSE_SPEED_RATIO
    return await server_context.run_json_job(write, num_job_bytes, exchange)


def _check_answer_size(num_bytes: int) -> None:
    """Raise ProtocolError for a whole answer that is too long."""
    if num_bytes > MAX_FULL_ANSWER_LOGPROBS_BYTES:
        raise ProtocolError(
            f"logprobs: the answer takes more than {MAX_FULL_ANSWER_LOGPROBS_BYTES} bytes, "
            'expected "stream": true, or fewer outputs or log-probabilities',
            code="answer_too_large",
            param="logprobs",
        )


async def _send_chunks(
    server_context: ServingContext,
    streams: Sequence[TokenStream],
    writer: ChoicesWriter,
    exchange: Exchange,
    sender: EventSender,
) -> None:
    """Send the chunks of all streams as they arrive. The first error of a stream ends them all."""

    # Make and send one long chunk at a time. Until then the log-probabilities of the other streams
    # stay packed, which takes a fraction of the memory of JSON.
    long_chunk_lock = anyio.Lock()
    for stream in streams:
        stream._drop_read_output()
        if not writer.repeats_prompts:
            stream._drop_prompt()

    async def send_deltas(
        deltas: Sequence[Delta], first_choice_index: int, stream: TokenStream
    ) -> None:
        """Send deltas of a stream's outputs in one write, or in several if that would be long."""
        sizes = [writer.num_logprobs_bytes(delta, first_choice_index, stream) for delta in deltas]
        is_long = sum(sizes) >= MIN_WORKER_JSON_BYTES
        data = b""

        def append_chunks(data: bytes, delta: Delta) -> bytes:
            return data + writer.chunks(delta, first_choice_index, stream).encode()

        async with long_chunk_lock if is_long else nullcontext():
            for delta, num_bytes in zip(deltas, sizes, strict=True):
                if exchange.is_client_gone:
                    raise ClientGoneError
                append = partial(append_chunks, data, delta)
                async with (
                    server_context.claimed_chunk(append, len, num_bytes, exchange)
                    if is_long
                    else nullcontext(append())
                ) as data:
                    if len(data) >= MIN_LARGE_JSON_BYTES:
                        await sender.send(data)
                        data = b""
            if data:
                await sender.send(data)

    async def send_stream(stream: TokenStream, first_choice_index: int) -> None:
        pacer, chunks, send = server_context.frame_pacer, writer.chunks, sender.send
        num_read = 0
        unsent: dict[int, list[Delta]] = {}
        async for delta in stream:
            if delta.finish_reason == "abort":
                raise aborted_error()
            has_unread = stream._has_unread
            if has_unread or unsent or delta.logprobs is not None:
                num_read += 1
                unsent.setdefault(delta.index, []).append(delta)
                if has_unread and num_read < MAX_MERGED_DELTAS:
                    continue
                joined = list(map(join_deltas, unsent.values()))
                unsent.clear()
                num_read = 0
                await send_deltas(joined, first_choice_index, stream)
                del joined  # Free its log-probabilities: the next delta may come much later.
            # Nearly every token takes this fast path.
            elif data := chunks(delta, first_choice_index, stream).encode():
                await send(data)
            if stream.usage is None and (pause := pacer.pause_seconds) > 0:
                # Tokens that arrive meanwhile are merged into the next chunk of their output.
                await anyio.sleep(pause)

    async with task_group() as tasks:
        first_choice_index = 0
        for stream in streams:
            tasks.start_soon(send_stream, stream, first_choice_index)
            first_choice_index += stream.num_outputs
    usages = [stream.usage for stream in streams]
    await sender.send(f"{writer.final_chunks(usages)}data: [DONE]\n\n".encode())


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of an output."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=_concatenate(delta.token_ids for delta in deltas),
        logprobs=_concatenate(delta.logprobs or () for delta in deltas) or None,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_concatenate(delta.tool_calls for delta in deltas),
    )


def _concatenate(tuples: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(tuples))


def aborted_error() -> ProtocolError:
    """Make the error for a request that was aborted by the server, not by its client."""
    return ProtocolError(
        "the request was aborted, as when the server closes; send it again",
        code="server_shutting_down",
        status=503,
    )
