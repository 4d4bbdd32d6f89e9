"""xml_parameters: reads the arguments of a call written as ``<parameter=NAME>value</parameter>``.

The results equal those of transformers' parser with PARAMETER_PATTERN. That parser takes quadratic
time for a text with many unclosed elements; this module passes over a text once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

PARAMETER_PATTERN = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
"""Pattern of one parameter. Calls of a response template with this pattern are parsed here."""

MAX_TYPED_NAME_CHARACTERS = 1_048_576
"""Maximum total length of the parameter names that are kept for one answer. Arguments of other
parameters stay text."""

_OPENING, _CLOSING = "<parameter=", "</parameter>"
_NAME_END_PATTERN = re.compile(r"[>\n]")


def parse_parameters(text: str) -> dict[str, str]:
    """Read the parameters in a text; returns their values by name."""
    values: dict[str, str] = {}
    position = 0
    while (opening := text.find(_OPENING, position)) >= 0:
        begin = opening + len(_OPENING)
        name_end = _NAME_END_PATTERN.search(text, begin)
        if name_end is None:
            break
        position = name_end.end()
        if name_end[0] == "\n" or name_end.start() == begin:
            continue
        closing = text.find(_CLOSING, position)
        if closing < 0:
            break
        value = text[position:closing].removeprefix("\n").removesuffix("\n")
        values[text[begin : name_end.start()]] = value
        position = closing + len(_CLOSING)
    return values


def keep_parameter_types(
    schemas: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Copy only the parameter types of tools' schemas."""
    num_characters_left = MAX_TYPED_NAME_CHARACTERS
    kept: dict[str, dict[str, Any]] = {}
    lists: dict[tuple[str, ...], dict[str, Any]] = {}
    for tool_name, schema in schemas.items():
        properties: dict[str, Any] = {}
        for name, property_schema in schema.get("properties", {}).items():
            types = tuple(_types(property_schema))
            if types and len(name) <= num_characters_left:
                num_characters_left -= len(name)
                properties[name] = lists.setdefault(types, {"type": list(types)})
        kept[tool_name] = {"properties": properties}
    return kept


def convert_arguments(values: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each text to a type in the tool's schema; a text that fits none stays text."""
    properties = schema.get("properties", {})
    return {
        name: _convert(value, _types(properties[name])) if name in properties else value
        for name, value in values.items()
    }


def _types(schema: Any) -> list[str]:
    """Types to which an argument may be converted, in the order in which they are tried."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    types = list(declared) if isinstance(declared, list) else [declared]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, (list, tuple)) else ():
            types += _types(choice)
    if schema.get("nullable"):
        types.append("null")
    names = dict.fromkeys(name for name in types if isinstance(name, str))
    return [name for name in names if name in _CONVERTERS]


def _to_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number.is_integer():
            return int(number)
        raise


def _to_number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("not a number of JSON")
    return int(number) if number.is_integer() and "." not in text else number


def _to_boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _to_null(text: str) -> None:
    return {"null": None, "None": None}[text.strip()]


def _to_json_of(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(f"not of type {kind.__name__}")
        return value

    return convert


_CONVERTERS: Mapping[str, Callable[[str], Any]] = {
    "integer": _to_integer,
    "number": _to_number,
    "boolean": _to_boolean,
    "null": _to_null,
    "object": _to_json_of(dict),
    "array": _to_json_of(list),
}


def _convert(text: str, types: list[str]) -> Any:
    """Convert ``text`` to the first type that accepts it; else return it unchanged."""
    for name in types:
        try:
            return _CONVERTERS[name](text)
        except (ValueError, KeyError):
            continue
    return text
