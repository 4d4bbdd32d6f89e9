"""ResponseSession: one connection that speaks OpenAI's Responses WebSocket mode.

Reading and generating are two tasks: the reader sees a close, a cancellation or a second
request while a response is on its way, and is the one that ends it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup
from websockets.exceptions import ConnectionClosed

from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import AsyncLLMError, EngineClosedError, EngineDeadError
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.protocol_error import ProtocolError, from_engine_error
from asyncllm.serving.response_events import ResponseEvents, encode
from asyncllm.serving.response_history import Messages, ResponseHistory
from asyncllm.serving.response_request import ENGINE_NAMES, ResponseRequest
from asyncllm.stream import TokenStream

logger = logging.getLogger("asyncllm.serving.websocket")

MAX_CONTINUABLE = 32
"""Responses of a connection that can be continued."""

MAX_ERRORS = 64
"""Requests that may fail in a row by the client's own fault."""


class Connection(Protocol):
    """A WebSocket connection of the ``websockets`` library: the part that is used."""

    async def send(self, message: str) -> None: ...

    async def close(self, code: int = 1000, reason: str = "") -> None: ...

    def __aiter__(self) -> AsyncIterator[str | bytes]: ...


class ResponseSession:
    """Reads requests of one connection and answers them, one at a time.

    Args:
        connection: open. It is closed here only for the protocol's own reasons.
        engine: shared with the other connections.
        model_name: the only value of ``model`` that is accepted.
        timeout: seconds a response may take, or None.
        pacer: shared by all connections.

    Attributes:
        current: the response in flight, if any.
    """

    def __init__(
        self,
        connection: Connection,
        engine: AsyncLLMEngine,
        *,
        model_name: str,
        timeout: float | None,
        pacer: FramePacer,
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._model_name = model_name
        self._timeout = timeout
        self._pacer = pacer
        self._history = ResponseHistory(MAX_CONTINUABLE)
        self._num_errors = 0
        self._stream: TokenStream | None = None
        self._tasks: TaskGroup
        self.current: ResponseEvents | None = None

    async def run(self) -> None:
        """Until the connection is closed, by either side."""
        # A task of the group runs up to its first wait even if it is cancelled before, so each
        # response ends what it has begun.
        async with anyio.create_task_group() as self._tasks:
            with contextlib.suppress(ConnectionClosed):
                async for message in self._connection:
                    await self._receive(message)
            self._tasks.cancel_scope.cancel()

    # --- requests -----------------------------------------------------------------------

    async def _receive(self, message: str | bytes) -> None:
        try:
            event = decode(message)
            kind = event.get("type")
            if kind == "response.create":
                self._create(event)
            elif kind == "response.cancel":
                self._cancel()
            else:
                raise ProtocolError(
                    "type: expected 'response.create' or 'response.cancel'",
                    code="unknown_event",
                    param="type",
                )
        except ProtocolError as error:
            await self._refuse(error)
        except AsyncLLMError as error:
            await self._refuse(from_engine_error(error, ENGINE_NAMES))
            await self._close_with(error)
        else:
            self._num_errors = 0

    async def _refuse(self, error: ProtocolError) -> None:
        await self._connection.send(encode(error.event()))
        if not error.is_clients_fault:
            return
        self._num_errors += 1
        if self._num_errors >= MAX_ERRORS:
            await self._connection.close(1008, f"{MAX_ERRORS} invalid messages in a row")

    async def _close_with(self, error: AsyncLLMError) -> None:
        """An engine that is gone takes its connections with it."""
        if isinstance(error, EngineClosedError):
            await self._connection.close(1001, "the engine is closed")
        elif isinstance(error, EngineDeadError):
            await self._connection.close(1011, "the engine failed")

    def _create(self, event: dict[str, Any]) -> None:
        if self.current is not None:
            raise ProtocolError(
                f"response {self.current.id!r} is in flight; one at a time on a connection",
                code="response_already_in_flight",
                status=409,
            )
        request = ResponseRequest.parse(event, self._model_name)
        conversation = self._history.up_to(request.previous_response_id) + request.messages
        stream = self._submit(request, conversation)
        events = ResponseEvents(
            request,
            model_name=self._model_name,
            defaults=self._engine.model_config.generation_defaults or {},
            decode=self._engine.tokenizer.decode,
        )
        self.current, self._stream = events, stream
        self._pacer.begin()
        self._tasks.start_soon(self._respond, stream, events, conversation)

    def _submit(self, request: ResponseRequest, conversation: Messages) -> TokenStream:
        sampling = dict(request.sampling)
        if request.top_logprobs is not None:
            sampling["logprobs"] = request.top_logprobs
        if not request.generate:
            # One token is the least that has the whole prompt computed, and so cached.
            sampling["max_tokens"] = 1
        if request.instructions is not None:
            conversation = ({"role": "system", "content": request.instructions}, *conversation)
        return self._engine.chat(conversation, timeout=self._timeout, **request.options, **sampling)

    def _cancel(self) -> None:
        if self._stream is None:
            raise ProtocolError("no response is in flight", code="response_not_in_flight")
        self._stream.abort()

    # --- responses ----------------------------------------------------------------------

    async def _respond(
        self, stream: TokenStream, events: ResponseEvents, conversation: Messages
    ) -> None:
        try:
            async with stream:
                await self._tell(stream, events, conversation)
        except AsyncLLMError as error:
            self._end()
            with contextlib.suppress(ConnectionClosed):
                await self._send_all(events.failed(from_engine_error(error, ENGINE_NAMES)))
                await self._close_with(error)
        except ConnectionClosed:
            return
        except Exception:
            logger.exception("response %s failed", events.id)
            await self._connection.close(1011, "internal error")
        finally:
            self._end()

    async def _tell(
        self, stream: TokenStream, events: ResponseEvents, conversation: Messages
    ) -> None:
        send = self._connection.send
        await self._send_all(events.created())
        generate = events.generates
        async for delta in stream:
            if generate:
                for event in events.delta(delta):
                    await send(event)
                if delta.finish_reason is None and (pause := self._pacer.pause) > 0:
                    # What comes meanwhile is merged into one frame.
                    await anyio.sleep(pause)
        if generate:
            conversation = (*conversation, {"role": "assistant", "content": events.text})
        self._history.add(events.id, conversation)
        # Before the last event is sent: the next request may be there before the send returns.
        self._end()
        await self._send_all(events.completed(stream.finish_reason, stream.usage))

    def _end(self) -> None:
        if self.current is not None:
            self.current = self._stream = None
            self._pacer.end()

    async def _send_all(self, events: Iterable[str]) -> None:
        for event in events:
            await self._connection.send(event)


def decode(message: str | bytes) -> dict[str, Any]:
    """A message as an event.

    Raises:
        ProtocolError: if it is no JSON object, or holds what JSON or UTF-8 cannot say.
    """
    if not isinstance(message, str):
        raise ProtocolError("binary message: expected text", code="invalid_message")
    try:
        event = json.loads(message, parse_constant=_refuse_constant)
        if "\\u" in message:
            # Escapes can spell half a surrogate pair, which no text and no token is made of.
            json.dumps(event, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"message: expected a JSON object ({type(error).__name__})", code="invalid_json"
        ) from error
    if not isinstance(event, dict):
        raise ProtocolError("message: expected a JSON object", code="invalid_json")
    return event


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
