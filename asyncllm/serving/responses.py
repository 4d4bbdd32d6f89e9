"""``/v1/responses`` over HTTP, whole and as server-sent events, and on a WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from asyncllm.errors import AsyncLLMError
from asyncllm.outputs import Delta
from asyncllm.serving.access import PROTOCOL
from asyncllm.serving.choices import PING, abort_when_gone, aborted
from asyncllm.serving.exchange import OWNER, ClientGoneError, Exchange, Receive, Scope, Send
from asyncllm.serving.offload import submitted
from asyncllm.serving.protocol_error import from_engine_error
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.response_events import Event
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.response_session import ENGINE_NAMES, ResponseSession
from asyncllm.serving.response_store import response_not_found
from asyncllm.serving.response_turn import ResponseTurn
from asyncllm.serving.serving import Serving


async def create_response(serving: Serving, exchange: Exchange) -> None:
    request = ResponseRequest.parse(parse_json(await exchange.body()))
    turn = await submitted(
        lambda: ResponseTurn.begin(serving, exchange.owner, request), len(request.tools or ())
    )
    if request.stream:
        await _tell_events(serving, exchange, turn)
        return
    async with abort_when_gone(exchange, [turn.stream]):
        await turn.tell(turn.stream, _send_nothing)
    if turn.stream.finish_reason == "abort":
        raise aborted()
    await exchange.respond(200, turn.events.body.encode())


async def _send_nothing(events: Iterable[Event]) -> None:
    for _ in events:
        pass


async def _tell_events(serving: Serving, exchange: Exchange, turn: ResponseTurn) -> None:
    """The answer begins with its first delta or ping, so that an error which the first read tells
    (of a long text, say) has its HTTP status. Later ones are an event."""

    async def send(events: Iterable[Event]) -> None:
        if text := "".join([f"event: {kind}\ndata: {data}\n\n" for kind, data in events]):
            await exchange.send_events(text)

    async def ping() -> None:
        await exchange.send_events(PING)

    serving.pacer.begin()
    try:
        async with abort_when_gone(exchange, [turn.stream]):
            deltas = turn.stream.with_heartbeat(serving.ping_interval)
            first = await anext(deltas)
            await exchange.start_events()
            await turn.tell(_with_first(first, deltas), send, ping=ping)
    except AsyncLLMError as error:
        if not exchange.started:
            raise
        await send(turn.events.failed(from_engine_error(error, ENGINE_NAMES)))
    finally:
        serving.pacer.end()
    await exchange.end_events()


async def _with_first(
    first: Delta | None, deltas: AsyncIterator[Delta | None]
) -> AsyncIterator[Delta | None]:
    yield first
    async for delta in deltas:
        yield delta


async def get_response(serving: Serving, exchange: Exchange) -> None:
    response_id = exchange.path_params["response_id"]
    found = serving.store.get(exchange.owner, response_id)
    if found is None:
        raise response_not_found(response_id)
    await exchange.respond(200, found.body.encode())


async def delete_response(serving: Serving, exchange: Exchange) -> None:
    response_id = exchange.path_params["response_id"]
    if not serving.store.remove(exchange.owner, response_id):
        raise response_not_found(response_id)
    await exchange.respond_json({"id": response_id, "object": "response", "deleted": True})


class AsgiConnection:
    """A WebSocket connection over ASGI, as a ResponseSession uses it."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._open = True

    async def send(self, message: str) -> None:
        await self._pass({"type": "websocket.send", "text": message})

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self._open:
            self._open = False
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _pass(self, message: dict[str, Any]) -> None:
        if not self._open:
            raise ClientGoneError
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGoneError from error

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive":
                text = message.get("text")
                yield message.get("bytes") or b"" if text is None else text
        self._open = False


class ResponsesSocket:
    """The WebSocket mode, as an ASGI application."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        subprotocol = PROTOCOL if PROTOCOL in scope.get("subprotocols", ()) else None
        await send({"type": "websocket.accept", "subprotocol": subprotocol})
        session = ResponseSession(
            AsgiConnection(receive, send), self._serving, scope.get(OWNER, ""), (ClientGoneError,)
        )
        await session.run()
        await session.connection.close()
