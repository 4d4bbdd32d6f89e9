"""``POST /v1/chat/completions``."""

from __future__ import annotations

from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.chat_writer import ChatWriter
from asyncllm.serving.choices import EventAnswer, answer_whole
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.offload import submit_offloaded
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.serving import Serving


async def chat_completions(serving: Serving, exchange: Exchange) -> None:
    request = ChatRequest.parse(parse_json(await exchange.body()))
    model = serving.model_name(request.model)
    engine, options = serving.engine, serving.options(exchange.owner)
    stream = await submit_offloaded(
        lambda: request.submit(engine, options), len(request.tools or ())
    )
    writer = ChatWriter(
        model,
        stream.num_outputs,
        request.num_logprobs,
        request.usage_of_stream,
        engine.tokenizer.bytes_of,
    )
    if request.stream:
        pacer, ping = serving.pacer, serving.ping_interval
        await EventAnswer(exchange, [stream], writer, pacer, ping).run()
    else:
        await answer_whole(exchange, [stream], writer)
