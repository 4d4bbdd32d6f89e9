"""Chats as token ids, with their special tokens."""

from __future__ import annotations

from typing import Any

from asyncllm.text.template_input import TemplateInput
from asyncllm.text.tokenizer import Tokenizer


def encode(tokenizer: Tokenizer, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    split = kwargs.pop("split_special_tokens", True)
    ids = tokenizer.encode_chat(TemplateInput(messages, kwargs), split_special_tokens=split)
    assert ids is not None
    return ids


def as_written(tokenizer: Tokenizer, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, **kwargs)
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    unknown = tokenizer.backend.token_to_id("<unk>"), tokenizer.backend.token_to_id("[UNK]")
    special = tokenizer.special_token_ids.difference(unknown)
    return [tokenizer.backend.id_to_token(i) for i in ids if i in special]
