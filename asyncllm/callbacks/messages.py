"""Arguments of handlers: messages, generations and results with LangChain's attributes.

Handlers written for LangChain read attributes (``message.content``,
``result.generations[0][0].text``) and call ``model_dump()``. The types of this module have these
attributes and this method, so that LangChain need not be installed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self

from asyncllm.outputs import Completion, CompletionOutput, Delta, Usage
from asyncllm.validation import argument_error

MessageType = Literal["human", "ai", "system", "tool", "chat"]

_MESSAGE_TYPES: Mapping[str, MessageType] = {
    "user": "human",
    "assistant": "ai",
    "system": "system",
    "developer": "system",
    "tool": "tool",
}
_ROLE_LABELS: Mapping[MessageType, str] = {
    "human": "Human",
    "ai": "AI",
    "system": "System",
    "tool": "Tool",
}


class _ModelDump:
    """Base class with pydantic's ``model_dump``, which tracers and loggers call."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        assert is_dataclass(self)
        return {f.name: _to_plain(getattr(self, f.name)) for f in fields(self)}

    def dict(self, **_: Any) -> dict[str, Any]:
        return self.model_dump()


def _to_plain(value: Any) -> Any:
    if isinstance(value, _ModelDump):
        return value.model_dump()
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return copy.copy(value) if isinstance(value, dict) else value


@dataclass
class CallbackMessage(_ModelDump):
    """One message of a conversation, with the attributes of LangChain's ``BaseMessage``.

    Attributes:
        content: the text, or the caller's list of parts.
        type: LangChain's name of the role: "human", "ai", "system" or "tool"; "chat" for any other.
        role: the caller's name of the role.
        usage_metadata: token counts of an answer: ``input_tokens``, ``output_tokens``,
            ``total_tokens`` and ``input_token_details["cache_read"]``; None for other messages.
    """

    content: Any
    type: MessageType
    role: str
    name: str | None = None
    id: str | None = None
    tool_calls: list[Any] = field(default_factory=list)
    additional_kwargs: dict[str, Any] = field(default_factory=dict)
    response_metadata: dict[str, Any] = field(default_factory=dict)
    usage_metadata: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in self.content]
        return "".join(part for part in parts if isinstance(part, str))

    @classmethod
    def from_chat(cls, message: Mapping[str, Any]) -> Self:
        """Convert a chat message ``{"role": …, "content": …}``."""
        role, calls = str(message.get("role")), message.get("tool_calls")
        return cls(
            content=message.get("content") or "",
            type=_MESSAGE_TYPES.get(role, "chat"),
            role=role,
            name=message.get("name"),
            tool_calls=list(calls) if isinstance(calls, (list, tuple)) else [],
        )


@dataclass
class CallbackGeneration(_ModelDump):
    """Text of one output, or of one chunk of it for ``on_llm_new_token(chunk=…)``."""

    text: str
    generation_info: dict[str, Any] | None = None
    type: str = "Generation"


@dataclass
class CallbackChatGeneration(CallbackGeneration):
    """CallbackGeneration of a conversation, with a message as in LangChain's ``ChatGeneration``."""

    type: str = "ChatGeneration"
    message: CallbackMessage = field(default_factory=lambda: CallbackMessage("", "ai", "assistant"))


@dataclass
class CallbackResult(_ModelDump):
    """Argument of ``on_llm_end``, with the attributes of LangChain's ``LLMResult``.

    Attributes:
        generations: for each prompt, the list of its outputs. Here there is always one prompt.
        llm_output: dict with ``token_usage`` and ``model_name``.
    """

    generations: list[list[CallbackGeneration]]
    llm_output: dict[str, Any] | None = None
    run: list[Any] | None = None
    type: str = "LLMResult"

    def flatten(self) -> list[Self]:
        """Split the result into one result per prompt."""
        return [type(self)([outputs], self.llm_output) for outputs in self.generations]


def messages_from_chat(messages: Any) -> list[CallbackMessage]:
    """Convert chat messages.

    Raises:
        InvalidRequestError: if one of them is not a mapping.
    """
    if not all(isinstance(message, Mapping) for message in messages):
        problem = 'expected text, token ids, or messages {"role": …, "content": …}'
        raise argument_error("prompt", problem)
    return [CallbackMessage.from_chat(message) for message in messages]


def buffer_string(messages: Sequence[CallbackMessage]) -> str:
    """Join a conversation to one text, for handlers that accept only prompts."""
    return "\n".join(f"{_ROLE_LABELS.get(m.type, m.role)}: {m.text}" for m in messages)


def make_chunk(delta: Delta, several_outputs: bool, message_id: str | None) -> CallbackGeneration:
    """Convert a delta to a handler's chunk.

    Args:
        several_outputs: whether the request has several outputs; the chunk then has its output's
            index.
        message_id: id of the answer's message; None for a prompt of plain text, whose chunk has no
            message.
    """
    index = delta.index if several_outputs else None
    return _make_generation(delta, delta.usage, message_id, "Chunk", index)


def make_result(completion: Completion, message_id: str | None, model_name: str) -> CallbackResult:
    """Convert a completion, which may be partial, to a handler's result; ``message_id`` as in
    ``make_chunk``."""
    usage = completion.usage
    several_outputs = len(completion.outputs) > 1
    generations = [
        # Only the first generation has the usage, which counts the tokens of all outputs: handlers
        # may add up the usage of all generations.
        _make_generation(
            output,
            None if output.index else usage,
            message_id,
            index=output.index if several_outputs else None,
            model_name=model_name,
        )
        for output in completion.outputs
    ]
    llm_output: dict[str, Any] = {"model_name": model_name}
    if usage is not None:
        llm_output["token_usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        }
    return CallbackResult([generations], llm_output)


def _make_generation(
    output: Delta | CompletionOutput,
    usage: Usage | None,
    message_id: str | None,
    suffix: str = "",
    index: int | None = None,
    **metadata: Any,
) -> CallbackGeneration:
    """Make the generation of an output's text.

    Args:
        usage: token counts for the message's ``usage_metadata``.
        message_id: see ``make_chunk``.
        suffix: suffix of the generation's type name: "Chunk" for a delta.
        index: index of the output; None if there is only one.
        metadata: further entries of the message's ``response_metadata``.
    """
    info: dict[str, Any] = {
        "index": index,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    info = {name: value for name, value in info.items() if value is not None}
    if message_id is None:
        return CallbackGeneration(output.text, info or None, f"Generation{suffix}")
    message = CallbackMessage(
        output.text,
        "ai",
        "assistant",
        id=message_id,
        response_metadata=info | metadata,
        usage_metadata=usage_metadata(usage),
    )
    return CallbackChatGeneration(output.text, info or None, f"ChatGeneration{suffix}", message)


def usage_metadata(usage: Usage | None) -> dict[str, Any] | None:
    """Convert token counts to a dict with LangChain's names."""
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "input_token_details": {"cache_read": usage.cached_tokens},
    }
