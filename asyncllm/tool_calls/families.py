"""Families: how models write reasoning and tool calls, as data.

A format is written as transformers' response templates are
(``transformers.utils.chat_parsing``): a field has the ``open`` and ``close`` of its text, literal
or as a pattern, and how its content becomes a call. What a template cannot say is beside it: how
the model's chat template writes a call, from which a grammar is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call as the chat template writes it: ``begin``, the arguments, ``end``.

    Attributes:
        begin: NAME in it stands for the tool's.
        separator: between two calls.
        prefix, suffix: around all of them.
        trigger: what begins calls and no text; None for ``prefix`` and ``begin`` up to the name.
        style: of the arguments: JSON, or Qwen's ``<parameter=…>``.
        parallel: an answer may have several. Harmony's ends with its first.
        restart: what may come before a call behind thoughts.
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
    """A format of calls.

    Attributes:
        calls: the template's field ``tool_calls``.
        form: how calls are written.
        signs: the chat template has one of these lists of texts, all of a list. The first family
            in TOOL_FAMILIES for which that is so is the model's.
        unlike: it has none of these, which are signs of a format that is not known.
        skip: a pattern of what is neither text nor call, as the end of a list of calls.
        arguments_as_text: the chat template joins a past call's arguments as JSON text, where
            others write a dict as JSON.
        prompt_end: what the prompt ends in and is a part of the answer, literally.
    """

    calls: Mapping[str, Any]
    form: CallForm | None
    signs: tuple[tuple[str, ...], ...]
    unlike: tuple[str, ...] = ()
    skip: str | None = None
    arguments_as_text: bool = False
    prompt_end: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """A format of reasoning.

    Attributes:
        thoughts: the template's field ``reasoning_content``.
        begin, end: what thinking begins and ends with as the engine looks for it, by token id.
        end_before_call: what it ends with where a call has to follow; ``end`` if empty.
        signs, unlike, skip, prompt_end: as of a ToolFamily.
    """

    thoughts: Mapping[str, Any]
    begin: str
    end: str
    signs: tuple[tuple[str, ...], ...]
    unlike: tuple[str, ...] = ()
    skip: str | None = None
    prompt_end: str = ""
    end_before_call: str = ""


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_WHOLE = {"type": "function", "function": "{content}"}
_NAMED = _function("{name}", "{content}")

# Harmony: a message has a header, with its channel and recipient, and a body.
_START = r"(?:<\|start\|>assistant)?"
_RECIPIENT = r" ?to=functions\.(?P<name>[\w.-]+)"
_CONSTRAINT = r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
_HARMONY_CALL = (
    rf"{_START}<\|channel\|>(?:commentary|analysis){_RECIPIENT}{_CONSTRAINT}"
    rf"|<\|start\|>assistant{_RECIPIENT}<\|channel\|>(?:commentary|analysis){_CONSTRAINT}"
)
_HARMONY_SKIP = (
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
            "transform": _NAMED,
        },
        form=CallForm(
            "<tool_call>\n<function=NAME>\n",
            "\n</function>\n</tool_call>",
            "\n",
            trigger="<tool_call>",
            style="qwen_xml",
        ),
        signs=(("<tool_call>", "<function=", "<parameter="),),
    ),
    "hermes": ToolFamily(
        calls={
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _WHOLE,
        },
        form=CallForm(
            '<tool_call>\n{"name": "NAME", "arguments": ',
            "}\n</tool_call>",
            separator="\n",
            trigger="<tool_call>",
        ),
        signs=(("<tool_call>",),),
        # GLM's <arg_key>…</arg_key><arg_value>…</arg_value>, and calls as elements.
        unlike=("<arg_key>", "<function"),
    ),
    "mistral_v11": ToolFamily(
        calls={
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
        form=CallForm("[TOOL_CALLS]NAME[ARGS]", ""),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
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
        signs=(("[TOOL_CALLS]",),),
    ),
    "deepseek_v3": ToolFamily(
        calls={
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>function"
            r"<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
            "close": "```<｜tool▁call▁end｜>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
        form=CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            trigger="<｜tool▁calls▁begin｜>",
        ),
        signs=(("<｜tool▁calls▁begin｜>", "```json"),),
        skip="<｜tool▁calls▁end｜>",
        arguments_as_text=True,
    ),
    "deepseek_v31": ToolFamily(
        calls={
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
            r"(?P<name>[^<\n]+)<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
        form=CallForm(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            trigger="<｜tool▁calls▁begin｜>",
        ),
        signs=(("<｜tool▁calls▁begin｜>",),),
        skip="<｜tool▁calls▁end｜>",
        arguments_as_text=True,
    ),
    "gpt_oss": ToolFamily(
        calls={
            "open_pattern": _HARMONY_CALL,
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": _NAMED,
        },
        form=CallForm(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            "",
            parallel=False,
            restart="<|start|>assistant",
        ),
        signs=(("<|channel|>", "<|constrain|>", "<|message|>"),),
        skip=_HARMONY_SKIP,
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
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
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
        skip=_HARMONY_SKIP,
        prompt_end="<|start|>assistant",
        end_before_call="<|end|>",
    ),
}
