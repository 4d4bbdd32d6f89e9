"""Hostile clients of the application."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import functools
import gc
import hashlib
import json
import logging
import resource
import socket
import threading
import time
import tracemalloc
import weakref
from types import SimpleNamespace

import h11
import httpx
import pytest

from asyncllm import AsyncLLMEngine
from asyncllm.serving import (
    choices,
    completion_request,
    create_app,
    http_protocol,
    response_turn,
)
from asyncllm.serving import serving as serving_module
from asyncllm.serving.bounded_protocol import MAX_BYTES_PER_PARSE_TURN, BoundedProtocol
from asyncllm.serving.byte_budget import ByteBudget
from asyncllm.serving.chat_writer import ChatWriter
from asyncllm.serving.completion_writer import CompletionWriter
from asyncllm.serving.connections import RESERVED_FILE_DESCRIPTORS
from asyncllm.serving.event_sender import EventSender
from asyncllm.serving.exchange import Exchange
from asyncllm.serving.http_parser import MAX_HEADER_COMMAS, HttpParser
from asyncllm.serving.http_protocol import MAX_EARLY_BYTES
from asyncllm.serving.parse_queue import (
    MAX_EVENTS_PER_PARSE_TURN,
    MAX_REQUEST_STARTS_PER_ITERATION,
    ParseQueue,
    RequestStartQueue,
)
from asyncllm.serving.response_events import ResponseEvents
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.serving.response_session import ResponseSession
from asyncllm.serving.response_store import ResponseStore
from asyncllm.serving.response_turn import ResponseTurn
from asyncllm.serving.serving import COPIES_OF_LOGPROBS, MIN_LARGE_JSON_BYTES
from asyncllm.serving.sockets import UTF8_TEXT_EXTENSION, WebSocketConnection
from asyncllm.serving.websocket_protocol import BASE_MESSAGE_FRAME_LIMIT, WebSocketProtocol
from asyncllm.testing import fake_engine
from tests.app_clients import (
    BODY,
    CHAT,
    HEAD,
    RawRequest,
    app_client,
    connected,
    open_to,
    read_to_end,
    served_app,
    url_of,
    user,
)
from tests.fakes import connections_of
from tests.idle import held_up, until
from tests.websocket_frames import BINARY, CLOSE, FIN, PING, PONG, TEXT, UPGRADE, frame, heard


@contextlib.asynccontextmanager
async def attacked(caplog, **options):
    """A server that no connection is left to in the end, whose event loop has caught no exception,
    and which answers others."""
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    with caplog.at_level(logging.ERROR, "asyncllm"):
        async with served_app(fake_engine("Hello"), **options) as server:
            yield server
            await all_left(server)
            headers = {"authorization": f"Bearer {options.get('token')}"}
            async with httpx.AsyncClient(base_url=url_of(server), headers=headers) as client:
                answer = await client.post(CHAT, json=BODY)
                assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert problems == []
    assert [record.message for record in caplog.records if record.name[:8] == "asyncllm"] == []


async def all_left(server):
    """Returns when no connection is left."""
    async with asyncio.timeout(10):
        while connections_of(server):
            await asyncio.sleep(0.005)


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
REQUESTS = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n", b"400"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
    (b"GET " + b"/x" * 400_000, b"400"),
    (GET + b"X: y\r\n" * 100_000, b"400"),
    (b"GET /%00%ff%c0%af%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
    (b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
    (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
    (b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
    (b"GET /v1/models HTTP/1.0\r\n\r\n", b"400"),
    (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"400"),
    (GET.replace(b"health", b"v1/models") + b"Origin: a\r\nOrigin: b\r\n\r\n", b"400"),
    (GET.replace(b"health", b"v1/models") + b"Authorization: \xff\xfe\r\n\r\n", b"200"),
    (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}", b"400"),
    (POST + b"Content-Length: -5\r\n\r\n{}", b"400"),
    (POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}", b"400"),
    (POST + b"Content-Length: 9999999999999\r\n\r\n{}", b"413"),
    (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"400"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffffff\r\n", b"400"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n", b"400"),
    (CHUNKED + b"0;" + b"x" * 200_000, b"400"),
    (CHUNKED + b"0\r\n" + b"x: y\r\n" * 20_000, b"400"),
    (CHUNKED + b"0\r\n" + b"x:\n" * 2_000 + b"\r\n", b"400"),
    (CHUNKED + b"3\r\n{  \r\n000;a=b\n" + b"x:\n" * 130 + b"\r\n", b"400"),
    (CHUNKED.replace(b"Host", b"Content-Length: 5\r\nHost") + b"0\r\n\r\n", b"400"),
    (GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    (GET + b"X: y\r\n" * 200 + b"\r\n", b"400"),
    (GET + b"X: y\r\n" * 100 + b"\r\n", b"200"),
    (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", b"415"),
    (CHUNKED.replace(b"Host", b"Content-Encoding: br\r\nHost") + b"0\r\n\r\n", b"415"),
    (UPGRADE.replace(b"Upgrade: w", b"Content-Length: 5\r\nUpgrade: w"), b"400"),
    (UPGRADE.replace(b"Upgrade: w", b"Transfer-Encoding: chunked\r\nUpgrade: w"), b"400"),
    (UPGRADE.replace(b"Upgrade: w", b"X: " + b"y" * 10_000 + b"\r\nUpgrade: w"), b"400"),
]


async def test_invalid_requests_are_refused(caplog):
    async with attacked(caplog) as server:
        for data, status in REQUESTS:
            async with connected(server, data) as (reader, _):
                line = await reader.readline()
            assert line.split(b" ")[1] == status, (data[:80], line)


async def test_a_client_that_closes_behind_a_refused_body(caplog, monkeypatch):
    """The server sees the end of the connection only when it closes its own side."""

    def write_eof(transport):
        raise OSError(errno.ENOTCONN, "not connected")

    async with attacked(caplog) as server:
        transports = asyncio.selector_events._SelectorSocketTransport
        monkeypatch.setattr(transports, "write_eof", write_eof)
        async with connected(server) as (reader, writer):
            writer.write(POST + b"Content-Length: 9000000\r\n\r\n" + b" " * 70_000)
            assert b" 413 " in await reader.readline()
        monkeypatch.undo()
        await all_left(server)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_invalid_chunk_of_a_head_request(caplog):
    """Its answer has no body."""
    head = b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    async with attacked(caplog) as server, connected(server) as (reader, writer):
        writer.write(head)
        answer = await reader.read()
        assert b" 400 " in answer.splitlines()[0]
        assert answer.endswith(b"\r\n\r\n")


async def test_an_invalid_chunk_after_the_answer(caplog):
    head = POST.replace(b"chat", b"none") + b"Transfer-Encoding: chunked\r\n\r\n"
    async with attacked(caplog) as server, connected(server, head) as (reader, writer):
        assert b" 404 " in await reader.readline()
        writer.write(b"no number\r\n")
        with contextlib.suppress(ConnectionError):
            await read_to_end(reader)


async def test_requests_of_gone_clients_are_not_submitted():
    engine = fake_engine("Hello")
    body = json.dumps({**BODY, "stream": True})
    request = f"{HEAD}{len(body)}\r\n\r\n{body}".encode()
    async with served_app(engine) as server:
        for _ in range(50):  # at once: the event loop runs none of the server meanwhile
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(request)
        async with httpx.AsyncClient(base_url=url_of(server)) as client:
            answer = await client.post(CHAT, json=BODY)
        await all_left(server)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello"
        assert engine.stats().num_requests == 1


async def test_requests_begin_a_few_at_a_time_and_in_order():
    """Those of clients that have gone take no other's turn."""
    starts, begun, sizes = RequestStartQueue(), [], []

    async def request(number):
        await starts.wait("POST", lambda: number < 6)
        begun.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(request(number))
        while len(begun) < 20:
            before = len(begun)
            await asyncio.sleep(0)
            sizes.append(len(begun) - before)
    assert begun == [*range(20)]
    assert [size for size in sizes if size] == [6 + MAX_REQUEST_STARTS_PER_ITERATION, 4, 4, 2]


async def test_reads_and_other_requests_begin_in_turn():
    """A health check waits behind other reads alone, and a flood of reads holds up no prompt."""
    starts, begun = RequestStartQueue(), []

    async def request(method, number):
        await starts.wait(method, lambda: False)
        begun.append((method, number))

    async with asyncio.TaskGroup() as tasks:
        for number in range(100):
            tasks.create_task(request("POST", number))
        for number in range(5):
            tasks.create_task(request("GET", number))
    turns = [(method, number) for number in range(5) for method in ("GET", "POST")]
    assert begun == [*turns, *(("POST", number) for number in range(5, 100))]


@pytest.mark.parametrize("sent", [b"x", b""])
async def test_a_body_that_nothing_reads_holds_no_connection(caplog, monkeypatch, sent):
    """It may be sent byte by byte, or begun and not gone on with."""
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.2)
    head = GET + b"Content-Length: 100000\r\n\r\n"
    async with attacked(caplog) as server, connected(server, head) as (reader, writer):
        assert b" 200 " in await reader.readline()
        writer.write(b"x")
        while connections_of(server):
            if not writer.is_closing():
                writer.write(sent)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("extra", [0, 1])
