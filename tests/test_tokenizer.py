"""Tokenizer and ChatTemplate, against tokenizers and transformers."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.text.long_text import LONG_TEXT_CHARACTERS
from asyncllm.text.tokenizer import Tokenizer
from tests.refusals import refused
from tests.tokenizer_kinds import KINDS
from tests.tokenizer_kinds import make as make_kind

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
SENTENCES = ["The quick brown fox.", "你好，世界！ 🙂", "user assistant system tool\n\n", "été"]
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin|>",
    "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
}

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
WITH_TOOLS = """\
{{- bos_token }}
{%- if tools %}
{{ '# Tools' }}
    {%- for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(count=0, last=none) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.last = message %}
[{{ ns.count }}] {{ message['role'] | upper }}: {{ message.content | trim if message.content }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
 -> {{ call.function.name }}({{ call.function.arguments | tojson(sort_keys=true) }})
        {%- endfor %}
    {%- endif %}
    {%- if message.reasoning_content is defined %} <think>{{ message.reasoning_content }}</think>
    {%- endif %}
    {%- if ns.count > 9 %}{% break %}{% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}
/no_think
{%- endif %}{{ eos_token }} {{ dict(a=1)['a'] }} {{ dict.fromkeys('ab', 2)['b'] }}
{{ namespace({'self': 1}, b=2).self }} {{ 'x<&>' | tojson }}
"""
TRAINING = """\
{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}{% set x = message.content %}{{ x }}{% endgeneration %}
  {% else %}
{{ message.content }}
  {% endif %}
{% endfor %}
{{ strftime_now('%Y') }}
"""
STRICT = """\
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}
{{- raise_exception('Unknown role ' + message.role) }}
{%- endif %}
{{- message.content }}
{%- endfor %}
"""


def make_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return backend


@pytest.fixture(scope="module")
def backend_json() -> str:
    return make_backend().to_str()


@pytest.fixture
def make(tmp_path: Path, backend_json: str) -> Callable[..., Path]:
    def directory(template: Any = None, **changes: Any) -> Path:
        (tmp_path / "tokenizer.json").write_text(backend_json)
        config = CONFIG | changes | ({} if template is None else {"chat_template": template})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return directory


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_directory(path)


def transformers_tokenizer(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


# Encoding


def test_encode_and_decode(make: Callable[..., Path], backend_json: str) -> None:
    tokenizer, raw = load(make()), Backend.from_str(backend_json)
    for text in [*SENTENCES, "", "<|im_start|>user\n", "x" * 10_000 + " 你好" * 3000]:
        for special in (True, False):
            ids = tokenizer.encode(text, special)
            assert ids == raw.encode(text, add_special_tokens=special).ids
            assert ids[:1] == [0] if special else 0 not in ids
        skipped = text.replace("<|im_start|>", "")
        assert tokenizer.decode(tokenizer.encode(text)) == skipped
        assert tokenizer.decode(tokenizer.encode(text), False) == "<|begin|>" + text
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_special_tokens(make: Callable[..., Path]) -> None:
    tokenizer = load(make(pad_token=None))
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert tokenizer.eos_token_id == 1
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size()


def test_special_tokens_map_is_the_fallback(
    make: Callable[..., Path],
) -> None:
    path = make(bos_token=None)
    assert "bos_token" not in load(path).special_tokens
    more = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    (path / "special_tokens_map.json").write_text(json.dumps(more))
    tokenizer = load(path)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|end|>"}
    assert tokenizer.eos_token_id == 1


def test_truncation_and_padding_of_the_file_are_off(make: Callable[..., Path]) -> None:
    path = make()
    backend = make_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(path / "tokenizer.json"))
    tokenizer = load(path)
    text = SENTENCES[0] * 3
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


def test_bad_prompts(make: Callable[..., Path]) -> None:
    tokenizer = load(make())
    for prompt in (b"bytes", 7, None, ["a"], "lone \ud800", "lone \ud800" * LONG_TEXT_CHARACTERS):
        with refused("prompt", "prompt"):
            tokenizer.encode(prompt)  # pyright: ignore[reportArgumentType]


def test_long_texts_leave_the_interpreter_to_others(make: Callable[..., Path]) -> None:
    tokenizer = load(make())
    rng = random.Random(3)
    print("seed 3")
    words = " ".join(SENTENCES).split()
    text = " ".join(rng.choices(words, k=60_000))
    gaps = []
    for encode in (tokenizer.encode, lambda text: tokenizer.backend.encode(text).ids):
        done = threading.Event()
        worker = threading.Thread(target=lambda e=encode, d=done: (e(text), d.set()))
        longest, last = 0.0, time.perf_counter()
        worker.start()
        while not done.wait(0.001):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        worker.join()
        gaps.append(max(longest, time.perf_counter() - last))
    print(f"longest gap: {gaps[0]:.3f} s, {gaps[1]:.3f} s with the lock held")
    assert gaps[0] < gaps[1] / 2


def test_concurrent_encoding(make: Callable[..., Path]) -> None:
    tokenizer = load(make())
    texts = [s * n for s in SENTENCES for n in (1, 7, 400)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(tokenizer.encode, texts)) == expected


@pytest.mark.parametrize("name", KINDS)
def test_a_length_is_proven_only_where_it_is(name: str) -> None:
    tokenizer = make_kind(KINDS[name]())
    rng = random.Random(4)
    print("seed 4")
    longest = max(tokenizer.backend.get_vocab(), key=len)
    parts = ["a", " ", "\n", "🙂", "é", "\u03b1\u0313\u0300\u0345", "</s>", "the ", "|", longest]
    for part in [*parts, *("".join(rng.choices(parts, k=9)) for _ in range(50))]:
        text = part * 50
        assert tokenizer.min_num_tokens(len(text)) <= len(tokenizer.encode(text, False))
    proven = name in ("byte level", "metaspace first", "metaspace always")
    assert tokenizer.min_num_tokens(10**6) == (-(-(10**6) // len(longest)) if proven else 0)


def test_a_length_where_text_is_dropped() -> None:
    strips, splits = KINDS["byte level"](), KINDS["byte level"]()
    strips.add_special_tokens([AddedToken("<|e|>", rstrip=True)])
    splits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for backend, text in ((strips, "<|e|>" + " " * 10_000), (splits, "a" + " " * 10_000)):
        tokenizer = make_kind(backend)
        assert len(tokenizer.encode(text, False)) == 1
        assert tokenizer.min_num_tokens(len(text)) == 0


def test_a_length_with_a_normalizer_that_composes() -> None:
    backend = KINDS["byte level"]()
    backend.normalizer = normalizers.NFC()
    composed = "\u1f82"
    backend.add_tokens([composed * 20])
    tokenizer = make_kind(backend)
    text = "\u03b1\u0313\u0300\u0345" * 200
    assert tokenizer.encode(text, False) == [backend.token_to_id(composed * 20)] * 10
    assert 0 < tokenizer.min_num_tokens(len(text)) <= 10


def test_the_vocabulary_is_read_while_loading(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(make())
    vocabulary = tokenizer.backend.get_vocab()

    class Unread:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} is read")

    monkeypatch.setattr(tokenizer, "backend", Unread())
    assert tokenizer.min_num_tokens(100 * max(map(len, vocabulary))) == 100
    assert tokenizer.vocab_size == max(vocabulary.values()) + 1


# Loading


def test_broken_files(make: Callable[..., Path]) -> None:
    path = make()
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load(path)
    path = make(eos_token=5)
    with pytest.raises(ModelLoadError, match="eos_token is 5"):
        load(path)
    (path / "tokenizer_config.json").write_text("?")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load(path)
    for template in (7, [{"name": "default"}], {"default": "x"}):
        with pytest.raises(ModelLoadError, match="chat_template is"):
            load(make(template))


def test_a_panic_of_the_library_names_the_file(make: Callable[..., Path]) -> None:
    """It is no Exception, and would pass every guard."""
    file = make() / "tokenizer.json"
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    file.write_text(json.dumps(content))
    with pytest.raises(
        ModelLoadError, match=r"tokenizer\.json: is not a valid tokenizer"
    ) as caught:
        load(file.parent)
    assert not isinstance(caught.value.__cause__, Exception)


def test_folder_errors_name_the_folder(make: Callable[..., Path], monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such piece")

    monkeypatch.setattr(Tokenizer, "_make_decoder_factory", fail)
    path = make()
    with pytest.raises(ModelLoadError, match=re.escape(f"{path}: ") + r".*\(no such piece\)"):
        load(path)


def test_unknown_characters_fail_only_their_text() -> None:
    backend = Backend(models.WordLevel({"known": 0, "<|end|>": 1}, unk_token="none"))
    backend.add_special_tokens(["<|end|>"])
    tokenizer = make_kind(backend)
    assert tokenizer.encode("known") == [0]
    assert tokenizer.encode_delimiter("unheard") == ()
    assert tokenizer.encode_delimiter("<|end|>") == (1,)
    with pytest.raises(InvalidRequestError, match=r"cannot be tokenised.*UNK"):
        tokenizer.encode("unheard")


def test_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        load(tmp_path)
    backend = make_backend()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<|end|>"}))
    tokenizer = load(tmp_path)
    text = " ".join(SENTENCES)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("model_type", "files"),
    [
        ("qwen3", "merges.txt, vocab.json"),
        ("gpt2", "merges.txt, vocab.json"),
        ("bert", "vocab.txt"),
        ("t5", "spiece.model"),
        ("gemma", ""),
        ("llama", ""),
    ],
)
@pytest.mark.parametrize("config", [None, {"eos_token": "<|im_end|>"}])
def test_a_model_without_the_files_of_its_tokenizer(
    tmp_path: Path, model_type: str, files: str, config: dict[str, str] | None
) -> None:
    """transformers makes an empty one by the type of the model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.json.*{files}"):
        load(tmp_path)


