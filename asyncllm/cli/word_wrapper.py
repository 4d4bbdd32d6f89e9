"""WordWrapper: wraps streamed text at words as it arrives."""

from __future__ import annotations

import re
from typing import TextIO

_WORD_OR_SPACE_PATTERN = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrapper:
    """Writer that indents text and breaks lines between words. It keeps an incomplete word until
    its end is written, because the word may not fit into the line.

    Args:
        out: text file to write to; flushed after every piece.
        width: characters in a line, margin included.
        margin: spaces before each line.
    """

    def __init__(self, out: TextIO, width: int, margin: int = 2) -> None:
        self._out = out
        self._margin = " " * margin
        self._text_width = max(width - margin, 8)
        self._column = 0
        self._started = False
        self._pending_space = ""
        self._pending_word = ""

    def write(self, text: str) -> None:
        for part in _WORD_OR_SPACE_PATTERN.findall(text):
            if part == "\n":
                self._write_word()
                self._pending_space = ""
                if self._started:
                    self._out.write("\n")
                self._column = 0
            elif part.isspace():
                self._write_word()
                self._pending_space += part
            else:
                self._pending_word += part
        self._out.flush()

    def finish(self) -> None:
        """Write the incomplete word, and end the line."""
        self._write_word()
        if self._column:
            self._out.write("\n")
        self._out.flush()

    def _write_word(self) -> None:
        if not self._pending_word:
            return
        if (
            self._column
            and self._column + len(self._pending_space) + len(self._pending_word) > self._text_width
        ):
            self._out.write("\n")
            self._column = 0
            self._pending_space = ""
        if not self._column:
            self._out.write(self._margin)
        self._out.write(self._pending_space + self._pending_word)
        self._column += len(self._pending_space) + len(self._pending_word)
        self._started = True
        self._pending_space = self._pending_word = ""