async def test_header_commas_are_bounded(extra):
    """h11 splits some fields at them; those of a body do not count."""
    fields = b"Connection: a" + b",a" * (MAX_HEADER_COMMAS + extra) + b"\r\n"
    body = b"," * 5000
    request = b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n"
    async with served_app(fake_engine("x")) as server:
        async with connected(server, request + fields + b"\r\n" + body) as (reader, _):
            line = await reader.readline()
    assert line.startswith(b"HTTP/1.1 400" if extra else b"HTTP/1.1 405")


@pytest.fixture
def turns(monkeypatch):
    """How many chunks HTTP connections parse in each turn."""
    found = []
    begin, parse = HttpParser.reset_event_budget, HttpParser.next_event

    def reset_event_budget(parser):
        found.append(0)
        begin(parser)

    def next_event(parser):
        event = parse(parser)
        found[-1] += isinstance(event, h11.Data)
        return event

    monkeypatch.setattr(HttpParser, "reset_event_budget", reset_event_budget)
    monkeypatch.setattr(HttpParser, "next_event", next_event)
    return found


REFUSED = [
    (f"POST {CHAT}", b"Authorization: Bearer wrong\r\n", b"401"),
    ("POST /none", b"Authorization: Bearer right\r\n", b"404"),
    (f"PUT {CHAT}", b"Authorization: Bearer right\r\n", b"405"),
    ("GET /health", b"", b"200"),
]


@pytest.mark.parametrize(("asked", "fields", "status"), REFUSED)
async def test_chunks_behind_an_answer_are_not_parsed(monkeypatch, turns, asked, fields, status):
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.2)
    head = f"{asked} HTTP/1.1\r\nHost: x\r\n".encode() + fields
    data = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1_000_000
    async with served_app(fake_engine("x"), token="right") as server:
        async with connected(server, data) as (reader, _):
            answer = await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            assert answer.split(b" ")[1] == status
            assert b"connection: close\r\n" in answer
            await all_left(server)
    # The first turn, and another where the answer had to wait for a turn of the loop.
    assert sum(turns) <= 2 * MAX_EVENTS_PER_PARSE_TURN


@pytest.mark.parametrize("num_blanks", [64, 65])
@pytest.mark.parametrize("place", ["header", "next header", "chunk line", "next chunk", "trailer"])
def test_blanks_in_a_row_are_bounded(place, num_blanks):
    """They make an expression of h11's quadratic, for a line that it refuses in the end."""
    blanks = (b" \t" * 64)[:num_blanks]
    places = {
        "header": [GET + b"a:" + blanks + b"b\r\n\r\n"],
        "next header": [GET + b"\r\n", GET + b"a:" + blanks + b"b\r\n\r\n"],
        "chunk line": [CHUNKED, b"1;" + blanks + b"\r\nx\r\n0\r\n\r\n"],
        "next chunk": [CHUNKED + b"1\r\nx\r\n", b"1;" + blanks + b"\r\nx\r\n0\r\n\r\n"],
        "trailer": [CHUNKED + b"1\r\nx\r\n", b"0\r\na:b", blanks + b"c\r\n\r\n"],
    }
    parser, events = HttpParser(1 << 15), []
    with (
        pytest.raises(h11.RemoteProtocolError, match="in a row")
        if num_blanks > 64
        else (contextlib.nullcontext())
    ):
        for part in places[place]:
            if parser.their_state is h11.DONE:
                parser.send(h11.Response(status_code=204, headers=[]))
                parser.send(h11.EndOfMessage())
                parser.start_next_cycle()
            parser.receive_data(part)
            parser.reset_event_budget()
            while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                events.append(event)
        assert isinstance(events[-1], h11.EndOfMessage)


@pytest.mark.parametrize(("num_trailers", "status"), [(120, b"200"), (130, b"400")])
@pytest.mark.parametrize("is_split", [False, True])
async def test_trailers_are_bounded_by_their_number(caplog, num_trailers, status, is_split):
    body = json.dumps(BODY).encode() + b"\n" * 300  # Lines of a body are no trailers.
    parts = [CHUNKED + b"%x\r\n" % len(body) + body + b"\r\n0\r\n", b"x: y\r\n" * 100]
    parts += [b"x: y\r\n" * (num_trailers - 100) + b"\r\n"]
    async with attacked(caplog) as server:
        first = parts[0] if is_split else b"".join(parts)
        async with connected(server, first) as (reader, writer):
            for part in parts[1:] if is_split else ():
                await asyncio.sleep(0.02)
                writer.write(part)
            assert status in await reader.readline()


async def test_a_client_that_sends_on_is_not_reset_at_once(caplog):
    """A reset could cost it the answer."""
    head = POST.replace(b"chat", b"none") + b"Content-Length: 99999\r\n\r\n"
    async with attacked(caplog) as server, connected(server, head) as (reader, writer):
        assert b" 404 " in await reader.readline()
        assert b"not_found" in await reader.read()
        for _ in range(3):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.05)
            assert not writer.transport.is_closing()


async def test_a_body_that_was_read_keeps_its_connection(caplog):
    """With an error as with an answer; nothing is parsed as a chunk that is none."""
    body = b'{"messages": 1}'
    async with attacked(caplog) as server, connected(server) as (reader, writer):
        for request, status in [
            (POST.replace(b"chat", b"none") + b"Content-Length: 15\r\n\r\n" + body, b"404"),
            (CHUNKED + b"f;x=y\r\n" + body + b"\r\n0\r\nX: y\r\n\r\n", b"400"),
            (GET + b"\r\n", b"200"),
        ]:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            assert (answer.split(b" ")[1], b"connection: close" in answer) == (status, False)


def in_chunks(data, size):
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def test_chunks_are_bounded_by_their_number(caplog, turns):
    """1024, and one for each 64 bytes; they are parsed in turns."""
    asked = json.dumps(BODY).encode()
    async with attacked(caplog) as server:
        for size, width, status in [(1000, 1, b"200"), (100_000, 64, b"200"), (1200, 1, b"400")]:
            turns.clear()
            data = CHUNKED + in_chunks(asked + b" " * (size - len(asked)), width)
            async with connected(server, data) as (reader, _):
                line = await reader.readline()
                assert line.split(b" ")[1] == status
                if status == b"400":
                    assert b"body: has 1041 chunks in 1041 bytes" in await reader.read()
                assert len(turns) >= sum(turns) / MAX_EVENTS_PER_PARSE_TURN > 10
                assert max(turns) <= MAX_EVENTS_PER_PARSE_TURN


async def test_pipelined_requests_have_turns(caplog):
    count, began = 50, time.monotonic()
    data = (GET + b"\r\n") * count
    async with attacked(caplog) as server, connected(server, data) as (reader, _):
        for _ in range(count):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
        assert time.monotonic() - began >= 0.0035 * (count - 1)


@contextlib.asynccontextmanager
async def crowd(server, count, data=b""):
    """Readers of connections that send this and no more, after an answer to it, if it is whole."""
    opened = [await open_to(server, data) for _ in range(count)]
    for reader, _ in opened if data.startswith(b"GET") else ():
        await reader.readuntil(b"}")
    yield [reader for reader, _ in opened]
    for _, writer in opened:
        writer.transport.abort()


@pytest.mark.parametrize(
    "sent", [b"", GET + b"\r\n", f"{HEAD}100\r\n\r\n".encode(), f"{HEAD}9999\r\n\r\n{{".encode()]
)
async def test_silent_connections_make_room(sent):
    """Those without a header, between requests, and without a body; the oldest first."""
    engine, body = fake_engine("x" * 3000, step_time=0.01), json.dumps({**BODY, "stream": True})
    async with served_app(engine, limits={"max_connections": 8}) as server:
        async with connected(server, f"{HEAD}{len(body)}\r\n\r\n{body}") as (stream, _):
            assert b" 200 " in await stream.readline()
            async with crowd(server, 30, sent) as readers:
                async with connected(server, GET + b"\r\n") as (reader, _):
                    assert b" 200 " in await reader.readline()
                    assert server.num_connections == 8
                    assert [await one.read() for one in readers[:24]] == [b""] * 24
                    assert not any(one.at_eof() for one in readers[24:])
                    await stream.readuntil(b"data: ")


async def test_silent_connections_are_closed_near_the_file_limit(monkeypatch):
    limit = RESERVED_FILE_DESCRIPTORS + 12
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    async with served_app(fake_engine("x")) as server:
        async with crowd(server, 30) as readers, asyncio.timeout(10):
            assert [await one.read() for one in readers[:18]] == [b""] * 18
            assert server.num_connections == 12


