"""Raw bytes to the WebSocket server: nothing that a client sends piles up."""

from __future__ import annotations

import asyncio
import socket

import pytest

from asyncllm.serving.connections import MAX_FRAGMENTS
from tests.fakes import fake
from tests.test_app_hostile import CLOSE, FIN, PING, TEXT, UPGRADE, frame, heard
from tests.websocket_clients import served

pytestmark = pytest.mark.asyncio


async def upgraded(server):
    """A raw connection, and the server's side of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.to_thread(sock.connect, ("127.0.0.1", server.port))
    sock.sendall(UPGRADE.replace(b"Host: x", b"Host: 127.0.0.1"))
    sock.setblocking(False)
    async with asyncio.timeout(10):
        assert b" 101 " in await asyncio.get_running_loop().sock_recv(sock, 1000)
        while not server._sessions:
            await asyncio.sleep(0.001)
    (session,) = server._sessions
    served_by = session.connection.transport.get_extra_info("socket")
    served_by.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return sock, session.connection


async def test_pings_whose_answers_are_not_read_pile_up_nowhere():
    async with served(fake().engine()) as server:
        sock, connection = await upgraded(server)
        with sock:
            pings = frame(FIN | PING, bytes(125)) * (1 << 15)
            sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(sock, pings))
            async with asyncio.timeout(20):
                while connection.transport.is_reading() and not sending.done():
                    await asyncio.sleep(0.001)
            assert not connection.transport.is_reading()
            assert 0 < connection.transport.get_write_buffer_size() < 1 << 20
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending


async def test_a_message_of_many_fragments_closes_with_1009():
    async with served(fake().engine()) as server:
        sock, _ = await upgraded(server)
        with sock:
            fragments = frame(TEXT) + frame(0) * (2 * MAX_FRAGMENTS)
            await asyncio.get_running_loop().sock_sendall(sock, fragments)
            async with asyncio.timeout(10):
                answer = await asyncio.get_running_loop().sock_recv(sock, 1000)
            opcode, payload = heard(answer)[0]
            assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, 1009)
