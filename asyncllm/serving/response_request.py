"""ResponseRequest: the body of ``/v1/responses`` and of a ``response.create`` event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from asyncllm.engine import AsyncLLMEngine
from asyncllm.serving.chat_request import (
    MAX_MESSAGES,
    ConversationFields,
    Function,
    NamedFunction,
    ReasoningEffort,
    ToolMode,
)
from asyncllm.serving.request_body import (
    AcceptedValues,
    LimitedObject,
    ObjectList,
    unsupported_error,
)
from asyncllm.serving.response_input import InputItem, Message, items_to_messages
from asyncllm.serving.sampling_fields import OBFUSCATION_VALUES, TextOr
from asyncllm.stream import TokenStream
from asyncllm.tool_calls.tool_use import MAX_TOOLS
from asyncllm.validation import MAX_INTEGER

LOGPROBS_INCLUDE_VALUE = "message.output_text.logprobs"
INCLUDE_VALUES = (
    LOGPROBS_INCLUDE_VALUE,
    # Not needed: reasoning is not encrypted, so clients can send it back unchanged.
    "reasoning.encrypted_content",
    # These concern tools and input items, all of which this server refuses.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Accepted items of ``include``. Only the first changes the answer."""

Input = TextOr[
    Annotated[str, Field(min_length=1)],
    Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)],
]


class _FunctionType(TypedDict):
    # This is a class of its own, so that it can be the first base class: pydantic then checks
    # ``type`` before the other fields, and an error names the first invalid field.
    type: Literal["function"]


class ResponseTool(_FunctionType, Function):
    pass


class ResponseNamedTool(_FunctionType, NamedFunction):
    pass


ResponseToolChoice = TextOr[ToolMode, LimitedObject[ResponseNamedTool]]


class SchemalessFormat(TypedDict):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(TypedDict):
    type: Literal["json_schema"]
    name: str
    schema: dict[str, Any]
    strict: NotRequired[bool | None]
    description: NotRequired[str | None]


def _get_text_format_tag(value: Any) -> str:
    is_schema = isinstance(value, dict) and value.get("type") == "json_schema"
    return "#schema" if is_schema else "#plain"


class ResponseTextConfig(TypedDict):
    format: NotRequired[
        Annotated[
            Annotated[LimitedObject[SchemalessFormat], Tag("#plain")]
            | Annotated[LimitedObject[JsonSchemaFormat], Tag("#schema")],
            Discriminator(_get_text_format_tag),
        ]
        | None
    ]
    verbosity: NotRequired[Literal["low", "medium", "high"] | None]


Summary = Literal["auto", "concise", "detailed"]


class ReasoningConfig(TypedDict):
    effort: NotRequired[ReasoningEffort | None]
    summary: NotRequired[Summary | None]
    generate_summary: NotRequired[Summary | None]


class ResponseStreamOptions(TypedDict):
    include_obfuscation: NotRequired[bool | None]


class ResponseRequest(ConversationFields):
    """Body of a request for a response: OpenAI's fields, those of SamplingParams, and ``generate``.
    With ``generate=false`` the prompt is only computed into the prefix cache."""

    FOREIGN_NAMES_SECTION = "field of /v1/responses"

    ACCEPTED_VALUES: ClassVar[AcceptedValues] = {
        **ConversationFields.ACCEPTED_VALUES,
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "prompt": (),
        "stream_id": (),
        "truncation": ("disabled",),
    }
    # Reasoning is not summarised, and "auto" leaves that choice to the server.
    ACCEPTED_SUBFIELD_VALUES: ClassVar[AcceptedValues] = {
        "text.verbosity": ("medium",),
        "reasoning.summary": ("auto",),
        "reasoning.generate_summary": ("auto",),
        **OBFUSCATION_VALUES,
    }

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    tools: Annotated[ObjectList[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    text: LimitedObject[ResponseTextConfig] | None = None
    reasoning: LimitedObject[ReasoningConfig] | None = None
    stream: bool | None = None
    stream_options: LimitedObject[ResponseStreamOptions] | None = None
    generate: bool | None = None

    @property
    def should_generate(self) -> bool:
        return self.generate is not False

    @property
    def should_store(self) -> bool:
        """Whether to store the response; by default yes, as with OpenAI."""
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; None without log-probabilities.

        Raises:
            ProtocolError: for an unknown item in ``include``.
        """
        include = self.include or ()
        for item in include:
            if item not in INCLUDE_VALUES:
                raise unsupported_error("include", item, INCLUDE_VALUES)
        if LOGPROBS_INCLUDE_VALUE in include:
            return self.top_logprobs or 0
        return self.top_logprobs or None

    def max_logprobs_tokens(self, max_model_len: int) -> int:
        return min(self._max_tokens or max_model_len, max_model_len)

    @property
    def _max_tokens(self) -> int | None:
        """Maximum number of tokens of the output. At least one, because the engine computes and
        caches the whole prompt only if it samples a token."""
        return self.max_output_tokens if self.should_generate else 1

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages of ``input``, as ``AsyncLLMEngine.chat`` takes them."""
        if isinstance(self.input, str):
            return ({"role": "user", "content": self.input},)
        return tuple(items_to_messages(self.input))

    def submit(
        self,
        engine: AsyncLLMEngine,
        conversation: tuple[Message, ...],
        options: Mapping[str, Any],
    ) -> TokenStream:
        """Submit a conversation; returns the stream of the answer.

        Args:
            options: the server's own arguments, as from ``ServingContext.request_options``.

        Raises:
            ProtocolError: for unsupported fields.
            AsyncLLMError: as for ``AsyncLLMEngine.chat``.
        """
        if self.instructions is not None:
            conversation = ({"role": "system", "content": self.instructions}, *conversation)
        effort = (self.reasoning or {}).get("effort")
        return self.submit_chat(
            engine,
            conversation,
            options,
            response_format=self._response_format(),
            template_variables=self.template_variables(engine, effort, "reasoning.effort"),
            max_tokens=self._max_tokens,
            logprobs=self.num_logprobs,
        )

    def _response_format(self) -> dict[str, Any] | None:
        """Convert ``text.format`` to the ``response_format`` of chat completions."""
        text_format: Any = (self.text or {}).get("format")
        if text_format is None or text_format["type"] != "json_schema":
            return text_format
        schema = {key: value for key, value in text_format.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
