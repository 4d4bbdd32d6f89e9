"""Tokenizers of each family, made on the spot, with the same special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox | jumps.",
    "你好，世界！ 🙂",
    "user assistant system\n\n",
    "a <b> [c]",
]
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|user|>", "[INST]"]


def train_byte_level(
    sentences: Sequence[str], vocab_size: int, special: Sequence[str] = ()
) -> Backend:
    """Byte-level BPE of all bytes and the pairs that are frequent in ``sentences``; the tokens of
    ``special`` come first."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
    )
    backend.train_from_iterator(sentences, trainer)
    return backend


def byte_level() -> Backend:
    backend = train_byte_level(SENTENCES * 3, 330)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    backend.add_tokens(["<think>", "</think>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def sentencepiece(scheme: str) -> Backend:
    """As Llama 2 and Mistral are: byte fallback, special tokens in the vocabulary."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {
        text: i for i, text in enumerate([*SPECIAL[:3], *byte_tokens, *"▁abcdehinoqrstuwx<>|/"])
    }
    merges = []
    for pair in (("▁", "a"), ("h", "e"), ("▁", "t"), ("▁t", "he"), ("<", "/"), ("</", "s")):
        vocab["".join(pair)] = len(vocab)
        merges.append(pair)
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return backend


def llama_1() -> Backend:
    """The older way: a normalizer marks words."""
    backend = sentencepiece("never")
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.normalizer = normalizers.NFKC()
    trainer = UnigramTrainer(
        vocab_size=90, show_progress=False, special_tokens=SPECIAL, unk_token="<unk>"
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    return backend


def word_piece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    specials = ["[UNK]", "[CLS]", "[SEP]", *SPECIAL]
    trainer = WordPieceTrainer(vocab_size=150, show_progress=False, special_tokens=specials)
    backend.train_from_iterator(SENTENCES * 3, trainer)
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte level": byte_level,
    "metaspace first": lambda: sentencepiece("first"),
    "metaspace always": lambda: sentencepiece("always"),
    "llama 1": llama_1,
    "unigram": unigram,
    "word piece": word_piece,
}


def make(backend: Backend, template: str = CHATML) -> Tokenizer:
    special = {"bos_token": "<s>", "unk_token": "<unk>"}
    return Tokenizer(backend, ChatTemplate({"default": template}, special), special)
