"""Detokenizer: converts one output's tokens to text incrementally, and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from asyncllm.text.text_decoder import TextDecoder


class StopStrings:
    """Stop strings of a request, prepared once for all its outputs."""

    __slots__ = ("first_characters", "max_length", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self.first_characters = frozenset(text[0] for text in texts)
        self.max_length = max(map(len, texts), default=0)


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and holds back as little as possible.

    A piece is searched together with the text held back before it. The match that begins earliest
    wins; if several stop strings match there, the first in ``stops`` wins. Without a match, the
    longest suffix that is a prefix of a stop string is held back, and the rest is released. So a
    match never begins in released text.

    Args:
        stops: non-empty strings; several matchers may share StopStrings.
        include_stop: release the stop string too.

    Attributes:
        stopped: the stop string that was found, or None.
    """

    __slots__ = (
        "_first_characters",
        "_held_text",
        "_include_stop",
        "_max_stop_length",
        "_stops",
        "stopped",
    )

    def __init__(self, stops: Sequence[str] | StopStrings, *, include_stop: bool = False) -> None:
        prepared = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._stops = prepared.texts
        self._include_stop = include_stop
        self._first_characters = prepared.first_characters
        self._max_stop_length = prepared.max_length
        self._held_text = ""
        self.stopped: str | None = None

    def push(self, text: str, *, search_stop_strings: bool = True) -> str:
        """Take the next piece and return the text that can be released.

        Args:
            search_stop_strings: False to ignore a stop string that ends in this piece.
        """
        if not self._held_text and self._first_characters.isdisjoint(text):
            return text  # Usually no stop string begins in this piece.
        if not text:
            return ""
        buffer = self._held_text + text
        if search_stop_strings:
            start = self._find_stop(buffer)
            if self.stopped is not None:
                self._held_text = ""
                return buffer[: start + len(self.stopped) if self._include_stop else start]
        released_length = len(buffer) - self._length_to_hold(buffer)
        self._held_text = buffer[released_length:]
        return buffer[:released_length]

    def finish(self) -> str:
        """Release the held-back text after the last piece."""
        held_text, self._held_text = self._held_text, ""
        return held_text

    def _find_stop(self, buffer: str) -> int:
        best = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop, max(0, len(self._held_text) - len(stop) + 1))
            if 0 <= start < best:
                best = start
                self.stopped = stop
        return best

    def _length_to_hold(self, buffer: str) -> int:
        tail = buffer[-(self._max_stop_length - 1) :] if self._max_stop_length > 1 else ""
        if self._first_characters.isdisjoint(tail):
            return 0
        for i, character in enumerate(tail):
            if character in self._first_characters:
                suffix = tail[i:]
                for stop in self._stops:
                    if len(stop) > len(suffix) and stop.startswith(suffix):
                        return len(suffix)
        return 0


class Detokenizer:
    """Converts the tokens of one output to text, up to a stop string.

    Not thread-safe. The caller does not push tokens whose text is not part of the output (EOS, stop
    tokens).

    Args:
        decoder: decoder that no other output uses.
        stop: non-empty strings that end the output.
        include_stop_str_in_output: keep the stop string at the end of the text.
        min_tokens: number of leading tokens in which stop strings are ignored.

    Attributes:
        stopped: the stop string that ended the output, or None.
    """

    __slots__ = ("_decoder", "_matcher", "_min_tokens_left", "stopped")

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stop: Sequence[str] | StopStrings = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop, include_stop=include_stop_str_in_output) if stop else None
        self._min_tokens_left = min_tokens
        self.stopped: str | None = None

    def push(self, token_id: int, *, search_stop_strings: bool = True) -> str:
        """Take the next token and return the text that can be released now.

        Args:
            search_stop_strings: False for a token that no stop string may overlap.

        Raises:
            Exception: any error of the decoder; the caller must end only this output.
            RuntimeError: after a stop string was found.
        """
        text = self._decoder.push(token_id)
        matcher = self._matcher
        if matcher is None:
            return text
        if self.stopped is not None:
            raise RuntimeError(f"the output ended with the stop string {self.stopped!r}")
        if not search_stop_strings:
            self._min_tokens_left -= 1
            return matcher.finish() + text
        if self._min_tokens_left > 0:
            self._min_tokens_left -= 1
            return matcher.push(text, search_stop_strings=False)
        text = matcher.push(text)
        self.stopped = matcher.stopped
        return text

    def finish(self) -> str:
        """Release the rest of the text: held-back text, and replacement characters for an
        unfinished character. Empty after a stop string."""
        if self.stopped is not None:
            return ""
        text = self._decoder.flush()
        return text if self._matcher is None else self._matcher.finish() + text


class NullDetokenizer:
    """Detokenizer whose text is always empty, for ``SamplingParams.detokenize=False``."""

    stopped: str | None = None

    def push(self, token_id: int, *, search_stop_strings: bool = True) -> str:
        return ""

    def finish(self) -> str:
        return ""

    @staticmethod
    def decode(token_ids: Sequence[int]) -> str:
        """Return an empty text, whatever the tokens."""
        return ""
