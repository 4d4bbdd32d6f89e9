"""Answers of completions and chat completions: one or several streams, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Protocol

import anyio
from pydantic_core import to_json

from asyncllm.errors import AsyncLLMError
from asyncllm.outputs import Completion, Delta, Usage
from asyncllm.serving.answers import TokenUsage, Truncation
from asyncllm.serving.exchange import ClientGoneError, Exchange, encode
from asyncllm.serving.protocol_error import ProtocolError, from_engine_error
from asyncllm.serving.serving import Serving
from asyncllm.serving.token_logprobs import logprobs_size
from asyncllm.stream import TokenStream

MAX_READS = 1024
"""Most deltas of a stream that are merged into one write, because reading them does not wait."""

PING = ": ping\n\n"
"""Comment that clients ignore and proxies count as traffic."""


class ChoicesWriter(Protocol):
    """Writer of one answer in a protocol. ``base`` is the index of a stream's first choice.

    Attributes:
        ENGINE_NAMES: names of engine parameters to the protocol's names, where they differ.
    """

    ENGINE_NAMES: ClassVar[dict[str, str]]

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]: ...

    def opening(self) -> str:
        """Events before the first delta."""
        ...

    def chunks(self, delta: Delta, base: int, stream: TokenStream) -> str:
        """Events of a delta; empty if there is nothing to send yet."""
        ...

    def size(self, delta: Delta, base: int, stream: TokenStream) -> int:
        """Bytes of a delta's log-probabilities, about."""
        ...

    def closing(self, usages: Sequence[Usage | None]) -> str: ...


class KeepAlive:
    """Sends comments to keep a silent connection alive. Each event sets ``has_sent``, which costs a
    fraction of a read with a timeout.

    Args:
        seconds: longest silence.
        send: sends a text to the client; raises OSError if it is gone.

    Attributes:
        has_sent: whether anything was sent since the last check.
    """

    def __init__(self, seconds: float, send: Callable[[str], Awaitable[None]]) -> None:
        self.has_sent = False
        self._seconds = seconds
        self._send = send

    async def fill(self) -> None:
        """Run until it is cancelled or the client is gone."""
        with suppress(OSError):
            while True:
                await anyio.sleep(self._seconds / 2)
                if not self.has_sent:
                    await self._send(PING)
                self.has_sent = False


@asynccontextmanager
async def abort_on_disconnect(
    exchange: Exchange, streams: Sequence[TokenStream], keep_alive: KeepAlive | None = None
) -> AsyncIterator[None]:
    """Abort the streams when the client closes its connection, or the block is left.

    Args:
        keep_alive: sends its comments meanwhile.

    Raises:
        ClientGoneError: at the end of the block, if the client has gone meanwhile.
    """
    gone = False
    failure: Exception | None = None

    async def watch() -> None:
        nonlocal gone
        await exchange.gone()
        gone = True
        for stream in streams:
            stream.abort()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            if keep_alive is not None:
                tasks.start_soon(keep_alive.fill)
            try:
                yield
            except Exception as error:  # the task group would wrap the error
                failure = error
            tasks.cancel_scope.cancel()
    finally:
        for stream in streams:
            stream.close()
    if gone:
        raise ClientGoneError
    if failure is not None:
        raise failure


async def answer_whole(
    serving: Serving, exchange: Exchange, streams: Sequence[TokenStream], writer: ChoicesWriter
) -> None:
    """Send a whole answer. Raises ProtocolError or AsyncLLMError before anything is sent."""
    async with abort_on_disconnect(exchange, streams):
        completions = [await stream.result() for stream in streams]
    for completion in completions:
        if any(output.finish_reason == "abort" for output in completion.outputs):
            raise aborted_error()
    size = sum(map(_size, completions))
    await exchange.respond(200, await serving.run(lambda: to_json(writer.whole(completions)), size))


def _size(completion: Completion) -> int:
    """Bytes of a completion's log-probabilities, about. Each output may echo the prompt."""
    echoed = len(completion.outputs) * logprobs_size(completion.prompt_logprobs)
    return echoed + sum(logprobs_size(output.logprobs) for output in completion.outputs)


