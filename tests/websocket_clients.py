"""A test client of the WebSocket server."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

from websockets.asyncio.client import connect

from asyncllm.serving.websocket import serve

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Client:
    """One connection; events are dicts."""

    def __init__(self, connection):
        self.connection = connection

    async def send(self, **event):
        await self.connection.send(json.dumps(event))

    async def create(self, prompt="1 2 3", **fields):
        await self.send(type="response.create", input=prompt, **fields)

    async def recv(self):
        return json.loads(await self.connection.recv())

    async def until(self, *kinds):
        """Every event up to the first of these kinds."""
        events = []
        while not events or events[-1]["type"] not in kinds:
            events.append(await self.recv())
        return events

    async def ask(self, prompt="1 2 3", **fields):
        """The response object that ends an answer, or the error."""
        await self.create(prompt, **fields)
        last = (await self.until(*ENDS))[-1]
        return last.get("response", last)


@asynccontextmanager
async def client_of(server, path="/v1/responses", **options):
    url = f"ws://127.0.0.1:{server.port}{path}"
    async with connect(url, compression=None, **options) as connection:
        yield Client(connection)


@asynccontextmanager
async def served(engine, **options):
    """A started engine, served on a free port."""
    options.setdefault("close_timeout", 1.0)
    async with engine, serve(engine, port=0, **options) as server:
        yield server


def text_of(response):
    return response["output"][0]["content"][0]["text"]


MALFORMED = [
    b"\x00\x01binary",
    "",
    "no json",
    '{"type": "response.create"',
    "[]",
    "null",
    "1",
    '"text"',
    "{}",
    '{"type": 5}',
    '{"type": {}}',
    '{"type": "response.steer"}',
    '{"type": "response.create", "input": NaN}',
    '{"type": "response.create", "input": "1", "temperature": 1e999}',
    '{"type": "response.create", "input": "\\ud800"}',
    '{"type": "response.create", "input": "1", "instructions": "\\udfff 2"}',
    '{"type": "response.create", "input": "1", "metadata": {"a": "\\ud800"}}',
    "[" * 5000,
    '{"type": ' * 5000,
    '{"type": "response.create", "input": ' + "9" * 5000 + "}",
    '{"type": "response.create", "input": [[[[]]]]}',
    '{"type": "response.create", "input": {"role": "user"}}',
    json.dumps({"type": "response.create", "input": "1", "x" * 5000: 1}),
    json.dumps({"type": "response.create", "model": "y" * 50_000}),
]