@contextlib.asynccontextmanager
async def deaf(server, request):
    """The server's side of a connection whose client has sent a request, and does not read."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(sock.connect, ("127.0.0.1", server.port))
        async with asyncio.timeout(10):
            await until(lambda: connections_of(server))
        (connection,) = connections_of(server)
        served = connection.transport.get_extra_info("socket")
        served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.sendall(request)
        sock.setblocking(False)
        yield sock, connection.transport


async def test_an_answer_that_is_not_read_holds_no_connection(caplog):
    """One that is whole and shorter than what a transport takes without a pause."""
    async with attacked(caplog, limits={"send_timeout": 0.2}) as server:
        request = GET.replace(b"health", b"openapi.json") + b"\r\n"
        async with deaf(server, request) as (_, transport):
            async with asyncio.timeout(10):
                while not (unread := transport.get_write_buffer_size()):
                    await asyncio.sleep(0.001)
            assert 0 < unread < 1 << 16
            await all_left(server)


async def test_a_server_that_closes_leaves_no_connection():
    async with served_app(fake_engine("x"), drain=0.1) as server:
        request = GET.replace(b"health", b"openapi.json") + b"\r\n"
        async with deaf(server, request) as (_, transport):
            await until(lambda: transport.get_write_buffer_size())
            await server.aclose()
            await all_left(server)


@contextlib.asynccontextmanager
async def upgraded(server, data=b""):
    """Reader and writer of a WebSocket that has sent ``data``."""
    async with connected(server, UPGRADE) as (reader, writer):
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        yield reader, writer


async def told(server, data, end=None):
    """What a WebSocket is sent that sends ``data``, up to its end or this one."""
    async with upgraded(server, data) as (reader, _):
        return heard(await (reader.read() if end is None else reader.readuntil(end)))


CREATE = json.dumps({"type": "response.create", "input": "Hi"}).encode()
FRAMES = [
    (frame(FIN | TEXT, b"\xff\xfe"), 1007),
    (frame(FIN | TEXT, length=2**40), 1009),
    (frame(FIN | TEXT, length=2**63), 1009),
    (frame(TEXT) + frame(0) * (2 * BASE_MESSAGE_FRAME_LIMIT), 1009),
    (frame(0, b"x"), 1002),
    (frame(TEXT, b"{") + frame(FIN | TEXT, b"}"), 1002),
    (frame(PING, b"x"), 1002),
    (frame(FIN | PING, bytes(126)), 1002),
    (frame(FIN | 3), 1002),
    (frame(FIN | 0x40 | TEXT, b"{}"), 1002),
    (bytes([FIN | TEXT, 2]) + b"{}", 1002),
    (frame(FIN | CLOSE, b"\x03"), 1002),
    (frame(FIN | CLOSE, (1000).to_bytes(2, "big")) + frame(FIN | TEXT, CREATE) * 100, 1000),
]


async def test_invalid_frames_close_the_socket(caplog):
    async with attacked(caplog) as server:
        for data, code in FRAMES:
            (opcode, payload), *more = await told(server, data)
            assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, code), (data[:20], more)
            assert more == []
        assert not caplog.records
        for kind, code in ((BINARY, "invalid_message"), (TEXT, "invalid_json")):
            answer, *_ = await told(server, frame(FIN | kind, b"\x00") * 70, end=b"}}")
            assert json.loads(answer[1])["error"]["code"] == code


async def test_a_socket_behind_an_answer_that_is_read_late(caplog):
    async with attacked(caplog, limits={"send_timeout": 0.5}) as server:
        request = GET.replace(b"health", b"openapi.json") + b"\r\n" + UPGRADE
        async with deaf(server, request) as (sock, transport), asyncio.timeout(10):
            while not isinstance(served := transport.get_protocol(), WebSocketProtocol):
                await asyncio.sleep(0.001)
            assert not served.writable.is_set()
            reader, writer = await asyncio.open_connection(sock=sock.dup())
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b"HTTP/1.1 101 ")
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.6)  # no timer of the answer ends the socket
            writer.write(frame(FIN | TEXT, CREATE))
            await reader.readuntil(b'"response.completed"')
            writer.transport.abort()


async def test_unread_pongs_do_not_accumulate(caplog):
    async with attacked(caplog) as server:
        async with deaf(server, UPGRADE) as (sock, transport):
            loop, pings = asyncio.get_running_loop(), frame(FIN | PING, bytes(125)) * (1 << 15)
            async with asyncio.timeout(20):
                assert b" 101 " in await loop.sock_recv(sock, 1000)
                sending = asyncio.ensure_future(loop.sock_sendall(sock, pings))
                # A connection that waits for its turn is not read either.
                while not transport.get_write_buffer_size() and not sending.done():
                    await asyncio.sleep(0.001)
            assert not transport.is_reading()
            assert 0 < transport.get_write_buffer_size() < 1 << 20
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending


async def test_pings_have_turns(caplog, monkeypatch):
    count, turns, begin_parse_turn = 1000, [], WebSocketProtocol._begin_parse_turn
    monkeypatch.setattr(
        WebSocketProtocol,
        "_begin_parse_turn",
        lambda self: (turns.append(self), begin_parse_turn(self)),
    )
    data = frame(FIN | PING) * count + frame(FIN | TEXT, CREATE)
    async with attacked(caplog) as server, upgraded(server, data) as (reader, _):
        assert await reader.readexactly(2 * count) == b"\x8a\0" * count
        await reader.readuntil(b'"response.completed"')
        # A slice beyond the turn's last event may hold more of them.
        assert len(turns) >= count // (64 + 256 // 6)


async def test_frames_behind_the_handshake_wait_for_its_answer(caplog):
    async with attacked(caplog, token="right") as server:
        for token, status, data, end in (
            (b"right", b" 101 ", frame(FIN | TEXT, CREATE), b'"response.completed"'),
            # An unmasked frame is an error.
            (b"wrong", b" 401 ", b"\x89\0" * 1000, b'invalid_api_key"'),
        ):
            fields = b"Authorization: Bearer " + token + b"\r\nUpgrade: w"
            data = UPGRADE.replace(b"Upgrade: w", fields) + data
            async with connected(server, data) as (reader, _):
                assert status in await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(end)


async def test_pipelined_messages_are_answered_in_turn(caplog):
    count = 40
    data = frame(FIN | TEXT, b"{}" + b" " * 100) * count
    async with attacked(caplog) as server, upgraded(server, data) as (reader, _):
        for _ in range(count):
            await reader.readuntil(b'"error"')
            await reader.readuntil(b"}}")


async def test_a_page_of_another_origin_reaches_nothing(caplog):
    """A form or a fetch without CORS needs no permission to send, and a socket neither."""
    async with attacked(caplog) as server:
        evil = "Origin: https://evil.example\r\n"
        body = json.dumps({"messages": user("Hi")})
        fields = f"{evil}Content-Type: text/plain\r\n\r\n{body}"
        upgrade = UPGRADE.replace(b"Upgrade: w", evil.encode() + b"Upgrade: w").decode()
        for request in (f"{HEAD}{len(body)}\r\n{fields}", upgrade):
            async with connected(server, request) as (reader, _):
                assert b" 403 " in await reader.readline()


LONG = json.dumps({"prompt": "a" * 5000}).encode()


async def test_large_bodies_are_read_as_others_are_tokenised(caplog, monkeypatch):
    """Three at once; the others wait unread, and small ones do not wait behind them."""
    read, body_of = [], Exchange.read_body
    engine = fake_engine("Hello", max_model_len=9000, num_blocks=2000)

    async def read_body(self):
        data = await body_of(self)
        read.append(len(data))
        return data

    monkeypatch.setattr(Exchange, "read_body", read_body)
    large = LONG + b" " * (100_000 - len(LONG))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
    async with served_app(engine) as server, contextlib.AsyncExitStack() as stack:
        server._server.config.app._server_context.large_body_budget = ByteBudget(3 * len(large))
        with held_up(engine):
            for data, count in ((large, 6), (LONG, 1)):
                sent = f"{head}{len(data)}\r\n\r\n".encode() + data
                for _ in range(count):
                    reader, _ = await stack.enter_async_context(connected(server, sent))
                await until(lambda: len(read) >= 3, 10)
            await until(lambda: len(read) == 4, 10)
            await asyncio.sleep(0.3)
            assert read == [len(large)] * 3 + [len(LONG)]
        assert b" 200 " in await reader.readline()
        await until(lambda: len(read) == 7, 10)


@pytest.mark.parametrize("long_frame", ["only", "first", "last"])
async def test_long_messages_are_read_a_few_at_once(caplog, monkeypatch, long_frame):
    """A message of one frame counts by the length that this announces, and one of several as the
    longest; the others wait unread."""
    limits = {"max_message_size": 4 << 20}
    async with attacked(caplog, limits=limits) as server, contextlib.AsyncExitStack() as stack:
        text = CREATE + b" " * 1_000_000
        writers, num_claimed_bytes = [], limits["max_message_size"]
        if long_frame == "only":
            message, rest, num_claimed_bytes = frame(FIN | TEXT, text), b"", len(text)
        elif long_frame == "first":
            message, rest = frame(TEXT, text), frame(FIN)
        else:
            message, rest = frame(TEXT) + frame(FIN, text), b""
        set_long_message_budget(server, 4 * num_claimed_bytes)
        for _ in range(6):
            reader, writer = await stack.enter_async_context(upgraded(server, message[:-1]))
            writers.append((reader, writer))
        connections = connections_of(server)

        def held():
            return sorted(len(one.conn.reader.buffer) for one in connections)

        await until(lambda: held()[2:] == [len(text) - 1] * 4, 10)
        await asyncio.sleep(0.1)
        assert held()[1] < 100_000
        for _, writer in writers:
            writer.write(message[-1:] + rest)
        for reader, _ in writers:
            await reader.readuntil(b'"response.completed"')


def set_long_message_budget(server, num_bytes):
    protocol = server._server.config.ws_protocol_class
    protocol.long_message_budget = ByteBudget(num_bytes)
    return protocol.long_message_budget


def shorten_rate_check(monkeypatch):
    for module in ("byte_budget", "exchange", "websocket_protocol"):
        monkeypatch.setattr(f"asyncllm.serving.{module}.RATE_CHECK_SECONDS", 0.1)


async def test_silent_bodies_hold_no_other_up(monkeypatch):
    """While others wait for its place, a body has to come at a minimum rate."""
    shorten_rate_check(monkeypatch)
    engine = fake_engine("Hello", max_model_len=9000, num_blocks=2000)
    large = LONG + b" " * (400_000 - len(LONG))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(large)
    async with served_app(engine) as server, contextlib.AsyncExitStack() as stack:
        server._server.config.app._server_context.large_body_budget = ByteBudget(2 * len(large))
        silent = [
            (await stack.enter_async_context(connected(server, head + large[:70_000])))[0]
            for _ in range(4)
        ]
        async with asyncio.timeout(10):
            async with connected(server, head + large) as (reader, _):
                assert b" 200 " in await reader.readline()
            answers = [await reader.read() for reader in silent[:2]]
        for answer in answers:
            assert b" 408 " in answer
            assert b"less than 97 KiB came per 0.1 seconds, while other requests" in answer
        # Behind the last one nothing waits.
        assert not any(reader.at_eof() for reader in silent[3:])


async def test_owners_have_turns_for_memory(monkeypatch):
    """Bodies, messages as they are read and as they are handled, and long events."""
    monkeypatch.setattr(serving_module, "MIN_LARGE_JSON_BYTES", 1)
    for module in (serving_module, response_turn, choices):
        monkeypatch.setattr(module, "MIN_WORKER_JSON_BYTES", 1)
    owner = hashlib.sha256(b"b").hexdigest()
    logprobs = {"top_logprobs": 3, "include": ["message.output_text.logprobs"]}
    request = {"input": "1", "truncate_prompt_tokens": 8, "max_output_tokens": 2, **logprobs}
    answer = {"prompt": "1", "max_tokens": 2, "logprobs": 2, "stream": True}
    engine = AsyncLLMEngine(num_blocks=64)
    async with served_app(engine, token=["a", "b"]) as server, asyncio.timeout(30):
        serving = server._server.config.app._server_context
        budgets = {
            "bodies": serving.large_body_budget,
            "messages": set_long_message_budget(server, 1 << 20),
            "logprobs": serving.logprobs_budget,
            "chunks": serving.large_chunk_turn,
        }
        owners = collections.defaultdict(set)

        def noting(name, claim):
            return lambda *args: owners[name].add(args[2]) or claim(*args)

        for name, budget in budgets.items():
            monkeypatch.setattr(budget, "claim", noting(name, budget.claim))
        headers = {"authorization": "Bearer b"}
        async with httpx.AsyncClient(base_url=url_of(server), headers=headers) as client:
            assert (await client.post("/v1/completions", json=answer)).status_code == 200
            assert owners == {name: {owner} for name in ("bodies", "logprobs", "chunks")}
            owners.clear()
            assert (await client.post("/v1/responses", json=request)).status_code == 200
            assert owners == {name: {owner} for name in ("bodies", "logprobs")}
            owners.clear()
            streamed = {**request, "stream": True}
            assert (await client.post("/v1/responses", json=streamed)).status_code == 200
            assert owners == {name: {owner} for name in ("bodies", "logprobs", "chunks")}
        owners.clear()
        upgrade = UPGRADE.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer b\r\n\r\n")
        text = json.dumps({"type": "response.create", **request}).encode() + b" " * 70_000
        async with connected(server, upgrade) as (reader, writer):
            writer.write(frame(FIN | TEXT, text))
            await reader.readuntil(b'"response.completed"')
        assert owners == {name: {owner} for name in budgets}


async def test_parts_of_small_bodies_hold_no_other_up():
    body = json.dumps({**BODY, "user": "u" * 500, "messages": user("a " * 3000)})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {{}}\r\n\r\n"
    engine = fake_engine("Hello", max_model_len=9000, num_blocks=2000)
    async with served_app(engine) as server, contextlib.AsyncExitStack() as stack:
        server._server.config.app._server_context.small_body_budget = ByteBudget(len(body))
        for _ in range(8):
            part = head.format(65_535).encode() + b"{"
            await stack.enter_async_context(connected(server, part))
        request = head.format(len(body)).encode() + body.encode()
        async with asyncio.timeout(2), connected(server, request) as (reader, _):
            assert b" 200 " in await reader.readline()


async def test_a_body_that_waits_for_memory_is_held_once():
    """The ASGI message of the body, which holds the bytes too, is freed before."""

    class Message(dict):
        """A message with weak references."""

    messages, app = [], create_app(fake_engine("Hello", max_model_len=9000, num_blocks=2000))

    async def app_that_sees_messages(scope, receive, send):
        async def receive_message():
            message = Message(await receive())
            messages.append(weakref.ref(message))
            return message

        await app(scope, receive_message, send)

    budget = app._server_context.small_body_budget = ByteBudget(len(LONG))
    async with app._server_context.engine:
        claim = budget.claim(len(LONG), lambda: None)
        async with RawRequest(app_that_sees_messages, LONG, "/v1/completions") as answer:
            await until(lambda: budget.num_waiting, 10)
            assert [message() for message in messages] == [None]
            claim.release()
            await answer.whole()
    assert answer.status == 200


async def test_unread_answers_are_bounded_in_memory():
    """Those that repeat a long request, as events and as stored responses."""
    tool = {"type": "function", "name": "f", "description": "x" * 3_000_000}
    fields = {"input": "1", "tools": [tool], "tool_choice": "none", "max_output_tokens": 2}
    body, whole = (json.dumps({**fields, "stream": stream}) for stream in (True, False))
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    async with served_app(fake_engine("Hello")) as server, asyncio.timeout(60):
        serving = server._server.config.app._server_context
        serving.answer_budget = ByteBudget(2 * len(body) + 2000)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                reader, _ = await stack.enter_async_context(connected(server, head + body))
                assert b" 200 " in await reader.readline()
            async with connected(server, head + body) as (refused, _):
                assert b" 429 " in await refused.readline()
            async with connected(server, GET + b"\r\n") as (short, _):
                assert b" 200 " in await short.readline()
        async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
            while (answer := await client.post("/v1/responses", content=whole)).status_code == 429:
                await asyncio.sleep(0.05)
            assert answer.json()["tools"][0]["description"] == tool["description"]
            path = f"/v1/responses/{answer.json()['id']}"
            assert (await client.get(path)).json() == answer.json()
            serving.answer_budget = ByteBudget(len(body))
            held = serving.answer_budget.claim(len(body), lambda: None)
            assert (await client.get(path)).status_code == 429
            held.release()
            assert (await client.get(path)).status_code == 200


EMOJI_TEXT = "\U0001f600" + "x" * 60_000


@pytest.mark.parametrize(
    "items",
    [
        user(EMOJI_TEXT),
        [{"role": "user", "content": [{"type": "input_text", "text": EMOJI_TEXT}] * 2}],
        [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": EMOJI_TEXT}]},
            {"role": "assistant", "content": "x"},
            *user("x"),
        ],
        [
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "arguments": json.dumps({"x": EMOJI_TEXT}, ensure_ascii=False),
            },
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
    ],
    ids=["text", "parts", "reasoning", "arguments"],
)
@pytest.mark.parametrize("is_history", [False, True])
async def test_a_response_counts_by_the_memory_of_its_conversation(items, is_history):
    """Its history too, even if the store has dropped it. One emoji makes each character take four
    bytes; a short conversation counts for nothing."""
    num_bytes = 4 * 60_000 * json.dumps(items).count("ud83d")
    common = {"truncate_prompt_tokens": 8, "max_output_tokens": 2}
    fields, short = {"input": items, **common}, {"input": user("x") * 100, **common}
    engine = fake_engine("Hello")
    async with served_app(engine) as server, asyncio.timeout(60):
        serving = server._server.config.app._server_context
        async with httpx.AsyncClient(base_url=url_of(server), timeout=50) as client:
            if is_history:
                first = (await client.post("/v1/responses", json=fields)).json()
                fields = {"previous_response_id": first["id"], "input": "x", **common}
            budget = serving.conversation_budget = ByteBudget(int(2.9 * num_bytes))
            await engine.pause()
            waiting = [
                asyncio.create_task(client.post("/v1/responses", json=fields)) for _ in range(2)
            ]
            await until(lambda: engine.stats().num_waiting == 2)
            assert (await client.post("/v1/responses", json=fields)).status_code == 429
            await until(lambda: engine.stats().num_waiting == 2)
            if is_history:
                await client.delete(f"/v1/responses/{first['id']}")
            assert 0.7 * num_bytes < budget._num_free_bytes < 0.9 * num_bytes
            waiting += [
                asyncio.create_task(client.post("/v1/responses", json=short)) for _ in range(9)
            ]
            await until(lambda: engine.stats().num_waiting == 11)
            await engine.resume()
            assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 11
        assert budget._num_free_bytes == int(2.9 * num_bytes)


async def test_a_history_counts_while_its_request_waits_for_the_worker_thread():
    engine = fake_engine("Hello")
    common = {"truncate_prompt_tokens": 8, "max_output_tokens": 2}
    async with served_app(engine) as server, asyncio.timeout(60):
        serving = server._server.config.app._server_context
        async with httpx.AsyncClient(base_url=url_of(server), timeout=50) as client:
            first = await client.post("/v1/responses", json={"input": EMOJI_TEXT, **common})
            fields = {"previous_response_id": first.json()["id"], "input": "x", **common}
            serving.conversation_budget = ByteBudget(700_000)
            is_free = threading.Event()
            serving.json_worker.submit(is_free.wait)
            waiting = [
                asyncio.create_task(client.post("/v1/responses", json=fields)) for _ in range(2)
            ]
            await until(lambda: serving.conversation_budget._num_free_bytes < 200_000)
            assert (await client.post("/v1/responses", json=fields)).status_code == 429
            is_free.set()
            assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 2


async def test_a_response_counts_by_the_bytes_that_it_repeats():
    """Numbers of ``tools`` may be written longer than they came."""
    tool = {"type": "function", "name": "f", "parameters": {"enum": ["NUMBERS"]}}
    fields = {"input": "1", "tools": [tool], "tool_choice": "none", "max_output_tokens": 2}
    body = json.dumps(fields).replace('"NUMBERS"', ",".join(["1e15"] * 10_000))
    engine = fake_engine("Hello")
    async with served_app(engine) as server, asyncio.timeout(60):
        budget = server._server.config.app._server_context.answer_budget = ByteBudget(500_000)
        await engine.pause()
        async with httpx.AsyncClient(base_url=url_of(server), timeout=50) as client:
            answer = asyncio.create_task(client.post("/v1/responses", content=body))
            await until(lambda: budget._num_free_bytes < 500_000, 10)
            assert 190_000 < 500_000 - budget._num_free_bytes < 192_000
            await engine.resume()
            assert (await answer).status_code == 200


async def test_whole_answers_are_bounded_until_they_are_read():
    """Of every path: a long one that is not read keeps other long ones away, and no short one."""
    engine = fake_engine("x", max_model_len=40_000, num_blocks=4000)
    long, short = ({"prompt": "x" * count} for count in (30_000, 10))
    async with served_app(engine) as server, asyncio.timeout(60):
        async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
            answer = await client.post("/tokenize", json=long)
            size = len(answer.content)
            assert size > MIN_LARGE_JSON_BYTES
            serving = server._server.config.app._server_context
            serving.answer_budget = ByteBudget(size)
            held = serving.answer_budget.claim(size, lambda: None)
            assert (await client.post("/tokenize", json=long)).status_code == 429
            assert (await client.post("/tokenize", json=short)).status_code == 200
            held.release()
            assert (await client.post("/tokenize", json=long)).content == answer.content


async def test_logprobs_of_a_whole_answer_are_bounded(monkeypatch):
    monkeypatch.setattr(choices, "MAX_FULL_ANSWER_LOGPROBS_BYTES", 1000)
    async with app_client(AsyncLLMEngine(num_blocks=64)) as client:
        fields = {"prompt": "1", "max_tokens": 20, "logprobs": 2, "ignore_eos": True}
        refused = await client.post("/v1/completions", json=fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        assert '"stream": true' in refused.json()["error"]["message"]
        for change in ({"stream": True}, {"logprobs": None}):
            assert (await client.post("/v1/completions", json=fields | change)).status_code == 200
        # The true length counts, even where the estimate is too low.
        monkeypatch.setattr(CompletionWriter, "BYTES_PER_LOGPROB", 1)
        assert (await client.post("/v1/completions", json=fields)).status_code == 400
        # A chat's entries are longer than those of completions.
        monkeypatch.setattr(choices, "MAX_FULL_ANSWER_LOGPROBS_BYTES", 4000)
        assert (await client.post("/v1/completions", json=fields)).status_code == 200
        monkeypatch.setattr(ChatWriter, "full_answer", None)
        chat = BODY | {"logprobs": True, "top_logprobs": 2, "max_tokens": 20, "ignore_eos": True}
        assert (await client.post(CHAT, json=chat)).status_code == 400


async def test_outputs_do_not_repeat_a_long_prompt_without_end(monkeypatch):
    monkeypatch.setattr(completion_request, "MAX_ECHOED_CHARACTERS", 300)
    async with app_client(fake_engine("x", max_model_len=4096)) as client:
        for n, prompt, status in (
            (4, "a" * 100, 200),
            (4, "a" * 101, 400),
            (1, "a" * 1000, 200),
            (4, [[1] * 12, [2] * 13], 200),
            (4, [[1] * 12, [2] * 14], 400),
        ):
            for stream in (False, True):
                fields = {"prompt": prompt, "echo": True, "n": n, "max_tokens": 1, "stream": stream}
                answer = await client.post("/v1/completions", json=fields)
                assert answer.status_code == status
                if status == 400:
                    assert answer.json()["error"]["param"] == "echo"


@pytest.mark.parametrize("stream", [False, True])
async def test_echoed_prompts_are_bounded_until_they_are_read(stream):
    """A whole answer counts once, and not as its prompts too."""
    engine = AsyncLLMEngine(num_blocks=64)
    fields = {"truncate_prompt_tokens": 1, "max_tokens": 2, "echo": True, "n": 2, "stream": stream}
    long = fields | {"prompt": ["x" * 50_000] * 4}
    size = 2 * 4 * 50_000
    async with served_app(engine) as server, asyncio.timeout(60):
        serving = server._server.config.app._server_context
        budget = serving.answer_budget = ByteBudget(2 * size + 3000)
        async with httpx.AsyncClient(base_url=url_of(server), timeout=50) as client:

            def post(fields):
                return asyncio.create_task(client.post("/v1/completions", json=fields))

            await engine.pause()
            answers = [post(long), post(long)]
            await until(lambda: budget._num_free_bytes == 3000, 10)
            assert (await post(long)).status_code == 429
            short = post(fields | {"prompt": "x" * 30_000})
            await engine.resume()
            assert (await short).status_code == 200
            assert [(await answer).text.count("x" * 50_000) for answer in answers] == [8, 8]
            assert budget._num_free_bytes == 2 * size + 3000
            serving.answer_budget = ByteBudget(size + 3000)
            assert (await post(long)).status_code == 200


async def test_echoed_prompts_are_kept_as_utf8():
    """One emoji makes a ``str`` four times as large."""
    engine = AsyncLLMEngine(num_blocks=64)
    prompts = [f"{EMOJI_TEXT}{index}" for index in range(20)]
    fields = {"truncate_prompt_tokens": 1, "max_tokens": 1, "echo": True, "prompt": prompts}
    body = json.dumps(fields, ensure_ascii=False).encode()
    async with served_app(engine) as server, asyncio.timeout(60):
        budget = server._server.config.app._server_context.large_body_budget
        async with httpx.AsyncClient(base_url=url_of(server), timeout=50) as client:
            await client.post("/v1/completions", content=body)
            await engine.pause()
            gc.collect()
            tracemalloc.start()
            try:
                answer = asyncio.create_task(client.post("/v1/completions", content=body))
                await until(lambda: engine.stats().num_waiting == len(prompts), 20)
                await until(lambda: budget._num_free_bytes == budget._num_bytes, 20)
                num_bytes = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            await engine.resume()
            choices = (await answer).json()["choices"]
    assert [
        choice["text"][: len(prompt)] for choice, prompt in zip(choices, prompts, strict=True)
    ] == prompts
    assert num_bytes < 3_000_000


async def test_outputs_that_wait_together_are_not_one_long_write(monkeypatch):
    sent, send = [], EventSender.send

    def record(sender, data):
        sent.append(data)
        return send(sender, data)

    monkeypatch.setattr(EventSender, "send", record)
    fields = {"prompt": "1", "n": 8, "max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    fields |= {"stream": True, "seed": 1}
    for limit, is_split in ((1 << 16, False), (100, True)):
        monkeypatch.setattr(choices, "MIN_LARGE_JSON_BYTES", limit)
        sent.clear()
        async with app_client(AsyncLLMEngine(num_blocks=64)) as client:
            assert (await client.post("/v1/completions", json=fields)).status_code == 200
        counts = [data.count(b'"finish_reason"') for data in sent]
        assert (max(counts) == 1) == is_split
        assert sum(counts) >= 8


LONG_CHUNKS = {"max_tokens": 1, "echo": True, "logprobs": 20, "stream": True, "seed": 1}
"""A completion whose chunks have 140 KB with a prompt of 250 tokens."""


@pytest.fixture
def num_chunks(monkeypatch):
    """Counts the chunks that are made for each index of a choice."""
    found, chunks = collections.Counter(), CompletionWriter.chunks

    def count(writer, delta, index, stream):
        found[index + delta.index] += 1
        return chunks(writer, delta, index, stream)

    monkeypatch.setattr(CompletionWriter, "chunks", count)
    return found


async def test_of_an_answer_that_nothing_reads_one_long_chunk_is_made(num_chunks):
    body = json.dumps(LONG_CHUNKS | {"prompt": [[1 + i] * 250 for i in range(6)]})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    engine = AsyncLLMEngine(num_blocks=256)
    async with served_app(engine) as server, asyncio.timeout(30):
        budget = server._server.config.app._server_context.logprobs_budget
        async with deaf(server, (request + body).encode()) as (_, transport):
            await until(lambda: num_chunks and engine.stats().num_finished == 6)
            await until(lambda: transport.get_write_buffer_size() > 1 << 16)
            await asyncio.sleep(0.05)
            assert num_chunks.total() == 1
            num_claimed_bytes = (3 << 23) - budget._num_free_bytes
            assert num_claimed_bytes > 3 * transport.get_write_buffer_size()
        await all_left(server)
        assert num_chunks.total() <= 2
        num_chunks.clear()
        async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
            text = (await client.post("/v1/completions", content=body)).text
    assert sorted(num_chunks) == list(range(6))
    assert len(text) > 6 * 130_000
    assert (budget.num_waiting, budget._num_free_bytes) == (0, 3 << 23)


async def test_large_chunks_wait_for_memory(num_chunks):
    """Only one answer has made its large chunk; short chunks do not wait."""
    long, short = (LONG_CHUNKS | {"prompt": [5] * count} for count in (250, 50))
    async with served_app(AsyncLLMEngine(num_blocks=256)) as server, asyncio.timeout(30):
        budget = server._server.config.app._server_context.logprobs_budget = ByteBudget(1000)
        held = budget.claim(1000, lambda: None)
        async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
            answers = [
                asyncio.create_task(client.post("/v1/completions", json=long)) for _ in range(3)
            ]
            await until(lambda: budget.num_waiting == 1)
            await client.post("/v1/completions", json=short)
            assert num_chunks.total() == 2
            assert not any(answer.done() for answer in answers)
            held.release()
            texts = [(await answer).text for answer in answers]
    assert all(text.endswith("data: [DONE]\n\n") and len(text) > 130_000 for text in texts)
    assert (budget.num_waiting, budget._num_free_bytes) == (0, 1000)


async def test_last_events_with_logprobs_wait_for_memory(monkeypatch):
    monkeypatch.setattr(serving_module, "MIN_LARGE_JSON_BYTES", 1)
    fields = {"input": "1", "max_output_tokens": 20, "ignore_eos": True, "top_logprobs": 3}
    fields |= {"include": ["message.output_text.logprobs"], "stream": True, "seed": 1}
    async with served_app(AsyncLLMEngine(num_blocks=64)) as server:
        serving = server._server.config.app._server_context
        budget = serving.logprobs_budget = ByteBudget(1000)
        held = budget.claim(1000, lambda: None)
        claimed, claim = [], budget.claim
        budget.claim = lambda *args: claimed.append(args[0]) or claim(*args)
        async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
            answer = asyncio.create_task(client.post("/v1/responses", json=fields))
            await until(lambda: budget.num_waiting == 1)
            assert not answer.done()
            held.release()
            text = (await answer).text
        assert budget.num_waiting == 0
        assert budget._num_free_bytes == 1000
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    told = [entry for event in deltas for entry in event["logprobs"]]
    assert len(told) == 20
    size = len(json.dumps(told, separators=(",", ":"), ensure_ascii=False))
    assert claimed == [pytest.approx(COPIES_OF_LOGPROBS * size, rel=0.02)]
    assert all(len(entry["top_logprobs"]) == 3 for entry in told)
    text_done, part_done, item_done, last = events[-4:]
    assert text_done["logprobs"] == part_done["part"]["logprobs"] == told
    assert item_done["item"]["content"][0]["logprobs"] == told
    assert last["response"]["output"][0]["content"][0]["logprobs"] == told


async def test_slow_reader_of_last_events_waits_behind_others(monkeypatch):
    """Events with log-probabilities wait for memory again if others have waited for it."""
    monkeypatch.setattr(serving_module, "MIN_LARGE_JSON_BYTES", 1)
    monkeypatch.setattr(response_turn, "RATE_CHECK_SECONDS", 0)
    fields = {"input": "1", "max_output_tokens": 20, "ignore_eos": True, "top_logprobs": 3}
    fields |= {"include": ["message.output_text.logprobs"], "stream": True, "seed": 1}
    writers, others, insert = [], [], ResponseEvents.insert_logprobs

    def insert_first(writer, event):
        writers.append(writer)
        if not others:
            others.append(budget.claim(1000, lambda: None))
        return insert(writer, event)

    monkeypatch.setattr(ResponseEvents, "insert_logprobs", insert_first)
    async with served_app(AsyncLLMEngine(num_blocks=64)) as server, asyncio.timeout(30):
        budget = server._server.config.app._server_context.logprobs_budget = ByteBudget(1000)
        async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
            answer = asyncio.create_task(client.post("/v1/responses", json=fields))
            await until(lambda: others and others[0].is_granted)
            await until(lambda: budget.num_waiting == 1)
            assert (len(writers), writers[0]._logprobs_json) == (1, b"")
            others[0].release()
            text = (await answer).text
        assert (budget.num_waiting, budget._num_free_bytes) == (0, 1000)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    text_done, part_done, item_done, last = events[-4:]
    assert len(text_done["logprobs"]) == 20
    assert part_done["part"]["logprobs"] == text_done["logprobs"]
    assert item_done["item"]["content"][0]["logprobs"] == text_done["logprobs"]
    assert last["response"]["output"][0]["content"][0]["logprobs"] == text_done["logprobs"]


async def test_unread_repeats_of_a_request_are_kept_as_utf8():
    """One emoji would make each character of a text take four bytes."""
    tool = {"type": "function", "name": "f", "description": "🙂" + "x" * 1_000_000}
    fields = {"type": "response.create", "input": "1", "tools": [tool], "tool_choice": "none"}
    request = UPGRADE + frame(FIN | TEXT, json.dumps(fields, ensure_ascii=False).encode())
    engine = fake_engine("Hello")
    async with served_app(engine) as server, asyncio.timeout(30):
        await told(server, frame(FIN | TEXT, CREATE), end=b'"response.completed"')  # Fill caches.
        await all_left(server)
        tracemalloc.start()
        try:
            async with deaf(server, request) as (_, transport):
                await until(lambda: transport.get_write_buffer_size() > 900_000)
                await until(lambda: not engine.stats().num_running)
                gc.collect()
                # The text that the response repeats, the next event, and the unread one. The
                # message is freed a moment later.
                await until(lambda: tracemalloc.get_traced_memory()[0] < 3_500_000)
                assert tracemalloc.get_traced_memory()[0] > 2_900_000
        finally:
            tracemalloc.stop()


async def test_servers_without_the_extension_are_sent_text():
    sent = []

    async def send(message):
        sent.append(message)

    for extensions in ({}, {UTF8_TEXT_EXTENSION: {}}):
        await WebSocketConnection(send, send, extensions).send("🙂".encode())
    assert [message["text"] for message in sent] == ["🙂", "🙂".encode()]


@pytest.mark.parametrize("is_socket", [False, True])
async def test_long_events_of_a_response_wait_for_memory(monkeypatch, is_socket):
    """Deltas that were merged while the client did not read count too."""
    monkeypatch.setattr(serving_module, "MIN_LARGE_JSON_BYTES", 1)
    monkeypatch.setattr(response_turn, "MIN_WORKER_JSON_BYTES", 1)
    fields = {"input": "1", "max_output_tokens": 9, "ignore_eos": True, "top_logprobs": 3}
    fields |= {"include": ["message.output_text.logprobs"], "seed": 1}
    async with served_app(AsyncLLMEngine(num_blocks=64)) as server, asyncio.timeout(30):
        budget = server._server.config.app._server_context.logprobs_budget = ByteBudget(10_000)
        held = budget.claim(10_000, lambda: None)
        claimed, claim = [], budget.claim
        budget.claim = lambda *args: claimed.append(args[0]) or claim(*args)

        async def ask():
            if not is_socket:
                async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
                    body = fields | {"stream": True}
                    return (await client.post("/v1/responses", json=body)).text
            message = json.dumps(fields | {"type": "response.create"}).encode()
            answer = await told(server, frame(FIN | TEXT, message), end=b'"response.incomplete"')
            return "\n".join(f"data: {payload.decode()}" for _, payload in answer)

        answer = asyncio.create_task(ask())
        await until(lambda: budget.num_waiting == 1)
        assert len(claimed) == 1
        held.release()
        lines = [line for line in (await answer).splitlines() if '_text.delta"' in line]
        deltas = [line for line in lines if line.startswith("data: ")]
        await until(lambda: budget._num_free_bytes == 10_000)
    assert claimed[0] >= COPIES_OF_LOGPROBS * len(deltas[0].removeprefix("data: "))
    assert len(claimed) == len(deltas) + 1


@pytest.fixture
def written_streams(monkeypatch):
    """Streams in order of their chunks, with whether their prompt log-probabilities are kept then,
    and of how many outputs deltas are kept."""
    found, make = [], CompletionWriter.chunks

    def record(writer, delta, index, stream):
        text = make(writer, delta, index, stream)
        num_kept = len(stream._outputs)
        found.append((stream.prompt_logprobs is not None, num_kept))
        return text

    monkeypatch.setattr(CompletionWriter, "chunks", record)
    return found


async def test_log_probabilities_that_were_written_are_freed(written_streams):
    """Those of the prompt once the last output has echoed it."""
    fields = {"prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True, "seed": 1, "n": 2}
    fields |= {"echo": True, "logprobs": 2, "stream": True}
    async with app_client(AsyncLLMEngine(num_blocks=64)) as client:
        text = (await client.post("/v1/completions", json=fields)).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    assert sum(len(one["tokens"]) for one in logprobs) == 2 * (3 + 3)
    are_kept, num_kept = zip(*written_streams, strict=True)
    assert are_kept == (True, *[False] * (len(are_kept) - 1))
    assert set(num_kept) == {0}


CHAT_LOGPROBS = {"messages": user("x"), "logprobs": True, "top_logprobs": 20}
RESPONSE_LOGPROBS = {"input": "x", "top_logprobs": 20, "store": False}
ECHO = {"echo": True, "logprobs": 20}
BYTES_OF_20 = 112 + 20 * 8
LOGPROBS_REQUESTS = [
    (CHAT, CHAT_LOGPROBS | {"n": 2, "max_tokens": 300}, 2 * 300 * BYTES_OF_20),
    (CHAT, CHAT_LOGPROBS | {"top_logprobs": 0}, 1000 * 112),
    (CHAT, CHAT_LOGPROBS | {"max_tokens": 9999}, 1000 * BYTES_OF_20),
    ("/v1/responses", RESPONSE_LOGPROBS, 1000 * BYTES_OF_20),
    ("/v1/responses", RESPONSE_LOGPROBS | {"max_output_tokens": 400}, 400 * BYTES_OF_20),
    (
        "/v1/completions",
        ECHO | {"prompt": [[1] * 300, [2] * 1], "max_tokens": 0},
        303 * BYTES_OF_20,
    ),
    ("/v1/completions", ECHO | {"prompt": "a" * 99 + "\u00e4" * 100}, (299 + 16) * BYTES_OF_20),
    (
        "/v1/completions",
        ECHO | {"prompt": ["a" * 5000] * 2, "truncate_prompt_tokens": 9},
        2 * 1016 * BYTES_OF_20,
    ),
    ("/v1/completions", {"prompt": "a" * 900, "logprobs": 20, "n": 30}, 30 * 16 * BYTES_OF_20),
]
"""Requests of 65,536 bytes of packed log-probabilities and more, and their bytes."""


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_packed_log_probabilities_of_all_answers_are_bounded(is_streamed):
    """Of every path, until the answer's end; short answers and plain ones are not counted."""
    engine = fake_engine("x", max_model_len=1000, num_blocks=999)
    async with engine:
        app = create_app(engine)
        serving = app._server_context
        budget = serving.packed_logprobs_budget
        assert budget._num_bytes == (1 << 27) + 64 * 1000 * BYTES_OF_20
        asked, claimed, has_room, claim = [], [], budget.has_room, budget.claim
        budget.has_room = lambda num_bytes: asked.append(num_bytes) or has_room(num_bytes)
        budget.claim = lambda *args: claimed.append(args[0]) or claim(*args)
        url, transport = "http://127.0.0.1", httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            for path, fields, num_bytes in LOGPROBS_REQUESTS:
                fields = fields | {"stream": is_streamed}
                asked.clear()
                held = claim(budget._num_bytes - num_bytes + 1, lambda: None)
                num_requests = engine.stats().num_requests
                refused = await client.post(path, json=fields)
                assert (refused.status_code, asked) == (429, [num_bytes]), (path, fields)
                if path != "/v1/responses":  # Many outputs are refused before they are submitted.
                    assert engine.stats().num_requests == num_requests
                assert refused.json()["error"]["code"] == "server_overloaded"
                await until(lambda: not engine.stats().num_waiting + engine.stats().num_running)
                short = {"prompt": "x", "max_tokens": 200, "logprobs": 20, "stream": is_streamed}
                plain = {
                    name: fields[name] for name in ("prompt", "messages", "input") if name in fields
                }
                plain |= {"max_tokens": 2} if "input" not in fields else {"max_output_tokens": 2}
                plain["truncate_prompt_tokens"] = 9
                assert (await client.post("/v1/completions", json=short)).status_code == 200
                assert (await client.post(path, json=plain)).status_code == 200
                held.release()
                assert (await client.post(path, json=fields)).status_code == 200
                assert budget._num_free_bytes == budget._num_bytes
            claimed.clear()
            invalid = {"prompt": ["x"] * 256, "n": 257, "logprobs": 20, "stream": is_streamed}
            assert (await client.post("/v1/completions", json=invalid)).status_code == 400
            assert not claimed


