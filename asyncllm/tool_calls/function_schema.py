"""function_schema: converts Python functions and Pydantic models to OpenAI tools.

The schemas equal those of ``transformers.utils.get_json_schema``. This module does not use that
function: its import blocks the caller's event loop for a second, and it refuses a docstring that
leaves out an argument.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.structured.python_types import typed_dict_fields
from asyncllm.validation import describe_error

_SCALAR_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_SECTION_HEADING_PATTERN = re.compile(
    r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$"
)
_GOOGLE_ARGUMENT_PATTERN = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SPHINX_ARGUMENT_PATTERN = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
_MAX_TYPE_DEPTH = 32


def is_pydantic_model(value: Any) -> bool:
    return isinstance(value, type) and hasattr(value, "model_json_schema")


def function_schema(tool: Any, location: str = "tools") -> dict[str, Any]:
    """Convert a function, or a Pydantic model of its arguments, to an OpenAI tool.

    A function's name, type hints and docstring become the tool's name, parameters and descriptions.
    The docstring may describe arguments in Google's or Sphinx's style. Supported type hints:

    - ``str``, ``int``, ``float``, ``bool``, ``None`` and ``Any``;
    - lists, tuples, sets and dicts of supported types, and unions of them;
    - ``Literal``, enums, and ``Annotated`` with a description;
    - TypedDicts, dataclasses and Pydantic models.

    Args:
        location: place of the tool, for the error message.

    Raises:
        InvalidRequestError: for a parameter that has no type hint or an unsupported one, or that
            cannot be passed by name.
    """
    try:
        if is_pydantic_model(tool):
            parameters = _pydantic_schema(tool)
            description = parameters.pop("description", "")
            return _make_tool(tool.__name__, description, parameters)
        return _function_to_tool(tool)
    except InvalidRequestError:
        raise
    except _UnsupportedTypeError as error:
        raise InvalidRequestError(f"{location}: {error}", param="tools") from None
    # Evaluating the application's annotations and models may raise errors of any class.
    except Exception as error:
        name = getattr(tool, "__name__", "?")
        raise InvalidRequestError(
            f"{location}: the types of {name!r} cannot be read ({describe_error(error)})",
            param="tools",
        ) from error


def _pydantic_schema(model_class: Any) -> dict[str, Any]:
    """Schema of a Pydantic model, with its properties at the root.

    Pydantic's schema of a recursive model has only a reference at the root. This function replaces
    the reference by its target.
    """
    schema = model_class.model_json_schema()
    reference = schema.pop("$ref", None)
    if reference is not None:
        schema |= schema["$defs"][reference.removeprefix("#/$defs/")]
    schema.pop("title", None)
    return schema


class _UnsupportedTypeError(Exception):
    """Error for a type or a parameter without a JSON schema."""


def _make_tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    if not description:
        del function["description"]
    return {"type": "function", "function": function}


def _function_to_tool(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", "")
    description, arguments = _read_docstring(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    definitions: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        location = f"{name}({parameter.name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _UnsupportedTypeError(
                f"{location} is passed by position or collects others, expected a name"
            )
        if parameter.name not in hints:
            raise _UnsupportedTypeError(f"{location} has no type hint, expected one")
        schema = _schema_of_type(hints[parameter.name], location, definitions)
        if parameter.name in arguments:
            schema = {**schema, "description": arguments[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, (str, int, float, bool)):
            schema = {**schema, "default": parameter.default}
        properties[parameter.name] = schema
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    if definitions:
        parameters["$defs"] = definitions
    return _make_tool(name, description, parameters)


def _schema_of_type(
    type_hint: Any, location: str, definitions: dict[str, Any], depth: int = 0
) -> dict[str, Any]:
    if depth > _MAX_TYPE_DEPTH:
        raise _UnsupportedTypeError(
            f"{location} has a type nested more than {_MAX_TYPE_DEPTH} levels deep"
        )

    def schema_of(inner_type: Any) -> dict[str, Any]:
        return _schema_of_type(inner_type, location, definitions, depth + 1)

    if type_hint is Any:
        return {}
    if type_hint is None or (isinstance(type_hint, type) and type_hint in _SCALAR_TYPES):
        return {"type": _SCALAR_TYPES[type(None) if type_hint is None else type_hint]}
    origin, arguments = typing.get_origin(type_hint), typing.get_args(type_hint)
    if origin is typing.Annotated:
        texts = [extra for extra in arguments[1:] if isinstance(extra, str)]
        return schema_of(arguments[0]) | ({"description": texts[0]} if texts else {})
    if origin is typing.Literal:
        return _enum_schema(arguments, location)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(argument) for argument in arguments]}
    container = origin or type_hint
    if not isinstance(container, type):
        raise _UnsupportedTypeError(f"{location} is of {type_hint!r}, which has no JSON schema")
    if issubclass(container, enum.Enum):
        return _enum_schema([member.value for member in container], location)
    if is_pydantic_model(container):
        return _nested_pydantic_schema(container, location, definitions)
    if typing.is_typeddict(container) or dataclasses.is_dataclass(container):
        return _fields_schema(container, schema_of)
    if issubclass(container, tuple) and arguments and arguments[-1] is not Ellipsis:
        items = [schema_of(argument) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    if issubclass(container, Mapping):
        values = schema_of(arguments[1]) if arguments else {}
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    if issubclass(container, (Sequence, Set)):
        array: dict[str, Any] = {"type": "array"}
        if arguments:
            array["items"] = schema_of(arguments[0])
        return array | ({"uniqueItems": True} if issubclass(container, Set) else {})
    raise _UnsupportedTypeError(f"{location} is of {type_hint!r}, which has no JSON schema")


def _enum_schema(values: Sequence[Any], location: str) -> dict[str, Any]:
    kinds = {type(value) for value in values}
    if not kinds <= _SCALAR_TYPES.keys():
        raise _UnsupportedTypeError(f"{location} has {list(values)!r:.80}, expected values of JSON")
    schema: dict[str, Any] = {"enum": list(values)}
    return {"type": _SCALAR_TYPES[kinds.pop()], **schema} if len(kinds) == 1 else schema


def _nested_pydantic_schema(
    model_class: Any, location: str, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Schema of a Pydantic model within a tool's schema.

    The model's definitions move to ``definitions`` at the root, where its references point.
    """
    schema = model_class.model_json_schema()
    for name, definition in schema.pop("$defs", {}).items():
        if definitions.setdefault(name, definition) != definition:
            raise _UnsupportedTypeError(
                f"{location} has a type {name!r} beside another of that name"
            )
    return schema


