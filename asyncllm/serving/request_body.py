"""RequestBody: parses and checks a request's body, and describes its fields.

pydantic both checks types and writes the OpenAPI schema, so that the schema matches the checks. The
engine's own validators check the values, as for every caller.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import from_json

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError
from asyncllm.foreign_names import OUR_NAMES_BY_FOREIGN_NAME
from asyncllm.serving.protocol_error import ProtocolError

logger = logging.getLogger(__name__)

MAX_JSON_SEPARATORS = 2**18
"""Maximum number of commas, braces and brackets in a body. Parsing takes about 0.2 microseconds per
value and holds the GIL, and the search for infinities takes as long; the length of texts hardly
matters."""

UNSUPPORTED_ITEM_ERROR_TYPE = "unsupported_type"
"""pydantic's error type for an item whose ``type`` matches no alternative of a union."""

MAX_OBJECT_FIELDS = 64
"""Maximum number of fields of an object within a body."""

MAX_ERROR_PARAM_CHARACTERS = 200
"""Maximum number of characters of an error's ``param``."""

AcceptedValues = Mapping[str, tuple[Any, ...]]
"""Map from unsupported fields to the values that are accepted, because they have no effect."""

_ERROR_SUFFIX_BY_TAG: Mapping[int | str, str] = {"#text": " or list", "#list": " or string"}
"""Endings of error messages for a field that takes a text or a list, by the tag of the type that
pydantic tried. pydantic's message names only this type; the ending names the other one."""