async def test_an_answer_larger_than_the_budget_is_served_alone():
    fields = {"prompt": "1", "n": 50, "max_tokens": 9, "logprobs": 20, "stream": True}
    body = json.dumps(fields)
    request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    async with served_app(AsyncLLMEngine(num_blocks=256)) as server, asyncio.timeout(30):
        budget = server._server.config.app._server_context.packed_logprobs_budget = ByteBudget(1000)
        async with deaf(server, (request + body).encode()):
            await until(lambda: budget._num_free_bytes == 0)
            async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
                assert (await client.post("/v1/completions", json=fields)).status_code == 429
        await until(lambda: budget._num_free_bytes == 1000)
        async with httpx.AsyncClient(base_url=url_of(server), timeout=20) as client:
            answer = await client.post("/v1/completions", json=fields)
            assert answer.text.endswith("data: [DONE]\n\n")
        await until(lambda: budget._num_free_bytes == 1000)


async def test_a_response_of_a_socket_claims_its_log_probabilities():
    engine = fake_engine("x", max_model_len=1000, num_blocks=999)
    message = json.dumps(RESPONSE_LOGPROBS | {"type": "response.create"}).encode()
    async with served_app(engine) as server, asyncio.timeout(30):
        budget = server._server.config.app._server_context.packed_logprobs_budget = ByteBudget(1000)
        held = budget.claim(1000, lambda: None)
        answer = await told(server, frame(FIN | TEXT, message), end=b'"server_overloaded"')
        assert b'"error"' in answer[-1][1]
        held.release()
        await told(server, frame(FIN | TEXT, message), end=b'"response.completed"')
        await until(lambda: budget._num_free_bytes == 1000)


