"""Tokenizer: converts text to token ids and back, and applies the chat template."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_choice import is_gguf
from asyncllm.checkpoint.importing import importing_transformers
from asyncllm.checkpoint.small_file import MAX_TOKENIZER_BYTES, read_small_file
from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceededError,
    InvalidRequestError,
    ModelLoadError,
)
from asyncllm.sampling_params import SamplingParams
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.control_tokens import ControlTokens, list_component_stages
from asyncllm.text.detokenizer import Detokenizer, StopStrings
from asyncllm.text.gguf_tokenizer import read_gguf_tokenizer
from asyncllm.text.long_text import LONG_TEXT_CHARACTERS, SHORT_TEXT_CHARACTERS
from asyncllm.text.template_input import TemplateInput
from asyncllm.text.template_sandbox import RenderLimits, TemplateLimitError, TemplateOutputError
from asyncllm.text.text_decoder import (
    ByteFallbackDecoder,
    ByteLevelDecoder,
    ByteTable,
    TextDecoder,
    WindowDecoder,
    make_token_table,
)
from asyncllm.text.token_bytes import make_id_to_bytes, token_bytes
from asyncllm.validation import argument_error, describe_error

_MAX_PROMPT_CHARACTERS = 1 << 24
_FAST_TEMPLATE_RENDER_LIMITS = RenderLimits(
    max_output_characters=LONG_TEXT_CHARACTERS,
    max_value_size=16 * LONG_TEXT_CHARACTERS,
    max_seconds=0.005,
)
"""Limits of a rendering that delays other requests: on an event loop or the short-text thread."""

_MAX_UNBATCHED_TEXTS = 16
"""Maximum number of short texts that are encoded one by one. Starting the tokenizer's threads takes
longer than encoding so few texts."""

_SPECIAL_TOKEN_NAMES = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())


class Tokenizer:
    """A model's tokenizer; immutable, and safe to use from several threads at once.

    Attributes:
        backend: the raw ``tokenizers.Tokenizer``, without truncation or padding. It is shared, so
            callers must not change it.
        chat_template: the model's chat templates.
        special_tokens: the model's special tokens by name: "bos_token", "eos_token" and so on.
        special_token_ids: ids of all special tokens, which decoding skips by default.
        response_template: ``response_template`` of tokenizer_config.json: the syntax of the model's
            reasoning and tool calls; None if absent.
        vocab_size: highest token id plus one, added tokens included. A model's ``vocab_size`` is
            larger if its embedding is padded.
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
        self._decoder_factory_for = self._make_decoder_factory()
        self._control_tokens = ControlTokens(backend)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._max_token_characters = _max_token_characters(backend, vocabulary)

    @classmethod
    def from_directory(cls, path: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Load the tokenizer and chat templates of a directory or a GGUF file.

        Without a ``tokenizer.json``, transformers converts the other files if it can.

        Args:
            trust_remote_code: let transformers run the checkpoint's own code.

        Raises:
            ModelLoadError: if files are missing or damaged, or transformers cannot convert them to
                a fast tokenizer.
        """
        with _converting_load_errors(Path(path)):
            return cls._read_directory(Path(path), trust_remote_code)

    @classmethod
    def _read_directory(cls, path: Path, trust_remote_code: bool) -> Tokenizer:
        if is_gguf(path):
            backend, special_tokens, templates = read_gguf_tokenizer(path)
            return cls(backend, ChatTemplate(templates, special_tokens), special_tokens)
        file = path / "tokenizer.json"
        if file.exists():
            with _converting_load_errors(file):
                backend = tokenizers.Tokenizer.from_buffer(
                    read_small_file(file, MAX_TOKENIZER_BYTES)
                )
        else:
            backend = _convert_with_transformers(path, trust_remote_code)
        # Prompts must not be truncated or padded silently.
        backend.no_truncation()
        backend.no_padding()
        special_tokens = _read_special_tokens(path)
        template = ChatTemplate.from_directory(path, special_tokens)
        config = ConfigFile.read_if_present(path / "tokenizer_config.json")
        response = config.values["response_template"] if "response_template" in config else None
        if response is not None and not isinstance(response, dict):
            raise config.field_error("response_template", "an object")
        return cls(backend, template, special_tokens, response)

    def with_chat_template(self, template: str | os.PathLike[str]) -> Tokenizer:
        """Copy of the tokenizer with another chat template.

        Args:
            template: as for ``ChatTemplate.from_source_or_path``.
        """
        other = copy(self)
        other.chat_template = ChatTemplate.from_source_or_path(template, self.special_tokens)
        return other

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest of vocabulary, merges and all stages: tokenizers with an equal digest give a text
        the same tokens. The first call takes tenths of a second for a large vocabulary."""
        return hashlib.blake2b(self.backend.to_str().encode(), digest_size=16).digest()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Raises:
            InvalidRequestError: for text that is no ``str``, or has lone surrogates.
        """
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InvalidRequestError(f"prompt: is a {kind}, expected a string", param="prompt")
        return _encode(self.backend, text, add_special_tokens, param="prompt")

    def encode_short_texts(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Token ids of each text, without special tokens. Many texts are encoded by one call, which
        releases the GIL.

        Raises:
            InvalidRequestError: as ``encode``, at the text that cannot be encoded.
        """
        if len(texts) > _MAX_UNBATCHED_TEXTS:
            try:
                batch = self.backend.encode_batch_fast(texts, add_special_tokens=False)
                return (encoding.ids for encoding in batch)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:
                # ``tokenizers`` raised an exception or a Rust panic. Encode one by one below to
                # find the text at fault.
                pass
        return (self.encode(text, add_special_tokens=False) for text in texts)

    def min_num_tokens(self, num_characters: int) -> int:
        """Minimum number of tokens of a text with ``num_characters``; 0 if unknown. So a text that
        is far too long for the context is refused before it is tokenised."""
        return -(-num_characters // self._max_token_characters) if self._max_token_characters else 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; ids outside the vocabulary are ignored."""
        if len(token_ids) < LONG_TEXT_CHARACTERS:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Only the batched call releases the GIL, as in ``_encode``.
        (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Any, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Render a conversation to the text of its prompt; arguments as for ``TemplateInput``.

        Encode the text with ``add_special_tokens=False``: the template already writes special
        tokens, and the model would see two BOS tokens. If a message contains the text of a special
        token, the result has that token too; ``encode_chat`` encodes it as text.

        Raises:
            InvalidRequestError: for invalid messages, and for a template that raises an error or
                exceeds its limits.
        """
        conversation = TemplateInput(
            messages, kwargs | {"add_generation_prompt": add_generation_prompt}
        )
        try:
            return self.chat_template.render(conversation, self._template_limits(None))
        except TemplateLimitError as error:
            raise _template_limit_error(error) from None

    def encode_chat(
        self,
        conversation: TemplateInput,
        max_tokens: int | None = None,
        *,
        split_special_tokens: bool = True,
        none_if_slow: bool = False,
    ) -> list[int] | None:
        """Render and tokenise a conversation.

        Args:
            max_tokens: limit of the prompt; a prompt that certainly exceeds it is not tokenised.
            split_special_tokens: encode the text of a special token in the conversation's own
                strings as ordinary text, not as the special token.
            none_if_slow: return None if the prompt is long, or its template slow or not compiled.

        Raises:
            InvalidRequestError: for a template that raises an error or exceeds its limits, and for
                text that cannot be tokenised.
            ContextLengthExceededError: for a prompt that is certainly longer than ``max_tokens``.
        """
        if none_if_slow and not self.chat_template.is_compiled(conversation):
            return None
        limits = _FAST_TEMPLATE_RENDER_LIMITS if none_if_slow else self._template_limits(max_tokens)
        render = partial(self.chat_template.render, conversation, limits)
        control = self._control_tokens
        try:
            if not split_special_tokens or not control.can_occur_in(conversation.texts):
                return _encode(self.backend, render())
            return control.encode(control.render(conversation.texts, render), _encode)
        except TemplateLimitError as error:
            if none_if_slow:
                return None
            if (
                isinstance(error, TemplateOutputError)
                and limits.max_output_characters < _MAX_PROMPT_CHARACTERS
            ):
                min_tokens = self.min_num_tokens(limits.max_output_characters + 1)
                raise ContextLengthExceededError(
                    f"messages: the chat template {error}, which are at least {min_tokens} tokens, "
                    f"expected at most {max_tokens}"
                ) from None
            raise _template_limit_error(error) from None

    def _template_limits(self, max_tokens: int | None) -> RenderLimits:
        fitting = (max_tokens or 0) * self._max_token_characters or _MAX_PROMPT_CHARACTERS
        return RenderLimits(
            min(fitting, _MAX_PROMPT_CHARACTERS), _MAX_PROMPT_CHARACTERS, max_seconds=2.0
        )

    def token_bytes(self, size: int) -> list[bytes]:
        """Bytes that each token id below ``size`` adds to a text.

        A special token, the unknown token and an id without a token have no bytes. Takes about
        0.3 s for 150,000 ids.
        """
        return token_bytes(self.backend, self.special_token_ids, size)

    @cached_property
    def id_to_bytes(self) -> Callable[[int], bytes]:
        """Function from a token id to the bytes that the token adds to a text.

        The bytes may be an incomplete character. The bytes of a special token are its name. A token
        whose bytes depend on its neighbours is decoded alone.
        """
        decode = self.decode
        return make_id_to_bytes(self.backend) or (
            lambda token_id: decode([token_id], skip_special_tokens=False).encode()
        )

    @cached_property
    def id_to_text_and_bytes(self) -> Callable[[int], tuple[str, list[int]]]:
        """Function from a token id to the token's text and bytes.

        The bytes are those of ``id_to_bytes``; the text has U+FFFD for an incomplete character.
        Results are cached, because each log-probability needs one.
        """

        @lru_cache(2**15)
        def cached_text_and_bytes(token_id: int) -> tuple[str, list[int]]:
            data = self.id_to_bytes(token_id)
            return data.decode(errors="replace"), list(data)

        return cached_text_and_bytes

    def text_decoder(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        visible_ids: frozenset[int] = frozenset(),
    ) -> TextDecoder:
        """Make the decoder of one output.

        Args:
            visible_ids: ids of special tokens that are decoded even with ``skip_special_tokens``.
        """
        skipped_ids = self.special_token_ids - visible_ids if skip_special_tokens else frozenset()
        return self._decoder_factory_for(skipped_ids)(prompt_token_ids)

    def detokenizer(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        *,
        visible_ids: frozenset[int] = frozenset(),
        stop: StopStrings | None = None,
    ) -> Detokenizer:
        """Make the detokenizer of one output.

        Args:
            visible_ids: as for ``text_decoder``.
            stop: the prepared ``params.stop``, shared by a request's outputs; None prepares it.
        """
        decoder = self.text_decoder(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            visible_ids=visible_ids,
        )
        return Detokenizer(
            decoder,
            stop=stop or params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def special_ids_where(self, predicate: Callable[[str], bool]) -> frozenset[int]:
        """Ids of the special tokens for whose text ``predicate`` is true."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i in self.special_token_ids if predicate(added[i].content))

    def encode_delimiter(self, delimiter: str) -> tuple[int, ...]:
        """Token ids of a delimiter, if it has the same ids in any context; else empty.

        The ids depend on the context if a token may contain an end of ``delimiter`` and the text
        next to it.
        """
        try:
            ids = self.encode(delimiter, add_special_tokens=False)
        except InvalidRequestError:  # The text has characters that the model does not know.
            return ()
        added = self.backend.get_added_tokens_decoder()
        return tuple(ids) if ids and ids[0] in added and ids[-1] in added else ()

    @property
    def eos_token_id(self) -> int | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.backend.token_to_id(token)

    def _make_decoder_factory(
        self,
    ) -> Callable[[frozenset[int]], Callable[[Sequence[int]], TextDecoder]]:
        """Make a cached function: given token ids to skip, it returns a factory, which makes the
        decoder for a given prompt."""
        stages = list_component_stages(self.backend.decoder)
        id_to_token = self.backend.id_to_token
        decode = partial(self.decode, skip_special_tokens=False)

        @cache
        def factory_for(skipped_ids: frozenset[int]) -> Callable[[Sequence[int]], TextDecoder]:
            table = make_token_table(stages, id_to_token, skipped_ids)
            if isinstance(table, ByteTable):
                return partial(ByteLevelDecoder, table)
            if table is not None:
                return partial(ByteFallbackDecoder, table)
            return partial(WindowDecoder, decode, skipped_ids=skipped_ids)

        return factory_for


@contextmanager
def _converting_load_errors(path: Path) -> Iterator[None]:
    """Convert the bare exceptions and Rust panics of ``tokenizers`` to ModelLoadError."""
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

    Texts of more than SHORT_TEXT_CHARACTERS are encoded by a batched call, which releases the GIL:
    for 1.2 MB, ``encode`` blocks other threads for 483 ms, a batched call for at most 14 ms.
    ``encode_batch_fast`` also skips the offsets, which are not needed.
    """
    try:
        if len(text) <= SHORT_TEXT_CHARACTERS:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        batch = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids
    except (KeyboardInterrupt, SystemExit):
        raise
    # ``tokenizers`` raises TypeError or UnicodeEncodeError for a lone surrogate, and bare
    # exceptions or Rust panics for any other text that it cannot encode.
    except BaseException as error:
        raise InvalidRequestError(f"{param}: cannot be tokenised ({error})", param=param) from error


def _template_limit_error(error: TemplateLimitError) -> InvalidRequestError:
    return argument_error("messages", f"the chat template {error}, expected one that needs less")


def _max_token_characters(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int:
    """Maximum number of characters that become one token; 0 if there is no bound, because the
    tokenizer may drop characters or merge any number into one unknown token."""
    model: Any = backend.model
    normalizer = type(backend.normalizer).__name__
    # NFC composes at most four code points to one.
    joined = {"NoneType": 1, "NFC": 4}.get(normalizer, 0)
    splits = list_component_stages(backend.pre_tokenizer)
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


def _read_special_tokens(path: Path) -> dict[str, str]:
    files = [
        ConfigFile.read_if_present(path / name)
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    ]
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        for file in files:
            if name not in file:
                continue
            value = file.values[name]
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise file.field_error(name, "a token, or an object with its content")
            tokens[name] = text
            break
    return tokens


def _convert_with_transformers(path: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    """Make a fast tokenizer with transformers from files other than tokenizer.json."""
    try:
        with importing_transformers():
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(
                str(path), use_fast=True, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # transformers' tokenizer classes raise errors of any class.
        raise ModelLoadError(
            f"{path}: no tokenizer.json, and transformers makes no tokenizer of the other files "
            f"({describe_error(error)})"
        ) from error
    backend: Any = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(
            f"{path}: no tokenizer.json, and {type(loaded).__name__} is a slow tokenizer, "
            "expected a fast one"
        )
    # If the files are missing, transformers returns a tokenizer with special tokens alone.
    if len(backend.get_vocab(with_added_tokens=True).keys() - set(loaded.all_special_tokens)) < 2:
        others = ", ".join(sorted(set(loaded.vocab_files_names.values()) - {"tokenizer.json"}))
        made_of = f", or what makes a {type(loaded).__name__}: {others}" if others else ""
        raise ModelLoadError(
            f"{path}: the tokenizer's files are missing, expected tokenizer.json{made_of}"
        )
    return tokenizers.Tokenizer.from_str(backend.to_str())
