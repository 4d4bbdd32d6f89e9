"""References of a JSON schema: resolves ``$ref``, and refuses endless recursion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

from asyncllm.structured.grammar import GrammarError
from asyncllm.validation import describe

_CONTAINER_TYPES = ("object", "array")

_MAX_POINTER_PARTS = 128
"""Maximum number of parts of a pointer; schemas of requests have at most 100 levels."""


def is_local_ref(pointer: Any) -> TypeGuard[str]:
    return isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))


def resolve_pointer(pointer: str, root: Any) -> Any:
    """Return the value in ``root`` that a JSON Pointer ``#`` or ``#/…`` refers to.

    Raises:
        LookupError: if the pointer refers to no value.
    """
    value = root
    for part in pointer.split("/", _MAX_POINTER_PARTS)[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, (dict, Mapping)):
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
    """
    targets = dict(_reachable_references(root))
    finite_ids = _ids_of_finite_schemas(targets)
    for pointer, target in targets.items():
        if id(target) not in finite_ids:
            raise GrammarError(
                f"the $ref {describe(pointer)} leads to values that never end: each holds another"
            )


def _reachable_references(root: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the reachable local references (``$ref``), each once, with its target.

    Backends refuse other references.
    """
    pending, seen_pointers, seen_ids = [root], set[str](), set[int]()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, (list, tuple, Mapping)) or id(schema) in seen_ids:
            continue
        seen_ids.add(id(schema))
        if not isinstance(schema, Mapping):
            pending += schema
            continue
        pointer = schema.get("$ref")
        if is_local_ref(pointer) and pointer not in seen_pointers:
            seen_pointers.add(pointer)
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


def _ids_of_finite_schemas(ref_targets: Mapping[str, Any]) -> set[int]:
    """Ids of the targets, and of the schemas within them, that some finite value satisfies.

    These are a least fixed point. It is computed as that of propositional Horn clauses, in time
    linear in the size of the schemas, however they refer to each other.

    Args:
        ref_targets: target of every reference.
    """
    clauses_by_part: dict[int, list[list[int]]] = defaultdict(list)
    proved_ids: list[int] = []

    def add_clause(head_id: int, part_ids: list[int]) -> None:
        """Add that the head is finite if all parts are. The clause counts its unproved parts."""
        clause = [len(part_ids), head_id]
        for part_id in part_ids:
            clauses_by_part[part_id].append(clause)
        if not part_ids:
            proved_ids.append(head_id)

    pending, seen_ids, num_conditions = list(ref_targets.values()), set[int](), 0
    while pending:
        schema = pending.pop()
        if id(schema) in seen_ids:
            continue
        seen_ids.add(id(schema))
        condition_ids = []
        for alternatives in _finiteness_conditions(schema, ref_targets):
            num_conditions += 1
            condition_ids.append(-num_conditions)  # The id of an object is positive.
            for parts in alternatives:
                add_clause(-num_conditions, list(map(id, parts)))
                pending += parts
        add_clause(id(schema), condition_ids)
    finite_ids: set[int] = set()
    while proved_ids:
        proved_id = proved_ids.pop()
        finite_ids.add(proved_id)
        for clause in clauses_by_part.pop(proved_id, ()):
            clause[0] -= 1
            if not clause[0]:
                proved_ids.append(clause[1])
    return finite_ids


def _finiteness_conditions(
    schema: Any, ref_targets: Mapping[str, Any]
) -> Iterator[Iterable[list[Any]]]:
    """Iterate over the conditions that together let some finite value satisfy a schema.

    Each is a list of alternatives; an alternative is a list of schemas that all need such a value.
    """
    if not isinstance(schema, Mapping):
        return
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer in ref_targets:
        yield [[ref_targets[pointer]]]
    if "enum" in schema or "const" in schema:
        return
    if isinstance(parts := schema.get("allOf"), list):
        yield [parts]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(keyword), list) and parts:
            yield ([part] for part in parts)
    kinds = schema.get("type", "null")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if all(kind in _CONTAINER_TYPES for kind in kinds):
        children = {"object": _required_property_schemas, "array": _required_item_schemas}
        yield (list(children[kind](schema)) for kind in _CONTAINER_TYPES if kind in kinds)


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
