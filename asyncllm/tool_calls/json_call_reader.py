"""JsonCallReader: parses calls in JSON, and streams their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

from asyncllm.tool_calls.call_reader import Event
from asyncllm.tool_calls.delimiters import Delimiters

_MAX_HEAD = 1024
"""Most characters of a key or a name."""

_WHITESPACE = " \t\r\n"
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\s]")

_State = Callable[[str, int], int]


class _NoCall(Exception):
    """The text is not that of a call."""


class JsonSyntax(NamedTuple):
    """Layout of calls in JSON.

    Attributes:
        kind: content of a region: "object", one call; "array", a list of calls; "arguments", if the
            opening delimiter has the name.
        name, arguments: the keys of a call's object.
    """

    kind: Literal["object", "array", "arguments"]
    name: str = "name"
    arguments: str = "arguments"


class JsonCallReader:
    """Parses calls in JSON, and streams their arguments.

    Brackets outside strings decide where a call ends, so a string may contain the closing
    delimiter. The arguments are parsed once, when they are complete; until then only their brackets
    are counted.

    Args:
        tools: names of the tools on offer. A call of another tool is text.
        opening: the delimiter before the region.
        name: the tool's name, if the opening has it.
        close: delimiters after the region; None if it ends with the JSON.
    """

    def __init__(
        self,
        syntax: JsonSyntax,
        tools: Collection[str],
        opening: str,
        name: str | None,
        close: Delimiters | None,
    ) -> None:
        self.events: list[Event] = []
        self._syntax = syntax
        self._tools = tools
        self._close = close
        # Text since the last complete call: earlier pieces, and the current one from ``_mark`` on.
        self._raw = [opening]
        self._mark = 0
        self._tail: str | None = None
        self._state: _State = {
            "object": self._open_object,
            "array": self._open_array,
            "arguments": self._open_arguments,
        }[syntax.kind]
        self._name = name
        self._reset()

    def _reset(self) -> None:
        self._begun = False
        self._ended = False
        self._key = ""
        self._string: list[str] = []
        self._room = _MAX_HEAD
        self._arguments: list[str] | None = None
        self._depth = 0
        self._quoted = False

    def push(self, text: str) -> str | None:
        if self._tail is not None:
            return self._push_close(text)
        self._mark = position = 0
        try:
            while position < len(text) and not self._ended:
                position = self._state(text, position)
        except _NoCall as error:
            position = error.args[0]
            self._raw.append(text[self._mark : position])
            return self._give_up(text[position:])
        self._raw.append(text[self._mark : position])
        if not self._ended:
            return None
        return text[position:] if self._close is None else self._push_close(text[position:])

    def _push_close(self, text: str) -> str | None:
        """Take white space and the closing delimiter; anything else is no call."""
        assert self._close is not None
        self._tail = (self._tail or "") + text
        rest = self._tail.lstrip()
        match, pending = self._close.match(rest)
        if match is not None:
            self._whole(0)
            return rest[match.end() :]
        if pending or not rest:
            return None
        self._raw.append(self._tail[: len(self._tail) - len(rest)])
        return self._give_up(rest)

    def finish(self) -> str:
        if self._tail is not None:
            assert self._close is not None
            rest = self._tail.lstrip()
            match, _ = self._close.match(rest, last=True)
            self._whole(0)
            return rest[match.end() :] if match is not None else ""
        if self._state == self._next_object:
            return ""
        return self._give_up("")

    def _give_up(self, rest: str) -> str:
        """Report the call so far as text; ``rest`` follows it."""
        self.events.append(Event("text", "".join(self._raw)))
        return rest

    # --- states: each takes text from a position on and returns where it stopped -------

    def _open_array(self, text: str, position: int) -> int:
        return self._expect(text, position, {"[": self._open_object})

    def _next_object(self, text: str, position: int) -> int:
        if text[position] == "]":
            self._ended = True
            return position + 1
        return self._expect(text, position, {",": self._open_object})

    def _open_object(self, text: str, position: int) -> int:
        return self._expect(text, position, {"{": self._open_key})

    def _open_key(self, text: str, position: int) -> int:
        return self._expect(text, position, {'"': self._in_key})

    def _in_key(self, text: str, position: int) -> int:
        end = self._read_string(text, position)
        if end is None:
            return len(text)
        self._key = self._take_string(end)
        if self._key not in (self._syntax.name, self._syntax.arguments, "id", "type"):
            raise _NoCall(end)
        self._state = self._colon
        return end

    def _colon(self, text: str, position: int) -> int:
        value = {
            self._syntax.name: self._open_name,
            self._syntax.arguments: self._open_arguments,
        }.get(self._key, self._open_other)
        return self._expect(text, position, {":": value})

    def _open_name(self, text: str, position: int) -> int:
        if self._name is not None:
            raise _NoCall(position)
        return self._expect(text, position, {'"': self._in_name})

    def _in_name(self, text: str, position: int) -> int:
        end = self._read_string(text, position)
        if end is None:
            return len(text)
        self._begin(self._take_string(end), end)
        self._state = self._after_value
        return end

    def _begin(self, name: str, position: int) -> None:
        if name not in self._tools:
            raise _NoCall(position)
        self._name = name
        self._begun = True
        self.events.append(Event("begin", name))
        if self._arguments:
            self.events.append(Event("arguments", "".join(self._arguments)))

    def _open_other(self, text: str, position: int) -> int:
        """Skip the value of a key without meaning, a string or a scalar."""
        character = text[position]
        if character in _WHITESPACE:
            return position + 1
        if character in "{[,}]":
            raise _NoCall(position)
        self._state = self._in_other_string if character == '"' else self._in_scalar
        return position + 1

    def _in_other_string(self, text: str, position: int) -> int:
        end = self._read_string(text, position)
        if end is None:
            return len(text)
        self._take_string(end)
        self._state = self._after_value
        return end

    def _in_scalar(self, text: str, position: int) -> int:
        match = _SCALAR_END.search(text, position)
        if match is None:
            return len(text)
        self._state = self._after_value
        return match.start()

    def _open_arguments(self, text: str, position: int) -> int:
        if text[position] in _WHITESPACE:
            return position + 1
        if text[position] != "{" or self._arguments is not None:
            raise _NoCall(position)
        if self._syntax.kind == "arguments":
            assert self._name is not None
            self._begin(self._name, position)
        self._arguments = []
        self._state = self._in_arguments
        return position

    def _in_arguments(self, text: str, position: int) -> int:
        end = self._end_of_value(text, position)
        piece = text[position : len(text) if end is None else end]
        assert self._arguments is not None
        self._arguments.append(piece)
        if end is not None and not _is_object("".join(self._arguments)):
            raise _NoCall(end)
        if self._begun:
            self.events.append(Event("arguments", piece))
        if end is None:
            return len(text)
        if self._syntax.kind == "arguments":
            self._end_of_call(end)
        else:
            self._state = self._after_value
        return end

    def _end_of_value(self, text: str, position: int) -> int | None:
        """Position after the bracket that closes the value; None if it is still to come."""
        while True:
            match = (_INSIDE if self._quoted else _OUTSIDE).search(text, position)
            if match is None:
                return None
            position = match.end()
            sign = match[0]
            if sign == '"':
                self._quoted = not self._quoted
            elif sign == "\\":
                if position == len(text):
                    self._state = self._escaped
                    return None
                position += 1
            elif sign in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return position

    def _escaped(self, text: str, position: int) -> int:
        """Take the character after a backslash that ended a piece."""
        assert self._arguments is not None
        self._arguments.append(text[position])
        if self._begun:
            self.events.append(Event("arguments", text[position]))
        self._state = self._in_arguments
        return position + 1

    def _after_value(self, text: str, position: int) -> int:
        if text[position] == "}":
            self._end_of_call(position + 1)
            return position + 1
        return self._expect(text, position, {",": self._open_key})

    def _end_of_call(self, end: int) -> None:
        if self._name is None:
            raise _NoCall(end)
        if self._arguments is None:
            self.events.append(Event("arguments", "{}"))
        if self._syntax.kind == "array":
            self._whole(end)
            self._state = self._next_object
        elif self._close is None:
            self._whole(end)
            self._ended = True
        else:
            self._ended = True

    def _whole(self, end: int) -> None:
        self.events.append(Event("done"))
        self._raw = []
        self._mark = end
        self._name = None
        self._reset()

    # --- pieces of the states ----------------------------------------------------------

    def _expect(self, text: str, position: int, states: Mapping[str, _State]) -> int:
        """Skip white space; the next character selects the next state."""
        character = text[position]
        if character in _WHITESPACE:
            return position + 1
        if character not in states:
            raise _NoCall(position)
        self._state = states[character]
        return position + 1

    def _read_string(self, text: str, position: int) -> int | None:
        """Read on in a string after its opening quote; returns the position after it, or None."""
        while position < len(text):
            if self._room == 0:
                raise _NoCall(position)
            character = text[position]
            position += 1
            self._room -= 1
            self._string.append(character)
            if self._quoted:
                self._quoted = False
            elif character == '"':
                return position
            else:
                self._quoted = character == "\\"
        return None

    def _take_string(self, position: int) -> str:
        source, self._string, self._room = "".join(self._string), [], _MAX_HEAD
        try:
            return json.loads('"' + source)
        except ValueError:
            raise _NoCall(position) from None


def _is_object(source: str) -> bool:
    try:
        return isinstance(json.loads(source, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
