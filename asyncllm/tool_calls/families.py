"""Model families: their formats of reasoning and tool calls, as data.

For parsing answers, a family has fields of transformers' response templates
(``transformers.utils.chat_parsing``). A field has the delimiters ``open`` and ``close``, each a
literal or a pattern, and a rule that converts the text between them to a call. For grammars, a
family has a CallSyntax: the syntax of a call in the model's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncllm.tool_calls.xml_parameters import PARAMETER_PATTERN


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of a call in the chat template: ``begin``, the arguments, ``end``.

    Attributes:
        begin: text before the arguments; NAME in it stands for the tool's name.
        end: text after the arguments.
        separator: text between two calls.
        prefix, suffix: text before the first call and after the last.
        trigger: text that begins each call; if None, ``prefix + begin`` up to NAME.
        style: syntax of the arguments: JSON, or Qwen's ``<parameter=…>``.
        parallel: whether an answer may have several calls. In Harmony an answer ends with its
            first call.
        restart_text: text that may stand between reasoning and a call.
    """

    begin: str
    end: str
    separator: str = ""
    prefix: str = ""
    suffix: str = ""
    trigger: str | None = None
    style: Literal["json", "qwen_xml"] = "json"
    parallel: bool = True
    restart_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Base of ToolCallFamily and ReasoningFamily.

    Attributes:
        markers: lists of texts. The family matches if the model's chat template contains all texts
            of one list. If several families match, the first in the table is the model's.
        excluded_markers: texts of similar, unsupported formats. If the chat template contains one
            of them, the family does not match.
        ignored_pattern: pattern of output that is neither text, reasoning nor a call, such as the
            end of a list of calls.
        prompt_end: literal text that belongs to the answer if the prompt ends with it.
    """

    markers: tuple[tuple[str, ...], ...] = ()
    excluded_markers: tuple[str, ...] = ()
    ignored_pattern: str | None = None
    prompt_end: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallFamily(ModelFamily):
    """Format of a model family's tool calls.

    Attributes:
        calls_field: a response template's field ``tool_calls``, by which calls are parsed.
        call_syntax: syntax of calls in a grammar; None if unknown.
        expects_text_arguments: whether the chat template expects the arguments of past calls as
            JSON text, not as a dict.
    """

    calls_field: Mapping[str, Any]
    call_syntax: CallSyntax | None
    expects_text_arguments: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningFamily(ModelFamily):
    """Format of a model family's reasoning.

    Attributes:
        reasoning_field: a response template's field ``reasoning_content``, by which reasoning is
            parsed.
        begin, end: texts whose token ids mark the reasoning for the engine. The engine applies no
            grammar to reasoning.
        end_before_call: text that ends reasoning if a call must follow; empty if ``end`` also
            ends reasoning before a call.
    """

    reasoning_field: Mapping[str, Any]
    begin: str
    end: str
    end_before_call: str = ""


def _tool_call_transform(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_CALL_OBJECT_TRANSFORM = {"type": "function", "function": "{content}"}
_NAMED_CALL_TRANSFORM = _tool_call_transform("{name}", "{content}")
_NAMED_JSON_CALLS_FIELD = {"repeats": True, "content": "json", "transform": _NAMED_CALL_TRANSFORM}

# In Harmony, a message has a header, with its channel and recipient, and a body.
_HARMONY_START_PATTERN = r"(?:<\|start\|>assistant)?"
_HARMONY_RECIPIENT_PATTERN = r" ?to=functions\.(?P<name>[\w.-]+)"
# No two repeats of white space are adjacent: a backtracking search would try every split of them.
_HARMONY_CONSTRAINT_PATTERN = r"\s*(?:<\|constrain\|>\s*)?(?:json\s*)?<\|message\|>"
_HARMONY_CALL_PATTERN = (
    rf"{_HARMONY_START_PATTERN}<\|channel\|>(?:commentary|analysis)"
    rf"{_HARMONY_RECIPIENT_PATTERN}{_HARMONY_CONSTRAINT_PATTERN}"
    rf"|<\|start\|>assistant{_HARMONY_RECIPIENT_PATTERN}<\|channel\|>(?:commentary|analysis)"
    rf"{_HARMONY_CONSTRAINT_PATTERN}"
)
_HARMONY_IGNORED_PATTERN = (
    rf"{_HARMONY_START_PATTERN}<\|channel\|>(?:final|commentary)\s*"
    r"(?:<\|constrain\|>\w+)?<\|message\|>"
    r"|<\|(?:end|return|call)\|>"
)


def _deepseek_family(
    header: str, header_pattern: str, close: str, separator: str = "", *markers: str
) -> ToolCallFamily:
    """Tool family of a version of DeepSeek.

    Args:
        header: text between the beginning of a call and its arguments, with NAME for the name.
        header_pattern: pattern of a header, with the group "name".
        close: text after the arguments.
        separator: text before ``close``, and between two calls.
        markers: texts in the chat template that tell this version from later ones.
    """
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    return ToolCallFamily(
        calls_field={
            "open_pattern": rf"(?:{begin}\s*)?{call_begin}{header_pattern}",
            "close": close,
            **_NAMED_JSON_CALLS_FIELD,
        },
        call_syntax=CallSyntax(
            call_begin + header, separator + close, separator, begin, end, begin
        ),
        markers=((begin, *markers),),
        ignored_pattern=end,
        expects_text_arguments=True,
    )


TOOL_CALL_FAMILIES: Mapping[str, ToolCallFamily] = {
    "qwen3_coder": ToolCallFamily(
        calls_field={
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": PARAMETER_PATTERN},
            "transform": _NAMED_CALL_TRANSFORM,
        },
        call_syntax=CallSyntax(
            "<tool_call>\n<function=NAME>\n",
            "\n</function>\n</tool_call>",
            "\n",
            trigger="<tool_call>",
            style="qwen_xml",
        ),
        markers=(("<tool_call>", "<function=", "<parameter="),),
    ),
    "hermes": ToolCallFamily(
        calls_field={
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _CALL_OBJECT_TRANSFORM,
        },
        call_syntax=CallSyntax(
            '<tool_call>\n{"name": "NAME", "arguments": ',
            "}\n</tool_call>",
            separator="\n",
            trigger="<tool_call>",
        ),
        markers=(("<tool_call>",),),
        # "<arg_key>" occurs in GLM's format, "<function" in formats with calls as XML elements.
        excluded_markers=("<arg_key>", "<function"),
    ),
    "mistral_v11": ToolCallFamily(
        calls_field={
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            **_NAMED_JSON_CALLS_FIELD,
        },
        call_syntax=CallSyntax("[TOOL_CALLS]NAME[ARGS]", ""),
        markers=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    "mistral": ToolCallFamily(
        calls_field={
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": _tool_call_transform("{name}", "{arguments}"),
            "transform_each": True,
        },
        call_syntax=CallSyntax(
            '{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", "[TOOL_CALLS]"
        ),
        markers=(("[TOOL_CALLS]",),),
    ),
    "deepseek_v3": _deepseek_family(
        "function<｜tool▁sep｜>NAME\n```json\n",
        r"function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        "```<｜tool▁call▁end｜>",
        "\n",
        "```json",
    ),
    "deepseek_v31": _deepseek_family(
        "NAME<｜tool▁sep｜>", r"(?P<name>[^<\n]+)<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    ),
    "gpt_oss": ToolCallFamily(
        calls_field={
            "open_pattern": _HARMONY_CALL_PATTERN,
            "close": ["<|call|>", "<|end|>"],
            **_NAMED_JSON_CALLS_FIELD,
        },
        call_syntax=CallSyntax(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            "",
            parallel=False,
            restart_text="<|start|>assistant",
        ),
        markers=(("<|channel|>", "<|constrain|>", "<|message|>"),),
        ignored_pattern=_HARMONY_IGNORED_PATTERN,
        prompt_end="<|start|>assistant",
    ),
    "llama3_json": ToolCallFamily(
        calls_field={
            "open_pattern": (
                # White space is bounded, so that a whole delimiter fits MAX_DELIMITER_CHARACTERS.
                r'(?:;\s{0,64})?(?:<\|python_tag\|>\s{0,64})?(?=\{\s{0,64}")'
            ),
            "repeats": True,
            "content": "json",
            "transform": _tool_call_transform("{content.name}", "{content.parameters}"),
        },
        call_syntax=CallSyntax('{"name": "NAME", "parameters": ', "}", "; "),
        markers=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    ),
}


def _tag_family(begin: str, end: str, markers: tuple[tuple[str, ...], ...]) -> ReasoningFamily:
    """Family that writes its thoughts between two fixed texts."""
    field = {"open": begin, "close": end}
    return ReasoningFamily(field, begin, end, markers=markers, prompt_end=begin)


_THINK_TAG_FAMILY = _tag_family("<think>", "</think>", (("<think>",), ("</think>",)))

REASONING_FAMILIES: Mapping[str, ReasoningFamily] = {
    "deepseek_r1": _THINK_TAG_FAMILY,
    "qwen3": _THINK_TAG_FAMILY,
    "mistral": _tag_family("[THINK]", "[/THINK]", (("[THINK]",),)),
    "gpt_oss": ReasoningFamily(
        {
            "open_pattern": rf"{_HARMONY_START_PATTERN}<\|channel\|>analysis\s*<\|message\|>",
            "close": "<|end|>",
        },
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        markers=(("<|channel|>", "analysis", "<|message|>"),),
        ignored_pattern=_HARMONY_IGNORED_PATTERN,
        prompt_end="<|start|>assistant",
        end_before_call="<|end|>",
    ),
}
