"""Incremental decoding and stop strings, against whole-text decoding and a plain search."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from asyncllm.sampling_params import SamplingParams
from asyncllm.text import detokenizer as detokenizer_module
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.text_decoder import (
    ByteFallbackDecoder,
    ByteLevelDecoder,
    WindowDecoder,
    byte_alphabet,
)
from asyncllm.text.tokenizer import Tokenizer
from tests.hypothesis_settings import examples
from tests.tokenizer_kinds import train_byte_level

REPLACEMENT = "\ufffd"
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, twice.",
    "你好，世界！今日は良い天気ですね。",
    "Emoji 🙂🚀👩‍👩‍👧‍👦 and combining marks: e\u0301 a\u0308 n\u0303 ก็",
    "naïve café – “quoted” — Ελληνικά, русский, العربية, हिन्दी\n\n\ttabs  and   spaces",
]
FUZZ = examples(300)


@cache
def byte_level() -> Tokenizer:
    backend = train_byte_level(SENTENCES * 3, 420, ["<|end|>", "<|pad|>"])
    # Within the byte alphabet, outside of it, and a mixture: all stand for themselves or not
    # by the library's own rule.
    added = ["<think>", "日本", "éÿ", "ĠĊ", "🙂tool"]
    backend.add_tokens([AddedToken(text, special=False) for text in added])
    return Tokenizer(backend, ChatTemplate({}, {}), {})


def sentencepiece_backend() -> tuple[Backend, int]:
    """A vocabulary like Llama 2's: bytes, characters, and words with a mark."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    pieces = ["▁", "▁▁", "▁hello", "▁world", "ing", ".", "▁.", "a", "é", "你", "好", "▁a"]
    for piece in pieces:
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<|x▁y|>", special=False)])
    return backend, 3


SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@cache
def byte_fallback(strip: bool = True) -> Tokenizer:
    backend, _ = sentencepiece_backend()
    steps = [*SENTENCEPIECE, decoders.Strip(" ", 1, 0)] if strip else SENTENCEPIECE
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend, ChatTemplate({}, {}), {})


@cache
def windowed(kind: str) -> Tokenizer:
    """Decoders that have no fast path."""
    if kind == "wordpiece":
        words = ["[UNK]", "[SEP]", "hello", "##ing", "##s", ",", "'", "don", "t", "word", "你"]
        vocab = {word: i for i, word in enumerate(words)}
        backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
        backend.decoder = decoders.WordPiece()
        backend.add_special_tokens(["[SEP]"])
    else:
        backend, _ = sentencepiece_backend()
        if kind == "metaspace":
            backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        elif kind == "bpe":
            backend.decoder = decoders.BPEDecoder(suffix="a")
    return Tokenizer(backend, ChatTemplate({}, {}), {})


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "byte-fallback-no-strip": lambda: byte_fallback(False),
    "metaspace": lambda: windowed("metaspace"),
    "bpe": lambda: windowed("bpe"),
    "no-decoder": lambda: windowed("none"),
    "wordpiece": lambda: windowed("wordpiece"),
}


def pushes(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    decoder = tokenizer.text_decoder(prompt, skip_special_tokens=skip)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def random_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    # Two ids that the vocabulary does not have: padded embeddings produce them.
    return st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=16)


def real_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    text = st.one_of(st.sampled_from(SENTENCES), st.text(max_size=12))
    return text.map(lambda t: tokenizer.encode(t, add_special_tokens=False))


