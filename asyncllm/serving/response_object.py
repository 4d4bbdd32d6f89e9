"""ResponseObject: the JSON object of a response in any state."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from asyncllm.outputs import Usage
from asyncllm.serving.choices_writer import truncation_field
from asyncllm.serving.exchange import encode_json
from asyncllm.serving.response_request import ResponseRequest


class ResponseObject:
    """JSON object of one response, which repeats most fields of its request.

    Args:
        request: the client's request.
        model: the client's name for the model.
        defaults: values of sampling fields that the request leaves out.

    Attributes:
        id: id of the response.
    """

    __slots__ = ("_constant_json", "id")

    def __init__(self, request: ResponseRequest, model: str, defaults: Mapping[str, Any]) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        reasoning: Any = request.reasoning or {}
        constant_fields = {
            "id": self.id,
            "object": "response",
            "created_at": time.time(),
            "model": model,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "temperature": defaults.get("temperature", 1.0),
            "top_p": defaults.get("top_p", 1.0),
            **request.present_values(("temperature", "top_p")),
            "top_logprobs": request.num_logprobs or 0,
            "background": False,
            "store": request.should_store,
            "service_tier": "default",
            "text": {"format": {"type": "text"}, **(request.text or {}), "verbosity": "medium"},
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "user": request.user,
            "safety_identifier": request.safety_identifier,
        }
        # Long texts are kept as UTF-8: one emoji makes a ``str`` four times as large.
        self._constant_json = encode_json(constant_fields).encode()[:-1]

    @property
    def num_repeated_bytes(self) -> int:
        """Bytes of the request's fields as the response's JSON repeats them. They may be more than
        in the request: ``1e15`` is written with all its zeros."""
        return len(self._constant_json)

    def to_json(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        error: dict[str, Any] | None = None,
    ) -> bytes:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        fields = {
            "completed_at": time.time() if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "output": output,
            "usage": None if usage is None else _usage_fields(usage),
            "timings": None if usage is None else _timings(usage),
        }
        return b"%b,%b" % (self._constant_json, encode_json(fields)[1:].encode())


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
        **truncation_field(usage.truncated_prompt_tokens),
    }


def _timings(usage: Usage) -> dict[str, Any]:
    """Timings of a response in seconds, an extension of OpenAI's protocol."""
    return {"queue_time": usage.queue_time, "ttft": usage.ttft, "total_time": usage.total_time}
