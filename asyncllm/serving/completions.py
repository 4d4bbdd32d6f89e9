"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from asyncllm.serving.choices import EventAnswer, answer_whole
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.completion_writer import CompletionWriter
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.request_body import parse_json
from asyncllm.serving.serving import Serving
from asyncllm.stream import TokenStream


async def completions(serving: Serving, exchange: Exchange) -> None:
    body = await exchange.body()
    request, streams, writer = await serving.run(
        partial(_begin, serving, exchange.owner, body), len(body)
    )
    if request.stream:
        await EventAnswer(serving, exchange, streams, writer).run()
    else:
        await answer_whole(serving, exchange, streams, writer)


def _begin(
    serving: Serving, owner: str, body: bytes
) -> tuple[CompletionRequest, Sequence[TokenStream], CompletionWriter]:
    request = CompletionRequest.parse(parse_json(body), serving.unsupported)
    model = serving.model_name(request.model)
    streams = request.submit(serving.engine, serving.options(owner))
    return request, streams, CompletionWriter(model, request, serving.engine.tokenizer)
