"""MessageParser: splits a model's answer into text, reasoning and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from asyncllm.outputs import CompletionOutput, Delta, ToolCall, ToolCallDelta
from asyncllm.tool_calls.call_reader import CallEvent, CallReader
from asyncllm.tool_calls.chat_syntax import IGNORED_DELIMITER_NAME, TOOL_CALLS_FIELD, ChatSyntax
from asyncllm.tool_calls.delimiters import DelimiterMatch, DelimiterScanner

_MAX_PIECE_CHARACTERS = 1024
"""Maximum number of characters that are parsed at a time. After each tool call the rest of the
piece is scanned again, so a long piece with many calls would take quadratic time."""

_CALL_ID_CHARACTERS = string.digits + string.ascii_lowercase


def make_call_id() -> str:
    """Make a random id of nine letters and digits: Mistral's templates refuse any other id."""
    return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(9))


class TrimmedText:
    """Text between delimiters, without the white space that belongs to the format.

    White space next to a delimiter is dropped, unless text stands before and after the delimiter.

    Attributes:
        has_text: whether there was text other than white space.
    """

    __slots__ = ("_held_space", "_is_behind_delimiter", "has_text")

    def __init__(self, is_behind_delimiter: bool) -> None:
        self._is_behind_delimiter = is_behind_delimiter
        self.has_text = False
        self._held_space: list[str] = []

    def push(self, text: str) -> str:
        """Take a piece; returns the text to release. White space at its end is held back."""
        body = text.rstrip()
        if not body:
            if text:
                self._held_space.append(text)
            return ""
        space = "".join(self._held_space)
        self._held_space = [text[len(body) :]] if len(body) < len(text) else []
        if self._is_behind_delimiter:
            if not self.has_text:
                space, body = "", body.lstrip()
            self._is_behind_delimiter = False
        self.has_text = True
        return space + body if space else body

    def add_delimiter(self) -> None:
        self._is_behind_delimiter = True

    def finish(self) -> str:
        space, self._held_space = "".join(self._held_space), []
        return "" if self._is_behind_delimiter else space


class OutputParser:
    """Parser of the text of one output, which splits it into text, reasoning and calls.

    The result does not depend on how the text is cut into deltas. A call that is malformed,
    unfinished, or names an unknown tool is text.

    Args:
        syntax: chat syntax of the output.
        tools: schema of the parameters of each tool, by tool name.
        answer_begin: beginning of the answer that is already part of the prompt.
        one_call: treat everything after the first call as text.
        calls_may_follow_text: calls and reasoning may follow text. Under a grammar that allows text
            only as the answer, this is False, and a delimiter in the text is part of the text.

    Attributes:
        calls: the complete calls.
    """

    def __init__(
        self,
        syntax: ChatSyntax,
        tools: Mapping[str, Mapping[str, Any]],
        answer_begin: str,
        *,
        one_call: bool = False,
        calls_may_follow_text: bool = True,
    ) -> None:
        self.calls: list[ToolCall] = []
        self._reasoning_parts: list[str] = []
        self._new_text: list[str] = []
        self._new_reasoning: list[str] = []
        self._new_calls: list[ToolCallDelta] = []
        self._syntax = syntax
        self._tools = tools
        self._one_call = one_call
        self._calls_may_follow_text = calls_may_follow_text
        self._content_text = TrimmedText(is_behind_delimiter=bool(answer_begin))
        self._reasoning_text = TrimmedText(is_behind_delimiter=True)
        self._scanner = DelimiterScanner(syntax.delimiters)
        self._reasoning_scanner: DelimiterScanner | None = None
        self._call_reader: CallReader | None = None
        self._call_id = self._call_name = ""
        self._call_arguments: list[str] = []
        self._num_calls_begun = 0
        self._prompt_characters_left = 0
        if answer_begin:
            self._parse_piece(answer_begin, is_last=False)
            if self._reasoning_scanner is None:
                self._prompt_characters_left = len(answer_begin)

    def push(self, text: str) -> None:
        for begin in range(0, len(text), _MAX_PIECE_CHARACTERS):
            self._parse_piece(text[begin : begin + _MAX_PIECE_CHARACTERS], is_last=False)

    @property
    def reasoning(self) -> str:
        """The reasoning parsed so far."""
        return "".join(self._reasoning_parts)

    def finish(self) -> None:
        """End the output: no more text will come."""
        self._parse_piece("", is_last=True)
        self._add_reasoning(self._reasoning_text.finish())
        if rest := self._content_text.finish():
            self._new_text.append(rest)

    def take_increments(self) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """Remove and return the new text, the new reasoning, and the new fragments of calls."""
        text, reasoning = "".join(self._new_text), "".join(self._new_reasoning)
        calls = _join_fragments(self._new_calls)
        for parts in (self._new_text, self._new_reasoning, self._new_calls):
            parts.clear()
        return text, reasoning, calls

    def _parse_piece(self, text: str, is_last: bool) -> None:
        while True:
            if self._call_reader is not None:
                rest = self._call_reader.push(text)
                if rest is None and is_last:
                    rest = self._call_reader.finish()
                self._handle_events(self._call_reader.events)
                if rest is None:
                    return
                self._call_reader = None
            elif self._reasoning_scanner is not None:
                thought, delimiter, rest = self._reasoning_scanner.feed(text, is_last)
                self._add_reasoning(self._reasoning_text.push(thought))
                if delimiter is None:
                    return
                self._reasoning_scanner = None
                self._reasoning_text.add_delimiter()
            else:
                content, delimiter, rest = self._scanner.feed(text, is_last)
                self._add_text(content)
                if delimiter is None:
                    return
                if self._is_text(delimiter):
                    self._add_text(delimiter.text or rest[:1])
                    # An empty match would be found again at the same place: skip one character.
                    rest = rest if delimiter.text else rest[1:]
                else:
                    self._begin_reasoning_or_calls(delimiter)
            text = rest

    def _is_text(self, delimiter: DelimiterMatch) -> bool:
        if self._content_text.has_text and not self._calls_may_follow_text:
            return True
        return delimiter.name == TOOL_CALLS_FIELD and self._one_call and bool(self.calls)

    def _begin_reasoning_or_calls(self, delimiter: DelimiterMatch) -> None:
        self._prompt_characters_left = 0
        if delimiter.name == TOOL_CALLS_FIELD:
            self._call_reader = self._syntax.make_call_reader(self._tools, delimiter)
            return
        self._content_text.add_delimiter()
        close_delimiters = self._syntax.reasoning_close_delimiters
        if delimiter.name != IGNORED_DELIMITER_NAME and close_delimiters is not None:
            self._reasoning_scanner = DelimiterScanner(close_delimiters)

    def _add_text(self, text: str) -> None:
        if self._prompt_characters_left:
            dropped = min(len(text), self._prompt_characters_left)
            self._prompt_characters_left -= dropped
            text = text[dropped:]
        if released := self._content_text.push(text):
            self._new_text.append(released)

    def _add_reasoning(self, thought: str) -> None:
        if thought:
            self._new_reasoning.append(thought)
            self._reasoning_parts.append(thought)

    def _handle_events(self, events: list[CallEvent]) -> None:
        for kind, text in events:
            if kind == "text":
                self._add_text(text)
            elif kind == "begin":
                self._call_id, self._call_name, self._call_arguments = make_call_id(), text, []
                self._new_calls.append(ToolCallDelta(self._num_calls_begun, self._call_id, text))
                self._num_calls_begun += 1
            elif kind == "arguments":
                self._call_arguments.append(text)
                self._new_calls.append(ToolCallDelta(self._num_calls_begun - 1, arguments=text))
            else:
                self._new_calls.append(ToolCallDelta(self._num_calls_begun - 1, done=True))
                self.calls.append(
                    ToolCall(self._call_id, self._call_name, "".join(self._call_arguments))
                )
                self._content_text.add_delimiter()
        events.clear()


