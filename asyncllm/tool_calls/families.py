"""Families: formats of reasoning and tool calls, as data.

A format is a response template of transformers (``transformers.utils.chat_parsing``): each field
has the ``open`` and ``close`` of its text, literal or a pattern, and a rule that turns its content
into a call. A CallForm adds how the model's chat template writes a call, to make grammars from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call as the chat template writes it: ``begin``, the arguments, ``end``.

    Attributes:
        begin: text before the arguments; NAME in it stands for the tool's name.
        separator: text between two calls.
        prefix, suffix: text around all calls.
        trigger: text that always begins calls; None for ``prefix`` and ``begin`` up to the name.
        style: syntax of the arguments: JSON, or Qwen's ``<parameter=…>``.
        parallel: an answer may have several calls. In Harmony it ends with its first.
        restart: text that may come between thoughts and a call.
    """

    begin: str
    end: str
    separator: str = ""
    prefix: str = ""
    suffix: str = ""
    trigger: str | None = None
    style: Literal["json", "qwen_xml"] = "json"
    parallel: bool = True
    restart: str = ""


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """Format of a model family's tool calls.

    Attributes:
        calls: the template's field ``tool_calls``.
        form: how calls are written.
        markers: lists of texts; the chat template has all texts of at least one list. The first
            family in TOOL_FAMILIES that matches is the model's.
        excluded_markers: texts of similar, unknown formats; the chat template has none of them.
        ignored_pattern: pattern of output that is neither text nor call, such as the end of a list
            of calls.
        arguments_as_text: the chat template expects the arguments of past calls as JSON text, not
            as a dict.
        prompt_end: literal text at the prompt's end that belongs to the answer.
    """

    calls: Mapping[str, Any]
    form: CallForm | None
    markers: tuple[tuple[str, ...], ...]
    excluded_markers: tuple[str, ...] = ()
    ignored_pattern: str | None = None
    arguments_as_text: bool = False
    prompt_end: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Format of a model family's reasoning.

    Attributes:
        thoughts: the template's field ``reasoning_content``.
        begin, end: texts whose token ids the engine takes as the begin and end of thinking.
        end_before_call: the end of thinking where a call must follow; empty for ``end``.
        markers, excluded_markers, ignored_pattern, prompt_end: as for a ToolFamily.
    """

    thoughts: Mapping[str, Any]
    begin: str
    end: str
    markers: tuple[tuple[str, ...], ...]
    excluded_markers: tuple[str, ...] = ()
    ignored_pattern: str | None = None
    prompt_end: str = ""
    end_before_call: str = ""


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_WHOLE_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = _function("{name}", "{content}")

# Harmony: a message has a header, with its channel and recipient, and a body.
_START = r"(?:<\|start\|>assistant)?"
_RECIPIENT = r" ?to=functions\.(?P<name>[\w.-]+)"
_CONSTRAINT = r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
_HARMONY_CALL = (
    rf"{_START}<\|channel\|>(?:commentary|analysis){_RECIPIENT}{_CONSTRAINT}"
    rf"|<\|start\|>assistant{_RECIPIENT}<\|channel\|>(?:commentary|analysis){_CONSTRAINT}"
)
_HARMONY_IGNORED = (
    rf"{_START}<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>"
    r"|<\|(?:end|return|call)\|>"
)

TOOL_FAMILIES: Mapping[str, ToolFamily] = {
    "qwen3_coder": ToolFamily(
        calls={
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": _NAMED_CALL,
        },
        form=CallForm(
            "<tool_call>\n<function=NAME>\n",
            "\n</function>\n</tool_call>",
            "\n",
            trigger="<tool_call>",
            style="qwen_xml",
        ),
        markers=(("<tool_call>", "<function=", "<parameter="),),
    ),
    "hermes": ToolFamily(
        calls={
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _WHOLE_CALL,
        },
        form=CallForm(
            '<tool_call>\n{"name": "NAME", "arguments": ',
            "}\n</tool_call>",
            separator="\n",
            trigger="<tool_call>",
        ),
        markers=(("<tool_call>",),),
        # GLM's <arg_key>…</arg_key><arg_value>…</arg_value>, and calls as elements.
        excluded_markers=("<arg_key>", "<function"),
    ),
    "mistral_v11": ToolFamily(
        calls={
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        form=CallForm("[TOOL_CALLS]NAME[ARGS]", ""),
        markers=(("[TOOL_CALLS]", "[ARGS]"),),
    ),
    "mistral": ToolFamily(
        calls={
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": _function("{name}", "{arguments}"),
            "transform_each": True,
        },
        form=CallForm(
            '{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", "[TOOL_CALLS]"
        ),
        markers=(("[TOOL_CALLS]",),),
    ),
    "deepseek_v3": ToolFamily(
        calls={
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function"
            r"<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            "close": "```<｜tool▁call▁end｜>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        form=CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            trigger="<｜tool▁calls▁begin｜>",
        ),
        markers=(("<｜tool▁calls▁begin｜>", "```json"),),
        ignored_pattern="<｜tool▁calls▁end｜>",
        arguments_as_text=True,
    ),
    "deepseek_v31": ToolFamily(
        calls={
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
            r"(?P<name>[^<\n]+)<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        form=CallForm(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            trigger="<｜tool▁calls▁begin｜>",
        ),
        markers=(("<｜tool▁calls▁begin｜>",),),
        ignored_pattern="<｜tool▁calls▁end｜>",
        arguments_as_text=True,
    ),
    "gpt_oss": ToolFamily(
        calls={
            "open_pattern": _HARMONY_CALL,
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        form=CallForm(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            "",
            parallel=False,
            restart="<|start|>assistant",
        ),
        markers=(("<|channel|>", "<|constrain|>", "<|message|>"),),
        ignored_pattern=_HARMONY_IGNORED,
        prompt_end="<|start|>assistant",
    ),
    "llama3_json": ToolFamily(
        calls={
            "open_pattern": r'(?:;\s*)?(?:<\|python_tag\|>\s*)?(?=\{\s*")',
            "repeats": True,
            "content": "json",
            "transform": _function("{content.name}", "{content.parameters}"),
        },
        form=CallForm('{"name": "NAME", "parameters": ', "}", "; "),
        markers=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    ),
}

_THINK = ReasoningFamily(
    {"open": "<think>", "close": "</think>"},
    "<think>",
    "</think>",
    (("<think>",), ("</think>",)),
    prompt_end="<think>",
)

REASONING_FAMILIES: Mapping[str, ReasoningFamily] = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "mistral": ReasoningFamily(
        {"open": "[THINK]", "close": "[/THINK]"},
        "[THINK]",
        "[/THINK]",
        (("[THINK]",),),
        prompt_end="[THINK]",
    ),
    "gpt_oss": ReasoningFamily(
        {
            "open_pattern": rf"{_START}<\|channel\|>analysis\s*<\|message\|>",
            "close": "<|end|>",
        },
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        (("<|channel|>", "analysis", "<|message|>"),),
        ignored_pattern=_HARMONY_IGNORED,
        prompt_end="<|start|>assistant",
        end_before_call="<|end|>",
    ),
}