@pytest.mark.usefixtures("own_code")
def test_code_of_the_checkpoint_runs_only_when_trusted(tmp_path: Path, backend_json: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "own.json").write_text(backend_json)
    (tmp_path / "files" / "tokenization_own.py").write_text(
        "import os\n"
        "from tokenizers import Tokenizer\n"
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, path, *args, **kwargs):\n"
        "        file = os.path.join(path, 'own.json')\n"
        "        return cls(tokenizer_object=Tokenizer.from_file(file))\n"
    )
    config = {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (tmp_path / "files" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "files" / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load(tmp_path / "files")
    tokenizer = Tokenizer.from_directory(tmp_path / "files", trust_remote_code=True)
    assert tokenizer.encode("été") == Backend.from_str(backend_json).encode("été").ids


# Chat templates

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello <|im_end|> & <b> 你好 "},
    {"role": "assistant", "content": None, "reasoning_content": "hmm", "tool_calls": None},
    {
        "role": "assistant",
        "content": "I call.",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [None]}}}
        ],
    },
    {"role": "user", "content": ""},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "Grüße <&>"}}


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "kwargs"),
    [
        (CHATML, {}),
        (WITH_TOOLS, {}),
        (WITH_TOOLS, {"tools": [TOOL, TOOL], "enable_thinking": False}),
        (WITH_TOOLS, {"tools": [], "bos_token": "other"}),
        (TRAINING, {}),
        ([{"name": "default", "template": CHATML}, {"name": "tool_use", "template": STRICT}], {}),
        (
            [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": WITH_TOOLS}],
            {"tools": [TOOL]},
        ),
        (
            [{"name": "a", "template": CHATML}, {"name": "b", "template": "b"}],
            {"chat_template": "b"},
        ),
        (CHATML, {"chat_template": "{{ messages | length }} {{ add_generation_prompt }}"}),
    ],
)
def test_renders_as_transformers(
    make: Callable[..., Path], template: Any, kwargs: dict[str, Any], generation_prompt: bool
) -> None:
    path = make(template)
    chat = CHAT if template is WITH_TOOLS else [m for m in CHAT if m["content"] is not None]
    theirs = transformers_tokenizer(path).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
    )
    before = json.dumps(chat)
    tokenizer = load(path)
    ours = tokenizer.apply_chat_template(chat, add_generation_prompt=generation_prompt, **kwargs)
    assert ours == theirs
    assert json.dumps(chat) == before


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_other_names_of_reasoning(make: Callable[..., Path], name: str) -> None:
    """Newer versions of transformers know them as well."""
    tokenizer = load(make(WITH_TOOLS))
    said = {"role": "assistant", "content": "Yes."}
    expected = tokenizer.apply_chat_template([said | {"reasoning_content": "hmm"}])
    assert "<think>hmm</think>" in expected
    assert tokenizer.apply_chat_template([said | {name: "hmm"}]) == expected


