"""TemplateInput: checked copy of the input of a chat template."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.json_copier import JsonCopier, NotJsonError, convert_scalar_subclass
from asyncllm.validation import argument_error, describe, describe_error

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED_VARIABLES = ("messages", "continue_final_message", "tokenize", "return_dict", "documents")
_MAX_NESTING_DEPTH = 100
_MAX_VALUES, _MAX_CONTAINERS = 2**16, 2**14
"""Maximum numbers of values, and of dicts and lists, of a conversation. A value takes a quarter of
a microsecond to copy, and a dict or list one of garbage collection, on the caller's thread. 2,000
messages with calls, and 256 tools of 10 properties, have 52,000 and 9,600."""

_MAX_PARSED_CHARACTERS = 2**20
"""Maximum number of characters of the JSON texts in a conversation's tool calls, plus
_CHARACTERS_PER_CALL for each text. They are parsed on the caller's thread."""

_CHARACTERS_PER_CALL = 256
"""Number of characters added for each parsed text. Starting a parse takes as long as parsing this
many characters."""

_MAX_ARGUMENT_VALUES = 2**14
"""Maximum number of values in the arguments of a conversation's tool calls: of dicts that are
written as JSON text, or of texts that are parsed, whose keys do not count. They are written and
parsed on the caller's thread: a float takes a microsecond."""

_MAX_WRITTEN_CHARACTERS = 2**19
"""Maximum number of characters of the dicts in a conversation's tool calls that are written."""

_ARGUMENTS_LOCATION = "messages: arguments of all tool calls"
"""Beginning of an error message about the arguments of all tool calls together."""

MAX_CHARACTERS = 2**24
"""Maximum number of characters of all strings of a conversation, as many as a prompt may have. A
string counts each time it occurs, because all are joined to be searched for special tokens."""

