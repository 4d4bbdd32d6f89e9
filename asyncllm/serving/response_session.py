"""ResponseSession: one connection in OpenAI's Responses WebSocket mode.

Reading and generating are two tasks. During a response, the reader sees a close, a cancellation or
a second request, and ends the response.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asyncllm.errors import AsyncLLMError, EngineClosedError, EngineDeadError
from asyncllm.serving.client import DISCONNECT_ERRORS
from asyncllm.serving.exchange import encode_json
from asyncllm.serving.protocol_error import ProtocolError, to_protocol_error
from asyncllm.serving.request_body import parse_json, unsupported_error
from asyncllm.serving.response_events import ResponseEvent
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.response_store import ResponseStore
from asyncllm.serving.response_turn import ResponseTurn
from asyncllm.serving.serving import ServingContext
from asyncllm.serving.sockets import WebSocketConnection
from asyncllm.stream import TokenStream

logger = logging.getLogger(__name__)

FIELD_BY_ENGINE_PARAM = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}

MAX_UNSTORED_RESPONSES = 32
"""Maximum number of responses with ``store=false`` that a connection can continue."""

MAX_UNSTORED_RESPONSE_BYTES = 1 << 20
"""Maximum total bytes of the responses with ``store=false`` that a connection can continue."""

MAX_CONSECUTIVE_ERRORS = 64
"""Maximum number of consecutive requests that may fail through the client's fault."""


