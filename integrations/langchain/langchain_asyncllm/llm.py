"""AsyncLLM: a LangChain language model over an engine in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import BaseMessage, get_buffer_string
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable

from asyncllm import Completion, CompletionOutput
from asyncllm.llm import LLMStream
from asyncllm.stream import TokenStream
from langchain_asyncllm.engine_model import (
    CONFIG,
    EngineModel,
    finish_metadata,
    refuse_several,
    token_usage,
)
from langchain_asyncllm.structured import json_schema, parser_of, with_parser


class AsyncLLM(EngineModel, BaseLLM):
    """Completes prompts on an engine that runs in this process; for conversations there is
    ``ChatAsyncLLM``. The prompts of one call, and all calls at once, share one batch."""

    model_config = CONFIG

    @property
    def _llm_type(self) -> str:
        return "asyncllm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, **self.request_options(None, {})}

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """Completes prompts with JSON of a schema, which a grammar holds the model to.

        Args:
            schema: a Pydantic class, of which the results will be; a TypedDict, a JSON schema or
                a tool's schema, which make dicts.
            include_raw: ``{"raw", "parsed", "parsing_error"}`` instead, and no exception where
                the text is cut off.
            strict: False leaves open which further properties an object has, where the schema
                does.
            kwargs: bound to each call.
        """
        form = {"json": json_schema(schema, strict)}
        model = self.bind(structured_outputs=form, **kwargs)
        return with_parser(model, parser_of(schema), include_raw)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that LangChain makes of messages for a model without a chat
        template; ``tools`` have no place in it, and are refused."""
        if tools:
            raise NotImplementedError("AsyncLLM has no tools: its prompts are plain text")
        return self.get_num_tokens(get_buffer_string(messages)) if messages else 0

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "asyncllm"
        params.setdefault("ls_model_name", self.model_name)
        return params

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        llm, options = self.blocking(), self.request_options(stop, kwargs)
        streams: list[LLMStream] = []
        try:
            for prompt in prompts:
                streams.append(self.submit(lambda p=prompt: llm.stream(p, **options)))
            return self._result([stream.result() for stream in streams])
        finally:
            for stream in streams:
                stream.close()

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        engine, options = self.engine, self.request_options(stop, kwargs)
        streams: list[TokenStream] = []
        try:
            for prompt in prompts:
                streams.append(await self.asubmit(lambda p=prompt: engine.stream(p, **options)))
            return self._result([await stream.result() for stream in streams])
        finally:
            # If one failed, the others have no reader.
            for stream in streams:
                stream.close()

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        llm, options = self.blocking(), self.request_options(stop, kwargs)
        refuse_several(options)
        for delta in self.paced(self.submit(lambda: llm.stream(prompt, **options))):
            yield self._chunk(delta)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        options = self.request_options(stop, kwargs)
        refuse_several(options)
        stream = await self.asubmit(lambda: self.engine.stream(prompt, **options))
        async for delta in self.apaced(stream):
            yield self._chunk(delta)

    def _chunk(self, delta: Any) -> GenerationChunk:
        info = finish_metadata(delta.finish_reason, delta.stop_reason, self.model_name)
        info |= self.token_logprobs(delta.logprobs)
        if delta.usage is not None:
            info["token_usage"] = token_usage(delta.usage)
        return GenerationChunk(text=delta.text, generation_info=info or None)

    def _result(self, completions: list[Completion]) -> LLMResult:
        generations: list[list[Any]] = []
        total = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        for completion in completions:
            generations.append([self._generation(output) for output in completion.outputs])
            for name, count in token_usage(completion.usage).items():
                total[name] += count
        return LLMResult(
            generations=generations,
            llm_output={"model_name": self.model_name, "token_usage": total},
        )

    def _generation(self, output: CompletionOutput) -> Generation:
        info = finish_metadata(output.finish_reason, output.stop_reason, self.model_name)
        info |= self.token_logprobs(output.logprobs)
        return Generation(text=output.text, generation_info=info)
