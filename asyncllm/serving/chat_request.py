"""ChatRequest: the body of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired, cast

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.request_body import Metadata, RequestBody, invalid, limit_fields, unsupported
from asyncllm.serving.sampling_fields import Choices, text_or_list
from asyncllm.stream import TokenStream
from asyncllm.tool_calls.tool_use import MAX_TOOLS
from asyncllm.validation import MAX_INTEGER

FORBID = ConfigDict(extra="forbid", strict=True)
MAX_MESSAGES = 2**14
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@with_config(FORBID)
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[
        list[Annotated[TextPart, BeforeValidator(limit_fields)]],
        Field(fail_fast=True),
        Tag("#list"),
    ],
    Discriminator(text_or_list),
]


@with_config(FORBID)
class FunctionCall(TypedDict):
    name: str
    arguments: str


@with_config(FORBID)
class MessageToolCall(TypedDict):
    id: str
    type: NotRequired[Literal["function"]]
    function: FunctionCall
    index: NotRequired[int]


@with_config(FORBID)
class Message(TypedDict):
    """One message of a conversation. A ``tool`` message answers the assistant's call
    ``tool_call_id``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[Content | None]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[
        Annotated[
            list[Annotated[MessageToolCall, BeforeValidator(limit_fields)]],
            Field(max_length=1024, fail_fast=True),
        ]
        | None
    ]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    # Fields of answers that clients send back; always empty.
    refusal: NotRequired[None]
    audio: NotRequired[None]
    function_call: NotRequired[None]
    annotations: NotRequired[Annotated[list[Any], Field(max_length=0)] | None]


@with_config(FORBID)
class Function(TypedDict):
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(FORBID)
class Tool(TypedDict):
    type: Literal["function"]
    function: Function


Messages = Annotated[
    list[Annotated[Message, BeforeValidator(limit_fields)]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]
Tools = Annotated[
    list[Annotated[Tool, BeforeValidator(limit_fields)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


@with_config(FORBID)
class NamedFunction(TypedDict):
    name: str


@with_config(FORBID)
class NamedTool(TypedDict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#text")]
    | Annotated[NamedTool, BeforeValidator(limit_fields), Tag("#list")],
    Discriminator(text_or_list),
]


@with_config(FORBID)
class StreamOptions(TypedDict):
    include_usage: NotRequired[bool | None]
    continuous_usage_stats: NotRequired[bool | None]
    include_obfuscation: NotRequired[bool | None]


OBFUSCATION: Mapping[str, tuple[Any, ...]] = {"stream_options.include_obfuscation": (False,)}
"""Padding of events against traffic analysis, which this server does not do."""

StreamUsage = Literal["none", "end", "each chunk"]


def usage_of_stream(options: StreamOptions | None) -> StreamUsage:
    """Chunks of a stream that have ``usage``."""
    if not options or not options.get("include_usage"):
        return "none"
    return "each chunk" if options.get("continuous_usage_stats") else "end"


class TemplateFields(RequestBody):
    """Fields with variables of the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None

    def template_variables(self, engine: AsyncLLMEngine) -> dict[str, Any]:
        """Variables of the chat template; errors as for the function ``template_variables``."""
        return template_variables(
            self.chat_template_kwargs,
            self.reasoning_effort,
            engine,
            partial(self._unsupported.refuse, "reasoning_effort"),
        )


class ChatRequest(TemplateFields, Choices):
    """Body of a chat completion: OpenAI's fields, and those of SamplingParams."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    NEUTRAL_PARTS: ClassVar[Mapping[str, tuple[Any, ...]]] = OBFUSCATION

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    # There is no list of stored completions: the field of every example is accepted, and no more.
    store: bool | None = None

    @property
    def usage_of_stream(self) -> StreamUsage:
        return usage_of_stream(self.stream_options)

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; None without log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise invalid("top_logprobs", self.top_logprobs, "null without logprobs=true")
            return None
        return self.top_logprobs or 0

    def submit(self, engine: AsyncLLMEngine, options: Mapping[str, Any]) -> TokenStream:
        """Submit the request; returns the stream of the answer.

        Args:
            options: the server's own, as from ``Serving.options``.

        Raises:
            ProtocolError: for fields that contradict each other.
            AsyncLLMError: as for ``AsyncLLMEngine.chat``.
        """
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            accepted = f"what max_tokens={self.max_tokens} says, or null"
            raise invalid("max_completion_tokens", self.max_completion_tokens, accepted)
        params = self.sampling_params(
            {
                "n": self.num_outputs,
                "max_tokens": next(iter(limits), None),
                "logprobs": self.num_logprobs,
            }
        )
        return engine.chat(
            template_messages(self.messages, engine),
            params,
            tools=self.tools,
            tool_choice=cast("Any", self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self.response_format,
            chat_template_kwargs=self.template_variables(engine),
            **options,
            **self.options,
        )


def template_messages(messages: Sequence[Mapping[str, Any]], engine: AsyncLLMEngine) -> list[Any]:
    """Convert messages for the model's template. The role "developer", a later name of "system",
    becomes "system" unless the template knows it."""
    knows_developer = engine.tokenizer.chat_template.reads("developer")
    found = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        message.pop("annotations", None)
        if message["role"] == "developer" and not knows_developer:
            message["role"] = "system"
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
        found.append(message)
    return found


def template_variables(
    given: Mapping[str, Any] | None,
    effort: str | None,
    engine: AsyncLLMEngine,
    refuse_effort: Callable[[str], None],
) -> dict[str, Any]:
    """Variables of the model's template besides messages and tools.

    Args:
        given: the client's variables. A template is refused, because it is a program.
        effort: the client's reasoning effort. "none" asks nothing of a template that knows none.
        refuse_effort: refuses an effort that the template does not support.

    Raises:
        ProtocolError: for a variable that the template does not support.
    """
    variables = dict(given or {})
    if "chat_template" in variables:
        raise unsupported("chat_template_kwargs.chat_template", variables["chat_template"])
    template = engine.tokenizer.chat_template
    if effort is None:
        return variables
    if template.reads("reasoning_effort"):
        return {**variables, "reasoning_effort": effort}
    if template.reads("enable_thinking"):
        return {**variables, "enable_thinking": effort != "none"}
    if effort != "none":
        refuse_effort(effort)
    return variables