class MessageParser:
    """Parser of the outputs of one request, delta by delta, on the reader's thread.

    Args:
        syntax, tools, one_call, calls_may_follow_text: as for OutputParser.

    Attributes:
        syntax: chat syntax of the outputs.
        answer_begin: text at the prompt's end with which the answer begins. The caller sets it
            before it reads the first delta.
    """

    def __init__(
        self,
        syntax: ChatSyntax,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        one_call: bool = False,
        calls_may_follow_text: bool = True,
    ) -> None:
        self.answer_begin = ""
        self.syntax = syntax
        self._make_output_parser = partial(
            OutputParser,
            syntax,
            tools,
            one_call=one_call,
            calls_may_follow_text=calls_may_follow_text,
        )
        self._output_parsers: dict[int, OutputParser] = {}
        self._unfinished_outputs: set[int] = set()
        self._is_interrupted = False

    def push(self, delta: Delta) -> Delta:
        """Copy ``delta`` with its text split into text, reasoning and calls."""
        if self._is_interrupted and self._unfinished_outputs and not delta.finish_reason:
            delta = replace(delta, index=min(self._unfinished_outputs))
        output = self._output_parser(delta.index)
        output.push(delta.text)
        if delta.finish_reason is not None or self._is_interrupted:
            output.finish()
            self._unfinished_outputs.discard(delta.index)
        reason = delta.finish_reason
        if reason == "stop" and output.calls:
            reason = "tool_calls"
        text, reasoning, calls = output.take_increments()
        if text == delta.text and not reasoning and not calls and reason == delta.finish_reason:
            return delta
        return replace(
            delta, text=text, finish_reason=reason, reasoning=reasoning, tool_calls=calls
        )

    def mark_interrupted(self) -> bool:
        """Mark all outputs as ended by an exception in the stream.

        Returns:
            Whether an output may hold back text. If so, push an empty delta to get the text.
        """
        self._is_interrupted = True
        return bool(self._unfinished_outputs)

    def add_reasoning_and_calls(self, output: CompletionOutput) -> CompletionOutput:
        """Copy ``output`` with the reasoning and tool calls parsed from its deltas."""
        parsed = self._output_parser(output.index)
        return replace(output, reasoning=parsed.reasoning, tool_calls=tuple(parsed.calls))

    def _output_parser(self, index: int) -> OutputParser:
        parser = self._output_parsers.get(index)
        if parser is None:
            parser = self._make_output_parser(self.answer_begin)
            self._output_parsers[index] = parser
            self._unfinished_outputs.add(index)
        return parser


def _join_fragments(deltas: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Join adjacent fragments of the same call."""
    joined: list[ToolCallDelta] = []
    for _, group in groupby(deltas, key=attrgetter("index")):
        first, *others = fragments = list(group)
        if others:
            arguments = "".join(fragment.arguments for fragment in fragments)
            first = replace(first, arguments=arguments, done=fragments[-1].done)
        joined.append(first)
    return tuple(joined)
