"""serve() on the fake executor: the WebSocket protocol, its limits, and who may connect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from asyncllm import EngineClosedError, EngineDeadError, InvalidRequestError
from asyncllm.serving import create_app
from asyncllm.serving.frame_pacer import FramePacer
from asyncllm.serving.response_session import ResponseSession
from asyncllm.serving.stats_session import StatsSnapshots
from asyncllm.serving.websocket import serve
from tests.fakes import connections_of, fake
from tests.idle import idle, until
from tests.missing_package import import_error
from tests.websocket_clients import ENDS, Client, client_of, served, text_of
from tests.websocket_frames import CLOSE, FIN, TEXT, UPGRADE, frame, heard


async def closed_with(client):
    """The close code and reason that the server sends next; messages before them are skipped."""
    with pytest.raises(ConnectionClosed) as closed:
        async with asyncio.timeout(10):
            while True:
                await client.connection.recv()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


# --- a response -------------------------------------------------------------------------


async def test_a_response_is_told_event_by_event():
    async with served(fake().engine()) as server, client_of(server) as client:
        await client.create("1 2 3", max_output_tokens=5, metadata={"a": "b"}, user="u")
        events = await client.until(*ENDS)
        plain = await server.engine.generate("1 2 3", max_tokens=5)
    kinds = [event["type"] for event in events]
    assert [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == plain.text
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["id"], first["status"]) == (last["id"], "in_progress")
    assert (last["status"], last["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert text_of(last) == plain.text
    assert last["metadata"] == {"a": "b"}
    assert (last["user"], last["max_output_tokens"]) == ("u", 5)
    assert last["usage"]["input_tokens"] == 3
    assert last["usage"]["output_tokens"] == 5
    assert last["timings"]["ttft"] > 0


async def test_events_are_those_of_the_openai_client():
    types = pytest.importorskip("openai.types.responses")
    from pydantic import TypeAdapter

    adapter = TypeAdapter(types.ResponsesServerEvent)
    async with (
        served(
            fake(eos_token_ids=tuple(fake().executor.reference([1, 2, 3], 4)[3:])).engine()
        ) as server,
        client_of(server) as client,
    ):
        await client.create(include=["message.output_text.logprobs"], temperature=0.5)
        events = await client.until(*ENDS)
        await client.send(type="response.create")
        events += await client.until("error")
    assert events[-2]["type"] == "response.completed"
    for event in events:
        parsed = adapter.validate_python(event)
        assert parsed.type == event["type"]


async def test_a_response_can_be_continued():
    rig = fake()
    async with served(rig.engine()) as server, client_of(server) as client:
        first = await client.ask("1 2", instructions="9", max_output_tokens=3)
        second = await client.ask("4", previous_response_id=first["id"], max_output_tokens=3)
        again = await client.ask("5", previous_response_id=first["id"], max_output_tokens=3)
        third = await client.ask("6", previous_response_id=second["id"], max_output_tokens=3)
    # Instructions are those of one response and are not carried over.
    history = f"1 2 {text_of(first)} 4 {text_of(second)} 6"
    assert first["usage"]["input_tokens"] == 3
    assert second["usage"]["input_tokens"] == again["usage"]["input_tokens"] == 2 + 3 + 1
    assert third["usage"]["input_tokens"] == len(history.split())
    prompt = [int(word) for word in history.split()]
    assert text_of(third).split() == [str(t) for t in rig.executor.reference(prompt, 3)]
    assert third["previous_response_id"] == second["id"]
    # What they share comes from the cache.
    assert third["usage"]["input_tokens_details"]["cached_tokens"] >= 4


async def test_last_32_unstored_responses_continue_on_their_connection():
    fields = {"max_output_tokens": 1, "store": False}
    async with served(fake().engine()) as server:
        async with client_of(server) as client:
            ids = [(await client.ask("1", **fields))["id"] for _ in range(33)]
            lost = await client.ask("2", previous_response_id=ids[0])
            kept = await client.ask("2", previous_response_id=ids[1], **fields)
            shared = server._server.config.app._server_context.unstored_response_bytes
            assert len(shared._stores) == 32
        async with client_of(server) as other:
            foreign = await other.ask("2", previous_response_id=ids[-1])
            await until(lambda: not shared._stores)
    assert lost["error"]["code"] == foreign["error"]["code"] == "previous_response_not_found"
    assert (lost["status"], lost["error"]["param"]) == (400, "previous_response_id")
    assert (kept["status"], kept["store"]) == ("incomplete", False)


async def test_stored_response_continues_after_reconnect_for_its_owner():
    rig = fake()
    async with served(rig.engine()) as server:
        async with client_of(server) as client:
            first = await client.ask("1 2", max_output_tokens=2)
        async with client_of(server) as other:
            more = await other.ask("3", previous_response_id=first["id"], max_output_tokens=2)
    prompt = [1, 2, *rig.executor.reference([1, 2], 2), 3]
    assert first["store"] is True
    assert text_of(more).split() == [str(token) for token in rig.executor.reference(prompt, 2)]


async def test_messages_and_their_parts():
    rig = fake()
    items = [
        {"role": "developer", "content": "1"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2 3"}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "4", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "5"},
    ]
    async with served(rig.engine()) as server, client_of(server) as client:
        response = await client.ask(items, max_output_tokens=2)
    assert text_of(response).split() == [str(t) for t in rig.executor.reference([1, 2, 3, 4, 5], 2)]


async def test_one_response_at_a_time():
    async with served(fake(step_time=0.002).engine()) as server, client_of(server) as client:
        await client.create(max_output_tokens=40)
        await client.until("response.created")
        await client.create("7")
        events = await client.until("response.incomplete")
        refused = [event for event in events if event["type"] == "error"]
        after = await client.ask("8", max_output_tokens=2)
    assert [(e["status"], e["error"]["code"]) for e in refused] == [
        (409, "response_already_in_flight")
    ]
    assert len(text_of(events[-1]["response"]).split()) == 40
    assert after["usage"]["output_tokens"] == 2


async def test_a_response_that_begins_beside_the_last_events_of_another_is_one_too(monkeypatch):
    go_on, send_all = asyncio.Event(), ResponseSession._send_all

    async def hold_first_end(session, events):
        events = list(events)
        if any(kind == "response.incomplete" for kind, _ in events) and not go_on.is_set():
            await go_on.wait()
        await send_all(session, events)

    monkeypatch.setattr(ResponseSession, "_send_all", hold_first_end)
    async with served(fake(step_time=0.005).engine()) as server, client_of(server) as client:
        await client.create("1", max_output_tokens=2)
        await client.until("response.output_text.delta")
        await until(
            lambda: all(one.current_turn is None for one in server._app._server_context.sessions)
        )
        await client.create("2", max_output_tokens=100)
        await client.until("response.created")
        go_on.set()
        await client.until("response.incomplete")
        await client.create("3")
        refused = (await client.until("error"))[-1]
        await client.send(type="response.cancel")
        last = (await client.until(*ENDS))[-1]
    assert refused["error"]["code"] == "response_already_in_flight"
    assert last["response"]["status"] == "cancelled"


async def test_a_response_can_be_cancelled_and_continued():
    async with served(fake(step_time=0.005).engine()) as server, client_of(server) as client:
        await client.send(type="response.cancel")
        nothing = (await client.until("error"))[-1]
        await client.create(max_output_tokens=200)
        await client.until("response.output_text.delta")
        await client.send(type="response.cancel")
        last = (await client.until(*ENDS))[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
        stats = await idle(server.engine)
        more = await client.ask("4", previous_response_id=response["id"], max_output_tokens=1)
    assert nothing["error"]["code"] == "response_not_in_flight"
    assert (response["status"], response["incomplete_details"]) == ("cancelled", None)
    assert 0 < response["usage"]["output_tokens"] < 200
    assert stats.num_aborted == 1
    assert more["usage"]["input_tokens"] == 3 + len(text_of(response).split()) + 1


async def test_warming_up_generates_nothing():
    rig = fake()
    words = " ".join(map(str, range(20)))
    async with served(rig.engine()) as server, client_of(server) as client:
        await client.create(words, generate=False)
        events = await client.until(*ENDS)
        response = events[-1]["response"]
        after = await client.ask("7", previous_response_id=response["id"], max_output_tokens=2)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert response["output"] == []
    assert after["usage"]["input_tokens_details"]["cached_tokens"] == 20
    assert text_of(after).split() == [str(t) for t in rig.executor.reference([*range(20), 7], 2)]


async def test_many_responses_share_a_number_of_frames():
    rig = fake(step_time=0.001)
    async with served(rig.engine(), max_frame_rate=10) as server:
        async with client_of(server) as client:
            await client.create(max_output_tokens=60)
            events = await client.until(*ENDS)
            assert server._app._server_context.frame_pacer.pause_seconds == 0
    texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert len(texts) < 60
    expected = rig.executor.reference([1, 2, 3], 60)
    assert "".join(texts).split() == [str(token) for token in expected]


async def test_connection_closed_during_its_turn_leaves_nothing():
    class Connection:
        async def __aiter__(self):
            yield json.dumps({"type": "response.create", "input": "1"})

        def release_message(self):
            pass

        async def send(self, message):
            await asyncio.sleep(10)

    async with fake(step_time=0.01).engine() as engine:
        serving = create_app(engine)._server_context
        session = ResponseSession(Connection(), serving, "")
        await session.run()
        assert (session.current_turn, serving.frame_pacer._num_streams) == (None, 0)
        assert (await idle(engine)).num_aborted == 1


async def test_frames_are_shared_out():
    pacer = FramePacer(1000)
    pauses = []
    for _ in range(200):
        pacer.begin_response()
        pauses.append(pacer.pause_seconds)
    assert pauses[0] == pauses[6] == 0
    assert pauses[7] == pytest.approx(0.008)
    assert pauses[63] == pytest.approx(0.064)
    assert pauses[-1] == 0.1
    for _ in range(200):
        pacer.end_response()
    assert pacer.pause_seconds == 0


# --- what goes wrong --------------------------------------------------------------------


def said(**fields):
    return [{"role": "user", "content": "1", **fields}]


REFUSED = {
    "invalid_value": {
        "input": [None, [], 5, "words that are no numbers"],
        "input[0]": [["x"]],
        "input[0].role": [said(role="king")],
        "input[0].content": [said(content=3)],
        "input[0].content[0].type": [said(content=[{"type": "input_image"}])],
        "input[0].content[0].text": [said(content=[{"type": "text", "text": 1}])],
        "input[0].call_id": [[{"type": "function_call_output", "output": "1"}]],
        "input[0].phase": [said(phase="commentary")],
        "model": [5],
        "tools[0].name": [[{"type": "function"}]],
        "tools[0].type": [[{"type": "web_search"}]],
        "tool_choice": ["required"],
        "store": [1],
        "stream": [1],
        "text.format.type": [{"format": {"type": "xml"}}],
        "text.verbosity": [{"verbosity": "none"}],
        "include": ["x"],
        "top_logprobs": [True],
        "generate": ["no"],
        "temperature": ["hot", -1],
        "max_output_tokens": [0],
        "top_p": [2],
        "seed": [2**70],
        "stop[0]": [[""]],
        "priority": [3],
        "cache_salt": [3],
        "metadata": [[], {str(i): "" for i in range(17)}],
        "metadata.a": [{"a": 1}],
        "instructions": [["x"]],
        "user": [5],
        "previous_response_id": [5],
    },
    "unsupported_parameter": {
        "input[0].type": [[{"type": "item_reference", "id": "1"}]],
        "stream": [False],
        "background": [True],
        "reasoning.effort": [{"effort": "low"}],
        "reasoning.summary": [{"summary": "detailed"}],
        "include": [["thoughts"]],
        "truncation": ["auto"],
        "text.verbosity": [{"verbosity": "low"}],
    },
    "model_not_found": {"model": ["gpt"]},
    "unknown_parameter": {"colour": ["blue"]},
}


async def test_unsupported_operations_are_refused_by_name():
    rows = [
        ({re.split(r"[.\[]", param)[0]: value}, code, param)
        for code, params in REFUSED.items()
        for param, values in params.items()
        for value in values
    ]
    async with served(fake().engine()) as server, client_of(server) as client:
        for fields, code, param in (*rows, ({"top_logprobs": 21}, "invalid_value", "logprobs")):
            await client.send(**{"type": "response.create", "input": "1", **fields})
            error = (await client.until(*ENDS))[-1]
            assert error["type"] == "error", (fields, error)
            assert (error["error"]["code"], error["error"]["param"]) == (code, param)
            assert error["error"]["type"] == "invalid_request_error"
            assert (await client.ask(max_output_tokens=1))["status"] == "incomplete"


async def test_neutral_fields_are_accepted():
    neutral = {
        "background": False,
        "conversation": None,
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "model": "asyncllm/demo",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none", "summary": "auto"},
        "service_tier": "auto",
        "store": False,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
    }
    async with served(fake().engine()) as server, client_of(server) as client:
        response = await client.ask(max_output_tokens=1, **neutral)
    assert response.get("error") is None, response
    assert response["parallel_tool_calls"] is False
    assert response["tool_choice"] == "none"


async def test_too_many_errors_in_a_row_close_the_connection():
    async with served(fake().engine()) as server, client_of(server) as client:
        for _ in range(63):
            await client.connection.send("{}")
            await client.recv()
        await client.ask(max_output_tokens=1)
        for _ in range(64):
            await client.connection.send("{}")
        assert await closed_with(client) == (1008, "64 invalid messages in a row")


async def test_a_request_beyond_the_context_is_refused():
    async with served(fake(max_model_len=32).engine()) as server, client_of(server) as client:
        error = await client.ask(" ".join(["1"] * 40))
        # Proven by the tokenizer only, when the response is there already.
        long, odd = [await client.ask(text * 5000) for text in ("1 ", "x ")]
        fine = await client.ask(max_output_tokens=1)
    assert error["error"]["code"] == "context_length_exceeded"
    assert (long["status"], long["error"]["code"]) == ("failed", "context_length_exceeded")
    assert (odd["status"], odd["error"]["code"]) == ("failed", "invalid_prompt")
    assert fine["status"] == "incomplete"


async def test_a_full_queue_says_when_to_come_back():
    async with served(
        fake(max_num_seqs=1, step_time=0.005).engine(max_queued_requests=1)
    ) as server:
        async with client_of(server) as one, client_of(server) as two, client_of(server) as three:
            await one.create(max_output_tokens=200)
            await one.until("response.output_text.delta")
            await two.create(max_output_tokens=200)
            await two.until("response.in_progress")
            error = await three.ask(max_output_tokens=1)
    assert (error["status"], error["error"]["code"]) == (429, "server_overloaded")
    assert int(error["error"]["headers"]["Retry-After"]) >= 1


async def test_too_slow_response_fails_alone():
    async with (
        served(fake(step_time=0.01).engine(), timeout=0.1) as server,
        client_of(server) as client,
    ):
        await client.create(max_output_tokens=200)
        failed = (await client.until(*ENDS))[-1]
        after = await client.ask(max_output_tokens=1)
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert "0.1" in failed["response"]["error"]["message"]
    assert after["status"] == "incomplete"


async def test_a_dead_engine_closes_its_connections():
    rig = fake()
    rig.executor.faults[2] = RuntimeError("device")
    async with served(rig.engine()) as server, client_of(server) as client:
        await client.create(max_output_tokens=50)
        events = await client.until(*ENDS)
        assert events[-1]["type"] == "response.failed"
        assert await closed_with(client) == (1011, "the engine failed")
        async with client_of(server) as late:
            assert (await late.ask())["error"]["code"] == "server_error"
            assert await closed_with(late) == (1011, "the engine failed")


async def test_a_closed_engine_closes_its_connections():
    async with served(fake(step_time=0.005).engine()) as server, client_of(server) as client:
        await client.create(max_output_tokens=200)
        await client.until("response.output_text.delta")
        await server.engine.aclose()
        last = (await client.until(*ENDS))[-1]
        assert last["response"]["status"] == "cancelled"
        error = await client.ask()
        assert (error["status"], error["error"]["code"]) == (503, "server_shutting_down")
        assert await closed_with(client) == (1001, "the engine is closed")


# --- how connections end ----------------------------------------------------------------


async def test_a_close_in_mid_answer_aborts():
    async with served(fake(step_time=0.002).engine()) as server:
        for count, abruptly in ((1, False), (2, True)):
            async with client_of(server) as client:
                await client.create(max_output_tokens=250)
                await client.until("response.output_text.delta")
                if abruptly:
                    client.connection.transport.abort()
            stats = await idle(server.engine)
            assert (stats.num_aborted, stats.num_finished) == (count, 0)
        await until(lambda: not server.num_connections)


async def test_non_reading_client_delays_no_other():
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with served(
        fake(num_blocks=5000, max_model_len=20_000).engine(), ping_interval=None
    ) as server:
        await asyncio.to_thread(sock.connect, ("127.0.0.1", server.port))
        sock.setblocking(False)
        async with client_of(server, sock=sock) as slow, client_of(server) as other:
            slow.connection.transport.pause_reading()
            transports = [c.transport for c in connections_of(server)]
            for transport in transports:
                transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
                )
            await slow.create(max_output_tokens=19_000)

            def unsent():
                return max(transport.get_write_buffer_size() for transport in transports)

            # From here on the operating system takes no more, and sending waits.
            while not unsent():
                assert (await other.ask(max_output_tokens=5))["usage"]["output_tokens"] == 5
            tokens = server.engine.stats().generation_tokens
            while server.engine.stats().generation_tokens < tokens + 500:
                assert (await other.ask(max_output_tokens=5))["usage"]["output_tokens"] == 5
            assert unsent() < 100_000
            slow.connection.transport.abort()
        await idle(server.engine)


async def test_pings_detect_dead_clients():
    async with served(fake().engine(), ping_interval=0.05, ping_timeout=0.05) as server:
        async with client_of(server) as client:
            client.connection.transport.pause_reading()
            await until(lambda: not server.num_connections)
            client.connection.transport.abort()


async def test_too_long_message_closes_with_1009():
    async with served(fake().engine(), max_message_size=1000) as server:
        async with client_of(server) as client, client_of(server) as other:
            await client.create("1" * 2000)
            assert (await closed_with(client))[0] == 1009
            assert (await other.ask(max_output_tokens=1))["status"] == "incomplete"


async def test_too_many_connections_are_answered_with_503():
    async with served(fake().engine(), max_connections=2) as server:
        async with client_of(server) as one, client_of(server, "/v1/stats"):
            assert await status_of(server) == 503
            assert (await one.ask(max_output_tokens=1))["status"] == "incomplete"
        await until(lambda: not server.num_connections)
        async with client_of(server) as four:
            assert (await four.ask(max_output_tokens=1))["status"] == "incomplete"


async def test_a_failure_of_ours_closes_with_1011(caplog):
    async with served(fake().engine()) as server, client_of(server) as client:
        (session,) = server._app._server_context.sessions
        session.server_context = None
        await client.create(max_output_tokens=1)
        assert await closed_with(client) == (1011, "internal error")
        assert "a WebSocket at /v1/responses failed" in caplog.text
        async with client_of(server) as other:
            assert (await other.ask(max_output_tokens=1))["status"] == "incomplete"


# --- who may connect --------------------------------------------------------------------


async def status_of(server, path="/v1/responses", **options):
    """200 for a connection, else the HTTP status of the refusal."""
    try:
        async with client_of(server, path, **options):
            return 200
    except InvalidStatus as error:
        return error.response.status_code


async def test_the_token_is_asked_for():
    async with served(fake().engine(), token="geheim-ü") as server:

        async def status(*values, path="/v1/responses"):
            headers = [("Authorization", value) for value in values]
            return await status_of(server, path, additional_headers=headers)

        for wrong in ((), ("Bearer wrong",), ("Basic x",), ("Bearer ",)):
            assert await status(*wrong) == 401
        assert await status(path="/v1/stats") == 401
        for encoded, expected in (("Z2VoZWltLcO8", 200), ("d3Jvbmc", 401), ("%%", 401)):
            protocols = ["asyncllm", f"bearer.{encoded}"]
            assert await status_of(server, subprotocols=protocols) == expected
    async with served(fake().engine(), token="secret") as server:
        for path in ("/v1/responses", "/v1/stats"):
            assert await status("Bearer secret", path=path) == 200
        assert await status("Bearer secret", "Bearer x") == 400
        assert await status("Basic secret") == 401


@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [
        (None, None, 200),
        (None, "http://127.0.0.1:{port}", 200),
        (None, "http://127.0.0.1:1", 403),
        (None, "https://evil.example", 403),
        (None, "null", 403),
        (["https://app.example"], "https://app.example", 200),
        (["https://app.example"], "https://app.example.evil", 403),
        (["https://app.example"], "http://127.0.0.1:{port}", 403),
        (["https://app.example"], None, 200),
        (["*"], "https://evil.example", 200),
    ],
)
async def test_pages_of_other_origins_are_kept_out(origins, origin, status, caplog):
    async with served(fake().engine(), origins=origins) as server:
        value = None if origin is None else origin.format(port=server.port)
        assert await status_of(server, origin=value) == status
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_name_that_resolves_to_here_is_not_here():
    async with served(fake().engine(), origins=["*"]) as server:
        for host, status in (("evil.example", 403), ("localhost", 200), ("[::1]", 200)):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                f"GET /v1/responses HTTP/1.1\r\nHost: {host}:{server.port}\r\n"
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
            )
            line = await reader.readline()
            assert line.split()[1] == (b"101" if status == 200 else str(status).encode())
            writer.close()


async def test_public_bind_without_token_is_warned(caplog):
    async with fake().engine() as engine:
        async with serve(engine, "0.0.0.0", 0):
            pass
        assert "WITHOUT A TOKEN" in caplog.text
        caplog.clear()
        async with serve(engine, "0.0.0.0", 0, token="x"), serve(engine, "localhost", 0):
            pass
        assert caplog.text == ""


async def test_pages_and_paths():
    pages = {"/": ("text/html", b"<p>hello")}
    async with (
        served(fake().engine(), page=pages.get, model_name="tiny") as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        home = await http.get("/")
        models = (await http.get("/v1/models")).json()["data"]
        lost = [await http.get(path) for path in ("/nothing", "/v1/stats", "/v1/responses")]
        assert await status_of(server, "/v1/other") == 404
        assert server.url == f"http://127.0.0.1:{server.port}"
    assert (home.status_code, home.text) == (200, "<p>hello")
    assert home.headers["content-type"] == "text/html; charset=utf-8"
    assert (home.headers["cache-control"], server.model_name) == ("no-store", "tiny")
    assert [model["id"] for model in models] == ["tiny"]
    assert [answer.status_code for answer in lost] == [404, 404, 405]


async def test_tls(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2"
    name = "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -addext "
    name += "keyUsage=critical,digitalSignature,keyCertSign"
    command = ["openssl", *make.split(), *name.split(), "-keyout", key, "-out", cert]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))
    async with served(fake().engine(), ssl=context) as server:
        url = f"wss://127.0.0.1:{server.port}/v1/responses"
        async with connect(url, ssl=trusting) as connection:
            answer = await Client(connection).ask(max_output_tokens=1)
        async with httpx.AsyncClient(base_url=server.url, verify=trusting) as http:
            assert (await http.get("/health")).status_code == 200
        assert server.url.startswith("https://")
    assert answer["status"] == "incomplete"


# --- statistics -------------------------------------------------------------------------


async def test_statistics_are_sent_as_they_change_and_read_only():
    async with served(fake(step_time=0.005).engine(), stats_interval=0.005) as server:
        async with client_of(server, "/v1/stats") as stats, client_of(server) as client:
            first = await stats.recv()
            assert (first["type"], first["responses"]) == ("asyncllm.stats", [])
            assert first["stats"]["num_blocks"] == 64
            await client.create(max_output_tokens=30)
            created = (await client.until("response.created"))[-1]
            seen = await stats.recv()
            while not seen["responses"] or not seen["responses"][0]["tokens"]:
                seen = await stats.recv()
            assert seen["responses"][0]["id"] == created["response"]["id"]
            assert seen["stats"]["num_running"] == 1
            assert seen["connections"] == 2
            await client.until(*ENDS)
            while seen["responses"]:
                seen = await stats.recv()
            await stats.send(type="hello")
            assert await closed_with(stats) == (1008, "this connection is read-only")


async def test_connections_share_a_snapshot_and_send_fewer_beside_many(monkeypatch):
    made = []
    make = StatsSnapshots._make_snapshot
    monkeypatch.setattr(
        StatsSnapshots, "_make_snapshot", lambda self: (made.append(self), make(self))[1]
    )
    async with served(fake().engine(), stats_interval=1000.0) as server:
        context = server._app._server_context
        snapshots = StatsSnapshots(context)
        assert snapshots.pause_seconds == 1000.0
        texts = [snapshots.latest() for _ in range(50)]
        assert len(made) == 1
        assert json.loads(texts[0])["type"] == "asyncllm.stats"
        assert len(set(texts)) == 1
        context.stats_interval = 0.1
        monkeypatch.setattr(context, "sessions", set(range(1000)))
        assert snapshots.pause_seconds == 2.0


async def test_statistics_end_with_the_engine():
    async with served(fake().engine(), stats_interval=0.005) as server:
        async with client_of(server, "/v1/stats") as stats:
            await stats.recv()
            await server.engine.aclose()
            assert (await closed_with(stats))[0] == 1001


# --- arguments --------------------------------------------------------------------------


async def test_arguments_are_checked():
    rig = fake()
    engine = rig.engine()
    for name, value in (
        ("max_connections", 0),
        ("max_message_size", 0),
        ("token", ""),
        ("origins", "https://app.example"),
        ("stats_interval", 0),
        ("max_frame_rate", 0),
        ("close_timeout", 0),
        ("page", "page.html"),
        ("ssl", True),
        ("host", ""),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            serve(engine, **{name: value})
    with pytest.raises(EngineClosedError):
        await serve(engine, port=0)
    async with rig.engine() as running:
        server = await serve(running, port=0)
        with pytest.raises(OSError):
            await serve(running, port=server.port)
        await server.aclose()


async def test_serve_forever_raises_engine_death():
    rig = fake()
    lost = rig.executor.faults[2] = RuntimeError("device lost")
    async with rig.engine() as engine, serve(engine, port=0) as server:
        tasks = asyncio.all_tasks()
        forever = asyncio.ensure_future(server.serve_forever())
        with pytest.raises(EngineDeadError):
            await engine.generate([1], max_tokens=9)
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.wait_for(forever, 10)
        assert caught.value.__cause__ is lost
        await asyncio.sleep(0)
        assert asyncio.all_tasks() <= tasks


async def test_serve_forever_ends_with_the_engine():
    async with fake().engine() as engine, serve(engine, port=0) as server:
        forever = asyncio.ensure_future(server.serve_forever())
        cancelled = asyncio.ensure_future(server.serve_forever())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await engine.aclose()
        await asyncio.wait_for(forever, 10)


async def test_a_missing_extra_is_named():
    for package in ("websockets", "uvicorn", "starlette"):
        told = await asyncio.to_thread(import_error, "asyncllm.serving.websocket", without=package)
        assert "'asyncllm[server]'" in told


async def test_nothing_of_ours_is_left_behind():
    async with served(fake().engine()) as server, client_of(server) as client:
        await client.ask(max_output_tokens=2)
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)
    assert not [t for t in threading.enumerate() if t.name.startswith("asyncllm")]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/stats"])
async def test_close_completes_behind_unread_messages(path):
    async with (
        served(fake().engine(), close_timeout=3600) as server,
        connect(f"ws://127.0.0.1:{server.port}{path}") as connection,
    ):
        for _ in range(300):
            await connection.send("{}")
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionClosed):
                async for _ in connection:
                    pass
        assert connection.close_code == 1008


@pytest.mark.parametrize("closer", ["session", "server"])
async def test_unanswered_close_waits_the_configured_time(closer):
    async with served(fake().engine(), close_timeout=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(UPGRADE.replace(b"responses", b"stats").replace(b": x", b": 127.0.0.1"))
        async with asyncio.timeout(5):
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            if closer == "session":
                writer.write(frame(FIN | TEXT, b"{}"))
            else:
                await server.aclose()
            *_, (opcode, payload) = heard(await reader.read())
        writer.transport.abort()
    code = 1008 if closer == "session" else 1001
    assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, code)
