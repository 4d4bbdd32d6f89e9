"""Text decoders: convert tokens one by one to the text that decoding all at once gives.

There is a class for each family of tokenizer decoders:

- ByteLevelDecoder: each token is a sequence of bytes (GPT-2, Qwen, Llama 3).
- ByteFallbackDecoder: each token is a string or a single byte (Llama 2, Mistral, Gemma).
- WindowDecoder: any other; it decodes the last few tokens again with each new one.

A decoder is made for one output, and gets the token ids of its prompt. If the prompt ends within a
character, the output that completes the character contains the whole of it. No other text of the
prompt appears in the output.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

REPLACEMENT_CHARACTER = "\ufffd"

_MAX_PROMPT_CONTEXT_TOKENS = 6
"""Maximum number of tokens that WindowDecoder takes from the end of a prompt, besides tokens
without text, such as skipped special tokens."""

_MAX_SCANNED_PROMPT_TOKENS = 256
"""Maximum number of prompt tokens that WindowDecoder scans for tokens with text."""

_MAX_BYTE_TOKEN_RUN = 16
"""Maximum number of a prompt's trailing byte tokens that ByteFallbackDecoder reads."""

_BYTE_TOKEN_PATTERN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

IdToToken = Callable[[int], str | None]
"""Function from token id to the vocabulary's string; None for an unknown id."""


class TextDecoder(Protocol):
    """Incremental decoder of one output's tokens."""

    def push(self, token_id: int) -> str:
        """Take the next token and return the new text that later tokens cannot change."""
        ...

    def flush(self) -> str:
        """End the output and return replacement characters for an unfinished character."""
        ...


class ByteTable(dict[int, bytes]):
    """Map from token id to bytes for a byte-level vocabulary; shared by all requests.

    An entry is made when its token first occurs: all 150,000 would take 100 ms at start, and most
    are never read. Ids in ``skipped_ids`` and ids outside the vocabulary have no bytes.
    """

    def __init__(self, id_to_token: IdToToken, skipped_ids: Collection[int] = ()) -> None:
        super().__init__(dict.fromkeys(skipped_ids, b""))
        self._id_to_token = id_to_token
        self._byte_by_character = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        if token is None:
            data = b""
        else:
            try:
                data = bytes([self._byte_by_character[c] for c in token])
            except KeyError:
                # An added token with a character outside the alphabet is plain text.
                data = token.encode()
        self[token_id] = data
        return data


def byte_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes (Radford et al. 2019). A printable byte has
    its own character, the others have the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(unprintable)))]
    return dict(zip(characters, printable + unprintable, strict=True))