def test_no_second_bos(make: Callable[..., Path]) -> None:
    tokenizer = load(make("{{ bos_token }}" + CHATML))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|begin|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(0) == 1
    assert ids == [0, 2, *tokenizer.encode("user\nHi", False), 3, *ids[ids.index(3) + 1 :]]


@pytest.mark.parametrize("source", ["jinja", "json", "additional"])
def test_template_files(make: Callable[..., Path], source: str) -> None:
    path = make("from the configuration")
    if source == "json":
        (path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    else:
        (path / "chat_template.json").write_text(json.dumps({"chat_template": "unread"}))
        (path / "chat_template.jinja").write_text("from jinja")
    if source == "additional":
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    chat = [{"role": "user", "content": "x"}]
    tokenizer = load(path)
    expected = "from json" if source == "json" else "from jinja"
    assert tokenizer.apply_chat_template(chat) == expected
    expected = "for tools" if source == "additional" else expected
    assert tokenizer.apply_chat_template(chat, tools=[TOOL]) == expected
    if source != "json":
        theirs = transformers_tokenizer(path).apply_chat_template(chat, [TOOL], tokenize=False)
        assert theirs == expected


def test_text_parts_are_joined(make: Callable[..., Path]) -> None:
    tokenizer = load(make(CHATML))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=False
    )
    assert text == "<|im_start|>user\na\nb<|im_end|>\n"


