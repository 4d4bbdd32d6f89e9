"""Chat templates: inputs, sandbox and limits."""

from __future__ import annotations

import dataclasses
import json
import time
import tracemalloc
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from asyncllm.errors import ContextLengthExceededError, InvalidRequestError
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.template_input import TemplateInput
from asyncllm.text.template_sandbox import RenderLimits, TemplateLimitError, TemplateOutputError
from tests.tokenizer_kinds import byte_level, make

LIMITS = RenderLimits(max_output_characters=100_000, max_value_size=1_000_000, max_seconds=5.0)
CHAT = [
    {"role": "system", "content": "Be | brief."},
    {"role": "user", "content": "Hello <b>\n\n", "name": "Ann"},
    {"role": "assistant", "content": "Hi.", "calls": [{"f": {"x": [1, None, True, 2.5]}}]},
    {"role": "user", "content": "你好 🙂"},
]


def render(source: str, messages: Any = CHAT, limits: RenderLimits = LIMITS, **more: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    return template.render(TemplateInput(messages, more), limits)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}"
        "{{ loop.last }}{{ loop.revindex0 }}{{ loop.previtem.role if loop.previtem is defined }}"
        "{{ loop.nextitem.role if loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}"
        "{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.length ~ m.content ~ 1 ~ none }}"
        "{% else %}none{% endfor %}",
        "{% for m in [] %}x{% else %}empty{% endfor %}{% for x in missing %}x{% endfor %}",
        "{% for m in messages recursive %}{{ m.role }}{{ loop([]) if m.calls }}{% endfor %}",
        "{% for a in [1, 2] %}{% for b in range(3) %}{{ a * b }}{{ loop.depth }}"
        "{% endfor %}{% endfor %}",
        "{% for key, value in messages[1].items() %}{{ key ~ '=' ~ value }}{% endfor %}",
        "{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ messages[1].content[1:-2] }}",
        "{{ 'a' + 'b' * 3 }}{{ '=' * 20 }}{{ 2 ** 10 }}{{ 7 % 4 }}"
        "{{ '%s|%05.1f|%d%%' % ('a', 1.5, 3) }}",
        "{{ [1] + [2] }}{{ [0] * 3 }}{{ -1 * 2 }}{{ 3 * 'x' }}{{ 10 ** -1 }}{{ true * 3 }}",
        "{{ messages | map(attribute='role') | join(', ') }}"
        "{{ messages | map(attribute='role') | list }}",
        "{{ 'x'.join(['a', 'b']) }}{{ ', '.join(messages | map(attribute='content')) }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map('length') | list }}",
        "{{ messages[0].content.replace('b', 'BB') }}"
        "{{ messages[0].content | replace('b', 'B', 1) }}",
        "{{ '{:>5}|{}|{x:.2f}'.format('a', messages[0].role, x=1.234) }}{{ '%5d' | format(3) }}",
        "{{ 'ab'.ljust(4) }}{{ 'ab'.center(6, '*') }}{{ '7'.zfill(3) }}{{ 'a' | center(5) }}",
        "{{ messages | tojson(indent=2) }}{{ messages[2] | tojson(sort_keys=true) | indent(4) }}",
        "{{ messages[2] }}{{ messages | string }}{{ messages[3] | tojson(ensure_ascii=true) }}",
        "{% macro f(x, n=2) %}<{{ x }}{{ caller() if caller }}>{% if n %}"
        "{{ f(x, n - 1) }}{% endif %}{% endmacro %}{{ f('a') }}{% call f('b', 0) %}!{% endcall %}",
        "{% set x %}{{ messages[1].content | trim }}{% endset %}{{ x | upper }}{{ x | length }}",
        "{% filter upper %}{{ messages[0].content }}{% endfilter %}{% set ns = namespace(i=0) %}"
        "{% for m in messages %}{% set ns.i = ns.i + m.content | length %}{% endfor %}{{ ns.i }}",
        "{{ [3, 1, 2] | sort | first }}{{ [[1], [2]] | sum(start=[]) }}{{ 2.567 | round(1) }}",
        "{{ 'a b c'.split() | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}",
        "{{ messages | groupby('role') | length }}{{ 'a,b'.split(',') }}"
        "{{ messages[0].content.title() }}",
        "{{ (messages | last).content | truncate(3) }}{{ 'x' | default('y') }}"
        "{{ missing | default(5) }}",
        "{{ cycler('a', 'b').next() }}{% set j = joiner(', ') %}{{ j() }}{{ j() }}"
        "{{ 'a'.translate({97: 'b'}) }}{{ messages[0] | tojson(separators=(',', ':')) }}"
        "{{ 'a b' | wordwrap(1) }}",
    ],
)
def test_renders_as_transformers(source: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>")
    expected = theirs.apply_chat_template(CHAT, chat_template=source, tokenize=False)
    assert render(source, add_generation_prompt=False) == expected


DOUBLING = "{% for i in range(64) %}{% set ns.x = EXPRESSION %}{% endfor %}"
TOO_LARGE = [
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [0] * 10**9 }}",
    "{{ 2 ** (10**9) }}",
    "{{ (2 ** 1000) ** 1000 }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'a\\nb' | indent(10**9) }}",
    "{{ 'a\\nb' | indent(width=10**9) }}",
    "{{ ['a\\nb'] | map('indent', 10**9) | list }}",
    "{% filter indent(10**9) %}a\nb{% endfilter %}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '{:{w}}'.format_map({'w': 10**9}) }}",
    "{{ (5).to_bytes(10**9, 'big') }}",
    "{{ 5 | round(10**9, 'ceil') }}",
    "{{ 'ab' | batch(10**9, 'x') | list }}",
    "{{ 'ab' | slice(10**9) | list }}",
    "{{ x.replace('a', x) }}",
    "{{ x | replace('a', x) }}",
    "{{ x | replace(old='a', new=x) }}",
    "{{ x | replace('a', new=x) }}",
    "{{ x | replace(new=x, old='a') }}",
    "{{ x.translate({97: x}) }}",
    "{{ x.join(x) }}",
    "{{ x.join([x] * 100) }}",
    "{{ x[:2000].join(range(20000) | map('string')) }}",
    "{{ x | join(x) }}",
    "{{ ([x] * 100) | join }}",
    "{{ range(1000) | map('string') | join(x) }}",
    "{{ '%s%s%s%s%s%s%s%s%s%s%s%s' | format(x, x, x, x, x, x, x, x, x, x, x, x) }}",
    "{{ ('{0}' * 100).format(x) }}",
    "{% set y %}{% for i in range(100) %}{{ x }}{% endfor %}{% endset %}",
    "{% macro m() %}{% for i in range(100) %}{{ x }}{% endfor %}{% endmacro %}{{ m() }}",
    "{{ ([[x] * 1000] * 1000) | sum(start=[]) | length }}",
    *(
        "{% set ns = namespace(x=['ab']) %}" + DOUBLING.replace("EXPRESSION", "[ns.x, ns.x]") + use
        for use in (
            "{{ ns.x }}",
            "{{ ns.x | tojson }}",
            "{{ ns.x | string }}",
            "{{ ns.x | upper }}",
            "{{ ns.x ~ '' }}",
            "{{ '%s' % ns.x }}",
            "{{ '{}'.format(ns.x) }}",
            "{{ {'a': ns.x}.items() }}",
            "{{ [ns.x] | join }}",
            "{{ ns.x | pprint }}",
        )
    ),
    *(
        "{% set ns = namespace(x='ab') %}" + DOUBLING.replace("EXPRESSION", expression)
        for expression in (
            "ns.x ~ ns.x",
            "ns.x + ns.x",
            "[ns.x, ns.x] | join",
            "''.join([ns.x, ns.x])",
            "'%s%s' % (ns.x, ns.x)",
            "'{0}{0}'.format(ns.x)",
            "ns.x.replace('', ns.x)",
        )
    ),
    "{% set ns = namespace(x=3) %}" + DOUBLING.replace("EXPRESSION", "ns.x * ns.x"),
    *(
        "{% set ns = namespace(all=[]) %}{% for i in range(100000) %}"
        "{% set ns.all = ns.all + [" + made + "] %}{% endfor %}"
        for made in (
            *("y[i:]", "x | upper", "x.upper()", "x.split('a')", "x ~ i", "x + 'b'"),
            "x ~ i ~ 'a' * -(10**9) ~ 2 ** -(10**6)",
        )
    ),
]


