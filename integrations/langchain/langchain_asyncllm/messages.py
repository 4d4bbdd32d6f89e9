"""LangChain's messages as the engine's, and the engine's outputs as LangChain's messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call, tool_call_chunk

from asyncllm import CompletionOutput, Delta, Usage

_REASONING = "reasoning_content"
_BESIDE_TEXT = {"reasoning", "thinking", "tool_call", "tool_call_chunk", "invalid_tool_call"}


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form. A model's earlier thoughts are in ``reasoning_content``, which
    chat templates read, whether LangChain had them in ``additional_kwargs`` or as blocks."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, AIMessage):
            chat += convert_to_openai_messages([message])
            continue
        reasoning = message.additional_kwargs.get(_REASONING)
        if isinstance(message.content, list):
            blocks = [block for block in message.content if isinstance(block, dict)]
            reasoning = reasoning or _thoughts(blocks)
            # The calls are in message.tool_calls as well.
            rest = [
                block
                for block in message.content
                if not isinstance(block, dict) or block.get("type") not in _BESIDE_TEXT
            ]
            message = message.model_copy(update={"content": rest})
        turn = convert_to_openai_messages([message])
        if reasoning:
            turn[0][_REASONING] = reasoning
        chat += turn
    return chat


def _thoughts(blocks: Sequence[dict[str, Any]]) -> str:
    texts = (b.get("reasoning") or b.get("thinking") for b in blocks)
    return "\n".join(text for text in texts if isinstance(text, str))


def to_message(output: CompletionOutput, metadata: dict[str, Any], usage: Any) -> AIMessage:
    """A whole output."""
    return AIMessage(
        content=output.text,
        additional_kwargs={_REASONING: output.reasoning} if output.reasoning else {},
        tool_calls=[tool_call(name=c.name, args=c.kwargs, id=c.id) for c in output.tool_calls],
        response_metadata=metadata,
        usage_metadata=usage,
    )


class ChunkMaker:
    """Deltas of one output as message chunks, whose sum is the message.

    The engine hands out the fragments of a call as they come, and a call that is cut off or
    malformed never becomes ``done``: all of it is in the text then. LangChain closes the brackets
    of unfinished arguments and calls the tool. So what is left open at the end gets a
    bracket that fits nowhere, which makes an ``invalid_tool_calls`` entry of it.
    """

    def __init__(self) -> None:
        self._open: dict[int, str] = {}

    def chunk(self, delta: Delta, metadata: dict[str, Any]) -> AIMessageChunk:
        return AIMessageChunk(
            content=delta.text,
            additional_kwargs={_REASONING: delta.reasoning} if delta.reasoning else {},
            tool_call_chunks=self._tool_call_chunks(delta)
            if delta.tool_calls or self._open
            else [],
            response_metadata=metadata,
            usage_metadata=usage_metadata(delta.usage),
            chunk_position=None if delta.finish_reason is None else "last",
        )

    def _tool_call_chunks(self, delta: Delta) -> list[ToolCallChunk]:
        chunks: dict[int, ToolCallChunk] = {}
        for part in delta.tool_calls:
            chunk = chunks.setdefault(
                part.index, tool_call_chunk(name=None, args="", id=None, index=part.index)
            )
            chunk["name"], chunk["id"] = part.name or chunk["name"], part.id or chunk["id"]
            chunk["args"] = (chunk["args"] or "") + part.arguments
            self._open[part.index] = self._open.get(part.index, "") + part.arguments
            if part.done:
                del self._open[part.index]
        if delta.finish_reason is not None:
            for index, arguments in self._open.items():
                end = tool_call_chunk(name=None, args="", id=None, index=index)
                chunk = chunks.setdefault(index, end)
                chunk["args"] = (chunk["args"] or "") + unparsable_end(arguments)
        return list(chunks.values())


def unparsable_end(arguments: str) -> str:
    """What makes ``arguments``, the begin of a JSON object, parse as nothing, not even leniently
    (``parse_partial_json``): more closing brackets than are open, outside a string."""
    rest = re.sub(r"\\.", "", arguments, flags=re.S)
    end = "\\" if rest.endswith("\\") else ""
    if rest.count('"') % 2:
        end += '"'
    return end + "]" * (arguments.count("[") + 1)


def usage_metadata(usage: Usage | None) -> UsageMetadata | None:
    if usage is None:
        return None
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