def test_objects_as_messages(make: Callable[..., Path]) -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    class Model:
        def model_dump(self) -> dict[str, str]:
            return {"role": "user", "content": "m"}

    text = load(make(CHATML)).apply_chat_template(
        (Message("user", "d"), Model()), add_generation_prompt=False
    )
    assert text == "<|im_start|>user\nd<|im_end|>\n<|im_start|>user\nm<|im_end|>\n"


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ("Hi", "messages: is a str"),
        ({"role": "user"}, "messages: is a dict"),
        ([], "messages: is empty"),
        (None, "messages: is a NoneType"),
        (["Hi"], r"messages\[0\]: is a str"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": 5, "content": "x"}], r"messages\[0\].role: is 5"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: is 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\]: is a part of type 'image_url', expected {'type': 'text', "
            r"'text': …}: the engine computes text, and takes no images, audio or video",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": object()}], r"messages\[0\].content: a object"),
        ([{"role": "wizard", "content": "x"}], "Unknown role wizard"),
        ([{"role": "user"}, {"role": "user", "name": {1}}], r"messages\[1\].name: a set"),
    ],
)
def test_bad_messages(make: Callable[..., Path], messages: Any, where: str) -> None:
    with refused("messages", where):
        load(make(STRICT)).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"tools": [1]}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"continue_final_message": True}, "chat_template_kwargs"),
        ({"tokenize": True}, "chat_template_kwargs"),
        ({"value": object()}, "chat_template_kwargs"),
        ({"chat_template": "{% if %}"}, "chat_template"),
        ({"chat_template": "no_such_name"}, "chat_template"),
    ],
)
def test_bad_arguments(make: Callable[..., Path], kwargs: dict[str, Any], param: str) -> None:
    with refused(param):
        load(make(CHATML)).apply_chat_template([{"role": "user", "content": "x"}], **kwargs)


def test_compiling_in_advance(make: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{% if %}"}]
    tokenizer = load(make(named))
    chat = [{"role": "user", "content": "x"}]
    expected = load(make(CHATML)).apply_chat_template(chat)
    tokenizer.chat_template.compile()
    assert tokenizer.apply_chat_template(chat) == expected
    with pytest.raises(InvalidRequestError, match="does not compile"):
        tokenizer.apply_chat_template(chat, tools=[TOOL])
    load(make()).chat_template.compile()


def test_models_without_a_usable_template(make: Callable[..., Path]) -> None:
    chat = [{"role": "user", "content": "x"}]
    with refused("messages", "no chat template"):
        load(make()).apply_chat_template(chat)
    named = load(make([{"name": "a", "template": "a"}, {"name": "b", "template": "b"}]))
    with refused("chat_template", "expected one of a, b"):
        named.apply_chat_template(chat)
    broken = load(make("{% for %}"))
    assert broken.encode("works") == load(make()).encode("works")
    with pytest.raises(InvalidRequestError, match="does not compile"):
        broken.apply_chat_template(chat)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ dict.mro() }}",
        "{{ dict.update(messages[0], role=1) }}",
        "{{ dict[0].update(messages[0], role=1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_sandbox(make: Callable[..., Path], template: str) -> None:
    tokenizer = load(make(template))
    with refused("messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