def byte_runs(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> Iterator[bytes]:
    """The runs of byte tokens, as the library's ByteFallback sees them."""
    run = b""
    for token_id in ids:
        token = tokenizer.backend.id_to_token(token_id)
        if token is None or (skip and token_id in tokenizer.special_token_ids):
            continue
        if token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
        else:
            yield run
            run = b""
    yield run


def is_out_of_scope(name: str, tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> bool:
    """Byte fallback decodes a run of byte tokens at once, and no stream can take back the
    whole characters that such a run began with when it turns out to be no UTF-8. For the
    window, any run that is no UTF-8 is out of scope."""
    if name not in ("byte-fallback", "byte-fallback-no-strip", "metaspace"):
        return False
    for run in byte_runs(tokenizer, ids, skip):
        try:
            run.decode()
        except UnicodeDecodeError as error:
            if error.start > 0 or (
                name == "metaspace" and error.reason != "unexpected end of data"
            ):
                event("a run of bytes that is no UTF-8")
                return True
    return False


def test_kinds_of_decoder() -> None:
    assert isinstance(byte_level().text_decoder(), ByteLevelDecoder)
    for strip in (True, False):
        assert isinstance(byte_fallback(strip).text_decoder(), ByteFallbackDecoder)
    for kind in ("metaspace", "bpe", "none", "wordpiece"):
        assert isinstance(windowed(kind).text_decoder(), WindowDecoder)


@pytest.mark.parametrize("name", TOKENIZERS)
@FUZZ
@given(data=st.data(), skip=st.booleans())
def test_equals_decoding_at_once(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.one_of(random_ids(tokenizer), real_ids(tokenizer)))
    if is_out_of_scope(name, tokenizer, ids, skip):
        return
    parts = pushes(tokenizer, ids, skip=skip)
    whole = tokenizer.decode(ids, skip)
    assert "".join(parts) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in part for part in parts)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace", "bpe", "wordpiece"])
@FUZZ
@given(data=st.data(), skip=st.booleans())
def test_equals_state_after_a_prompt(name: str, data: st.DataObject, skip: bool) -> None:
    """decode(prompt + output) minus decode(prompt), where the prompt ends in a character."""
    tokenizer = TOKENIZERS[name]()
    ids = st.one_of(random_ids(tokenizer), real_ids(tokenizer))
    prompt, output = data.draw(ids), data.draw(ids)
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    if not whole.startswith(before) or before.endswith(REPLACEMENT):
        event("the prompt ends inside a character")
        return
    if is_out_of_scope(name, tokenizer, prompt + output, skip):
        return
    assert "".join(pushes(tokenizer, output, prompt, skip)) == whole[len(before) :]


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace"])
@FUZZ
@given(data=st.data())
def test_equals_decode_stream(name: str, data: st.DataObject) -> None:
    """The library's own stream gives the same text. It holds back more: all of a token that
    ends inside a character, where here the whole characters before that are out."""
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(real_ids(tokenizer))
    stream = DecodeStream(skip_special_tokens=True)
    decoder = tokenizer.text_decoder()
    theirs = ours = ""
    for token_id in ids:
        theirs += stream.step(tokenizer.backend, token_id) or ""
        ours += decoder.push(token_id)
        assert ours.startswith(theirs)
    # A replacement character that is meant at the end is one that both wait behind.
    if not tokenizer.decode(ids).endswith(REPLACEMENT):
        assert ours == theirs == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace"])
def test_prompt_ends_inside_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    token = tokenizer.backend.token_to_id
    if name == "byte-level":
        alphabet = {b: c for c, b in byte_alphabet().items()}
        spelt = [alphabet[byte] for byte in range(256)]
        tail = token("<think>")
    else:
        spelt = [f"<0x{byte:02X}>" for byte in range(256)]
        tail = token("好")

    def one(byte: int) -> int:
        return token(spelt[byte])

    tail_text = tokenizer.decode([tail])
    you = [one(byte) for byte in "你".encode()]
    assert pushes(tokenizer, you[2:], you[:2]) == ["你", ""]
    assert pushes(tokenizer, you[1:], you[:1]) == ["", "你", ""]
    assert pushes(tokenizer, [*you[1:], tail], [tail, *you[:1]]) == ["", "你", tail_text, ""]
    # A character that the prompt began and the output does not finish is the prompt's.
    assert pushes(tokenizer, [tail], you[:2]) == [tail_text, ""]
    assert pushes(tokenizer, [], you[:2]) == [""]
    literal = [one(byte) for byte in REPLACEMENT.encode()]
    if name != "metaspace":
        assert pushes(tokenizer, literal[1:], literal[:1]) == ["", REPLACEMENT, ""]


def test_alphabet_is_the_librarys() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_byte_run_that_breaks_after_a_character() -> None:
    """The one difference to decoding at once: what is out stays out."""
    tokenizer = byte_fallback()
    one = tokenizer.backend.token_to_id
    ids = [one("<0x41>"), one("<0xFF>"), one("<0x42>"), one("a"), one("<0x43>")]
    assert tokenizer.decode(ids) == f"{REPLACEMENT * 3}aC"
    assert pushes(tokenizer, ids) == ["A", REPLACEMENT, REPLACEMENT, "a", "C", ""]


@pytest.mark.parametrize("length", range(12, 24))
def test_prompt_ends_in_a_long_run_of_bytes(length: int) -> None:
    tokenizer = byte_fallback()
    run = ("é世🙂" * 5).encode()
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in run]
    whole = run[:length].decode(errors="ignore")
    assert "".join(pushes(tokenizer, ids[length:], ids[:length])) == ("é世🙂" * 5)[len(whole) :]


