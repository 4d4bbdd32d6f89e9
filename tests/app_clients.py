"""Clients of the ASGI application for tests: in process, and over a server of its own."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx

from asyncllm.serving import create_app
from asyncllm.serving.http_server import ConnectionLimits, HttpServer

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: "


@asynccontextmanager
async def app_client(engine, headers=None, **options):
    """An httpx client of the application over a started engine, without a server."""
    async with engine:
        transport = httpx.ASGITransport(create_app(engine, **options))
        url = "http://127.0.0.1"
        async with httpx.AsyncClient(transport=transport, base_url=url, headers=headers) as client:
            yield client


@asynccontextmanager
async def served_app(engine, limits=None, drain=1.0, **options):
    """A started engine behind a server on a free port."""
    async with engine:
        app = create_app(engine, **options)
        found = ConnectionLimits(**(limits or {}))
        async with HttpServer(app, port=0, limits=found, drain=drain) as server:
            yield server


class RawRequest:
    """One POST request of an ASGI application, whose answer is seen as it comes.

    Attributes:
        status, headers: None until the answer has begun.
        text: of the answer so far.
    """

    def __init__(self, app, body, path="/v1/chat/completions"):
        self._app = app
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._incoming = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": data})
        self._news = asyncio.Event()
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "headers": [(b"host", b"127.0.0.1")],
        }
        self.status = self.headers = None
        self.text = ""

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.text += message["body"].decode()
        self._news.set()

    async def __aenter__(self):
        self._task = asyncio.ensure_future(self._app(self._scope, self._incoming.get, self._send))
        return self

    async def __aexit__(self, *exc_info):
        async with asyncio.timeout(10):
            await self._task

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition(self.text):
                await self._news.wait()
                self._news.clear()

    async def whole(self):
        async with asyncio.timeout(10):
            await asyncio.shield(self._task)
        return self.text

    def disconnect(self):
        self._incoming.put_nowait({"type": "http.disconnect"})


def url_of(server):
    return f"http://127.0.0.1:{server.port}"


def events_of(text):
    """The data of server-sent events, "[DONE]" as it is; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        data = [line[6:] for line in block.split("\n") if line.startswith("data: ")]
        if data:
            (one,) = data
            found.append(one if one == "[DONE]" else json.loads(one))
    return found


def user(text):
    return [{"role": "user", "content": text}]


async def read_to_end(reader):
    async with asyncio.timeout(10):
        return await reader.read()


async def open_to(server, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data.encode() if isinstance(data, str) else data)
    return reader, writer


@asynccontextmanager
async def connected(server, data=b"", seconds=10):
    """Reader and writer of a connection that has sent ``data``; aborted in the end."""
    reader, writer = await open_to(server, data)
    try:
        async with asyncio.timeout(seconds):
            yield reader, writer
    finally:
        writer.transport.abort()


BODY = {"messages": user("Hi")}
