"""``POST /v1/completions``."""

from __future__ import annotations

from asyncllm.serving.choices import EventAnswer, answer_whole
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.completion_writer import CompletionWriter
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.serving import Serving


async def completions(serving: Serving, exchange: Exchange) -> None:
    request = CompletionRequest.parse(parse_json(await exchange.body()))
    model = serving.model_name(request.model)
    streams = request.submit(serving.engine, serving.options(exchange.owner))
    writer = CompletionWriter(model, request, serving.engine.tokenizer)
    if request.stream:
        pacer, ping = serving.pacer, serving.ping_interval
        await EventAnswer(exchange, streams, writer, pacer, ping).run()
    else:
        await answer_whole(exchange, streams, writer)