async def test_ids_to_detokenize_fit_the_context():
    async with app_client(fake_engine("x", max_model_len=100)) as client:
        assert (await client.post("/detokenize", json={"tokens": [65] * 100})).is_success
        refused = await client.post("/detokenize", json={"tokens": [65] * 101})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_a_target_has_8192_bytes():
    async with served_app(fake_engine("x")) as server:
        for length, status in ((8192, b" 404 "), (8193, b" 400 ")):
            request = b"GET /" + b"a" * (length - 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n"
            async with connected(server, request) as (reader, _):
                assert status in await reader.readline()


async def test_unstored_responses_keep_no_copy_of_their_request():
    store, tool = ResponseStore(8, 1 << 24), {"type": "function", "name": "f"}
    fields = {"input": "1", "tools": [tool | {"description": "x" * 100_000}], "store": False}
    async with fake_engine("Hello") as engine:
        serving = create_app(engine)._server_context
        request = ResponseRequest.parse(
            fields | {"tool_choice": "none"}, serving.unsupported_fields
        )
        client = SimpleNamespace(owner="", wait_for_disconnect=asyncio.Event().wait)
        turn = await ResponseTurn.begin(serving, client, request, 100_000, store)

        async def drop(events):
            list(events)

        await turn.run(drop)
        turn.release()
        assert store._num_bytes_left > (1 << 24) - 2000
        assert store.get("", turn.events.id) is not None


async def test_silent_messages_hold_no_other_up(caplog, monkeypatch):
    shorten_rate_check(monkeypatch)
    limits = {"max_message_size": 4 << 20}
    async with attacked(caplog, limits=limits) as server, contextlib.AsyncExitStack() as stack:
        message = frame(FIN | TEXT, CREATE + b" " * 400_000)
        set_long_message_budget(server, 4 * len(message))
        silent = [
            (await stack.enter_async_context(upgraded(server, message[:-1])))[0] for _ in range(4)
        ]
        async with asyncio.timeout(10), upgraded(server, message) as (reader, _):
            await reader.readuntil(b'"response.completed"')
            reads = [asyncio.create_task(one.readuntil(b"others waited")) for one in silent]
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            assert b"less than 97 KiB came per 0.1 seconds, while others" in done.pop().result()
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)


