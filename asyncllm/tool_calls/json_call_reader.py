"""JsonCallReader: parses tool calls in JSON, and streams their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from asyncllm.tool_calls.call_reader import CallEvent
from asyncllm.tool_calls.delimiters import Delimiters

_MAX_JSON_TOKEN_CHARACTERS = 1024
"""Maximum number of characters of a key, a tool's name, or any other value but the arguments."""

_SPACE_PATTERN = re.compile(r"[ \t\r\n]*")
_JSON_TOKEN_PATTERN = re.compile(
    r'[{}\[\]:,]|"(?:[^"\\]|\\.)*"|[^"{}\[\]:,][^,}\s]*(?=[,}\s])', re.DOTALL
)
_OUTSIDE_STRING_PATTERN = re.compile(r'["{}\[\]]')
_INSIDE_STRING_PATTERN = re.compile(r'["\\]')

_State = Literal[
    "array", "object", "key", "colon", "name", "arguments", "other", "inside", "after", "next"
]
_STATE_TRANSITIONS: Mapping[_State, Mapping[str, _State]] = {
    "array": {"[": "object"},
    "object": {"{": "key"},
    "key": {'"': "colon"},
    "colon": {":": "other"},
    "name": {'"': "after"},
    "arguments": {"{": "inside"},
    "after": {",": "key", "}": "next"},
    "next": {",": "object", "]": "next"},
}
"""State machine: for each state, the first characters of the allowed tokens and the next states.

Two states have no entry. In "other" any string or scalar is allowed; "inside" is within the
arguments, where only brackets are counted.
"""


class _NotACallError(Exception):
    """Error for text that is no call.

    Its argument is the position in the text at which the invalid call ends.
    """


class JsonSyntax(NamedTuple):
    """Layout of tool calls in JSON.

    Attributes:
        kind: JSON between the delimiters: "object" for one call; "array" for a list of calls;
            "arguments" for the arguments alone, if the opening delimiter contains the tool's name.
        name_key, arguments_key: keys of a call's object with the tool's name and the arguments.
    """

    kind: Literal["object", "array", "arguments"]
    name_key: str = "name"
    arguments_key: str = "arguments"


