"""ControlTokens: distinguishes a template's special tokens from message text that spells them."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import tokenizers

from asyncllm.errors import InvalidRequestError
from asyncllm.text.literal_pattern import literal_pattern

_FIRST_SURROGATE = 0xD800
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Punctuation of ordinary text, from the rarest to the most frequent. Other punctuation is rarer.
_COMMON_CHARACTERS = "[]<>{}()#*=\"'`-/:;!?.,\n "


class ControlTokens:
    """Encoder of rendered prompts in which messages cannot contain special tokens, only text.

    A special token is a control token if the template wrote its delimiter (the "|" of
    "<|im_end|>"), and text if the delimiter came from a message. To distinguish them, a
    conversation is rendered with the delimiters in its messages hidden: each is replaced by a lone
    surrogate, which no valid text contains and templates do not change. Every special token in the
    result is then the template's own, however the template cuts, joins or rewrites messages.

    Args:
        backend: the model's tokenizer, which is not changed. Prompts are encoded by a second
            tokenizer with the same model. Instead of special tokens, it has a secret mark for each
            control token.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = sorted(backend.get_added_tokens_decoder().items())
        self._ids = {token.content: i for i, token in added if token.special and token.content}
        signs = {text: _rarest_character(text) for text in self._ids}
        surrogates = {
            sign: chr(_FIRST_SURROGATE + i) for i, sign in enumerate(sorted(set(signs.values())))
        }
        self._token_with_surrogate = {
            text: text.replace(sign, surrogates[sign], 1) for text, sign in signs.items()
        }
        self._surrogates = surrogates
        spelling = set("".join(self._ids))
        self._encodable_character = next(
            sign for sign in map(chr, range(0xE000, 0xF8FF)) if sign not in spelling
        )
        # The delimiter of a token without punctuation is a letter. It is hidden only within that
        # token's text, because templates compare fields and roles with words.
        self._delimiters = [sign for sign in surrogates if not _occurs_in_words(sign)]
        self._word_tokens = [text for text, sign in signs.items() if _occurs_in_words(sign)]
        self._token_pattern = literal_pattern(self._ids)
        normalizers = {step["type"] for step in component_stages(backend.normalizer)}
        self._normalizer_rewrites = not normalizers <= {"NFC", "Prepend", "Replace"}
        self._add_marks(backend, added)
        # Ordinary text may become the unknown token, so it is not a control token.
        self._control_ids = frozenset(self._ids.values()) - unknown_ids(backend)

    def _add_marks(
        self, backend: tokenizers.Tokenizer, added: list[tuple[int, tokenizers.AddedToken]]
    ) -> None:
        # The new tokenizer shares the components of ``backend``, without a copy.
        self._marking_tokenizer = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._marking_tokenizer.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._marking_tokenizer.pre_tokenizer = backend.pre_tokenizer
        # A message cannot contain a mark, because its author does not know the random number.
        number = secrets.token_hex(8)
        self._break_mark = f"\U0010fffd{number}\U0010fffd"
        self._mark_by_token: dict[str, str] = {}
        tokens, ids = [tokenizers.AddedToken(self._break_mark, normalized=False)], [-1]
        for i, token in added:
            if token.content in self._ids:
                mark = self._mark_by_token[token.content] = f"\U0010fffd{number}{i}\U0010fffd"
                token = tokenizers.AddedToken(
                    mark, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
            tokens.append(token)
            ids.append(i)
        self._marking_tokenizer.add_tokens(tokens)
        self._original_ids = {
            self._marking_tokenizer.token_to_id(token.content): i
            for token, i in zip(tokens, ids, strict=True)
        }

    def may_be_spelled_by(self, texts: Iterable[str]) -> bool:
        """Whether ``texts`` may contain a special token's text, or a part of it."""
        text = "".join(texts)
        if self._normalizer_rewrites and not text.isascii():
            return True
        return any(sign in text for sign in (*self._delimiters, *self._word_tokens))

    def render(self, texts: Iterable[str], render: Callable[[Callable[[str], str]], str]) -> str:
        """Render a prompt for ``encode``, with delimiters of special tokens hidden in messages.

        Args:
            texts: all strings of a conversation.
            render: function that renders the prompt. Its argument is a function that it must apply
                to every string of the conversation.
        """
        text = "".join(texts)
        if _SURROGATE.search(text):
            raise InvalidRequestError(
                "messages: have a lone surrogate, expected Unicode text", param="messages"
            )
        try:
            prompt = self._render_least_hidden(set(self._token_pattern.findall(text)), render)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                self._restore_delimiters(str(error)), param=error.param
            ) from error
        if "\\ud8" not in text:
            # Restore surrogates that a filter such as tojson has escaped as "\ud8…".
            for surrogate in self._surrogates.values():
                prompt = prompt.replace(f"\\u{ord(surrogate):x}", surrogate)
        return prompt

    def _render_least_hidden(
        self, spelled: set[str], render: Callable[[Callable[[str], str]], str]
    ) -> str:
        """Render the prompt with as few of the messages' delimiters hidden as possible.

        Templates search messages, for example for thoughts in old turns, so a hidden delimiter may
        change the prompt. Three renderings are tried until one has the control tokens of a prompt
        with all delimiters hidden: nothing hidden; the special tokens hidden that occur too often;
        all special tokens in the messages hidden.

        Args:
            spelled: special tokens that the messages contain as text.
        """
        refusal = None
        try:
            strict = render(self._hide_all_delimiters)
        except InvalidRequestError as error:
            if not isinstance(error.__cause__, UnicodeEncodeError):
                raise
            refusal = InvalidRequestError(
                "messages: the chat template encodes text that spells a special token; "
                "split_special_tokens=False lets it",
                param="messages",
            )
            if spelled:
                raise refusal from error
            # A filter such as urlencode refuses surrogates. The messages contain no special token,
            # so this prompt is only a reference, and one character may replace all delimiters.
            strict = render(
                lambda text: _SURROGATE.sub(
                    self._encodable_character, self._hide_all_delimiters(text)
                )
            )
        written = self._token_pattern.findall(strict)
        hidden: set[str] = set()
        for everything in (set(), set(), spelled):
            hidden |= everything
            prompt = render(partial(self._hide_tokens, hidden))
            tokens = self._token_pattern.findall(prompt)
            if tokens == written and (spelled <= hidden or self._only_drops_text(prompt, strict)):
                return prompt
            hidden |= set(Counter(tokens) - Counter(written))
        if refusal is not None:
            raise refusal
        return strict

    def _only_drops_text(self, prompt: str, strict: str) -> bool:
        """Whether ``prompt`` equals ``strict`` except for dropped text between control tokens. If
        so, no message has moved a control token."""
        parts = zip(
            self._token_pattern.split(prompt), self._token_pattern.split(strict), strict=True
        )
        for part, whole in parts:
            rest = iter(self._restore_delimiters(whole))
            if not all(character in rest for character in self._restore_delimiters(part)):
                return False
        return True

    def _hide_tokens(self, hidden: Collection[str], text: str) -> str:
        return self._token_pattern.sub(
            lambda match: self._token_with_surrogate[match[0]] if match[0] in hidden else match[0],
            text,
        )

    def _hide_all_delimiters(self, text: str) -> str:
        text = self._hide_tokens(self._token_with_surrogate, text)
        for sign in self._delimiters:
            text = text.replace(sign, self._surrogates[sign])
        return text

    def _restore_delimiters(self, text: str, separator: str = "") -> str:
        for sign, surrogate in self._surrogates.items():
            text = text.replace(surrogate, separator + sign + separator)
        return text

    def encode(
        self, prompt: str, encode: Callable[[tokenizers.Tokenizer, str], list[int]]
    ) -> list[int]:
        """Token ids of a prompt that ``render`` returned.

        Args:
            encode: function that encodes a text with a tokenizer.

        Raises:
            InvalidRequestError: if message text becomes a control token in any case, for example
                through the tokenizer's normalizer.
        """
        written = self._token_pattern.findall(prompt)
        controls = [i for i in map(self._ids.__getitem__, written) if i in self._control_ids]
        marked = self._token_pattern.sub(lambda match: self._mark_by_token[match[0]], prompt)
        # The vocabulary may contain a special token's text as an ordinary token too. The second
        # attempt therefore splits such text at its delimiter.
        for separator in ("", self._break_mark):
            ids = encode(self._marking_tokenizer, self._restore_delimiters(marked, separator))
            ids = [self._original_ids.get(i, i) for i in ids]
            ids = [i for i in ids if i >= 0]
            if [i for i in ids if i in self._control_ids] == controls:
                return ids
        raise InvalidRequestError(
            "messages: this tokenizer makes a special token of text in them; "
            "split_special_tokens=False lets it",
            param="messages",
        )


