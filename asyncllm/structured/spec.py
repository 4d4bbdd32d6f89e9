"""StructuredOutputs: checked specification of the grammar of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError
from asyncllm.json_copier import JsonCopier, NotJsonError
from asyncllm.structured.python_types import is_schema_type, schema_of_type

SpecKind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
SPEC_KINDS: tuple[SpecKind, ...] = get_args(SpecKind)

MAX_SPEC_CHARACTERS = 2**17
"""Maximum number of characters of a schema, grammar or list of choices. The check of the text must
be short, because it runs on an event loop's thread."""

MAX_SCHEMA_VALUES = 24_576
"""Maximum number of values of a schema, its keys and containers among them. Each takes up to half a
microsecond to copy and write, on an event loop's thread; 3,000 properties with a type and a
description have 18,000."""

MAX_REFERENCES = 512
"""Maximum number of references in a schema, and of rules and references in a grammar. llguidance
follows a chain of references recursively: 2,500 overflow a stack of 8 MiB and end the process."""

_RULE_START_PATTERN = re.compile(
    r"(?<![\w.-])[A-Za-z_][\w.-]*+(?:\[[^]\n]{0,64}+\]|\{[^}\n]{0,64}+\})?\s*+:"
)

MAX_SCHEMA_DEPTH = 48
"""Maximum nesting depth of a schema, which backends parse recursively."""

MAX_REGEX_CHARACTERS = 2**13
MAX_CHOICES = 2**12

_PARAM_NAME = "structured_outputs"
_ACCEPTED_STRUCTURED_OUTPUTS = "a dict with exactly one of " + ", ".join(SPEC_KINDS)


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Checked specification of the grammar of a request.

    Attributes:
        kind: kind of the specification.
        text: the regular expression or grammar; for the other kinds, JSON text of the schema,
            structural tag or list of choices. Equal specifications are compiled once.
        param: name of the caller's parameter, for errors. If it is "tools", names of special
            tokens in a structural tag stand for the tokens themselves, not for their text.
    """

    kind: SpecKind
    text: str
    param: Literal["structured_outputs", "response_format", "tools"] = "structured_outputs"


def parse_structured_outputs(value: Any) -> StructuredOutputs | None:
    """Check ``SamplingParams.structured_outputs``, without importing a backend.

    Raises:
        InvalidRequestError: if ``value`` is not a mapping with exactly one kind, or exceeds the
            limits.
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    try:
        return _parse_mapping(value)
    except InvalidRequestError as error:
        error.param = _PARAM_NAME  # Only the message names the field, such as ``regex``.
        raise


def _parse_mapping(value: Any) -> StructuredOutputs:
    if not isinstance(value, Mapping):
        raise check.value_error(_PARAM_NAME, value, _ACCEPTED_STRUCTURED_OUTPUTS + ", or None")
    check.refuse_unknown_names(f"kind of {_PARAM_NAME}", value, SPEC_KINDS)
    by_kind: dict[SpecKind, Any] = {
        kind: value[kind] for kind in SPEC_KINDS if value.get(kind) is not None
    }
    if by_kind.get("json_object") is False:
        del by_kind["json_object"]
    if len(by_kind) != 1:
        raise check.value_error(_PARAM_NAME, value, _ACCEPTED_STRUCTURED_OUTPUTS)
    kind, kind_value = next(iter(by_kind.items()))
    return StructuredOutputs(kind, _CHECK_FUNCTIONS[kind](kind_value))


def _check_json(value: Any) -> str:
    name = f"{_PARAM_NAME}.json"
    accepted = "a JSON schema, as a dict or text, a Pydantic model, a dataclass or a TypedDict"
    is_text = isinstance(value, str)
    if is_schema_type(value):
        value = schema_of_type(value, name)
    elif is_text:
        value = _parse_json(name, value)
    if isinstance(value, bool):
        # In JSON Schema, true admits every value, and false admits none.
        value = {} if value else {"not": {}}
    if not isinstance(value, Mapping):
        raise check.value_error(name, value, accepted)
    return _serialise_schema(name, value, is_text)


