"""ChatRequest: the body of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.request_body import (
    AcceptedValues,
    LimitedObject,
    Metadata,
    ObjectList,
    RequestBody,
    unsupported_error,
)
from asyncllm.serving.sampling_fields import (
    ChoicesRequest,
    SamplingFields,
    TextOr,
    bounded_number_field,
)
from asyncllm.stream import TokenStream
from asyncllm.tool_calls.tool_use import MAX_TOOLS
from asyncllm.validation import MAX_INTEGER, value_error

MAX_MESSAGES = 2**14
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


Content = TextOr[str, ObjectList[TextPart]]


class FunctionCall(TypedDict):
    name: str
    arguments: str


class MessageToolCall(TypedDict):
    id: str
    type: NotRequired[Literal["function"]]
    function: LimitedObject[FunctionCall]
    index: NotRequired[int]


class Message(TypedDict):
    """One message of a conversation. A ``tool`` message answers the assistant's call
    ``tool_call_id``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[Content | None]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[ObjectList[MessageToolCall], Field(max_length=1024)] | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    # Fields that the server's own answers leave empty. They are accepted, because clients send
    # these answers back as history.
    refusal: NotRequired[None]
    audio: NotRequired[None]
    function_call: NotRequired[None]
    annotations: NotRequired[Annotated[list[Any], Field(max_length=0)] | None]


class Function(TypedDict):
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    type: Literal["function"]
    function: LimitedObject[Function]


Messages = Annotated[ObjectList[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[ObjectList[Tool], Field(max_length=MAX_TOOLS)]


class NamedFunction(TypedDict):
    name: str


class NamedTool(TypedDict):
    type: Literal["function"]
    function: LimitedObject[NamedFunction]


ToolMode = Literal["none", "auto", "required"]
ToolChoice = TextOr[ToolMode, LimitedObject[NamedTool]]


class TemplateFields(RequestBody):
    """Fields that set variables of the model's chat template."""

    chat_template_kwargs: dict[str, Any] | None = None

    def template_variables(
        self, engine: AsyncLLMEngine, effort: str | None, effort_field: str = "reasoning_effort"
    ) -> dict[str, Any]:
        """Variables of the model's template besides messages and tools. The variable
        ``chat_template`` is refused, because a template is a program.

        Args:
            effort: the client's reasoning effort. "none" is accepted for every template.
            effort_field: path of the request's field for the effort; for messages.

        Raises:
            ProtocolError: for a variable or an effort that the template does not support.
        """
        variables = dict(self.chat_template_kwargs or {})
        if "chat_template" in variables:
            raise unsupported_error(
                "chat_template_kwargs.chat_template", variables["chat_template"]
            )
        template = engine.tokenizer.chat_template
        if effort is None:
            return variables
        if template.reads_variable("reasoning_effort"):
            return {**variables, "reasoning_effort": effort}
        if template.reads_variable("enable_thinking"):
            return {**variables, "enable_thinking": effort != "none"}
        if effort != "none":
            self._unsupported_fields.refuse_or_ignore(effort_field, effort)
        return variables


class ConversationFields(TemplateFields, SamplingFields):
    """Fields that the bodies of chat completions and of responses share."""

    ACCEPTED_VALUES: ClassVar[AcceptedValues] = {
        "moderation": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
    }

    top_logprobs: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    # Each protocol has its own types of tools.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    store: bool | None = None

    def submit_chat(
        self,
        engine: AsyncLLMEngine,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        response_format: Mapping[str, Any] | None,
        template_variables: dict[str, Any],
        **param_overrides: Any,
    ) -> TokenStream:
        """Submit a conversation with the request's tools. Raises as ``AsyncLLMEngine.chat`` does.

        Args:
            options: the server's own arguments, as from ``ServingContext.request_options``.
            param_overrides: sampling parameters by name, used instead of the body's fields of
                the same names.
        """
        return engine.chat(
            template_messages(messages, engine),
            self.sampling_params(**param_overrides),
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=response_format,
            chat_template_kwargs=template_variables,
            **options,
            **self.scheduling_options,
        )


class ChatRequest(ConversationFields, ChoicesRequest):
    """Body of a chat completion: OpenAI's fields, and those of SamplingParams."""

    FOREIGN_NAMES_SECTION = "field of /v1/chat/completions"

    ACCEPTED_VALUES: ClassVar[AcceptedValues] = {
        **ConversationFields.ACCEPTED_VALUES,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Messages
    max_tokens: int | None = bounded_number_field("max_tokens")
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    logprobs: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    # Accepted because clients often send it; chat completions are not stored.
    store: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; None without log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise value_error("top_logprobs", self.top_logprobs, "null without logprobs=true")
            return None
        return self.top_logprobs or 0

    @property
    def _token_limits(self) -> set[int]:
        """Values of the two fields for an output's maximum length."""
        limits = (self.max_tokens, self.max_completion_tokens)
        return {limit for limit in limits if limit is not None}

    def max_logprobs_tokens(self, max_model_len: int) -> int:
        return min((*self._token_limits, max_model_len)) * self.num_outputs

    def submit(self, engine: AsyncLLMEngine, options: Mapping[str, Any]) -> Sequence[TokenStream]:
        if len(self._token_limits) > 1:
            accepted = f"what max_tokens={self.max_tokens} says, or null"
            raise value_error("max_completion_tokens", self.max_completion_tokens, accepted)
        stream = self.submit_chat(
            engine,
            self.messages,
            options,
            response_format=self.response_format,
            template_variables=self.template_variables(engine, self.reasoning_effort),
            n=self.num_outputs,
            max_tokens=next(iter(self._token_limits), None),
            logprobs=self.num_logprobs,
        )
        return [stream]


def template_messages(messages: Sequence[Mapping[str, Any]], engine: AsyncLLMEngine) -> list[Any]:
    """Convert a request's messages for the model's chat template. The role "developer", OpenAI's
    new name for "system", becomes "system" unless the template knows it."""
    knows_developer = engine.tokenizer.chat_template.reads_variable("developer")
    converted = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        message.pop("annotations", None)
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
        converted.append(message)
    return converted