@contextlib.contextmanager
def unsent_errors(monkeypatch):
    """Context manager that holds back errors as an unread connection would, and counts memory
    without garbage collection. Yields two events: an error waits, and errors may be sent."""
    is_sending, may_send = asyncio.Event(), asyncio.Event()

    async def wait(self, send, *args):
        is_sending.set()
        await may_send.wait()
        return await send(self, *args)

    for owner, name in ((ResponseSession, "_send_error"), (Exchange, "respond_json")):
        monkeypatch.setattr(owner, name, functools.partialmethod(wait, getattr(owner, name)))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield is_sending, may_send
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_an_unread_error_holds_no_long_message(caplog, monkeypatch):
    """Neither its place nor its memory; nor does the next message, which is not read yet."""
    bad = b'{"type":"x","x":"' + b"y" * 2_000_000 + b'"}'
    long = CREATE + b" " * 100_000
    limits = {"max_message_size": 4 << 20}
    async with attacked(caplog, limits=limits) as server, asyncio.timeout(20):
        budget, claims = set_long_message_budget(server, 4 << 20), []
        claim = budget.claim
        monkeypatch.setattr(
            budget, "claim", lambda *args: claims.append(claim(*args)) or claims[-1]
        )
        data = frame(TEXT, bad[:-10]) + frame(FIN, bad[-10:]) + frame(FIN | TEXT, long)
        async with upgraded(server) as (reader, writer):
            with unsent_errors(monkeypatch) as (is_sending, may_send):
                writer.write(data)
                await is_sending.wait()
                assert [one.is_released for one in claims] == [True]
                await asyncio.sleep(0.1)
                assert tracemalloc.get_traced_memory()[0] < 1_000_000
                assert len(claims) == 1
                may_send.set()
                await reader.readuntil(b'"response.completed"')
                assert len(claims) == 2