def _check_json_object(value: Any) -> str:
    check.boolean(f"{_PARAM_NAME}.json_object", value)
    return '{"type": "object"}'


def _check_regex(value: Any) -> str:
    name = f"{_PARAM_NAME}.regex"
    return check.string(name, value, max_length=MAX_REGEX_CHARACTERS)


def _check_grammar(value: Any) -> str:
    name = f"{_PARAM_NAME}.grammar"
    text = check.string(name, value, max_length=MAX_SPEC_CHARACTERS)
    # Count escapes too: in a %json schema, "\u0024ref" is a "$ref".
    num_rules = len(_RULE_START_PATTERN.findall(text)) + text.count("\\u00")
    return _check_reference_count(name, text, num_rules)


def _check_choice(value: Any) -> str:
    name = f"{_PARAM_NAME}.choice"
    accepted = f"1 to {MAX_CHOICES} different strings, none of them empty"
    choices = check.bounded_tuple(name, value, accepted, MAX_CHOICES)
    if sum(str.__len__(one) for one in choices if isinstance(one, str)) > MAX_SPEC_CHARACTERS:
        raise check.value_error(name, value, f"at most {MAX_SPEC_CHARACTERS} characters")
    choices = [check.string(name, one) for one in choices]
    if not choices or len(set(choices)) != len(choices):
        raise check.value_error(name, value, accepted)
    return _check_length(name, json.dumps(choices, ensure_ascii=False), MAX_SPEC_CHARACTERS)


def _check_structural_tag(value: Any) -> str:
    name = f"{_PARAM_NAME}.structural_tag"
    is_text = isinstance(value, str)
    if is_text:
        value = _parse_json(name, value)
    if not isinstance(value, Mapping) or not check.equal_json(value.get("type"), "structural_tag"):
        raise check.value_error(name, value, 'a dict, or JSON text, with "type": "structural_tag"')
    if ("structures" in value) == ("format" in value):
        raise check.value_error(name, value, 'either "structures" and "triggers", or "format"')
    return _serialise_schema(name, value, is_text)


_CHECK_FUNCTIONS = {
    "json": _check_json,
    "regex": _check_regex,
    "choice": _check_choice,
    "grammar": _check_grammar,
    "json_object": _check_json_object,
    "structural_tag": _check_structural_tag,
}


def _check_length(name: str, text: str, max_characters: int) -> str:
    if len(text) > max_characters:
        raise check.value_error(name, text, f"at most {max_characters} characters, not {len(text)}")
    return text


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(_check_length(name, text, MAX_SPEC_CHARACTERS))
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise check.value_error(name, text, f"JSON ({error})") from None


def _serialise_schema(name: str, value: Mapping[str, Any], is_parsed: bool) -> str:
    """Serialise a schema in the order of its keys: the model writes properties in this order.

    Args:
        is_parsed: whether ``value`` was just parsed from the caller's text.
    """
    copier = JsonCopier(
        MAX_SCHEMA_VALUES,
        MAX_SPEC_CHARACTERS,
        MAX_SCHEMA_DEPTH - 1,
        require_text_keys=True,
    )
    try:
        copied = copier.copy(value, is_parsed=is_parsed)
        text = json.dumps(copied, ensure_ascii=False, allow_nan=False)
        text.encode()
    except NotJsonError as error:
        accepted = (
            f"a schema of JSON types, {MAX_SCHEMA_DEPTH} levels, {MAX_SCHEMA_VALUES} values and "
            f"{MAX_SPEC_CHARACTERS} characters at most ({error.message_for(name)})"
        )
        raise check.value_error(name, value, accepted) from None
    except Exception as error:  # Reading the caller's mapping may raise errors of any class.
        raise check.value_error(name, value, f"values that JSON has ({error})") from None
    return _check_reference_count(name, _check_length(name, text, MAX_SPEC_CHARACTERS))


def _check_reference_count(name: str, text: str, num_rules: int = 0) -> str:
    count = num_rules + text.count('"$ref"')
    if count > MAX_REFERENCES:
        raise check.value_error(
            name, text, f"at most {MAX_REFERENCES} references and rules, not {count}"
        )
    return text
