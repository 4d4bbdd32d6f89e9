"""``SamplingParams.detokenize=False``: token ids without text."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from asyncllm import (
    AsyncLLMEngine,
    DeadlineExceededError,
    InvalidRequestError,
    SamplingParams,
    beam_search,
)
from asyncllm.testing import fake_engine, fake_llm
from asyncllm.text.tokenizer import Tokenizer
from tests.app_clients import app_client, user
from tests.refusals import refused

HELLO = user("Hi")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STORY = "Once upon a timé"
TOKENS = (*STORY.encode(), 257)


@pytest.fixture
def without_detokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("there is no text to make")

    monkeypatch.setattr(Tokenizer, "detokenizer", refuse)
    monkeypatch.setattr(Tokenizer, "text_decoder", refuse)


@pytest.mark.usefixtures("without_detokenizers")
async def test_tokens_come_without_text() -> None:
    params = SamplingParams(detokenize=False)
    async with fake_engine(STORY) as engine:
        streams = [engine.stream("x", params), engine.chat(HELLO, params)]
        for stream in streams:
            deltas = [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == ""
            assert tuple(i for delta in deltas for i in delta.token_ids) == TOKENS
            assert deltas[-1].finish_reason == "stop"
        several = await engine.generate("x", params, n=2, stop_token_ids=[ord("n")])
        for output in several.outputs:
            assert (output.text, output.token_ids) == ("", (ord("O"), ord("n")))
            assert (output.finish_reason, output.stop_reason) == ("stop", ord("n"))
        short = await engine.generate("x", params, max_tokens=3)
        assert (short.text, short.token_ids, short.finish_reason) == ("", TOKENS[:3], "length")
    with fake_llm(STORY) as llm:
        done = llm.generate(["x", "y"], params)
        assert [(one.text, one.token_ids) for one in done] == [("", TOKENS)] * 2


async def test_partial_output_at_deadline_has_no_text() -> None:
    async with fake_engine("x" * 1000, step_time=0.01) as engine:
        with pytest.raises(DeadlineExceededError) as caught:
            await engine.generate("x", detokenize=False, timeout=0.6)
        assert caught.value.partial is not None
        assert caught.value.partial.text == ""
        assert set(caught.value.partial.token_ids) == {ord("x")}
        with pytest.raises(DeadlineExceededError) as caught:
            await engine.generate("x", timeout=0.6)
        assert caught.value.partial is not None
        assert caught.value.partial.text.startswith("xx")


async def test_text_options_are_refused_without_tokenizer() -> None:
    with refused("detokenize", "stop strings"):
        SamplingParams(detokenize=False, stop="x")
    form = {"type": "json_object"}
    for settings, options in (
        ({}, {"tools": [TOOL]}),
        ({}, {"tools": [TOOL], "tool_choice": "required"}),
        ({}, {"response_format": form}),
        ({"reasoning_parser": "deepseek_r1"}, {}),
    ):
        async with fake_engine("x", **settings) as engine:
            with refused("detokenize", "true in a chat"):
                engine.chat(HELLO, detokenize=False, **options)
            with pytest.raises(InvalidRequestError, match="stop strings"):
                engine.stream("x", SamplingParams(stop="x"), detokenize=False)
            assert engine.stats().num_requests == 0
            prompt = await engine.tokenize(HELLO)
            assert (await engine.generate(prompt, detokenize=False)).token_ids == (120, 257)


async def test_the_protocol_answers_in_text() -> None:
    async with app_client(fake_engine("x")) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/responses", {"input": "x"}),
        ):
            answer = await client.post(path, json={**body, "detokenize": False})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("unknown_parameter", "detokenize")


async def test_a_step_of_a_beam_search_makes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLMEngine(num_blocks=16, max_num_batched_tokens=64) as engine:
        made: list[SamplingParams] = []

        def noted(submit: Any, prompt: Any, params: SamplingParams, **options: Any) -> Any:
            made.append(params)
            return submit(prompt, params, **options)

        for name in ("stream", "submit"):
            monkeypatch.setattr(engine, name, partial(noted, getattr(engine, name)))
        done = await beam_search(engine, "Once", 2, max_tokens=2)
        assert [len(output.text) > 0 for output in done.outputs] == [True] * 2
        assert [params.detokenize for params in made] == [False] * 3
