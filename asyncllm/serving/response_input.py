"""Input items of a response, and their conversion to messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from asyncllm.serving.answers import ItemStatus
from asyncllm.serving.request_body import UNSUPPORTED_ITEM_ERROR_TYPE, LimitedObject, ObjectList
from asyncllm.serving.sampling_fields import TextOr

Message = dict[str, Any]


class TextContentPart(TypedDict):
    """Text part of a message. The optional fields are accepted and ignored, because clients send
    output texts back as input."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: NotRequired[list[Any] | None]
    logprobs: NotRequired[list[Any] | None]


ItemContent = TextOr[str, Annotated[ObjectList[TextContentPart], Field(min_length=1)]]


class _InputItem(TypedDict):
    """Base of input items. Accepts and ignores the fields that only output items have, because
    clients send output items back as input."""

    id: NotRequired[str | None]
    status: NotRequired[ItemStatus | None]


class MessageItem(_InputItem):
    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    phase: NotRequired[None]


class FunctionCallItem(_InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: NotRequired[None]
    caller: NotRequired[None]


class FunctionCallOutputItem(_InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_InputItem):
    type: Literal["reasoning"]
    summary: NotRequired[list[Any] | None]
    content: NotRequired[ObjectList[ReasoningText] | None]
    encrypted_content: NotRequired[None]


def _get_item_tag(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    # The tag "#" matches no alternative. Converting another value to text could take long.
    return f"#{kind}" if isinstance(kind, str) else "#"


InputItem = Annotated[
    Annotated[LimitedObject[MessageItem], Tag("#message")]
    | Annotated[LimitedObject[FunctionCallItem], Tag("#function_call")]
    | Annotated[LimitedObject[FunctionCallOutputItem], Tag("#function_call_output")]
    | Annotated[LimitedObject[ReasoningItem], Tag("#reasoning")],
    Discriminator(
        _get_item_tag,
        custom_error_type=UNSUPPORTED_ITEM_ERROR_TYPE,
        custom_error_message="message function_call function_call_output reasoning",
    ),
]


def items_to_messages(items: Iterable[Any]) -> list[Message]:
    """Convert items to messages for chat templates. The calls and the reasoning of the assistant
    become parts of its message."""
    messages: list[Message] = []
    reasoning: list[str] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += [part["text"] for part in item.get("content") or ()]
            continue
        if kind == "function_call_output":
            content = _message_content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            continue
        if kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_tool_call(item))
        else:
            messages.append({"role": item["role"], "content": _message_content(item["content"])})
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = "\n".join(reasoning)
            reasoning = []
    return messages


def _tool_call(item: Any) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _message_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return content[0]["text"]
    return [{"type": "text", "text": part["text"]} for part in content]


def estimate_memory_bytes(messages: Iterable[Message]) -> int:
    """Approximate bytes of messages in memory: those of the texts, and 256 for each object."""
    return sum(map(_estimate_value_bytes, messages))


def _estimate_value_bytes(value: Any) -> int:
    if isinstance(value, str):
        return sys.getsizeof(value)
    if isinstance(value, dict):
        return 256 + sum(map(_estimate_value_bytes, value.values()))
    return sum(map(_estimate_value_bytes, value)) if isinstance(value, list) else 0


def num_argument_characters(messages: Iterable[Message]) -> int:
    """Number of characters of the arguments of tool calls, which are JSON text."""
    calls = chain.from_iterable(one.get("tool_calls", ()) for one in messages)
    return sum(len(call["function"]["arguments"]) for call in calls)
