"""refuse_large_merges: refuses schemas that llguidance could take very long to merge.

llguidance merges the schemas that apply to one value into one automaton: the schemas of ``allOf``,
and the keywords beside a ``$ref``. The numbers of states of merged patterns multiply. For
``multipleOf`` the automaton has as many states as the least common multiple of the numbers. For any
two ``patternProperties`` of an object, llguidance tests whether one name can match both, and tests
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
from asyncllm.structured.references import is_local_ref, resolve_pointer
from asyncllm.validation import describe

MAX_PATTERNS_PER_VALUE = 8
"""Maximum number of patterns and formats that apply to one value. Merging this many takes 4 ms, and
each further one doubles the time."""

MAX_MULTIPLEOF_REMAINDERS = 16_384
"""Maximum number of remainders modulo the ``multipleOf`` of a schema. This many automaton states
take 50 ms and 8 MB."""

MAX_CHECK_STEPS = 50_000
"""Maximum number of steps of the check: the checked values and the schemas that apply to them,
repetitions included. NON_SCHEMAS_PER_STEP other entries of a list, such as ``true``, count as one.
This many steps take some 60 ms."""

NON_SCHEMAS_PER_STEP = 8

MAX_EXPANDED_SCHEMAS = 4096
"""Maximum number of schemas of one value, counted with each reference replaced by its target, as in
llguidance. 30 nested levels with two references each give a billion schemas. Constants that are
objects or arrays count as schemas, and an object has SCHEMAS_PER_OPTIONAL_PROPERTY more for each
property that may come first or next. llguidance's parser may hold all of them after one token, and
checks its limit of items only then. This many take some 20 ms."""

SCHEMAS_PER_OPTIONAL_PROPERTY = 4
"""Number of parser items that llguidance makes for an optional property."""

MAX_PROPERTIES_PER_OBJECT = 3000
"""Maximum number of properties of one object. llguidance's time is quadratic in the number of
optional properties: 0.4 s for 3,000."""

MAX_COMPARED_PATTERN_CHARACTERS = 100_000
"""Maximum total cost of comparing ``patternProperties``, in characters. A comparison costs the
characters of both patterns, plus BASE_CHARACTERS_PER_PATTERN for each of the two. The maximum takes
up to 0.6 s."""

BASE_CHARACTERS_PER_PATTERN = 32
"""Cost of a pattern in a comparison, as a number of characters added to its own."""

Schema = Mapping[str, Any]


def refuse_large_merges(*roots: Any) -> None:
    """Raise GrammarError if llguidance could take very long to merge the schemas of any value.

    Args:
        roots: all schemas of one specification. Their costs are added.
    """
    try:
        checker = _MergeChecker()
        for root in roots:
            checker.check_root_schema(root)
    except RecursionError:
        raise GrammarError("the schemas of one value are nested too deeply") from None


def refuse_many_alternatives(roots: Iterable[Any]) -> None:
    """Raise GrammarError if the parser could hold too many schemas at once.

    Args:
        roots: schemas whose values may begin at the same place.
    """
    if sum(map(_MergeChecker().count_largest_value, roots)) > MAX_EXPANDED_SCHEMAS:
        raise GrammarError(
            f"values of more than {MAX_EXPANDED_SCHEMAS} schemas may begin at the same place, "
            f"where each property that may come next is {SCHEMAS_PER_OPTIONAL_PROPERTY}"
        )


class _MergeChecker:
    """Counter of the work to merge schemas; raises GrammarError above the limits."""

    def __init__(self) -> None:
        self._root: Any = None
        self._comparison_costs: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        self._seen_divisors: set[frozenset[int | float]] = set()
        self._total_remainders = self._num_steps = self._total_comparison_cost = 0
        self._expanded_counts: dict[int, tuple[int, int]] = {}
        self._ref_targets: dict[int, list[Any]] = {}

    def check_root_schema(self, root: Any) -> None:
        self._root, self._ref_targets = root, {}
        for schema in subschemas(root):
            if sum(self.count_expanded_schemas(schema)) > MAX_EXPANDED_SCHEMAS:
                raise GrammarError(
                    f"more than {MAX_EXPANDED_SCHEMAS} schemas apply to one value or are its "
                    "alternatives, where each property that may come next is "
                    f"{SCHEMAS_PER_OPTIONAL_PROPERTY}"
                )
            types = schema.get("type")
            if isinstance(types, list) and len(types) > len(set(map(str, types))):
                # llguidance compiles the schema once for each type.
                raise GrammarError(f"'type' has a type twice: {describe(types)}")
        self._total_comparison_cost += self.check_value_schemas([root])
        self._check_comparison_cost(self._total_comparison_cost)

    def count_largest_value(self, root: Any) -> int:
        """Count the schemas and items of the value in ``root`` that has the most."""
        self._root, self._ref_targets = root, {}
        counts = (sum(self.count_expanded_schemas(schema)) for schema in subschemas(root))
        return max(counts, default=1)

    def count_expanded_schemas(self, schema: Any) -> tuple[int, int]:
        """Count the schemas that apply to one JSON value, all alternatives included, and the parser
        items of its constants and optional properties."""
        if not isinstance(schema, Mapping):
            return 1, 0
        counts = self._expanded_counts.get(id(schema))
        if counts is None:
            self._expanded_counts[id(schema)] = 1, 0  # A recursive $ref adds no schema.
            num_schemas, num_items = 1, _num_alternative_items(schema)
            for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
                parts = self._resolve_ref(schema) if keyword == "$ref" else schema.get(keyword)
                if not isinstance(parts, list):
                    continue
                if keyword in ("anyOf", "oneOf") and parts:
                    num_items *= len(parts)  # llguidance merges what is beside with each of them.
                for part in parts:
                    more_schemas, more_items = self.count_expanded_schemas(part)
                    num_schemas += more_schemas
                    num_items += more_items
            counts = self._expanded_counts[id(schema)] = num_schemas, num_items
        return counts

    def _resolve_ref(self, schema: Schema) -> list[Any]:
        """List with the target of the schema's local reference; empty without one."""
        if not is_local_ref(pointer := schema.get("$ref")):
            return []
        targets = self._ref_targets.get(id(schema))
        if targets is None:
            targets = self._ref_targets[id(schema)] = []
            with suppress(LookupError):  # The backend refuses an unknown reference.
                targets.append(resolve_pointer(pointer, self._root))
        return targets

    def check_value_schemas(
        self, schemas: list[Any], expanded_ids: frozenset[int] = frozenset()
    ) -> int:
        """Check schemas that apply to one value, then the schemas of its items and properties.

        Args:
            expanded_ids: ids of the ``anyOf`` and ``oneOf`` lists that are already expanded.

        Returns:
            The cost of the comparisons of ``patternProperties``; 0 for a single schema that was
            checked before, because llguidance compiles it once.
        """
        applied_schemas, num_merged, num_others = self._collect_applied_schemas(schemas)
        self._num_steps += 1 + num_merged + num_others // NON_SCHEMAS_PER_STEP
        if self._num_steps > MAX_CHECK_STEPS:
            raise GrammarError("too many combinations of schemas apply to one value")
        key = frozenset(map(id, applied_schemas)), expanded_ids
        if key in self._comparison_costs:
            is_merged = sum(isinstance(part, Mapping) for part in schemas) > 1
            return self._comparison_costs[key] if is_merged else 0
        self._comparison_costs[key] = 0
        alternative_lists = [
            choices
            for schema in applied_schemas
            for keyword in ("anyOf", "oneOf")
            if isinstance(choices := schema.get(keyword), list) and id(choices) not in expanded_ids
        ]
        self._check_patterns(applied_schemas, alternative_lists)
        count = len(_property_names(applied_schemas, "properties"))
        if count > MAX_PROPERTIES_PER_OBJECT:
            raise GrammarError(
                f"an object has {count} properties, expected at most {MAX_PROPERTIES_PER_OBJECT}"
            )
        # llguidance merges each constant with the keywords beside it.
        constants = (schema.get("enum") for schema in applied_schemas)
        num_constants = sum(len(values) for values in constants if isinstance(values, list))
        cost = _pattern_comparison_cost(applied_schemas) * (num_merged + num_constants)
        repeats = num_merged - len(applied_schemas) + 1
        cost += repeats * sum(
            self.check_value_schemas(group) for group in _child_schema_groups(applied_schemas)
        )
        expanded_ids |= set(map(id, alternative_lists))
        num_combinations = math.prod(max(1, len(choices)) for choices in alternative_lists)
        for choices in alternative_lists:
            for choice in choices:
                choice_cost = self.check_value_schemas([*schemas, choice], expanded_ids)
                cost += choice_cost * (num_combinations // len(choices))
        self._check_comparison_cost(cost)
        self._comparison_costs[key] = cost
        return cost

    def _check_comparison_cost(self, cost: int) -> None:
        if cost > MAX_COMPARED_PATTERN_CHARACTERS:
            raise GrammarError(
                f"patternProperties take a work of {cost} to compare (each two of an object, by "
                f"their characters), expected at most {MAX_COMPARED_PATTERN_CHARACTERS}: fewer or "
                "shorter ones"
            )

    def _collect_applied_schemas(self, schemas: Iterable[Any]) -> tuple[list[Schema], int, int]:
        """Collect ``schemas`` and the schemas that they include by ``allOf`` and ``$ref``.

        Returns:
            The collected schemas without repetitions, their number with repetitions, and the number
            of other entries.
        """
        by_id: dict[int, Schema] = {}
        pending = list(schemas)
        count = num_others = 0
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping):
                num_others += 1
                continue
            count += 1
            if id(schema) in by_id:
                continue
            by_id[id(schema)] = schema
            if isinstance(included := schema.get("allOf"), list):
                pending += included
            pending += self._resolve_ref(schema)
        return list(by_id.values()), count, num_others

    def _count_patterns(self, schema: Any) -> int:
        return len(_patterns_and_formats(self._collect_applied_schemas([schema])[0]))

    def _check_patterns(
        self, applied_schemas: list[Schema], alternative_lists: list[list[Any]]
    ) -> None:
        # Each anyOf or oneOf list contributes one alternative, in any combination.
        count = len(_patterns_and_formats(applied_schemas)) + sum(
            max(map(self._count_patterns, choices), default=0) for choices in alternative_lists
        )
        if count > MAX_PATTERNS_PER_VALUE:
            raise GrammarError(
                f"{count} patterns and formats apply to one value, expected at most "
                f"{MAX_PATTERNS_PER_VALUE}"
            )
        divisors = frozenset(
            number
            for number in (schema.get("multipleOf") for schema in applied_schemas)
            if isinstance(number, int | float) and number > 0
        )
        if divisors in self._seen_divisors:
            return
        self._seen_divisors.add(divisors)
        self._total_remainders += _count_multipleof_remainders(divisors)
        if self._total_remainders > MAX_MULTIPLEOF_REMAINDERS:
            raise GrammarError(
                f"multipleOf has {self._total_remainders} remainders, expected at most "
                f"{MAX_MULTIPLEOF_REMAINDERS}: smaller numbers, or fewer for one value"
            )


