"""tool_grammar: what a model may write when it has to call a tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.errors import InvalidRequestError
from asyncllm.tools.response_format import ResponseFormat
from asyncllm.tools.tool_use import ToolUse

GRAMMARS_ARE_ENFORCED = False
"""Until there is a backend for ``structured_outputs``, what takes a grammar is refused."""


def with_tool_grammar(
    sampling: dict[str, Any], use: ToolUse, template: ResponseFormat
) -> dict[str, Any]:
    """Fields of ``SamplingParams``, with the grammar that ``use`` takes, if it takes one.

    Raises:
        InvalidRequestError: for a choice that takes a grammar, while none is enforced.
    """
    if not use.is_constrained:
        return sampling
    if not GRAMMARS_ARE_ENFORCED:
        given = ("parallel_tool_calls", False, "true")
        if use.choice != "auto":
            given = ("tool_choice", use.choice, '"auto" or "none"')
        param, value, accepted = given
        raise InvalidRequestError(
            f"{param}={value!r}: takes structured outputs, which are not supported yet, expected "
            f"{accepted}",
            param=param,
        )
    grammar = tool_grammar(template, use.schemas, use.choice, use.parallel)
    return {**sampling, "structured_outputs": grammar}


def tool_grammar(
    template: ResponseFormat,
    tools: Sequence[dict[str, Any]],
    choice: str | dict[str, str],
    parallel: bool,
) -> dict[str, Any]:
    """A value of ``SamplingParams.structured_outputs`` that makes the model call a tool.

    Calls are written as the model's chat template writes them, so they always parse. In the terms
    of xgrammar's structural tags: a tag for each tool, whose content is the schema of its
    parameters.

    Args:
        template: how the model writes calls.
        tools: in OpenAI's schema.
        choice: "required" for any tool; ``{"name": …}`` for one; "auto" for text that may have
            calls.
        parallel: several calls. One that is named is called once.

    Raises:
        InvalidRequestError: for a model whose way of writing calls is not known.
    """
    form = template.form
    if form is None:
        raise InvalidRequestError(
            "tool_choice: how the model's chat template writes calls is not known, expected "
            "EngineConfig.tool_parser to name it",
            param="tool_choice",
        )
    named = isinstance(choice, dict)
    tags = []
    for function in (tool["function"] for tool in tools):
        if named and function["name"] != choice["name"]:
            continue
        schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
        content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
        if form.style != "json":
            content["style"] = form.style
        begin = form.begin.replace("NAME", function["name"])
        tags.append({"type": "tag", "begin": begin, "content": content, "end": form.end})
    if choice == "auto":
        return _structural_tag(
            _text_with_calls(form.prefix, form.suffix, form.begin, tags, parallel)
        )
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": named or not parallel or not form.parallel,
    }
    if not form.prefix:
        return _structural_tag(calls)
    around = ({"type": "const_string", "value": text} for text in (form.prefix, form.suffix))
    before, after = around
    return _structural_tag({"type": "sequence", "elements": [before, calls, after]})


def _text_with_calls(
    prefix: str, suffix: str, begin: str, tags: list[dict[str, Any]], parallel: bool
) -> dict[str, Any]:
    tags = [{**tag, "begin": prefix + tag["begin"], "end": tag["end"] + suffix} for tag in tags]
    return {
        "type": "triggered_tags",
        "triggers": [(prefix + begin).partition("NAME")[0]],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }


def _structural_tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": form}}
