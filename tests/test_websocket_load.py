"""Many connections at once, and ten thousand messages that make no sense."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import resource

import pytest
from websockets.exceptions import ConnectionClosed

from tests.app_clients import open_to
from tests.fakes import fake
from tests.idle import idle, until
from tests.websocket_clients import MALFORMED, client_of, served, text_of
from tests.websocket_frames import BINARY, CLOSE, FIN, TEXT, UPGRADE, frame


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


CREATE = b'{"type":"response.create"}'
NONSENSE = [
    lambda junk: frame(FIN | BINARY, junk),
    lambda junk: frame(FIN | TEXT, b"x" * 20_000),
    lambda junk: frame(FIN | TEXT, CREATE)[:-5],
    lambda junk: bytes([FIN | TEXT, 2]) + b"{}",  # without a mask
    lambda junk: frame(FIN | TEXT, b"\xff\xfe"),
    lambda junk: frame(FIN | 3, junk),
    lambda junk: frame(FIN, junk),
    lambda junk: frame(TEXT, b'{"type":'),
    lambda junk: junk,
    lambda junk: frame(FIN | CLOSE, b"\x03\xe8") + frame(FIN | TEXT, CREATE),
    lambda junk: frame(FIN | TEXT, b'{"type":"response.create","input":{"a":[1]}}'),
]
"""Bytes that break the protocol, or say something that is no request."""


async def attack_raw(server, seed: int, num_messages: int) -> None:
    """Sends broken frames, over new connections as the old ones are closed."""
    draw = random.Random(seed)
    sent = 0
    while sent < num_messages:
        reader, writer = await open_to(server, UPGRADE.replace(b": x", b": 127.0.0.1").decode())
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(min(num_messages - sent, draw.randrange(1, 40))):
                writer.write(draw.choice(NONSENSE)(draw.randbytes(draw.randrange(1, 200))))
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
                    error = await client.recv()
                    assert (error["type"], error["status"] in (400, 404, 413)) == ("error", True)
                    assert len(json.dumps(error)) < 1000
                    answered += 1
    return answered


@pytest.mark.slow
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
