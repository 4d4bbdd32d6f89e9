"""ChatAsyncLLM: a LangChain chat model over an engine in the same process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool

from asyncllm import Completion, Delta, InvalidRequestError, Usage
from asyncllm.text.template_input import TemplateInput
from langchain_asyncllm.engine_model import (
    CONFIG,
    EngineModel,
    finish_metadata,
    refuse_several,
    token_usage,
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

    Messages are text: the engine refuses images, audio and tools.
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
        chat = convert_to_openai_messages(messages)
        schemas = None if tools is None else [convert_to_openai_tool(tool) for tool in tools]
        try:
            return self._prompt_length(chat, schemas)
        except InvalidRequestError:
            alone = [[{"role": "user", "content": _said(message)}] for message in chat]
            rest = sum(self._prompt_length(one, None) for one in alone[1:])
            return self._prompt_length(alone[0], schemas) + rest

    def _prompt_length(self, chat: list[dict[str, Any]], tools: list[Any] | None) -> int:
        return len(self.engine.tokenizer.encode_chat(TemplateInput(chat, {"tools": tools})))

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Not there yet.

        Raises:
            NotImplementedError: with what to do instead.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no tool calling yet, and so serves no agent: a chat "
            'template that knows tools gets them from .bind(chat_template_kwargs={"tools": '
            "[schemas]}), and the text of the answer has the calls"
        )

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
        for delta in self.paced(self.submit(lambda: llm.stream_chat(chat, **options))):
            yield self._chunk(delta)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        _, chat, options = self._prepare(messages, stop, kwargs)
        refuse_several(options)
        stream = await self.asubmit(lambda: self.engine.chat(chat, **options))
        async for delta in self.apaced(stream):
            yield self._chunk(delta)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
        chat = convert_to_openai_messages(messages)
        assert isinstance(chat, list)
        return self.blocking(), chat, self.request_options(stop, given)

    def _chunk(self, delta: Delta) -> ChatGenerationChunk:
        metadata = finish_metadata(delta.finish_reason, delta.stop_reason, self.model_name)
        metadata |= self.token_logprobs(delta.logprobs)
        message = AIMessageChunk(
            content=delta.text,
            response_metadata=metadata,
            usage_metadata=_usage_metadata(delta.usage),
            chunk_position=None if delta.finish_reason is None else "last",
        )
        return ChatGenerationChunk(message=message, generation_info=metadata or None)

    def _result(self, completion: Completion) -> ChatResult:
        generations = []
        for output in completion.outputs:
            metadata = finish_metadata(output.finish_reason, output.stop_reason, self.model_name)
            metadata |= self.token_logprobs(output.logprobs)
            message = AIMessage(
                content=output.text,
                response_metadata=metadata,
                # That of all outputs, for those who add messages up.
                usage_metadata=None if output.index else _usage_metadata(completion.usage),
            )
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


def _usage_metadata(usage: Usage | None) -> UsageMetadata | None:
    if usage is None:
        return None
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
