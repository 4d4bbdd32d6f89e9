"""GGUF pre-tokenizers: rules that split text into words, by the name in a GGUF file.

The names and regular expressions are those of llama.cpp (``llama-vocab.cpp``), even where they
differ from the model's own tokenizer, because GGUF files are made for llama.cpp. For example,
llama.cpp knows no classes of upper and lower case beyond ASCII. An expression of ``std::regex`` is
rewritten for Oniguruma: non-ASCII spaces match only ``\\s``, and ``\\d`` is ``[0-9]``.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION_PATTERN = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION_PATTERN = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES_PATTERN = r"\s+(?!\S)|\s+"
_LINE_ENDS_OR_SPACES_PATTERN = rf"\s*[\r\n]+|{_SPACES_PATTERN}"
_PUNCTUATION_OR_SPACES_PATTERN = rf"{_PUNCTUATION_PATTERN}|{_LINE_ENDS_OR_SPACES_PATTERN}"

_GPT2_PATTERN = (
    rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES_PATTERN}"
)
_LLAMA3_PATTERN = (
    rf"{_CONTRACTION_PATTERN}|{_WORD_PATTERN}|\p{{N}}{{1,3}}|{_PUNCTUATION_OR_SPACES_PATTERN}"
)
_QWEN2_PATTERN = rf"{_CONTRACTION_PATTERN}|{_WORD_PATTERN}|\p{{N}}|{_PUNCTUATION_OR_SPACES_PATTERN}"

_NOT_LOWER_CLASS, _NOT_UPPER_CLASS = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_NOT_LOWER_OR_MARK_CLASS = r"[\p{L}\p{M}&&[^a-z]]"
_NOT_UPPER_OR_MARK_CLASS = r"[\p{L}\p{M}&&[^A-Z]]"


def _cased_word_pattern(lower: str, upper: str, suffix: str = "") -> str:
    """Regular expression of a word: letters of ``upper``, then letters of ``lower``. Either part
    may be empty, but not both. One character that is no letter, digit or line end may precede."""
    prefix = r"[^\r\n\p{L}\p{N}]?"
    return f"{prefix}{upper}*{lower}+{suffix}|{prefix}{upper}+{lower}*{suffix}"


_PUNCTUATION_OR_SLASHES_PATTERN = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINE_ENDS_OR_SPACES_PATTERN}"
_ANY_CASE_WORD_PATTERN = _cased_word_pattern(
    r"[\p{L}\p{M}]", r"[\p{L}\p{M}]", f"{_CONTRACTION_PATTERN}?"
)
_DIGIT_TRIPLES_PATTERN = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_NEWLINE_RUNS_PATTERN = r"[^\n]+|[\n]+"
_PUNCTUATED_WORD_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK3_PATTERN = (
    rf"{_PUNCTUATED_WORD_PATTERN}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINE_ENDS_OR_SPACES_PATTERN}"
)
_HAN_OR_KANA_PATTERN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# ``&&\S`` excludes U+3000, a space within these ranges, as llama.cpp does.
_HAN_TO_HANGUL_PATTERN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&\\S]+"
_BLOOM_PATTERN = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HAN_RANGES = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_ALPHABET_LETTER_RANGES = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-"
    "ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-"
    "ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Rules by which a BPE tokenizer splits text into words.

    Attributes:
        split_patterns: regular expressions, applied in order; each splits every piece of text into
            its matches and the text between them.
        ignore_merges: whether a word of the vocabulary is one token even if the merges split it.
        add_bos: whether a prompt begins with the BOS token, unless the file says otherwise.
        merges_characters: whether characters are merged, not bytes. A space is then written as
            U+2581, and a character that the vocabulary lacks as byte tokens. llama.cpp also keeps a
            run of newlines whole if the run is a token; the merges of Gemma's vocabulary have the
            same result.
    """

    split_patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    merges_characters: bool = False


def _split_by(*patterns: str, **options: bool) -> PreTokenizer:
    """Make a PreTokenizer that splits by these patterns; ``options`` are its other fields."""
    return PreTokenizer(patterns, **options)


