"""Clients of the benchmark of serving, in a process of their own: jobs in, results out, by lines.

They read bytes and look for what they need: the serving process is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

PATH = "/v1/responses"
PROMPT = "Tell me a story about a fox and a boat."
DELTA = b'{"type":"response.output_text.delta"'
END = b'{"type":"response.incomplete"'


def request(tokens: int, **more: Any) -> bytes:
    fields = {"input": PROMPT, "max_output_tokens": tokens, "ignore_eos": True, "store": False}
    return json.dumps({**fields, **more}).encode()


class EventClient:
    """One connection, whose answers are server-sent events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> EventClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))

    async def answer(self, tokens: int) -> tuple[float, dict[str, Any]]:
        """When the first text came, and the response object of the end."""
        body = request(tokens, stream=True)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        data, first = b"", None
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += await self._reader.read(1 << 20)
            if first is None and DELTA in data:
                first = time.perf_counter()
        assert first is not None, data
        begin = data.index(END)
        return first, json.loads(data[begin : data.index(b"\n\n", begin)])["response"]


class SocketClient:
    """One WebSocket."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, port: int) -> SocketClient:
        url = f"ws://127.0.0.1:{port}{PATH}"
        return cls(await connect(url, compression=None, ping_interval=None))

    async def answer(self, tokens: int) -> tuple[float, dict[str, Any]]:
        await self._connection.send(request(tokens, type="response.create"), text=True)
        first = None
        while not (data := await self._connection.recv(decode=False)).startswith(END):
            if first is None and data.startswith(DELTA):
                first = time.perf_counter()
        assert first is not None
        return first, json.loads(data)["response"]


CLIENTS = {"SSE": EventClient, "WebSocket": SocketClient}


async def rate(clients: list[Any], tokens: int) -> dict[str, float]:
    began = time.perf_counter()
    answers = await asyncio.gather(*(client.answer(tokens) for client in clients))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(r["usage"]["output_tokens"] for _, r in answers)}


async def first(client: Any, repeats: int) -> list[float]:
    """Seconds that each first text took beyond the engine's own time to first token."""
    added = []
    for _ in range(repeats):
        sent_at = time.perf_counter()
        came_at, response = await client.answer(4)
        added.append(came_at - sent_at - response["timings"]["ttft"])
    return added


async def main() -> None:
    port = int(sys.argv[1])
    loop = asyncio.get_running_loop()
    connections: dict[str, list[Any]] = {name: [] for name in CLIENTS}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        open_ = connections[job["over"]]
        # Connections are made before the first job and stay, as those of an application do.
        while len(open_) < job["connections"]:
            open_.append(await CLIENTS[job["over"]].open(port))
        result: Any = None
        if job["kind"] == "rate":
            result = await rate(open_[: job["connections"]], job["tokens"])
        elif job["kind"] == "first":
            result = await first(open_[0], job["repeats"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
