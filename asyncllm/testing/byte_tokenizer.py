"""byte_tokenizer: makes a tokenizer with one token per byte of UTF-8."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.text_decoder import byte_alphabet
from asyncllm.text.tokenizer import Tokenizer

TURN_START, TURN_END = 256, 257
"""Ids of ``<|im_start|>`` and ``<|im_end|>``; ``<|im_end|>`` is the EOS token."""

_SPECIAL_TOKENS = {"<|im_start|>": TURN_START, "<|im_end|>": TURN_END}
_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or () %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Make a Tokenizer whose token ids are the bytes of UTF-8, and two special tokens.

    So ``encode("Hé")`` is ``[72, 195, 169]``, and a text has as many tokens as bytes. Incomplete
    characters, stop strings and special tokens in messages occur as with a real model. The special
    tokens mark the turns of a ChatML template, which accepts tools and writes calls as Hermes does.
    """
    backend = tokenizers.Tokenizer(models.BPE(byte_alphabet() | _SPECIAL_TOKENS, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in _SPECIAL_TOKENS]
    )
    names = {"eos_token": "<|im_end|>"}
    return Tokenizer(backend, ChatTemplate({"default": _CHAT_TEMPLATE}, names), names)