def test_newline_byte_is_handed_out_at_once() -> None:
    tokenizer = byte_fallback()
    newline = tokenizer.backend.token_to_id("<0x0A>")
    assert pushes(tokenizer, [newline, newline]) == ["\n", "\n", ""]


def test_leading_space() -> None:
    tokenizer = byte_fallback()
    hello, bos = tokenizer.backend.token_to_id("▁hello"), 1
    assert pushes(tokenizer, [hello, hello]) == ["hello", " hello", ""]
    assert pushes(tokenizer, [hello], [bos]) == ["hello", ""]
    assert pushes(tokenizer, [hello], [bos, hello]) == [" hello", ""]
    assert pushes(tokenizer, [hello], [hello, bos]) == [" hello", ""]


def test_window_stays_small() -> None:
    tokenizer = windowed("metaspace")
    rng = random.Random(7)
    print("seed 7")
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids, False)

    decoder = WindowDecoder(decode)
    for _ in range(3000):
        decoder.push(rng.randrange(3, 259))
    assert longest <= 24


def test_failure_in_decoding_is_raised() -> None:
    def decode(ids: list[int]) -> str:
        raise ValueError("broken")

    detokenizer = Detokenizer(WindowDecoder(decode), stop=("x",))
    with pytest.raises(ValueError, match="broken"):
        detokenizer.push(1)


