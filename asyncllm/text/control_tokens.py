"""ControlTokens: distinguishes a template's special tokens from message text that spells them."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import tokenizers

from asyncllm.errors import InvalidRequestError
from asyncllm.text.literal_pattern import literal_pattern
from asyncllm.validation import argument_error

_FIRST_SURROGATE = 0xD800
_SURROGATE_PATTERN = re.compile(r"[\ud800-\udfff]")
_PUNCTUATION_BY_FREQUENCY = "[]<>{}()#*=\"'`-/:;!?.,\n "
"""Punctuation of ordinary text, rarest first. Punctuation that is not listed is rarer still."""

_PART_CHARACTERS = 1 << 16
"""Number of characters that are compared at a time."""


class ControlTokens:
    """Encoder of rendered prompts in which messages cannot contain special tokens, only text.

    A special token is a control token if the template wrote its delimiter (the "|" of
    "<|im_end|>"), and text if the delimiter came from a message. To distinguish them, a
    conversation is rendered with the delimiters in its messages hidden: each is replaced by a lone
    surrogate, which no valid text contains and templates do not change. Every special token in the
    result is then the template's own, however the template cuts, joins or rewrites messages.

    Args:
        backend: the model's tokenizer, which is not changed. Prompts are encoded by a second
            tokenizer with the same model. Instead of special tokens, it has a random text for each
            control token, which messages cannot forge.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added_tokens = sorted(backend.get_added_tokens_decoder().items())
        self._id_by_token = {
            token.content: i for i, token in added_tokens if token.special and token.content
        }
        delimiters = {text: _rarest_character(text) for text in self._id_by_token}
        surrogates = {
            delimiter: chr(_FIRST_SURROGATE + i)
            for i, delimiter in enumerate(sorted(set(delimiters.values())))
        }
        self._hidden_text_by_token = {
            text: text.replace(delimiter, surrogates[delimiter], 1)
            for text, delimiter in delimiters.items()
        }
        self._surrogate_by_delimiter = surrogates
        token_characters = set("".join(self._id_by_token))
        self._placeholder_character = next(
            character
            for character in map(chr, range(0xE000, 0xF8FF))
            if character not in token_characters
        )
        # A special token without punctuation has its first letter as its delimiter. Hide this
        # letter only within the whole token: templates compare roles and fields that contain it.
        self._punctuation_delimiters = [
            delimiter for delimiter in surrogates if not _is_word_character(delimiter)
        ]
        self._tokens_without_punctuation = [
            text for text, delimiter in delimiters.items() if _is_word_character(delimiter)
        ]
        self._token_pattern = literal_pattern(self._id_by_token)
        normalizers = {stage["type"] for stage in list_component_stages(backend.normalizer)}
        self._has_rewriting_normalizer = not normalizers <= {"NFC", "Prepend", "Replace"}
        self._make_injection_safe_tokenizer(backend, added_tokens)
        # The unknown token is not a control token, because ordinary text may be encoded as it.
        self._control_ids = frozenset(self._id_by_token.values()) - unk_token_ids(backend)

    def _make_injection_safe_tokenizer(
        self, backend: tokenizers.Tokenizer, added_tokens: list[tuple[int, tokenizers.AddedToken]]
    ) -> None:
        # The new tokenizer shares the components of ``backend``, without a copy.
        self._injection_safe_tokenizer = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._injection_safe_tokenizer.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._injection_safe_tokenizer.pre_tokenizer = backend.pre_tokenizer
        # A message cannot forge a special token's mark: its author does not know the random number.
        number = secrets.token_hex(8)
        self._separator_mark = f"\U0010fffd{number}\U0010fffd"
        self._mark_by_token: dict[str, str] = {}
        tokens, ids = [tokenizers.AddedToken(self._separator_mark, normalized=False)], [-1]
        for i, token in added_tokens:
            if token.content in self._id_by_token:
                mark = self._mark_by_token[token.content] = f"\U0010fffd{number}{i}\U0010fffd"
                token = tokenizers.AddedToken(
                    mark, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
            tokens.append(token)
            ids.append(i)
        self._injection_safe_tokenizer.add_tokens(tokens)
        self._original_ids = {
            self._injection_safe_tokenizer.token_to_id(token.content): i
            for token, i in zip(tokens, ids, strict=True)
        }

    def can_occur_in(self, texts: Iterable[str]) -> bool:
        """Whether ``texts`` may contain a special token's text, or a part of it."""
        text = "".join(texts)
        if self._has_rewriting_normalizer and not text.isascii():
            return True
        parts = (*self._punctuation_delimiters, *self._tokens_without_punctuation)
        return any(part in text for part in parts)

    def render(
        self, texts: Iterable[str], render_prompt: Callable[[Callable[[str], str]], str]
    ) -> str:
        """Render a prompt for ``encode``. Where a message spells a special token, the token's
        delimiter (such as "|") becomes a surrogate; ``encode`` then treats the token as text.

        Args:
            texts: all strings of a conversation.
            render_prompt: function that renders the prompt. It gets a function that hides
                delimiters, which it must apply to every string of the conversation.
        """
        text = "".join(texts)
        if _SURROGATE_PATTERN.search(text):
            raise argument_error("messages", "have a lone surrogate, expected Unicode text")
        message_tokens = {match[0] for match in self._token_pattern.finditer(text)}
        has_escaped_surrogate = "\\ud8" in text
        del text  # It may take 64 MiB, and so may each rendering.
        try:
            prompt = self._render_hiding_fewest_tokens(message_tokens, render_prompt)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                self._restore_delimiters(str(error)), param=error.param
            ) from error
        if not has_escaped_surrogate:
            # Restore surrogates that a filter such as tojson has escaped as "\ud8…".
            for surrogate in self._surrogate_by_delimiter.values():
                prompt = prompt.replace(f"\\u{ord(surrogate):x}", surrogate)
        return prompt

    def _render_hiding_fewest_tokens(
        self, message_tokens: set[str], render_prompt: Callable[[Callable[[str], str]], str]
    ) -> str:
        """Render the prompt with as few of the messages' special tokens hidden as possible.

        To hide a special token is to replace its delimiter while the template runs. Templates
        search messages, for example for thoughts in old turns, so a hidden token may change the
        prompt. The strict prompt hides every delimiter in the messages. Three renderings are tried
        until one has the same control tokens as the strict prompt: hide nothing; hide only the
        special tokens that occur more often than in the strict prompt; hide all special tokens.

        Args:
            message_tokens: special tokens that the messages contain as text.
        """
        refusal = None
        try:
            strict_prompt = render_prompt(self._hide_all_delimiters)
        except InvalidRequestError as error:
            if not isinstance(error.__cause__, UnicodeEncodeError):
                raise
            refusal = argument_error(
                "messages",
                "the chat template encodes text that spells a special token; "
                "split_special_tokens=False lets it",
            )
            if message_tokens:
                raise refusal from error
            # A filter such as urlencode refuses surrogates, so use one ordinary character for all
            # delimiters. They need not be restored: the messages contain no special token here, so
            # this rendering is only compared with another one.
            strict_prompt = render_prompt(
                lambda text: _SURROGATE_PATTERN.sub(
                    self._placeholder_character, self._hide_all_delimiters(text)
                )
            )
        template_tokens = self._token_pattern.findall(strict_prompt)
        hidden_tokens: set[str] = set()
        for more_tokens in (set(), set(), message_tokens):
            hidden_tokens |= more_tokens
            prompt = render_prompt(partial(self._hide_tokens, hidden_tokens))
            tokens = self._token_pattern.findall(prompt)
            if tokens == template_tokens and (
                message_tokens <= hidden_tokens
                or self._differs_only_by_dropped_text(prompt, strict_prompt)
            ):
                return prompt
            hidden_tokens |= set(Counter(tokens) - Counter(template_tokens))
            del prompt  # Free it before the next rendering.
        if refusal is not None:
            raise refusal
        return strict_prompt

    def _differs_only_by_dropped_text(self, prompt: str, strict_prompt: str) -> bool:
        """Whether ``prompt`` is ``strict_prompt`` with text between control tokens left out. If so,
        no text of a message has added, removed or shifted a control token."""
        pairs = zip(
            self._texts_between_tokens(prompt),
            self._texts_between_tokens(strict_prompt),
            strict=True,
        )
        return all(all(character in rest for character in characters) for characters, rest in pairs)

    def _texts_between_tokens(self, prompt: str) -> Iterator[Iterator[str]]:
        """Characters of each text between control tokens, with delimiters restored. They are
        restored in parts, because a copy of the whole prompt may take 64 MiB."""
        begin = 0
        tokens = (match.span() for match in self._token_pattern.finditer(prompt))
        for end, next_begin in chain(tokens, [(len(prompt), 0)]):
            starts = range(begin, end, _PART_CHARACTERS)
            parts = (prompt[i : min(i + _PART_CHARACTERS, end)] for i in starts)
            yield chain.from_iterable(map(self._restore_delimiters, parts))
            begin = next_begin

    def _hide_tokens(self, hidden_tokens: Collection[str], text: str) -> str:
        if not hidden_tokens:
            return text  # Without a copy.
        return self._token_pattern.sub(
            lambda match: (
                self._hidden_text_by_token[match[0]] if match[0] in hidden_tokens else match[0]
            ),
            text,
        )

    def _hide_all_delimiters(self, text: str) -> str:
        text = self._hide_tokens(self._hidden_text_by_token, text)
        for delimiter in self._punctuation_delimiters:
            text = text.replace(delimiter, self._surrogate_by_delimiter[delimiter])
        return text

    def _restore_delimiters(self, text: str, separator: str = "") -> str:
        for delimiter, surrogate in self._surrogate_by_delimiter.items():
            text = text.replace(surrogate, separator + delimiter + separator)
        return text

    def encode(
        self, prompt: str, encode_text: Callable[[tokenizers.Tokenizer, str], list[int]]
    ) -> list[int]:
        """Token ids of a prompt that ``render`` returned.

        Args:
            encode_text: function that encodes a text with a tokenizer.

        Raises:
            InvalidRequestError: if message text still becomes a control token, for example through
                the tokenizer's normalizer.
        """
        token_ids = map(self._id_by_token.__getitem__, self._token_pattern.findall(prompt))
        expected_ids = [i for i in token_ids if i in self._control_ids]
        marked = self._token_pattern.sub(lambda match: self._mark_by_token[match[0]], prompt)
        # Message text may still be encoded as a control token, because the vocabulary may have a
        # special token's text as an ordinary token too. In this case encode again, with message
        # text split at the delimiters of special tokens.
        for separator in ("", self._separator_mark):
            ids = encode_text(
                self._injection_safe_tokenizer, self._restore_delimiters(marked, separator)
            )
            ids = [self._original_ids.get(i, i) for i in ids]
            ids = [i for i in ids if i >= 0]
            if [i for i in ids if i in self._control_ids] == expected_ids:
                return ids
        raise argument_error(
            "messages",
            "this tokenizer makes a special token of text in them; "
            "split_special_tokens=False lets it",
        )


