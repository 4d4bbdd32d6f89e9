"""Pydantic AI's messages as the engine's, and the engine's outputs as Pydantic AI's parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    CachePoint,
    FinishReason,
    InstructionPart,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelResponsePart,
    RetryPromptPart,
    SystemPromptPart,
    TextContent,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.usage import RequestUsage

from asyncllm import Completion, Usage

FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_call",
}


def to_chat(
    messages: Iterable[ModelMessage], instructions: Sequence[InstructionPart] | None
) -> list[dict[str, Any]]:
    """Messages in OpenAI's form. What comes before the first turn, system prompts and
    instructions, is one system message: many chat templates take no second."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message, ModelRequest):
            for part in message.parts:
                chat.append(_request_turn(part))
        else:
            chat.append(_response_turn(message))
    begin = next((i for i, turn in enumerate(chat) if turn["role"] != "system"), len(chat))
    texts = [turn["content"] for turn in chat[:begin]]
    texts += [part.content for part in instructions or ()]
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else []), *chat[begin:]]


def _request_turn(part: Any) -> dict[str, Any]:
    if isinstance(part, SystemPromptPart):
        return {"role": "system", "content": part.content}
    if isinstance(part, UserPromptPart):
        return {"role": "user", "content": _user_text(part.content)}
    if isinstance(part, ToolReturnPart):
        return _tool_turn(part.tool_call_id, part.model_response_str())
    if isinstance(part, RetryPromptPart):  # of histories that an older version wrote
        if part.tool_name is None:
            return {"role": "user", "content": part.model_response()}
        return _tool_turn(part.tool_call_id, part.model_response())
    raise UserError(
        f"a {type(part).__name__} in a request: expected system prompts, user prompts and tool "
        "returns, as Model.prepare_messages leaves them"
    )


def _tool_turn(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _user_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for item in content:
        if isinstance(item, CachePoint):  # every prefix is cached
            continue
        text = item.content if isinstance(item, TextContent) else item
        if not isinstance(text, str):
            raise UserError(f"a {type(item).__name__} in a user prompt: expected text")
        texts.append(text)
    return "\n".join(texts)


def _response_turn(message: ModelResponse) -> dict[str, Any]:
    """Parts that only their own provider reads (native tools, files, compactions) are left out."""
    parts = message.parts
    text = "\n\n".join(part.content for part in parts if isinstance(part, TextPart))
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    thoughts = [part.content for part in parts if isinstance(part, ThinkingPart) and part.content]
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    if calls:
        turn["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.tool_name, "arguments": call.args_as_json_str()},
            }
            for call in calls
        ]
    return turn


def to_parts(completion: Completion) -> list[ModelResponsePart]:
    return list(_parts(completion))


def _parts(completion: Completion) -> Iterator[ModelResponsePart]:
    if completion.reasoning:
        yield ThinkingPart(completion.reasoning)
    if completion.text:
        yield TextPart(completion.text)
    for call in completion.tool_calls:
        yield ToolCallPart(call.name, call.arguments, call.id)


def to_usage(usage: Usage | None) -> RequestUsage:
    if usage is None:
        return RequestUsage()
    return RequestUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cached_tokens,
    )
