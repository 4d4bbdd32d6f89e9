"""JSON Schema keywords that backends enforce; a schema with any other keyword is refused.

If a backend silently ignored a keyword, outputs would violate the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncllm.structured.grammar import GrammarError
from asyncllm.structured.references import refuse_infinite_references

_MAX_SCHEMAS = 8192
"""Maximum number of subschemas of a StructuredOutputs. Checking one takes some 20 microseconds,
with the GIL held."""

ANNOTATION_KEYWORDS = frozenset(
    """$anchor $comment $defs $id $schema contentEncoding contentMediaType default definitions
    deprecated description discriminator example examples externalDocs id readOnly title
    writeOnly xml""".split()
)
"""JSON Schema keywords that do not restrict values."""

LLGUIDANCE_KEYWORDS = frozenset(
    """$ref additionalItems additionalProperties allOf anyOf const enum exclusiveMaximum
    exclusiveMinimum format items maxItems maxLength maxProperties maximum minItems minLength
    minProperties minimum multipleOf oneOf pattern patternProperties prefixItems properties
    required type""".split()
)
"""JSON Schema keywords that llguidance enforces. llguidance itself refuses values of these keywords
that it cannot enforce."""

_SCHEMA_MAP_KEYWORDS = frozenset(
    "$defs definitions dependentSchemas patternProperties properties".split()
)
_SCHEMA_LIST_KEYWORDS = frozenset("allOf anyOf oneOf prefixItems items".split())
_SINGLE_SCHEMA_KEYWORDS = frozenset(
    """additionalItems additionalProperties contains else if items not propertyNames then
    unevaluatedItems unevaluatedProperties""".split()
)


def subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Iterate over a schema and its subschemas, but not data (``enum``, ``const``, examples)."""
    pending = [schema]
    while pending:
        item = pending.pop()
        if not isinstance(item, Mapping):
            continue  # The schemas true and false have no keywords; backends refuse other types.
        yield item
        for keyword, value in item.items():
            if keyword in _SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
                pending += value.values()
            elif keyword in _SCHEMA_LIST_KEYWORDS and isinstance(value, list):
                pending += value
            elif keyword in _SINGLE_SCHEMA_KEYWORDS:
                pending.append(value)


def refuse_many_schemas(*roots: Any) -> None:
    """Raise GrammarError if the schemas have more than _MAX_SCHEMAS subschemas together.

    Args:
        roots: all schemas of one specification.
    """
    count = sum(1 for root in roots for _ in subschemas(root))
    if count > _MAX_SCHEMAS:
        raise GrammarError(f"has {count} subschemas, expected at most {_MAX_SCHEMAS}")


def refuse_unenforced_keywords(schema: Any, enforced_keywords: frozenset[str]) -> None:
    """Raise GrammarError for a keyword that is neither enforced nor an annotation."""
    for part in subschemas(schema):
        if part is not schema and "$ref" in part and ("$id" in part or "id" in part):
            # Drafts of JSON Schema disagree on whether "$id" or "$ref" wins.
            raise GrammarError("'$id' beside '$ref' is not enforced")
        for keyword in part:
            if keyword not in enforced_keywords and keyword not in ANNOTATION_KEYWORDS:
                if not keyword.startswith("x-") or keyword == "x-guidance":
                    raise GrammarError(f"the keyword {keyword!r} is not enforced")


XGRAMMAR_KEYWORDS = {
    # Keywords for lengths and patterns are missing: with them, xgrammar allows unescaped control
    # characters, which are invalid JSON.
    "string": frozenset[str](),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split()),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset("items prefixItems minItems maxItems".split()),
    "object": frozenset("properties required additionalProperties".split()),
}
"""Keywords that xgrammar enforces, by the ``type`` of the schema."""


def refuse_unsupported_by_xgrammar(schema: Any) -> None:
    """Raise GrammarError for a schema that xgrammar would partly ignore, or that no finite value
    satisfies.

    xgrammar reads a schema as a reference, as constants, as alternatives, or as a type with its
    keywords. It ignores all other keywords of the schema.
    """
    refuse_infinite_references(schema)
    for part in subschemas(schema):
        keywords = part.keys() - ANNOTATION_KEYWORDS
        if not str(part.get("$ref", "#/")).startswith("#/") or "%" in str(part.get("$ref")):
            raise GrammarError(f"the reference {part['$ref']!r} is not resolved")
        for form in ("$ref", "const", "enum", "anyOf"):
            if form in keywords:
                allowed = {form, "type"} if form in ("const", "enum") else {form}
                if keywords - allowed:
                    names = ", ".join(sorted(keywords - allowed))
                    raise GrammarError(f"{form!r} beside {names} is not enforced")
                break
        else:
            kind = part.get("type")
            if not isinstance(kind, str) or kind not in XGRAMMAR_KEYWORDS:
                if not keywords:
                    continue
                names = ", ".join(sorted(keywords))
                raise GrammarError(f"{names} without a single type are not enforced")
            required, properties = part.get("required", ()), set(part.get("properties") or ())
            for name in required:
                if name not in properties:
                    raise GrammarError(f"the required {name!r}, not in properties, is not enforced")
            for keyword in sorted(keywords - {"type"} - XGRAMMAR_KEYWORDS[kind]):
                raise GrammarError(f"the keyword {keyword!r} is not enforced with type {kind!r}")
