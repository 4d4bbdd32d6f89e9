"""The openai client and OpenAI's Agents SDK against the application, on the packaged model."""

from __future__ import annotations

import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

from asyncllm import AsyncLLMEngine
from asyncllm.testing import fake_engine
from tests.app_clients import served_app, url_of, user
from tests.idle import idle

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

AGENTS = Path(__file__).parent.parent / "build" / "agents"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "which one"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@asynccontextmanager
async def client_of(engine, **options):
    async with served_app(engine, **options) as server:
        async with openai.AsyncOpenAI(
            base_url=url_of(server) + "/v1", api_key="secret", max_retries=0
        ) as client:
            yield client


class Trip(BaseModel):
    by: Literal["boat", "train"]
    days: Literal[1, 2, 3]


async def test_the_openai_client_on_the_packaged_model():
    engine = AsyncLLMEngine(num_blocks=64)
    model = "asyncllm/demo"
    async with client_of(engine, token="secret") as client:
        assert [one.id async for one in client.models.list()] == [model]
        await speak_chat(client.chat.completions, model)
        await speak_tools(client.chat.completions, model)
        parsed = await client.chat.completions.parse(
            model=model, messages=user("Plan a trip."), response_format=Trip, max_tokens=100
        )
        assert parsed.choices[0].message.parsed.by in ("boat", "train")
        await speak_completions(client.completions, model)
        await speak_responses(client, model, Trip)
    assert engine.state == "closed"


async def speak_chat(chat, model):
    sums = user("What is 12 + 7?")
    answer = await chat.create(model=model, messages=sums, temperature=0)
    assert answer.choices[0].message.content == "12 + 7 = 19."
    async with chat.stream(
        model=model,
        messages=sums,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = {event.type async for event in stream}
        whole = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert whole.choices[0].message.content == "12 + 7 = 19."
    assert whole.usage.completion_tokens == answer.usage.completion_tokens
    logprobs = whole.choices[0].logprobs.content
    # The end-of-sequence token is no text, and has a log-probability.
    text = "".join(token.token for token in logprobs)
    assert text.startswith("12 + 7 = 19.")
    assert b"".join(bytes(token.bytes) for token in logprobs).decode() == text
    assert all(
        token.logprob <= 0 == token.top_logprobs[0].logprob - token.logprob for token in logprobs
    )


async def speak_tools(chat, model):
    weather = user("What is the weather in Oslo?")
    called = await chat.create(model=model, messages=weather, tools=[TOOL], temperature=0)
    (choice,) = called.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    turn = choice.message.model_dump()
    result = {"role": "tool", "tool_call_id": call.id, "content": "snow"}
    told = await chat.create(
        model=model, messages=[*weather, turn, result], tools=[TOOL], temperature=0
    )
    assert told.choices[0].message.content == "It is snow in Oslo."
    async with chat.stream(
        model=model,
        messages=user("Who are you?"),
        tools=[TOOL],
        tool_choice="required",
        temperature=0,
    ) as stream:
        forced = await stream.get_final_completion()
    (call,) = forced.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


async def speak_completions(completions, model):
    starts = ["Once upon a time", "One day"]
    whole = await completions.create(
        model=model, prompt=starts, max_tokens=8, temperature=0, echo=True
    )
    assert all(one.text.startswith(start) for one, start in zip(whole.choices, starts, strict=True))
    pieces = [
        chunk.choices[0].text
        async for chunk in await completions.create(
            model=model, prompt=starts[0], max_tokens=8, temperature=0, stream=True
        )
    ]
    assert starts[0] + "".join(pieces) == whole.choices[0].text


async def speak_responses(client, model, form):
    tool = {"type": "function", **TOOL["function"]}
    first = await client.responses.create(
        model=model, input="What is the weather in Oslo?", tools=[tool], temperature=0
    )
    (call,) = first.output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "snow"}
    async with client.responses.stream(
        model=model, input=[result], previous_response_id=first.id, tools=[tool], temperature=0
    ) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        second = await stream.get_final_response()
    assert second.output_text == text == "It is snow in Oslo."
    assert (await client.responses.retrieve(second.id)).output_text == text
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    parsed = await client.responses.parse(
        model=model, input="Plan a trip.", text_format=form, max_output_tokens=100
    )
    assert parsed.output_parsed.days in (1, 2, 3)
    async with client.responses.connect() as connection:
        await connection.response.create(
            model=model, input="What is 12 + 7?", temperature=0, store=False
        )
        async for event in connection:
            if event.type == "response.completed":
                break
        assert event.response.output_text == "12 + 7 = 19."
        await connection.response.create(input="x", previous_response_id="resp_none")
        error = await connection.recv()
        assert (error.error.code, error.status) == ("previous_response_not_found", 400)


async def test_errors_are_the_clients_own_kinds():
    engine = fake_engine("x" * 3000, max_model_len=4000, step_time=0.002)
    async with client_of(engine, token="secret") as client:
        create = client.chat.completions.create
        for fields, kind, code in (
            ({"model": "gpt"}, openai.NotFoundError, "model_not_found"),
            ({"temperature": 500}, openai.BadRequestError, "invalid_value"),
            ({"messages": user("x" * 9000)}, openai.BadRequestError, "context_length_exceeded"),
            ({"extra_body": {"colour": 1}}, openai.BadRequestError, "unknown_parameter"),
        ):
            with pytest.raises(kind) as error:
                await create(**{"model": "asyncllm/demo", "messages": user("Hi"), **fields})
            assert error.value.code == code
            assert error.value.request_id.startswith("req_")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APITimeoutError):
            await create(model="asyncllm/demo", messages=user("Hi"), timeout=0.2)
        assert (await idle(engine)).num_aborted == 1
        stream = await create(model="asyncllm/demo", messages=user("Hi"), stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        assert (await idle(engine)).num_aborted == 2
        responses = await client.responses.create(model="asyncllm/demo", input="Hi", stream=True)
        async for event in responses:
            if event.type == "response.output_text.delta":
                break
        await responses.close()
        assert (await idle(engine)).num_aborted == 3


async def test_the_agents_sdk_with_a_tool(monkeypatch):
    # It asks for an older websockets than the one that is tested, and does without: last in the
    # path, its own copies of what is installed are not used.
    monkeypatch.setattr(sys, "path", [*sys.path, str(AGENTS)])
    agents = pytest.importorskip("agents", reason=f".ci/run installs it into {AGENTS.name}")
    asked = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city.

        Args:
            city: which one.
        """
        asked.append(city)
        return "snow"

    agents.set_tracing_disabled(True)
    async with client_of(AsyncLLMEngine(num_blocks=64)) as client:
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            agent = agents.Agent(
                name="Weather",
                tools=[get_weather],
                model=kind(model="asyncllm/demo", openai_client=client),
                model_settings=agents.ModelSettings(temperature=0),
            )
            question = "What is the weather in Oslo?"
            result = await agents.Runner.run(agent, question)
            assert result.final_output == "It is snow in Oslo."
            streamed = agents.Runner.run_streamed(agent, question)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == "It is snow in Oslo."
    assert asked == ["Oslo"] * 4
