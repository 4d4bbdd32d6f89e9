"""OpenTelemetry traces of requests; needs the extra ``asyncllm[tracing]``."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from asyncllm.core.request import Request
from asyncllm.observer import RequestInfo, outputs_of
from asyncllm.outputs import Usage

if TYPE_CHECKING:
    from asyncllm.engine import AsyncLLMEngine

try:
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, get_tracer
except ImportError as error:
    raise ImportError(
        "asyncllm.tracing needs opentelemetry-api: pip install 'asyncllm[tracing]'", name=error.name
    ) from error

_SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
_NANOSECONDS_PER_SECOND = 1_000_000_000


class EngineTracing:
    """Makes a span for every request of an engine, by OpenTelemetry's conventions for generative
    AI.

    The span is a child of the caller's current span at ``stream()`` or ``chat()``; it begins there
    and ends with the request, however late its output is read. It ends on the engine thread, so the
    tracer provider's span processor should queue spans (a ``BatchSpanProcessor``) instead of
    exporting them while the engine waits.

    Args:
        engine: an engine in any state.
        tracer_provider: tracer provider; None uses OpenTelemetry's global one.
        capture_content: record prompts and outputs too. If False, spans have no text of a request,
            and only the type of an error, because the error's message may quote such text.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        tracer_provider: TracerProvider | None = None,
        *,
        capture_content: bool = False,
    ) -> None:
        from asyncllm import __version__

        # A strong reference would keep the engine alive: the engine thread refers to its requests,
        # and requests refer to this observer.
        self._engine = weakref.ref(engine)
        self._model = engine.config.model_name
        self._capture_content = capture_content
        self._tracer = get_tracer(
            "asyncllm", __version__, tracer_provider=tracer_provider, schema_url=_SCHEMA_URL
        )
        self._open_spans: dict[Request, tuple[Span, int]] = {}
        engine.add_observer(self)

    def close(self) -> None:
        """Trace no further requests; open spans end with their requests. Idempotent."""
        if (engine := self._engine()) is not None:
            engine.remove_observer(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- the observer ------------------------------------------------------------------

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        # Request timestamps are monotonic, span timestamps are wall-clock.
        age = time.monotonic() - request.arrived_at
        start_time = time.time_ns() - int(age * _NANOSECONDS_PER_SECOND)
        attributes = _request_attributes(request, submission, self._model)
        if self._capture_content:
            attributes["gen_ai.input.messages"] = _input_messages(request, submission)
        span = self._tracer.start_span(
            f"{submission.operation} {self._model}",
            # The conventions prescribe INTERNAL for a model in the same process.
            kind=SpanKind.INTERNAL,
            attributes=attributes,
            start_time=start_time,
        )
        self._open_spans[request] = (span, start_time)

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        span, start_time = self._open_spans.pop(request, (None, 0))
        if span is None:
            return
        try:
            if span.is_recording():
                if usage.ttft is not None:
                    first_token_at = start_time + int(usage.ttft * _NANOSECONDS_PER_SECOND)
                    span.add_event("gen_ai.first_token", timestamp=first_token_at)
                span.set_attributes(_response_attributes(request, usage, error))
                if error is not None:
                    description = str(error) if self._capture_content else None
                    span.set_status(Status(StatusCode.ERROR, description))
                if self._capture_content:
                    span.set_attribute("gen_ai.output.messages", _output_messages(request, error))
        finally:
            span.end(start_time + int(usage.total_time * _NANOSECONDS_PER_SECOND))


def trace_engine(
    engine: AsyncLLMEngine,
    tracer_provider: TracerProvider | None = None,
    *,
    capture_content: bool = False,
) -> EngineTracing:
    """Trace the requests of ``engine`` until ``close()``; see ``EngineTracing``."""
    return EngineTracing(engine, tracer_provider, capture_content=capture_content)


def _request_attributes(request: Request, submission: RequestInfo, model: str) -> dict[str, Any]:
    """Span attributes that are known at submission. OpenTelemetry's GenAI conventions omit settings
    without effect. The seed is always included, even if the engine drew it, so that a sampled
    output can be reproduced."""
    sampling = request.sampling
    engine = request.group.engine
    optional = {
        "max_tokens": sampling.max_tokens,
        "choice.count": sampling.n if sampling.n > 1 else None,
        "top_k": sampling.top_k or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "stop_sequences": tuple(sampling.stop) or None,
    }
    assert sampling.seed is not None
    return {
        "gen_ai.operation.name": submission.operation,
        "gen_ai.provider.name": "asyncllm",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": _signed_seed(sampling.seed),
        "gen_ai.output.type": "text",
        **{f"gen_ai.request.{k}": v for k, v in optional.items() if v is not None},
        **({} if engine is None else {"asyncllm.engine": engine}),
    }


def _signed_seed(seed: int) -> int:
    """Convert a 64-bit seed to a signed integer, because attributes are signed. SamplingParams
    accepts the negative number as the same seed."""
    return seed if seed < 1 << 63 else seed - (1 << 64)


def _response_attributes(
    request: Request, usage: Usage, error: BaseException | None
) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "asyncllm.queue_time": usage.queue_time,
        "asyncllm.num_preemptions": sum(output.num_preemptions for output in outputs_of(request)),
    }
    if usage.ttft is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = usage.ttft
    if error is None:
        reasons = tuple([_finish_reason(output, None) for output in outputs_of(request)])
        attributes["gen_ai.response.finish_reasons"] = reasons
    else:
        attributes["error.type"] = type(error).__name__
    return attributes


def _finish_reason(request: Request, error: BaseException | None) -> str:
    return "error" if error is not None else request.finish_reason or "abort"


def _input_messages(request: Request, submission: RequestInfo) -> str:
    prompt = submission.prompt
    is_tokenised = type(prompt) is tuple and isinstance(prompt[0], int)
    if submission.operation == "chat" and not is_tokenised:
        return _to_json([_input_message(message) for message in prompt])
    text = prompt if isinstance(prompt, str) else request.output.decode(request.token_ids)
    return _to_json([{"role": "user", "parts": [_text_part(text)]}])


def _input_message(message: Any) -> dict[str, Any]:
    """Convert a message of a conversation to the dict that OpenTelemetry's conventions define."""
    if not isinstance(message, Mapping):
        return {"role": "user", "parts": [message]}
    content = message.get("content")
    items = content if isinstance(content, (list, tuple)) else () if content is None else (content,)
    return {"role": message.get("role", "user"), "parts": [_message_part(item) for item in items]}


def _message_part(item: Any) -> Any:
    if isinstance(item, Mapping):
        return _text_part(item.get("text", "")) if item.get("type") == "text" else item
    return _text_part(item)


def _output_messages(request: Request, error: BaseException | None) -> str:
    messages = []
    for output in outputs_of(request):
        parts = [_text_part(output.output.decode(output.output_token_ids))]
        reason = _finish_reason(output, error)
        messages.append({"role": "assistant", "parts": parts, "finish_reason": reason})
    return _to_json(messages)


def _text_part(text: Any) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
