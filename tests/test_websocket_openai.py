"""The openai client on a WebSocket, against the packaged model."""

from __future__ import annotations

import pytest

from asyncllm import AsyncLLMEngine
from tests.idle import idle
from tests.websocket_clients import served

openai = pytest.importorskip("openai")


def client_for(server, api_key="secret"):
    return openai.AsyncOpenAI(
        api_key=api_key, base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0
    )


async def answer(connection):
    """The response that ends the turn, and the text as it streamed."""
    text = ""
    async for event in connection:
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            return event.response, text
        else:
            assert event.type != "error", event


async def test_two_turns_a_bad_id_and_a_close_on_the_packaged_model():
    engine = AsyncLLMEngine(num_blocks=64)
    async with served(engine, token="secret") as server, client_for(server) as client:
        async with client.responses.connect() as connection:
            await connection.response.create(
                model="asyncllm/demo",
                input="Hello, my name is Tom and I like my dog very much.",
                instructions="You are friendly, and you answer in one or two short sentences.",
                temperature=0,
            )
            first, text = await answer(connection)
            assert first.output_text == text != ""
            assert first.status == "completed"
            await connection.response.create(
                model="asyncllm/demo",
                input=[{"role": "user", "content": "What is my name?"}],
                instructions="You are friendly, and you answer in one or two short sentences.",
                previous_response_id=first.id,
                temperature=0,
            )
            second, text = await answer(connection)
            assert second.output_text == text != ""
            assert second.previous_response_id == first.id
            assert second.usage.input_tokens > first.usage.total_tokens
            assert second.usage.input_tokens_details.cached_tokens >= 32

            await connection.response.create(
                input="Hello!",
                temperature=0,
                max_output_tokens=4,
                include=["message.output_text.logprobs"],
                top_logprobs=2,
            )
            third, text = await answer(connection)
            logprobs = third.output[0].content[0].logprobs
            assert len(logprobs) == third.usage.output_tokens == 4
            assert "".join(item.token for item in logprobs) == text
            for item in logprobs:
                assert [item.logprob, 2] == [item.top_logprobs[0].logprob, len(item.top_logprobs)]

            await connection.response.create(input="Hi", previous_response_id="resp_none")
            error = await connection.recv()
            assert error.error.code == "previous_response_not_found"
            assert (error.status, error.error.param) == (400, "previous_response_id")

            await connection.response.create(input="Tell me a story about a fox.")
            while (await connection.recv()).type != "response.output_text.delta":
                pass
        stats = await idle(engine)
        assert (stats.num_aborted, stats.num_finished) == (1, 3)
