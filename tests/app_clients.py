"""Clients of the ASGI application for tests: in process, and over a server of its own."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import httpx

from asyncllm.serving import create_app
from asyncllm.serving.http_server import ConnectionLimits, HttpServer


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