def component_stages(part: Any) -> list[dict[str, Any]]:
    """List the stages of a tokenizer's normalizer, pre-tokenizer or decoder.

    Args:
        part: the component, its section of tokenizer.json, or None.

    Returns:
        One section of tokenizer.json for each stage, with nested sequences flattened.
    """
    if part is None:
        return []
    if not isinstance(part, dict):
        # The pickled state is the component's section of tokenizer.json. Serialising the whole
        # tokenizer instead would take 0.7 s with 150,000 tokens.
        part = json.loads(part.__getstate__())
    if part["type"] != "Sequence":
        return [part]
    inner = next(value for value in part.values() if isinstance(value, list))
    return [step for section in inner for step in component_stages(section)]


def unknown_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Id of the token that an unknown character becomes, if there is one."""
    try:
        tokens = backend.model.tokenize("\U0010fffd")
    except Exception:  # ``tokenizers`` raises bare Exceptions.
        tokens = []
    # With byte fallback, the character becomes several byte tokens.
    return frozenset(token.id for token in tokens) if len(tokens) == 1 else frozenset()


def _rarest_character(text: str) -> str:
    """The character of a special token that is the rarest in ordinary text."""
    signs = [sign for sign in text if not _occurs_in_words(sign)] or [text[0]]
    return min(signs, key=_COMMON_CHARACTERS.find)


def _occurs_in_words(sign: str) -> bool:
    return sign.isalnum() or sign == "_"