@pytest.mark.parametrize("source", TOO_LARGE)
def test_oversized_values_allocate_nothing(source: str) -> None:
    max_value_size = 200_000
    limits = RenderLimits(
        max_output_characters=10_000, max_value_size=max_value_size, max_seconds=60.0
    )
    source = "{% set x = 'a' * 10000 %}{% set y = x * 19 %}" + source
    template = ChatTemplate({"default": source}, {})
    given = TemplateInput(CHAT, {})
    tracemalloc.start()
    try:
        # Nothing is folded while it compiles, either.
        template.compile()
        with pytest.raises(TemplateLimitError, match=f"more than {max_value_size}|computes"):
            template.render(given, limits)
        assert tracemalloc.get_traced_memory()[1] < 40 * max_value_size + 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum(n=1000) }}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('x' * 10000) }}",
        "{% for i in none %}{% endfor %}",
        "{% include 'other' %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template refused them") as caught:
        render(source)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set x = range(9999) %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for a in range(100000) %}{{ range(100000) | map('trim') | list | length }}{% endfor %}",
        "{% for a in range(100000) %}{{ range(9) | map('replace', 'a', 'b') | list }}{% endfor %}",
    ],
)
def test_time_is_bounded(source: str) -> None:
    limits = RenderLimits(max_output_characters=10**9, max_value_size=10**9, max_seconds=0.02)
    before = time.thread_time()
    with pytest.raises(TemplateLimitError, match=r"more than 0\.02 s"):
        render(source, limits=limits)
    # Not a matter of timing: to its end it would take hours.
    assert time.thread_time() - before < 30