_JSON_STRING_PATTERN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


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
        tools_copier: copier that made ``tools``, which are then not copied again. Its limits hold
            for tools and messages together.

    Raises:
        InvalidRequestError: ``param`` is "messages", "tools", "chat_template" or
            "chat_template_kwargs"; the message names the invalid value and its place.

    Attributes:
        chat_template: the variable ``chat_template``, or None.
        values: all other variables of the template.
        texts: every string in ``values``.
        num_characters: number of characters of all strings. A rendered prompt may have more, or
            fewer.
        num_bytes: estimated memory of ``values``, in bytes.
    """

    __slots__ = ("chat_template", "num_bytes", "num_characters", "texts", "values")

    def __init__(
        self,
        messages: Any,
        variables: Mapping[str, Any],
        *,
        arguments_as_text: bool = False,
        tools_copier: TemplateInputCopier | None = None,
    ) -> None:
        for name in _RESERVED_VARIABLES:
            if name in variables:
                raise argument_error("chat_template_kwargs", f"{name!r} cannot be set")
        others = dict(variables)
        tools = others.pop("tools", None)
        template = others.pop("chat_template", None)
        if template is not None and not isinstance(template, str):
            kind = f"a {type(template).__name__}"
            raise _invalid_input_error(
                "chat_template", kind, "the name or the source of one", "chat_template"
            )
        self.chat_template: str | None = template
        copier = tools_copier or TemplateInputCopier()
        chat = _copied_messages(messages, copier, arguments_as_text)
        if others:
            others = copier.copy_value(others, "chat_template_kwargs", "chat_template_kwargs")
        self.values = {
            "add_generation_prompt": True,
            **others,
            "messages": chat,
            "tools": _check_tools(tools, copier) if tools_copier is None else tools,
            "documents": None,
        }
        self.texts = copier.texts
        self.num_characters = sum(map(len, self.texts)) + len(template or "")
        self.num_bytes = sys.getsizeof(template) + copier.num_bytes

    def with_changed_strings(
        self, change_string: Callable[[str], str], unchanged_names: Collection[str] = ()
    ) -> dict[str, Any]:
        """Copy of ``values`` with ``change_string`` applied to every string.

        Args:
            unchanged_names: names of variables that are not changed.
        """
        # A text that occurs twice, as reasoning does, stays one object.
        change_string = cache(change_string)
        return {
            name: value if name in unchanged_names else _change_strings(value, change_string)
            for name, value in self.values.items()
        }


def _change_strings(value: Any, change_string: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change_string(value)
    if isinstance(value, dict):
        return {
            _change_strings(key, change_string): _change_strings(item, change_string)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_change_strings(item, change_string) for item in value)
    return value


class TemplateInputCopier:
    """Copier of the arguments of one chat template call; it raises InvalidRequestError."""

    def __init__(self) -> None:
        self._copier = JsonCopier(
            _MAX_VALUES,
            MAX_CHARACTERS,
            _MAX_NESTING_DEPTH,
            _convert_to_json_type,
            max_containers=_MAX_CONTAINERS,
        )
        self.texts = self._copier.texts

    @property
    def num_bytes(self) -> int:
        return self._copier.num_bytes

    def copy_value(self, value: Any, location: str, param: str) -> Any:
        return self.copy_or_raise(lambda: self._copier.copy(value), location, param)

    def copy_items(
        self, values: Collection[Any], location: str, param: str, *, are_parsed: bool = False
    ) -> list[Any]:
        return self.copy_or_raise(
            lambda: self._copier.copy_items(values, are_parsed=are_parsed), location, param
        )

    def copy_or_raise(self, copy_function: Callable[[], Any], location: str, param: str) -> Any:
        try:
            return copy_function()
        except NotJsonError as error:
            cause, message = error.__cause__, error.message_for(location)
            message += ", expected JSON types" if cause is None else f" ({describe_error(cause)})"
            raise InvalidRequestError(message, param=param) from cause
        except Exception as error:
            raise InvalidRequestError(
                f"{location}: cannot be read ({describe_error(error)})", param=param
            ) from error


def _convert_to_json_type(value: Any) -> Any:
    """Convert a dataclass, a pydantic model or an object of a subclass of a JSON type."""
    if isinstance(value, (type, str, int, float)):
        return convert_scalar_subclass(value)
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return value.model_dump() if hasattr(value, "model_dump") else convert_scalar_subclass(value)


def _copied_messages(
    messages: Any, copier: TemplateInputCopier, arguments_as_text: bool
) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)):
        accepted = "a list of at least one message; a prompt is for stream() or generate()"
        raise _invalid_input_error("messages", f"a {type(messages).__name__}", accepted)
    copied = copier.copy_items(messages, "messages", "messages")
    if not copied:
        raise _invalid_input_error("messages", "empty", "a list of at least one message")
    chat: list[dict[str, Any]] = []
    functions: list[tuple[str, dict[str, Any]]] = []
    for i, plain in enumerate(copied):
        # Most messages have a role, a text and no other field, and need no conversion.
        if (
            type(plain) is dict
            and len(plain) == 2
            and type(plain.get("role")) is type(plain.get("content")) is str
        ):
            chat.append(plain)
            continue
        if not isinstance(plain, dict):
            kind = f"a {type(plain).__name__}"
            raise _invalid_input_error(f"messages[{i}]", kind, "a dict with a role")
        # Clients send null for an absent field, but templates test only for presence.
        if None in plain.values():
            plain = {key: value for key, value in plain.items() if value is not None}
        role = plain.get("role")
        if not isinstance(role, str):
            raise _invalid_input_error(f"messages[{i}].role", describe(role), "a string, as 'user'")
        if not isinstance(plain.get("content", ""), str):
            plain["content"] = _join_content(plain["content"], f"messages[{i}].content")
        if calls := plain.get("tool_calls"):
            location = f"messages[{i}].tool_calls"
            if not isinstance(calls, (list, tuple)):
                raise _invalid_input_error(location, describe(calls), "a list of tool calls")
            plain["tool_calls"] = list(calls)
            for call in calls:
                function = call.get("function", call) if isinstance(call, dict) else None
                if isinstance(function, dict):
                    functions.append((location, function))
        chat.append(_with_reasoning(plain))
    if functions:
        convert_arguments = _write_arguments if arguments_as_text else _parse_arguments
        convert_arguments(functions, copier)
    return chat


def _join_content(content: Any, location: str) -> str:
    if not isinstance(content, (list, tuple)):
        raise _invalid_input_error(location, describe(content), "a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part
        if isinstance(part, dict):
            kind, text = part.get("type"), part.get("text")
            if isinstance(kind, str) and kind != "text":
                raise _invalid_input_error(
                    f"{location}[{i}]",
                    f"a part of type {describe(kind)}",
                    "{'type': 'text', 'text': …}: the engine computes text, and takes no images, "
                    "audio or video",
                )
            if kind != "text":
                text = None
        if not isinstance(text, str):
            raise _invalid_input_error(
                f"{location}[{i}]", describe(part), "{'type': 'text', 'text': …}"
            )
        texts.append(text)
    return "\n".join(texts)


def _write_arguments(
    functions: list[tuple[str, dict[str, Any]]], copier: TemplateInputCopier
) -> None:
    """Write ``arguments`` that are a dict as JSON text.

    Args:
        functions: functions of copied tool calls, each after its location.
    """
    functions = [one for one in functions if isinstance(one[1].get("arguments"), dict)]
    # Check the limits by a copy that is not kept, because ``json.dumps`` has none.
    counter = JsonCopier(_MAX_ARGUMENT_VALUES, _MAX_WRITTEN_CHARACTERS, _MAX_NESTING_DEPTH)
    all_arguments = [function["arguments"] for _, function in functions]
    copier.copy_or_raise(lambda: counter.copy_items(all_arguments), _ARGUMENTS_LOCATION, "messages")
    texts: list[str] = []
    for location, function in functions:
        # JSON has no key that is a tuple, and Python's writes no integer of 4,301 digits.
        write = partial(json.dumps, function["arguments"], ensure_ascii=False)
        texts.append(copier.copy_or_raise(write, location, "messages"))
    texts = copier.copy_items(texts, _ARGUMENTS_LOCATION, "messages")
    for (_, function), text in zip(functions, texts, strict=True):
        function["arguments"] = text


def _parse_arguments(
    functions: list[tuple[str, dict[str, Any]]], copier: TemplateInputCopier
) -> None:
    """Parse ``arguments`` that are the JSON text of a dict.

    Args:
        functions: functions of copied tool calls, each after its location.
    """
    num_characters_left, with_json = _MAX_PARSED_CHARACTERS, []
    for location, function in functions:
        arguments = function.get("arguments")
        if not isinstance(arguments, str) or arguments[:1] not in "{ \t\r\n":
            continue
        num_characters_left -= _CHARACTERS_PER_CALL + len(arguments)
        if num_characters_left < 0:
            raise InvalidRequestError(
                f"{location}: beyond {_MAX_PARSED_CHARACTERS} characters of arguments, where "
                f"each call counts {_CHARACTERS_PER_CALL} more",
                param="messages",
            )
        if arguments.lstrip().startswith("{"):
            with_json.append(function)
    _check_num_values([one["arguments"] for one in with_json])
    parsed = [(one, _parse_json(one["arguments"])) for one in with_json]
    parsed = [(one, value) for one, value in parsed if isinstance(value, dict)]
    values = [value for _, value in parsed]
    copier.copy_items(values, _ARGUMENTS_LOCATION, "messages", are_parsed=True)
    for function, value in parsed:
        function["arguments"] = value


def _parse_json(text: str) -> Any:
    """Parse JSON; returns None for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _check_num_values(texts: list[str]) -> None:
    """Refuse JSON texts of more than _MAX_ARGUMENT_VALUES values before they are parsed."""
    if _num_separators(texts) > _MAX_ARGUMENT_VALUES:
        texts = [_JSON_STRING_PATTERN.sub("", text) for text in texts]
        if _num_separators(texts) > _MAX_ARGUMENT_VALUES:
            raise InvalidRequestError(
                f"{_ARGUMENTS_LOCATION}: beyond {_MAX_ARGUMENT_VALUES} values, expected JSON types",
                param="messages",
            )


def _num_separators(texts: list[str]) -> int:
    return sum(map("".join(texts).count, ",[{"))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy of ``message`` with its reasoning, if any, in the fields that templates read:
    ``reasoning_content`` and ``thinking``."""
    for name in _REASONING_FIELDS:
        if message.get(name) is not None:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _check_tools(tools: Any, copier: TemplateInputCopier) -> list[Any] | None:
    if tools is None:
        return None
    plain = copier.copy_value(tools, "tools", "tools")
    if not isinstance(plain, (list, tuple)) or not all(isinstance(t, dict) for t in plain):
        raise _invalid_input_error(
            "tools", describe(plain), "a list of JSON schemas (dicts)", "tools"
        )
    return list(plain)


def _invalid_input_error(
    location: str, value: str, accepted: str, param: str = "messages"
) -> InvalidRequestError:
    return InvalidRequestError(f"{location}: is {value:.200}, expected {accepted}", param=param)
