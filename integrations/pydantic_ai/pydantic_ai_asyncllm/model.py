"""AsyncLLMModel: a Pydantic AI model over an engine in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import (
    Model,
    ModelRequestParameters,
    StreamedResponse,
    check_allow_model_requests,
)
from pydantic_ai.models._tool_choice import resolve_tool_choice
from pydantic_ai.profiles import ModelProfile, ModelProfileSpec
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import RunContext, ToolDefinition
from pydantic_ai.usage import RequestUsage

from asyncllm import LLM, AsyncLLMEngine
from asyncllm.structured.python_types import forbid_additional_properties
from pydantic_ai_asyncllm.errors import as_model_errors
from pydantic_ai_asyncllm.messages import FINISH_REASONS, to_chat, to_parts, to_usage
from pydantic_ai_asyncllm.streamed_response import AsyncLLMStreamedResponse

_SETTINGS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "stop_sequences": "stop",
    "timeout": "timeout",
    "parallel_tool_calls": "parallel_tool_calls",
}


class AsyncLLMModelSettings(ModelSettings, total=False):
    """Settings of a request."""

    asyncllm_options: dict[str, Any]
    """Other arguments of ``AsyncLLMEngine.chat``, as ``min_p``, ``chat_template_kwargs`` or
    ``priority``."""


class AsyncLLMModel(Model[AsyncLLMEngine]):
    """Answers an agent's requests on an engine that runs in this process.

        async with AsyncLLMEngine() as engine:
            agent = Agent(AsyncLLMModel(engine), tools=[get_weather])
            print((await agent.run("What is the weather in Oslo?")).output)

    Requests that run at once share one batch, whichever agent they come from. Cancelling a run, or
    leaving its stream, aborts the request. Typed output is native: a grammar holds the answer to
    its schema. Messages are text.

    Args:
        engine: a started engine, or an ``asyncllm.LLM``; it is borrowed, never closed.
        settings: defaults for every request.
        profile: of the model, over what the engine says of it.
    """

    unsupported_settings = frozenset({"extra_headers", "max_retries", "service_tier"})
    _unsupported_file_inputs = frozenset({"image", "document", "audio", "video"})

    def __init__(
        self,
        engine: AsyncLLMEngine | LLM,
        *,
        settings: ModelSettings | None = None,
        profile: ModelProfileSpec | None = None,
    ) -> None:
        self.engine = engine.engine if isinstance(engine, LLM) else engine
        super().__init__(settings=settings, profile=profile)

    @property
    def model_name(self) -> str:
        """The engine's model."""
        return self.engine.config.model_name

    @property
    def system(self) -> str:
        return "asyncllm"

    def _provider_model_profile(self) -> ModelProfile:
        template = self.engine.tokenizer.chat_template
        return ModelProfile(
            context_window=self.engine.max_model_len,
            supports_tools=template.reads_variable("tools"),
            supports_thinking=template.reads_variable("enable_thinking"),
            supports_json_schema_output=True,
            supports_json_object_output=True,
            default_structured_output_mode="native",
            # A grammar does not tell the model what is asked for.
            native_output_requires_schema_in_instructions=True,
        )

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        check_allow_model_requests()
        settings, parameters = self.prepare_request(model_settings, model_request_parameters)
        with as_model_errors(self.model_name):
            chat, options = self._arguments(messages, settings, parameters)
            completion = await self.engine.chat(chat, **options).result()
        return ModelResponse(
            parts=to_parts(completion),
            usage=to_usage(completion.usage),
            model_name=self.model_name,
            provider_name=self.system,
            provider_response_id=completion.request_id,
            provider_details={"finish_reason": completion.finish_reason},
            finish_reason=FINISH_REASONS.get(completion.finish_reason),
        )

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncIterator[StreamedResponse]:
        check_allow_model_requests()
        settings, parameters = self.prepare_request(model_settings, model_request_parameters)
        with as_model_errors(self.model_name):
            chat, options = self._arguments(messages, settings, parameters)
            stream = self.engine.chat(chat, **options)
        async with stream:
            with as_model_errors(self.model_name):
                # What is wrong with a request may show at its first read.
                first = await anext(stream, None)
            response = AsyncLLMStreamedResponse(
                model_request_parameters=parameters,
                _model_name=self.model_name,
                _stream=stream,
                _first=first,
            )
            response.provider_response_id = stream.request_id
            yield response

    async def count_tokens(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> RequestUsage:
        """Tokens of the prompt that the model's chat template makes of a request."""
        settings, parameters = self.prepare_request(model_settings, model_request_parameters)
        with as_model_errors(self.model_name):
            chat, options = self._arguments(messages, settings, parameters)
            offered = options.get("tool_choice") != "none"
            found = await self.engine.tokenize(
                chat,
                tools=options.get("tools") if offered else None,
                chat_template_kwargs=options.get("chat_template_kwargs"),
            )
            return RequestUsage(input_tokens=len(found))

    def _arguments(
        self,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and keyword arguments of ``AsyncLLMEngine.chat``."""
        given: Mapping[str, Any] = settings or {}
        options = {
            name: given[key] for key, name in _SETTINGS.items() if given.get(key) is not None
        }
        if "logit_bias" in options:
            options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
        if given.get("extra_body") is not None:
            raise UserError("extra_body: expected none, arguments go into asyncllm_options")
        options |= _tools(settings, parameters)
        options |= _response_format(parameters)
        options |= given.get("asyncllm_options") or {}
        if parameters.thinking is not None:
            kwargs = {"enable_thinking": parameters.thinking is not False}
            options["chat_template_kwargs"] = kwargs | (options.get("chat_template_kwargs") or {})
        instructions = self._get_instruction_parts(messages, parameters)
        return to_chat(messages, instructions), options


def _tools(settings: ModelSettings | None, parameters: ModelRequestParameters) -> dict[str, Any]:
    """The tools that a request declares, and how they may be used."""
    tools = parameters.declared_tool_defs
    choice: Any = resolve_tool_choice(settings, parameters)
    if isinstance(choice, tuple):
        choice, names = choice
        tools = {name: tool for name, tool in tools.items() if name in names}
        if choice == "required" and len(tools) == 1:
            choice = {"type": "function", "function": {"name": next(iter(tools))}}
    if not tools:
        return {}
    return {"tools": [_schema(tool) for tool in tools.values()], "tool_choice": choice}


def _schema(tool: ToolDefinition) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters_json_schema,
    }
    return {"type": "function", "function": function}


def _response_format(parameters: ModelRequestParameters) -> dict[str, Any]:
    """The form that holds an answer that is no call."""
    form = parameters.output_object
    if parameters.output_mode == "prompted":
        return {"response_format": {"type": "json_object"}}
    if parameters.output_mode != "native" or form is None:
        return {}
    schema = deepcopy(form.json_schema)
    named = {
        "name": form.name or "output",
        # An object has no further properties unless its schema says so: what the type does not
        # know, it would drop.
        "schema": schema if form.strict is False else forbid_additional_properties(schema),
    }
    return {"response_format": {"type": "json_schema", "json_schema": named}}