def test_output_is_bounded() -> None:
    source = "{% for i in range(1000) %}0123456789{% endfor %}"
    limits = dataclasses.replace(LIMITS, max_output_characters=10_000)
    assert len(render(source, limits=limits)) == 10_000
    with pytest.raises(TemplateOutputError, match="more than 9999 characters"):
        render(source, limits=dataclasses.replace(LIMITS, max_output_characters=9_999))


def test_render_limits_apply_per_rendering() -> None:
    template = ChatTemplate({"default": "{{ 'x' * n }}"}, {})
    for _ in range(3):
        with pytest.raises(TemplateLimitError):
            template.render(TemplateInput(CHAT, {"n": 10**9}), LIMITS)
        assert template.render(TemplateInput(CHAT, {"n": 60_000}), LIMITS) == "x" * 60_000


def test_a_template_that_does_not_compile() -> None:
    nested = "{% for a in [1] %}" * 30 + "{% endfor %}" * 30
    for source in ("{% if %}", "{{ x | no_such_filter }}", nested, "{{" + "(" * 5000 + ")" * 5000):
        with pytest.raises(InvalidRequestError, match="does not compile") as caught:
            render("", chat_template=source)
        assert caught.value.param == "chat_template"
        render("", chat_template="default")


def test_a_template_that_is_too_long_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes of one take a minute, much of it with the interpreter's lock held."""
    assert render("{#" + "x" * (2**17 - 5) + "#}7") == "7"
    template = ChatTemplate({"default": "{#" + "x" * (2**17 - 4) + "#}7"}, {})
    monkeypatch.setattr(template._sandbox, "from_string", lambda source: pytest.fail("compiled"))
    template.compile()
    with pytest.raises(InvalidRequestError, match="has 131073 characters, expected at most 131072"):
        template.render(TemplateInput(CHAT, {}), LIMITS)


def test_prompts_that_cannot_fit_are_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make(byte_level(), "{{ 'x' * n }}")
    longest = max(map(len, tokenizer.backend.get_vocab()))
    monkeypatch.setattr("asyncllm.text.tokenizer._encode", lambda backend, text: [len(text)])
    given = TemplateInput(CHAT, {"n": 20 * longest})
    assert tokenizer.encode_chat(given, 20) == [20 * longest]
    with pytest.raises(ContextLengthExceededError, match="at least 21 tokens, expected at most 20"):
        tokenizer.encode_chat(TemplateInput(CHAT, {"n": 20 * longest + 1}), 20)
    # Without a number of tokens, what counts is memory.
    with pytest.raises(InvalidRequestError, match="makes more than 16777216 characters"):
        tokenizer.encode_chat(TemplateInput(CHAT, {"n": 1 << 25}))
    with pytest.raises(InvalidRequestError, match="makes more than 16777216 characters") as caught:
        tokenizer.apply_chat_template(CHAT, n=1 << 25)
    assert caught.value.param == "messages"


