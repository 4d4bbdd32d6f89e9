"""Tokenizer: text to token ids and back, the chat template, and the special tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.importing import importing_transformers
from asyncllm.checkpoint.model_files import GGUF_SUFFIX
from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceededError,
    InvalidRequestError,
    ModelLoadError,
)
from asyncllm.sampling_params import SamplingParams
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.control_tokens import ControlTokens, steps_of
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.gguf_tokenizer import read_gguf_tokenizer
from asyncllm.text.template_input import TemplateInput
from asyncllm.text.template_sandbox import RenderLimits, TemplateLimitError, TemplateOutputError
from asyncllm.text.text_decoder import (
    ByteFallbackDecoder,
    ByteLevelDecoder,
    ByteTable,
    PieceTable,
    TextDecoder,
    WindowDecoder,
    word_mark_of,
)
from asyncllm.text.token_bytes import token_bytes, token_table
from asyncllm.text.tokenizer_thread import LONG_TEXT
from asyncllm.validation import explain

_MAX_CHARACTERS = 1 << 24
_AT_ONCE = RenderLimits(max_output=LONG_TEXT, max_value=16 * LONG_TEXT, seconds=0.005)

_NAMED_TOKENS = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())


class Tokenizer:
    """A model's tokenizer; immutable, and safe to use from several threads at once.

    Attributes:
        backend: the raw ``tokenizers.Tokenizer``, without truncation or padding; to be read
            only.
        chat_template: the model's templates; see ``apply_chat_template``.
        special_tokens: "bos_token", "eos_token" and so on, as far as the model has them.
        special_token_ids: ids that decoding skips.
        response_template: how the model writes reasoning and tool calls, if its files say so.
        vocab_size: number of token ids, added tokens included: the highest id and one. A
            model's ``vocab_size`` may be larger, where its embedding is padded.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate,
        special_tokens: dict[str, str],
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.response_template = response_template
        self.chat_template = chat_template
        self.special_tokens = special_tokens
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._decoders = self._decoder_factory()
        self._control_tokens = ControlTokens(backend)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._token_characters = _token_characters(backend, vocabulary)

    @classmethod
    def from_directory(cls, path: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Loads ``tokenizer.json``, ``tokenizer_config.json`` and the chat templates, or what a
        GGUF file has of them.

        Without a ``tokenizer.json``, transformers converts what is there, where it can;
        ``trust_remote_code`` lets it run the checkpoint's own code for that.

        Raises:
            ModelLoadError: for files that are missing, damaged, or of no fast tokenizer.
        """
        with _reading(Path(path)):
            return cls._read(Path(path), trust_remote_code)

    @classmethod
    def _read(cls, path: Path, trust_remote_code: bool) -> Tokenizer:
        if path.suffix == GGUF_SUFFIX:
            backend, special_tokens, templates = read_gguf_tokenizer(path)
            return cls(backend, ChatTemplate(templates, special_tokens), special_tokens)
        file = path / "tokenizer.json"
        if file.is_file():
            with _reading(file):
                backend = tokenizers.Tokenizer.from_file(str(file))
        else:
            backend = _convert(path, trust_remote_code)
        # A prompt must not be cut or padded in silence.
        backend.no_truncation()
        backend.no_padding()
        special_tokens = _special_tokens(path)
        template = ChatTemplate.from_directory(path, special_tokens)
        config = ConfigFile.read_if_present(path / "tokenizer_config.json")
        response = config.values["response_template"] if "response_template" in config else None
        if response is not None and not isinstance(response, dict):
            raise config.bad("response_template", "an object")
        return cls(backend, template, special_tokens, response)

    def with_chat_template(self, given: str | os.PathLike[str]) -> Tokenizer:
        """The same tokenizer with one template, as ``ChatTemplate.from_setting`` reads it, in place
        of the model's."""
        other = copy(self)
        other.chat_template = ChatTemplate.from_setting(given, self.special_tokens)
        return other

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Raises:
            InvalidRequestError: for text that is no ``str``, or has lone surrogates.
        """
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InvalidRequestError(f"prompt: is a {kind}, expected a string", param="prompt")
        return _encode(self.backend, text, add_special_tokens, param="prompt")

    def min_tokens(self, num_characters: int) -> int:
        """A number of tokens that no text of so many characters can fall below, so that a
        text far too long for the context is refused before it is tokenised; 0 where there is
        no telling."""
        return -(-num_characters // self._token_characters) if self._token_characters else 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids that the vocabulary does not have are no text."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Any, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt for a conversation as text; arguments and errors as for
        ``TemplateInput``.

        It holds the special tokens that the template writes, so it is encoded with
        ``add_special_tokens=False``: else the model would see two BOS tokens. What a message
        holds of them cannot be told apart in it; see ``encode_chat``.
        """
        conversation = TemplateInput(
            messages, kwargs | {"add_generation_prompt": add_generation_prompt}
        )
        try:
            return self.chat_template.render(conversation, self._render_limits(None))
        except TemplateLimitError as error:
            raise _refused(error) from None

    def encode_chat(
        self,
        conversation: TemplateInput,
        max_tokens: int | None = None,
        *,
        split_special_tokens: bool = True,
        at_once: bool = False,
    ) -> list[int] | None:
        """Token ids of the prompt for a conversation.

        Args:
            max_tokens: of the prompt; one that has more for certain is not tokenised.
            split_special_tokens: special tokens in the conversation's own strings are text.
            at_once: return None for a prompt that is to be made on another thread, because
                it is long or its template takes its time.

        Raises:
            InvalidRequestError: for a template that refuses the conversation or needs too
                much, and for text that cannot be tokenised.
            ContextLengthExceededError: for what is longer than ``max_tokens`` for certain.
        """
        if at_once and not self.chat_template.is_compiled(conversation):
            return None
        limits = _AT_ONCE if at_once else self._render_limits(max_tokens)
        render = partial(self.chat_template.render, conversation, limits)
        control = self._control_tokens
        try:
            if not split_special_tokens or not control.may_be_spelled_by(conversation.texts):
                return _encode(self.backend, render())
            return control.encode(control.render(conversation.texts, render), _encode)
        except TemplateLimitError as error:
            if at_once:
                return None
            if isinstance(error, TemplateOutputError) and limits.max_output < _MAX_CHARACTERS:
                least = self.min_tokens(limits.max_output + 1)
                raise ContextLengthExceededError(
                    f"messages: the chat template {error}, which are at least {least} tokens, "
                    f"expected at most {max_tokens}"
                ) from None
            raise _refused(error) from None

    def _render_limits(self, max_tokens: int | None) -> RenderLimits:
        fitting = (max_tokens or 0) * self._token_characters or _MAX_CHARACTERS
        return RenderLimits(min(fitting, _MAX_CHARACTERS), _MAX_CHARACTERS, seconds=2.0)

    def token_bytes(self, size: int) -> list[bytes]:
        """The bytes that each token id below ``size`` adds to a text, none for one that cannot
        be told: a special or unknown token, or none at all. About 0.3 s for 150,000."""
        return token_bytes(self.backend, self.special_token_ids, size)

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """The bytes of one token id as it is met in the middle of a text, half a character
        included; a special token's are its name. Where they depend on the neighbours, those of
        the token alone."""
        decode = self.decode
        return token_table(self.backend) or (
            lambda token_id: decode([token_id], skip_special_tokens=False).encode()
        )

    def text_decoder(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> TextDecoder:
        """A decoder for one output that follows the prompt. ``visible`` are special tokens that
        are never skipped."""
        skip = self.special_token_ids - visible if skip_special_tokens else frozenset()
        return self._decoders(skip)(prompt_token_ids)

    def detokenizer(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        *,
        visible: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """The text side of one output: incremental decoding and stop strings."""
        decoder = self.text_decoder(
            prompt_token_ids, skip_special_tokens=params.skip_special_tokens, visible=visible
        )
        return Detokenizer(
            decoder,
            stop=tuple(params.stop),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def special_tokens_of(self, holds: Callable[[str], bool]) -> frozenset[int]:
        """Ids of the special tokens whose text ``holds``."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i in self.special_token_ids if holds(added[i].content))

    def delimiter_ids(self, text: str) -> tuple[int, ...]:
        """The token ids that stand for ``text`` wherever a model writes it; none if its neighbours
        may share a token with it."""
        try:
            ids = self.encode(text, add_special_tokens=False)
        except InvalidRequestError:  # characters that the model does not know
            return ()
        added = self.backend.get_added_tokens_decoder()
        return tuple(ids) if ids and ids[0] in added and ids[-1] in added else ()

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _decoder_factory(
        self,
    ) -> Callable[[frozenset[int]], Callable[[Sequence[int]], TextDecoder]]:
        """A function of the skipped tokens, whose results make a decoder for a prompt."""
        steps = steps_of(self.backend.decoder)
        kinds = [step["type"] for step in steps]
        id_to_token = self.backend.id_to_token
        if kinds == ["ByteLevel"]:
            return cache(lambda skip: partial(ByteLevelDecoder, ByteTable(id_to_token, skip)))
        word_mark = word_mark_of(steps)
        if word_mark is not None:
            strip = len(steps) == 4

            def of_pieces(skip: frozenset[int]) -> Callable[[Sequence[int]], TextDecoder]:
                table = PieceTable(id_to_token, skip, word_mark=word_mark)
                return partial(ByteFallbackDecoder, table, strip_start=strip)

            return cache(of_pieces)
        decode = partial(self.decode, skip_special_tokens=False)
        return lambda skip: partial(WindowDecoder, decode, skip=skip)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Around what the library reads: it raises bare Exception, or panics, which is none."""
    try:
        yield
    except (AsyncLLMError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelLoadError(f"{path}: is not a valid tokenizer ({error})") from error


def _encode(
    backend: tokenizers.Tokenizer,
    text: str,
    add_special_tokens: bool = False,
    param: str = "messages",
) -> list[int]:
    """Token ids of ``text``.

    Texts from LONG_TEXT characters on are encoded without the interpreter lock, so that a
    worker thread does not stop the others: ``tokenizers`` holds it in ``encode`` (483 ms for
    1.2 MB) and gives it up in its batched calls (14 ms at most), of which the "fast" one also
    leaves out offsets, which are not needed.
    """
    try:
        if len(text) < LONG_TEXT:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        batch = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids
    except (KeyboardInterrupt, SystemExit):
        raise
    # A lone surrogate reaches the library as a TypeError or UnicodeEncodeError. Anything else
    # that it raises is bare Exception, or a panic, which is none, and is about this text too.
    except BaseException as error:
        raise InvalidRequestError(f"{param}: cannot be tokenised ({error})", param=param) from error


def _refused(error: TemplateLimitError) -> InvalidRequestError:
    return InvalidRequestError(
        f"messages: the chat template {error}, expected one that needs less", param="messages"
    )


def _token_characters(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int:
    """Characters that a single token can stand for at most; 0 where there is no telling,
    because characters may be dropped, or any number of them be one unknown token."""
    model: Any = backend.model
    normalizer = type(backend.normalizer).__name__
    # A canonical composition joins four code points at most.
    joined = {"NoneType": 1, "NFC": 4}.get(normalizer, 0)
    splits = steps_of(backend.pre_tokenizer)
    kinds = {split["type"] for split in splits}
    lossless = kinds <= {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}
    removes = any(split.get("behavior") == "Removed" for split in splits)
    strips = any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
    if not isinstance(model, tokenizers.models.BPE) or not lossless or removes or strips:
        return 0
    if "ByteLevel" in kinds:
        complete = vocabulary.keys() >= set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    elif model.byte_fallback:
        complete = vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        complete = model.unk_token is not None and not model.fuse_unk
    return joined * max(map(len, vocabulary), default=0) if complete else 0


def _special_tokens(path: Path) -> dict[str, str]:
    files = [
        ConfigFile.read_if_present(path / name)
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    ]
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        for file in files:
            if name not in file:
                continue
            value = file.values[name]
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise file.bad(name, "a token, or an object with its content")
            tokens[name] = text
            break
    return tokens


def _convert(path: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    """Lets transformers make a fast tokenizer of other files."""
    try:
        with importing_transformers():
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(
                str(path), use_fast=True, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # it raises what its many backends raise
        raise ModelLoadError(
            f"{path}: no tokenizer.json, and transformers makes no tokenizer of the other files "
            f"({explain(error)})"
        ) from error
    backend: Any = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(
            f"{path}: no tokenizer.json, and {type(loaded).__name__} is a slow tokenizer, "
            "expected a fast one"
        )
    # Without its files, transformers makes a tokenizer of a few special tokens by model type.
    if len(backend.get_vocab(with_added_tokens=True).keys() - set(loaded.all_special_tokens)) < 2:
        others = ", ".join(sorted(set(loaded.vocab_files_names.values()) - {"tokenizer.json"}))
        made_of = f", or what makes a {type(loaded).__name__}: {others}" if others else ""
        raise ModelLoadError(
            f"{path}: the tokenizer's files are missing, expected tokenizer.json{made_of}"
        )
    return tokenizers.Tokenizer.from_str(backend.to_str())
