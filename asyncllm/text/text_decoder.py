"""Text decoders: token ids to text one by one, equal to decoding all at once.

There is a class for each family of tokenizer decoders:

- ByteLevelDecoder: each token is a sequence of bytes (GPT-2, Qwen, Llama 3).
- ByteFallbackDecoder: each token is a string or a single byte (Llama 2, Mistral, Gemma).
- WindowDecoder: any other, by decoding the last few tokens anew.

Each is made for one output and knows the end of its prompt: a character that the prompt left
half-finished appears in the output that finishes it, and nothing else of the prompt does.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_PRIMING_TOKENS = 6
_PRIMING_LIMIT = 256
_PRIMING_BYTES = 16
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

IdToToken = Callable[[int], str | None]
"""Function from token id to the vocabulary's string; None for an unknown id."""


class TextDecoder(Protocol):
    """Incremental decoding of one output."""

    def push(self, token_id: int) -> str:
        """Take a token; returns the new text that is certain now, never half a character."""
        ...

    def flush(self) -> str:
        """The rest at the end: replacement characters for an unfinished character."""
        ...


class ByteTable(dict[int, bytes]):
    """Map from token id to bytes for a byte-level vocabulary; shared by all requests.

    Filled as tokens occur: a whole table of 150,000 entries would take 100 ms at start, and most
    entries are never read. Ids in ``skip`` and ids outside the vocabulary have no bytes.
    """

    def __init__(self, id_to_token: IdToToken, skip: Collection[int] = ()) -> None:
        super().__init__(dict.fromkeys(skip, b""))
        self._id_to_token = id_to_token
        self._byte_of = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        if token is None:
            data = b""
        else:
            try:
                data = bytes([self._byte_of[c] for c in token])
            except KeyError:
                # An added token with a character outside the alphabet is plain text.
                data = token.encode()
        self[token_id] = data
        return data


def byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection between bytes and printable characters (Radford et al. 2019):
    printable bytes stand for themselves, the others for the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(characters, printable + others, strict=True))