class JsonCallReader:
    """CallReader for calls in JSON, which streams their arguments.

    A call ends where its brackets outside strings are balanced, so a string may contain the closing
    delimiter. The arguments are parsed once, when they are complete; until then only their brackets
    are counted.

    Args:
        syntax: layout of the calls.
        tool_names: names of the known tools. A call of another tool is text.
        opening_delimiter: the delimiter before the JSON.
        tool_name: the tool's name, if the opening delimiter contains it.
        closing_delimiters: one of these must follow the JSON; None if nothing must follow it.
    """

    def __init__(
        self,
        syntax: JsonSyntax,
        tool_names: Collection[str],
        opening_delimiter: str,
        tool_name: str | None,
        closing_delimiters: Delimiters | None,
    ) -> None:
        self.events: list[CallEvent] = []
        self._syntax = syntax
        self._tool_names = tool_names
        self._closing_delimiters = closing_delimiters
        # Text since the last complete call: ``_raw_texts`` is parsed, ``_unparsed_text`` is not.
        self._raw_texts = [opening_delimiter]
        self._unparsed_text = ""
        self._raw_end = 0
        # Unparsed text after the JSON, without the white space before it.
        self._text_after_json: str | None = None
        self._state: _State = syntax.kind
        self._tool_name = tool_name
        self._has_region_ended = False
        self._reset_call()

    def _reset_call(self) -> None:
        self._has_call_begun = False
        self._current_key = ""
        self._arguments: list[str] | None = None
        self._bracket_depth = 0
        self._is_in_string = self._is_escaped = False

    def push(self, text: str) -> str | None:
        if self._text_after_json is not None:
            return self._parse_closing_delimiter(text)
        text, self._raw_end = self._unparsed_text + text, 0
        try:
            position = self._parse_json(text)
        except _NotACallError as error:
            position = error.args[0]
            self._raw_texts.append(text[self._raw_end : position])
            return self._emit_as_text(text[position:])
        self._raw_texts.append(text[self._raw_end : position])
        self._unparsed_text = text[position:]
        if not self._has_region_ended:
            return None
        if self._closing_delimiters is None:
            return self._unparsed_text
        return self._parse_closing_delimiter(self._unparsed_text)

    def _parse_json(self, text: str) -> int:
        """Parse tokens and arguments; returns the position of the first unfinished token."""
        position = 0
        while not self._has_region_ended and position < len(text):
            if self._state == "inside":
                position = self._read_arguments(text, position)
                continue
            match = _SPACE_PATTERN.match(text, position)
            assert match is not None
            position = match.end()
            if position == len(text):
                break
            first = text[position]
            in_value = self._state == "other"
            if first in "{[,}]:" if in_value else first not in _STATE_TRANSITIONS[self._state]:
                raise _NotACallError(position)
            match = _JSON_TOKEN_PATTERN.match(text, position)
            end = len(text) if match is None else match.end()
            if end - position > _MAX_JSON_TOKEN_CHARACTERS:
                raise _NotACallError(position + _MAX_JSON_TOKEN_CHARACTERS)
            if match is None:
                break
            position = self._process_token(match[0], position, end)
        return position

    def _parse_closing_delimiter(self, text: str) -> str | None:
        """Parse white space and the closing delimiter. After anything else, the text is no call."""
        assert self._closing_delimiters is not None
        text = (self._text_after_json or "") + text
        rest = text.lstrip()
        self._raw_texts.append(text[: len(text) - len(rest)])
        self._text_after_json = rest
        match, pending = self._closing_delimiters.match(rest)
        if match is not None:
            self._complete_call(0)
            return rest[match.end() :]
        return None if pending or not rest else self._emit_as_text(rest)

    def finish(self) -> str:
        if self._text_after_json is not None:
            assert self._closing_delimiters is not None
            rest = self._text_after_json
            match, _ = self._closing_delimiters.match(rest, is_last=True)
            self._complete_call(0)
            return rest[match.end() :] if match is not None else ""
        self._raw_texts.append(self._unparsed_text)
        return "" if self._state == "next" else self._emit_as_text("")

    def _emit_as_text(self, text_after: str) -> str:
        """Report an invalid call's text as plain text; returns ``text_after``, which is still to be
        parsed."""
        self.events.append(CallEvent("text", "".join(self._raw_texts)))
        return text_after

    def _process_token(self, token: str, start: int, end: int) -> int:
        """Process a JSON token (bracket, string or delimiter); returns the position in the text at
        which parsing continues."""
        state = self._state
        if state == "key":
            self._current_key = _parse_string(token, end)
            known_keys = (self._syntax.name_key, self._syntax.arguments_key, "id", "type")
            if self._current_key not in known_keys:
                raise _NotACallError(end)
        elif state == "name":
            self._begin_call(_parse_string(token, end), end)
        elif state == "arguments":
            if self._arguments is not None:
                raise _NotACallError(start)
            if self._syntax.kind == "arguments":
                assert self._tool_name is not None
                self._begin_call(self._tool_name, start)
            self._arguments, end = [], start
        elif state == "other" and token[0] == '"':
            _parse_string(token, end)
        self._state = "after" if state == "other" else _STATE_TRANSITIONS[state][token[0]]
        if state == "colon" and self._current_key == self._syntax.arguments_key:
            self._state = "arguments"
        elif state == "colon" and self._current_key == self._syntax.name_key:
            if self._tool_name is not None:
                raise _NotACallError(end)
            self._state = "name"
        elif token == "}":
            self._end_call(end)
        elif token == "]":
            self._has_region_ended = True
        return end

    def _begin_call(self, name: str, position: int) -> None:
        if name not in self._tool_names:
            raise _NotACallError(position)
        self._tool_name = name
        self._has_call_begun = True
        self.events.append(CallEvent("begin", name))
        if self._arguments:
            self.events.append(CallEvent("arguments", "".join(self._arguments)))

    def _read_arguments(self, text: str, position: int) -> int:
        end = self._find_value_end(text, position)
        piece = text[position:end]
        assert self._arguments is not None
        self._arguments.append(piece)
        if end is not None and not _is_object("".join(self._arguments)):
            raise _NotACallError(end)
        if self._has_call_begun:
            self.events.append(CallEvent("arguments", piece))
        if end is None:
            return len(text)
        self._state = "after"
        if self._syntax.kind == "arguments":
            self._end_call(end)
        return end

    def _find_value_end(self, text: str, position: int) -> int | None:
        """Position after the bracket that closes the value; None if the text ends before it."""
        if self._is_escaped and position < len(text):
            self._is_escaped = False
            position += 1
        while True:
            pattern = _INSIDE_STRING_PATTERN if self._is_in_string else _OUTSIDE_STRING_PATTERN
            match = pattern.search(text, position)
            if match is None:
                return None
            position = match.end()
            sign = match[0]
            if sign == '"':
                self._is_in_string = not self._is_in_string
            elif sign == "\\":
                if position == len(text):
                    self._is_escaped = True
                    return None
                position += 1
            elif sign in "{[":
                self._bracket_depth += 1
            else:
                self._bracket_depth -= 1
                if self._bracket_depth == 0:
                    return position

    def _end_call(self, end_position: int) -> None:
        if self._tool_name is None:
            raise _NotACallError(end_position)
        if self._arguments is None:
            self.events.append(CallEvent("arguments", "{}"))
        is_array = self._syntax.kind == "array"
        self._has_region_ended = not is_array
        if is_array or self._closing_delimiters is None:
            self._complete_call(end_position)

    def _complete_call(self, end_position: int) -> None:
        self.events.append(CallEvent("done"))
        self._raw_texts = []
        self._raw_end = end_position
        self._tool_name = None
        self._reset_call()


def _parse_string(string: str, end: int) -> str:
    try:
        return json.loads(string)
    except ValueError:
        raise _NotACallError(end) from None


def _is_object(source: str) -> bool:
    try:
        return isinstance(json.loads(source, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
