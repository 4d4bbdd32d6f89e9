"""read_gguf_tokenizer: makes the tokenizer and reads the chat templates of a GGUF file.

The tokenizer produces the same tokens as llama.cpp. transformers' own conversion is not used: it
knows few pre-tokenizer names, and follows the published tokenizer where llama.cpp differs from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_file import GGUFFile
from asyncllm.checkpoint.gguf_vocabulary import ABSENT_TOKEN_ID, END_TOKENS, read_tokens
from asyncllm.errors import ModelLoadError
from asyncllm.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from asyncllm.validation import describe_error

_TEMPLATE_KEY = "tokenizer.chat_template"
_WORD_MARK = "▁"
_UNKNOWN_TYPE, _CONTROL_TYPE, _USER_DEFINED_TYPE = 2, 3, 4

_SPECIAL_TOKEN_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",  # llama.cpp spells the key so.
    "padding": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}
_SENTENCEPIECE_SPECIAL_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids of special tokens in a SentencePiece vocabulary, where the file does not state them."""

_FIM_TOKENS = frozenset(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
    "<|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> "
    "<|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> "
    "▁<MID> <|code_middle|> <|middle|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> "
    "<|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
"""Fill-in-the-middle tokens, which llama.cpp treats as control tokens by their text."""

_UNSTRIPPED_TOKENS_OF_PHI3 = frozenset(("<unk>", "<s>", "<|endoftext|>"))


_MAX_SQUARED_TOKEN_LENGTHS = 2**26
"""Maximum sum of the squared lengths of a SentencePiece vocabulary's tokens: four times Gemma's.
Time and memory to find a token's merges grow with the square of its length."""

_MAX_MERGES = 2**20
"""Maximum number of BPE merges derived from a SentencePiece vocabulary: twice Gemma's number."""


def read_gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """Make a GGUF file's tokenizer.

    Returns:
        The tokenizer, its special tokens by name ("eos_token"), and the chat templates by name.

    Raises:
        ModelLoadError: if the file is damaged, or its kind of tokenizer is not supported.
    """
    file = GGUFFile(path)
    metadata = ConfigFile(path, file.metadata)
    kind = metadata.choice("tokenizer.ggml.model", ("gpt2", "llama", "gemma4"))
    vocabulary = {token: i for i, token in enumerate(read_tokens(file))}
    pre_tokenizer = None if kind == "llama" else _pre_tokenizer(metadata, kind)
    added_tokens = list(_added_tokens(file, vocabulary))
    try:
        if pre_tokenizer is None:
            backend = _sentencepiece_tokenizer(
                file, metadata, vocabulary, {token.content for token in added_tokens}
            )
        else:
            backend = _bpe_tokenizer(file, pre_tokenizer, vocabulary)
        backend.add_tokens(added_tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # ``tokenizers`` raises plain ``Exception``.
        raise ModelLoadError(
            f"{path}: no tokenizer can be made of it ({describe_error(error)})"
        ) from error
    special_tokens = _special_tokens_by_name(
        metadata, list(vocabulary), {} if pre_tokenizer else _SENTENCEPIECE_SPECIAL_IDS
    )
    _add_bos_and_eos(
        backend, metadata, special_tokens, add_bos=pre_tokenizer is None or pre_tokenizer.add_bos
    )
    return backend, special_tokens, _chat_templates(file.metadata)


def _pre_tokenizer(metadata: ConfigFile, kind: str) -> PreTokenizer:
    """Pre-tokenizer named by ``tokenizer.ggml.pre``; llama.cpp's "default" if that is missing."""
    name = kind if kind == "gemma4" else metadata.values.get("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{metadata.path}: tokenizer.ggml.pre is {name!r:.100}, expected one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; tokenizer= takes the tokenizer of the original "
            "model instead"
        )
    return PRE_TOKENIZERS[name]


def _bpe_tokenizer(
    file: GGUFFile, pre_tokenizer: PreTokenizer, vocabulary: dict[str, int]
) -> tokenizers.Tokenizer:
    """Make a BPE tokenizer with the file's merges, of bytes or of characters."""
    merges = dict.fromkeys(_split_merge(file, merge) for merge in file.read_array(_MERGES_KEY))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            list(merges),
            ignore_merges=pre_tokenizer.ignore_merges,
            byte_fallback=pre_tokenizer.merges_characters,
        )
    )
    splits: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in pre_tokenizer.split_patterns
    ]
    if pre_tokenizer.merges_characters:
        backend.normalizer = normalizers.Replace(" ", _WORD_MARK)
        backend.decoder = _sentencepiece_decoder(strip_start=False)
    else:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return backend


_MERGES_KEY = "tokenizer.ggml.merges"


