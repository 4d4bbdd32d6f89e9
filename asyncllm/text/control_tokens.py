"""ControlTokens: separates a template's special tokens from text that spells them."""

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
from asyncllm.text.any_of import any_of

_FIRST_SURROGATE = 0xD800
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Characters of ordinary text, from the rarest to the most frequent; any other is rarer still.
_COMMON_CHARACTERS = "[]<>{}()#*=\"'`-/:;!?.,\n "


class ControlTokens:
    """Encoder of rendered prompts that keeps special tokens in messages plain text.

    A special token is a control token if the template wrote its delimiter (the "|" of
    "<|im_end|>"), and text if the delimiter came from a message. To tell which, a conversation is
    rendered with the delimiters in its messages hidden: each is replaced by a lone surrogate, which
    no valid text has and templates leave alone. Every special token in the result is then the
    template's own, however the template cuts, joins or rewrites the messages.

    Args:
        backend: the model's tokenizer, which is not changed. Prompts are encoded by a second one
            with the same model, which has a unique mark for each control token and no special
            tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = sorted(backend.get_added_tokens_decoder().items())
        self._ids = {token.content: i for i, token in added if token.special and token.content}
        signs = {text: _delimiter(text) for text in self._ids}
        surrogates = {
            sign: chr(_FIRST_SURROGATE + i) for i, sign in enumerate(sorted(set(signs.values())))
        }
        self._hidden = {
            text: text.replace(sign, surrogates[sign], 1) for text, sign in signs.items()
        }
        self._surrogates = surrogates
        spelling = set("".join(self._ids))
        self._encodable = next(
            sign for sign in map(chr, range(0xE000, 0xF8FF)) if sign not in spelling
        )
        # A special token that is a word is hidden only where it stands in full: templates compare
        # fields and roles with words.
        self._delimiters = [sign for sign in surrogates if not _occurs_in_words(sign)]
        self._words = [text for text, sign in signs.items() if _occurs_in_words(sign)]
        self._pattern = any_of(self._ids)
        normalizers = {step["type"] for step in steps_of(backend.normalizer)}
        self._rewrites = not normalizers <= {"NFC", "Prepend", "Replace"}
        self._add_marks(backend, added)
        # The unknown token stands for ordinary text, so it is no control token.
        self._controls = frozenset(self._ids.values()).difference(_unknown(self._marking))

    def _add_marks(
        self, backend: tokenizers.Tokenizer, added: list[tuple[int, tokenizers.AddedToken]]
    ) -> None:
        # Shares the parts of ``backend``: nothing is copied.
        self._marking = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._marking.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._marking.pre_tokenizer = backend.pre_tokenizer
        # A message cannot spell a mark, because it cannot know the number in it.
        number = secrets.token_hex(8)
        self._break = f"\U0010fffd{number}\U0010fffd"
        self._marks: dict[str, str] = {}
        tokens, ids = [tokenizers.AddedToken(self._break, normalized=False)], [-1]
        for i, token in added:
            if token.content in self._ids:
                mark = self._marks[token.content] = f"\U0010fffd{number}{i}\U0010fffd"
                token = tokenizers.AddedToken(
                    mark, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
            tokens.append(token)
            ids.append(i)
        self._marking.add_tokens(tokens)
        self._renumbered = {
            self._marking.token_to_id(token.content): i
            for token, i in zip(tokens, ids, strict=True)
        }

    def may_be_spelled_by(self, texts: Iterable[str]) -> bool:
        """Whether ``texts`` may spell a special token, or a part of one."""
        text = "".join(texts)
        if self._rewrites and not text.isascii():
            return True
        return any(sign in text for sign in (*self._delimiters, *self._words))

    def render(self, texts: Iterable[str], render: Callable[[Callable[[str], str]], str]) -> str:
        """Render a prompt for ``encode``, with delimiters in messages hidden where needed.

        Args:
            texts: all strings of a conversation.
            render: renders the prompt, with the given function applied to every string.
        """
        text = "".join(texts)
        if _SURROGATE.search(text):
            raise InvalidRequestError(
                "messages: have a lone surrogate, expected Unicode text", param="messages"
            )
        try:
            prompt = self._least_hidden(set(self._pattern.findall(text)), render)
        except InvalidRequestError as error:
            raise InvalidRequestError(self._show(str(error)), param=error.param) from error
        if "\\ud8" not in text:
            # JSON and Python escape a surrogate in this way.
            for surrogate in self._surrogates.values():
                prompt = prompt.replace(f"\\u{ord(surrogate):x}", surrogate)
        return prompt

    def _least_hidden(
        self, spelled: set[str], render: Callable[[Callable[[str], str]], str]
    ) -> str:
        """Prompt with the same control tokens as with all delimiters hidden, but as few hidden as
        possible: templates search messages, for thoughts in old turns for example. First nothing is
        hidden, then the tokens of which there are too many, then all that messages spell."""
        refusal = None
        try:
            strict = render(self._hide_all)
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
            # A filter such as urlencode refuses surrogates. With no token to hide, this prompt only
            # serves for comparison, so one character may stand for all delimiters.
            strict = render(lambda text: _SURROGATE.sub(self._encodable, self._hide_all(text)))
        written = self._pattern.findall(strict)
        hidden: set[str] = set()
        for everything in (set(), set(), spelled):
            hidden |= everything
            prompt = render(partial(self._hide, hidden))
            found = self._pattern.findall(prompt)
            if found == written and (spelled <= hidden or self._only_drops_text(prompt, strict)):
                return prompt
            hidden |= set(Counter(found) - Counter(written))
        if refusal is not None:
            raise refusal
        return strict

    def _only_drops_text(self, prompt: str, strict: str) -> bool:
        """Whether ``prompt`` is ``strict`` with text left out between control tokens. Then no
        message has moved a control token."""
        parts = zip(self._pattern.split(prompt), self._pattern.split(strict), strict=True)
        for part, whole in parts:
            rest = iter(self._show(whole))
            if not all(character in rest for character in self._show(part)):
                return False
        return True

    def _hide(self, hidden: Collection[str], text: str) -> str:
        return self._pattern.sub(
            lambda match: self._hidden[match[0]] if match[0] in hidden else match[0], text
        )

    def _hide_all(self, text: str) -> str:
        text = self._hide(self._hidden, text)
        for sign in self._delimiters:
            text = text.replace(sign, self._surrogates[sign])
        return text

    def _show(self, text: str, around: str = "") -> str:
        for sign, surrogate in self._surrogates.items():
            text = text.replace(surrogate, around + sign + around)
        return text

    def encode(
        self, prompt: str, encode: Callable[[tokenizers.Tokenizer, str], list[int]]
    ) -> list[int]:
        """Token ids of a prompt that ``render`` returned.

        Args:
            encode: encodes a text with a tokenizer.

        Raises:
            InvalidRequestError: for message text that becomes a control token in every encoding,
                for example through the tokenizer's normalizer.
        """
        written = self._pattern.findall(prompt)
        controls = [i for i in map(self._ids.__getitem__, written) if i in self._controls]
        marked = self._pattern.sub(lambda match: self._marks[match[0]], prompt)
        # The vocabulary may also have a special token's text as an ordinary token.
        for around in ("", self._break):
            ids = encode(self._marking, self._show(marked, around))
            ids = [self._renumbered.get(i, i) for i in ids]
            ids = [i for i in ids if i >= 0]
            if [i for i in ids if i in self._controls] == controls:
                return ids
        raise InvalidRequestError(
            "messages: this tokenizer makes a special token of text in them; "
            "split_special_tokens=False lets it",
            param="messages",
        )


def steps_of(part: Any) -> list[dict[str, Any]]:
    """Steps of a tokenizer's normalizer, pre-tokenizer or decoder, as in tokenizer.json."""
    if part is None:
        return []
    if not isinstance(part, dict):
        # A part's pickled state is its section of tokenizer.json. Serialising the whole tokenizer
        # would take 0.7 s with 150,000 tokens.
        part = json.loads(part.__getstate__())
    if part["type"] != "Sequence":
        return [part]
    inner = next(value for value in part.values() if isinstance(value, list))
    return [step for one in inner for step in steps_of(one)]


def _unknown(backend: tokenizers.Tokenizer) -> list[int]:
    """Ids of unknown characters; none if the tokenizer raises an error for them."""
    try:
        return backend.encode("\U0010fffd\ufffe", add_special_tokens=False).ids
    except Exception:  # the library raises no other
        return []


def _delimiter(text: str) -> str:
    """The character of a special token that is rarest in ordinary text."""
    signs = [sign for sign in text if not _occurs_in_words(sign)] or [text[0]]
    return min(signs, key=_COMMON_CHARACTERS.find)


def _occurs_in_words(sign: str) -> bool:
    return sign.isalnum() or sign == "_"
