"""tool_grammar: makes one grammar for tool calls and, if asked for, a structured answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams
from asyncllm.structured.json_schema import ANNOTATION_KEYWORDS
from asyncllm.structured.spec import StructuredOutputs, parse_structured_outputs
from asyncllm.tool_calls.chat_syntax import ChatSyntax
from asyncllm.tool_calls.families import CallSyntax
from asyncllm.tool_calls.tool_use import ToolUse
from asyncllm.validation import argument_error

_PLAIN_OBJECT_SCHEMA_KEYWORDS = ANNOTATION_KEYWORDS | {"type", "properties", "required"}
"""Keywords that do not concern additional properties. If the schema of a tool's parameters has only
these keywords, additional properties are refused."""


def with_tool_grammar(
    sampling_fields: dict[str, Any], sampling_params: Any, tool_use: ToolUse, syntax: ChatSyntax
) -> tuple[dict[str, Any], bool]:
    """Add a grammar for the tools of a ``chat()`` call to its ``SamplingParams`` fields.

    If ``structured_outputs`` is given, the grammar allows tool calls or a structured answer.

    Args:
        sampling_fields: fields of ``SamplingParams`` that the caller passed by name.
        sampling_params: the caller's ``SamplingParams``, or None.
        tool_use: the tools and the tool choice.
        syntax: syntax of the model's calls.

    Returns:
        ``sampling_fields`` with the grammar, if one is needed; and whether calls may follow text in
        the answer.

    Raises:
        InvalidRequestError: in one of these cases.

            - ``structured_outputs`` is given, and a tool call is required.
            - ``structured_outputs`` is neither a JSON schema nor ``json_object``.
            - A grammar is needed, and the model's format of calls is unknown or allows no grammar.
            - The grammar exceeds the limits of ``structured_outputs``.
    """
    structured_outputs = sampling_fields.get("structured_outputs")
    if structured_outputs is None and isinstance(sampling_params, SamplingParams):
        structured_outputs = sampling_params.structured_outputs
    answer_spec, call_syntax = parse_structured_outputs(structured_outputs), syntax.call_syntax
    if answer_spec is None and (
        not tool_use.is_constrained or _ends_with_first_call(tool_use, call_syntax)
    ):
        if tool_use.is_strict:
            raise argument_error(
                "tools",
                "strict=true with tool_choice='auto' and a model whose calls stand before its "
                "answer, where no grammar begins; expected tool_choice='required' or strict=false",
            )
        return sampling_fields, True
    if answer_spec is not None and call_syntax is not None and call_syntax.restart_text:
        problem = "with tools of a model that writes a header before its answer, expected None"
        raise argument_error(answer_spec.param, problem)
    if answer_spec is not None and (
        tool_use.choice != "auto" or answer_spec.kind not in ("json", "json_object")
    ):
        accepted = "a JSON schema or any JSON object" if tool_use.choice == "auto" else "None"
        problem = f"with tools and tool_choice={tool_use.choice!r}, expected {accepted}"
        raise argument_error(answer_spec.param, problem)
    grammar = tool_grammar(
        syntax, tool_use.schemas, tool_use.choice, tool_use.parallel, answer_spec
    )
    try:
        spec = parse_structured_outputs({"structural_tag": grammar})
    except InvalidRequestError as error:
        raise argument_error("tools", f"their grammar: {error}") from error
    assert spec is not None
    calls_may_follow_text = tool_use.choice == "auto" and answer_spec is None
    return {
        **sampling_fields,
        "structured_outputs": replace(spec, param="tools"),
    }, calls_may_follow_text


def tool_grammar(
    syntax: ChatSyntax,
    tools: Sequence[dict[str, Any]],
    tool_choice: str | dict[str, str],
    allow_parallel: bool,
    answer_spec: StructuredOutputs | None = None,
) -> dict[str, Any]:
    """Make a structural tag (as in xgrammar) that allows only valid tool calls.

    It has one tag per tool, with the schema of the tool's parameters as content. Calls have the
    syntax of the model's chat template, so the message parser can always parse them.

    Args:
        syntax: syntax of the model's calls.
        tools: OpenAI's tools.
        tool_choice: "required" if some tool must be called; ``{"name": …}`` if this tool must be
            called; "auto" for text that may contain calls.
        allow_parallel: allow several calls. A named tool is called only once.
        answer_spec: JSON schema of an answer that is allowed instead of calls.

    Raises:
        InvalidRequestError: for a model whose format of calls is unknown.
    """
    call_syntax = syntax.call_syntax
    if call_syntax is None:
        raise argument_error(
            "tool_choice",
            "how the model's chat template writes calls is not known, expected "
            "EngineConfig.tool_call_parser to name it",
        )
    name = tool_choice["name"] if isinstance(tool_choice, dict) else None
    functions = [tool["function"] for tool in tools]
    # If free text and parallel calls are allowed, only the arguments of strict tools need a schema.
    only_strict_schemas = tool_choice == "auto" and allow_parallel and answer_spec is None
    tags = [
        _tool_tag(call_syntax, function, prefix, only_strict_schemas and not function.get("strict"))
        for function in functions
        if name in (None, function["name"])
        for prefix in dict.fromkeys(("", call_syntax.restart_text))
    ]
    allow_parallel = allow_parallel and call_syntax.parallel and name is None
    if tool_choice == "auto" and answer_spec is None:
        root_format = _text_and_calls_format(call_syntax, tags, allow_parallel)
    else:
        root_format = _calls_format(call_syntax, tags, allow_parallel)
        if answer_spec is not None:
            schema = {"type": "json_schema", "json_schema": json.loads(answer_spec.text)}
            root_format = {"type": "or", "elements": [root_format, schema]}
    return {"type": "structural_tag", "format": root_format}


def _ends_with_first_call(tool_use: ToolUse, call_syntax: CallSyntax | None) -> bool:
    """Whether the call format ends an answer with its first call.

    Such a format needs no grammar to prevent a second call.
    """
    return tool_use.choice == "auto" and call_syntax is not None and not call_syntax.parallel


def _tool_tag(
    call_syntax: CallSyntax, function: dict[str, Any], prefix: str, allow_any_arguments: bool
) -> dict[str, Any]:
    """Make the structural tag of one tool: the text that opens a call, the schema of the
    arguments, and the text that closes the call.

    Args:
        prefix: text before the call.
        allow_any_arguments: allow any JSON object as arguments.
    """
    schema = {"type": "object"} if allow_any_arguments else _arguments_schema(function)
    content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    if call_syntax.style != "json":
        content["style"] = call_syntax.style
    begin = prefix + call_syntax.begin.replace("NAME", function["name"])
    return {"type": "tag", "begin": begin, "content": content, "end": call_syntax.end}


def _arguments_schema(function: dict[str, Any]) -> dict[str, Any]:
    """Schema of a tool's arguments.

    It refuses additional properties unless the tool allows them, because a function accepts no
    further arguments.
    """
    schema = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    if schema.keys() <= _PLAIN_OBJECT_SCHEMA_KEYWORDS:
        schema["additionalProperties"] = False
    return schema


def _calls_format(
    call_syntax: CallSyntax, tags: list[dict[str, Any]], allow_parallel: bool
) -> dict[str, Any]:
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": call_syntax.separator,
        "at_least_one": True,
        "stop_after_first": not allow_parallel,
    }
    if not call_syntax.prefix:
        return calls
    before, after = (
        {"type": "const_string", "value": text} for text in (call_syntax.prefix, call_syntax.suffix)
    )
    return {"type": "sequence", "elements": [before, calls, after]}


def _text_and_calls_format(
    call_syntax: CallSyntax, tags: list[dict[str, Any]], allow_parallel: bool
) -> dict[str, Any]:
    prefix, suffix = call_syntax.prefix, call_syntax.suffix
    tags = [{**tag, "begin": prefix + tag["begin"], "end": tag["end"] + suffix} for tag in tags]
    return {
        "type": "triggered_tags",
        "triggers": [call_syntax.trigger or (prefix + call_syntax.begin).partition("NAME")[0]],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not allow_parallel,
    }
