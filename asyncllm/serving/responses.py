"""``/v1/responses`` over HTTP, whole and as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

from asyncllm.errors import AsyncLLMError
from asyncllm.serving.answers import DeletedResponse
from asyncllm.serving.choices import KeepAlive, abort_on_disconnect, aborted_error
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.protocol_error import from_engine_error
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.response_events import Event
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.response_session import ENGINE_NAMES
from asyncllm.serving.response_store import response_not_found
from asyncllm.serving.response_turn import ResponseTurn
from asyncllm.serving.serving import Serving


async def create_response(serving: Serving, exchange: Exchange) -> None:
    body = await exchange.body()

    def begin() -> tuple[ResponseRequest, ResponseTurn]:
        request = ResponseRequest.parse(parse_json(body), serving.unsupported)
        return request, ResponseTurn.begin(serving, exchange.owner, request)

    request, turn = await serving.run(begin, len(body))
    if request.stream:
        await _send_events(serving, exchange, turn)
        return
    async with abort_on_disconnect(exchange, [turn.stream]):
        await turn.tell(_send_nothing)
    if turn.stream.finish_reason == "abort":
        raise aborted_error()
    await exchange.respond(200, turn.events.body.encode())


async def _send_nothing(events: Iterable[Event]) -> None:
    for _ in events:
        pass


class _EventSender:
    """Sends events over HTTP. The first events wait for the first delta or comment, so that an
    error of the first read (for too long a prompt, say) still has its HTTP status."""

    def __init__(self, exchange: Exchange, ping_interval: float) -> None:
        self._exchange = exchange
        self._held: str | None = None
        self.keep_alive = KeepAlive(ping_interval, self._send)

    async def send_all(self, events: Iterable[Event]) -> None:
        text = "".join([f"event: {kind}\ndata: {data}\n\n" for kind, data in events])
        if self._held is None:
            self._held = text
        elif text:
            self.keep_alive.has_sent = True
            await self._send(text)

    async def _send(self, text: str) -> None:
        if not self._exchange.started:
            await self._exchange.start_events()
        held, self._held = self._held, ""
        await self._exchange.send_events((held or "") + text)


async def _send_events(serving: Serving, exchange: Exchange, turn: ResponseTurn) -> None:
    sender = _EventSender(exchange, serving.ping_interval)
    serving.pacer.begin()
    try:
        async with abort_on_disconnect(exchange, [turn.stream], sender.keep_alive):
            await turn.tell(sender.send_all)
    except AsyncLLMError as error:
        if not exchange.started:
            raise
        await sender.send_all(turn.events.failed(from_engine_error(error, ENGINE_NAMES)))
    finally:
        serving.pacer.end()
    await exchange.end_events()


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
    await exchange.respond_json(DeletedResponse(id=response_id, object="response", deleted=True))