class ByteLevelDecoder:
    """Incremental UTF-8 decoder of byte-level tokens; about half a microsecond per token."""

    __slots__ = ("_decode", "_joint", "_table")

    def __init__(self, table: ByteTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._joint = _unfinished_tail(table, prompt_token_ids)
        if self._joint:
            self._decode(self._joint)

    def push(self, token_id: int) -> str:
        text = self._decode(self._table[token_id])
        return self._without_prompt(text, self._table[token_id]) if self._joint else text

    def flush(self) -> str:
        text = self._decode(b"", True)
        return self._without_prompt(text, b"") if self._joint else text

    def _without_prompt(self, text: str, data: bytes) -> str:
        """Drop the replacement character of a prompt's unfinished character, unless the output
        finishes it."""
        self._joint += data
        if not text:
            return text
        unfinished = text[0] == REPLACEMENT and not self._joint.startswith(REPLACEMENT.encode())
        self._joint = b""
        return text[1:] if unfinished else text


def _unfinished_tail(table: ByteTable, token_ids: Sequence[int]) -> bytes:
    """Bytes of an incomplete character at the end, at most three."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = table[token_id] + tail
        if len(tail) >= 4:
            break
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


class PieceTable(dict[int, str | int]):
    """Map from token id to its text or byte; shared by all requests.

    Made for the decoder chain of SentencePiece models with byte fallback: the word mark becomes a
    space, "<0xNN>" a byte. Filled as tokens occur; see ByteTable.

    Attributes:
        strips_start: one space at the beginning of a text is dropped.
    """

    def __init__(
        self,
        id_to_token: IdToToken,
        skip: Collection[int] = (),
        *,
        word_mark: str = "▁",
        strips_start: bool = True,
    ) -> None:
        super().__init__(dict.fromkeys(skip, ""))
        self.strips_start = strips_start
        self._id_to_token = id_to_token
        self._word_mark = word_mark

    def __missing__(self, token_id: int) -> str | int:
        text = (self._id_to_token(token_id) or "").replace(self._word_mark, " ")
        match = _HEX_BYTE.fullmatch(text)
        piece = int(match[1], 16) if match else text
        self[token_id] = piece
        return piece


def make_table(
    steps: list[dict[str, Any]], id_to_token: IdToToken, skip: Collection[int]
) -> ByteTable | PieceTable | None:
    """Table of a byte-level decoder, or of a SentencePiece decoder with byte fallback; None for any
    other. The steps of the latter: replace the word mark by a space, bytes to text, join, and
    perhaps strip one leading space."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteTable(id_to_token, skip)
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[3:] not in ([], [strip]):
        return None
    mark = steps[0]["pattern"].get("String")
    if not mark or steps[0]["content"] != " ":
        return None
    return PieceTable(id_to_token, skip, word_mark=mark, strips_start=len(steps) == 4)


class ByteFallbackDecoder:
    """Decoder of strings and single bytes; runs of bytes are UTF-8.

    ``tokenizers`` decodes a run of byte tokens at once: if any of it is not UTF-8, each byte of the
    run becomes a replacement character. Here a character is released as soon as it is complete: a
    newline is such a byte, and a stop string must not wait for the next token. So the two differ in
    one case: characters that were complete before their run became invalid stay as they were.
    """

    __slots__ = ("_at_start", "_broken", "_pending", "_prompt_bytes", "_table")

    def __init__(self, table: PieceTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._pending = b""
        self._broken = False
        run, has_text = _trailing_bytes(table, prompt_token_ids)
        for byte in run:
            self._push_byte(byte)
        self._prompt_bytes = len(self._pending)
        self._at_start = table.strips_start and not has_text

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece == "":
            return ""
        if isinstance(piece, int):
            text = self._push_byte(piece)
        elif self._pending or self._broken:
            text = self.flush() + piece
        else:
            text = piece
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        text = self._replaced()
        self._broken = False
        return text

    def _push_byte(self, byte: int) -> str:
        if self._broken:
            return REPLACEMENT
        self._pending += bytes((byte,))
        try:
            text = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._broken = True
            return self._replaced()
        self._pending = b""
        self._prompt_bytes = 0
        return text

    def _replaced(self) -> str:
        """Replacement characters, one for each pending byte that is not the prompt's."""
        text = REPLACEMENT * (len(self._pending) - self._prompt_bytes)
        self._pending = b""
        self._prompt_bytes = 0
        return text


def _trailing_bytes(table: PieceTable, token_ids: Sequence[int]) -> tuple[bytes, bool]:
    """Run of byte tokens at the end, or the last characters of a long run; and whether there is any
    text at all."""
    run: list[int] = []
    for token_id in reversed(token_ids):
        piece = table[token_id]
        if isinstance(piece, int):
            run.append(piece)
            if len(run) < _PRIMING_BYTES:
                continue
            # Begin at a whole character.
            while run and run[-1] & 0xC0 == 0x80:
                run.pop()
        elif not piece:
            continue
        return bytes(reversed(run)), True
    return bytes(reversed(run)), bool(run)


class WindowDecoder:
    """Decodes the last few tokens with each new one, and returns the text added at the end.

    Correct for any decoder in which a token's text depends on a few tokens before it. Text that
    ends in one to three replacement characters is held back, for they may be an unfinished
    character; four cannot be one. For bytes that are no UTF-8 at all, the number of replacement
    characters may differ from decoding all at once.

    Args:
        decode: token ids to text, special tokens included.
        skip: ids without text, which never reach ``decode``.
    """

    __slots__ = ("_context", "_decode", "_prefix", "_prompt_text", "_skip", "_window")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int] = (),
        *,
        skip: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._skip = skip
        tail = self._priming_tokens(prompt_token_ids)
        while len(tail) > _PRIMING_TOKENS - 3 and decode(tail).startswith(REPLACEMENT):
            # A window that begins inside a character would garble the text after it.
            del tail[0]
        # The window is the context, whose text was returned, and the tokens after it.
        self._window = tail
        self._context, self._prefix = self._finished_part(tail)
        unfinished = tail[self._context :]
        self._prompt_text = decode(unfinished) if unfinished else ""

    def _priming_tokens(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Last few tokens of the prompt, enough of them with text: a token's text may differ at the
        beginning of a text."""
        tail: list[int] = []
        with_text = 0
        for token_id in reversed(prompt_token_ids):
            if token_id in self._skip:
                continue
            tail.append(token_id)
            with_text += bool(self._decode([token_id]))
            if with_text == _PRIMING_TOKENS or len(tail) == _PRIMING_LIMIT:
                break
        return tail[::-1]

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        unfinished = len(text) - len(text.rstrip(REPLACEMENT))
        if not text or 1 <= unfinished <= 3:
            return ""
        del self._window[: self._context]
        self._context = len(self._window)
        self._prefix = self._decode(self._window)
        return self._without_prompt(text)

    def flush(self) -> str:
        text = self._new_text()
        self._window = []
        self._context, self._prefix = 0, ""
        return self._without_prompt(text)

    def _finished_part(self, token_ids: list[int]) -> tuple[int, str]:
        """Number of leading ids whose text ends in no unfinished character, and that text."""
        text = self._decode(token_ids) if token_ids else ""
        if not text.endswith(REPLACEMENT):
            return len(token_ids), text
        for count in range(len(token_ids) - 1, max(-1, len(token_ids) - 4), -1):
            shorter = self._decode(token_ids[:count]) if count else ""
            if not shorter.endswith(REPLACEMENT):
                return count, shorter
        return len(token_ids), text

    def _new_text(self) -> str:
        """New text of the window, which follows the text of its context."""
        if len(self._window) == self._context:
            return ""
        text = self._decode(self._window)
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        # The new tokens changed text that was returned: after the context their bytes are invalid
        # UTF-8, perhaps only until more follow. Decoding them alone tells the two cases apart.
        return self._decode(self._window[self._context :])

    def _without_prompt(self, text: str) -> str:
        """Drop the text of a prompt's unfinished character that the output does not finish."""
        dropped, self._prompt_text = self._prompt_text, ""
        return text.removeprefix(dropped)
