"""What the models add to LangChain's contract: pacing, aborts, parameters, metadata."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator
from copy import deepcopy
from typing import Any

import pytest
from langchain_asyncllm import AsyncLLM, ChatAsyncLLM
from langchain_core.callbacks import AsyncCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration
from langchain_core.prompts import ChatPromptTemplate

from asyncllm import LLM, InvalidRequestError
from asyncllm.errors import EngineOverloadedError

STORY = "Tell me a story about a fox and a boat."


async def _until_idle(llm: LLM) -> None:
    while (stats := llm.engine.stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0.001)
    assert stats.num_free_blocks == stats.num_blocks


async def test_a_copy_borrows_the_engine(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=4)
    for copied in (deepcopy(model), deepcopy({"a": [model]})["a"][0], model.model_copy(deep=True)):
        assert (copied.engine, copied) == (model.engine, model)
    assert deepcopy(AsyncLLM(engine=llm)).engine is llm.engine


async def test_blocking_a_running_loop_is_said(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=4)
    with pytest.warns(RuntimeWarning, match="block the running event loop"):
        text = model.invoke(STORY).text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (await model.ainvoke(STORY)).text == text
        assert (await asyncio.to_thread(model.invoke, STORY)).text == text


async def test_all_ways_give_the_same_answer(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=40)
    whole = (await model.ainvoke(STORY)).text
    assert (
        whole == llm.chat([{"role": "user", "content": STORY}], temperature=0, max_tokens=40).text
    )
    assert (await asyncio.to_thread(model.invoke, STORY)).text == whole
    assert "".join([chunk.text async for chunk in model.astream(STORY)]) == whole
    assert "".join(chunk.text for chunk in model.stream(STORY)) == whole
    assert [m.text for m in await model.abatch([STORY] * 3)] == [whole] * 3
    assert [m.text for m in model.batch([STORY] * 3)] == [whole] * 3


async def test_the_last_chunk_tells_the_end(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=30, chunk_interval=0)
    chunks = [chunk async for chunk in model.astream(STORY)]
    assert [c.chunk_position for c in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert all(chunk.usage_metadata is None for chunk in chunks[:-1])
    full: Any = sum(chunks[1:], chunks[0])
    assert isinstance(full, AIMessageChunk)
    assert full.response_metadata["finish_reason"] == "length"
    assert full.response_metadata["model_name"] == "asyncllm/demo"
    assert full.usage_metadata["output_tokens"] == 30
    again = await model.ainvoke(STORY)
    assert again.response_metadata.items() >= full.response_metadata.items()
    assert again.usage_metadata["total_tokens"] == full.usage_metadata["total_tokens"]
    assert "cache_read" in again.usage_metadata["input_token_details"]


async def test_chunks_come_no_closer_than_the_interval(llm: LLM) -> None:
    once = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=60, chunk_interval=5.0)
    chunks = []

    async def read() -> None:
        async for chunk in once.astream(STORY):
            chunks.append(chunk)

    reading = asyncio.ensure_future(read())
    while not chunks:
        await asyncio.sleep(0.001)
    await _until_idle(llm)
    # The whole answer is there, and only its first chunk was handed out.
    assert len(chunks) == 1
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_parameters_of_a_call_win(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=50, stop=["never said"])
    assert (await model.ainvoke(STORY, max_tokens=4)).usage_metadata["output_tokens"] == 4
    assert (await model.bind(max_tokens=3).ainvoke(STORY)).usage_metadata["output_tokens"] == 3
    whole = (await model.ainvoke(STORY)).text
    stop = whole[20:24]
    stopped = await model.ainvoke(STORY, stop=[stop])
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.response_metadata["finish_reason"] == "stop"
    assert stopped.response_metadata["stop_reason"] == stop
    seeded = ChatAsyncLLM(engine=llm, temperature=1.5, seed=7, max_tokens=20)
    assert (await seeded.ainvoke(STORY)).text == (await seeded.ainvoke(STORY)).text
    for refused in (
        {"colour": "blue"},
        {"model": "other"},
        {"tools": [{}]},
        {"tool_choice": "?"},
        {"top_p": 3},
    ):
        with pytest.raises(InvalidRequestError):
            await model.ainvoke(STORY, **refused)
    with pytest.raises(ValueError, match="api_key"):
        ChatAsyncLLM(engine=llm, api_key="x")  # pyright: ignore[reportCallIssue]


async def test_log_probabilities(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=5, logprobs=2)
    whole = (await model.ainvoke(STORY)).response_metadata["logprobs"]["content"]
    assert len(whole) == 5
    assert all(len(item["top_logprobs"]) == 2 for item in whole)
    assert whole[0]["logprob"] == whole[0]["top_logprobs"][0]["logprob"] <= 0
    chunks = [chunk async for chunk in model.astream(STORY)]
    streamed = sum(chunks[1:], chunks[0]).response_metadata["logprobs"]["content"]
    assert [item["token"] for item in streamed] == [item["token"] for item in whole]


async def test_leaving_and_cancelling_abort(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, max_tokens=400, chunk_interval=0)
    aborted = llm.engine.stats().num_aborted
    stream = model.astream(STORY, ignore_eos=True)
    async for _ in stream:
        break
    assert isinstance(stream, AsyncGenerator)
    await stream.aclose()
    await _until_idle(llm)
    assert llm.engine.stats().num_aborted == aborted + 1
    task = asyncio.ensure_future(model.ainvoke(STORY, ignore_eos=True))
    while not llm.engine.stats().num_running:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _until_idle(llm)
    assert llm.engine.stats().num_aborted == aborted + 2
    for _ in model.stream(STORY, ignore_eos=True):
        break
    await _until_idle(llm)


async def test_conversations_and_content_blocks(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=20)
    messages = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "My name is Tom."}]),
        AIMessage("Hello Tom."),
        HumanMessage("What is my name?"),
    ]
    expected = llm.chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "My name is Tom."},
            {"role": "assistant", "content": "Hello Tom."},
            {"role": "user", "content": "What is my name?"},
        ],
        temperature=0,
        max_tokens=20,
    )
    assert (await model.ainvoke(messages)).text == expected.text
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequestError):
        await model.ainvoke([HumanMessage([picture])])


async def test_a_full_queue_is_waited_for(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, max_retries=2)
    calls = []

    def refuse_twice() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise EngineOverloadedError("full", retry_after=0.001)
        return "done"

    assert await model.asubmit(refuse_twice) == "done"
    calls.clear()
    assert model.submit(refuse_twice) == "done"
    calls.clear()
    with pytest.raises(EngineOverloadedError):
        await ChatAsyncLLM(engine=llm, max_retries=1).asubmit(refuse_twice)


async def test_chains_and_handlers(llm: LLM) -> None:
    class Tokens(AsyncCallbackHandler):
        text = ""

        async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.text += token

    tokens, usage = Tokens(), UsageMetadataCallbackHandler()
    prompt = ChatPromptTemplate.from_messages([("human", "Tell me a story about {thing}.")])
    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=20)
    chain = prompt | model | StrOutputParser()
    config: Any = {"callbacks": [tokens, usage]}
    text = "".join([part async for part in chain.astream({"thing": "a fox"}, config)])
    assert tokens.text == text
    assert usage.usage_metadata["asyncllm/demo"]["output_tokens"] == 20
    kinds = [e["event"] async for e in chain.astream_events({"thing": "a fox"}, version="v2")]
    assert "on_chat_model_stream" in kinds
    said = Tokens()
    streaming = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=20, streaming=True)
    answer = await streaming.ainvoke("Hello!", {"callbacks": [said]})
    assert said.text == answer.text


async def test_plain_prompts(llm: LLM) -> None:
    model = AsyncLLM(engine=llm, temperature=0, max_tokens=12)
    whole = await model.ainvoke("Once upon a time")
    assert whole == llm.generate("Once upon a time", temperature=0, max_tokens=12).text
    assert model.invoke("Once upon a time") == whole
    assert "".join([part async for part in model.astream("Once upon a time")]) == whole
    assert "".join(model.stream("Once upon a time")) == whole
    assert await model.abatch(["Once upon a time"] * 3) == [whole] * 3
    assert model.batch(["Once upon a time"] * 3) == [whole] * 3
    result = await model.agenerate(["Once upon a time", "Tell me a story"])
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 24
    info = result.generations[0][0].generation_info
    assert info == {"finish_reason": "length", "model_name": "asyncllm/demo"}
    with pytest.raises(InvalidRequestError):
        await model.agenerate(["fine", ""])
    await _until_idle(llm)


async def test_several_outputs(llm: LLM) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 4, "max_tokens": 12}
    chat = ChatAsyncLLM(engine=llm)
    expected = llm.chat([{"role": "user", "content": STORY}], **options)
    texts = [output.text for output in expected.outputs]
    assert len(set(texts)) == 3
    for result in (
        await chat.agenerate([[HumanMessage(STORY)]], **options),
        await asyncio.to_thread(chat.generate, [[HumanMessage(STORY)]], **options),
    ):
        assert [one.text for one in result.generations[0]] == texts
        made = [one.message for one in result.generations[0] if isinstance(one, ChatGeneration)]
        usages = [one.usage_metadata for one in made if isinstance(one, AIMessage)]
        assert [usage and usage["output_tokens"] for usage in usages] == [36, None, None]
    plain = AsyncLLM(engine=llm)
    outputs = llm.generate(STORY, **options).outputs
    for result in (
        await plain.agenerate([STORY, STORY], **options),
        await asyncio.to_thread(plain.generate, [STORY, STORY], **options),
    ):
        for generations in result.generations:
            assert [one.text for one in generations] == [output.text for output in outputs]
        assert result.llm_output["token_usage"]["completion_tokens"] == 72
    for model in (chat, plain):
        with pytest.raises(InvalidRequestError, match="n=3: expected 1 when streaming"):
            async for _ in model.astream(STORY, **options):
                pass
        with pytest.raises(InvalidRequestError, match="n=3: expected 1 when streaming"):
            list(model.stream(STORY, **options))
