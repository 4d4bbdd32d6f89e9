"""Arguments whose methods raise."""

from __future__ import annotations

import dataclasses
import inspect
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    AsyncLLMError,
    ContextLengthExceededError,
    EngineConfig,
    InvalidRequestError,
    RequestError,
    SamplingParams,
    beam_search,
)
from tests.hostile import hostile


async def alone(call: Callable[[], Any], *params: str) -> None:
    """Makes a call and aborts its request. It may fail with the argument's own exception, or with
    an error that names one of ``params``, but not as if the engine were gone."""
    told: Exception | None = None
    try:
        found = call()
        if hasattr(found, "abort"):
            found.abort()
            await found.result()
        elif inspect.isawaitable(found):
            await found
    except Exception as error:
        told = error
    if isinstance(told, AsyncLLMError):
        assert isinstance(told, RequestError)
    if isinstance(told, (InvalidRequestError, ContextLengthExceededError)):
        assert any(param in str(told) for param in params), told


async def test_argument_with_raising_methods_fails_only_its_call() -> None:
    message = [{"role": "user", "content": "x"}]
    common = """request_id priority timeout max_unread on_slow cache_salt owner
    sampling_params""".split()
    sampling = [field.name for field in dataclasses.fields(SamplingParams)]
    chat = """tools tool_choice parallel_tool_calls response_format chat_template
    chat_template_kwargs split_special_tokens""".split()
    beams = """beam_width max_tokens length_penalty early_stopping ignore_eos stop_token_ids
    priority timeout cache_salt owner""".split()
    async with AsyncLLMEngine() as engine:
        asked: dict[str, Any] = {"prompt": "Tell me", "max_tokens": 6, "seed": 3}
        expected = (await engine.generate(**asked)).token_ids
        for value in hostile().values():
            neighbour = engine.stream(**asked)
            await alone(lambda v=value: engine.stream(v, max_tokens=1), "prompt")
            await alone(lambda v=value: engine.chat(v, max_tokens=1), "messages", "prompt")
            for name in (*common, *sampling):
                options = {"max_tokens": 1, name: value}
                await alone(lambda o=options: engine.stream("x", **o), name)
            for name in chat:
                options = {"max_tokens": 1, name: value}
                await alone(lambda o=options: engine.chat(message, **o), *chat)
            for name in beams:
                options: dict[str, Any] = {"beam_width": 2, "max_tokens": 1, name: value}
                await alone(lambda o=options: beam_search(engine, "x", **o), name)
            await alone(lambda v=value: beam_search(engine, v, 2, max_tokens=1), "prompt")
            await alone(lambda v=value: beam_search(v, "x", 2, max_tokens=1), "engine")
            await alone(lambda v=value: engine.submit(v, max_tokens=1), "prompt", "messages")
            await alone(lambda v=value: engine.abort(v), "request_id")
            await alone(lambda v=value: engine.add_observer(v), "observer")
            assert (await neighbour.result()).token_ids == expected
        assert (await engine.generate(**asked)).token_ids == expected
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_failed) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks


async def test_huge_arguments_are_refused_before_they_are_copied() -> None:
    message = [{"role": "user", "content": "x"}]
    names, text = {str(i): 1 for i in range(100_000)}, "🙂" * 500_000
    tag = {"type": "structural_tag", **names}
    named = {"type": "json_schema", "json_schema": {"name": text, "schema": {}}}
    async with AsyncLLMEngine() as engine:
        cases: dict[str, Callable[[], Any]] = {
            "request_id": lambda: engine.stream("x", request_id=text),
            "cache_salt": lambda: engine.stream("x", cache_salt=text),
            "owner": lambda: engine.stream("x", owner=text),
            "chat_template_kwargs": lambda: engine.chat(message, chat_template_kwargs=names),
            "structural_tag": lambda: engine.chat(message, response_format=tag),
            "json_schema.name": lambda: engine.chat(message, response_format=named),
            "structured_outputs": lambda: engine.stream("x", structured_outputs=names),
            "logit_bias": lambda: engine.stream("x", logit_bias=names),
        }
        for param, call in cases.items():
            for _ in range(2):  # The first call fills caches.
                tracemalloc.start()
                try:
                    with pytest.raises(InvalidRequestError, match=param) as caught:
                        call()
                    num_bytes = tracemalloc.get_traced_memory()[1]
                finally:
                    tracemalloc.stop()
            assert num_bytes < 200_000, param
            assert len(str(caught.value)) < 500, param


@pytest.mark.parametrize("engine", [None, "x", 7, object()])
async def test_a_search_needs_an_engine(engine: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^engine=.*expected an AsyncLLMEngine"):
        await beam_search(engine, "x", 2, max_tokens=2)


@pytest.mark.parametrize("observer", [None, "x", object(), [print]])
def test_an_observer_has_its_methods(observer: Any) -> None:
    engine = AsyncLLMEngine()
    with pytest.raises(InvalidRequestError, match=r"^observer=.*on_submit and on_finish"):
        engine.add_observer(observer)


def test_subclasses_become_plain() -> None:
    """What an engine keeps is read by its own thread, on which nothing of an application's runs."""
    values = hostile()
    params = SamplingParams(stop=[type("Text", (str,), {})("a")], logit_bias={1: True + 0.5})
    assert [type(one) for one in params.stop] == [str]
    assert type(SamplingParams(stop=values["text"]).stop[0]) is str
    assert type(SamplingParams(bad_words=values["of texts"]).bad_words[0]) is str
    text = type("Text", (str,), {})
    config = EngineConfig(model=text("a"), device=text("cuda:1"), reasoning_parser=text("qwen3"))
    assert {type(config.model), type(config.device), type(config.reasoning_parser)} == {str}
    with pytest.raises(InvalidRequestError, match="device="):
        EngineConfig(device="cuda:\N{FULLWIDTH DIGIT ONE}")


@pytest.mark.parametrize("name", ["model", "tokenizer"])
@pytest.mark.parametrize("value", ["a\ud800", "\0", "a\0b", ""])
def test_invalid_path_error_is_printable(name: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}=") as caught:
        EngineConfig().with_overrides({name: value})
    assert str(caught.value).encode()
    assert caught.value.param == name
