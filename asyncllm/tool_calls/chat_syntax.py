"""ChatSyntax: how a model writes its reasoning and its tool calls."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncllm.checkpoint.importing import importing_transformers
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.tool_calls.call_reader import BufferedCallReader, CallReader
from asyncllm.tool_calls.delimiters import DelimiterMatch, Delimiters, literals_or_pattern
from asyncllm.tool_calls.families import (
    REASONING_FAMILIES,
    TOOL_CALL_FAMILIES,
    ReasoningFamily,
    ToolCallFamily,
)
from asyncllm.tool_calls.json_call_reader import JsonCallReader, JsonSyntax
from asyncllm.tool_calls.xml_parameters import (
    convert_arguments,
    keep_parameter_types,
    parse_parameters,
)

REASONING_FIELD_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of the field for reasoning in a tokenizer's response template, the preferred one first."""

# Names of delimiters. The first two are fields of a response template.
TOOL_CALLS_FIELD = "tool_calls"
REASONING_CONTENT_FIELD = "reasoning_content"
IGNORED_DELIMITER_NAME = "skip"

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig

# Look-behind constructs of patterns. Patterns with them are refused, because the scanner does not
# store earlier text.
_LOOK_BEHIND_CONSTRUCTS = ("(?<=", "(?<!", r"\A")


