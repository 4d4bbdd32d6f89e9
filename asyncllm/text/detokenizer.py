"""Detokenizer: converts one output's tokens to text incrementally, and finds stop strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from asyncllm.text.text_decoder import TextDecoder


class StopStrings:
    """Stop strings of a request, prepared once for all its outputs.

    Attributes:
        texts: the stop strings, in the caller's order.
        first_characters: their first characters.
    """

    __slots__ = ("_index", "first_characters", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self.first_characters = frozenset(text[0] for text in self.texts)
        self._index: StopIndex | None = None

    @property
    def index(self) -> StopIndex:
        """Index for searching. It is made at first use: most outputs need none."""
        if self._index is None:
            self._index = StopIndex(self.texts)
        return self._index


class StopIndex:
    """Index of stop strings, to search for their beginnings and ends.

    It holds UTF-8: a ``str`` with an emoji and one without are compared character by character.

    Attributes:
        stops: the stop strings, in the caller's order.
        longest_first: the stop strings with their indexes, the longest first.
        sorted_stops: the stop strings, sorted. If a text is a proper prefix of any, then of the
            one at the text's ``bisect_right``.
        sorted_endings: the reversed stop strings, sorted, without those that begin with another. If
            a reversed text begins with one of them, then with the one before its ``bisect_right``.
        first_bytes, last_bytes: first and last bytes of the stop strings.
        min_length, max_length: number of bytes of the shortest and of the longest stop string.
    """

    __slots__ = (
        "first_bytes",
        "last_bytes",
        "longest_first",
        "max_length",
        "min_length",
        "sorted_endings",
        "sorted_stops",
        "stops",
    )

    def __init__(self, texts: Sequence[str]) -> None:
        self.stops = [text.encode() for text in texts]
        lengths = [len(stop) for stop in self.stops]
        self.min_length, self.max_length = min(lengths), max(lengths)
        self.first_bytes = {stop[0] for stop in self.stops}
        self.last_bytes = {stop[-1] for stop in self.stops}
        by_index = [(stop, index) for index, stop in enumerate(self.stops)]
        self.longest_first = sorted(by_index, key=lambda pair: -len(pair[0]))
        self.sorted_stops = sorted(self.stops)
        self.sorted_endings: list[bytes] = []
        for ending in sorted([stop[::-1] for stop in self.stops]):
            if not self.sorted_endings or not ending.startswith(self.sorted_endings[-1]):
                self.sorted_endings.append(ending)

    def find_match(self, data: bytes, num_searched: int) -> tuple[int, int] | None:
        """Find the stop string that begins earliest of those that end after ``num_searched`` bytes;
        returns its start and its index in ``stops``."""
        first_end = max(num_searched + 1, self.min_length)
        last_bytes = self.last_bytes
        if last_bytes.isdisjoint(data[first_end - 1 :]):
            return None
        endings, max_length = self.sorted_endings, self.max_length
        backwards = data[::-1]
        ends: list[int] = []
        for i in range(len(data) - first_end + 1):
            if backwards[i] in last_bytes:
                reversed_text = backwards[i : i + max_length]
                index = bisect_right(endings, reversed_text) - 1
                if index >= 0 and reversed_text.startswith(endings[index]):
                    ends.append(len(data) - i)
        best: tuple[int, int] | None = None
        for end in reversed(ends):
            for stop, index in self.longest_first:
                start = end - len(stop)
                if best is not None and start > best[0]:
                    break
                if data.endswith(stop, 0, end):
                    best = (start, index) if best is None else min(best, (start, index))
                    break
        return best

    def find_beginning(self, data: bytes) -> int:
        """Find the start of the longest suffix that is a proper prefix of a stop string."""
        first_bytes, sorted_stops, length = self.first_bytes, self.sorted_stops, len(data)
        for start in range(max(0, length - self.max_length + 1), length):
            if data[start] in first_bytes:
                suffix = data[start:]
                index = bisect_right(sorted_stops, suffix)
                if index < len(sorted_stops) and sorted_stops[index].startswith(suffix):
                    return start
        return length


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and holds back as little as possible.

    A piece is searched together with the text held back before it. The match that begins earliest
    wins; if several stop strings match there, the first in ``stops`` wins. Without a match, the
    longest suffix that is a prefix of a stop string is held back, and the rest is released. So a
    match never begins in released text.

    Each character is checked once for the end of a stop string, and for a beginning until it is
    released, by one binary search each. So the time is linear in the text, even if it repeats one
    character: ``str.find`` may compare all of a stop string at each character.

    Args:
        stops: non-empty strings; several matchers may share StopStrings.
        include_stop: release the stop string too.

    Attributes:
        stopped: the stop string that was found, or None.
    """

    __slots__ = ("_first_characters", "_held_data", "_include_stop", "_stops", "stopped")

    def __init__(self, stops: Sequence[str] | StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._first_characters = self._stops.first_characters
        self._include_stop = include_stop
        self._held_data = b""
        self.stopped: str | None = None

    def push(self, text: str, *, search_stop_strings: bool = True) -> str:
        """Take the next piece and return the text that can be released.

        Args:
            search_stop_strings: False to ignore a stop string that ends in this piece.
        """
        held_data = self._held_data
        if not held_data and self._first_characters.isdisjoint(text):
            return text  # Usually no stop string begins in this piece.
        if not text:
            return ""
        index = self._stops.index
        data = held_data + text.encode()
        if search_stop_strings and (match := index.find_match(data, len(held_data))) is not None:
            start, stop_index = match
            self.stopped = self._stops.texts[stop_index]
            self._held_data = b""
            end = start + len(index.stops[stop_index]) if self._include_stop else start
            return data[:end].decode()
        start = index.find_beginning(data)
        self._held_data = data[start:]
        return data[:start].decode()

    def finish(self) -> str:
        """Release the held-back text after the last piece."""
        held_data, self._held_data = self._held_data, b""
        return held_data.decode()


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

    @classmethod
    def of_prompt(cls, token_ids: Sequence[int]) -> NullDetokenizer:
        """Make one for an output of any prompt."""
        return cls()

    @staticmethod
    def decode(token_ids: Sequence[int]) -> str:
        """Return an empty text, whatever the tokens."""
        return ""