def test_long_renderings_are_left_to_the_thread() -> None:
    tokenizer = make(byte_level(), "{{ 'x' * n }}")
    short, long = (TemplateInput(CHAT, {"n": n}) for n in (4096, 4097))
    assert tokenizer.encode_chat(short, none_if_slow=True) is None, "it is not compiled"
    tokenizer.chat_template.compile()
    assert tokenizer.encode_chat(short, none_if_slow=True) == tokenizer.encode_chat(short)
    assert tokenizer.encode_chat(long, none_if_slow=True) is None
    huge = TemplateInput(CHAT, {"n": 10**9})
    assert tokenizer.encode_chat(huge, none_if_slow=True) is None
    own = TemplateInput(CHAT, {"chat_template": "{{ 1 }}"})
    assert tokenizer.encode_chat(own, none_if_slow=True) is None, "it is to be compiled"
    assert tokenizer.encode_chat(own) == tokenizer.encode("1", False)


def nested(depth: int, kind: Callable[[Any], Any] = lambda inner: {"a": inner}) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = kind(value)
    return value


def cyclic() -> Any:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["self"] = message
    return message


def laughs() -> Any:
    value: Any = ["ha"] * 10
    for _ in range(9):
        value = [value] * 10
    return value


class Raises(UserDict[str, Any]):
    """A mapping that cannot be read."""

    def __iter__(self) -> Iterator[str]:
        raise OSError("no such row")


class Endless(UserDict[str, Any]):
    def items(self) -> Any:
        return ((str(i), i) for i in iter(int, 1))


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([cyclic()], r"messages\[0\]\.self\.self.*: nested more than 100 levels deep"),
        ([{"role": "user", "content": nested(5000)}], "messages.*: nested more than 100"),
        ([{"role": "user", "x": nested(5000, lambda v: [v])}], "messages.*: nested more than 100"),
        ([nested(5000)], "messages.*: nested more than 100"),
        ([{"role": "user", "content": "x", "y": laughs()}], "beyond 65536 values"),
        ([{"role": "user", "content": "x", "y": Endless()}], "beyond 65536 values"),
        ([Raises()], r"messages\[0\]: cannot be read \(OSError: no such row\)"),
        ([[]], r"messages\[0\]: is a list"),
        (
            [{"role": "u" * 9999 + "\n", "content": {"a": "x" * 10**5}}],
            "expected a string or a list",
        ),
    ],
)
def test_messages_that_are_refused(messages: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        TemplateInput(messages, {})
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 500


def test_nesting_within_reason() -> None:
    deep = nested(90)
    chat = [{"role": "user", "content": "x", "deep": deep}]
    assert render("{{ messages[0].deep | tojson }}", chat) == json.dumps(deep)
    for name, param in (("tools", "tools"), ("more", "chat_template_kwargs")):
        with pytest.raises(InvalidRequestError, match="nested more than 100") as caught:
            TemplateInput(CHAT, {name: [nested(200)]})
        assert caught.value.param == param


def test_near_the_recursion_limit() -> None:
    def at(depth: int) -> None:
        if depth:
            at(depth - 1)
        else:
            TemplateInput([{"role": "user", "content": "x", "deep": nested(90)}], {})

    with pytest.raises((InvalidRequestError, RecursionError)) as caught:
        for depth in range(700, 1000, 5):
            at(depth)
    assert isinstance(caught.value, InvalidRequestError)


@pytest.mark.parametrize("name", ["messages", "documents", "continue_final_message", "tokenize"])
def test_reserved_variables(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{name}' cannot be set") as caught:
        TemplateInput(CHAT, {name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_unknown_template_name() -> None:
    with pytest.raises(InvalidRequestError, match="chat_template: is a list") as caught:
        TemplateInput(CHAT, {"chat_template": ["x"]})
    assert caught.value.param == "chat_template"


def test_messages_are_copied() -> None:
    class Text(str):
        def __str__(self) -> str:
            raise AssertionError("a method of the caller's")

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("a method of the caller's")

    chat: list[Any] = [{"role": Text("user"), "content": [{"type": "text", "text": Text("a")}]}]
    given = TemplateInput(chat, {"more": {"x": [1, True, None, 2.5, (Text("b"),)]}})
    chat[0]["content"][0]["text"] = "changed"
    chat.append({"role": "user", "content": "c"})
    assert given.values["messages"] == [{"role": "user", "content": "a"}]
    assert given.values["more"] == {"x": [1, True, None, 2.5, ("b",)]}
    assert type(given.values["messages"][0]["role"]) is str
    assert given.num_characters == len("roleusercontenttypetexttextamorexb")