class EventAnswer:
    """Answer in server-sent events.

    It begins with its first chunk or comment, so that an error of the first read (for too long a
    prompt, say) still has its HTTP status. Later errors are events.
    """

    def __init__(
        self,
        serving: Serving,
        exchange: Exchange,
        streams: Sequence[TokenStream],
        writer: ChoicesWriter,
    ) -> None:
        self._serving = serving
        self._exchange = exchange
        self._streams = streams
        self._writer = writer
        self._pacer = serving.pacer
        self._keep_alive = KeepAlive(serving.ping_interval, self._send)
        self._opening = anyio.Lock()
        self._opened = False

    async def run(self) -> None:
        """Send the answer. Raises ProtocolError or AsyncLLMError if nothing was sent yet."""
        self._pacer.begin()
        try:
            async with abort_on_disconnect(self._exchange, self._streams, self._keep_alive):
                await self._send_streams()
        except (ProtocolError, AsyncLLMError) as error:
            if not self._exchange.started:
                raise
            if isinstance(error, AsyncLLMError):
                error = from_engine_error(error, self._writer.ENGINE_NAMES)
            await self._exchange.send_events(f"data: {encode(error.body())}\n\n")
        finally:
            self._pacer.end()
        await self._exchange.end_events()

    async def _send_streams(self) -> None:
        if len(self._streams) == 1:
            await self._send_stream(self._streams[0], 0)
        else:
            await self._send_several()
        usages = [stream.usage for stream in self._streams]
        await self._send(self._writer.closing(usages) + "data: [DONE]\n\n")

    async def _send_several(self) -> None:
        """Send the chunks of several streams as they arrive. The first error ends all."""
        failure: list[Exception] = []

        async def tell(stream: TokenStream, base: int) -> None:
            try:
                await self._send_stream(stream, base)
            except Exception as error:
                failure.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            base = 0
            for stream in self._streams:
                tasks.start_soon(tell, stream, base)
                base += stream.num_outputs
        if failure:
            raise failure[0]

    async def _send_stream(self, stream: TokenStream, base: int) -> None:
        pacer, chunks, keep_alive = self._pacer, self._writer.chunks, self._keep_alive
        send, num_read = self._exchange.send_events, 0
        unsent: dict[int, Delta] = {}
        async for delta in stream:
            if delta.finish_reason == "abort":
                raise aborted_error()
            has_unread = stream._has_unread
            if has_unread or unsent or delta.logprobs is not None:
                index, num_read = delta.index, num_read + 1
                unsent[index] = joined(unsent[index], delta) if index in unsent else delta
                if has_unread and num_read < MAX_READS:
                    continue
                text, num_read = await self._chunks(list(unsent.values()), base, stream), 0
                unsent.clear()
            else:  # the usual token, whose time counts
                text = chunks(delta, base, stream)
            if text:
                keep_alive.has_sent = True
                await (send(text) if self._opened else self._open(text))
            if stream.usage is None and (pause := pacer.pause) > 0:
                # Tokens of each output that arrive meanwhile are merged into one chunk.
                await anyio.sleep(pause)

    async def _chunks(self, deltas: Sequence[Delta], base: int, stream: TokenStream) -> str:
        writer, text = self._writer, ""
        for delta in deltas:
            size = 0 if delta.logprobs is None else writer.size(delta, base, stream)
            job = partial(writer.chunks, delta, base, stream)
            text += await self._serving.run(job, size)
        return text

    async def _send(self, text: str) -> None:
        if self._opened:
            await self._exchange.send_events(text)
        else:
            await self._open(text)

    async def _open(self, text: str) -> None:
        """Send ``text``, with the opening before it if this stream is the first; others wait."""
        async with self._opening:
            if not self._opened:
                await self._exchange.start_events()
                text = self._writer.opening() + text
            await self._exchange.send_events(text)
            self._opened = True


def joined(one: Delta, other: Delta) -> Delta:
    """Join two consecutive deltas of an output."""
    return Delta(
        one.text + other.text,
        one.token_ids + other.token_ids,
        one.index,
        ((one.logprobs or ()) + (other.logprobs or ())) or None,
        other.finish_reason,
        other.stop_reason,
        other.usage,
        one.reasoning + other.reasoning,
        one.tool_calls + other.tool_calls,
    )


def aborted_error() -> ProtocolError:
    """Error for a request that something other than its client aborted."""
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
    """The field of ``usage`` that tells what was cut from a prompt."""
    return {"truncated_prompt_tokens": num_tokens} if num_tokens else {}
