"""Answers of completions and chat completions: one or several streams, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio
from pydantic_core import to_json

from asyncllm.outputs import Completion, Delta
from asyncllm.serving.choices_writer import ChoicesWriter
from asyncllm.serving.event_sender import (
    EventSender,
    abort_on_disconnect,
    open_event_sender,
    task_group,
)
from asyncllm.serving.exchange import Exchange, encode_json
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.sampling_fields import ChoicesRequest
from asyncllm.serving.serving import (
    MIN_LARGE_JSON_BYTES,
    MIN_WORKER_JSON_BYTES,
    ServingContext,
)
from asyncllm.serving.token_logprobs import num_logprobs_bytes
from asyncllm.stream import TokenStream

MAX_MERGED_DELTAS = 1024
"""Maximum number of ready deltas that are merged into one write."""

MAX_FULL_ANSWER_LOGPROBS_BYTES = 3 << 24
"""Maximum number of JSON bytes of the log-probabilities in a whole answer. Writing the answer takes
four times as much memory."""

_BYTES_PER_OUTPUT = 256
"""Estimated time to submit one output, expressed as the bytes of JSON that are parsed in that time.
``run_json_job`` chooses the thread by this number."""

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

    def submit(request: RequestT) -> tuple[bool | None, Sequence[TokenStream], ChoicesWriter]:
        model = server_context.resolve_model_name(request.model)
        streams = request.submit(
            server_context.engine, server_context.request_options(exchange.owner)
        )
        return request.stream, streams, writer_type(model, request, server_context.engine.tokenizer)

    def parse_and_submit_one(body: bytes) -> Any:
        request = request_type.parse(parse_json(body), server_context.unsupported_fields)
        if request.num_prompts == 1 or len(body) >= MIN_WORKER_JSON_BYTES:
            return submit(request)
        return request

    submitted = await exchange.process_body(parse_and_submit_one)
    if isinstance(submitted, request_type):
        num_outputs = submitted.num_prompts * submitted.num_outputs
        job = partial(submit, submitted)
        submitted = await server_context.run_json_job(job, num_outputs * _BYTES_PER_OUTPUT)
        del job  # It refers to the prompts, which may take megabytes.
    is_streamed, streams, writer = submitted
    exchange.release_body(untokenized_streams=streams)
    if is_streamed:
        async with open_event_sender(
            server_context, exchange, streams, writer.first_chunks().encode(), _error_event
        ) as sender:
            await _send_chunks(server_context, streams, writer, sender)
    else:
        await _send_full_answer(server_context, exchange, streams, writer)


def _error_event(error: ProtocolError) -> bytes:
    return f"data: {encode_json(error.body())}\n\n".encode()


async def _send_full_answer(
    server_context: ServingContext,
    exchange: Exchange,
    streams: Sequence[TokenStream],
    writer: ChoicesWriter,
) -> None:
    """Send a whole answer. If ProtocolError or AsyncLLMError is raised, nothing was sent."""
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
    num_bytes = sum(map(_num_completion_logprobs_bytes, completions))
    if num_bytes > MAX_FULL_ANSWER_LOGPROBS_BYTES:
        raise ProtocolError(
            f"logprobs: take {num_bytes} bytes in the answer, expected at most "
            f'{MAX_FULL_ANSWER_LOGPROBS_BYTES} in a whole one: "stream": true, or fewer outputs or '
            "log-probabilities",
            code="answer_too_large",
            param="logprobs",
        )
    answer = await server_context.run_json_job(
        lambda: to_json(writer.full_answer(completions)), num_bytes
    )
    await exchange.respond(200, answer)


def _num_completion_logprobs_bytes(completion: Completion) -> int:
    """Approximate number of JSON bytes of a completion's log-probabilities."""
    # Each output may echo the prompt.
    echoed = len(completion.outputs) * num_logprobs_bytes(completion.prompt_logprobs)
    return echoed + sum(num_logprobs_bytes(output.logprobs) for output in completion.outputs)


async def _send_chunks(
    server_context: ServingContext,
    streams: Sequence[TokenStream],
    writer: ChoicesWriter,
    sender: EventSender,
) -> None:
    """Send the chunks of all streams as they arrive. The first error of a stream ends them all."""

    async def send_stream(stream: TokenStream, first_choice_index: int) -> None:
        pacer, chunks, send = server_context.frame_pacer, writer.chunks, sender.send
        num_read = 0
        unsent: dict[int, Delta] = {}
        async for delta in stream:
            if delta.finish_reason == "abort":
                raise aborted_error()
            has_unread = stream._has_unread
            if has_unread or unsent or delta.logprobs is not None:
                index, num_read = delta.index, num_read + 1
                unsent[index] = join_deltas(unsent[index], delta) if index in unsent else delta
                if has_unread and num_read < MAX_MERGED_DELTAS:
                    continue
                text = ""
                for unsent_delta in unsent.values():
                    job = partial(chunks, unsent_delta, first_choice_index, stream)
                    num_bytes = writer.num_logprobs_bytes(unsent_delta, first_choice_index, stream)
                    text += await server_context.run_json_job(job, num_bytes)
                    if len(text) >= MIN_LARGE_JSON_BYTES:
                        await send(text.encode())
                        text = ""
                unsent.clear()
                num_read = 0
            else:  # Nearly every token takes this fast path.
                text = chunks(delta, first_choice_index, stream)
            if text:
                await send(text.encode())
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


def join_deltas(earlier: Delta, later: Delta) -> Delta:
    """Join two consecutive deltas of an output."""
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=((earlier.logprobs or ()) + (later.logprobs or ())) or None,
        reasoning=earlier.reasoning + later.reasoning,
        tool_calls=earlier.tool_calls + later.tool_calls,
    )


def aborted_error() -> ProtocolError:
    """Make the error for a request that was aborted by the server, not by its client."""
    return ProtocolError(
        "the request was aborted, as when the server closes; send it again",
        code="server_shutting_down",
        status=503,
    )
