"""parse_response_format: converts OpenAI's ``response_format`` to ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError
from asyncllm.structured.python_types import is_schema_type
from asyncllm.structured.spec import (
    MAX_SPEC_CHARACTERS,
    StructuredOutputs,
    parse_structured_outputs,
)

_PARAM_NAME = "response_format"
_ACCEPTED_RESPONSE_FORMATS = (
    '{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": …, '
    '"schema": {…}}}, a Pydantic model, a dataclass, a TypedDict or None'
)


def parse_response_format(value: Any) -> StructuredOutputs | None:
    """Convert a ``response_format`` to ``structured_outputs``; None for plain text.

    A schema is enforced even if ``strict`` is false.

    Raises:
        InvalidRequestError: for an unknown format or an invalid schema.
    """
    if value is None:
        return None
    try:
        spec = parse_structured_outputs(_structured_outputs(value))
    except InvalidRequestError as error:
        error.param = _PARAM_NAME
        raise
    return None if spec is None else replace(spec, param=_PARAM_NAME)


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    if is_schema_type(value):
        return {"json": value}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if check.equal_json(kind, "json_schema"):
        return {"json": _check_schema(value)}
    if check.equal_json(kind, "structural_tag"):
        return {"structural_tag": value}
    by_type = {"text": None, "json_object": {"json_object": True}}
    if not isinstance(kind, str) or kind not in by_type or len(value) != 1:
        raise check.value_error(_PARAM_NAME, value, _ACCEPTED_RESPONSE_FORMATS)
    return by_type[kind]


def _check_schema(value: Mapping[str, Any]) -> Mapping[str, Any]:
    check.refuse_unknown_names(f"field of {_PARAM_NAME}", value, ("type", "json_schema"))
    field: Any = value.get("json_schema")
    if not isinstance(field, Mapping) or not isinstance(field.get("schema"), Mapping):
        raise check.value_error(
            f"{_PARAM_NAME}.json_schema", field, 'a dict with a "name" and a "schema"'
        )
    fields = ("name", "schema", "strict", "description")
    check.refuse_unknown_names(f"field of {_PARAM_NAME}.json_schema", field, fields)
    name = f"{_PARAM_NAME}.json_schema.name"
    check.string(name, field.get("name"), max_length=MAX_SPEC_CHARACTERS, optional=True)
    check.boolean(f"{_PARAM_NAME}.json_schema.strict", field.get("strict"), optional=True)
    return field["schema"]
