"""What an event costs the event loop: python benchmarks/serving_events.py

The processor's time of the loop's thread for each event of a chat completion over HTTP, and for
each frame of a response on a WebSocket: the engine's part of the loop, the protocol's and the
server's together. The engine answers from a script, on a thread of its own; the clients are another
process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from websockets.asyncio.client import connect

from asyncllm.serving import create_app
from asyncllm.serving.http_server import HttpServer
from asyncllm.testing import fake_engine

DELTA = '{"type":"response.output_text.delta"'


async def read_events(port: int, tokens: int) -> int:
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": tokens}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    count = (await reader.read()).count(b'"delta":{"content":"x')
    writer.close()
    return count


async def read_frames(port: int, tokens: int) -> int:
    async with connect(f"ws://127.0.0.1:{port}/v1/responses", compression=None) as connection:
        request = {"type": "response.create", "input": "Hi", "max_output_tokens": tokens}
        await connection.send(json.dumps(request))
        count = 0
        async for message in connection:
            assert isinstance(message, str)
            count += message.startswith(DELTA)
            if message.startswith('{"type":"response.incomplete"'):
                break
        return count


async def client(kind: str, port: int, streams: int, tokens: int) -> None:
    read = read_events if kind == "events" else read_frames
    counts = await asyncio.gather(*(read(port, tokens) for _ in range(streams)))
    print(sum(counts))


async def measure(kind: str, streams: int, tokens: int) -> dict[str, Any]:
    engine = fake_engine("x" * (tokens + 1), num_blocks=8192, step_time=0.005)
    async with engine, HttpServer(create_app(engine, max_frame_rate=1e9), port=0) as server:
        arguments = map(str, (server.port, streams, tokens))
        before = time.thread_time()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--client", kind, *arguments),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        used = time.thread_time() - before
    count = int(out)
    return {"kind": kind, "count": count, "cpu_us_each": 1e6 * used / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--uvloop", action="store_true")
    args = parser.parse_args()
    if args.client is not None:
        kind, *numbers = args.client
        asyncio.run(client(kind, *map(int, numbers)))
        return
    factory = None
    if args.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        for kind in ("events", "frames"):
            found = runner.run(measure(kind, args.streams, args.tokens))
            print(f"{found['count']:7d} {kind}: {found['cpu_us_each']:.1f} µs each")


if __name__ == "__main__":
    main()
