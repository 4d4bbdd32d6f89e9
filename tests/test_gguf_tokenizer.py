"""Tokenizers of GGUF files, against llama.cpp's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.checkpoint.gguf_file import GGUFFile
from asyncllm.checkpoint.gguf_vocabulary import end_token_ids
from asyncllm.errors import ModelLoadError
from asyncllm.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from asyncllm.text.text_decoder import REPLACEMENT_CHARACTER, ByteFallbackDecoder, ByteLevelDecoder
from asyncllm.text.tokenizer import Tokenizer

pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
from tests.gguf_vocabularies import (
    TEXTS,
    LlamaVocabulary,
    expected,
    odd_texts,
    recorded,
    train,
    vocabularies,
    write_vocabulary,
)

RECORD = recorded()
FILES = dict(vocabularies(RECORD["merges"]))

Load = Callable[[Mapping[str, Any]], Tokenizer]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(values: Mapping[str, Any]) -> Tokenizer:
        return Tokenizer.from_directory(write_vocabulary(tmp_path / "x.gguf", values))

    return load


@pytest.mark.parametrize("name", FILES)
def test_tokens_are_llama_cpps(load, name):
    tokenizer = load(FILES[name])
    for text, ids in expected(RECORD, name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert tokenizer.encode("a") == RECORD["files"][name]["with ends"]


def test_every_rule_has_distinguishing_texts():
    tokens = {
        rule: {str((RECORD["files"][name]["which"], RECORD["files"][name]["with ends"]))}
        for name, rule in PRE_TOKENIZERS.items()
    }
    assert len(set().union(*tokens.values())) == len(tokens) == 32


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_llama_cpp_gives_these_tokens_to_random_texts_too(load, tmp_path, name):
    pytest.importorskip("llama_cpp")
    assert train() == RECORD["merges"]
    tokenizer = load(FILES[name])
    llama = LlamaVocabulary(tmp_path / "x.gguf")
    assert llama.encode("a", add_special=True) == RECORD["files"][name]["with ends"]
    for text, ids in expected(RECORD, name):
        assert llama.encode(text) == ids
    for text in odd_texts(7, 500):
        assert tokenizer.encode(text, add_special_tokens=False) == llama.encode(text), text
    llama.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ends", "gpt-oss", "solar-open", "eos"])
def test_answers_end_where_llama_cpps_do(tmp_path, kind):
    pytest.importorskip("llama_cpp")
    path = write_vocabulary(tmp_path / "x.gguf", ends_of(kind))
    llama, size = LlamaVocabulary(path), len(ends_of(kind)["tokens"])
    assert set(end_token_ids(GGUFFile(path))) == llama.end_ids(size)
    llama.close()


def ends_of(kind: str) -> dict[str, Any]:
    tokens = {
        "ends": ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|end|>"],
        "gpt-oss": ["<|end|>", "<|return|>", "<|call|>"],
        "solar-open": ["<|end|>", "<|flush|>", "<|calls|>"],
        "eos": ["<other>", "x", "y"],
    }[kind]
    values = {"token_type": [1, 1, *[3] * len(tokens)], "tokens": ["a", "b", *tokens]}
    return values | {"model": "gpt2", "merges": ["a b"], "pre": "gpt-2", "eos_token_id": 2}


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("ends", [2, 3, 4, 5, 6]),
        ("gpt-oss", [3, 4]),
        ("solar-open", [3, 4]),
        ("eos", [2]),
    ],
)
def test_ends_of_an_answer(tmp_path, kind, ids):
    path = write_vocabulary(tmp_path / "x.gguf", ends_of(kind))
    assert sorted(end_token_ids(GGUFFile(path))) == ids


def test_special_tokens(load):
    values = FILES["no name"]
    tokenizer, tokens = load(values), values["tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    special = {"<|bos|>", "<|eos|>", "<|im_end|>", "<|fim_prefix|>", "<mask>", "<unk>"}
    assert tokenizer.special_token_ids == {ids[token] for token in special}
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    text = "a  <|im_end|>b"
    assert tokenizer.encode(text) == [ids[t] for t in ("a", "  ", "<|im_end|>", "b")]
    assert tokenizer.decode(tokenizer.encode(text)) == "a  b"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    named = load(values | {"padding_token_id": 3, "seperator_token_id": 4, "unknown_token_id": 5})
    assert named.special_tokens == tokenizer.special_tokens | {
        "pad_token": tokens[3], "sep_token": tokens[4], "unk_token": tokens[5]
    }  # fmt: skip
    sentencepiece = load(FILES["llama"])
    assert sentencepiece.special_tokens == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    }  # fmt: skip


def test_a_prompt_begins_and_ends_as_the_file_says(load):
    values = FILES["llama"]
    bos, eos, a = 1, 2, values["tokens"].index("▁a")
    for metadata, ids in (
        ({}, [bos, a]),
        ({"add_bos_token": False}, [a]),
        ({"add_eos_token": True}, [bos, a, eos]),
        ({"add_bos_token": False, "add_eos_token": True, "eos_token_id": 1}, [a, bos]),
    ):
        assert load(values | metadata).encode("a") == ids
        assert load(values | metadata).encode("a", add_special_tokens=False) == [a]
    without = {k: v for k, v in FILES["llama-bpe"].items() if k != "bos_token_id"}
    assert len(load(without).encode("a")) == 1
    with pytest.raises(ModelLoadError, match=r"add_bos_token is True, expected false: .*bos_token"):
        load(without | {"add_bos_token": True})


def test_invalid_bytes_become_replacement_characters(load):
    tokenizer = load(FILES["llama"])
    byte = FILES["llama"]["tokens"].index("<0x00>")
    assert tokenizer.decode([byte + 0xE4, byte + 0xBD, byte + 0xA0]) == "你"
    assert tokenizer.decode([byte + 0xFF]) == REPLACEMENT_CHARACTER
    assert tokenizer.encode("한", add_special_tokens=False)[1:] == [
        byte + one for one in "한".encode()
    ]


@cache
def loaded(name: str, folder: Path) -> Tokenizer:
    return Tokenizer.from_directory(write_vocabulary(folder / f"{len(name)}.gguf", FILES[name]))


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("qwen2", ByteLevelDecoder),
        ("llama", ByteFallbackDecoder),
        ("gemma4", ByteFallbackDecoder),
    ],
)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_whole_text(tmp_path_factory, name, decoder, data, skip):
    tokenizer = loaded(name, tmp_path_factory.getbasetemp())
    assert isinstance(tokenizer.text_decoder(), decoder)
    text = data.draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=20)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.text_decoder((), skip_special_tokens=skip)
    parts = [*(stream.push(i) for i in ids), stream.flush()]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(parts) == whole
    if not skip and name == "qwen2":
        assert whole == text


def test_chat_templates_by_name(load):
    keys = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
    tokenizer = load(FILES["qwen2"] | dict(zip(keys, ("plain", "tools"), strict=True)))
    assert tokenizer.chat_template.sources == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "whitespace"}, r"tokenizer\.ggml\.pre is 'whitespace', expected one of .*qwen2"),
        ({"pre": "x" * 5000}, r"tokenizer\.ggml\.pre is 'x+, expected one of"),
        ({"pre": 3}, r"tokenizer\.ggml\.pre is 3, expected one of"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert', expected .*gpt2"),
        ({"tokens": ["a", "b", "a"]}, r"tokens' has 'a' twice"),
        ({"tokens": [1, 2, 3]}, r"tokens' has no strings"),
        ({"tokens": "abc"}, r"tokens' is 'abc', expected an array"),
        ({"token_type": [1, 1]}, r"token_type' has 2 values for \d+ tokens"),
        ({"token_type": 7}, r"token_type' is 7, expected an array"),
        ({"merges": ["ab"]}, r"merges' has 'ab', expected two tokens"),
        (
            {"merges": ["a b", "a \U0001f600"]},
            r"no tokenizer can be made of it .*out of vocabulary",
        ),
        ({"bos_token_id": 2**31}, r"bos_token_id is 2147483648, expected .*from 0 to \d+"),
        ({"add_bos_token": 3}, r"add_bos_token is 3, expected true or false"),
        ({"merges": None}, r"metadata 'tokenizer\.ggml\.merges' is missing"),
    ],
)
def test_metadata_that_makes_no_tokenizer_is_refused(load, changes, message):
    values = {k: v for k, v in (FILES["qwen2"] | changes).items() if v is not None}
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(values)
    assert len(str(caught.value)) < 2500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [1.0]}, r"scores' has 1 values for \d+ tokens"),
        ({"scores": None}, r"scores' is missing"),
        ({"unknown_token_id": 2**20}, r"unknown_token_id is 1048576, expected"),
    ],
)
def test_scores_that_make_no_tokenizer_are_refused(load, changes, message):
    values = {k: v for k, v in (FILES["llama"] | changes).items() if v is not None}
    with pytest.raises(ModelLoadError, match=message):
        load(values)


def test_invalid_utf8_and_oversized_arrays(load, tmp_path, monkeypatch):
    load(FILES["qwen2"])
    path = tmp_path / "x.gguf"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"camelCaseSnake", b"\xff\xfemelCaseSnake", 1))
    with pytest.raises(ModelLoadError, match=r"tokens' has a string that is not UTF-8"):
        Tokenizer.from_directory(path)
    path.write_bytes(whole)
    monkeypatch.setattr("asyncllm.checkpoint.gguf_file.MAX_HEADER_BYTES", 5000)
    with pytest.raises(ModelLoadError, match=r"the header has \d+ bytes or more, expected at most"):
        Tokenizer.from_directory(path)


def test_a_vocabulary_that_takes_long_to_read_is_refused(load, monkeypatch):
    tokens = ["<unk>", *("a" * length for length in range(1, 40))]
    values = FILES["llama"] | {"tokens": tokens, "scores": [0.0] * 40, "token_type": [1] * 40}
    load(values)
    monkeypatch.setattr("asyncllm.text.gguf_tokenizer._MAX_MERGES", 700)
    with pytest.raises(ModelLoadError, match="more than 700 pairs"):
        load(values)
    tokens[-1] = "a" * 10_000
    with pytest.raises(ModelLoadError, match="tokens of up to 10000 characters"):
        load(values)
    monkeypatch.setattr("asyncllm.checkpoint.gguf_vocabulary.MAX_VOCABULARY_SIZE", 30)
    with pytest.raises(ModelLoadError, match=r"tokens' has 40 strings, expected at most 30"):
        load(values)


def test_special_token_id_minus_one_means_none(load):
    names = ("padding_token_id", "eot_token_id")
    found = load(FILES["qwen2"] | dict.fromkeys(names, 2**32 - 1))
    assert found.encode("ab") == load(FILES["qwen2"]).encode("ab")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_damaged_file_makes_a_tokenizer_or_one_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    content = bytearray(write_vocabulary(path, SMALL).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(8, len(content)))])
    try:
        tokenizer = Tokenizer.from_directory(path)
    except ModelLoadError as error:
        named = str(path) in str(error)
    else:
        named = True
        assert isinstance(tokenizer.encode("ab"), list)
    assert named


SMALL = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab"],
    "token_type": [2, 3, 3, 1, 1, 1, 1],
    "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
    "add_bos_token": True,
}
