"""What an event costs the event loop: python -m benchmarks.serving_events

The processor's time of the loop's thread for each event of a chat completion over HTTP, and for
each frame of a response on a WebSocket: the engine's part of the loop, the protocol's and the
server's together, requests included. The engine answers from a script, on a thread of its own; the
clients are another process. The two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from websockets.asyncio.client import connect

from asyncllm.serving import create_app
from asyncllm.serving.http_server import HttpServer
from asyncllm.testing import fake_engine
from benchmarks.common import Report, options

DELTA = b'{"type":"response.output_text.delta"'
END = b'{"type":"response.incomplete"'


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
        while not (message := await connection.recv(decode=False)).startswith(END):
            count += message.startswith(DELTA)
        return count


READ = {"event": read_events, "frame": read_frames}


async def client(port: int) -> None:
    """Reads jobs from standard input, and prints how many events or frames came."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        kind, streams, tokens = json.loads(line)
        counts = await asyncio.gather(*(READ[kind](port, tokens) for _ in range(streams)))
        print(sum(counts), flush=True)


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each event and frame, by round."""
    engine = fake_engine("x" * (args.tokens + 1), num_blocks=8192, step_time=0.005)
    found: dict[str, list[float]] = {kind: [] for kind in READ}
    async with engine, HttpServer(create_app(engine, max_frame_rate=1e9), port=0) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.serving_events", "--client", str(server.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None

        async def ask(kind: str, tokens: int) -> int:
            job: list[Any] = [kind, args.streams, tokens]
            process.stdin.write(json.dumps(job).encode() + b"\n")
            return int(await process.stdout.readline())

        for kind in READ:
            await ask(kind, 4)  # the first request of all makes validators, and more of the kind
        for _ in range(args.rounds):
            for kind, each in found.items():
                before = time.thread_time()
                count = await ask(kind, args.tokens)
                each.append((time.thread_time() - before) / count)
        process.stdin.close()
        await process.wait()
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--uvloop", action="store_true")
    args = parser.parse_args()
    if args.client is not None:
        asyncio.run(client(args.client))
        return
    factory, loop = None, "asyncio"
    if args.uvloop:
        import uvloop

        factory, loop = uvloop.new_event_loop, "uvloop"
    report = Report("CPU time of the event loop's thread", {"event loop": loop})
    with asyncio.Runner(loop_factory=factory) as runner:
        found = runner.run(measure(args))
    for kind, each in found.items():
        least = f"least {1e6 * min(each):.1f}, {len(each)} rounds"
        report.add(f"for each {kind}", statistics.median(each), "µs", least)
    report.write(args.json)


if __name__ == "__main__":
    main()
