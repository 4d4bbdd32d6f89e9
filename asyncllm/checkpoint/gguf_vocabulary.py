"""GGUF vocabulary: tokens of a GGUF file, and the ids of those that end an answer."""

from __future__ import annotations

from collections import Counter

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_file import GGUFFile
from asyncllm.errors import ModelLoadError

END_TOKENS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[".split()
)
"""Texts of tokens that end an answer, as in llama.cpp (``llama-vocab.cpp``): converters write the
id of only one end token. llama.cpp's "</s>" is left out: where "</s>" ends an answer, the file has
it as ``eos_token_id``, and in Gemma's vocabulary it is an HTML tag."""

_END_TOKEN_ID_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


MAX_VOCABULARY_SIZE = 2**19
"""Maximum number of tokens: twice the size of the largest vocabularies."""

ABSENT_TOKEN_ID = 2**32 - 1
"""Token id -1 as uint32, which files store for a special token that the model does not have."""


def read_tokens(file: GGUFFile) -> list[str]:
    """Read a file's tokens in the order of their ids.

    Raises:
        ModelLoadError: if there are none or more than ``MAX_VOCABULARY_SIZE``, or two are equal.
    """
    count = file.metadata.get("tokenizer.ggml.tokens", 0)
    if isinstance(count, int) and count > MAX_VOCABULARY_SIZE:
        raise ModelLoadError(
            f"{file.path}: metadata 'tokenizer.ggml.tokens' has {count} strings, expected at most "
            f"{MAX_VOCABULARY_SIZE}"
        )
    tokens = file.read_array("tokenizer.ggml.tokens")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(
            f"{file.path}: metadata 'tokenizer.ggml.tokens' has no strings, expected one per token"
        )
    # Name empty tokens as llama.cpp does.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        [(duplicate, _)] = Counter(tokens).most_common(1)
        raise ModelLoadError(
            f"{file.path}: metadata 'tokenizer.ggml.tokens' has {duplicate!r:.100} twice, expected "
            "each token once"
        )
    return tokens


def end_token_ids(file: GGUFFile) -> list[int]:
    """Ids of the tokens that end an answer: those that the metadata names, then ``END_TOKENS``.

    "<|end|>" is left out if the vocabulary has one of "<|call|>" and "<|calls|>" as well as one of
    "<|return|>" and "<|flush|>" (gpt-oss): there "<|end|>" ends a message, not the answer.
    """
    metadata = ConfigFile(file.path, file.metadata)
    ids = [metadata.integer(name, low=0) for name in _END_TOKEN_ID_KEYS if name in metadata]
    if "tokenizer.ggml.tokens" in metadata:
        end_tokens = {token: i for i, token in enumerate(read_tokens(file)) if token in END_TOKENS}
        ids += end_tokens.values()
        calls, ends = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
        if end_tokens.keys() & calls and end_tokens.keys() & ends:
            ids = [i for i in ids if i != end_tokens.get("<|end|>")]
    return [i for i in dict.fromkeys(ids) if i != ABSENT_TOKEN_ID]
