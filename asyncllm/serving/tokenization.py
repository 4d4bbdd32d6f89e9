"""``POST /tokenize`` and ``POST /detokenize``, with vLLM's bodies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from pydantic import Field
from pydantic_core import to_json

from asyncllm.serving.answers import DetokenizeResponse, TokenizeResponse
from asyncllm.serving.chat_request import (
    Messages,
    ReasoningEffort,
    TemplateFields,
    Tools,
    template_messages,
)
from asyncllm.serving.client import call_while_connected
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.request_body import RequestBody, parse_json
from asyncllm.serving.serving import MIN_WORKER_JSON_BYTES, ServingContext
from asyncllm.text.long_text import SHORT_TEXT_CHARACTERS
from asyncllm.validation import MAX_LIST_ITEMS, argument_error


class TokenizeRequest(TemplateFields):
    """Body of ``/tokenize``: either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """Body of ``/detokenize``: token ids."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**32)]],
        Field(max_length=MAX_LIST_ITEMS, fail_fast=True),
    ]


async def answer_text_request(
    make_answer: Callable[[ServingContext, bytes, int | None], bytes | None],
    server_context: ServingContext,
    exchange: Exchange,
) -> None:
    """Send the answer of ``make_answer(server_context, body, max_characters)``.

    For a short body ``make_answer`` runs on the event loop, and returns None if the text has more
    than ``max_characters``. In this case, and for a long body, it runs on one of the engine's text
    threads.
    """
    body = await exchange.read_body()
    answer = None
    if len(body) < MIN_WORKER_JSON_BYTES:
        answer = make_answer(server_context, body, SHORT_TEXT_CHARACTERS)
    if answer is None:
        threads = server_context.engine._require_input_processor().prompts.tokenizer_threads
        job = partial(make_answer, server_context, body)
        call = partial(threads.call, job, len(body), exchange.owner or None)
        answer = await call_while_connected(exchange, call)
    assert answer is not None
    await exchange.respond(200, answer)


def tokenize(
    server_context: ServingContext, body: bytes, max_characters: int | None
) -> bytes | None:
    request = TokenizeRequest.parse(parse_json(body), server_context.unsupported_fields)
    server_context.resolve_model_name(request.model)
    engine, messages = server_context.engine, request.messages
    if (request.prompt is None) == (messages is None):
        raise argument_error("prompt", "expected either prompt or messages")
    _, encode = engine._require_input_processor().prompts.prepare_tokenize(
        request.prompt or "" if messages is None else template_messages(messages, engine),
        add_special_tokens=request.add_special_tokens,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        chat_template_kwargs=request.template_variables(engine, request.reasoning_effort) or None,
        # An answer may take thirty times the memory of its text, so limit the text.
        max_tokens=engine.max_model_len - 1,
    )
    token_ids = encode(max_characters)
    if token_ids is None:
        return None
    response = TokenizeResponse(count=len(token_ids), tokens=token_ids, token_strs=None)
    if request.return_token_strs:
        id_to_bytes = engine.tokenizer.id_to_bytes
        response["token_strs"] = [id_to_bytes(i).decode(errors="replace") for i in token_ids]
    return to_json(response)


def detokenize(server_context: ServingContext, body: bytes, _: int | None) -> bytes:
    request = DetokenizeRequest.parse(parse_json(body), server_context.unsupported_fields)
    server_context.resolve_model_name(request.model)
    max_ids = server_context.engine.max_model_len
    if len(request.tokens) > max_ids:
        # An answer may take forty times the memory of its ids, so limit the ids.
        problem = f"has {len(request.tokens)} ids, expected at most {max_ids}, the context's length"
        raise argument_error("tokens", problem)
    prompts = server_context.engine._require_input_processor().prompts
    return to_json(DetokenizeResponse(prompt=prompts.detokenize(request.tokens, False)))
