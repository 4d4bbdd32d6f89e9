"""``POST /tokenize`` and ``POST /detokenize``, with vLLM's bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.answers import Text, Tokens
from asyncllm.serving.chat_request import Messages, TemplateFields, Tools, template_messages
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import RequestBody, parse_json
from asyncllm.serving.serving import Serving
from asyncllm.validation import MAX_ITEMS


class TokenizeRequest(TemplateFields):
    """Body of ``/tokenize``: either a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    async def token_ids(self, engine: AsyncLLMEngine) -> list[int]:
        """Tokenise the input. Raises ProtocolError, or as ``AsyncLLMEngine.tokenize``."""
        if (self.prompt is None) == (self.messages is None):
            raise ProtocolError(
                "prompt: expected either prompt or messages", code="invalid_value", param="prompt"
            )
        messages = self.messages
        return await engine.tokenize(
            self.prompt or "" if messages is None else template_messages(messages, engine),
            add_special_tokens=self.add_special_tokens,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt is not False,
            chat_template_kwargs=self.template_variables(engine) or None,
        )


class DetokenizeRequest(RequestBody):
    """Body of ``/detokenize``: token ids."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=MAX_ITEMS, fail_fast=True)
    ]


async def tokenize(serving: Serving, exchange: Exchange) -> None:
    request = TokenizeRequest.parse(parse_json(await exchange.body()))
    serving.model_name(request.model)
    engine = serving.engine
    token_ids = await request.token_ids(engine)
    body = Tokens(count=len(token_ids), tokens=token_ids, token_strs=None)
    if request.return_token_strs:
        bytes_of = engine.tokenizer.bytes_of
        body["token_strs"] = [bytes_of(one).decode(errors="replace") for one in token_ids]
    await exchange.respond_json(body)


async def detokenize(serving: Serving, exchange: Exchange) -> None:
    request = DetokenizeRequest.parse(parse_json(await exchange.body()))
    serving.model_name(request.model)
    await exchange.respond_json(Text(prompt=await serving.engine.detokenize(request.tokens)))