def _num_alternative_items(schema: Schema) -> int:
    """Number of parser items for a schema's constants, and for its longest run of properties that
    are not required."""
    values, properties, required = map(schema.get, ("enum", "properties", "required"))
    num_constants = longest = length = 0
    if isinstance(values, list):
        num_constants = sum(isinstance(value, dict | list) for value in values)
    if isinstance(properties, Mapping):
        texts = (
            {name for name in required if isinstance(name, str)}
            if isinstance(required, list)
            else ()
        )
        for name in properties:
            length = 0 if name in texts else length + 1
            longest = max(longest, length)
    return num_constants + SCHEMAS_PER_OPTIONAL_PROPERTY * longest


def _child_schema_groups(schemas: list[Schema]) -> Iterable[list[Any]]:
    """Iterate over groups of schemas that apply to one property or item of a value.

    Args:
        schemas: schemas that apply to the value.
    """
    by_name: dict[str, list[Any]] = {}
    for schema in schemas:
        for keyword in ("properties", "patternProperties"):
            if isinstance(values := schema.get(keyword), Mapping):
                for name, item in values.items():
                    by_name.setdefault(name, []).append(item)
    additional = [
        schema["additionalProperties"] for schema in schemas if "additionalProperties" in schema
    ]
    for group in by_name.values():
        yield group + additional
    yield additional
    for keyword in ("items", "prefixItems", "additionalItems"):
        values = [schema[keyword] for schema in schemas if keyword in schema]
        yield [item for part in values for item in (part if isinstance(part, list) else [part])]


def _property_names(schemas: list[Schema], keyword: str) -> set[str]:
    maps = (schema.get(keyword) for schema in schemas)
    return {name for by_name in maps if isinstance(by_name, Mapping) for name in by_name}


def _pattern_comparison_cost(schemas: list[Schema]) -> int:
    """Cost of comparing all pairs of a value's ``patternProperties``."""
    names = _property_names(schemas, "patternProperties")
    return max(0, len(names) - 1) * sum(len(name) + BASE_CHARACTERS_PER_PATTERN for name in names)


def _patterns_and_formats(schemas: list[Schema]) -> set[tuple[str, str]]:
    names = ("pattern", "format")
    return {
        (name, value)
        for schema in schemas
        for name in names
        if isinstance(value := schema.get(name), str)
    }


def _count_multipleof_remainders(divisors: Iterable[int | float]) -> int:
    """Count the remainders that an automaton distinguishes to check divisibility by all
    ``divisors``."""
    fractions = [Fraction(Decimal(repr(number))) for number in divisors]
    unit = math.lcm(*(number.denominator for number in fractions))
    return math.lcm(*(int(number * unit) for number in fractions)) if fractions else 0
