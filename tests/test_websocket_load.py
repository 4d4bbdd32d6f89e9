"""Many connections at once, and ten thousand messages that make no sense."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import resource
import struct

from websockets.exceptions import ConnectionClosed

from tests.fakes import fake
from tests.idle import idle, until
from tests.websocket_clients import MALFORMED, client_of, served, text_of

OPCODES = {
    "text": 0x81,
    "binary": 0x82,
    "fragment": 0x01,
    "continuation": 0x80,
    "reserved": 0x83,
    "close": 0x88,
}


async def test_200_connections_at_once():
    rig = fake(num_blocks=4000, max_num_seqs=64)
    async with served(rig.engine()) as server, contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(60):
            clients = await asyncio.gather(
                *(stack.enter_async_context(client_of(server)) for _ in range(200))
            )
            for turn in range(2):
                answers = await asyncio.gather(
                    *(c.ask(f"{i} {turn}", max_output_tokens=8) for i, c in enumerate(clients))
                )
                for i, answer in enumerate(answers):
                    expected = rig.executor.reference([i, turn], 8)
                    assert text_of(answer).split() == [str(token) for token in expected]
            assert server.num_connections == 200
        await idle(server.engine)


def frame(kind: str, payload: bytes, *, masked: bool = True) -> bytes:
    """A frame as a client would write it, or would not."""
    head = bytes([OPCODES[kind]])
    flag = 0x80 if masked else 0
    if len(payload) < 126:
        head += bytes([flag | len(payload)])
    elif len(payload) < 65536:
        head += bytes([flag | 126]) + struct.pack("!H", len(payload))
    else:
        head += bytes([flag | 127]) + struct.pack("!Q", len(payload))
    return head + (b"\0\0\0\0" if masked else b"") + payload


def nonsense(draw: random.Random) -> bytes:
    """Bytes that break the protocol, or say something that is no request."""
    choice = draw.randrange(11)
    junk = draw.randbytes(draw.randrange(1, 200))
    if choice == 0:
        return frame("binary", junk)
    if choice == 1:
        return frame("text", b"x" * 20_000)
    if choice == 2:
        return frame("text", b'{"type":"response.create"}')[:-5]
    if choice == 3:
        return frame("text", b"{}", masked=False)
    if choice == 4:
        return frame("text", b"\xff\xfe")
    if choice == 5:
        return frame("reserved", junk)
    if choice == 6:
        return frame("continuation", junk)
    if choice == 7:
        return frame("fragment", b'{"type":')
    if choice == 8:
        return junk
    if choice == 9:
        return frame("close", b"\x03\xe8") + frame("text", b'{"type":"response.create"}')
    return frame("text", b'{"type":"response.create","input":{"a":[1]}}')


async def open_raw(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
    )
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def attack_raw(server, seed: int, num_messages: int) -> None:
    """Sends broken frames, over new connections as the old ones are closed."""
    draw = random.Random(seed)
    sent = 0
    while sent < num_messages:
        reader, writer = await open_raw(server)
        with contextlib.suppress(ConnectionError):
            for _ in range(min(num_messages - sent, draw.randrange(1, 40))):
                writer.write(nonsense(draw))
                sent += 1
                await writer.drain()
            writer.write_eof()
            await reader.read()
        writer.close()


async def attack(server, num_messages: int) -> int:
    """Sends well-framed nonsense, each of which must be answered; returns how many were."""
    answered = 0
    while answered < num_messages:
        async with client_of(server) as client:
            with contextlib.suppress(ConnectionClosed):
                while answered < num_messages:
                    await client.connection.send(MALFORMED[answered % len(MALFORMED)])
                    assert (await client.recv())["type"] == "error"
                    answered += 1
    return answered


async def test_10_000_malformed_messages_hurt_no_other_client():
    rig = fake(num_blocks=4000)
    async with served(rig.engine(), max_message_size=120_000) as server:
        stop = asyncio.Event()

        async def customer():
            async with client_of(server) as client:
                count = 0
                while not stop.is_set():
                    token = count % rig.executor.info.vocab_size
                    answer = await client.ask(f"{token}", max_output_tokens=5)
                    expected = rig.executor.reference([token], 5)
                    assert text_of(answer).split() == [str(token) for token in expected]
                    count += 1
                return count

        shopping = asyncio.ensure_future(customer())
        await attack_raw(server, 0, 500)
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with asyncio.timeout(90):
            await asyncio.gather(
                *(attack_raw(server, seed, 1500) for seed in range(1, 5)),
                attack(server, 2000),
                attack(server, 1500),
            )
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        stop.set()
        assert await shopping > 0
        stats = await idle(server.engine)
        assert stats.num_failed == 0
        await until(lambda: not server.num_connections)
    assert grown < 64 * 1024, f"{grown} KiB more"