async def test_a_long_message_behind_an_unread_error_holds_no_place(caplog, monkeypatch):
    async with attacked(caplog) as server, asyncio.timeout(20):
        budget = set_long_message_budget(server, 1 << 20)
        async with upgraded(server) as (reader, writer):
            with unsent_errors(monkeypatch) as (is_sending, may_send):
                writer.write(frame(FIN | TEXT, b"{}") + frame(FIN | TEXT, CREATE + b" " * 300_000))
                await is_sending.wait()
                await asyncio.sleep(0.1)
                assert budget._num_free_bytes == 1 << 20
                may_send.set()
                await reader.readuntil(b'"response.completed"')


async def test_messages_that_wait_are_kept_as_utf8(caplog):
    """The one that waits for memory, and the next one. One emoji makes a ``str`` four times as
    large."""
    message = CREATE[:-1] + b',"metadata":{"a":"\xf0\x9f\x98\x80"}}' + b" " * 60_000
    async with attacked(caplog) as server, asyncio.timeout(20):
        budget = server._server.config.app._server_context.small_body_budget
        claim = budget.claim(budget._num_free_bytes, lambda: None)
        async with upgraded(server) as (reader, writer):
            gc.collect()
            tracemalloc.start()
            try:
                writer.write(frame(FIN | TEXT, message) * 2)
                (connection,) = connections_of(server)
                while not (budget.num_waiting and connection.queue.qsize()):
                    await asyncio.sleep(0.01)
                num_bytes = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            claim.release()
            await reader.readuntil(b'"response.completed"')
    assert num_bytes < 300_000