def _fields_schema(fields_class: Any, schema_of: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    if typing.is_typeddict(fields_class):
        fields = typed_dict_fields(fields_class)
    else:
        hints = typing.get_type_hints(fields_class, include_extras=True)
        missing = dataclasses.MISSING
        fields = {
            field.name: (hints[field.name], field.default is field.default_factory is missing)
            for field in dataclasses.fields(fields_class)
            if field.init
        }
    properties = {name: schema_of(hint) for name, (hint, _) in fields.items()}
    required = [name for name, (_, is_required) in fields.items() if is_required]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | ({"required": required} if required else {})


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the description before its first section, and the descriptions of the
    arguments by name."""
    description: list[str] = []
    arguments: dict[str, list[str]] = {}
    section = current = indent = ""
    for line in text.splitlines():
        heading = _SECTION_HEADING_PATTERN.match(line)
        sphinx = _SPHINX_ARGUMENT_PATTERN.match(line.strip())
        argument = _GOOGLE_ARGUMENT_PATTERN.match(line)
        if heading:
            section, current, indent = heading[1], "", ""
        elif sphinx:
            section, current = "Args", sphinx[1]
            arguments[current] = [sphinx[2]]
        elif line.strip().startswith(":") and not section:
            section = "Returns"
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            if argument and (not indent or len(argument[1]) <= len(indent)):
                indent, current = argument[1], argument[2]
                arguments[current] = [argument[3]]
            elif current:
                arguments[current].append(line.strip())
    described = {name: " ".join(filter(None, lines)) for name, lines in arguments.items()}
    return "\n".join(description).strip(), {k: v for k, v in described.items() if v}
