"""``/v1/responses`` over HTTP, whole and as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

from asyncllm.serving.answers import DeletedResponse
from asyncllm.serving.choices import aborted_error
from asyncllm.serving.event_sender import abort_on_disconnect, open_event_sender
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.response_events import ResponseEvent
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.response_store import ResponseStore, response_not_found_error
from asyncllm.serving.response_turn import ResponseTurn
from asyncllm.serving.serving import ServingContext


async def create_response(server_context: ServingContext, exchange: Exchange) -> None:
    def parse(body: bytes) -> tuple[ResponseRequest, int]:
        return ResponseRequest.parse(parse_json(body), server_context.unsupported_fields), len(body)

    request, num_request_bytes = await exchange.process_body(parse)
    turn = await ResponseTurn.begin(
        server_context,
        exchange,
        request,
        num_request_bytes,
        connection_store=ResponseStore(0, 0),
    )
    exchange.release_body(untokenized_streams=[turn.stream])
    is_streamed = request.stream
    del request  # Free its texts.
    try:
        if is_streamed:
            await _send_events(server_context, exchange, turn)
            return
        async with abort_on_disconnect(exchange, [turn.stream]):
            await turn.run(None)
        if turn.stream.finish_reason == "abort":
            raise aborted_error()
        # ``respond`` claims memory for the whole answer, whose JSON repeats the request.
        turn.release_request_bytes()
        await exchange.respond(200, turn.events.response_json)
    finally:
        turn.release()


async def _send_events(
    server_context: ServingContext, exchange: Exchange, turn: ResponseTurn
) -> None:
    async with open_event_sender(
        server_context,
        exchange,
        [turn.stream],
        _encode_events(await turn.collect_events(turn.events.created_events())),
        lambda error: _encode_events(turn.events.failed_events(error)),
    ) as sender:

        async def send(events: Iterable[ResponseEvent]) -> None:
            if text := _encode_events(events):
                await sender.send(text)

        await turn.run(send)


def _encode_events(events: Iterable[ResponseEvent]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n"
        % (kind.encode(), data if isinstance(data, bytes) else data.encode())
        for kind, data in events
    )


async def get_response(server_context: ServingContext, exchange: Exchange) -> None:
    response_id = exchange.scope["path_params"]["response_id"]
    stored = server_context.response_store.get(exchange.owner, response_id)
    if stored is None:
        raise response_not_found_error(response_id)
    await exchange.respond(200, stored.body)


async def delete_response(server_context: ServingContext, exchange: Exchange) -> None:
    response_id = exchange.scope["path_params"]["response_id"]
    if not server_context.response_store.remove(exchange.owner, response_id):
        raise response_not_found_error(response_id)
    await exchange.respond_json(DeletedResponse(id=response_id, object="response", deleted=True))
