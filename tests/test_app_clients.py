"""curl, other versions of websockets, and applications of other frameworks as hosts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from asyncllm.serving import create_app
from asyncllm.serving.http_server import HttpServer
from asyncllm.testing import fake_engine
from tests.app_clients import CHAT, events_of, served_app, url_of, user
from tests.idle import idle

BUILD = Path(__file__).parent.parent / "build"


async def run(*command, environment=None):
    """Exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, env=environment
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    return process.returncode, out.decode()


curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


async def ask(server, body, *options):
    url = url_of(server) + CHAT
    return await run(
        "curl", "-sS", "-H", "Content-Type: application/json", *options, "-d", body, url
    )


@curl
async def test_curl_asks_whole_and_in_events():
    body = {"messages": user("Hi")}
    async with served_app(fake_engine("Hello, friend!")) as server:
        status, whole = await ask(server, json.dumps(body))
        _, streamed = await ask(server, json.dumps({**body, "stream": True}), "-N", "-i")
        _, wrong = await ask(server, "{", "-w", "%{http_code}")
        _, head = await run("curl", "-sSI", url_of(server) + "/health")
    assert status == 0
    assert json.loads(whole)["choices"][0]["message"]["content"] == "Hello, friend!"
    fields, _, events = streamed.partition("\r\n\r\n")
    assert "content-type: text/event-stream" in fields
    *chunks, done = events_of(events)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert (text, done) == ("Hello, friend!", "[DONE]")
    assert wrong.endswith("}400")
    assert head.startswith("HTTP/1.1 200 ")


@curl
async def test_curl_sends_large_bodies(tmp_path):
    """Behind ``Expect: 100-continue``, which curl sends of its own accord."""
    file = tmp_path / "body"
    engine = fake_engine("Hello", num_blocks=2**16, max_model_len=2**20)
    async with served_app(engine) as server:
        found = []
        for size in (2 << 20, 5 << 20):
            file.write_text(json.dumps({"input": "x" * size}))
            found.append(await ask(server, f"@{file}", "-w", "%{http_code}"))
        file.write_text(json.dumps({"messages": user("x" * 50_000), "max_tokens": 1}))
        status, long = await ask(server, f"@{file}", "--tr-encoding")
        chunked = ("-T", file, "-X", "POST", "-H", "Transfer-Encoding: chunked")
        _, sent = await run("curl", "-sS", *chunked, url_of(server) + CHAT)
    (_, wrong), (_, large) = found
    assert wrong.endswith("400")
    assert "'input'" in wrong
    assert large.endswith("413")
    assert status == 0
    for answer in (long, sent):
        assert json.loads(answer)["choices"][0]["finish_reason"] == "length", answer[:500]


@curl
@pytest.mark.parametrize("stream", [True, False])
async def test_curl_goes_away_in_the_middle(stream):
    engine = fake_engine("x" * 3000, step_time=0.005)
    async with served_app(engine) as server:
        body = json.dumps({"messages": user("Hi"), "stream": stream})
        status, _ = await ask(server, body, "-N", "--max-time", "0.4")
        assert status == 28
        stats = await idle(engine)
        assert (stats.num_aborted, stats.num_finished) == (1, 0)


OLD_WEBSOCKETS = BUILD / "websockets-15"
OLD_CLIENT = """
import asyncio, json, sys, websockets
from websockets.asyncio.client import connect

async def main(port):
    async with connect(f"ws://127.0.0.1:{port}/v1/responses") as connection:
        text = ""
        previous = None
        for prompt in ("1 2", "3"):
            await connection.send(json.dumps({
                "type": "response.create", "input": prompt,
                "max_output_tokens": 4, "previous_response_id": previous}))
            async for message in connection:
                event = json.loads(message)
                if event["type"] == "response.incomplete":
                    break
            response = event["response"]
            previous = response["id"]
        print(json.dumps([websockets.__version__, response]))

asyncio.run(main(sys.argv[1]))
"""


def environment_of(version: str) -> dict[str, str]:
    """For a process with that version of websockets; skips where it is not there."""
    if version == "installed":
        return dict(os.environ)
    if not OLD_WEBSOCKETS.is_dir():
        pytest.skip(f"pip install --target {OLD_WEBSOCKETS.name} 'websockets>=15,<16' first")
    return os.environ | {"PYTHONPATH": str(OLD_WEBSOCKETS)}


@pytest.mark.parametrize("version", ["installed", "15"])
async def test_versions_of_websockets_as_clients(version):
    environment = environment_of(version)
    async with served_app(fake_engine("Hello, friend!")) as server:
        command = (sys.executable, "-c", OLD_CLIENT, server.port)
        status, out = await run(*command, environment=environment)
    used, response = json.loads(out)
    assert (status, used.startswith("15.")) == (0, version == "15")
    assert response["output"][0]["content"][0]["text"] == "Hell"


def in_starlette(app):
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount("/llm", app)])


def in_fastapi(app):
    fastapi = pytest.importorskip("fastapi")
    host = fastapi.FastAPI()
    host.mount("/llm", app)
    return host


def in_litestar(app):
    sys.path.append(str(BUILD / "litestar"))
    try:
        litestar = pytest.importorskip("litestar", reason=".ci/run installs it apart")
        handler = litestar.asgi("/llm", is_mount=True, copy_scope=True)(app.__call__)
        return litestar.Litestar([handler], openapi_config=None, logging_config=None)
    finally:
        sys.path.remove(str(BUILD / "litestar"))


@asynccontextmanager
async def hosted(host, **options):
    async with fake_engine("Hello") as engine:
        app = host(create_app(engine, **options))
        async with HttpServer(app, port=0, drain=1) as server:
            yield server


@pytest.mark.parametrize("host", [in_starlette, in_fastapi, in_litestar])
async def test_it_is_mounted(host):
    """HTTP, events, WebSockets, a page and errors, each below the path of the host."""
    page = {"/": ("text/html", b"<p>hello")}.get
    async with hosted(host, token="secret", page=page) as server:
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=url_of(server) + "/llm", headers=headers) as client:
            body = {"messages": user("Hi")}
            whole = (await client.post(CHAT, json=body)).json()
            assert whole["choices"][0]["message"]["content"] == "Hello"
            *_, done = events_of((await client.post(CHAT, json={**body, "stream": True})).text)
            assert done == "[DONE]"
            assert (await client.get("/v1/models/no/such")).json()["error"]["code"] == (
                "model_not_found"
            )
            missing = await client.get("/nothing")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
            assert (await client.get(CHAT)).status_code == 405
        async with httpx.AsyncClient(base_url=url_of(server) + "/llm") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/")).text == "<p>hello"
            assert (await client.get("/v1/models")).status_code == 401
        from websockets.asyncio.client import connect

        url = f"ws://127.0.0.1:{server.port}/llm/v1/responses"
        async with connect(url, additional_headers=headers) as socket:
            await socket.send(json.dumps({"type": "response.create", "input": "Hi"}))
            async for message in socket:
                if (event := json.loads(message))["type"] == "response.completed":
                    break
        assert event["response"]["output"][0]["content"][0]["text"] == "Hello"