def reference(
    parts: Sequence[str], stops: Sequence[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int | None]:
    """Text, stop string and number of tokens by searching the whole text after each token."""
    text = ""
    for n, part in enumerate(parts, 1):
        old, text = len(text), text + part
        if n <= min_tokens:
            continue
        found = [
            (start, rank, stop)
            for rank, stop in enumerate(stops)
            for start in range(len(text) - len(stop) + 1)
            if text.startswith(stop, start) and start + len(stop) > old
        ]
        if found:
            start, _, stop = min(found)
            return text[: start + len(stop) if include else start], stop, n
    return text, None, None


class Pieces:
    """A decoder whose token i is the i-th of some pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


@examples(1500)
@given(
    parts=st.lists(st.text("ab🙂", max_size=4), max_size=10),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings(parts: list[str], stops: list[str], include: bool, min_tokens: int) -> None:
    text, stop, length = reference(parts, stops, include, min_tokens)
    detokenizer = Detokenizer(
        Pieces(parts), stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    out = ""
    for n in range(len(parts)):
        out += detokenizer.push(n)
        assert text.startswith(out)
        assert (detokenizer.stopped is not None) == (n + 1 == length)
        if detokenizer.stopped is not None:
            break
        # No more is held back than the longest suffix that a stop string begins with.
        so_far = "".join(parts[: n + 1])
        lengths = range(len(so_far) + 1)
        possible = [
            k
            for k in lengths
            if any(
                s != so_far[len(so_far) - k :] and s.startswith(so_far[len(so_far) - k :])
                for s in stops
            )
        ]
        assert len(so_far) - len(out) == max(possible, default=0)
    assert detokenizer.stopped == stop
    assert out + detokenizer.finish() == text


@FUZZ
@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 3))
def test_stop_strings_in_tokens(data: st.DataObject, include: bool, min_tokens: int) -> None:
    tokenizer = byte_level()
    ids = data.draw(real_ids(tokenizer))
    whole = tokenizer.decode(ids)
    starts = st.integers(0, max(0, len(whole) - 1))
    cuts = st.tuples(starts, st.integers(1, 6)).map(lambda c: whole[c[0] : c[0] + c[1]])
    stops = [s for s in data.draw(st.lists(cuts, max_size=3)) if s]
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    prompt = tokenizer.encode("Once ")
    expected, stop, length = reference(pushes(tokenizer, ids), stops, include, min_tokens)
    detokenizer = tokenizer.detokenizer(params, prompt)
    out = ""
    for n, token_id in enumerate(ids, 1):
        out += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            assert n == length
            break
    assert detokenizer.stopped == stop
    assert out + detokenizer.finish() == expected


SPACES = " " * 128
"""Text of the longest token of many vocabularies."""


@pytest.mark.parametrize(
    "stops",
    [
        [" " * 1000 + chr(65 + i) + "y" * 23 for i in range(64)],
        [" " * 1022 + chr(65 + i) + " " for i in range(64)],
        [" " * (512 + i) + "🙂" + " " * (511 - i) for i in range(64)],
        [" " * 512 + "a" + " " * 511, *(chr(65 + i) + " " * 120 for i in range(63))],
    ],
    ids=["end", "last but one", "middle", "short and long"],
)
def test_each_character_is_searched_twice_at_most(
    stops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[bytes] = []

    def search(texts: list[bytes], text: bytes) -> int:
        searched.append(text)
        return bisect_right(texts, text)

    monkeypatch.setattr(detokenizer_module, "bisect_right", search)
    parts = [*[SPACES] * 20, "q", *[SPACES] * 10, stops[-1], "q"]
    expected, stop, length = reference(parts, stops, include=False, min_tokens=0)
    assert length is not None
    detokenizer = Detokenizer(Pieces(parts), stop=stops)
    out = "".join([detokenizer.push(n) for n in range(length)])
    assert (out, detokenizer.stopped) == (expected, stop)
    num_characters = len("".join(parts[:length]).encode())
    assert 0 < len(searched) <= 2 * num_characters
    assert max(map(len, searched)) <= 1200


def test_first_of_nested_stop_strings_wins() -> None:
    stops = [" " * (900 + i) for i in range(64)]
    detokenizer = Detokenizer(Pieces([" " * 896, SPACES]), stop=stops)
    assert [detokenizer.push(0), detokenizer.push(1)] == ["", ""]
    assert detokenizer.stopped == stops[0]


def test_stop_string_across_tokens_and_inside_one() -> None:
    detokenizer = Detokenizer(Pieces(["Hi\nUs", "er", ": and more"]), stop=["\nUser:"])
    assert [detokenizer.push(i) for i in range(3)] == ["Hi", "", ""]
    assert detokenizer.stopped == "\nUser:"
    assert detokenizer.finish() == ""
    with pytest.raises(RuntimeError, match="User"):
        detokenizer.push(0)


def test_skip_special_tokens_and_flush() -> None:
    tokenizer = byte_level()
    end = tokenizer.backend.token_to_id("<|end|>")
    ids = [end, *tokenizer.encode("é")]
    shown = SamplingParams(skip_special_tokens=False)
    assert tokenizer.detokenizer(shown).push(end) == "<|end|>"
    detokenizer = tokenizer.detokenizer(SamplingParams(stop="zz"))
    assert detokenizer.push(end) == ""
    first_byte = tokenizer.backend.token_to_id("Ã")
    assert detokenizer.push(first_byte) == ""
    assert detokenizer.finish() == REPLACEMENT
    assert "".join(pushes(tokenizer, ids)) == "é"