class ChatSyntax:
    """How a model writes reasoning and tool calls: a response template, compiled for streaming.

    Templates have the meaning that they have in transformers (``transformers.utils.chat_parsing``).
    The ``ResponseParser`` of transformers does not fit streaming:

    - it releases a call only when the call is complete;
    - it raises for a malformed call, and drops the delimiters of the call;
    - it ends a call at a delimiter within a string;
    - it copies the whole output with each piece, which takes 4 microseconds per token of a short
      output, and up to 550 for an output of one megabyte (``benchmarks.parsing``).

    ``ResponseParser`` is only used for calls in other syntaxes than plain JSON and Qwen's
    ``<parameter=…>``, one region at a time.

    Args:
        tool_family: format of calls; None if the output is not searched for calls.
        reasoning_family: format of reasoning; None if the output is not searched for reasoning.

    Attributes:
        delimiters: delimiters that begin a call or reasoning, and the pattern of text to ignore.
        calls_field, reasoning_field: the template's fields for calls and reasoning; empty if the
            output is not searched for them.
        call_syntax: syntax of calls in the chat template; None if unknown.
        prompt_ends: literal texts that belong to the answer if the prompt ends with them.
        reasoning_begin, reasoning_end: texts whose token ids mark the reasoning for the engine;
            empty if the template has patterns instead.
        reasoning_end_before_call: ``ReasoningFamily.end_before_call``.
        calls_close_delimiters, reasoning_close_delimiters: delimiters that end a call, and that
            end reasoning; None if the template has none.
        json_syntax: layout of calls in JSON; None for another syntax.
        is_parameter_syntax: whether calls are in Qwen's ``<parameter=…>`` syntax.
    """

    def __init__(
        self, tool_family: ToolCallFamily | None, reasoning_family: ReasoningFamily | None
    ) -> None:
        tool = tool_family or ToolCallFamily({}, None)
        reasoning = reasoning_family or ReasoningFamily({}, "", "")
        ends = filter(None, (tool.prompt_end, reasoning.prompt_end))
        self.prompt_ends = tuple(dict.fromkeys(ends))
        self.ignored_pattern = tool.ignored_pattern or reasoning.ignored_pattern
        self.calls_field, self.call_syntax = tool.calls_field, tool.call_syntax
        self.reasoning_field = reasoning.reasoning_field
        self.reasoning_begin, self.reasoning_end = reasoning.begin, reasoning.end
        self.reasoning_end_before_call = reasoning.end_before_call
        opens = (
            (TOOL_CALLS_FIELD, literals_or_pattern(self.calls_field, "open")),
            (REASONING_CONTENT_FIELD, literals_or_pattern(self.reasoning_field, "open")),
            (IGNORED_DELIMITER_NAME, self.ignored_pattern),
        )
        self.delimiters = Delimiters(
            [(name, delimiter) for name, delimiter in opens if delimiter is not None]
        )
        self.calls_close_delimiters = _closing_delimiters(self.calls_field)
        self.reasoning_close_delimiters = _closing_delimiters(self.reasoning_field)
        self.json_syntax = _json_syntax(self.calls_field)
        self.is_parameter_syntax = _is_parameter_syntax(self.calls_field)

    def delimiters_contain(self, token: str) -> bool:
        """Whether ``token`` may be a part of a delimiter."""
        sources = [self.ignored_pattern, *self.prompt_ends]
        for part in (self.calls_field, self.reasoning_field):
            for side in ("open", "close"):
                delimiter = literals_or_pattern(part, side)
                sources += delimiter if isinstance(delimiter, list) else [delimiter]
        return any(token in source.replace("\\", "") for source in sources if source)

    def answer_prefix_in_prompt(self, prompt_end: str) -> str:
        """The answer's first text if the prompt has it at its end, such as "<think>"; else ""."""
        prompt_end = prompt_end.rstrip()
        return next((end for end in self.prompt_ends if prompt_end.endswith(end)), "")

    def schemas_to_parse(
        self, tools: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Keep the parts of the schemas that ``make_call_reader`` reads: the tools' names, and the
        types of their parameters for calls that are not JSON."""
        if self.json_syntax is None:
            return keep_parameter_types(tools)
        return {name: {} for name in tools}

    def make_call_reader(
        self, tools: Mapping[str, Mapping[str, Any]], opening_delimiter: DelimiterMatch
    ) -> CallReader:
        """Make a reader for the calls after an opening delimiter.

        Args:
            tools: schema of the parameters of each tool, by tool name.
            opening_delimiter: the delimiter, as found in the output.
        """
        if self.json_syntax is not None:
            name = opening_delimiter.captures.get("name", "").strip() or None
            return JsonCallReader(
                self.json_syntax,
                tools.keys(),
                opening_delimiter.text,
                name,
                self.calls_close_delimiters,
            )
        if self.is_parameter_syntax:
            name = opening_delimiter.captures.get("name", "")
            parse_calls = partial(_parse_parameter_call, tools, name)
        else:
            parse_calls = partial(self._parse_with_transformers, tools)
        return BufferedCallReader(parse_calls, opening_delimiter.text, self.calls_close_delimiters)

    def _parse_with_transformers(
        self, tools: Mapping[str, Mapping[str, Any]], raw_text: str
    ) -> list[tuple[str, str]] | None:
        from transformers.utils.chat_parsing import parse_response

        template = {"start_anchor_pattern": "(?!)", "fields": {TOOL_CALLS_FIELD: self.calls_field}}
        schemas: list[Any] = [
            {"function": {"name": name, "parameters": parameters}}
            for name, parameters in tools.items()
        ]
        try:
            message = parse_response(raw_text, template, prefix="", tools=schemas)
        except Exception:  # transformers' parser raises errors of any class for malformed calls.
            return None
        parsed = message.get(TOOL_CALLS_FIELD)
        calls = [_name_and_arguments(call) for call in _flatten_lists(parsed)]
        if not calls or any(call is None or call[0] not in tools for call in calls):
            return None
        return [call for call in calls if call is not None]


def _parse_parameter_call(
    tools: Mapping[str, Mapping[str, Any]], name: str, raw_text: str
) -> list[tuple[str, str]] | None:
    if name not in tools:
        return None
    try:
        arguments = convert_arguments(parse_parameters(raw_text), tools[name])
    except RecursionError:
        return None
    arguments_json = _to_json(arguments)
    return None if arguments_json is None else [(name, arguments_json)]


def _to_json(arguments: dict[str, Any]) -> str | None:
    """JSON of a call's arguments; None if a number is not finite, or the nesting too deep."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    try:
        text.encode()
    except UnicodeEncodeError:  # A string has half of a surrogate pair, by an escape.
        text = json.dumps(arguments)
    return text


def _flatten_lists(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [item for nested in value for item in _flatten_lists(nested)]
    return [] if value is None else [value]


def _name_and_arguments(call: Any) -> tuple[str, str] | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    arguments_json = _to_json(arguments)
    return None if arguments_json is None else (name, arguments_json)


def _closing_delimiters(field: Mapping[str, Any]) -> Delimiters | None:
    delimiter = literals_or_pattern(field, "close")
    return None if delimiter is None else Delimiters([("close", delimiter)])


def _is_parameter_syntax(calls_field: Mapping[str, Any]) -> bool:
    qwen_field = TOOL_CALL_FAMILIES["qwen3_coder"].calls_field
    keys = ("content", "content_args", "transform", "transform_each")
    return all(calls_field.get(key) == qwen_field.get(key) for key in keys)


def _json_syntax(calls_field: Mapping[str, Any]) -> JsonSyntax | None:
    """JSON layout of tool calls in the template's field ``tool_calls``; None for another layout."""
    transform = calls_field.get("transform")
    if calls_field.get("content") != "json" or calls_field.get("content_args") or not transform:
        return None
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if calls_field.get("transform_each"):
        keys = _name_and_arguments_keys(function, "")
        return None if keys is None else JsonSyntax("array", *keys)
    if function == "{content}":
        return JsonSyntax("object")
    if not isinstance(function, Mapping) or function.keys() != {"name", "arguments"}:
        return None
    if (function["name"], function["arguments"]) == ("{name}", "{content}"):
        return JsonSyntax("arguments")
    keys = _name_and_arguments_keys(function, "content.")
    return None if keys is None else JsonSyntax("object", *keys)


def _name_and_arguments_keys(function: Any, placeholder_prefix: str) -> tuple[str, str] | None:
    """Keys of a call's name and arguments, from placeholders such as "{content.name}".

    None if ``function`` is anything but two placeholders that begin with ``placeholder_prefix``.
    """
    if not isinstance(function, Mapping) or function.keys() != {"name", "arguments"}:
        return None
    keys = []
    for value in (function["name"], function["arguments"]):
        key = value[1:-1] if isinstance(value, str) else ""
        if value != f"{{{key}}}" or not key.startswith(placeholder_prefix):
            return None
        keys.append(key.removeprefix(placeholder_prefix))
    return None if any("." in key for key in keys) else (keys[0], keys[1])


class ChatSyntaxes:
    """Chat syntaxes of one model: for requests with tools, and without.

    Args:
        sources: sources of the model's chat templates, to recognise the model's family.
        template: the tokenizer's own ``response_template``, which overrides a recognised family;
            None if absent.
        tool_call_parser, reasoning_parser: as in ``EngineConfig``. Any value but "auto" overrides
            the template and the recognised family.
    """

    def __init__(
        self,
        sources: Sequence[str],
        template: Mapping[str, Any] | None,
        tool_call_parser: str,
        reasoning_parser: str | None,
    ) -> None:
        fields = _check_response_template(template) if template is not None else {}
        own_reasoning = next(
            (fields[name] for name in REASONING_FIELD_NAMES if name in fields), None
        )
        ignored = _content_close_pattern(fields)
        self._reasoning_family: ReasoningFamily | None = None
        if reasoning_parser == "auto" and own_reasoning is not None:
            begin, end = own_reasoning.get("open"), own_reasoning.get("close")
            if not isinstance(begin, str) or not isinstance(end, str):
                begin = end = ""
            self._reasoning_family = ReasoningFamily(
                own_reasoning, begin, end, ignored_pattern=ignored, prompt_end=begin
            )
        elif reasoning_parser == "auto" and template is None:
            self._reasoning_family = _recognise_family(REASONING_FAMILIES, sources)
        elif reasoning_parser is not None and reasoning_parser != "auto":
            self._reasoning_family = REASONING_FAMILIES[reasoning_parser]
        recognised: ToolCallFamily | None = _recognise_family(TOOL_CALL_FAMILIES, sources)
        if tool_call_parser == "auto" and TOOL_CALLS_FIELD in fields:
            form = recognised.call_syntax if recognised is not None else None
            as_text = recognised is not None and recognised.expects_text_arguments
            self._tool_family = ToolCallFamily(
                fields[TOOL_CALLS_FIELD], form, as_text, ignored_pattern=ignored
            )
        elif tool_call_parser == "auto":
            self._tool_family = recognised
        else:
            self._tool_family = TOOL_CALL_FAMILIES[tool_call_parser]
        self._syntaxes: dict[bool, ChatSyntax] = {}

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, config: EngineConfig) -> ChatSyntaxes:
        sources = list(tokenizer.chat_template.sources.values())
        template = tokenizer.response_template
        return cls(sources, template, config.tool_call_parser, config.reasoning_parser)

    def import_response_parser(self) -> None:
        """Import transformers' parser if it is needed, so that no event loop waits for it later."""
        field = {} if self._tool_family is None else self._tool_family.calls_field
        if field and _json_syntax(field) is None and not _is_parameter_syntax(field):
            with importing_transformers():
                importlib.import_module("transformers.utils.chat_parsing")

    def syntax_for(self, with_tools: bool) -> ChatSyntax | None:
        """Syntax of an answer; None if the whole answer is text.

        Args:
            with_tools: whether the request has tools.

        Raises:
            InvalidRequestError: for tools, if the model's format of calls is unknown.
        """
        if with_tools and self._tool_family is None:
            raise InvalidRequestError(
                "tools: how the model writes calls is not known from its chat template, expected "
                f"EngineConfig.tool_call_parser to name it, one of {', '.join(TOOL_CALL_FAMILIES)}",
                param="tools",
            )
        tool_family = self._tool_family if with_tools else None
        if tool_family is None and self._reasoning_family is None:
            return None
        if with_tools not in self._syntaxes:
            self._syntaxes[with_tools] = ChatSyntax(tool_family, self._reasoning_family)
        return self._syntaxes[with_tools]

    @property
    def expects_text_arguments(self) -> bool:
        """Whether the chat template expects the arguments of past calls as JSON text."""
        return self._tool_family is not None and self._tool_family.expects_text_arguments


def _recognise_family(families: Mapping[str, Any], sources: Sequence[str]) -> Any:
    source = "\n".join(sources)
    for family in families.values():
        if any(all(text in source for text in texts) for texts in family.markers):
            if not any(text in source for text in family.excluded_markers):
                return family
    return None


def _check_response_template(template: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Check a tokenizer's own response template; returns its fields.

    Raises:
        ModelLoadError: if transformers refuses it, or a pattern has a look-behind.
    """
    with importing_transformers():
        from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(dict(template))
    except Exception as error:
        raise ModelLoadError(f"response_template: {error}") from error
    for name, part in template["fields"].items():
        for side in ("open_pattern", "close_pattern"):
            if any(sign in str(part.get(side, "")) for sign in _LOOK_BEHIND_CONSTRUCTS):
                raise ModelLoadError(
                    f"response_template: {side} of {name!r} looks back, expected a pattern that "
                    "needs no text before it; EngineConfig.tool_call_parser and reasoning_parser "
                    "override the template"
                )
    return template["fields"]


def _content_close_pattern(template_fields: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Pattern of the delimiter that ends an answer's text; None if the template has none.

    The delimiter is not part of the text.

    Args:
        template_fields: fields of the response template. The field without an opening delimiter
            holds the answer's text.
    """
    import regex

    for part in template_fields.values():
        if literals_or_pattern(part, "open") is None:
            delimiter = literals_or_pattern(part, "close")
            return (
                "|".join(map(regex.escape, delimiter)) if isinstance(delimiter, list) else delimiter
            )
    return None
