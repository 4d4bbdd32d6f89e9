"""What serving over WebSocket costs: python benchmarks/serving.py

Two figures, on the packaged model, with the clients in a process of their own:

- tokens a second of many streams over WebSocket, as a share of the engine's in-process rate;
- what the first frame adds to the engine's own time to first token.

The CPU time of the serving process is given as well: it says the same on a busy machine.
In-process and WebSocket runs alternate, and each pair gives one share, so that a machine whose
speed wanders does so for both.
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

from asyncllm import AsyncLLMEngine
from asyncllm.serving.websocket import serve

PROMPT = "Tell me a story about a fox and a boat."
DELTA = '{"type":"response.output_text.delta"'


def request(tokens: int) -> str:
    return json.dumps(
        {
            "type": "response.create",
            "input": PROMPT,
            "max_output_tokens": tokens,
            "ignore_eos": True,
        }
    )


# --- the clients, in another process ----------------------------------------------------


async def client(port: int) -> None:
    """Reads jobs from standard input, one a line, and prints what came of each."""
    loop = asyncio.get_running_loop()
    connections: list[Any] = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        # Connections are made before the first job and stay, as those of an application do.
        while len(connections) < job["streams"]:
            connections.append(await connect(url(port), compression=None))
        if job["kind"] == "rate":
            result: Any = await rate_of(connections, job["tokens"])
        else:
            result = await first_frames_of(connections[0], job["repeats"], job["tokens"])
        print(json.dumps(result), flush=True)


async def rate_of(connections: list[Any], tokens: int) -> dict[str, float]:
    began = time.perf_counter()
    counts = await asyncio.gather(*(read_answer(one, tokens) for one in connections))
    return {"seconds": time.perf_counter() - began, "tokens": sum(counts)}


async def read_answer(connection: Any, tokens: int) -> int:
    await connection.send(request(tokens))
    async for message in connection:
        if not message.startswith(DELTA) and message.startswith('{"type":"response.incomplete"'):
            return json.loads(message)["response"]["usage"]["output_tokens"]
    raise RuntimeError("the connection was closed")


async def first_frames_of(connection: Any, repeats: int, tokens: int) -> list[float]:
    """What each first frame took beyond the engine's own time to first token."""
    added = []
    for _ in range(repeats):
        sent_at = time.perf_counter()
        await connection.send(request(tokens))
        first = None
        async for message in connection:
            if first is None and message.startswith(DELTA):
                first = time.perf_counter() - sent_at
            elif message.startswith('{"type":"response.incomplete"'):
                ttft = json.loads(message)["response"]["timings"]["ttft"]
                break
        added.append(first - ttft)
    return added


def url(port: int) -> str:
    return f"ws://127.0.0.1:{port}/v1/responses"


# --- the engine -------------------------------------------------------------------------


class Clients:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, kind: str, **job: int) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind, **job}).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())


async def in_process(engine: AsyncLLMEngine, streams: int, tokens: int) -> dict[str, float]:
    async def read() -> int:
        count = 0
        messages = [{"role": "user", "content": PROMPT}]
        async for delta in engine.chat(messages, max_tokens=tokens, ignore_eos=True):
            count += len(delta.token_ids)
        return count

    began = time.perf_counter()
    counts = await asyncio.gather(*(read() for _ in range(streams)))
    return {"seconds": time.perf_counter() - began, "tokens": sum(counts)}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncLLMEngine() as engine, serve(engine, port=0) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--client", str(server.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        clients = Clients(process)
        try:
            await in_process(engine, args.streams, 16)
            await clients.do("rate", streams=args.streams, tokens=16)
            pairs, cpu = [], []
            for _ in range(args.repeats):
                used = [time.process_time()]
                inside = await in_process(engine, args.streams, args.tokens)
                used.append(time.process_time())
                outside = await clients.do("rate", streams=args.streams, tokens=args.tokens)
                used.append(time.process_time())
                pairs.append([run["tokens"] / run["seconds"] for run in (inside, outside)])
                cpu.append((used[2] - used[1]) / (used[1] - used[0]))
                print(f"  {pairs[-1][0]:8.0f} {pairs[-1][1]:8.0f} tokens/s", flush=True)
            added = await clients.do("first", streams=1, repeats=args.first_frames, tokens=4)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
    inside, outside = zip(*pairs, strict=True)
    return {
        "streams": args.streams,
        "tokens_each": args.tokens,
        "in_process_tokens_per_s": statistics.median(inside),
        "websocket_tokens_per_s": statistics.median(outside),
        "share": statistics.median(b / a for a, b in pairs),
        "cpu_time_ratio": statistics.median(cpu),
        "first_frame_added_p50_s": statistics.median(added),
        "first_frame_added_p90_s": statistics.quantiles(added, n=10)[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--first-frames", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print the result as JSON alone")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        asyncio.run(client(args.client))
        return
    print(f"{args.streams} streams of {args.tokens} tokens: in process, over WebSocket")
    result = asyncio.run(measure(args))
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"in process      {result['in_process_tokens_per_s']:8.0f} tokens/s\n"
        f"over WebSocket  {result['websocket_tokens_per_s']:8.0f} tokens/s\n"
        f"share           {100 * result['share']:8.1f} %\n"
        f"CPU time        {100 * result['cpu_time_ratio']:8.1f} % of in process, clients apart\n"
        f"first frame adds{1000 * result['first_frame_added_p50_s']:8.2f} ms (p50), "
        f"{1000 * result['first_frame_added_p90_s']:.2f} ms (p90)"
    )


if __name__ == "__main__":
    main()
