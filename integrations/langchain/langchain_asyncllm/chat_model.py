"""ChatAsyncLLM: a LangChain chat model over an engine in the same process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import model_validator

from asyncllm import Completion, Delta, InvalidRequestError
from asyncllm.structured.python_types import forbid_additional_properties
from asyncllm.text.template_input import TemplateInput
from asyncllm.tool_calls.tool_use import ToolUse
from langchain_asyncllm.engine_model import (
    CONFIG,
    EngineModel,
    finish_metadata,
    refuse_several,
    token_usage,
)
from langchain_asyncllm.messages import ChunkMaker, to_chat, to_message, usage_metadata
from langchain_asyncllm.structured import (
    METHODS,
    json_schema,
    parser_of,
    tool_of,
    tool_parser_of,
    with_parser,
)


class ChatAsyncLLM(EngineModel, BaseChatModel):
    """Chats with an engine that runs in this process.

        async with AsyncLLMEngine() as engine:
            model = ChatAsyncLLM(engine=engine, temperature=0)
            await model.ainvoke("Hello!")

    The asynchronous methods read the engine's streams on the running loop; the synchronous
    ones wait on the engine's thread and need no loop. Calls that run at once, those of
    ``batch`` and ``abatch`` included, share one batch. Leaving a stream early, or cancelling
    the task, aborts the request.

    Messages are text: the engine refuses images and audio.
    """

    model_config = CONFIG

    streaming: bool = False
    """Make ``invoke`` go through the stream, so that handlers see its tokens."""

    @property
    def _llm_type(self) -> str:
        return "asyncllm-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, **self.request_options(None, {})}

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that the model's chat template makes of a conversation: what
        the engine counts as ``input_tokens``.

        ``trim_messages`` also asks for pieces of one, newest message first. A template that
        refuses them (many want the user's turn first) gets each message as the user's only
        one, which makes a few tokens more for each.
        """
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        if not messages:
            return 0
        chat = to_chat(messages)
        use = ToolUse.parse([convert_to_openai_tool(tool) for tool in tools or ()], "auto", True)
        schemas = None if use is None else list(use.schemas)
        try:
            return self._prompt_length(chat, schemas)
        except InvalidRequestError:
            alone = [[{"role": "user", "content": _said(message)}] for message in chat]
            rest = sum(self._prompt_length(one, None) for one in alone[1:])
            return self._prompt_length(alone[0], schemas) + rest

    def _prompt_length(self, chat: list[dict[str, Any]], tools: list[Any] | None) -> int:
        return len(self.engine.tokenizer.encode_chat(TemplateInput(chat, {"tools": tools})))

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """A model that may call tools.

        Args:
            tools: LangChain's tools, functions, Pydantic classes or schemas.
            tool_choice: "auto" or None; "none"; "any", "required" or True for one call or more;
                the name of a tool, or OpenAI's dict, for that one. All but the first two hold
                the model to calls whose arguments fit the schemas, by a grammar.
            parallel_tool_calls: False ends an answer with its first call.
            response_format: OpenAI's form of the answer where the model calls no tool, as agents
                give it. Objects of its schema that name properties have no others, unless they
                say so.
            kwargs: bound to each call.
        """
        schemas = [convert_to_openai_tool(tool) for tool in tools]
        if schemas:
            kwargs["tools"] = schemas
        if tool_choice is not None and tool_choice is not False:
            kwargs["tool_choice"] = _tool_choice(tool_choice, schemas)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        if response_format is not None:
            kwargs["response_format"] = _closed(response_format)
        return self.bind(**kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """A model that answers with JSON of a schema.

        Args:
            schema: a Pydantic class, of which the results will be; a TypedDict, a JSON schema or
                a tool's schema, which make dicts.
            include_raw: ``{"raw", "parsed", "parsing_error"}`` instead, and no exception where
                the answer is cut off.
            method: "json_schema" holds the answer to the schema by a grammar;
                "function_calling" makes it the arguments of a call; "json_mode" holds it to any
                JSON object, and the prompt has to say which.
            strict: False leaves open which further properties an object has, where the schema
                does; "json_mode" has no schema to be strict about.
            kwargs: bound to each call.
        """
        if method not in METHODS:
            raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
        if strict is not None and method == "json_mode":
            raise ValueError(f'strict={strict!r}: expected None with method="json_mode"')
        traced = {"kwargs": {"method": method}, "schema": schema}
        kwargs["ls_structured_output_format"] = traced
        if method == "function_calling":
            model = self.bind_tools(
                [tool_of(schema, strict)], tool_choice="any", parallel_tool_calls=False, **kwargs
            )
            return with_parser(model, tool_parser_of(schema), include_raw)
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            found = json_schema(schema, strict)
            named = {"name": found["title"], "schema": found}
            form = {"type": "json_schema", "json_schema": named}
        model = self.bind(response_format=form, **kwargs)
        return with_parser(model, parser_of(schema), include_raw)

    @model_validator(mode="after")
    def _describe(self) -> ChatAsyncLLM:
        """Agents choose by the profile how to ask for structured output, and when to summarise."""
        if self.profile is None and self.engine.state == "running":
            template = self.engine.tokenizer.chat_template
            has_tools = template.reads_variable("tools")
            self.profile = ModelProfile(
                name=self.model_name,
                max_input_tokens=self.engine.max_model_len,
                text_inputs=True,
                text_outputs=True,
                image_inputs=False,
                audio_inputs=False,
                tool_calling=has_tools,
                tool_choice=has_tools,
                structured_output=True,
                temperature=True,
            )
        return self

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "asyncllm"
        params.setdefault("ls_model_name", self.model_name)
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        llm, chat, options = self._prepare(messages, stop, kwargs)
        return self._result(self.submit(lambda: llm.stream_chat(chat, **options)).result())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        _, chat, options = self._prepare(messages, stop, kwargs)
        stream = await self.asubmit(lambda: self.engine.chat(chat, **options))
        return self._result(await stream.result())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        llm, chat, options = self._prepare(messages, stop, kwargs)
        refuse_several(options)
        chunks = ChunkMaker()
        for delta in self.paced(self.submit(lambda: llm.stream_chat(chat, **options))):
            yield self._chunk(chunks, delta)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        _, chat, options = self._prepare(messages, stop, kwargs)
        refuse_several(options)
        chunks = ChunkMaker()
        stream = await self.asubmit(lambda: self.engine.chat(chat, **options))
        async for delta in self.apaced(stream):
            yield self._chunk(chunks, delta)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
        return self.blocking(), to_chat(messages), self.request_options(stop, given)

    def _chunk(self, chunks: ChunkMaker, delta: Delta) -> ChatGenerationChunk:
        metadata = finish_metadata(delta.finish_reason, delta.stop_reason, self.model_name)
        metadata |= self.token_logprobs(delta.logprobs)
        message = chunks.chunk(delta, metadata)
        return ChatGenerationChunk(message=message, generation_info=metadata or None)

    def _result(self, completion: Completion) -> ChatResult:
        generations = []
        for output in completion.outputs:
            metadata = finish_metadata(output.finish_reason, output.stop_reason, self.model_name)
            metadata |= self.token_logprobs(output.logprobs)
            # That of all outputs on the first, for those who add messages up.
            usage = None if output.index else usage_metadata(completion.usage)
            message = to_message(output, metadata, usage)
            generations.append(ChatGeneration(message=message, generation_info=metadata))
        return ChatResult(
            generations=generations,
            llm_output={
                "model_name": self.model_name,
                "token_usage": token_usage(completion.usage),
            },
        )


def _said(message: dict[str, Any]) -> Any:
    """The content of a message, and the tool calls that it may have beside it."""
    calls = message.get("tool_calls")
    return message["content"] if not calls else f"{message['content']}{json.dumps(calls)}"


def _tool_choice(value: Any, schemas: Sequence[dict[str, Any]]) -> Any:
    """LangChain's ``tool_choice`` as OpenAI's."""
    if value is True or value == "any":
        return "required"
    if any(schema["function"]["name"] == value for schema in schemas):
        return {"type": "function", "function": {"name": value}}
    return value


def _closed(response_format: Any) -> Any:
    """A form of the answer with objects closed, as of ``with_structured_output``. What is no such
    form is left to the engine to refuse."""
    named = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, dict):
        return response_format
    return {
        **response_format,
        "json_schema": {**named, "schema": forbid_additional_properties(deepcopy(schema))},
    }