@dataclass(eq=False, repr=False)
class ResponseSession:
    """Reader of one connection's requests, which it answers one at a time.

    Args:
        connection: open connection. The session closes it only on errors; otherwise the caller
            does.
        server_context: shared with the other connections.
        owner: owner of the responses that the session creates and continues.

    Attributes:
        current_turn: the response in flight, if any.
    """

    connection: WebSocketConnection
    server_context: ServingContext
    owner: str
    current_turn: ResponseTurn | None = None
    _unstored_responses: ResponseStore = field(init=False)
    _num_consecutive_errors: int = 0
    _is_closing: bool = False
    _tasks: TaskGroup = field(init=False)

    def __post_init__(self) -> None:
        self._unstored_responses = ResponseStore(
            MAX_UNSTORED_RESPONSES,
            MAX_UNSTORED_RESPONSE_BYTES,
            self.server_context.unstored_response_bytes,
        )

    async def run(self) -> None:
        """Run until either side closes the connection."""
        # A task of the group runs up to its first wait even if it was cancelled before, so each
        # response is cleaned up.
        try:
            async with anyio.create_task_group() as self._tasks:
                with contextlib.suppress(*DISCONNECT_ERRORS):
                    async for message in self.connection:
                        # Keep UTF-8 while the message waits for memory: one emoji makes a ``str``
                        # four times as large.
                        is_text = isinstance(message, str)
                        data = message.encode("utf-8", "surrogatepass") if is_text else None
                        del message
                        error = None if self._is_closing else await self._handle_message(data)
                        # Free the data: the client may read the error, or send more, much later.
                        del data
                        self.connection.release_message()
                        if error is not None:
                            await self._send_error(error)
                self._tasks.cancel_scope.cancel()
        finally:
            self._unstored_responses.clear()

    async def wait_for_disconnect(self) -> None:
        """Wait until the client's connection is lost."""
        await self.connection.wait_for_disconnect()

    # --- requests -----------------------------------------------------------------------

    async def _handle_message(self, message: bytes | None) -> ProtocolError | None:
        """Execute a message; returns the error to send, if any.

        Args:
            message: text message as UTF-8; None for a binary message, which is an error.
        """
        try:
            await self._execute_message(message)
        except (ProtocolError, AsyncLLMError) as error:
            self._close_on_engine_end(error)
            return to_protocol_error(error, FIELD_BY_ENGINE_PARAM)
        self._num_consecutive_errors = 0
        return None

    async def _execute_message(self, message: bytes | None) -> None:
        if message is None:
            raise ProtocolError("binary message: expected text", code="invalid_message")
        # Claim bytes before decoding: decoded, a message takes several times its length.
        num_bytes = len(message)
        claim = await self.server_context.claim_body_bytes(num_bytes, self.owner)
        streams: list[TokenStream] = []
        try:
            event = await self.server_context.run_json_job(
                partial(parse_json, message), num_bytes, self
            )
            kind = event.pop("type", None)
            if kind == "response.create":
                streams.append(await self._create_response(event, num_bytes))
            elif kind == "response.cancel":
                if self.current_turn is None:
                    raise ProtocolError("no response is in flight", code="response_not_in_flight")
                self.current_turn.stream.abort()
            else:
                raise ProtocolError(
                    "type: expected 'response.create' or 'response.cancel'",
                    code="unknown_event",
                    param="type",
                )
        finally:
            self.server_context.release_claim(claim, untokenized_streams=streams)

    async def _send_error(self, error: ProtocolError) -> None:
        await self.connection.send(encode_json(error.event()))
        if not error.is_client_error:
            return
        self._num_consecutive_errors += 1
        if self._num_consecutive_errors >= MAX_CONSECUTIVE_ERRORS:
            self._close(1008, f"{MAX_CONSECUTIVE_ERRORS} invalid messages in a row")

    def _close_on_engine_end(self, error: Exception) -> None:
        """Close the connection if the engine has closed or died."""
        if isinstance(error, EngineClosedError):
            self._close(1001, "the engine is closed")
        elif isinstance(error, EngineDeadError):
            self._close(1011, "the engine failed")

    def _close(self, code: int, reason: str) -> None:
        """Start the close handshake. The reader goes on and drops messages, because the client's
        close frame comes after them."""
        self._is_closing = True
        self._tasks.start_soon(self.connection.close, code, reason)

    async def _create_response(self, event: dict[str, Any], num_request_bytes: int) -> TokenStream:
        if self.current_turn is not None:
            raise ProtocolError(
                f"response {self.current_turn.events.id!r} is in flight; one at a time on a "
                "connection",
                code="response_already_in_flight",
                status=409,
            )
        self.server_context.check_not_draining()
        request = await self.server_context.run_json_job(
            lambda: ResponseRequest.parse(event, self.server_context.unsupported_fields),
            num_request_bytes,
            self,
        )
        if request.stream is False:
            raise unsupported_error("stream", False, (True,))
        turn = await ResponseTurn.begin(
            self.server_context, self, request, num_request_bytes, self._unstored_responses
        )
        self.current_turn = turn
        self.server_context.frame_pacer.begin_response()
        self._tasks.start_soon(self._respond, turn)
        return turn.stream

    # --- responses ----------------------------------------------------------------------

    async def _respond(self, turn: ResponseTurn) -> None:
        try:
            async with turn.stream:
                await self._send_all(await turn.collect_events(turn.events.created_events()))
                await turn.run(self._send_all, before_end=partial(self._end_turn, turn))
        except AsyncLLMError as error:
            self._end_turn(turn)
            with contextlib.suppress(*DISCONNECT_ERRORS):
                failed = turn.events.failed_events(to_protocol_error(error, FIELD_BY_ENGINE_PARAM))
                await self._send_all(await turn.collect_events(failed))
                self._close_on_engine_end(error)
        except DISCONNECT_ERRORS:
            return
        except Exception:
            logger.exception("response %s failed", turn.events.id)
            self._close(1011, "internal error")
        finally:
            turn.release()
            self._end_turn(turn)

    def _end_turn(self, turn: ResponseTurn) -> None:
        """Allow the next response, unless it has begun while the turn's last events were sent."""
        if self.current_turn is turn:
            self.current_turn = None
            self.server_context.frame_pacer.end_response()

    async def _send_all(self, events: Iterable[ResponseEvent]) -> None:
        send = self.connection.send
        unsent = deque(events)
        del events
        while unsent:
            await send(unsent.popleft()[1])  # Refer to no event that is sent: it may be long.
