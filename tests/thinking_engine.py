"""An engine whose model thinks before it calls tools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tokenizers

from asyncllm import AsyncLLMEngine, EngineConfig
from asyncllm.runtime.loading import LoadedModel
from asyncllm.testing import byte_tokenizer
from asyncllm.testing.fake_engine import FakeModelConfig, ScriptedExecutor, _executor_info
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from tests.fakes import engine_with

ASK = [{"role": "user", "content": "Ask."}]
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"rain in {city}"


TOOLS = [add, get_weather]


def values(calls: Any) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}"
    "{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    "{% if tools %}{% endif %}{# <tool_call> #}"
)


def thinking_engine(
    answers: Any, *, marks: Any = None, depth: int = 1, **overrides: Any
) -> AsyncLLMEngine:
    """fake_engine whose tokenizer has ``<think>`` and ``</think>``, which are not special."""

    def load(config: EngineConfig, progress: Any) -> LoadedModel:
        backend = byte_tokenizer().backend
        backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in marks or MARKS])
        names = {"eos_token": "<|im_end|>"}
        tokenizer = Tokenizer(backend, ChatTemplate({"default": TEMPLATE}, names), names)
        tokenizer.chat_template.compile()
        info = replace(_executor_info(config, tokenizer.vocab_size), pipeline_depth=depth)
        executor = ScriptedExecutor(info, tokenizer, answers)
        return LoadedModel(executor, tokenizer, FakeModelConfig(info.max_model_len))

    return engine_with(load, **overrides)


MARKS = ("<think>", "</think>")
