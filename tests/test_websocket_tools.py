"""The chat page's side of the protocol with tools, word for word, on a real server."""

from __future__ import annotations

from asyncllm.testing import fake_engine
from tests.websocket_clients import client_of, served, text_of

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
QUESTION = {"role": "user", "content": "What is 12 + 30?"}
ARGUMENTS = '{"a": 12, "b": 30}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'


def asked(given, previous=None):
    fields = {"instructions": None, "temperature": 0, "tools": [ADD], "input": given}
    return {"type": "response.create", "previous_response_id": previous, **fields}


async def test_a_call_its_result_and_the_answer():
    answers = iter([f"So. {CALL}", "The sum is 42.", "The sum is 42."])
    async with served(fake_engine(lambda _: next(answers))) as server:
        async with client_of(server) as page:
            await page.send(**asked([QUESTION]))
            events = await page.until("response.completed")
            first = events[-1]["response"]
            shown, call = (
                event["item"]
                for kind in ("added", "done")
                for event in events
                if event["type"] == f"response.output_item.{kind}"
                and event["item"]["type"] == "function_call"
            )
            parts = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
            assert "".join(part["delta"] for part in parts) == call["arguments"] == ARGUMENTS
            assert {**call, "arguments": "", "status": "in_progress"} == shown
            assert call["name"] == "add"
            assert text_of(first) == "So."
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
            await page.send(**asked([result], first["id"]))
            second = (await page.until("response.completed"))[-1]["response"]
            assert text_of(second) == "The sum is 42."
            assert second["previous_response_id"] == first["id"]
        # A connection that has come back is sent the whole conversation.
        again = {"type": "function_call", "call_id": call["call_id"], "name": "add"}
        said = {"role": "assistant", "content": "So."}
        whole = [QUESTION, said, {**again, "arguments": ARGUMENTS}, result]
        async with client_of(server) as page:
            await page.send(**asked(whole))
            third = (await page.until("response.completed"))[-1]["response"]
        assert text_of(third) == "The sum is 42."
    counts = [one["usage"]["input_tokens"] for one in (first, second, third)]
    assert counts[0] < counts[1] == counts[2]