def list_component_stages(component: Any) -> list[dict[str, Any]]:
    """List the stages of a tokenizer's normalizer, pre-tokenizer or decoder.

    Args:
        component: the normalizer, pre-tokenizer or decoder, its section of tokenizer.json, or None.

    Returns:
        One section of tokenizer.json for each stage, with nested sequences flattened.
    """
    if component is None:
        return []
    if not isinstance(component, dict):
        # The pickled state is the component's section of tokenizer.json. Serialising the whole
        # tokenizer instead would take 0.7 s with 150,000 tokens.
        component = json.loads(component.__getstate__())
    if component["type"] != "Sequence":
        return [component]
    sections = next(value for value in component.values() if isinstance(value, list))
    return [stage for section in sections for stage in list_component_stages(section)]


def unk_token_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Id of the token for unknown characters; empty if the tokenizer has none."""
    try:
        tokens = backend.model.tokenize("\U0010fffd")
    except Exception:  # ``tokenizers`` raises bare Exceptions.
        tokens = []
    # With byte fallback, an unknown character becomes several byte tokens instead.
    return frozenset(token.id for token in tokens) if len(tokens) == 1 else frozenset()


def _rarest_character(token: str) -> str:
    """The character of a special token that is the rarest in ordinary text."""
    candidates = [character for character in token if not _is_word_character(character)]
    return min(candidates or [token[0]], key=_PUNCTUATION_BY_FREQUENCY.find)


def _is_word_character(character: str) -> bool:
    return character.isalnum() or character == "_"
