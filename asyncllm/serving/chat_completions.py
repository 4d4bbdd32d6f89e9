"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial

from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.chat_writer import ChatWriter
from asyncllm.serving.choices import EventAnswer, answer_whole
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.serving import Serving
from asyncllm.stream import TokenStream


async def chat_completions(serving: Serving, exchange: Exchange) -> None:
    body = await exchange.body()
    request, stream, writer = await serving.run(
        partial(_begin, serving, exchange.owner, body), len(body)
    )
    if request.stream:
        await EventAnswer(serving, exchange, [stream], writer).run()
    else:
        await answer_whole(serving, exchange, [stream], writer)


def _begin(
    serving: Serving, owner: str, body: bytes
) -> tuple[ChatRequest, TokenStream, ChatWriter]:
    request = ChatRequest.parse(parse_json(body), serving.unsupported)
    model = serving.model_name(request.model)
    stream = request.submit(serving.engine, serving.options(owner))
    writer = ChatWriter(
        model,
        stream.num_outputs,
        request.num_logprobs,
        request.usage_of_stream,
        serving.engine.tokenizer.bytes_of,
        request.metadata,
    )
    return request, stream, writer
