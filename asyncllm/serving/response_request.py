"""ResponseRequest: a ``response.create`` event, checked field by field.

A field that this server cannot honour is refused by name, never ignored; the values of it
that ask for nothing (``"tools": []``) are accepted, because clients send them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from asyncllm import validation as check
from asyncllm.serving.protocol_error import ProtocolError

SAMPLING: Mapping[str, str] = {
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    # Beyond OpenAI's protocol, under the engine's own names.
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
}
"""Fields that are the engine's sampling parameters, and their names there."""

ENGINE_NAMES = {engine: field for field, engine in SAMPLING.items() if engine != field} | {
    "messages": "input",
    "prompt": "input",
}

_OPTIONS = ("cache_salt", "priority")

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (True,),
    "stream_id": (),
    "stream_options": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncation": ("disabled",),
}
"""Fields that are accepted only with a value that asks for nothing; None is one of them."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """Arguments for the engine, and the fields of the response that come from the request.

    Attributes:
        messages: the new ones, in the engine's form.
        instructions: the system message of this response alone, or None.
        previous_response_id: the response that this one continues.
        sampling: fields of the engine's SamplingParams.
        options: further arguments of ``AsyncLLMEngine.chat``.
        generate: False prepares the cache and generates nothing.
        top_logprobs: None, or how many alternatives each token comes with.
        echo: fields that the response object repeats.
    """

    messages: tuple[dict[str, Any], ...]
    instructions: str | None
    previous_response_id: str | None
    sampling: dict[str, Any]
    options: dict[str, Any]
    generate: bool
    top_logprobs: int | None
    echo: dict[str, Any]

    @classmethod
    def parse(cls, event: Mapping[str, Any], model_name: str) -> Self:
        """Raises ProtocolError, with the field at fault in ``param``."""
        fields = {name: value for name, value in event.items() if value is not None}
        fields.pop("type", None)
        taken = _Fields(fields)
        model = taken.text("model", model_name)
        if model != model_name:
            raise ProtocolError(
                f"model: {check.describe(model)} is not served here, expected {model_name!r}",
                code="model_not_found",
                param="model",
                status=404,
            )
        logprobs = _logprobs(taken)
        request = cls(
            messages=_messages(taken.take("input")),
            instructions=taken.text("instructions"),
            previous_response_id=taken.text("previous_response_id"),
            sampling={SAMPLING[name]: taken.take(name) for name in SAMPLING if name in fields},
            options={name: taken.take(name) for name in _OPTIONS if name in fields},
            generate=taken.flag("generate", True),
            top_logprobs=logprobs,
            echo={
                "metadata": _metadata(taken.take("metadata", {})),
                "user": taken.text("user"),
                "safety_identifier": taken.text("safety_identifier"),
                "tool_choice": fields.get("tool_choice", "auto"),
                "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            },
        )
        taken.check_rest()
        return request


class _Fields:
    """Fields of an event that were not looked at yet."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = dict(fields)

    def take(self, name: str, default: Any = None) -> Any:
        return self._fields.pop(name, default)

    def text(self, name: str, default: Any = None) -> Any:
        value = self.take(name, default)
        return check.string(name, value, empty=True, optional=True, refuse=_bad)

    def flag(self, name: str, default: bool) -> bool:
        return check.boolean(name, self.take(name, default), refuse=_bad)

    def check_rest(self) -> None:
        for name, value in self._fields.items():
            if name not in _NEUTRAL:
                raise ProtocolError(
                    f"{check.describe(name)}: no such field",
                    code="unknown_parameter",
                    param=name[:64],
                )
            if not any(check.same(value, neutral) for neutral in _NEUTRAL[name]):
                raise _unsupported(f"{name}={check.describe(value)} is not supported here", name)


def _logprobs(fields: _Fields) -> int | None:
    include = fields.take("include", [])
    if not isinstance(include, list) or not all(isinstance(item, str) for item in include):
        raise _bad("include", include, "a list of strings")
    for item in include:
        if item != "message.output_text.logprobs":
            raise _unsupported(f"include: {check.describe(item)} is not supported here", "include")
    top = check.integer(
        "top_logprobs", fields.take("top_logprobs"), 0, 20, optional=True, refuse=_bad
    )
    return (top or 0) if include else top or None


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > 16:
        raise _bad("metadata", value, "an object of at most 16 strings")
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > 64 or len(text) > 512:
            raise _bad(
                "metadata", value, "keys of at most 64 and strings of at most 512 characters"
            )
    return value


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str) and value:
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise _bad("input", value, "a text, or a list of at least one message")
    return tuple(_message(item, f"input[{i}]") for i, item in enumerate(value))


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise _bad(where, item, "a message")
    kind = item.get("type", "message")
    if kind != "message":
        told = f"{where}.type={check.describe(kind)} is not supported here, expected 'message'"
        raise _unsupported(told, f"{where}.type")
    role = item.get("role")
    if role not in _ROLES:
        raise _bad(f"{where}.role", role, "one of " + ", ".join(_ROLES))
    for name, content in item.items():
        # An output that is sent back has an id and a status; neither is for the model.
        if name not in ("type", "role", "content", "id", "status") and content is not None:
            raise _unsupported(f"{where}.{name[:64]}: not supported here", f"{where}.{name[:64]}")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _bad(where, value, "a text, or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            kind = part.get("type") if isinstance(part, dict) else part
            raise _bad(f"{where}[{i}]", kind, "a part of type " + ", ".join(_TEXT_PARTS))
        if not isinstance(part.get("text"), str):
            raise _bad(f"{where}[{i}].text", part.get("text"), "a string")
        texts.append(part["text"])
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _bad(name: str, value: Any, accepted: str) -> ProtocolError:
    return ProtocolError(
        f"{name}={check.describe(value)}: expected {accepted}", code="invalid_value", param=name
    )


def _unsupported(message: str, param: str) -> ProtocolError:
    return ProtocolError(message, code="unsupported_parameter", param=param)