def _split_merge(file: GGUFFile, merge: Any) -> tuple[str, str]:
    # Search from index 1, as llama.cpp does: the first token may begin with a space.
    cut = merge.find(" ", 1) if isinstance(merge, str) else -1
    if cut < 0:
        raise ModelLoadError(
            f"{file.path}: metadata {_MERGES_KEY!r} has {merge!r:.100}, expected two tokens with a "
            "space between them"
        )
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece_tokenizer(
    file: GGUFFile, metadata: ConfigFile, vocabulary: dict[str, int], added_tokens: set[str]
) -> tokenizers.Tokenizer:
    """Make a tokenizer that merges the pair with the highest score first.

    Of pairs of equal score, llama.cpp merges the leftmost in the text. ``tokenizers`` ranks pairs
    in advance, so the pair with the longer left token is merged first. The results rarely differ:
    tokens of trained vocabularies have different scores, so pairs of equal score make the same
    token, and two such pairs rarely overlap in a text.
    """
    scores = _read_values_by_token(file, "tokenizer.ggml.scores", len(vocabulary))
    squares = sum(len(token) ** 2 for token in vocabulary if token not in added_tokens)
    if squares > _MAX_SQUARED_TOKEN_LENGTHS:
        longest = max(map(len, vocabulary))
        raise ModelLoadError(
            f"{file.path}: metadata 'tokenizer.ggml.tokens' has tokens of up to {longest} "
            "characters, expected squares of their lengths that add up to "
            f"{_MAX_SQUARED_TOKEN_LENGTHS} at most"
        )
    cuts = (
        (-scores[i], -cut, token[:cut], token[cut:])
        for token, i in vocabulary.items()
        if token not in added_tokens
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    pairs = sorted(islice(cuts, _MAX_MERGES + 1))
    if len(pairs) > _MAX_MERGES:
        raise ModelLoadError(
            f"{file.path}: the tokens of metadata 'tokenizer.ggml.tokens' are made by more than "
            f"{_MAX_MERGES} pairs of others, the most that is supported"
        )
    unknown = metadata.integer(
        "tokenizer.ggml.unknown_token_id", 0, low=0, high=len(vocabulary) - 1
    )
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for _, _, left, right in pairs],
            unk_token=next(token for token, i in vocabulary.items() if i == unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    marks = normalizers.Replace(" ", _WORD_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_WORD_MARK), marks]) if prefix else marks
    )
    backend.decoder = _sentencepiece_decoder(strip_start=prefix)
    return backend


def _read_values_by_token(file: GGUFFile, key: str, num_tokens: int) -> Any:
    values = file.read_array(key)
    if len(values) < num_tokens:
        raise ModelLoadError(
            f"{file.path}: metadata {key!r} has {len(values)} values for {num_tokens} tokens, "
            "expected one each"
        )
    return values


def _sentencepiece_decoder(*, strip_start: bool) -> decoders.Decoder:
    stages: list[Any] = [
        decoders.Replace(_WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse(),
    ]  # fmt: skip
    return decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip_start else stages)


def _added_tokens(file: GGUFFile, vocabulary: Mapping[str, int]) -> Iterator[AddedToken]:
    """Yield the tokens that are recognised before a text is split into words.

    llama.cpp turns some control tokens of gpt-oss into user-defined tokens, so that programs can
    show them. Here they stay control tokens, so that the text of a message cannot spell them.
    """
    key, name = "tokenizer.ggml.token_type", file.metadata.get("general.name")
    types: Any = [1] * len(vocabulary)
    if key in file.metadata:
        types = _read_values_by_token(file, key, len(vocabulary))
    # Infer from names, as llama.cpp does, which tokens strip spaces: the metadata does not say.
    strips = isinstance(name, str) and any(phi in name.lower() for phi in ("phi-3", "phi3"))
    is_jina = "jina-v2-" in str(file.metadata.get("tokenizer.ggml.pre"))
    for token, i in vocabulary.items():
        special = types[i] in (_UNKNOWN_TYPE, _CONTROL_TYPE) or token in END_TOKENS | _FIM_TOKENS
        if special or types[i] == _USER_DEFINED_TYPE:
            yield AddedToken(
                token,
                special=special,
                normalized=False,
                lstrip=is_jina and token == "<mask>",
                rstrip=strips and token not in _UNSTRIPPED_TOKENS_OF_PHI3,
            )


def _special_tokens_by_name(
    metadata: ConfigFile, tokens: list[str], default_ids: Mapping[str, int]
) -> dict[str, str]:
    special_tokens: dict[str, str] = {}
    for name, label in _SPECIAL_TOKEN_NAMES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if metadata.values.get(key, ABSENT_TOKEN_ID) != ABSENT_TOKEN_ID:
            special_tokens[label] = tokens[metadata.integer(key, low=0, high=len(tokens) - 1)]
        elif default_ids.get(name, len(tokens)) < len(tokens):
            special_tokens[label] = tokens[default_ids[name]]
    return special_tokens


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer,
    metadata: ConfigFile,
    special_tokens: Mapping[str, str],
    *,
    add_bos: bool,
) -> None:
    """Add BOS and EOS tokens to prompts, as the metadata says. Where the metadata does not say, BOS
    is added if ``add_bos`` is True and the vocabulary has a BOS token; EOS is not added."""
    ends: dict[str, str] = {}
    for name, default in (("bos", add_bos and "bos_token" in special_tokens), ("eos", False)):
        key = f"tokenizer.ggml.add_{name}_token"
        if metadata.boolean(key, default):
            if f"{name}_token" not in special_tokens:
                raise metadata.field_error(key, f"false: tokenizer.ggml.{name}_token_id is missing")
            ends[name] = special_tokens[f"{name}_token"]
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=[part for part in ("bos", "$A", "eos") if part == "$A" or part in ends],
            special_tokens=[
                {"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]}
                for name, token in ends.items()
            ],
        )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {
        key.removeprefix(f"{_TEMPLATE_KEY}.") if key != _TEMPLATE_KEY else "default": source
        for key, source in metadata.items()
        if (key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}.")) and isinstance(source, str)
    }