def parse_json(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ProtocolError: ``invalid_json`` for invalid JSON or UTF-8, or a number beyond a float's
            range; status 413 for more than MAX_JSON_SEPARATORS.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    num_separators = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_separators > MAX_JSON_SEPARATORS:
        raise ProtocolError(
            f"body: has {num_separators} commas, brackets and braces, expected at most "
            f"{MAX_JSON_SEPARATORS}",
            code="request_too_large",
            status=413,
        )
    try:
        value = from_json(data, allow_inf_nan=False)
        if _has_infinity(value):
            raise ValueError("a number is beyond 1.8e308")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"body: expected a JSON object ({error})", code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise ProtocolError("body: expected a JSON object", code="invalid_json")
    return value


def _has_infinity(value: Any) -> bool:
    """Whether a parsed JSON value contains an infinite number. The parser returns infinity for
    1e999. Answers repeat values of a body, and JSON has no infinity."""
    level = [value]
    while level:
        types = set(map(type, level))
        if float in types:
            floats = [item for item in level if type(item) is float]
            # The sum is taken in a tenth of the search's time, and may be infinite without one.
            if not math.isfinite(sum(floats)) and (math.inf in floats or -math.inf in floats):
                return True
        inner: list[Any] = []
        if list in types:
            inner += chain.from_iterable(item for item in level if type(item) is list)
        if dict in types:
            inner += chain.from_iterable(item.values() for item in level if type(item) is dict)
        level = inner
    return False


class UnsupportedFieldPolicy:
    """Policy for fields of OpenAI's protocol that this server does not support.

    Args:
        should_ignore: whether to ignore such fields, with one line of the log for each; else they
            are refused.
    """

    def __init__(self, should_ignore: bool = False) -> None:
        self._should_ignore = should_ignore
        self._logged_names: set[str] = set()

    def refuse_or_ignore(self, name: str, value: Any, accepted: tuple[Any, ...] = ()) -> None:
        """Refuse an unsupported value of a field, or ignore it if the policy says so.

        Args:
            name: a field that this server knows but does not support.
            accepted: accepted values of the field, for the error message.

        Raises:
            ProtocolError: unless the policy is to ignore unsupported fields.
        """
        error = unsupported_error(name, value, accepted)
        if not self._should_ignore:
            raise error
        if name not in self._logged_names:
            self._logged_names.add(name)
            logger.warning("ignored, now and later: %s", error)


class RequestBody(BaseModel):
    """Fields of a request. null counts as absent. Unknown fields are refused by name, and so are
    values that this server does not support.

    Class attributes:
        ACCEPTED_VALUES: map from unsupported fields to the values that are accepted, besides null,
            because they have no effect.
        ACCEPTED_SUBFIELD_VALUES: the same for parts of supported fields, by path "field.part".
        FOREIGN_NAMES_SECTION: key of OUR_NAMES_BY_FOREIGN_NAME for this body's fields.
    """

    # pydantic also applies these settings to TypedDicts in the fields.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    ACCEPTED_VALUES: ClassVar[AcceptedValues] = {}
    ACCEPTED_SUBFIELD_VALUES: ClassVar[AcceptedValues] = {}
    FOREIGN_NAMES_SECTION: ClassVar[str] = "field"
    _unsupported_fields: UnsupportedFieldPolicy = PrivateAttr(
        default_factory=UnsupportedFieldPolicy
    )

    @classmethod
    def parse(cls, body: Mapping[str, Any], unsupported_fields: UnsupportedFieldPolicy) -> Self:
        """Check the fields of a request's body.

        Raises:
            ProtocolError, InvalidRequestError: with the field at fault in ``param``.
        """
        known_names = cls.model_fields.keys() | cls.ACCEPTED_VALUES.keys()
        fields = {}
        for name, value in body.items():
            if value is not None:
                if name not in known_names:
                    # Refuse the first unknown field here: pydantic would make an error for each
                    # unknown field.
                    raise cls._unknown_field_error(name[:MAX_ERROR_PARAM_CHARACTERS])
                fields[name] = value
        for name in cls.ACCEPTED_VALUES.keys() & fields.keys():
            value = fields.pop(name)
            if not any(check.equal_json(value, neutral) for neutral in cls.ACCEPTED_VALUES[name]):
                unsupported_fields.refuse_or_ignore(name, value, cls.ACCEPTED_VALUES[name])
        try:
            request = cls.model_validate(fields)
        except ValidationError as error:
            raise cls._to_client_error(error) from None
        for path, accepted in cls.ACCEPTED_SUBFIELD_VALUES.items():
            name, _, part = path.partition(".")
            value = (getattr(request, name) or {}).get(part)
            if value is not None and value not in accepted:
                unsupported_fields.refuse_or_ignore(path, value, accepted)
        request._unsupported_fields = unsupported_fields
        return request

    @classmethod
    def _equivalent_field(cls, param: str) -> str:
        """Find this body's name for another API's field ``param``; empty if there is none."""
        name = re.sub(r"\[\d+\]", "[]", param)
        equivalent = OUR_NAMES_BY_FOREIGN_NAME["sampling parameter"].get(name, "")
        if equivalent.partition("=")[0] in cls.model_fields:
            return equivalent
        names_at_path = OUR_NAMES_BY_FOREIGN_NAME[cls.FOREIGN_NAMES_SECTION]
        return OUR_NAMES_BY_FOREIGN_NAME["field"].get(name) or names_at_path.get(name, "")

    @classmethod
    def _unknown_field_error(cls, param: str) -> ProtocolError:
        equivalent = cls._equivalent_field(param)
        hint = f", expected {equivalent}" if equivalent else ""
        message = f"{check.describe(param)}: no such field{hint}"
        return ProtocolError(message, code="unknown_parameter", param=param)

    @classmethod
    def _to_client_error(cls, error: ValidationError) -> ProtocolError | InvalidRequestError:
        """Convert pydantic's errors to one error for the client. A field that has another
        name on this server goes first, because pydantic may report the other name as missing."""
        errors = error.errors(include_url=False, include_context=True)
        unknown = [detail for detail in errors if detail["type"] == "extra_forbidden"]
        renamed = (
            detail for detail in unknown if cls._equivalent_field(_field_path(detail["loc"]))
        )
        first = next(renamed, errors[0])
        loc = first["loc"]
        param = _field_path(loc)
        if first in unknown:
            return cls._unknown_field_error(param)
        if first["type"] == UNSUPPORTED_ITEM_ERROR_TYPE:
            accepted = tuple(first["msg"].split())
            return unsupported_error(f"{param}.type", first["input"].get("type"), accepted)
        if first["type"] == "missing":
            return InvalidRequestError(f"{param}: is missing", param=param)
        message = first["msg"].removeprefix("Value error, ").partition(" after validation")[0]
        _, separator, rest = message.partition(" should ")
        accepted = f"to {rest}".removeprefix("to be ") if separator else message
        if first["type"] in ("string_type", "list_type", "dict_type"):
            accepted += _ERROR_SUFFIX_BY_TAG.get(loc[-1], "")
        return check.value_error(param, first["input"], accepted)

    def present_values(self, names: Iterable[str]) -> dict[str, Any]:
        """Values of the named fields, without absent fields."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}

    @classmethod
    def openapi_schema(cls, ref_template: str) -> dict[str, Any]:
        """JSON schema, with its parts under ``$defs``."""
        schema = cls.model_json_schema(ref_template=ref_template)
        properties, required = schema["properties"], schema.get("required", ())
        for name, field in properties.items():
            if name not in required and {"type": "null"} not in field.get("anyOf", ()):
                properties[name] = {"anyOf": [field, {"type": "null"}]}
        for name, values in cls.ACCEPTED_VALUES.items():
            properties[name] = {"enum": [*values, None]}
        return schema


def unsupported_error(name: str, value: Any, accepted: tuple[Any, ...] = ()) -> ProtocolError:
    """Make the error for an unsupported field that would change the answer."""
    message = f"{name}={check.describe(value)} is not supported here"
    if accepted:
        message += ", expected " + " or ".join(map(check.describe, accepted))
    return ProtocolError(message, code="unsupported_parameter", param=name)


def limit_entries(limit: int, noun: str) -> BeforeValidator:
    """Make the validator that refuses an object of more than ``limit`` entries before pydantic
    reads them: pydantic would copy them, or make an error for each unknown field.

    Args:
        noun: name of the entries in the error message.
    """

    def check_num_entries(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"at most {limit} {noun}")
        return value

    return BeforeValidator(check_num_entries)


T = TypeVar("T")
LimitedObject = Annotated[T, limit_entries(MAX_OBJECT_FIELDS, "fields")]
"""A JSON object in a body, with at most MAX_OBJECT_FIELDS fields."""

ObjectList = Annotated[list[LimitedObject[T]], Field(fail_fast=True)]
"""A list of objects, checked up to its first invalid one."""

Label = Annotated[str, Field(max_length=512)]
"""The client's name for a user or a group of requests; answers repeat it."""

Metadata = LimitedObject[
    Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]
]
"""Labels that a client attaches to a request; answers repeat them."""


def _field_path(loc: tuple[int | str, ...]) -> str:
    """Path of a field, such as ``messages[0].content``, of at most MAX_ERROR_PARAM_CHARACTERS. Tags
    of unions, which begin with "#", are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("#"):
            path += f".{part}" if path else part
    return path[:MAX_ERROR_PARAM_CHARACTERS]
