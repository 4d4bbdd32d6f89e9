"""tool_grammar: makes a grammar of tool calls, and of an answer's schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams
from asyncllm.structured.json_schema import ANNOTATIONS
from asyncllm.structured.spec import StructuredOutputs, parse_structured_outputs
from asyncllm.tool_calls.families import CallForm
from asyncllm.tool_calls.response_format import ResponseFormat
from asyncllm.tool_calls.tool_use import ToolUse

_CLOSED = ANNOTATIONS | {"type", "properties", "required"}
"""Keywords of a parameters schema that needs no further properties."""


def with_tool_grammar(
    sampling: dict[str, Any], params: Any, use: ToolUse, template: ResponseFormat
) -> tuple[dict[str, Any], bool]:
    """Add the grammar that ``use`` needs, if any, to fields of ``SamplingParams``. Also returns
    whether the answer may have free text.

    Tools together with ``structured_outputs`` make a grammar of both: calls, or an answer of that
    schema.

    Raises:
        InvalidRequestError: for ``structured_outputs`` if a call is required, or other than JSON;
            for a model whose format of calls is unknown; for a grammar beyond the limits.
    """
    given = sampling.get("structured_outputs")
    if given is None and isinstance(params, SamplingParams):
        given = params.structured_outputs
    answer, form = parse_structured_outputs(given), template.form
    if answer is None and (not use.is_constrained or _ends_with_a_call(use, form)):
        if use.is_strict:
            raise InvalidRequestError(
                "tools: strict=true with tool_choice='auto' and a model whose calls stand before "
                "its answer, where no grammar begins; expected tool_choice='required' or "
                "strict=false",
                param="tools",
            )
        return sampling, True
    if answer is not None and form is not None and form.restart:
        raise InvalidRequestError(
            f"{answer.param}: with tools of a model that writes a header before its answer, "
            "expected None",
            param=answer.param,
        )
    if answer is not None and (use.choice != "auto" or answer.kind not in ("json", "json_object")):
        accepted = "a JSON schema or any JSON object" if use.choice == "auto" else "None"
        raise InvalidRequestError(
            f"{answer.param}: with tools and tool_choice={use.choice!r}, expected {accepted}",
            param=answer.param,
        )
    grammar = tool_grammar(template, use.schemas, use.choice, use.parallel, answer)
    try:
        found = parse_structured_outputs({"structural_tag": grammar})
    except InvalidRequestError as error:
        raise InvalidRequestError(f"tools: their grammar: {error}", param="tools") from error
    assert found is not None
    free = use.choice == "auto" and answer is None
    return {**sampling, "structured_outputs": replace(found, param="tools")}, free


def tool_grammar(
    template: ResponseFormat,
    tools: Sequence[dict[str, Any]],
    choice: str | dict[str, str],
    parallel: bool,
    answer: StructuredOutputs | None = None,
) -> dict[str, Any]:
    """Structural tag (as in xgrammar) that makes the model write calls.

    It has a tag for each tool, whose content is the schema of its parameters. Calls are written as
    in the model's chat template, so they always parse.

    Args:
        template: how the model writes calls.
        tools: in OpenAI's schema.
        choice: "required" for any tool; ``{"name": …}`` for one; "auto" for text that may have
            calls.
        parallel: allow several calls. A named tool is called once.
        answer: JSON schema of an answer, as an alternative to calls.

    Raises:
        InvalidRequestError: for a model whose format of calls is unknown.
    """
    form = template.form
    if form is None:
        raise InvalidRequestError(
            "tool_choice: how the model's chat template writes calls is not known, expected "
            "EngineConfig.tool_call_parser to name it",
            param="tool_choice",
        )
    name = choice["name"] if isinstance(choice, dict) else None
    functions = [tool["function"] for tool in tools]
    # Free text with parallel calls needs a grammar only for the strict tools.
    just_strict = choice == "auto" and parallel and answer is None
    tags = [
        _tag(form, one, before, just_strict and not one.get("strict"))
        for one in functions
        if name in (None, one["name"])
        for before in dict.fromkeys(("", form.restart))
    ]
    parallel = parallel and form.parallel and name is None
    if choice == "auto" and answer is None:
        found = _text_with_calls(form, tags, parallel)
    else:
        found = _calls(form, tags, parallel)
        if answer is not None:
            schema = {"type": "json_schema", "json_schema": json.loads(answer.text)}
            found = {"type": "or", "elements": [found, schema]}
    return {"type": "structural_tag", "format": found}


def _ends_with_a_call(use: ToolUse, form: CallForm | None) -> bool:
    """Whether the format allows one call per answer anyway, so that no grammar is needed."""
    return use.choice == "auto" and form is not None and not form.parallel


def _tag(form: CallForm, function: dict[str, Any], before: str, free: bool) -> dict[str, Any]:
    """Tag of one tool; with ``free``, its arguments may be any JSON object."""
    schema = {"type": "object"} if free else _arguments(function)
    content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    if form.style != "json":
        content["style"] = form.style
    begin = before + form.begin.replace("NAME", function["name"])
    return {"type": "tag", "begin": begin, "content": content, "end": form.end}


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Schema of the arguments. Closed unless it says otherwise, because a function accepts no
    further arguments."""
    schema = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return schema | {"additionalProperties": False} if schema.keys() <= _CLOSED else schema


def _calls(form: CallForm, tags: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    if not form.prefix:
        return calls
    before, after = ({"type": "const_string", "value": text} for text in (form.prefix, form.suffix))
    return {"type": "sequence", "elements": [before, calls, after]}


def _text_with_calls(form: CallForm, tags: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    prefix, suffix = form.prefix, form.suffix
    tags = [{**tag, "begin": prefix + tag["begin"], "end": tag["end"] + suffix} for tag in tags]
    return {
        "type": "triggered_tags",
        "triggers": [form.trigger or (prefix + form.begin).partition("NAME")[0]],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }
