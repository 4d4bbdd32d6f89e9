"""Arguments whose own methods raise: an error that names the argument, or they are read."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    ContextLengthExceededError,
    EngineConfig,
    InvalidRequestError,
    RequestError,
    SamplingParams,
    beam_search,
)
from tests.hostile import hostile

HOSTILE = sorted(hostile())


async def named(call: Callable[[], Any], *params: str) -> None:
    """Asserts that a call works, or raises an error about one of ``params``."""
    error = None
    try:
        found = call()
        if hasattr(found, "abort"):
            found.abort()
            await found.result()
        elif inspect.isawaitable(found):
            await found
    except (ContextLengthExceededError, InvalidRequestError) as raised:
        error = raised
    about(error, *params)


def about(error: RequestError | None, *params: str) -> None:
    if isinstance(error, InvalidRequestError):
        assert error.param is not None
        assert error.param.startswith(params)
    if error is not None:
        assert any(param in str(error) for param in params), error


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig])
@pytest.mark.parametrize("name", HOSTILE)
def test_fields(kind: Any, name: str) -> None:
    for field in dataclasses.fields(kind):
        error = None
        try:
            kind(**{field.name: hostile()[name]})
        except InvalidRequestError as raised:
            error = raised
        about(error, field.name)


@pytest.mark.asyncio
async def test_the_arguments_of_each_call() -> None:
    message = [{"role": "user", "content": "x"}]
    common = "request_id priority timeout max_unread on_slow cache_salt sampling_params".split()
    chat = """tools tool_choice parallel_tool_calls response_format chat_template
    chat_template_kwargs split_special_tokens""".split()
    beams = """beam_width max_tokens length_penalty early_stopping ignore_eos stop_token_ids
    priority timeout cache_salt""".split()
    async with AsyncLLMEngine() as engine:
        for value in hostile().values():
            await named(lambda v=value: engine.stream(v, max_tokens=1), "prompt")
            await named(lambda v=value: engine.chat(v, max_tokens=1), "messages", "prompt")
            for name in common:
                options = {"max_tokens": 1, name: value}
                await named(lambda o=options: engine.stream("x", **o), name)
            for name in chat:
                options = {"max_tokens": 1, name: value}
                await named(lambda o=options: engine.chat(message, **o), *chat)
            for name in beams:
                options: dict[str, Any] = {"beam_width": 2, "max_tokens": 1, name: value}
                await named(lambda o=options: beam_search(engine, "x", **o), name)
            await named(lambda v=value: beam_search(engine, v, 2, max_tokens=1), "prompt")
            await named(lambda v=value: beam_search(v, "x", 2, max_tokens=1), "engine")
            await named(lambda v=value: engine.abort(v), "request_id")
            await named(lambda v=value: engine.add_observer(v), "observer")
        assert (await engine.generate("x", max_tokens=1)).token_ids


@pytest.mark.asyncio
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
def test_a_path_that_is_none_is_refused_in_words_that_can_be_printed(name: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}=") as caught:
        EngineConfig().with_overrides({name: value})
    assert str(caught.value).encode()
    assert caught.value.param == name
