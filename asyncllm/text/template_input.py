"""TemplateInput: checked copy of the input of a chat template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.validation import describe, explain

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED_VARIABLES = ("messages", "continue_final_message", "tokenize", "return_dict", "documents")
_MAX_DEPTH = 100
_MAX_VALUES = 100_000


class TemplateInput:
    """Messages, tools and other variables of a chat template, copied to JSON types.

    Because of the copy, a template gets no object with methods of its own, and does not see later
    changes by the caller.

    Clients send the arguments of earlier tool calls as JSON text. Templates get them as a dict, as
    transformers documents.

    Args:
        messages: dicts with a ``role``; ``content`` is a string, a list of text parts (joined by
            newlines), or absent. Dataclasses and pydantic models are accepted too.
        variables: any variables that the template reads. Those with a meaning of their own:

            - ``tools``: JSON schemas of functions.
            - ``add_generation_prompt``: True by default.
            - ``chat_template``: name of one of the model's templates, or the source of another.
        arguments_as_text: pass the arguments of tool calls to the template as JSON text.

    Raises:
        InvalidRequestError: ``param`` is "messages", "tools", "chat_template" or
            "chat_template_kwargs"; the message names the invalid value and its place.

    Attributes:
        chat_template: the variable ``chat_template``, or None.
        values: all other variables of the template.
        texts: every string in ``values``.
    """

    __slots__ = ("chat_template", "texts", "values")

    def __init__(
        self, messages: Any, variables: Mapping[str, Any], *, arguments_as_text: bool = False
    ) -> None:
        for name in _RESERVED_VARIABLES:
            if name in variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs: {name!r} cannot be set", param="chat_template_kwargs"
                )
        others = dict(variables)
        tools = others.pop("tools", None)
        template = others.pop("chat_template", None)
        if template is not None and not isinstance(template, str):
            kind = f"a {type(template).__name__}"
            raise _invalid_input(
                "chat_template", kind, "the name or the source of one", "chat_template"
            )
        self.chat_template: str | None = template
        copier = _JsonCopier()
        chat = _check_messages(messages, copier, arguments_as_text)
        self.values = {
            "add_generation_prompt": True,
            **copier.copy_value(others, "chat_template_kwargs", "chat_template_kwargs"),
            "messages": chat,
            "tools": _check_tools(tools, copier),
            "documents": None,
        }
        self.texts = copier.texts

    @property
    def num_characters(self) -> int:
        """Number of characters of all strings. A rendered prompt may have more, or fewer."""
        return sum(map(len, self.texts)) + len(self.chat_template or "")

    def with_changed_strings(
        self, change: Callable[[str], str], unchanged: Collection[str] = ()
    ) -> dict[str, Any]:
        """Copy of ``values`` with ``change`` applied to every string.

        Args:
            unchanged: names of variables that are not changed.
        """
        return {
            name: value if name in unchanged else _change_strings(value, change)
            for name, value in self.values.items()
        }


def plain_values(value: Any, where: str, param: str) -> Any:
    """Copy of ``value`` in JSON types.

    Args:
        where: place of the value, for the error message.
        param: parameter of the caller, for the error.

    Raises:
        InvalidRequestError: for a type without a JSON equivalent, for more than 100,000 values, or
            for nesting deeper than 100 levels.
    """
    return _JsonCopier().copy_value(value, where, param)


def _change_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            _change_strings(key, change): _change_strings(item, change)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_change_strings(item, change) for item in value)
    return value


class _JsonCopier:
    """Copier of values to JSON types, which also collects their strings."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._values_left = _MAX_VALUES

    def copy_value(self, value: Any, where: str, param: str) -> Any:
        try:
            return self._copy(value, where, 0)
        except _NotJsonError as error:
            raise InvalidRequestError(f"{error}, expected JSON types", param=param) from None
        # Methods of the application's own types may raise errors of any class.
        except Exception as error:
            raise InvalidRequestError(
                f"{where}: cannot be read ({explain(error)})", param=param
            ) from error

    def _copy(self, value: Any, where: str, depth: int) -> Any:
        self._values_left -= 1
        if depth > _MAX_DEPTH:
            raise _NotJsonError(f"{where:.80}: nested more than {_MAX_DEPTH} levels deep")
        if self._values_left < 0:
            raise _NotJsonError(f"{where:.80}: beyond {_MAX_VALUES} values")
        kind = type(value)
        if kind is str:
            self.texts.append(value)
            return value
        if value is None or kind is bool or kind is int or kind is float:
            return value
        if kind is dict or isinstance(value, Mapping):
            copied = {}
            for key, item in value.items():
                # The path is only for errors, and strings raise none: most items are strings.
                at = where if type(item) is str else f"{where}.{key!s:.40}"
                copied[self._copy(key, where, depth)] = self._copy(item, at, depth + 1)
            return copied
        if isinstance(value, (list, tuple)):
            items = [self._copy(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, str):
            return self._copy(str.__str__(value), where, depth)
        if isinstance(value, (int, float)):
            return int(value) if isinstance(value, int) else float(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return self._copy(fields, where, depth)
        if hasattr(value, "model_dump") and not isinstance(value, type):
            return self._copy(value.model_dump(), where, depth + 1)
        raise _NotJsonError(f"{where}: a {type(value).__name__}")


class _NotJsonError(Exception):
    """A value without a JSON equivalent, or beyond a limit."""


def _check_messages(messages: Any, copier: _JsonCopier, as_text: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)):
        accepted = "a list of at least one message; a prompt is for stream() or generate()"
        raise _invalid_input("messages", f"a {type(messages).__name__}", accepted)
    if not messages:
        raise _invalid_input("messages", "empty", "a list of at least one message")
    chat = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        plain = copier.copy_value(message, where, "messages")
        if not isinstance(plain, dict):
            raise _invalid_input(where, f"a {type(message).__name__}", "a dict with a role")
        # Clients send null for an absent field, but templates test only whether it is present.
        plain = {key: value for key, value in plain.items() if value is not None}
        role = plain.get("role")
        if not isinstance(role, str):
            raise _invalid_input(f"{where}.role", describe(role), "a string, as 'user'")
        if "content" in plain:
            plain["content"] = _join_content(plain["content"], f"{where}.content")
        for call in plain.get("tool_calls") or ():
            _convert_arguments(call, copier, as_text, f"{where}.tool_calls")
        chat.append(_with_reasoning(plain))
    return chat


def _join_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _invalid_input(where, describe(content), "a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            raise _invalid_input(
                f"{where}[{i}]",
                f"a part of type {describe(kind)}",
                "{'type': 'text', 'text': …}: the engine computes text, and takes no images, audio "
                "or video",
            )
        text = part.get("text") if isinstance(part, dict) and kind == "text" else part
        if not isinstance(text, str):
            raise _invalid_input(f"{where}[{i}]", describe(part), "{'type': 'text', 'text': …}")
        texts.append(text)
    return "\n".join(texts)


def _convert_arguments(call: Any, copier: _JsonCopier, as_text: bool, where: str) -> None:
    """Convert a call's arguments in place: to JSON text with ``as_text``, else to a dict. Invalid
    JSON stays text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return
    arguments = function.get("arguments")
    if as_text and isinstance(arguments, dict):
        function["arguments"] = copier.copy_value(
            json.dumps(arguments, ensure_ascii=False), where, "messages"
        )
    elif not as_text and isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return
        if isinstance(parsed, dict):
            function["arguments"] = copier.copy_value(parsed, where, "messages")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy of ``message`` with its reasoning, if any, in the fields that templates read:
    ``reasoning_content`` and ``thinking``."""
    for name in _REASONING_FIELDS:
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _check_tools(tools: Any, copier: _JsonCopier) -> list[Any] | None:
    if tools is None:
        return None
    plain = copier.copy_value(tools, "tools", "tools")
    if not isinstance(plain, (list, tuple)) or not all(isinstance(t, dict) for t in plain):
        raise _invalid_input("tools", describe(plain), "a list of JSON schemas (dicts)", "tools")
    return list(plain)


def _invalid_input(
    where: str, value: str, accepted: str, param: str = "messages"
) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: is {value:.200}, expected {accepted}", param=param)
