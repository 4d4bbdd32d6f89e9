"""refuse_large_merges: bounds the schemas that llguidance merges because they apply to one value.

llguidance merges the schemas of ``allOf``, and the keywords beside a ``$ref``, into one automaton.
The states of patterns multiply; those of ``multipleOf`` are the least common multiple. For each two
``patternProperties`` of an object, llguidance tests whether one name can match both, and tests
again after each merge. llguidance's limits do not count this work, and nothing interrupts it.
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
from asyncllm.validation import describe

MAX_PATTERNS = 8
"""Maximum number of patterns and formats of one value. To merge as many takes 4 ms, and each
further one doubles the time."""

MAX_REMAINDERS = 16_384
"""Maximum number of remainders over all ``multipleOf`` of a schema: they take 50 ms and 8 MB."""

MAX_APPLIED_SCHEMAS = 200_000
"""Maximum number of examined values plus the schemas that apply to them, repetitions included. As
many take 0.5 s."""

MAX_EXPANDED_SCHEMAS = 4096
"""Maximum number of schemas of one value when each reference is replaced by its target, as
llguidance does: 30 levels of two equal references have a billion."""

MAX_PROPERTIES = 3000
"""Maximum number of properties of one object. llguidance's time is quadratic in the optional ones:
0.4 s for 3,000."""

MAX_PATTERN_WORK = 100_000
"""Maximum work to compare the ``patternProperties`` of objects, over all schemas. A comparison of
two patterns counts their characters and twice PATTERN_COST. As much takes up to 0.6 s."""

PATTERN_COST = 32

Schema = Mapping[str, Any]


def refuse_large_merges(*roots: Any) -> None:
    """Raise GrammarError if llguidance could take very long to merge schemas of one value.

    Args:
        roots: all schemas of one specification, whose work is counted together.
    """
    try:
        merges = _MergeChecker()
        for root in roots:
            merges.examine_root(root)
    except RecursionError:
        raise GrammarError("the schemas of one value are nested too deeply") from None


class _MergeChecker:
    def __init__(self) -> None:
        self._root: Any = None
        self._pattern_work: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        self._multiples: set[frozenset[Fraction]] = set()
        self._num_remainders = self._num_applied_schemas = self._total_pattern_work = 0
        self._sizes: dict[int, int] = {}

    def examine_root(self, root: Any) -> None:
        self._root = root
        for schema in subschemas(root):
            if self.num_expanded(schema) > MAX_EXPANDED_SCHEMAS:
                raise GrammarError(
                    f"more than {MAX_EXPANDED_SCHEMAS} schemas apply to one value or are its "
                    "alternatives"
                )
            types = schema.get("type")
            if isinstance(types, list) and len(types) > len(set(map(str, types))):
                # llguidance compiles the schema once for each type.
                raise GrammarError(f"'type' has a type twice: {describe(types)}")
        self._total_pattern_work += self.examine_value([root])
        self._check_pattern_work(self._total_pattern_work)

    def num_expanded(self, schema: Any) -> int:
        """Number of schemas that apply to a value of ``schema``, or are alternatives for it."""
        if not isinstance(schema, Mapping):
            return 1
        size = self._sizes.get(id(schema))
        if size is None:
            self._sizes[id(schema)] = 1  # A schema's reference to itself adds nothing.
            parts = [
                part
                for keyword in ("allOf", "anyOf", "oneOf")
                if isinstance(members := schema.get(keyword), list)
                for part in members
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

    def examine_value(self, schemas: list[Any], expanded: frozenset[int] = frozenset()) -> int:
        """Check schemas that apply to one value, then those of its items and properties.

        Args:
            expanded: ids of the ``anyOf`` and ``oneOf`` lists that are expanded already.

        Returns:
            The work to compare ``patternProperties``; 0 for one schema that is examined already,
            because llguidance compiles it once.
        """
        applied, num_merged = self._included_schemas(schemas)
        self._num_applied_schemas += 1 + num_merged
        if self._num_applied_schemas > MAX_APPLIED_SCHEMAS:
            raise GrammarError("too many combinations of schemas apply to one value")
        key = frozenset(map(id, applied)), expanded
        if key in self._pattern_work:
            is_merged = sum(isinstance(part, Mapping) for part in schemas) > 1
            return self._pattern_work[key] if is_merged else 0
        self._pattern_work[key] = 0
        alternative_lists = [
            choices
            for schema in applied
            for keyword in ("anyOf", "oneOf")
            if isinstance(choices := schema.get(keyword), list) and id(choices) not in expanded
        ]
        self._check_patterns(applied, alternative_lists)
        if (count := len(_names(applied, "properties"))) > MAX_PROPERTIES:
            raise GrammarError(
                f"an object has {count} properties, expected at most {MAX_PROPERTIES}"
            )
        # llguidance merges each constant with the keywords beside it.
        constants = (schema.get("enum") for schema in applied)
        num_constants = sum(len(values) for values in constants if isinstance(values, list))
        work = _pattern_work(applied) * (num_merged + num_constants)
        repeats = num_merged - len(applied) + 1
        work += repeats * sum(self.examine_value(group) for group in _child_groups(applied))
        expanded |= set(map(id, alternative_lists))
        num_combinations = math.prod(max(1, len(choices)) for choices in alternative_lists)
        for choices in alternative_lists:
            for choice in choices:
                choice_work = self.examine_value([*schemas, choice], expanded)
                work += choice_work * (num_combinations // len(choices))
        self._check_pattern_work(work)
        self._pattern_work[key] = work
        return work

    def _check_pattern_work(self, work: int) -> None:
        if work > MAX_PATTERN_WORK:
            raise GrammarError(
                f"patternProperties take a work of {work} to compare (each two of an object, by "
                f"their characters), expected at most {MAX_PATTERN_WORK}: fewer or shorter ones"
            )

    def _included_schemas(self, schemas: Iterable[Any]) -> tuple[list[Schema], int]:
        """Schemas that apply to the value: ``schemas``, and those that they include by ``allOf``
        and ``$ref``; and how many they are if one that is included again counts again."""
        by_id: dict[int, Schema] = {}
        pending = list(schemas)
        count = 0
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping):
                continue
            count += 1
            if id(schema) in by_id:
                continue
            by_id[id(schema)] = schema
            if isinstance(included := schema.get("allOf"), list):
                pending += included
            pending += self._target(schema)
        return list(by_id.values()), count

    def _num_patterns(self, schema: Any) -> int:
        return len(_patterns(self._included_schemas([schema])[0]))

    def _check_patterns(self, applied: list[Schema], alternative_lists: list[list[Any]]) -> None:
        # One alternative of each list applies, in any combination.
        count = len(_patterns(applied)) + sum(
            max(map(self._num_patterns, choices), default=0) for choices in alternative_lists
        )
        if count > MAX_PATTERNS:
            raise GrammarError(
                f"{count} patterns and formats apply to one value, expected at most {MAX_PATTERNS}"
            )
        multiples = frozenset(
            Fraction(Decimal(repr(number)))
            for number in (schema.get("multipleOf") for schema in applied)
            if isinstance(number, int | float) and number > 0
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
    by_name: dict[str, list[Any]] = {}
    for schema in applied:
        for keyword in ("properties", "patternProperties"):
            if isinstance(values := schema.get(keyword), Mapping):
                for name, item in values.items():
                    by_name.setdefault(name, []).append(item)
    additional = [
        schema["additionalProperties"] for schema in applied if "additionalProperties" in schema
    ]
    for group in by_name.values():
        yield group + additional
    yield additional
    for keyword in ("items", "prefixItems", "additionalItems"):
        values = [schema[keyword] for schema in applied if keyword in schema]
        yield [item for part in values for item in (part if isinstance(part, list) else [part])]


def _names(applied: list[Schema], keyword: str) -> set[str]:
    maps = (schema.get(keyword) for schema in applied)
    return {name for by_name in maps if isinstance(by_name, Mapping) for name in by_name}


def _pattern_work(applied: list[Schema]) -> int:
    """Work to compare all pairs of a value's ``patternProperties``."""
    names = _names(applied, "patternProperties")
    return max(0, len(names) - 1) * sum(len(name) + PATTERN_COST for name in names)


def _patterns(applied: list[Schema]) -> set[tuple[str, str]]:
    names = ("pattern", "format")
    return {(name, str(schema[name])) for schema in applied for name in names if name in schema}


def _num_remainders(multiples: frozenset[Fraction]) -> int:
    """Number of remainders that an automaton has to distinguish to check divisibility by all
    ``multiples``."""
    unit = math.lcm(*(number.denominator for number in multiples))
    return math.lcm(*(int(number * unit) for number in multiples)) if multiples else 0
