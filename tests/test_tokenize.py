"""``tokenize`` and ``detokenize`` of the engine and of LLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, EngineClosedError, InvalidRequestError
from asyncllm.runtime.worker_thread import WorkerThread
from asyncllm.testing import fake_engine, fake_llm
from tests.refusals import refused
from tests.test_worker_thread import blocked

HELLO = [{"role": "user", "content": "Hé"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def prompt_of(stream: Any) -> list[int]:
    """The token ids that a request computes."""
    async with stream:
        await anext(stream)
        return list(stream.prompt_token_ids)


async def test_tokens_equal_a_requests_short_and_long() -> None:
    async with fake_engine("x", max_model_len=60_000, num_blocks=4000) as engine:
        for length in (1, 3000):
            text = "Hé<|im_end|>" * length
            found = await engine.tokenize(text)
            assert found == await prompt_of(engine.stream(text))
            assert found[:4] == [72, 195, 169, 257]
            chat = [{"role": "user", "content": "<|im_end|>é" * length}]
            for options in ({}, {"tools": [TOOL]}, {"split_special_tokens": False}):
                found = await engine.tokenize(chat, **options)
                assert found == await prompt_of(engine.chat(chat, **options))
            assert found.count(257) == length + 1
        whole = await engine.tokenize(HELLO)
        shorter = await engine.tokenize(HELLO, add_generation_prompt=False)
        assert whole == [*shorter, 256, *b"assistant\n"]


async def test_a_prompt_may_be_longer_than_the_context_and_empty() -> None:
    async with fake_engine("x", max_model_len=16) as engine:
        assert await engine.tokenize("a" * 100_000) == [97] * 100_000
        assert await engine.tokenize("") == []
        assert engine.stats().num_requests == 0


async def test_special_tokens_of_a_real_tokenizer() -> None:
    async with AsyncLLMEngine(num_blocks=16, max_num_seqs=2, max_num_batched_tokens=64) as engine:
        tokenizer = engine.tokenizer
        text = "Once upon a time"
        for special in (None, True, False):
            found = await engine.tokenize(text, add_special_tokens=special)
            assert found == tokenizer.encode(text, special is not False)
        found = [tokenizer.eos_token_id, *await engine.tokenize(text, add_special_tokens=False)]
        assert await engine.detokenize(found) == tokenizer.special_tokens["eos_token"] + text
        assert await engine.detokenize(found, skip_special_tokens=True) == text


async def test_text_of_tokens_short_and_long() -> None:
    async with fake_engine("x") as engine:
        assert await engine.detokenize([]) == ""
        assert await engine.detokenize((72, 195, 169, 257, 9999)) == "Hé<|im_end|>"
        assert await engine.detokenize([72, 257] * 9000, skip_special_tokens=True) == "H" * 9000


async def test_only_long_work_leaves_the_loop_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    call = WorkerThread.call

    async def counted(thread: WorkerThread, job: Any, *options: Any) -> Any:
        calls.append(job)
        return await call(thread, job, *options)

    monkeypatch.setattr(WorkerThread, "call", counted)
    async with fake_engine("x") as engine:
        await engine.tokenize("a" * 512)
        await engine.tokenize(HELLO)
        await engine.detokenize([65] * 4095)
        assert not calls
        await engine.tokenize("a" * 513)
        await engine.tokenize([{"role": "user", "content": "a" * 513}])
        await engine.detokenize([65] * 4096)
        assert len(calls) == 3


async def test_a_long_list_of_tokens_is_read_in_its_turn() -> None:
    """The event loop does not wait for the check, and waiting calls hold no copies."""
    token_ids = [65] * 5000
    async with fake_engine("x") as engine:
        go = blocked(engine._require_input_processor().prompts.tokenizer_threads.long_thread)
        calls = [asyncio.create_task(engine.detokenize(ids)) for ids in (token_ids, iter([65]))]
        await asyncio.sleep(0)
        token_ids[0] = 66
        go()
        assert await asyncio.gather(*calls) == ["B" + "A" * 4999, "A"]


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        (None, {}, "messages"),
        ([], {}, "messages"),
        ([1, 2], {}, "messages"),
        ("half a pair \ud800", {}, "prompt"),
        ("x", {"tools": [TOOL]}, "tools"),
        ("x", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("x", {"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("x", {"split_special_tokens": False}, "split_special_tokens"),
        ("x", {"add_special_tokens": "no"}, "add_special_tokens"),
        (HELLO, {"add_special_tokens": True}, "add_special_tokens"),
        (HELLO, {"add_generation_prompt": None}, "add_generation_prompt"),
        (HELLO, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (HELLO, {"tools": 5}, "tools"),
    ],
)
async def test_untokenisable_input_is_named(prompt: Any, options: Any, param: str) -> None:
    async with fake_engine("x") as engine:
        with refused(param):
            await engine.tokenize(prompt, **options)
    with fake_llm("x") as llm, pytest.raises(InvalidRequestError) as caught:
        llm.tokenize(prompt, **options)
    assert caught.value.param == param


@pytest.mark.parametrize("token_ids", [[-1], [2**32], "ab", [1.5], range(2**19 + 1)])
async def test_invalid_tokens_are_named(token_ids: Any) -> None:
    async with fake_engine("x") as engine:
        with refused("token_ids"):
            await engine.detokenize(token_ids)
        with refused("skip_special_tokens"):
            await engine.detokenize([1], skip_special_tokens="no")  # pyright: ignore[reportArgumentType]


async def test_without_a_loop() -> None:
    with fake_llm("x") as llm:
        found = llm.tokenize(HELLO)
        assert found == [256, *"user\nHé".encode(), 257, 10, 256, *b"assistant\n"]
        assert llm.detokenize(found, skip_special_tokens=True) == "user\nHé\nassistant\n"
        assert llm.tokenize("a" * 5000) == [97] * 5000
    with pytest.raises(EngineClosedError):
        llm.tokenize("x")
    with pytest.raises(EngineClosedError):
        llm.detokenize([1])
