"""Toy vocabularies in GGUF files, and the tokens that llama.cpp gives odd texts with them.

``python -m tests.gguf_vocabularies`` makes the vocabularies anew and records the tokens; it needs
llama_cpp. The tokens are kept in gguf_tokens.json: for each text the different sequences of ids,
and for each file which of them it has.
"""

from __future__ import annotations

import ctypes
import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from asyncllm.text.gguf_pre_tokenizers import PRE_TOKENIZERS

RECORDED = Path(__file__).with_name("gguf_tokens.json")

TEXTS = [
    "", " ", "   ", "\n", "\n\n\n", "\t\n", " \n ", "\r\n\r\n", "a\n\n b", "Hello world",
    " Hello  world ", "Hello, y'all! How are you 😁 ?我想在apple工作1314151天～",
    "I'm you'RE we'Ll DON'T it'S they'Ve 'tis 'S ''s a's1", "1234567890",
    "3.14159 1,000,000 ½ ² ٣٤٥ ④ 十二 ", "12 123 1234 12345 a1234567b", "٣٤٥٦",
    "ÉCOLE école École STRASSE straße ǅ ŉ", "camelCaseSnake_case HTTPServer iPhone",
    "cafe\u0301 n\u0303 e\u0301\u0302 \u0301x", "नमस्ते दुनिया क्षत्रिय", "สวัสดีชาวโลก",
    "안녕하세요 세계", "こんにちは世界カタカナ", "你好，世界！", "שלום עולם", "مرحبا بالعالم",
    "Привет, мир! ёж", "Γειά σου Κόσμε", "ភាសាខ្មែរ မြန်မာ", "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "x" * 300, "ab" * 30 + " " + "=" * 45 + "-" * 33, "aaaaaaa aaaaab baaaaa ababababa",
    "<s>text<|bos|>\u200b <|eos|> x", "<|im_end|>\nhi <|im_end|> <|fim_prefix|>a<mask> b",
    "<unk> <0x41> <0x0A>", "▁ ▁▁ a▁b", "Ġhello Ċ Ã",
    "foo(bar[3])->baz{}; // c\n\tif (x<=y && z!=0) { return `a|b`; }",
    "https://example.com/path?q=1&r=%20#frag", "user@mail.org $5.00 ~/.bashrc C:\\Temp\\x",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g\u0085h", " \u00a0 \u3000x\u3000 ",
    "。、！？「」…“”‘’—～－", "、\u3000。 \u3000、 “…”", "!@#$%^&*()_+-=[]{}|;':\",./<>?`~",
    "\x01\x1b\x1c\x1f\x7f", "\U0001d4d0\U00020000\U0002a6d6\U000f0000\ue000\ufffd\u0378",
    "trailing   ", "tabs\t\t\tand   spaces\n   indented\n\t\tcode", "a" + " " * 37 + "b",
    "\n" * 20 + "x" + "\r" * 3, "K\u212a'\u017f 's\u0131 ﬁ ﬃ", "a'b'c'd 'll'll 'm'd",
    "IMGIMGABCZ <sentinel:12> 's", "/usr//bin///x\n/\n//", "x\n/y !\n/ \r/", "ㄅㄆㄇ ㄱㄴ ！：",
    "ა Ⴀ Ꭰ ᲐԱ ʰª", "q̣̇ Å Å", "1e-9 0x1F 100% 1/2", " zq zq\n\nzq", "a 1 b 12 c 123 d", "é1 É2",
    "`a` `` ~x^", "$1 + $2 = <3>", "word\u0301s'S \u0301 's", "「1」 a。b",
    "\t\t\t", "x\t\t1 \t2\t\t1", "'tis 'tis'tis 'stay 'stay's",
    "<|endoftext|>  x<|im_end|> \n y</s>  z<s>  w", " !\n\n !a \n!",
]  # fmt: skip

_ODD = (
    "  |\n|\r| |\t|'s|'LL|'re|'|a|B|é|É|ǅ|1|12|٣|½|。|、|\u3000|你|あ|カ|한|ก|\u0301|्|न|!|$|/|_|😀|"
    "\u200d|\u00a0|\u0085|\u2028|<|x|Z|\u0378|[|`|ㄅ|…|Ⴀ|ʰ|ª|ͅ|\U00020000|﹏|፩|Ⅷ"
).split("|")


def odd_texts(seed: int, count: int) -> list[str]:
    """Random sequences of characters between which some rule splits."""
    numbers = random.Random(seed)
    return ["".join(numbers.choices(_ODD, k=numbers.randint(1, 14))) for _ in range(count)]


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_ABSENT = set("한ກ")
"""Characters that the vocabularies of characters lack."""


