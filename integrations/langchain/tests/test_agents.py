"""LangChain's agents and LangGraph's graphs over the engine. They need `langchain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_asyncllm import ChatAsyncLLM
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from asyncllm import LLM
from asyncllm.testing import fake_llm

agents = pytest.importorskip("langchain.agents")
structured_output = pytest.importorskip("langchain.agents.structured_output")

OSLO = {"messages": [("user", "What is the weather in Oslo?")]}


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return {"Oslo": "snow"}.get(city, "rain")


class Report(BaseModel):
    """The weather."""

    city: str
    sky: str


def script(*answers: str) -> Callable[[str], str]:
    """Gives its scripted answers in order."""
    rest = list(answers)
    return lambda prompt: rest.pop(0)


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("kind", ["native", "tool"])
async def test_an_agent_answers_in_a_schema(kind: str) -> None:
    """A class alone is ProviderStrategy, because the model's profile says so."""
    call = call_of("get_weather", '{"city": "Oslo"}')
    report = '{"city": "Oslo", "sky": "snow"}'
    native = kind == "native"
    form = Report if native else structured_output.ToolStrategy(Report)
    with fake_llm(script(call, report if native else call_of("Report", report))) as llm:
        model = ChatAsyncLLM(engine=llm, max_tokens=400)
        agent = agents.create_agent(model, [get_weather], response_format=form)
        state = await agent.ainvoke(OSLO)
        assert state["structured_response"] == Report(city="Oslo", sky="snow")
        assert [type(m) for m in state["messages"][1:3]] == [AIMessage, ToolMessage]
        assert llm.engine.stats().num_finished == 2


async def test_an_agent_tries_again_after_a_wrong_answer() -> None:
    """A range is none of a tool's grammar where the schema does not say it."""

    class Even(BaseModel):
        """An even number."""

        value: int

        def model_post_init(self, _: Any) -> None:
            if self.value % 2:
                raise ValueError("odd")

    answers = script(call_of("Even", '{"value": 3}'), call_of("Even", '{"value": 4}'))
    with fake_llm(answers) as llm:
        model = ChatAsyncLLM(engine=llm, max_tokens=200)
        form = structured_output.ToolStrategy(Even)
        agent = agents.create_agent(model, [], response_format=form)
        state = await agent.ainvoke({"messages": [("user", "An even number, please.")]})
        assert state["structured_response"] == Even(value=4)
        complaint = state["messages"][2]
        assert isinstance(complaint, ToolMessage)
        assert "odd" in complaint.text


async def test_a_graph_streams_the_model_within_it(llm: LLM) -> None:
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatAsyncLLM(engine=llm, temperature=0, max_tokens=30, chunk_interval=0)

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    asked: Any = {"messages": [("user", "Who are you?")]}
    parts = [m async for m, _ in graph.compile().astream(asked, stream_mode="messages")]
    assert len(parts) > 3
    text = "".join(part.text for part in parts if isinstance(part, AIMessageChunk))
    assert text == model.invoke("Who are you?").text
