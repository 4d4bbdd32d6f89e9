"""Agents over the engine: tools, typed output, retries, streams, usage, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, cast

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelOverloadedError,
    ModelRequestRejectedError,
    ModelTimeoutError,
    ModelUnavailableError,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UserError,
)
from pydantic_ai.messages import (
    ImageUrl,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import UsageLimits
from pydantic_ai_asyncllm import AsyncLLMModel, AsyncLLMModelSettings
from pydantic_ai_asyncllm.messages import to_chat

from asyncllm import LLM
from asyncllm.errors import EngineOverloadedError
from asyncllm.testing import fake_llm

OSLO = "What is the weather in Oslo?"
GREEDY = AsyncLLMModelSettings(temperature=0)


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return {"Oslo": "snow"}.get(city, "rain")


class Trip(BaseModel):
    """A trip."""

    by: Literal["boat", "train"]
    days: Literal[1, 2, 3]


def script(*answers: str) -> Callable[[str], str]:
    """Gives its scripted answers in order."""
    rest = list(answers)
    return lambda prompt: rest.pop(0)


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_an_agent_calls_a_tool_and_answers(llm: LLM) -> None:
    agent = Agent(AsyncLLMModel(llm, settings=GREEDY), tools=[get_weather])
    result = await agent.run(OSLO)
    assert result.output == "It is snow in Oslo."
    asked, said = result.all_messages()[1:3]
    [call] = [part for part in asked.parts if isinstance(part, ToolCallPart)]
    assert call.args_as_dict() == {"city": "Oslo"}
    assert isinstance(asked, ModelResponse)
    assert (asked.finish_reason, asked.model_name) == ("tool_call", "asyncllm/demo")
    [returned] = [part for part in said.parts if isinstance(part, ToolReturnPart)]
    assert (returned.content, returned.tool_call_id) == ("snow", call.tool_call_id)
    usage = result.usage
    assert usage.requests == 2
    last = result.all_messages()[-1]
    assert isinstance(last, ModelResponse)
    assert usage.input_tokens == asked.usage.input_tokens + last.usage.input_tokens > 60
    assert usage.output_tokens == asked.usage.output_tokens + last.usage.output_tokens


async def test_a_stream_gives_the_answer_in_pieces(llm: LLM) -> None:
    agent = Agent(AsyncLLMModel(llm, settings=GREEDY), tools=[get_weather])
    async with agent.run_stream(OSLO) as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 2
    assert "".join(pieces) == "It is snow in Oslo."
    assert streamed.usage.output_tokens > len(pieces)


@pytest.mark.parametrize("mode", [Trip, NativeOutput(Trip), PromptedOutput(Trip), ToolOutput(Trip)])
async def test_every_way_to_type_an_output(mode: Any) -> None:
    value = '{"by": "boat", "days": 2}'
    answer = call_of("final_result", value) if isinstance(mode, ToolOutput) else value
    with fake_llm(answer) as llm:
        agent = Agent(AsyncLLMModel(llm), output_type=mode)
        assert (await agent.run("Plan a trip.")).output == Trip(by="boat", days=2)
        async with agent.run_stream("Plan a trip.") as streamed:
            parts = [part async for part in streamed.stream_output(debounce_by=None)]
        assert parts[-1] == Trip(by="boat", days=2)


async def test_tools_and_typed_output_together() -> None:
    answers = script(call_of("get_weather", '{"city": "Oslo"}'), '{"by": "train", "days": 1}')
    with fake_llm(answers) as llm:
        agent = Agent(AsyncLLMModel(llm), tools=[get_weather], output_type=Trip)
        result = await agent.run("Plan a trip to Oslo.")
        assert result.output == Trip(by="train", days=1)
        assert result.usage.tool_calls == 1


async def test_an_agent_tries_again() -> None:
    """A tool that raises ModelRetry, and a validator that refuses an output."""
    cities = []

    def look_up(city: str) -> str:
        """Look a city up."""
        cities.append(city)
        if city == "Olso":
            raise ModelRetry("Which city is that?")
        return "snow"

    answers = script(
        call_of("look_up", '{"city": "Olso"}'),
        call_of("look_up", '{"city": "Oslo"}'),
        '{"by": "boat", "days": 3}',
        '{"by": "boat", "days": 1}',
    )
    with fake_llm(answers) as llm:
        agent: Agent[None, Trip] = Agent(
            AsyncLLMModel(llm), tools=[look_up], output_type=Trip, retries=2
        )

        @agent.output_validator
        def short(trip: Trip) -> Trip:
            if trip.days > 1:
                raise ModelRetry("That is too long.")
            return trip

        result = await agent.run("A trip to Oslo.")
        assert result.output == Trip(by="boat", days=1)
        assert cities == ["Olso", "Oslo"]
        assert result.usage.requests == 4


async def test_a_call_that_is_cut_off_is_not_made() -> None:
    called = []

    def book(city: str) -> str:
        """Book a trip."""
        called.append(city)
        return "booked"

    for answer in (
        '<tool_call>\n{"name": "book", "arguments": {"city": "Os',
        '<tool_call>\n{"name": "book", "arguments": {"city": "Oslo"}',
    ):
        settings = AsyncLLMModelSettings(max_tokens=len(answer))
        with fake_llm(answer) as llm:
            agent = Agent(AsyncLLMModel(llm, settings=settings), tools=[book], retries=0)
            # Whole, it is text; a stream has had its fragments before that shows.
            assert (await agent.run("Book!")).output == answer
            with pytest.raises(UnexpectedModelBehavior):
                async with agent.run_stream_events("Book!") as events:
                    async for _ in events:
                        pass
        with fake_llm(answer) as llm:
            agent = Agent(AsyncLLMModel(llm), tools=[book], retries=0)
            with pytest.raises(UnexpectedModelBehavior):
                async with agent.run_stream_events("Book!") as events:
                    async for _ in events:
                        pass
    assert called == []


async def test_thoughts_are_a_part_and_go_back() -> None:
    with fake_llm("<think>Two words.</think>Of course.", reasoning_parser="qwen3") as llm:
        agent = Agent(AsyncLLMModel(llm))
        result = await agent.run("Will you?")
        response = result.all_messages()[-1]
        thought, text = response.parts
        assert isinstance(thought, ThinkingPart)
        assert isinstance(text, TextPart)
        assert (thought.content, text.content) == ("Two words.", "Of course.")
        async with agent.run_stream("Will you?") as streamed:
            assert await streamed.get_output() == "Of course."
        assert streamed.all_messages()[-1].parts == response.parts
    assert to_chat([response], None) == [
        {"role": "assistant", "content": "Of course.", "reasoning_content": "Two words."}
    ]


async def test_settings_reach_the_engine(llm: LLM) -> None:
    model = AsyncLLMModel(llm)

    async def run(**settings: Any) -> ModelResponse:
        given = cast(ModelSettings, settings)
        response = (await Agent(model).run(OSLO, model_settings=given)).all_messages()[-1]
        assert isinstance(response, ModelResponse)
        return response

    cut = await run(temperature=0, max_tokens=4)
    assert (cut.usage.output_tokens, cut.finish_reason) == (4, "length")
    whole = await run(temperature=0)
    assert whole.text is not None
    stopped = await run(temperature=0, stop_sequences=[whole.text[5:9]])
    assert stopped.text == whole.text[:5].rstrip()
    seeded = [(await run(temperature=1.5, seed=3, max_tokens=20)).text for _ in range(2)]
    assert seeded[0] == seeded[1]
    banned = llm.engine.tokenizer.encode(whole.text)[0]
    other = await run(temperature=0, max_tokens=1, logit_bias={str(banned): -100})
    assert cut.text is not None
    assert other.text is not None
    assert other.text != cut.text[: len(other.text)]
    options = {"min_tokens": 6, "ignore_eos": True}
    long = await run(temperature=0, max_tokens=7, asyncllm_options=options)
    assert long.usage.output_tokens == 7
    with pytest.raises(UserError, match="asyncllm_options"):
        await run(extra_body={"top_k": 3})
    with pytest.raises(ModelRequestRejectedError, match="top_p=3"):
        await run(top_p=3)
    with pytest.raises(ModelTimeoutError):
        await run(timeout=1e-9)


async def test_instructions_and_system_prompts_are_one_message(llm: LLM) -> None:
    agent = Agent(AsyncLLMModel(llm, settings=GREEDY), system_prompt="A", instructions="B")
    history = (await agent.run("Hello!")).all_messages()
    first = history[0]
    assert isinstance(first, ModelRequest)
    chat = to_chat(history[:1], None)
    assert chat == [{"role": "system", "content": "A"}, {"role": "user", "content": "Hello!"}]
    again = await agent.run("And you?", message_history=history)
    assert again.usage.input_tokens > 0
    with pytest.raises(UserError, match="ImageUrl"):
        to_chat([ModelRequest([UserPromptPart(["Look.", ImageUrl("http://x/y.png")])])], None)


async def test_tokens_are_counted_before_a_request(llm: LLM) -> None:
    agent = Agent(
        AsyncLLMModel(llm, settings=GREEDY), tools=[get_weather], instructions="Be brief."
    )
    result = await agent.run("Who are you?")
    needed = result.usage.input_tokens
    for limit in (needed, needed - 1):
        limits = UsageLimits(input_tokens_limit=limit, count_tokens_before_request=True)
        if limit == needed:
            assert (await agent.run("Who are you?", usage_limits=limits)).output == result.output
        else:
            with pytest.raises(UsageLimitExceeded):
                await agent.run("Who are you?", usage_limits=limits)


async def test_leaving_and_cancelling_abort(llm: LLM) -> None:
    settings = AsyncLLMModelSettings(asyncllm_options={"ignore_eos": True})
    agent = Agent(AsyncLLMModel(llm, settings=settings))
    aborted = llm.engine.stats().num_aborted

    async def until_idle() -> None:
        while (stats := llm.engine.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.001)

    task = asyncio.ensure_future(agent.run("Tell me a story."))
    while not llm.engine.stats().num_running:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle()
    assert llm.engine.stats().num_aborted == aborted + 1
    async with agent.run_stream("Tell me a story.") as streamed:
        async for _ in streamed.stream_text(debounce_by=None):
            break
    await until_idle()
    assert llm.engine.stats().num_aborted == aborted + 2
    async with agent.run_stream("Tell me a story.") as streamed:
        async for _ in streamed.stream_text(debounce_by=None):
            await streamed.cancel()
    assert streamed.all_messages()[-1].state == "interrupted"
    await until_idle()
    assert llm.engine.stats().num_aborted == aborted + 3


async def test_errors_are_those_that_a_fallback_knows(llm: LLM) -> None:
    with pytest.raises(ModelContextWindowExceededError):
        await Agent(AsyncLLMModel(llm)).run("Mia has a boat. " * 300)
    with fake_llm(["Half ", RuntimeError("broken")]) as broken:
        with pytest.raises(ModelAPIError, match="broken"):
            await Agent(AsyncLLMModel(broken)).run("Hello!")
        with pytest.raises(ModelAPIError, match="broken"):
            async with Agent(AsyncLLMModel(broken)).run_stream("Hello!") as streamed:
                await streamed.get_output()
        closed = AsyncLLMModel(broken)
    with pytest.raises(ModelUnavailableError):
        await Agent(closed).run("Hello!")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise EngineOverloadedError("full", retry_after=2.5)

    with fake_llm("Hello.") as busy:
        busy.engine.chat = full
        with pytest.raises(ModelOverloadedError) as caught:
            await Agent(AsyncLLMModel(busy)).run("Hello!")
    assert caught.value.retry_after == 2.5


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "add"}), (["add"], {"add"}), ("none", set()), ("auto", None)],
)
async def test_tool_choice_is_the_engines(choice: Any, names: set[str] | None) -> None:
    def tool(name: str, **properties: Any) -> ToolDefinition:
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return ToolDefinition(name=name, parameters_json_schema=schema)

    number = {"type": "integer"}
    tools = [tool("get_weather", city={"type": "string"}), tool("add", a=number, b=number)]
    # Where any call is asked for, the script makes one: texts of its own would have no end.
    answer = call_of("get_weather", '{"city": "Oslo"}') if choice == "required" else "Hello."
    with fake_llm(answer) as llm:
        settings = AsyncLLMModelSettings(tool_choice=choice, max_tokens=300)
        prompt: list[ModelMessage] = [ModelRequest([UserPromptPart("Hello!")])]
        parameters = ModelRequestParameters(function_tools=tools)
        response = await AsyncLLMModel(llm).request(prompt, settings, parameters)
        called = {part.tool_name for part in response.parts if isinstance(part, ToolCallPart)}
        if names:
            assert called
            assert called <= names
        else:
            assert called == set()
            assert response.text == "Hello."
