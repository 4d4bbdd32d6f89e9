"""Tools and thoughts: bound, called, streamed, cut off, and given back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_asyncllm import ChatAsyncLLM
from langchain_asyncllm.messages import to_chat, unparsable_end
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from asyncllm import LLM, InvalidRequestError
from asyncllm.testing import fake_llm

OSLO = "What is the weather in Oslo?"


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return {"Oslo": "snow"}.get(city, "rain")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Add(BaseModel):
    """Add two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def sum_of(chunks: list[Any]) -> AIMessageChunk:
    return sum(chunks[1:], chunks[0])


async def test_a_tool_is_called_and_answered(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0).bind_tools([get_weather, add])
    asked = HumanMessage(OSLO)
    answer = await model.ainvoke([asked])
    [call] = answer.tool_calls
    assert (call["name"], call["args"], call["type"]) == (
        "get_weather",
        {"city": "Oslo"},
        "tool_call",
    )
    assert (answer.text, answer.response_metadata["finish_reason"]) == ("", "tool_calls")
    result = await get_weather.ainvoke(call)
    assert isinstance(result, ToolMessage)
    assert (await model.ainvoke([asked, answer, result])).text == "It is snow in Oslo."
    [call] = model.invoke("What is 12 + 30?").tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 12, "b": 30})


async def test_a_stream_has_the_call_in_fragments(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0, chunk_interval=0).bind_tools([get_weather])
    chunks = [chunk async for chunk in model.astream(OSLO)]
    fragments = [part for chunk in chunks for part in chunk.tool_call_chunks]
    assert len(fragments) > 2
    assert [part["name"] for part in fragments if part["name"]] == ["get_weather"]
    assert "".join(part["args"] or "" for part in fragments) == '{"city": "Oslo"}'
    assert {part["index"] for part in fragments} == {0}
    whole = sum_of(chunks)
    assert [c["args"] for c in whole.tool_calls] == [{"city": "Oslo"}]
    assert whole.invalid_tool_calls == []
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    synchronous = sum_of(list(model.stream(OSLO)))
    assert [c["args"] for c in synchronous.tool_calls] == [{"city": "Oslo"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("any", "Add"),
        ("required", "Add"),
        (True, "Add"),
        ("get_weather", "get_weather"),
        ({"type": "function", "function": {"name": "get_weather"}}, "get_weather"),
    ],
)
def test_a_choice_holds_the_model_to_a_call(choice: Any, expected: str) -> None:
    # The script would answer in text, so the grammar alone makes calls.
    with fake_llm(call_of(expected, '{"a": 5, "b": 6}')) as llm:
        model = ChatAsyncLLM(engine=llm, max_tokens=300)
        bound = model.bind_tools([get_weather, Add], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke("Hello!")
        assert [call["name"] for call in answer.tool_calls] == [expected]
        if expected == "Add":
            assert answer.tool_calls[0]["args"] == {"a": 5, "b": 6}
        else:
            assert list(answer.tool_calls[0]["args"]) == ["city"]


def test_choices_that_ask_for_no_call(llm: LLM) -> None:
    model = ChatAsyncLLM(engine=llm, temperature=0)
    for choice in (None, False, "auto"):
        bound: Any = model.bind_tools([get_weather], tool_choice=choice)
        assert bound.invoke("Who are you?").tool_calls == []
    none = model.bind_tools([get_weather], tool_choice="none").invoke(OSLO)
    assert none.tool_calls == []
    assert none.usage_metadata == model.invoke(OSLO).usage_metadata
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        model.bind_tools([get_weather], tool_choice="get_time").invoke(OSLO)
    assert model.bind_tools([]).invoke("Who are you?").text == model.invoke("Who are you?").text


CUT = [
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}',
    '<tool_call>\n{"name": "get_weather", "arguments": {',
    call_of("get_weather", '{"city": "Oslo"} and so on'),
]


@pytest.mark.parametrize("answer", CUT)
async def test_a_call_that_is_cut_off_is_not_called(answer: str) -> None:
    """LangChain would close its brackets and call the tool with half of the arguments."""
    whole_call = call_of("get_weather", '{"city": "Rome"}')
    for text, expected in ((answer, []), (f"{whole_call}\n{answer}", [{"city": "Rome"}])):
        with fake_llm(text) as llm:
            model = ChatAsyncLLM(engine=llm, chunk_interval=0).bind_tools([get_weather])
            invoked = await model.ainvoke(OSLO)
            assert [call["args"] for call in invoked.tool_calls] == expected
            assert invoked.text.endswith(answer)
            streamed = sum_of([chunk async for chunk in model.astream(OSLO)])
            assert [call["args"] for call in streamed.tool_calls] == expected
            assert streamed.text == invoked.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.data())
def test_no_begin_of_arguments_parses_once_it_is_spoilt(value: Any, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    begin = text[: data.draw(st.integers(0, len(text)))]
    first = AIMessageChunk("", tool_call_chunks=[tool_call_chunk(name="f", args=begin, index=0)])
    last = tool_call_chunk(name=None, args=unparsable_end(begin), index=0)
    whole = first + AIMessageChunk("", tool_call_chunks=[last], chunk_position="last")
    assert whole.tool_calls == []
    assert [call["name"] for call in whole.invalid_tool_calls] == ["f"]


async def test_thoughts_are_beside_the_text_and_go_back() -> None:
    with fake_llm("<think>Two words.</think>Of course.", reasoning_parser="qwen3") as llm:
        model = ChatAsyncLLM(engine=llm, chunk_interval=0)
        answer = await model.ainvoke("Will you?")
        assert (answer.text, answer.additional_kwargs) == (
            "Of course.",
            {"reasoning_content": "Two words."},
        )
        assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
        streamed = sum_of([chunk async for chunk in model.astream("Will you?")])
        assert (streamed.text, streamed.additional_kwargs) == (
            answer.text,
            answer.additional_kwargs,
        )
    turn = {"role": "assistant", "content": "Of course.", "reasoning_content": "Two words."}
    assert to_chat([answer]) == [turn]
    for kind in ("reasoning", "thinking"):
        blocks: list[Any] = [{"type": kind, kind: "Two words."}, {"type": "text", "text": "Of"}]
        assert to_chat([AIMessage(blocks)]) == [{**turn, "content": "Of"}]


def test_blocks_with_calls_become_calls_once() -> None:
    call = {"name": "get_weather", "args": {"city": "Oslo"}, "id": "abc123abc"}
    arguments = json.dumps(call["args"])
    expected = {
        "type": "function",
        "id": "abc123abc",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    blocks: list[dict[str, Any]] = [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["args"]},
        {"type": "tool_call", **call},
    ]
    for block in blocks:
        message = AIMessage(
            [{"type": "text", "text": "Let me see."}, block],
            tool_calls=[{"type": "tool_call", **call}],
        )
        [turn] = to_chat([message])
        assert turn == {"role": "assistant", "content": "Let me see.", "tool_calls": [expected]}


def test_the_profile_says_what_an_agent_may_ask_for(llm: LLM) -> None:
    profile: Any = ChatAsyncLLM(engine=llm).profile
    assert profile["max_input_tokens"] == llm.engine.max_model_len == 512
    assert profile["tool_calling"]
    assert profile["structured_output"]
    assert not profile["image_inputs"]