def vocabularies(merges: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and metadata of each file.

    Args:
        merges: those over bytes and those over characters, as ``train`` makes them.
    """
    alphabet = sorted(
        {part for merge in merges["bytes"] for part in merge.split(" ")} | _alphabet()
    )
    words = [merge.replace(" ", "") for merge in merges["bytes"]]
    tokens = list(dict.fromkeys([*(t for t in alphabet if len(t) == 1), *words, "camelCaseSnake"]))
    special = {"<|bos|>": 3, "<|eos|>": 3, "<|im_end|>": 1, "<|fim_prefix|>": 1, "<mask>": 3}
    special |= {"  ": 4, "<unk>": 2}
    tokens = [token for token in tokens if token not in special]
    byte_level = {
        "model": "gpt2",
        "tokens": [*tokens, *special],
        "token_type": [1] * len(tokens) + list(special.values()),
        "merges": list(merges["bytes"]),
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    }
    yield "no name", byte_level
    characters = [merge.replace(" ", "", 1) for merge in merges["characters"]]
    singles = sorted({c for merge in merges["characters"] for c in merge if c != " "})
    pieces = [p for p in dict.fromkeys([*singles, *characters]) if p not in ("<s>", "<unk>")]
    for name, rule in PRE_TOKENIZERS.items():
        if not rule.merges_characters:
            yield name, byte_level | {"pre": name}
            continue
        first = ["<pad>", "<eos>", "<bos>", "<unk>", *_BYTES]
        yield (
            name,
            {
                "model": "gemma4" if name == "gemma4" else "gpt2",
                "pre": name,
                "tokens": [*first, *pieces, "<|turn>"],
                "token_type": [3, 3, 3, 2, *[6] * 256, *[1] * len(pieces), 3],
                "merges": [m for m in merges["characters"] if m.replace(" ", "", 1) in pieces],
                "bos_token_id": 2,
                "eos_token_id": 1,
            },
        )
    pieces = [piece for piece in pieces if not set(piece) & _ABSENT]
    first = ["<unk>", "<s>", "</s>", *_BYTES]
    last = ["<|im_end|>", "  ", "   ", "<|endoftext|>"]
    sentencepiece = {
        "model": "llama",
        "tokens": [*first, *pieces, *last],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 3, 4, 4, 3],
        "scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0] * 4,
    }
    yield "llama", sentencepiece
    yield "llama, no space prefix", sentencepiece | {"add_space_prefix": False}
    yield "llama, EOS", sentencepiece | {"add_bos_token": False, "add_eos_token": True}
    yield (
        "llama, phi-3",
        sentencepiece
        | {
            "general.name": "Phi-3 toy",
            "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 3, 1, 1, 3],
        },
    )


def _alphabet() -> set[str]:
    from tokenizers import pre_tokenizers

    return set(pre_tokenizers.ByteLevel.alphabet())


def write_vocabulary(path: Path, values: Mapping[str, Any]) -> Path:
    """A GGUF file without tensors; keys without a dot are those of ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        kinds: dict[type, Any] = {
            list: writer.add_array, str: writer.add_string, bool: writer.add_bool,
        }  # fmt: skip
        full = key if "." in key else f"tokenizer.ggml.{key}"
        kinds.get(type(value), writer.add_uint32)(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class LlamaVocabulary:
    """llama.cpp's own tokenizer of a GGUF file."""

    def __init__(self, path: Path) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self._lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, path
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        data = text.encode()
        ids = (self._lib.llama_token * (len(data) + 3))()
        args = (self._vocab, data, len(data), ids, len(ids), add_special, True)
        return ids[: self._lib.llama_tokenize(*args)]

    def end_ids(self, size: int) -> set[int]:
        """Ids below ``size`` that end an answer."""
        is_end = self._lib.llama_vocab_is_eog
        return {i for i in range(size) if is_end(self._vocab, i)}

    def close(self) -> None:
        self._lib.llama_model_free(self._model)


def train() -> dict[str, list[str]]:
    """Merges over bytes and over characters that also join what some rule splits."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made: dict[str, list[str]] = {}
    for kind in ("bytes", "characters"):
        backend = Tokenizer(models.BPE())
        if kind == "bytes":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
        else:
            backend.normalizer = normalizers.Replace(" ", "▁")
        trainer = trainers.BpeTrainer(vocab_size=1700, show_progress=False, max_token_length=8)
        texts = TEXTS + odd_texts(1, 200)
        parts = [text[i : i + 9] for text in texts for i in range(0, max(1, len(text) - 6), 3)]
        backend.train_from_iterator(parts, trainer)
        merges = json.loads(backend.to_str())["model"]["merges"]
        made[kind] = [" ".join(merge) for merge in merges]
    made["bytes"].append("ĉĉ ĉ")  # Three tabs: one word for most rules, two for "jais-2".
    return made


def record() -> None:
    merges = train()
    sequences: list[list[list[int]]] = [[] for _ in TEXTS]
    files: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, values in vocabularies(merges):
            llama = LlamaVocabulary(write_vocabulary(Path(folder) / "x.gguf", values))
            which = []
            for text, seen in zip(TEXTS, sequences, strict=True):
                ids = llama.encode(text)
                if ids not in seen:
                    seen.append(ids)
                which.append(seen.index(ids))
            files[name] = {"which": which, "with ends": llama.encode("a", add_special=True)}
            llama.close()
    lines = {"merges": merges, "sequences": sequences, "files": files}
    RECORDED.write_text(json.dumps(lines, ensure_ascii=True, separators=(",", ":")) + "\n")


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


def expected(record: Mapping[str, Any], name: str) -> Iterable[tuple[str, list[int]]]:
    """Each text with llama.cpp's ids of it in the file ``name``."""
    which = record["files"][name]["which"]
    for text, sequences, i in zip(TEXTS, record["sequences"], which, strict=True):
        yield text, sequences[i]


if __name__ == "__main__":
    record()
