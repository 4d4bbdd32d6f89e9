"""Responses over HTTP and on the application's WebSocket."""

from __future__ import annotations

import json
import sys
from itertools import groupby

import pytest

from asyncllm import AsyncLLMEngine, RequestError
from asyncllm.serving.response_input import items_to_messages
from asyncllm.serving.response_store import (
    Conversation,
    ResponseStore,
    SharedResponseBytes,
    StoredResponse,
)
from asyncllm.serving.token_logprobs import LogprobFormatter
from asyncllm.testing import fake_engine
from tests.app_clients import app_client, served_app
from tests.fakes import fake
from tests.websocket_clients import client_of, text_of

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


async def respond(client, given="Hi", **fields):
    return await client.post("/v1/responses", json={"input": given, **fields})


def events_of(response):
    """Events, each of which is named twice."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def same(response):
    """A response without what differs from one time to the next."""
    changing = ("id", "created_at", "completed_at", "timings", "usage")
    items = [{**item, "id": None, "call_id": None} for item in response["output"]]
    response = {key: value for key, value in response.items() if key not in changing}
    return {**response, "output": items}


@pytest.mark.parametrize("streams", [False, True])
async def test_whole_answers_write_log_probabilities_once(monkeypatch, streams):
    """Streamed ones also write them with each delta."""
    formatted = []
    format_logprobs = LogprobFormatter.format

    def counted(self, token_logprobs):
        formatted.append(len(token_logprobs))
        return format_logprobs(self, token_logprobs)

    monkeypatch.setattr(LogprobFormatter, "format", counted)
    fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "stream": streams}
    fields |= {"max_output_tokens": 7, "seed": 1}
    async with app_client(AsyncLLMEngine(num_blocks=64)) as client:
        response = await respond(client, **fields)
        whole = events_of(response)[-1]["response"] if streams else response.json()
        (message,) = whole["output"]
        (part,) = message["content"]
        logprobs = part["logprobs"]
        assert b"".join(bytes(one["bytes"]) for one in logprobs).decode() == part["text"]
        assert all(len(one["top_logprobs"]) == 2 for one in logprobs)
        assert sum(formatted) == (1 + streams) * len(logprobs)


async def test_the_three_ways_tell_the_same():
    engine = fake_engine(f"<think>Hm.</think>See. {CALL}\n{CALL}", reasoning_parser="qwen3")
    fields = {"tools": [TOOL], "instructions": "Be brief.", "metadata": {"a": "b"}}
    async with served_app(engine) as server, client_of(server) as socket:
        from httpx import AsyncClient

        async with AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            whole = (await respond(client, **fields)).json()
            events = events_of(await respond(client, stream=True, **fields))
        await socket.create("Hi", **fields)
        heard = await socket.until("response.completed")
    assert same(events[-1]["response"]) == same(whole) == same(heard[-1]["response"])
    thoughts, message, first, second = whole["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "See.")
    for call in (first, second):
        assert (call["type"], call["name"]) == ("function_call", "get_weather")
        assert call["arguments"] == '{"city": "Oslo"}'
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert (whole["status"], whole["tools"]) == ("completed", [TOOL])
    # Fragments that wait together are sent as one.
    told, said = (
        [kind for kind, _ in groupby(e["type"] for e in each)] for each in (events, heard)
    )
    assert told == said
    kinds = [event["type"] for event in events]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert order == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        *call,
        *call,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    for event in events:
        if "output_index" in event and "item_id" in event:
            expected = events[-1]["response"]["output"][event["output_index"]]["id"]
            assert event["item_id"] == expected


async def test_events_are_those_of_the_openai_client():
    types = pytest.importorskip("openai.types.responses")
    from pydantic import TypeAdapter

    adapter = TypeAdapter(types.ResponseStreamEvent)
    engine = fake_engine(f"<think>Hm.</think>See. {CALL}", reasoning_parser="qwen3")
    async with app_client(engine) as client:
        events = events_of(await respond(client, stream=True, tools=[TOOL]))
        whole = (await respond(client, tools=[TOOL])).json()
    for event in events:
        assert adapter.validate_python(event).type == event["type"]
    assert types.Response.model_validate(whole).output_text == "See."


async def test_calls_and_results_go_on():
    seen = []

    def answer(prompt):
        seen.append(prompt)
        return CALL if len(seen) == 1 else "It is snow."

    engine = fake_engine(answer)
    async with app_client(engine) as client:
        first = (await respond(client, tools=[TOOL])).json()
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "snow"}
        second = (
            await respond(client, [result], previous_response_id=first["id"], tools=[TOOL])
        ).json()
        # The same conversation, sent whole.
        message = {"role": "user", "content": "Hi"}
        third = (await respond(client, [message, call, result], tools=[TOOL], store=False)).json()
    assert second["output"][0]["content"][0]["text"] == "It is snow."
    assert second["usage"]["input_tokens"] == third["usage"]["input_tokens"]


async def test_messages_of_items():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    found = items_to_messages(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            call,
            {**call, "call_id": "d"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"role": "assistant", "content": "b", "type": "message"},
        ]
    )
    function = {"name": "f", "arguments": "{}"}
    assert found == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": function},
                {"id": "d", "type": "function", "function": function},
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "assistant", "content": "b"},
    ]


async def test_stored_response_belongs_to_its_token():
    rig = fake()
    one, other = {"authorization": "Bearer one"}, {"authorization": "Bearer other"}
    async with app_client(rig.engine(), token=["one", "other"]) as client:

        async def ask(method, path, headers, **json):
            return await client.request(method, path, headers=headers, json=json or None)

        async def continued(headers, response_id):
            body = {"input": "3", "previous_response_id": response_id, "max_output_tokens": 2}
            return await ask("POST", "/v1/responses", headers, **body)

        made = (await ask("POST", "/v1/responses", one, input="1 2", max_output_tokens=2)).json()
        path = f"/v1/responses/{made['id']}"
        assert (await ask("GET", path, one)).json() == made
        foreign = await ask("GET", path, other)
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "response_not_found")
        assert (await ask("DELETE", path, other)).status_code == 404
        refused = await continued(other, made["id"])
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        more = (await continued(one, made["id"])).json()
        prompt = [1, 2, *rig.executor.reference([1, 2], 2), 3]
        expected = [str(token) for token in rig.executor.reference(prompt, 2)]
        assert text_of(more).split() == expected
        assert (await ask("DELETE", path, one)).json()["deleted"] is True
        assert (await ask("GET", path, one)).status_code == 404
        assert (await continued(one, made["id"])).status_code == 400
        body = {"input": "1", "store": False, "max_output_tokens": 1}
        unstored = (await ask("POST", "/v1/responses", one, **body)).json()
        assert unstored["store"] is False
        assert (await ask("GET", f"/v1/responses/{unstored['id']}", one)).status_code == 404


async def test_the_store_is_bounded():
    def response(kilobytes, parts=0):
        content = [{"type": "text", "text": ""}] * parts or "x" * (1000 * kilobytes - 400)
        messages = ({"role": "user", "content": content},)
        return StoredResponse(Conversation().with_messages(messages), b"{}")

    store = ResponseStore(max_responses=3, max_bytes=100_000)
    for name in "abcd":
        store.add("me", name, response(10))
    assert [name for name in "abcd" if store.get("me", name)] == ["b", "c", "d"]
    assert store.get("you", "d") is None
    store.add("me", "e", response(85))  # b and c have to go
    assert [name for name in "bcde" if store.get("me", name)] == ["d", "e"]
    store.add("me", "f", response(101))
    assert [name for name in "def" if store.get("me", name)] == []
    store.add("me", "g", response(98))
    assert store.remove("me", "g")
    assert not store.remove("me", "g")
    store.add("me", "h", response(98))
    assert store.get("me", "h")
    # Empty parts take memory as well.
    store.add("me", "i", response(0, parts=400))
    assert [name for name in "hi" if store.get("me", name)] == []
    none = ResponseStore(max_responses=0, max_bytes=100)
    none.add("me", "a", response(1))
    assert none.get("me", "a") is None


async def test_stores_share_a_bound():
    """The oldest responses of all stores are dropped first; a cleared store frees its bytes."""
    response = StoredResponse(Conversation((), 1000), b"")
    shared = SharedResponseBytes(5 * (1000 + sys.getsizeof(b"")))
    one, other = (ResponseStore(3, 10_000, shared) for _ in range(2))

    def left():
        return [name for name in "abcdefgh" if one.get("", name) or other.get("", name)]

    for store, name in ((one, "a"), (other, "b"), (one, "c"), (other, "d"), (other, "e")):
        store.add("", name, response)
    assert left() == ["a", "b", "c", "d", "e"]
    one.add("", "f", response)
    assert left() == ["b", "c", "d", "e", "f"]
    other.add("", "g", response)  # The store itself has room for three.
    assert left() == ["c", "d", "e", "f", "g"]
    other.clear()
    one.add("", "h", response)
    assert left() == ["c", "f", "h"]
    assert shared._num_bytes_left == 2 * (1000 + sys.getsizeof(b""))
    one.clear()
    assert (len(shared._stores), shared._num_bytes_left // 5) == (0, 1000 + sys.getsizeof(b""))


async def test_errors_whole_and_in_events():
    engine = fake_engine(["Hel", RequestError("no more")], max_model_len=5000)
    async with app_client(engine) as client:
        whole = await respond(client)
        failed = events_of(await respond(client, stream=True))[-1]
        for stream in (False, True):
            long = await respond(client, "\u00e9" * 4200, stream=stream)
            error = long.json()["error"]
            assert (long.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == "input"
            unknown = await respond(client, model="gpt", stream=stream)
            assert unknown.status_code == 404
    assert (whole.status_code, whole.json()["error"]["code"]) == (422, "request_failed")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert failed["response"]["output"][0]["status"] == "incomplete"


async def test_structured_output_is_asked_for_as_in_chat():
    seen = []

    class Watch:
        def on_submit(self, request, submission):
            seen.append(request.sampling.structured_outputs)

        def on_finish(self, request, usage, error): ...

    engine = fake_engine("{}")
    engine.add_observer(Watch())
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "nothing", "schema": schema, "strict": True}
    async with app_client(engine) as client:
        answer = await respond(client, text={"format": form})
        await client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "Hi"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "nothing", "schema": schema},
                },
            },
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == {"format": form, "verbosity": "medium"}
    assert seen[0] == seen[1]
    assert json.loads(seen[0].text) == schema
