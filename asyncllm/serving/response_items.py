"""Output items of a response."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from asyncllm.outputs import TokenLogprobs, ToolCall
from asyncllm.serving.answers import ItemStatus


@dataclass(slots=True)
class TextItem:
    """Output item with one text, which grows: a message, or reasoning.

    Args:
        index: index among the response's items.
        is_reasoning: whether it is reasoning instead of a message.

    Attributes:
        logprobs_mark: text that stands for the log-probabilities in the item's fields.
            ResponseEvents replaces the mark by their JSON when an event is sent. The JSON takes
            twenty times the memory of the log-probabilities, and four events repeat it.
    """

    index: int
    is_reasoning: bool
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    status: ItemStatus = "in_progress"
    id: str = field(init=False)
    logprobs_mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.id = f"{'rs' if self.is_reasoning else 'msg'}_{uuid.uuid4().hex}"

    @property
    def event_fields(self) -> dict[str, Any]:
        """Fields by which an event names this item's content part."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def logprobs_field(self) -> list[Any] | str:
        return self.logprobs_mark if self.logprobs else []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def content_part(self) -> dict[str, Any]:
        if self.is_reasoning:
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs_field,
        }

    def as_dict(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [self.content_part()]
        common = {"id": self.id, "status": self.status, "content": content}
        if self.is_reasoning:
            return {"type": "reasoning", "summary": [], **common}
        return {"type": "message", "role": "assistant", **common}


@dataclass(slots=True)
class CallItem:
    """Output item of a response: one function call."""

    index: int
    call: ToolCall
    status: ItemStatus = "in_progress"
    id: str = field(default_factory=lambda: f"fc_{uuid.uuid4().hex}")

    def as_dict(self) -> dict[str, Any]:
        has_arguments = self.status != "in_progress"
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.call.id,
            "name": self.call.name,
            "arguments": self.call.arguments if has_arguments else "",
        }
