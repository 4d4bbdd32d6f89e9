"""Clients that mean harm: what they send ends no server, and nothing that they hold grows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket

import httpx
import pytest

from asyncllm.serving.connections import MAX_FRAGMENTS, WebSocketProtocol
from asyncllm.testing import fake_engine
from tests.app_clients import BODY, CHAT, HEAD, open_to, read_to_end, served_app, url_of, user
from tests.idle import until
from tests.websocket_frames import BINARY, CLOSE, FIN, PING, TEXT, UPGRADE, frame, heard


@contextlib.asynccontextmanager
async def attacked(caplog, **options):
    """A server whose event loop has caught no exception in the end, and which answers others."""
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    with caplog.at_level(logging.ERROR, "asyncllm"):
        async with served_app(fake_engine("Hello"), **options) as server:
            yield server
            async with httpx.AsyncClient(base_url=url_of(server)) as client:
                answer = await client.post(CHAT, json=BODY)
                assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert problems == []
    assert [record.message for record in caplog.records if record.name[:8] == "asyncllm"] == []


async def all_left(server):
    """Returns when no connection is left."""
    async with asyncio.timeout(10):
        while server._server.server_state.connections:
            await asyncio.sleep(0.005)


# --- HTTP -------------------------------------------------------------------------------

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
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
]


async def test_requests_that_are_none(caplog):
    async with attacked(caplog) as server:
        for data, status in REQUESTS:
            reader, writer = await open_to(server)
            writer.write(data)
            async with asyncio.timeout(10):
                line = await reader.readline()
            assert line.split(b" ")[1] == status, (data[:80], line)
            writer.transport.abort()
        await all_left(server)


async def test_nonsense_behind_an_answer(caplog):
    async with attacked(caplog) as server:
        reader, writer = await open_to(server)
        writer.write(POST.replace(b"chat", b"none") + b"Transfer-Encoding: chunked\r\n\r\n")
        assert b" 404 " in await reader.readline()
        writer.write(b"no number\r\n")
        with contextlib.suppress(ConnectionError):
            await read_to_end(reader)
        writer.close()
        await all_left(server)


@pytest.mark.parametrize("sent", [b"x", b""])
async def test_a_body_that_nothing_reads_holds_no_connection(caplog, sent):
    """It may be sent byte by byte, or begun and not gone on with."""
    async with attacked(caplog, limits={"header_timeout": 0.2}) as server:
        reader, writer = await open_to(server)
        writer.write(GET + b"Content-Length: 100000\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.write(b"x")
        async with asyncio.timeout(10):
            while server._server.server_state.connections:
                if not writer.is_closing():
                    writer.write(sent)
                await asyncio.sleep(0.01)
        writer.transport.abort()


@contextlib.asynccontextmanager
async def deaf(server, request):
    """The server's side of a connection whose client has sent a request, and does not read."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(sock.connect, ("127.0.0.1", server.port))
        async with asyncio.timeout(10):
            await until(lambda: server._server.server_state.connections)
        (connection,) = server._server.server_state.connections
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
        async with deaf(server, GET.replace(b"health", b"openapi.json") + b"\r\n") as (
            _,
            transport,
        ):
            await until(lambda: transport.get_write_buffer_size())
            await server.aclose()
            await all_left(server)


# --- WebSockets -------------------------------------------------------------------------


async def told(server, data, end=None):
    """What a connection is sent that sends ``data``, up to its end or this one."""
    reader, writer = await open_to(server)
    writer.write(UPGRADE)
    async with asyncio.timeout(10):
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(data)
    async with asyncio.timeout(10):
        answer = await (reader.read() if end is None else reader.readuntil(end))
    writer.transport.abort()
    return heard(answer)


CREATE = json.dumps({"type": "response.create", "input": "Hi"}).encode()
FRAMES = [
    (frame(FIN | TEXT, b"\xff\xfe"), 1007),
    (frame(FIN | TEXT, length=2**40), 1009),
    (frame(FIN | TEXT, length=2**63), 1009),
    (frame(TEXT) + frame(0) * (2 * MAX_FRAGMENTS), 1009),
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


async def test_frames_that_are_none(caplog):
    async with attacked(caplog) as server:
        for data, code in FRAMES:
            (opcode, payload), *more = await told(server, data)
            assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, code), (data[:20], more)
            assert more == []
        for kind, code in ((BINARY, "invalid_message"), (TEXT, "invalid_json")):
            answer, *_ = await told(server, frame(FIN | kind, b"\x00") * 70, end=b"}}")
            assert json.loads(answer[1])["error"]["code"] == code
        await all_left(server)


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
        await all_left(server)


async def test_pings_whose_answers_are_not_read_pile_up_nowhere(caplog):
    async with attacked(caplog) as server:
        async with deaf(server, UPGRADE) as (sock, transport):
            loop, pings = asyncio.get_running_loop(), frame(FIN | PING, bytes(125)) * (1 << 15)
            async with asyncio.timeout(20):
                assert b" 101 " in await loop.sock_recv(sock, 1000)
                sending = asyncio.ensure_future(loop.sock_sendall(sock, pings))
                while transport.is_reading() and not sending.done():
                    await asyncio.sleep(0.001)
            assert not transport.is_reading()
            assert 0 < transport.get_write_buffer_size() < 1 << 20
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
        await all_left(server)


async def test_a_page_of_another_origin_reaches_nothing(caplog):
    """A form or a fetch without CORS needs no permission to send, and a socket neither."""
    async with attacked(caplog) as server:
        evil = "Origin: https://evil.example\r\n"
        body = json.dumps({"messages": user("Hi")})
        fields = f"{evil}Content-Type: text/plain\r\n\r\n{body}"
        upgrade = UPGRADE.replace(b"Upgrade: w", evil.encode() + b"Upgrade: w").decode()
        for request in (f"{HEAD}{len(body)}\r\n{fields}", upgrade):
            reader, writer = await open_to(server, request)
            async with asyncio.timeout(10):
                assert b" 403 " in await reader.readline()
            writer.transport.abort()
