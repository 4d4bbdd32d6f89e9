"""Types of the JSON answers, for the code that writes them and for ``/openapi.json``.

An answer may have further fields.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Count = Annotated[int, Field(ge=0)]
StopReason = Literal["stop", "length", "tool_calls"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(TypedDict):
    error: ErrorInfo


class PromptTokensDetails(TypedDict):
    cached_tokens: Count


class TruncationUsage(TypedDict):
    """Extension of OpenAI's ``usage``: the number of tokens cut from a prompt."""

    truncated_prompt_tokens: NotRequired[Count]


class TokenUsage(TruncationUsage):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class ChatFunctionCall(TypedDict):
    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatChoice(TypedDict):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: StopReason


class _ChoicesAnswer(TypedDict):
    id: str
    created: Count
    model: str
    usage: TokenUsage


class ChatCompletion(_ChoicesAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of an output, as parallel lists by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(TypedDict):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: StopReason


class Completion(_ChoicesAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OutputItem(TypedDict):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: ItemStatus


class ResponseUsage(TypedDict):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class HealthState(TypedDict):
    status: Literal["new", "starting", "running", "dead", "closed"]
    live: bool
    ready: bool


class TokenizeResponse(TypedDict):
    count: Count
    tokens: list[Count]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


class ServerSentEvent(TypedDict):
    """Server-sent event with JSON data. A stream of completions ends with the data [DONE]."""

    event: NotRequired[str]
    data: str
