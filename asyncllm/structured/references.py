"""References of a JSON schema: resolves ``$ref``, and refuses those whose values never end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from asyncllm.structured.grammar import GrammarError
from asyncllm.validation import describe

_CONTAINER_TYPES = ("object", "array")


def is_local(pointer: Any) -> TypeGuard[str]:
    return isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))


def resolve(pointer: str, root: Any) -> Any:
    """Return the value in ``root`` that a JSON Pointer ``#`` or ``#/…`` refers to.

    Raises:
        LookupError: if the pointer refers to no value.
    """
    value = root
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value[part]
        elif isinstance(value, (list, tuple)) and part.isdecimal() and len(part) < 10:
            value = value[int(part)]
        else:
            raise LookupError(pointer)
    return value


def refuse_infinite_references(root: Any) -> None:
    """Raise GrammarError for a ``$ref`` whose values never end, because each must contain another.

    A grammar would admit the beginning of such a value, and the output would go on for ever.

    The references with a finite value are a least fixed point: a reference has one if its schema
    has a value that needs no references, or only references with a finite value. The time is linear
    in the size of the schema, unless one schema has a long list of references.
    """
    targets = dict(_reachable_references(root))
    finite: set[str] = set()
    waiting: dict[str, list[str]] = defaultdict(list)
    pending = list(targets)
    while pending:
        pointer = pending.pop()
        if pointer in finite:
            continue
        needed: list[str] = []
        if _has_finite_value(targets[pointer], finite, targets, needed):
            finite.add(pointer)
            pending += waiting.pop(pointer, ())
        for needed_pointer in needed:
            waiting[needed_pointer].append(pointer)
    for pointer in targets:
        if pointer not in finite:
            raise GrammarError(
                f"the $ref {describe(pointer)} leads to values that never end: each holds another"
            )


def _reachable_references(root: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the reachable local ``$ref``, each once, with its target. Backends refuse other
    references."""
    pending, seen = [root], set[str]()
    while pending:
        schema = pending.pop()
        if isinstance(schema, (list, tuple)):
            pending += schema
        if not isinstance(schema, Mapping):
            continue
        pointer = schema.get("$ref")
        if is_local(pointer) and pointer not in seen:
            seen.add(pointer)
            with suppress(LookupError):
                target = resolve(pointer, root)
                yield pointer, target
                pending.append(target)
        for keyword in ("properties", "patternProperties"):
            if isinstance(value := schema.get(keyword), Mapping):
                pending += value.values()
        for keyword in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
            pending.append(schema.get(keyword))
        pending += [schema.get("additionalProperties"), schema.get("additionalItems")]


def _has_finite_value(
    schema: Any, finite: set[str], targets: Mapping[str, Any], needed: list[str]
) -> bool:
    """Whether a schema has a finite value.

    Args:
        finite: references that are known to have a finite value.
        targets: target of every reference.
        needed: list that receives the needed references not known to have a finite value.
    """

    def is_finite(subschema: Any) -> bool:
        return _has_finite_value(subschema, finite, targets, needed)

    if not isinstance(schema, Mapping):
        return True
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer in targets and pointer not in finite:
        needed.append(pointer)
        return False
    if "enum" in schema or "const" in schema:
        return True
    for keyword, quantifier in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(keyword)
        if isinstance(parts, list) and parts and not quantifier(map(is_finite, parts)):
            return False
    kinds = schema.get("type", "null")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    children = {"object": _needed_properties, "array": _needed_items}
    return any(
        kind not in _CONTAINER_TYPES or all(map(is_finite, children[kind](schema)))
        for kind in kinds
    )


def _needed_properties(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties, additional = schema.get("properties") or {}, schema.get("additionalProperties")
    required = schema.get("required")
    if isinstance(required, list):
        for name in required:
            if isinstance(properties, Mapping) and isinstance(name, str) and name in properties:
                yield properties[name]
            else:
                yield additional
    if not properties and isinstance(schema.get("minProperties"), int) and schema["minProperties"]:
        yield additional


def _needed_items(schema: Mapping[str, Any]) -> Iterator[Any]:
    min_items, items = schema.get("minItems", 0), schema.get("items")
    first = schema.get("prefixItems", items if isinstance(items, list) else ())
    if isinstance(items, list):
        items = schema.get("additionalItems")
    if isinstance(min_items, int) and isinstance(first, list | tuple):
        yield from first[:min_items]
        if min_items > len(first):
            yield items
