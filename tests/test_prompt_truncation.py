"""``truncate_prompt_tokens`` in every entry point."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import (
    ContextLengthExceededError,
    EngineOverloadedError,
    InvalidRequestError,
    SamplingParams,
)
from asyncllm.callbacks import stream_with_callbacks
from asyncllm.testing import fake_engine, fake_llm
from tests.app_clients import app_client, events_of, user
from tests.idle import held_up, until
from tests.refusals import refused

TEXT = "abcdefghij" * 3
HELLO = user("abcdefghij")


@pytest.mark.parametrize("prompt", [TEXT, list(TEXT.encode()), tuple(TEXT.encode())])
async def test_the_last_tokens_are_kept(prompt: Any) -> None:
    async with fake_engine("xy", max_model_len=20) as engine:
        for limit, kept in ((3, 3), (19, 19), (-1, 19)):
            done = await engine.generate(prompt, truncate_prompt_tokens=limit, max_tokens=1)
            assert bytes(done.prompt_token_ids).decode() == TEXT[-kept:]
            assert done.usage is not None
            assert done.usage.prompt_tokens == kept
            assert done.usage.truncated_prompt_tokens == 30 - kept
            assert done.text == "x"
        with pytest.raises(ContextLengthExceededError):
            await engine.generate(prompt)
        short = await engine.generate(prompt[:5], truncate_prompt_tokens=-1)
        assert bytes(short.prompt_token_ids).decode() == TEXT[:5]
        assert short.usage is not None
        assert short.usage.truncated_prompt_tokens == 0


async def test_conversations_outputs_and_handlers() -> None:
    params = SamplingParams(truncate_prompt_tokens=12, max_tokens=1)
    async with fake_engine("xy", max_model_len=20) as engine:
        whole = await engine.tokenize(HELLO)
        for stream in (
            engine.chat(HELLO, params),
            engine.chat(HELLO, params, n=3),
            stream_with_callbacks(engine, HELLO, params),
        ):
            done = await stream.result()
            assert list(done.prompt_token_ids) == whole[-12:]
            assert [output.text for output in done.outputs] == ["x"] * len(done.outputs)
            assert done.usage is not None
            assert done.usage.truncated_prompt_tokens == len(whole) - 12
            assert done.usage.prompt_tokens == 12
    with fake_llm("xy", max_model_len=20) as llm:
        for done in (*llm.generate([TEXT, TEXT], params), llm.chat(HELLO, params)):
            assert (len(done.prompt_token_ids), done.text) == (12, "x")


async def test_long_texts_are_truncated_on_thread_without_estimate() -> None:
    async with fake_engine("xy", max_model_len=50, max_queued_tokens=20) as engine:
        text = "0123456789" * 2000
        with pytest.raises(ContextLengthExceededError, match="at least"):
            engine.stream(text)
        await engine.pause()
        with held_up(engine):
            streams = [
                engine.stream(text, truncate_prompt_tokens=9, max_tokens=1) for _ in range(2)
            ]
            with pytest.raises(EngineOverloadedError, match="max_queued_tokens=20"):
                engine.stream(text, truncate_prompt_tokens=9)
            assert streams[0].prompt_token_ids is None
        await engine.resume()
        for stream in streams:
            done = await stream.result()
            assert bytes(done.prompt_token_ids) == b"123456789"
            assert done.usage is not None
            assert done.usage.truncated_prompt_tokens == 19_991
        chat = engine.chat(user(text), truncate_prompt_tokens=-1, max_tokens=1)
        done = await chat.result()
        ending = b"<|im_end|>\n<|im_start|>assistant\n"
        assert engine.tokenizer.decode(done.prompt_token_ids, False).encode().endswith(ending)
        assert len(done.prompt_token_ids) == 49


async def test_a_text_is_bounded_all_the_same() -> None:
    async with fake_engine("xy", max_model_len=50) as engine:
        huge = "a" * (2**20 + 1)
        with pytest.raises(ContextLengthExceededError, match="has 1048577 characters"):
            engine.stream(huge, truncate_prompt_tokens=5)
        with pytest.raises(InvalidRequestError, match=r"^prompt=.*at most 524288 token ids"):
            engine.stream(range(2**19 + 1), truncate_prompt_tokens=5)
        ids = [7] * 2**19
        done = await engine.generate(ids, truncate_prompt_tokens=5, max_tokens=1)
        assert done.prompt_token_ids == (7,) * 5
        for wrong in ([*ids[:99], -1], [*ids[:95], 258, *ids[:4]]):
            with refused("prompt"):
                engine.stream(wrong, truncate_prompt_tokens=5)
        with pytest.raises(ContextLengthExceededError, match=r"has 10485\d\d characters"):
            engine.chat(user(huge), truncate_prompt_tokens=5)
        # The tokenizer's memory depends on the bytes in UTF-8.
        wide = "\U0001f600" * 2**18
        with pytest.raises(ContextLengthExceededError, match="has 1048577 UTF-8 bytes"):
            engine.stream(wide + "a", truncate_prompt_tokens=5)
        with pytest.raises(ContextLengthExceededError, match=r"has 10485\d\d UTF-8 bytes"):
            engine.chat(user(wide), truncate_prompt_tokens=5)
        assert engine.stats().num_waiting == 0


@pytest.mark.parametrize("is_chat", [False, True])
async def test_waiting_texts_count_by_their_memory(is_chat: bool) -> None:
    """However few of their tokens will be kept. Short texts are not refused for them."""
    async with fake_engine("xy", max_model_len=500) as engine:
        for character, most in (("a", 128), ("\U0001f600", 32)):
            text = "a" * (2**19 - 40) + character
            with held_up(engine):
                streams = []
                with pytest.raises(EngineOverloadedError, match="bytes of long texts"):
                    for _ in range(199):
                        prompt = user(text) if is_chat else text
                        call = engine.chat if is_chat else engine.stream
                        streams.append(call(prompt, max_tokens=1, truncate_prompt_tokens=5))
                assert abs(len(streams) - most) <= 1
                assert (await engine.generate("b", max_tokens=1)).text == "x"
                submit = engine.submit(text, max_tokens=1, truncate_prompt_tokens=5)
                waiting = asyncio.ensure_future(submit)
                await until(lambda: len(engine._thread.core.admission.caller_queue) == 1)
                for stream in streams:
                    stream.abort()
                (await waiting).abort()
                await until(lambda: not engine._thread.core.admission.waiting_texts)


async def test_the_containers_of_waiting_conversations_count() -> None:
    async with fake_engine("xy", max_model_len=500) as engine:
        message = {"role": "user", "content": "a" * 5000, "parts": [{} for _ in range(16_000)]}
        streams = []
        with held_up(engine):
            with pytest.raises(EngineOverloadedError, match="bytes of long texts"):
                for _ in range(99):
                    streams.append(engine.chat([message], truncate_prompt_tokens=5))
            assert len(streams) == 2**26 // (80 * 16_000)
            for stream in streams:
                stream.abort()


@pytest.mark.parametrize(
    ("make_params", "num_bytes"),
    [
        (lambda: {"stop": [f"{i:02}" + "\U0001f600" * 1022 for i in range(64)]}, 64 * 4172),
        (lambda: {"structured_outputs": {"choice": ["a" * 120_000]}}, 120_053),
    ],
    ids=["stop", "choice"],
)
async def test_the_parameters_of_waiting_requests_count(make_params: Any, num_bytes: int) -> None:
    """An object that several requests share counts once."""
    async with fake_engine("xy", max_queued_requests=1200) as engine:
        await engine.pause()
        shared = SamplingParams(**make_params())
        streams = [engine.stream([1], shared, max_tokens=1 + i % 9) for i in range(600)]
        with pytest.raises(EngineOverloadedError, match="bytes of long texts"):
            for _ in range(600):
                streams.append(engine.stream([1], **make_params()))
        assert abs(len(streams) - 600 - 2**26 // num_bytes) < 9
        for stream in streams:
            stream.abort()


async def test_an_aborted_request_keeps_no_text_until_its_turn() -> None:
    async with fake_engine("xy", max_model_len=500) as engine:
        with held_up(engine):
            stream = engine.stream("a" * 2**16, truncate_prompt_tokens=5)
            assert stream._group.raw_prompt is not None
            stream.abort()
            await until(lambda: stream._group.raw_prompt is None)
            kept = engine.stream("a" * 2**16, truncate_prompt_tokens=5, max_tokens=1)
        assert (await kept.result()).text == "x"
        assert kept._group.raw_prompt is None


@pytest.mark.parametrize("value", [0, -2, 20, 2**63, 1.5, "3", True])
async def test_values_out_of_range_are_refused(value: Any) -> None:
    async with fake_engine("x", max_model_len=20) as engine:
        with refused("truncate_prompt_tokens", r"^truncate_prompt_tokens="):
            engine.stream("a", truncate_prompt_tokens=value)


async def test_over_http() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/v1/responses": {"input": "abcdefghij", "max_output_tokens": 1, "store": False},
    }
    names = {"/v1/responses": "input_tokens"}
    async with app_client(fake_engine("xy", max_model_len=40)) as client:
        whole = len((await client.post("/tokenize", json={"messages": HELLO})).json()["tokens"])
        lengths = {"/v1/completions": 30}
        for path, body in bodies.items():
            cut = (await client.post(path, json=body | {"truncate_prompt_tokens": 7})).json()
            assert cut["usage"][names.get(path, "prompt_tokens")] == 7
            assert cut["usage"]["truncated_prompt_tokens"] == lengths.get(path, whole) - 7
            uncut = (await client.post(path, json=body | {"truncate_prompt_tokens": -1})).json()
            assert "truncated_prompt_tokens" not in uncut["usage"]
            for value in (0, 40):
                answer = await client.post(path, json=body | {"truncate_prompt_tokens": value})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "truncate_prompt_tokens"
        streamed = {
            "prompt": ["a" * 9, "b" * 8],
            "truncate_prompt_tokens": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await client.post("/v1/completions", json=streamed)
        *_, last, _ = events_of(answer.text)
        assert last["usage"]["truncated_prompt_tokens"] == 3
        assert last["usage"]["prompt_tokens"] == 14


class Unread(list[int]):
    """A list that raises if an item is read; its slices are plain lists."""

    def __iter__(self) -> Any:
        raise AssertionError("it is read")


async def test_only_kept_ids_are_read_and_long_lists_not_at_all() -> None:
    async with fake_engine("xy", max_model_len=50) as engine:
        done = await engine.generate(Unread([-1] * 99 + [7] * 5), truncate_prompt_tokens=5)
        assert done.prompt_token_ids == (7,) * 5
        assert done.usage is not None
        assert done.usage.truncated_prompt_tokens == 99
        vocab_size = engine.model_config.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids"):
            with refused(name, f"at most {vocab_size} token ids"):
                engine.stream("a", **{name: Unread([1] * (vocab_size + 1))})
            await engine.generate("a", max_tokens=1, **{name: range(vocab_size)})
