"""``POST /tokenize`` and ``POST /detokenize``, with vLLM's bodies."""

from __future__ import annotations

from typing import Annotated

import anyio.to_thread
from pydantic import Field

from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.answers import Text, Tokens
from asyncllm.serving.chat_request import Messages, TemplateFields, Tools, template_messages
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import RequestBody, parse_json
from asyncllm.serving.serving import Serving
from asyncllm.text.template_input import TemplateInput
from asyncllm.tool_calls.response_format import ResponseFormats
from asyncllm.tool_calls.tool_use import ToolUse
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

    def token_ids(self, engine: AsyncLLMEngine) -> list[int]:
        """Tokenise the input; slow for a long text. Raises ProtocolError or InvalidRequestError."""
        tokenizer = engine.tokenizer
        if self.prompt is not None and self.messages is None:
            return tokenizer.encode(self.prompt, self.add_special_tokens is not False)
        if self.messages is None or self.prompt is not None:
            raise ProtocolError(
                "prompt: expected either prompt or messages", code="invalid_value", param="prompt"
            )
        variables = self.template_variables(engine)
        variables["add_generation_prompt"] = self.add_generation_prompt is not False
        use = ToolUse.of(self.tools, "auto", True)
        if use is not None:
            variables["tools"] = use.schemas
        formats = ResponseFormats.of_tokenizer(tokenizer, engine.config)
        chat = TemplateInput(
            template_messages(self.messages, engine),
            variables,
            arguments_as_text=formats.arguments_as_text,
        )
        return tokenizer.encode_chat(chat)


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
    token_ids = await anyio.to_thread.run_sync(request.token_ids, engine)
    body = Tokens(count=len(token_ids), tokens=token_ids, token_strs=None)
    if request.return_token_strs:
        bytes_of = engine.tokenizer.bytes_of
        body["token_strs"] = [bytes_of(one).decode(errors="replace") for one in token_ids]
    await exchange.respond_json(body)


async def detokenize(serving: Serving, exchange: Exchange) -> None:
    request = DetokenizeRequest.parse(parse_json(await exchange.body()))
    serving.model_name(request.model)
    decode = serving.engine.tokenizer.decode
    text = await anyio.to_thread.run_sync(decode, request.tokens, False)
    await exchange.respond_json(Text(prompt=text))