class ByteLevelDecoder:
    """TextDecoder for byte-level tokens: an incremental UTF-8 decoder. Takes about half a
    microsecond per token."""

    __slots__ = ("_boundary_bytes", "_decode", "_table")

    def __init__(self, table: ByteTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._boundary_bytes = _unfinished_character_bytes(table, prompt_token_ids)
        if self._boundary_bytes:
            self._decode(self._boundary_bytes)

    def push(self, token_id: int) -> str:
        text = self._decode(self._table[token_id])
        if self._boundary_bytes:
            return self._remove_prompt_character(text, self._table[token_id])
        return text

    def flush(self) -> str:
        text = self._decode(b"", True)
        return self._remove_prompt_character(text, b"") if self._boundary_bytes else text

    def _remove_prompt_character(self, text: str, data: bytes) -> str:
        """Remove the replacement character that stands for the prompt's unfinished character, if
        the output did not complete that character.

        Args:
            text: new text; only the first non-empty text of an output is changed.
            data: bytes of the new token.
        """
        self._boundary_bytes += data
        if not text:
            return text
        unfinished = text[0] == REPLACEMENT_CHARACTER and not self._boundary_bytes.startswith(
            REPLACEMENT_CHARACTER.encode()
        )
        self._boundary_bytes = b""
        return text[1:] if unfinished else text


def _unfinished_character_bytes(table: ByteTable, token_ids: Sequence[int]) -> bytes:
    """Bytes of the incomplete character at the end of a token sequence, at most three."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = table[token_id] + tail
        if tail and tail[-1] < 0x80:
            return b""  # An ASCII character is complete, and most prompts end in one.
        if len(tail) >= 4:
            break
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


class TokenPieceTable(dict[int, str | int]):
    """Map from token id to its text or byte, for SentencePiece models with byte fallback; shared by
    all requests.

    The word mark in a token becomes a space, and the token "<0xNN>" a byte. An entry is made when
    its token first occurs, as in ByteTable.

    Attributes:
        strips_leading_space: whether one space at the beginning of a text is removed.
    """

    def __init__(
        self,
        id_to_token: IdToToken,
        skipped_ids: Collection[int] = (),
        *,
        word_mark: str = "▁",
        strips_leading_space: bool = True,
    ) -> None:
        super().__init__(dict.fromkeys(skipped_ids, ""))
        self.strips_leading_space = strips_leading_space
        self._id_to_token = id_to_token
        self._word_mark = word_mark

    def __missing__(self, token_id: int) -> str | int:
        text = (self._id_to_token(token_id) or "").replace(self._word_mark, " ")
        match = _BYTE_TOKEN_PATTERN.fullmatch(text)
        piece = int(match[1], 16) if match else text
        self[token_id] = piece
        return piece


def make_token_table(
    decoder_stages: list[dict[str, Any]], id_to_token: IdToToken, skipped_ids: Collection[int]
) -> ByteTable | TokenPieceTable | None:
    """Make the table of a decoder's tokens; None if the decoder needs a WindowDecoder.

    A decoder with the one stage "ByteLevel" gets a ByteTable. A TokenPieceTable is for a decoder
    with these stages: replace the word mark by a space, convert byte tokens, join, and optionally
    strip one leading space.
    """
    kinds = [stage["type"] for stage in decoder_stages]
    if kinds == ["ByteLevel"]:
        return ByteTable(id_to_token, skipped_ids)
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or decoder_stages[3:] not in ([], [strip]):
        return None
    mark = decoder_stages[0]["pattern"].get("String")
    if not mark or decoder_stages[0]["content"] != " ":
        return None
    return TokenPieceTable(
        id_to_token, skipped_ids, word_mark=mark, strips_leading_space=len(decoder_stages) == 4
    )


class ByteFallbackDecoder:
    """TextDecoder for tokens that are strings or single bytes. Consecutive bytes are UTF-8.

    ``tokenizers`` decodes a run of byte tokens at once: if it is not valid UTF-8, each byte of the
    run becomes a replacement character. This class releases a character as soon as it is complete:
    a newline is often a byte token, and a stop string must not wait for the next token. The texts
    differ in one case: characters that were complete before their run became invalid are kept.
    """

    __slots__ = ("_is_at_start", "_num_prompt_bytes", "_pending_bytes", "_run_is_invalid", "_table")

    def __init__(self, table: TokenPieceTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = table
        self._pending_bytes = b""
        self._run_is_invalid = False
        run, has_text = _trailing_byte_run(table, prompt_token_ids)
        for byte in run:
            self._push_byte(byte)
        self._num_prompt_bytes = len(self._pending_bytes)
        self._is_at_start = table.strips_leading_space and not has_text

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece == "":
            return ""
        if isinstance(piece, int):
            text = self._push_byte(piece)
        elif self._pending_bytes or self._run_is_invalid:
            text = self.flush() + piece
        else:
            text = piece
        if self._is_at_start and text:
            self._is_at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        text = self._replace_pending_bytes()
        self._run_is_invalid = False
        return text

    def _push_byte(self, byte: int) -> str:
        if self._run_is_invalid:
            return REPLACEMENT_CHARACTER
        self._pending_bytes += bytes((byte,))
        try:
            text = self._pending_bytes.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._run_is_invalid = True
            return self._replace_pending_bytes()
        self._pending_bytes = b""
        self._num_prompt_bytes = 0
        return text

    def _replace_pending_bytes(self) -> str:
        """Clear the pending bytes; return U+FFFD for each of them that is not the prompt's."""
        text = REPLACEMENT_CHARACTER * (len(self._pending_bytes) - self._num_prompt_bytes)
        self._pending_bytes = b""
        self._num_prompt_bytes = 0
        return text


def _trailing_byte_run(table: TokenPieceTable, token_ids: Sequence[int]) -> tuple[bytes, bool]:
    """Bytes of the byte tokens at the end of ``token_ids``, and whether any id has text or bytes.

    A long run is cut at its beginning, before a whole character.
    """
    run: list[int] = []
    for token_id in reversed(token_ids):
        piece = table[token_id]
        if isinstance(piece, int):
            run.append(piece)
            if len(run) < _MAX_BYTE_TOKEN_RUN:
                continue
            # Drop continuation bytes, so that the run begins with a whole character.
            while run and run[-1] & 0xC0 == 0x80:
                run.pop()
        elif not piece:
            continue
        return bytes(reversed(run)), True
    return bytes(reversed(run)), bool(run)


class WindowDecoder:
    """TextDecoder for any tokenizer. It decodes a window of the last few tokens again with each new
    one, and returns the text that the new one added at the end.

    The result is correct if a token's text depends only on a few tokens before it. Text that ends
    in one to three replacement characters is held back, because they may stand for an unfinished
    character; four or more cannot. For invalid UTF-8, the number of replacement characters may
    differ from decoding all at once.

    Args:
        decode: function from token ids to text, special tokens included.
        skipped_ids: ids without text, which are not passed to ``decode``.
    """

    __slots__ = (
        "_context_length",
        "_context_text",
        "_decode",
        "_prompt_text",
        "_skipped_ids",
        "_window",
    )

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int] = (),
        *,
        skipped_ids: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        tail = self._prompt_context(prompt_token_ids)
        while len(tail) > _MAX_PROMPT_CONTEXT_TOKENS - 3 and decode(tail).startswith(
            REPLACEMENT_CHARACTER
        ):
            # A window that begins inside a character would garble the text after it.
            del tail[0]
        # The window consists of the context, whose text was already returned, and newer tokens.
        self._window = tail
        self._context_length, self._context_text = self._whole_character_prefix(tail)
        unfinished = tail[self._context_length :]
        self._prompt_text = decode(unfinished) if unfinished else ""

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, at most six of them with text. New tokens are decoded after
        them, because the first token of a text may be decoded differently."""
        tail: list[int] = []
        num_with_text = 0
        for token_id in reversed(prompt_token_ids):
            if token_id in self._skipped_ids:
                continue
            tail.append(token_id)
            num_with_text += bool(self._decode([token_id]))
            if (
                num_with_text == _MAX_PROMPT_CONTEXT_TOKENS
                or len(tail) == _MAX_SCANNED_PROMPT_TOKENS
            ):
                break
        return tail[::-1]

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        unfinished = len(text) - len(text.rstrip(REPLACEMENT_CHARACTER))
        if not text or 1 <= unfinished <= 3:
            return ""
        del self._window[: self._context_length]
        self._context_length = len(self._window)
        self._context_text = self._decode(self._window)
        return self._remove_prompt_character(text)

    def flush(self) -> str:
        text = self._new_text()
        self._window = []
        self._context_length, self._context_text = 0, ""
        return self._remove_prompt_character(text)

    def _whole_character_prefix(self, token_ids: list[int]) -> tuple[int, str]:
        """Number of leading ids whose text does not end within a character, and that text."""
        text = self._decode(token_ids) if token_ids else ""
        if not text.endswith(REPLACEMENT_CHARACTER):
            return len(token_ids), text
        for count in range(len(token_ids) - 1, max(-1, len(token_ids) - 4), -1):
            shorter = self._decode(token_ids[:count]) if count else ""
            if not shorter.endswith(REPLACEMENT_CHARACTER):
                return count, shorter
        return len(token_ids), text

    def _new_text(self) -> str:
        """Text that the window's newer tokens add to the text of its context."""
        if len(self._window) == self._context_length:
            return ""
        text = self._decode(self._window)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # The new tokens changed the context's text, so the bytes of the window are invalid UTF-8.
        # They may become valid with the next tokens. Decode the new tokens alone: if their text
        # ends in replacement characters, more bytes may follow, so it is held back.
        return self._decode(self._window[self._context_length :])

    def _remove_prompt_character(self, text: str) -> str:
        """Remove the prompt's unfinished character from the first text of the output, unless the
        output has completed the character."""
        dropped, self._prompt_text = self._prompt_text, ""
        return text.removeprefix(dropped)
