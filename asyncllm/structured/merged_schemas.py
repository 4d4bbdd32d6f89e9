"""refuse_large_merges: bounds the schemas that llguidance merges because they apply to one value.

llguidance merges the schemas of ``allOf``, and the keywords beside a ``$ref``, into one automaton.
The states of patterns multiply; those of ``multipleOf`` are the least common multiple. llguidance's
limits do not count this work, and nothing interrupts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

from asyncllm.structured.grammar import GrammarError
from asyncllm.structured.json_schema import subschemas
from asyncllm.structured.references import is_local, resolve

MAX_PATTERNS = 8
"""Maximum number of patterns and formats of one value. To merge as many takes 4 ms, and each
further one doubles the time."""

MAX_REMAINDERS = 16_384
"""Maximum number of remainders over all ``multipleOf`` of a schema: they take 50 ms and 8 MB."""

MAX_VALUES = 20_000
"""Maximum number of values whose schemas are examined."""

MAX_APPLIED_SCHEMAS = 400_000
"""Maximum number of schemas that apply to the examined values, counted for each value."""

MAX_EXPANDED = 4096
"""Maximum number of schemas of one value when each reference is replaced by its target, as
llguidance does: 30 levels of two equal references have a billion."""

Schema = Mapping[str, Any]


def refuse_large_merges(root: Any) -> None:
    """Raise GrammarError if llguidance could take very long to merge schemas of one value."""
    try:
        merges = _MergeChecker(root)
        for schema in subschemas(root):
            if merges.num_expanded(schema) > MAX_EXPANDED:
                raise GrammarError(
                    f"more than {MAX_EXPANDED} schemas apply to one value or are its alternatives"
                )
        merges.examine_value([root])
    except RecursionError:
        raise GrammarError("the schemas of one value are nested too deeply") from None


class _MergeChecker:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._examined_keys: set[tuple[frozenset[int], frozenset[int]]] = set()
        self._multiples: set[frozenset[Fraction]] = set()
        self._num_remainders = self._num_applied_schemas = 0
        self._sizes: dict[int, int] = {}

    def num_expanded(self, schema: Any) -> int:
        """Number of schemas that apply to a value of ``schema``, or are alternatives for it."""
        if not isinstance(schema, Mapping):
            return 1
        size = self._sizes.get(id(schema))
        if size is None:
            self._sizes[id(schema)] = 1  # A schema's reference to itself adds nothing.
            parts = [
                one
                for keyword in ("allOf", "anyOf", "oneOf")
                if isinstance(found := schema.get(keyword), list)
                for one in found
            ]
            size = self._sizes[id(schema)] = 1 + sum(
                map(self.num_expanded, [*parts, *self._target(schema)])
            )
        return size

    def _target(self, schema: Schema) -> list[Any]:
        """Target of the schema's local reference, if it has one."""
        if is_local(pointer := schema.get("$ref")):
            with suppress(LookupError):  # The backend refuses an unknown reference.
                return [resolve(pointer, self._root)]
        return []

    def examine_value(self, schemas: Iterable[Any], known: frozenset[int] = frozenset()) -> None:
        """Check schemas that apply to one value, then those of its items and properties.

        Args:
            known: ids of the ``anyOf`` and ``oneOf`` lists that are expanded already.
        """
        applied = self._included_schemas(schemas)
        key = frozenset(map(id, applied)), known
        if key in self._examined_keys:
            return
        self._examined_keys.add(key)
        self._num_applied_schemas += len(applied)
        if len(self._examined_keys) > MAX_VALUES or self._num_applied_schemas > MAX_APPLIED_SCHEMAS:
            raise GrammarError("too many combinations of schemas apply to one value")
        alternative_lists = [
            choices
            for schema in applied
            for keyword in ("anyOf", "oneOf")
            if isinstance(choices := schema.get(keyword), list) and id(choices) not in known
        ]
        self._check_patterns(applied, alternative_lists)
        for group in _child_groups(applied):
            self.examine_value(group)
        known |= set(map(id, alternative_lists))
        for choices in alternative_lists:
            for choice in choices:
                self.examine_value([*applied, choice], known)

    def _included_schemas(self, schemas: Iterable[Any]) -> list[Schema]:
        """Schemas that apply to the value: ``schemas``, and those that they include by ``allOf``
        and ``$ref``."""
        found: dict[int, Schema] = {}
        pending = list(schemas)
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping) or id(schema) in found:
                continue
            found[id(schema)] = schema
            if isinstance(included := schema.get("allOf"), list):
                pending += included
            pending += self._target(schema)
        return list(found.values())

    def _check_patterns(self, applied: list[Schema], alternative_lists: list[list[Any]]) -> None:
        # One alternative of each list applies, in any combination.
        count = len(_patterns(applied)) + sum(
            max((len(_patterns(self._included_schemas([choice]))) for choice in choices), default=0)
            for choices in alternative_lists
        )
        if count > MAX_PATTERNS:
            raise GrammarError(
                f"{count} patterns and formats apply to one value, expected at most {MAX_PATTERNS}"
            )
        multiples = frozenset(
            Fraction(Decimal(repr(one)))
            for one in (schema.get("multipleOf") for schema in applied)
            if isinstance(one, int | float) and one > 0
        )
        if multiples in self._multiples:
            return
        self._multiples.add(multiples)
        self._num_remainders += _num_remainders(multiples)
        if self._num_remainders > MAX_REMAINDERS:
            raise GrammarError(
                f"multipleOf has {self._num_remainders} remainders, expected at most "
                f"{MAX_REMAINDERS}: smaller numbers, or fewer for one value"
            )


def _child_groups(applied: list[Schema]) -> Iterable[list[Any]]:
    """Groups of schemas that apply to one property or item of the value."""
    names = dict.fromkeys(
        name
        for schema in applied
        for keyword in ("properties", "patternProperties")
        if isinstance(schema.get(keyword), Mapping)
        for name in schema[keyword]
    )
    others = [
        schema["additionalProperties"] for schema in applied if "additionalProperties" in schema
    ]
    for name in names:
        maps = (schema.get(k) for schema in applied for k in ("properties", "patternProperties"))
        yield [one[name] for one in maps if isinstance(one, Mapping) and name in one] + others
    yield others
    for keyword in ("items", "prefixItems", "additionalItems"):
        found = [schema[keyword] for schema in applied if keyword in schema]
        yield [one for part in found for one in (part if isinstance(part, list) else [part])]


def _patterns(applied: list[Schema]) -> set[tuple[str, str]]:
    names = ("pattern", "format")
    return {(name, str(one[name])) for one in applied for name in names if name in one}


def _num_remainders(multiples: frozenset[Fraction]) -> int:
    """Number of remainders that an automaton has to distinguish to check divisibility by all
    ``multiples``."""
    unit = math.lcm(*(one.denominator for one in multiples))
    return math.lcm(*(int(one * unit) for one in multiples)) if multiples else 0
