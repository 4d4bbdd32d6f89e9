"""Answers of completions and chat completions: one or several streams, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
from pydantic_core import to_json

from asyncllm.outputs import Completion, Delta, Usage
from asyncllm.serving.answers import TokenUsage, Truncation
from asyncllm.serving.event_sender import EventSender, abort_on_disconnect, sending_events
from asyncllm.serving.exchange import Exchange, encode
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.sampling_fields import ChoicesRequest
from asyncllm.serving.serving import Serving
from asyncllm.serving.token_logprobs import logprobs_size
from asyncllm.stream import TokenStream

MAX_READS = 1024
"""Maximum number of deltas that are merged into one write while more are ready to be read."""

RequestT = TypeVar("RequestT", bound=ChoicesRequest)


class ChoicesWriter(Protocol):
    """Interface of writers of one answer. ``base`` is the index of a stream's first choice."""

    def full_answer(self, completions: Sequence[Completion]) -> dict[str, Any]: ...

    def opening(self) -> str:
        """Events before the first delta."""
        ...

    def chunks(self, delta: Delta, base: int, stream: TokenStream) -> str:
        """Events of a delta, or an empty text if there is nothing to send yet."""
        ...

    def size(self, delta: Delta, base: int, stream: TokenStream) -> int:
        """Approximate number of JSON bytes of a delta's log-probabilities."""
        ...

    def final_chunks(self, usages: Sequence[Usage | None]) -> str: ...


async def answer_choices(
    request_type: type[RequestT],
    writer_type: Callable[[str, RequestT, Any], ChoicesWriter],
    serving: Serving,
    exchange: Exchange,
) -> None:
    """Handle a request of ``request_type``.

    Args:
        writer_type: makes a writer from the model's name, the request and the tokenizer.
    """
    request, streams, writer = await _submit(request_type, writer_type, serving, exchange)
    if request.stream:
        async with sending_events(
            serving, exchange, streams, writer.opening(), _error_event
        ) as sender:
            await ChoicesSender(serving, streams, writer, sender).run()
    else:
        await _answer_whole(serving, exchange, streams, writer)


async def _submit(
    request_type: type[RequestT],
    writer_type: Callable[[str, RequestT, Any], ChoicesWriter],
    serving: Serving,
    exchange: Exchange,
) -> tuple[RequestT, Sequence[TokenStream], ChoicesWriter]:
    """Read and submit a request. The body is freed when this returns."""
    body = await exchange.body()

    def submit() -> tuple[RequestT, Sequence[TokenStream], ChoicesWriter]:
        request = request_type.parse(parse_json(body), serving.unsupported_fields)
        model = serving.model_name(request.model)
        streams = request.submit(serving.engine, serving.options(exchange.owner))
        return request, streams, writer_type(model, request, serving.engine.tokenizer)

    submitted = await serving.run(submit, len(body))
    exchange.release_body(submitted[1])
    return submitted


def _error_event(error: ProtocolError) -> str:
    return f"data: {encode(error.body())}\n\n"


async def _answer_whole(
    serving: Serving, exchange: Exchange, streams: Sequence[TokenStream], writer: ChoicesWriter
) -> None:
    """Send a whole answer. Raises ProtocolError or AsyncLLMError before anything is sent."""
    async with abort_on_disconnect(exchange, streams):
        completions = [await stream.result() for stream in streams]
    for completion in completions:
        if any(output.finish_reason == "abort" for output in completion.outputs):
            raise aborted_error()
    size = sum(map(_completion_size, completions))
    await exchange.respond(
        200, await serving.run(lambda: to_json(writer.full_answer(completions)), size)
    )


def _completion_size(completion: Completion) -> int:
    """Approximate number of JSON bytes of a completion's log-probabilities."""
    # Each output may echo the prompt.
    echoed = len(completion.outputs) * logprobs_size(completion.prompt_logprobs)
    return echoed + sum(logprobs_size(output.logprobs) for output in completion.outputs)


@dataclass(eq=False, repr=False)
class ChoicesSender:
    """Sender of the streams' chunks, as they arrive."""

    _serving: Serving
    _streams: Sequence[TokenStream]
    _writer: ChoicesWriter
    _sender: EventSender

    async def run(self) -> None:
        if len(self._streams) == 1:
            await self._send_stream(self._streams[0], 0)
        else:
            await self._send_several()
        usages = [stream.usage for stream in self._streams]
        await self._sender.send(self._writer.final_chunks(usages) + "data: [DONE]\n\n")

    async def _send_several(self) -> None:
        """Send the chunks of several streams as they arrive. The first error ends all streams."""
        failure: list[Exception] = []

        async def send_chunks(stream: TokenStream, base: int) -> None:
            try:
                await self._send_stream(stream, base)
            except Exception as error:
                failure.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            base = 0
            for stream in self._streams:
                tasks.start_soon(send_chunks, stream, base)
                base += stream.num_outputs
        if failure:
            raise failure[0]

    async def _send_stream(self, stream: TokenStream, base: int) -> None:
        pacer, chunks, send = self._serving.pacer, self._writer.chunks, self._sender.send
        num_read = 0
        unsent: dict[int, Delta] = {}
        async for delta in stream:
            if delta.finish_reason == "abort":
                raise aborted_error()
            has_unread = stream._has_unread
            if has_unread or unsent or delta.logprobs is not None:
                index, num_read = delta.index, num_read + 1
                unsent[index] = join_deltas(unsent[index], delta) if index in unsent else delta
                if has_unread and num_read < MAX_READS:
                    continue
                text, num_read = await self._write_chunks(list(unsent.values()), base, stream), 0
                unsent.clear()
            else:  # Nearly every token takes this fast path.
                text = chunks(delta, base, stream)
            if text:
                await send(text)
            if stream.usage is None and (pause := pacer.pause) > 0:
                # Tokens of each output that arrive meanwhile are merged into one chunk.
                await anyio.sleep(pause)

    async def _write_chunks(self, deltas: Sequence[Delta], base: int, stream: TokenStream) -> str:
        writer, text = self._writer, ""
        for delta in deltas:
            size = 0 if delta.logprobs is None else writer.size(delta, base, stream)
            job = partial(writer.chunks, delta, base, stream)
            text += await self._serving.run(job, size)
        return text


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
    """Make the error for a request that was aborted, but not by its client."""
    return ProtocolError(
        "the request was aborted, as when the server closes; send it again",
        code="server_shutting_down",
        status=503,
    )


def usage_fields(usages: Iterable[Usage | None]) -> TokenUsage:
    """Write ``usage`` for one or several streams."""
    known = [usage for usage in usages if usage is not None]
    cut = sum(usage.truncated_prompt_tokens for usage in known)
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in known),
        "completion_tokens": sum(usage.completion_tokens for usage in known),
        "total_tokens": sum(usage.total_tokens for usage in known),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in known)},
        **truncation_field(cut),
    }


def truncation_field(num_tokens: int) -> Truncation:
    """Field of ``usage`` with the number of tokens cut from a prompt, if there are any."""
    return {"truncated_prompt_tokens": num_tokens} if num_tokens else {}
