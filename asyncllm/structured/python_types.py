"""Python types as output formats: converts types to JSON schemas, and JSON text to typed values.

A type is a Pydantic model, a dataclass or a TypedDict.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import typing
from typing import Any

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError
from asyncllm.structured.json_tree import walk_dicts


def is_schema_type(value: Any) -> bool:
    """Whether ``value`` is the class of a Pydantic model, a dataclass or a TypedDict."""
    return isinstance(value, type) and (
        dataclasses.is_dataclass(value)
        or typing.is_typeddict(value)
        or callable(getattr(value, "__pydantic_validator__", None))
        or hasattr(value, "__pydantic_core_schema__")
        # typing.is_typeddict does not know the TypedDict of typing_extensions on older Pythons.
        or (issubclass(value, dict) and hasattr(value, "__required_keys__"))
    )


def schema_of_type(python_type: type, param_name: str) -> dict[str, Any]:
    """Make the JSON schema of a type.

    The schema refuses additional properties, which the type would silently drop, unless the type
    allows them.

    Args:
        param_name: name of the caller's parameter, for errors.

    Raises:
        InvalidRequestError: for a type without a JSON schema, or if Pydantic is not installed.
    """
    adapter = _make_adapter(python_type, param_name)
    try:
        schema = adapter.json_schema()
    except Exception as error:  # The type's own hooks may raise errors of any class.
        raise check.value_error(
            param_name, python_type, f"a type that JSON can express ({error})"
        ) from error
    return forbid_additional_properties(schema)


def forbid_additional_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Set ``additionalProperties`` to False, in place, in objects with ``properties``.

    Objects that already set ``additionalProperties`` are not changed.
    """
    for item in walk_dicts(schema):
        if item.get("type") == "object" and isinstance(item.get("properties"), dict):
            item.setdefault("additionalProperties", False)
    return schema


def parse_json_as(python_type: Any, text: str, param_name: str) -> Any:
    """Parse JSON text to a value of a type.

    Args:
        param_name: name of the caller's parameter, for errors.

    Raises:
        InvalidRequestError: for a type that Pydantic does not support, or if Pydantic is not
            installed.
        ValueError: if ``text`` does not fit the type.
    """
    adapter = _make_adapter(python_type, param_name)
    try:
        return adapter.validate_json(text)
    except (ValueError, RecursionError):
        raise
    # Pydantic resolves names of types only here, and a type's own validators may raise errors of
    # any class.
    except Exception as error:
        raise check.value_error(
            param_name, python_type, f"a type that Pydantic knows ({error})"
        ) from error


def typed_dict_fields(typed_dict: Any) -> dict[str, tuple[Any, bool]]:
    """Map each field name of a TypedDict to the type hint and to whether the field is required."""
    fields: dict[str, tuple[Any, bool]] = {}
    for name, hint in typing.get_type_hints(typed_dict, include_extras=True).items():
        is_required = name in typed_dict.__required_keys__
        if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            # With string annotations, ``__required_keys__`` is wrong.
            is_required = typing.get_origin(hint) is typing.Required
            (hint,) = typing.get_args(hint)
        fields[name] = hint, is_required
    return fields


def _make_adapter(python_type: Any, param_name: str) -> Any:
    try:
        pydantic = importlib.import_module("pydantic")
    except ImportError:
        raise InvalidRequestError(
            f"{param_name}: a Python type needs pydantic, expected "
            "`pip install asyncllm[structured]`",
            param=param_name.partition(".")[0],
        ) from None
    try:
        return pydantic.TypeAdapter(_replace_typing_typed_dicts(python_type))
    except Exception as error:
        raise check.value_error(
            param_name, python_type, f"a type that Pydantic knows ({error})"
        ) from error


def _replace_typing_typed_dicts(python_type: Any) -> Any:
    """Replace TypedDicts of ``typing`` by TypedDicts of ``typing_extensions``.

    Before Python 3.12, Pydantic accepts only the latter.
    """
    if sys.version_info >= (3, 12):
        return python_type
    if typing.is_typeddict(python_type) and type(python_type).__module__ == "typing":
        extensions = importlib.import_module("typing_extensions")
        fields = {}
        for name, (hint, is_required) in typed_dict_fields(python_type).items():
            marker = extensions.Required if is_required else extensions.NotRequired
            fields[name] = marker[_replace_typing_typed_dicts(hint)]
        return extensions.TypedDict(python_type.__name__, fields)
    origin, args = typing.get_origin(python_type), typing.get_args(python_type)
    if origin is None or origin is typing.Literal or not args:
        return python_type
    changed = tuple(map(_replace_typing_typed_dicts, args))
    if origin in (typing.Required, typing.NotRequired):
        return changed[0]
    if changed == args:
        return python_type
    if origin is typing.Annotated:
        return typing.Annotated[(changed[0], *python_type.__metadata__)]
    if origin in (types.UnionType, typing.Union):
        return typing.Union[changed]  # noqa: UP007  # ``|`` cannot join a tuple of types
    return origin[changed]
