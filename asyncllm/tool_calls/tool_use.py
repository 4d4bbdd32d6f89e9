"""ToolUse: the tools and the tool choice of one ``chat()`` call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError
from asyncllm.structured.json_tree import walk_dicts
from asyncllm.structured.references import is_local_ref, resolve_pointer
from asyncllm.text.template_input import TemplateInputCopier
from asyncllm.tool_calls.function_schema import function_schema, is_pydantic_model

MAX_TOOLS = 512
"""Maximum number of tools of a call. Each takes some 15 microseconds of the caller's thread."""

_MAX_REFERENCE_PARTS = 2**12
"""Maximum number of parts of all different ``$ref`` in a call's tools; ``#/$defs/x`` has two. Each
is followed on the caller's thread."""

_TOOL_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ACCEPTED_TOOLS_TEXT = "OpenAI's dicts, Python functions or Pydantic models"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools and tool choice of one ``chat()`` call, checked and copied.

    Attributes:
        schemas: one ``{"type": "function", "function": {...}}`` per tool, as chat templates expect.
        choice: "auto", "required", or ``{"name": …}`` for one tool.
        parallel: whether an answer may have several calls.
        copier: copier that made ``schemas``. It copies the messages too, so that its limits hold
            for both.
    """

    schemas: tuple[dict[str, Any], ...]
    choice: str | dict[str, str]
    parallel: bool
    copier: TemplateInputCopier

    @classmethod
    def parse(cls, tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> ToolUse | None:
        """Check the arguments of ``chat()``; returns None if the model must not see any tool.

        Raises:
            InvalidRequestError: ``param`` is "tools", "tool_choice" or "parallel_tool_calls"; the
                message has the path of the invalid value.
        """
        items = check.bounded_tuple("tools", tools, _ACCEPTED_TOOLS_TEXT, MAX_TOOLS)
        items = [
            function_schema(tool, f"tools[{i}]")
            if inspect.isroutine(tool) or is_pydantic_model(tool)
            else tool
            for i, tool in enumerate(items)
        ]
        copier = TemplateInputCopier()
        copied = copier.copy_items(items, "tools", "tools")
        schemas = tuple(_parse_tool(tool, f"tools[{i}]") for i, tool in enumerate(copied))
        copier.texts += (
            "type",
            "function",
        )  # ``_parse_tool`` adds these words to tools without them.
        if "$ref" in copier.texts:
            _check_references(schemas)
        names = [schema["function"]["name"] for schema in schemas]
        seen: set[str] = set()
        for i, name in enumerate(names):
            if name in seen:
                raise _tool_error(
                    f"tools[{i}]", f"the name {name!r} a second time", "different names"
                )
            seen.add(name)
        choice = _parse_tool_choice(tool_choice)
        parallel = check.boolean("parallel_tool_calls", parallel_tool_calls)
        if isinstance(choice, dict) and choice["name"] not in names:
            accepted = f"one of the tools on offer: {', '.join(names) or 'there are none'}"
            raise check.value_error("tool_choice", tool_choice, accepted)
        if choice == "required" and not names:
            raise check.value_error("tool_choice", tool_choice, '"auto" or "none" without tools')
        # With "none", the model does not see the tools.
        if not names or choice == "none":
            return None
        return cls(schemas, choice, parallel, copier)

    @property
    def parameter_schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the tools' parameters, by tool name."""
        functions = [schema["function"] for schema in self.schemas]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar must enforce ``tool_choice``, a single call, or strict tools."""
        return self.choice != "auto" or not self.parallel or self.is_strict

    @property
    def is_strict(self) -> bool:
        """Whether any tool is ``strict``: the arguments of its calls must match its schema."""
        return any(schema["function"].get("strict") for schema in self.schemas)


def _parse_tool_choice(value: Any) -> str | dict[str, str]:
    if value is None:
        return "auto"
    if (text := check.as_plain_str(value)) in ("auto", "none", "required"):
        return text
    if isinstance(value, Mapping) and check.equal_json(value.get("type"), "function"):
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
        if (text := check.as_plain_str(name)) is not None:
            return {"name": text}
    accepted = '"auto", "none", "required" or {"type": "function", "function": {"name": …}}'
    raise check.value_error("tool_choice", value, accepted)


def _parse_tool(tool: Any, location: str) -> dict[str, Any]:
    is_tool = isinstance(tool, dict) and tool.get("type", "function") == "function"
    _check_valid(is_tool, location, "", tool, f"one of {_ACCEPTED_TOOLS_TEXT}")
    function: Any = tool.get("function")
    # OpenAI's Responses protocol puts the function's fields into the tool itself.
    if "function" not in tool:
        function = {key: value for key, value in tool.items() if key != "type"}
    location += ".function"
    _check_valid(isinstance(function, dict), location, "", function, "a dict with a name")
    name = function.get("name")
    is_name = isinstance(name, str) and _TOOL_NAME_PATTERN.fullmatch(name) is not None
    accepted = "1 to 64 letters, digits, underscores, dashes and dots"
    _check_valid(is_name, location, ".name", name, accepted)
    function = {key: value for key, value in function.items() if value is not None}
    description, strict = function.get("description", ""), function.get("strict", False)
    _check_valid(isinstance(description, str), location, ".description", description, "a string")
    _check_valid(isinstance(strict, bool), location, ".strict", strict, "true, false or null")
    if "parameters" in function:
        _check_parameters(function["parameters"], location + ".parameters")
    return {"type": "function", "function": function}


def _check_parameters(schema: Any, location: str) -> None:
    _check_valid(isinstance(schema, dict), location, "", schema, "a JSON schema of an object")
    kind, required = schema.get("type", "object"), schema.get("required", [])
    _check_valid(kind == "object", location, ".type", kind, '"object"')
    properties = schema.get("properties", {})
    is_map = isinstance(properties, dict) and all(
        isinstance(key, str) and isinstance(value, (dict, bool))
        for key, value in properties.items()
    )
    _check_valid(is_map, location, ".properties", properties, "names to JSON schemas")
    is_list = isinstance(required, (list, tuple)) and all(isinstance(r, str) for r in required)
    _check_valid(is_list, location, ".required", required, "a list of names")


def _check_references(schemas: Collection[dict[str, Any]]) -> None:
    """Check that each ``$ref`` of the tools leads to a schema of the same tool."""
    num_parts = 0
    for i, schema in enumerate(schemas):
        location = f"tools[{i}].function.parameters"
        parameters = schema["function"].get("parameters", {})
        checked_pointers: set[str] = set()
        for value in walk_dicts(parameters):
            if "$ref" in value:
                num_parts += _check_reference(value, parameters, location, checked_pointers)
                if num_parts > _MAX_REFERENCE_PARTS:
                    raise _tool_error(
                        location,
                        f"different $ref of more than {_MAX_REFERENCE_PARTS} parts together",
                        "fewer",
                    )


def _check_reference(
    schema: dict[str, Any], root: dict[str, Any], location: str, checked_pointers: set[str]
) -> int:
    """Check that the ``$ref`` of a schema leads to a schema within ``root``; returns the number of
    parts of the pointers that it follows.

    Refuses references that lead only to each other; accepts a recursive schema, such as a tree's.

    Args:
        checked_pointers: pointers that lead to a schema, to which this function adds. So each
            reference of a chain is resolved once.
    """
    if type(schema["$ref"]) is str and schema["$ref"] in checked_pointers:
        return 0
    seen: set[str] = set()
    while isinstance(schema, dict) and "$ref" in schema:
        pointer = schema["$ref"]
        if not is_local_ref(pointer):
            raise _tool_error(
                location, f"$ref {check.describe(pointer)}", "one into this schema, #/…"
            )
        if pointer in checked_pointers:
            break
        if pointer in seen:
            raise _tool_error(
                location, f"a circle of $ref at {pointer!r}", "one that leads to a schema"
            )
        seen.add(pointer)
        try:
            schema = resolve_pointer(pointer, root)
        except LookupError:
            raise _tool_error(
                location, f"$ref {pointer!r}, which leads nowhere", "one to a schema"
            ) from None
    checked_pointers |= seen
    return sum(pointer.count("/") for pointer in seen)


def _check_valid(
    is_valid: bool, location: str, field: str, value: object, accepted_values: str
) -> None:
    if not is_valid:
        raise _tool_error(location + field, check.describe(value), accepted_values)


def _tool_error(location: str, value: str, accepted_values: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{location}: has {value:.200}, expected {accepted_values}", param="tools"
    )
