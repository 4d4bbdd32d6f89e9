"""response_object: the JSON object of a response in any state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from asyncllm.outputs import Usage
from asyncllm.serving.choices import truncation_field
from asyncllm.serving.response_request import ResponseRequest


def response_object(
    request: ResponseRequest,
    defaults: Mapping[str, Any],
    *,
    id: str,
    created_at: float,
    status: str,
    model: str,
    output: list[dict[str, Any]],
    usage: Usage | None,
) -> dict[str, Any]:
    """Make the protocol's JSON object of a response.

    Args:
        request: the client's request; the object repeats most of its fields.
        defaults: values of sampling fields that the request leaves out.
    """
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    reasoning: Any = request.reasoning or {}
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "completed_at": time.time() if status == "completed" else None,
        "status": status,
        "error": None,
        "incomplete_details": incomplete,
        "model": model,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "output": output,
        "usage": _usage_fields(usage),
        "timings": _timings(usage),
        "max_output_tokens": request.max_output_tokens,
        "temperature": _sampling_value(request, defaults, "temperature"),
        "top_p": _sampling_value(request, defaults, "top_p"),
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


def _sampling_value(request: ResponseRequest, defaults: Mapping[str, Any], name: str) -> float:
    value = getattr(request, name)
    return defaults.get(name, 1.0) if value is None else value


def _usage_fields(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
        **truncation_field(usage.truncated_prompt_tokens),
    }


def _timings(usage: Usage | None) -> dict[str, Any] | None:
    """Timings of the response in seconds, an extension of OpenAI's protocol."""
    if usage is None:
        return None
    return {"queue_time": usage.queue_time, "ttft": usage.ttft, "total_time": usage.total_time}
