"""ResponseEvents: one response as OpenAI's protocol tells it, event by event."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncllm.outputs import Delta, TokenLogprobs, Usage
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.response_request import ResponseRequest


def encode(event: Mapping[str, Any]) -> str:
    """An event as it is sent."""
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


@dataclass(eq=False, repr=False)
class ResponseEvents:
    """Events of one response; every method returns those that are to be sent, in order.

    Args:
        request: the client's.
        model_name: the model's name in the protocol.
        defaults: the values of sampling fields that the request leaves open.
        decode: token ids to text, for log-probabilities.

    Attributes:
        id: the response's.
        text: generated so far.
        num_tokens: the number of its tokens.
    """

    _request: ResponseRequest
    _model_name: str
    _defaults: Mapping[str, Any]
    _decode: Callable[[Sequence[int]], str]
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    num_tokens: int = 0
    _item_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _created_at: float = field(default_factory=time.time)
    _sequence_number: int = 0
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._delta_head = (
            '{"type":"response.output_text.delta","item_id":"'
            + self._item_id
            + '","output_index":0,"content_index":0,"delta":'
        )

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def generates(self) -> bool:
        """False for a request that only warms the cache."""
        return self._request.generate

    def created(self) -> Iterator[str]:
        """The request was accepted. The item is opened here too, while the prompt is being
        computed: so nothing comes before the first token's own frame."""
        response = encode(self._response("in_progress"))
        for kind in ("response.created", "response.in_progress"):
            yield f'{{"type":"{kind}","sequence_number":{self._next()},"response":{response}}}'
        if self.generates:
            yield from self._open_item()

    def delta(self, delta: Delta) -> Iterator[str]:
        """Text has come."""
        self.num_tokens += len(delta.token_ids)
        if not delta.text and delta.logprobs is None:
            return
        self._texts.append(delta.text)
        logprobs = [self._logprob(item) for item in delta.logprobs or ()]
        self._logprobs += logprobs
        # One frame per token: this one is worth writing by hand.
        yield (
            f'{self._delta_head}{json.dumps(delta.text, ensure_ascii=False)},"logprobs":'
            f'{json.dumps(logprobs) if logprobs else "[]"},"sequence_number":{self._next()}}}'
        )

    def completed(self, finish_reason: str | None, usage: Usage | None) -> Iterator[str]:
        """The end, in one of its kinds; ``abort`` is a response that the client
        cancelled."""
        if not self.generates:
            yield self._event("response.completed", response=self._response("completed", usage))
            return
        whole = finish_reason in ("stop", "tool_calls")
        yield from self._close_item("completed" if whole else "incomplete")
        status = {"length": "incomplete", "abort": "cancelled"}.get(
            finish_reason or "", "completed"
        )
        kind = "response.completed" if whole else "response.incomplete"
        yield self._event(kind, response=self._response(status, usage))

    def failed(self, error: ProtocolError) -> Iterator[str]:
        """An error after the request was accepted."""
        response = self._response("failed")
        code = "invalid_prompt" if error.is_clients_fault else "server_error"
        if error.code == "context_length_exceeded":
            code = error.code  # as OpenAI's servers have it
        response["error"] = {"code": code, "message": str(error), "param": error.param}
        yield self._event("response.failed", response=response)

    # --- parts --------------------------------------------------------------------------

    def _open_item(self) -> Iterator[str]:
        yield self._event(
            "response.output_item.added", output_index=0, item=self._item("in_progress", [])
        )
        yield self._event("response.content_part.added", **self._place, part=self._part())

    def _close_item(self, status: str) -> Iterator[str]:
        yield self._event(
            "response.output_text.done", **self._place, text=self.text, logprobs=self._logprobs
        )
        yield self._event("response.content_part.done", **self._place, part=self._part())
        yield self._event(
            "response.output_item.done", output_index=0, item=self._item(status, [self._part()])
        )

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        request, sampling = self._request, self._request.sampling
        output, details = [], {"reason": "max_output_tokens"}
        if self.generates and status != "in_progress":
            item_status = "completed" if status == "completed" else "incomplete"
            output = [self._item(item_status, [self._part()])]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": time.time() if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": details if status == "incomplete" else None,
            "model": self._model_name,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "output": output,
            "usage": _usage(usage),
            "timings": _timings(usage),
            "max_output_tokens": sampling.get("max_tokens"),
            "temperature": sampling.get("temperature", self._defaults.get("temperature", 1.0)),
            "top_p": sampling.get("top_p", self._defaults.get("top_p", 1.0)),
            "top_logprobs": request.top_logprobs or 0,
            "background": False,
            "store": False,
            "service_tier": "default",
            "text": {"format": {"type": "text"}},
            "tools": [],
            "truncation": "disabled",
            **request.echo,
        }

    def _logprob(self, item: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._alternative(item.token_id, item.logprob),
            "top_logprobs": [
                self._alternative(one.token_id, one.logprob)
                for one in item.top[: self._request.top_logprobs]
            ],
        }

    def _alternative(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token_id])
        # JSON has no infinity; a token that cannot be sampled has that log-probability.
        return {
            "token": text,
            "logprob": max(logprob, -1e9),
            "bytes": list(text.encode("utf-8", "replace")),
        }

    def _event(self, kind: str, **fields: Any) -> str:
        return encode({"type": kind, "sequence_number": self._next(), **fields})

    def _next(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _timings(usage: Usage | None) -> dict[str, Any] | None:
    """Seconds; beyond OpenAI's protocol."""
    if usage is None:
        return None
    return {"queue_time": usage.queue_time, "ttft": usage.ttft, "total_time": usage.total_time}