@pytest.mark.parametrize(
    "change", [{"max_tokens": -1}, {"model": "y"}, {"prompt": "1" * 1_000_000}]
)
async def test_an_unread_error_holds_no_body(monkeypatch, change):
    body = json.dumps({"prompt": "1", "stop": "x" * 1000, **change}).encode() + b" " * 2_000_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with served_app(fake_engine("Hello")) as server, asyncio.timeout(20):
        async with connected(server) as (reader, writer):
            with unsent_errors(monkeypatch) as (is_sending, may_send):
                writer.write(head + body)
                await is_sending.wait()
                await asyncio.sleep(0.1)
                assert tracemalloc.get_traced_memory()[0] < 1_000_000
                may_send.set()
                assert b" 40" in await reader.readline()


async def test_a_long_message_has_to_come(caplog, monkeypatch):
    monkeypatch.setattr("asyncllm.serving.websocket_protocol.MESSAGE_TIMEOUT_SECONDS", 0.2)
    async with attacked(caplog) as server:
        (opcode, payload), *_ = await told(server, frame(TEXT, b" " * 100_000))
        assert (opcode, payload) == (CLOSE, b"\x03\xf0a message did not come within 0.2 seconds")


async def test_frames_of_a_message_are_bounded_by_their_number(caplog):
    """1024, and one for each 64 bytes; frames between its fragments count."""
    async with attacked(caplog) as server:
        num_pings = BASE_MESSAGE_FRAME_LIMIT // 2 + 64
        pinged = frame(TEXT, b"{") + (frame(0) + frame(FIN | PING)) * num_pings
        *pongs, (opcode, payload) = await told(server, pinged)
        assert {one for one, _ in pongs} == {PONG}
        assert (opcode, payload[:2]) == (CLOSE, (1009).to_bytes(2, "big"))
        text = CREATE + b" " * (64 * 2 * BASE_MESSAGE_FRAME_LIMIT)
        parts = [text[begin : begin + 64] for begin in range(0, len(text), 64)]
        whole = frame(TEXT, parts[0]) + b"".join(frame(0, part) for part in parts[1:])
        answer = await told(server, whole + frame(FIN), end=b'"response.completed"')
        assert answer[0][0] == TEXT


@pytest.mark.parametrize("is_socket", [True, False])
async def test_bytes_have_turns(caplog, monkeypatch, is_socket):
    """A connection pauses after 64 KiB; its last read before may have brought 256 KiB more."""
    turns, begin_parse_turn = [], BoundedProtocol._begin_parse_turn
    monkeypatch.setattr(
        BoundedProtocol,
        "_begin_parse_turn",
        lambda self: (turns.append(self), begin_parse_turn(self)),
    )
    size = 1 << 20
    async with attacked(caplog) as server:
        if is_socket:
            data, end = frame(FIN | TEXT, CREATE + b" " * size), b'"response.completed"'
            async with upgraded(server, data) as (reader, _):
                await reader.readuntil(end)
        else:
            body = json.dumps(BODY).encode() + b" " * size
            async with connected(server, f"{HEAD}{len(body)}\r\n\r\n".encode() + body) as pair:
                assert b" 200 " in await pair[0].readline()
    assert len(turns) >= size // (MAX_BYTES_PER_PARSE_TURN + 2**18)


async def test_a_body_of_single_bytes_has_turns(caplog, monkeypatch):
    """Eight receives of a connection come before each turn."""
    calls, turns = [], []
    for name, called in (("data_received", calls), ("_begin_parse_turn", turns)):
        original = getattr(BoundedProtocol, name)

        def note(self, *args, original=original, called=called):
            called.append(self)
            original(self, *args)

        monkeypatch.setattr(BoundedProtocol, name, note)
    body = json.dumps(BODY).encode() + b" " * 100
    async with attacked(caplog) as server:
        async with connected(server, f"{HEAD}{len(body)}\r\n\r\n".encode()) as (reader, writer):
            for i in range(len(body)):
                writer.write(body[i : i + 1])
                await asyncio.sleep(0.001)
            assert b" 200 " in await reader.readline()
            assert len(turns) >= len(calls) // 10 > 4


@pytest.mark.parametrize("is_socket", [True, False])
async def test_many_events_in_a_receive_have_turns(caplog, monkeypatch, is_socket):
    """As many chunks or frames come before a turn as in one, or less than twice as many."""
    turns, begin_parse_turn = [], BoundedProtocol._begin_parse_turn
    monkeypatch.setattr(
        BoundedProtocol,
        "_begin_parse_turn",
        lambda self: (turns.append(self), begin_parse_turn(self)),
    )
    count, width = 16, MAX_EVENTS_PER_PARSE_TURN - 14
    body = json.dumps(BODY).ljust(count * width)
    async with attacked(caplog) as server:
        opened = upgraded(server) if is_socket else connected(server, CHUNKED)
        async with opened as (reader, writer):
            for i in range(count):
                part = body[i * width : (i + 1) * width].encode()
                chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in part)
                writer.write(frame(FIN | PING) * width if is_socket else chunks)
                await asyncio.sleep(0.02)
            writer.write(b"" if is_socket else b"0\r\n\r\n")
            end = b"\x8a\0" * (count * width) if is_socket else b"HTTP/1.1 200"
            assert await reader.readexactly(len(end)) == end
            assert len(turns) >= count // 3


@pytest.mark.parametrize("early", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 9])
async def test_a_client_that_sends_its_next_request_early_is_seen_to_go(early):
    gate, body = threading.Semaphore(1), json.dumps({"prompt": "1", "max_tokens": 50})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    engine = fake_engine("x" * 50, gate=gate)
    async with served_app(engine) as server:
        try:
            async with connected(server, (head + body).encode()) as (_, writer):
                await until(lambda: engine.stats().num_running == 1)
                writer.write(early)
                await writer.drain()
                await asyncio.sleep(0.05)  # Let the server read it before the client goes.
            await until(lambda: len(server._server.server_state.connections) == 0, seconds=10)
            gate.release(2)
            await until(lambda: engine.stats().num_running == 0, seconds=10)
            assert engine.stats().num_aborted == 1
        finally:
            gate.release(100)


async def test_a_client_that_sends_far_ahead_is_not_read():
    gate, body = threading.Semaphore(0), json.dumps({"prompt": "1"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    async with served_app(fake_engine("x", gate=gate)) as server:
        try:
            async with connected(server, (head + body).encode()) as (_, writer):
                await until(lambda: server._server.server_state.connections, seconds=5)
                (protocol,) = server._server.server_state.connections
                await until(lambda: protocol.conn.their_state is h11.DONE, seconds=5)
                writer.write(b"x" * (1 << 23))
                await until(lambda: not protocol.transport.is_reading(), seconds=5)
                await asyncio.sleep(0.05)
                assert MAX_EARLY_BYTES < len(protocol._unparsed) <= 5 * MAX_BYTES_PER_PARSE_TURN
        finally:
            gate.release(1000)


async def test_only_large_bodies_have_turns_as_such(caplog, monkeypatch):
    """Those hold memory that others wait for. Many small ones in chunks do not come before them."""
    turns, add = [], ParseQueue.add

    def note(self, turn_callback, has_claim=False):
        turns.append(has_claim)
        add(self, turn_callback, has_claim)

    monkeypatch.setattr(ParseQueue, "add", note)
    small = json.dumps(BODY).ljust(900).encode()
    chunks = CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in small) + b"0\r\n\r\n"
    large = json.dumps(BODY).ljust(1 << 20).encode()
    async with attacked(caplog) as server:
        async with connected(server, chunks) as (reader, _):
            assert b" 200 " in await reader.readline()
        assert len(turns) > 10
        assert not any(turns)
        async with connected(server, f"{HEAD}{len(large)}\r\n\r\n".encode() + large) as pair:
            assert b" 200 " in await pair[0].readline()
        assert any(turns)


async def test_parse_turns_alternate_between_claims_and_others():
    queue, turns = ParseQueue(), []
    for name in ("a", "b", "c", "A", "B"):
        queue.add(functools.partial(turns.append, name), has_claim=name.isupper())
    await until(lambda: len(turns) == 5)
    assert turns == ["A", "a", "B", "b", "c"]
    dropped = functools.partial(turns.append, "d")
    queue.add(dropped)
    queue.discard(dropped)
    queue.add(functools.partial(turns.append, "e"))
    await until(lambda: len(turns) == 6)
    assert turns[-1] == "e"
