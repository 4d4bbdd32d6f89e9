"""References of a JSON schema: resolves ``$ref``, and refuses endless recursion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from asyncllm.structured.grammar import GrammarError
from asyncllm.validation import describe

_CONTAINER_TYPES = ("object", "array")


def is_local_ref(pointer: Any) -> TypeGuard[str]:
    return isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))


def resolve_pointer(pointer: str, root: Any) -> Any:
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
    """Raise GrammarError for a ``$ref`` that no finite value satisfies.

    An example is a schema that requires a reference to itself. A grammar would admit the beginning
    of an endless value, and the output would go on for ever.

    A reference is satisfiable if some value of its schema needs no references, or only satisfiable
    ones (a least fixed point). The time is linear in the size of the schema, unless one schema has
    a long list of references.
    """
    targets = dict(_reachable_references(root))
    finite_refs: set[str] = set()
    dependent_refs: dict[str, list[str]] = defaultdict(list)
    pending = list(targets)
    while pending:
        pointer = pending.pop()
        if pointer in finite_refs:
            continue
        undecided_refs: list[str] = []
        if _has_finite_value(targets[pointer], finite_refs, targets, undecided_refs):
            finite_refs.add(pointer)
            pending += dependent_refs.pop(pointer, ())
        for undecided_ref in undecided_refs:
            dependent_refs[undecided_ref].append(pointer)
    for pointer in targets:
        if pointer not in finite_refs:
            raise GrammarError(
                f"the $ref {describe(pointer)} leads to values that never end: each holds another"
            )


def _reachable_references(root: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the reachable local references (``$ref``), each once, with its target.

    Backends refuse other references.
    """
    pending, seen = [root], set[str]()
    while pending:
        schema = pending.pop()
        if isinstance(schema, (list, tuple)):
            pending += schema
        if not isinstance(schema, Mapping):
            continue
        pointer = schema.get("$ref")
        if is_local_ref(pointer) and pointer not in seen:
            seen.add(pointer)
            with suppress(LookupError):
                target = resolve_pointer(pointer, root)
                yield pointer, target
                pending.append(target)
        for keyword in ("properties", "patternProperties"):
            if isinstance(value := schema.get(keyword), Mapping):
                pending += value.values()
        for keyword in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
            pending.append(schema.get(keyword))
        pending += [schema.get("additionalProperties"), schema.get("additionalItems")]


def _has_finite_value(
    schema: Any, finite_refs: set[str], ref_targets: Mapping[str, Any], undecided_refs: list[str]
) -> bool:
    """Whether some finite JSON value is known to satisfy a schema.

    Args:
        finite_refs: references that a finite value is known to satisfy.
        ref_targets: target of every reference.
        undecided_refs: list that receives the other references on which the answer depends.
    """

    def is_finite(subschema: Any) -> bool:
        return _has_finite_value(subschema, finite_refs, ref_targets, undecided_refs)

    if not isinstance(schema, Mapping):
        return True
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer in ref_targets and pointer not in finite_refs:
        undecided_refs.append(pointer)
        return False
    if "enum" in schema or "const" in schema:
        return True
    for keyword, quantifier in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(keyword)
        if isinstance(parts, list) and parts and not quantifier(map(is_finite, parts)):
            return False
    kinds = schema.get("type", "null")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    children = {"object": _required_property_schemas, "array": _required_item_schemas}
    return any(
        kind not in _CONTAINER_TYPES or all(map(is_finite, children[kind](schema)))
        for kind in kinds
    )


def _required_property_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
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


def _required_item_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    min_items, items = schema.get("minItems", 0), schema.get("items")
    first = schema.get("prefixItems", items if isinstance(items, list) else ())
    if isinstance(items, list):
        items = schema.get("additionalItems")
    if isinstance(min_items, int) and isinstance(first, list | tuple):
        yield from first[:min_items]
        if min_items > len(first):
            yield items
