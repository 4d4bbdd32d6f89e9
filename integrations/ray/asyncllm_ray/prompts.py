"""Hashes of prompts, for routing before they are tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.routing import block_hashes

TOKEN_BLOCK, BYTE_BLOCK = 16, 64
"""Sizes of the hashed blocks: in tokens of a prompt of token ids, and in UTF-8 bytes of a text."""

_BYTES_PER_TOKEN = 4
_MAX_BYTES = 1 << 16


def prompt_hashes(prompt: Any, cache_salt: str | None) -> tuple[list[bytes], int]:
    """Hashes of a prompt's blocks, and its number of tokens, estimated for a text.

    Args:
        prompt: text, token ids, or messages; anything else has no hashes, and its replica refuses
            it.
        cache_salt: prompts with different salts have no hash in common.
    """
    if isinstance(prompt, str):
        return _text_hashes(prompt, cache_salt)
    if not isinstance(prompt, Sequence) or not prompt:
        return [], 1
    if isinstance(prompt[0], int):
        try:
            return block_hashes(prompt, TOKEN_BLOCK, cache_salt), len(prompt)
        except (TypeError, OverflowError):
            return [], len(prompt)
    return _text_hashes("\0".join(map(_message_text, prompt)), cache_salt)


def _text_hashes(text: str, cache_salt: str | None) -> tuple[list[bytes], int]:
    # Hash bytes in place of tokens: texts with a common beginning share its full blocks.
    data = text[:_MAX_BYTES].encode("utf-8", "surrogatepass")
    num_tokens = max(len(text) // _BYTES_PER_TOKEN, 1)
    return block_hashes(data, BYTE_BLOCK, cache_salt), num_tokens


def _message_text(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    return f"{message.get('role')}\0{content if isinstance(content, str) else repr(content)}"