_GGUF_NAMES_BY_PRE_TOKENIZER: dict[PreTokenizer, str] = {
    _split_by(r"[\p{P}$+<=>^~|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    _split_by(_GPT2_PATTERN): (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4"
    ),
    _split_by(r"\p{N}", _GPT2_PATTERN): (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"
    ),
    _split_by(r"[\p{P}$+<=>^~|`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]"): "falcon",
    _split_by(_LLAMA3_PATTERN, ignore_merges=True, add_bos=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    _split_by(_LLAMA3_PATTERN): "dbrx smaug-bpe chatglm-bpe",
    _split_by(_LLAMA3_PATTERN, ignore_merges=True): "glm4 glm5",
    _split_by(
        rf"{_CONTRACTION_PATTERN}|{_WORD_PATTERN}|\p{{N}}{{1,3}}|{_PUNCTUATION_PATTERN}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s{1}",
    ): "jais-2",
    _split_by(_QWEN2_PATTERN): (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "bailingmoe bailingmoe2 llada-moe"
    ),
    _split_by(
        rf"{_CONTRACTION_PATTERN}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINE_ENDS_OR_SPACES_PATTERN}",
    ): "qwen35",
    _split_by(
        _cased_word_pattern(_NOT_UPPER_CLASS, _NOT_LOWER_CLASS)
        + rf"|\p{{N}}|{_PUNCTUATION_OR_SLASHES_PATTERN}",
        ignore_merges=True,
        add_bos=True,
    ): "tekken",
    _split_by(
        _cased_word_pattern(_NOT_UPPER_CLASS, _NOT_LOWER_CLASS, f"{_CONTRACTION_PATTERN}?")
        + rf"|\p{{N}}{{1,3}}|{_PUNCTUATION_OR_SLASHES_PATTERN}",
    ): "gpt-4o llama4 kanana2 talkie minimax-m2",
    _split_by(
        _cased_word_pattern(
            _NOT_UPPER_OR_MARK_CLASS, _NOT_LOWER_OR_MARK_CLASS, f"{_CONTRACTION_PATTERN}?"
        )
        + rf"|\p{{N}}{{1,3}}|{_PUNCTUATION_OR_SLASHES_PATTERN}",
        ignore_merges=True,
    ): "granite-embed-multi-97m",
    _split_by(
        _DIGIT_TRIPLES_PATTERN,
        rf"{_ANY_CASE_WORD_PATTERN}|\p{{N}}{{1,3}}|{_PUNCTUATION_OR_SLASHES_PATTERN}",
    ): "tiny_aya cohere2moe",
    _split_by(
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
        f"\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_HAN_OR_KANA_PATTERN}",
        rf"{_ANY_CASE_WORD_PATTERN}|\p{{N}}|{_PUNCTUATION_OR_SLASHES_PATTERN}",
        ignore_merges=True,
    ): "youtu",
    _split_by(
        r"[\r\n]",
        rf"\s?[{_ALPHABET_LETTER_RANGES}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
        r"\s+\z",
        _HAN_TO_HANGUL_PATTERN,
        r"\p{N}+",
    ): "deepseek-llm",
    _split_by(
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL_PATTERN, r"\p{N}"
    ): "deepseek-coder",
    _split_by(r"\p{N}{1,3}", _HAN_OR_KANA_PATTERN, _DEEPSEEK3_PATTERN): (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4"
    ),
    _split_by(
        r"\p{N}{1,3}",
        _HAN_OR_KANA_PATTERN,
        rf"{_PUNCTUATED_WORD_PATTERN}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES_PATTERN}",
        r"\p{N}",
    ): "spark2_5",
    _split_by(_BLOOM_PATTERN): "poro-chat bloom gpt3-finnish",
    _split_by(_BLOOM_PATTERN, r"\p{N}"): "viking",
    _split_by(
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2_PATTERN,
        add_bos=True,
    ): "chameleon",
    _split_by(
        rf"[{_HAN_RANGES}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN_RANGES}]]+{_CONTRACTION_PATTERN}?"
        rf"|\p{{N}}{{1,3}}|{_PUNCTUATION_OR_SPACES_PATTERN}",
    ): "kimi-k2",
    _split_by(r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))"): "superbpe",
    _split_by(
        rf"{_CONTRACTION_PATTERN}|{_WORD_PATTERN}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        rf"|{_LINE_ENDS_OR_SPACES_PATTERN}",
    ): "seed-coder",
    _split_by(rf"{_WORD_PATTERN}|\p{{N}}|{_PUNCTUATION_OR_SPACES_PATTERN}"): "ufakzeka",
    _split_by(
        _DIGIT_TRIPLES_PATTERN,
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
        "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
        "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _DEEPSEEK3_PATTERN,
    ): "afmoe",
    _split_by(_NEWLINE_RUNS_PATTERN, _QWEN2_PATTERN): "laguna",
    _split_by(
        rf"{_CONTRACTION_PATTERN}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES_PATTERN}",
    ): "exaone-moe",
    _split_by(
        r"\p{N}{1,3}",
        rf"{_CONTRACTION_PATTERN}|{_WORD_PATTERN}|\p{{N}}+|{_PUNCTUATION_OR_SPACES_PATTERN}",
        ignore_merges=True,
    ): "minicpm5",
    _split_by(_NEWLINE_RUNS_PATTERN, add_bos=True, merges_characters=True): (
        "gemma4 granite-embed-multi-311m"
    ),
    _split_by(_NEWLINE_RUNS_PATTERN, merges_characters=True): "sarvam-moe",
}

PRE_TOKENIZERS = {
    name: pre_tokenizer
    for pre_tokenizer, names in _GGUF_NAMES_BY_PRE_TOKENIZER.items()
    for name in names.split()
}
"""Pre-tokenizers by ``tokenizer.ggml.pre``. "whitespace" is left out, because it drops text."""
