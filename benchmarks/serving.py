"""What serving costs: python -m benchmarks.serving

As ``asyncllm serve`` serves, with the clients in a process of their own, over server-sent events
and on WebSockets:

- tokens a second of many streams, as a share of the engine's in-process rate. Runs in process and
  over each protocol take turns, and each turn gives one share, so that a machine whose speed
  wanders does so for all;
- what the first text adds to the engine's own time to first token;
- what connections cost that are open and idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine
from asyncllm.serving import create_app
from asyncllm.serving.http_server import ConnectionLimits, HttpServer
from benchmarks.common import Report, options, percentile, resident_bytes
from benchmarks.serving_clients import CLIENTS, PROMPT

IDLE_SECONDS = 31.0
"""A little more than the server's interval of pings."""

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Clients:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, port: int) -> Clients:
        command = (sys.executable, "-m", "benchmarks.serving_clients", str(port))
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def do(self, kind: str, over: str, connections: int, **job: int) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"kind": kind, "over": over, "connections": connections, **job}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def in_process(engine: AsyncLLMEngine, streams: int, tokens: int) -> dict[str, float]:
    async def read() -> int:
        messages = [{"role": "user", "content": PROMPT}]
        stream = engine.chat(messages, max_tokens=tokens, ignore_eos=True)
        return sum([len(delta.token_ids) async for delta in stream])

    began = time.perf_counter()
    counts = await asyncio.gather(*(read() for _ in range(streams)))
    return {"seconds": time.perf_counter() - began, "tokens": sum(counts)}


async def add_rates(
    report: Report, engine: AsyncLLMEngine, clients: Clients, args: argparse.Namespace
) -> None:
    report.section(f"{args.streams} streams of {args.tokens} tokens, {args.rounds} rounds")
    ways = ("in process", *CLIENTS)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    used: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-1, args.rounds):
        for way in ways:
            began, tokens = time.process_time(), args.tokens if turn >= 0 else 4
            if way == "in process":
                run = await in_process(engine, args.streams, tokens)
            else:
                run = await clients.do("rate", way, args.streams, tokens=tokens)
            if turn >= 0:  # the one before warms up
                rates[way].append(run["tokens"] / run["seconds"])
                used[way].append((time.process_time() - began) / run["tokens"])
    for way in ways:
        report.add(way, statistics.median(rates[way]), "tokens/s")
    for way in CLIENTS:
        shares = [a / b for a, b in zip(rates[way], rates["in process"], strict=True)]
        note = f"{100 * min(shares):.0f} to {100 * max(shares):.0f}"
        report.add(f"share kept over {way}", 100 * statistics.median(shares), "%", note)
        ratios = [a / b for a, b in zip(used[way], used["in process"], strict=True)]
        report.add(f"CPU time over {way}, to in process", statistics.median(ratios), "")


async def add_idle(report: Report, clients: Clients, connections: int) -> None:
    async def cpu() -> float:
        began = time.process_time()
        await asyncio.sleep(IDLE_SECONDS)
        return (time.process_time() - began) / IDLE_SECONDS

    report.section(f"{connections} idle WebSockets")
    before = resident_bytes()
    alone = await cpu()
    await clients.do("open", "WebSocket", connections)
    report.add("memory", (resident_bytes() - before) / 2**20, "MiB")
    report.add("CPU time", 100 * (await cpu() - alone), "%", f"of a core; without {alone:.2%}")


async def measure(report: Report, model: Path | None, args: argparse.Namespace) -> None:
    fields: dict[str, Any] = {"kv_cache_memory": "2GiB", "max_model_len": 2048} if model else {}
    async with AsyncLLMEngine(model, **fields) as engine:
        # Those that wait for their turn are neither too many nor closed.
        limits = ConnectionLimits(max_connections=4096, keep_alive=3600)
        async with HttpServer(create_app(engine), port=0, limits=limits) as server:
            clients = await Clients.start(server.port)
            try:
                await add_rates(report, engine, clients, args)
                report.section("first text, beyond the engine's time to first token")
                for way in CLIENTS:
                    added = await clients.do("first", way, 1, repeats=args.first)
                    worst = 1000 * percentile(added, 0.9)
                    report.add(way, statistics.median(added), "ms", f"p90 {worst:.2f} ms")
                if args.idle:
                    await add_idle(report, clients, args.idle)
            finally:
                await clients.close()


def checkpoint(shape: str | None, folder: Path) -> Path | None:
    if shape is None:
        return None
    from benchmarks.peer_checkpoint import make

    path = make(folder, shape)
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shape", choices=("0.6b", "tiny"), help="a random Qwen3 of this shape")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where it is kept")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first", type=int, default=100, help="first texts that are timed")
    parser.add_argument("--idle", type=int, default=1000, help="connections; 0 leaves that out")
    parser.add_argument("--uvloop", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.first, args.idle = 3, 20, 0
    model = checkpoint(args.shape, args.folder)
    factory, loop = None, "asyncio"
    if args.uvloop:
        import uvloop

        factory, loop = uvloop.new_event_loop, "uvloop"
    name = f"a random Qwen3 of {args.shape}" if args.shape else "the packaged model"
    report = Report(f"serving {name}", {"event loop": loop})
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(measure(report, model, args))
    report.write(args.json)


if __name__ == "__main__":
    main()
