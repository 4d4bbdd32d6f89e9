"""OpenAI's protocol in front of two engines, through Serve's proxy."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from asyncllm_ray import openai_app, run
from conftest import ENGINE, REPLICA
from ray import serve
from replicas import stats, until, until_idle

from asyncllm import LLM, InvalidRequestError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(cluster: Any) -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    serve.shutdown()
    app = openai_app(
        **ENGINE,
        max_queued_requests=4,
        served_model_name="mia",
        app_options={"token": "secret"},
        engine_options={"serve_options": {"num_replicas": 1, "ray_actor_options": REPLICA}},
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(InvalidRequestError, match=str(port)) as caught:
            run(app, "openai", route_prefix="/", http_options={"host": "127.0.0.1", "port": port})
        assert caught.value.param == "http_options"
    run(app, "openai", route_prefix="/", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture
def engines() -> Any:
    return serve.get_deployment_handle("asyncllm", "openai")


@pytest.fixture
async def http(url: str) -> Any:
    headers = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        yield http


async def test_completions_are_the_engines(http: Any, llm: LLM) -> None:
    body = {"model": "mia", "prompt": "Mia has", "max_tokens": 20, "temperature": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert (
        answer["choices"][0]["text"] == llm.generate("Mia has", max_tokens=20, temperature=0).text
    )
    assert answer["usage"]["completion_tokens"] == 20


async def test_chat_streams(http: Any, llm: LLM) -> None:
    messages = [{"role": "user", "content": "A boat?"}]
    body = {"model": "mia", "messages": messages, "max_tokens": 40, "temperature": 0}
    text, last = "", None
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
                last = choice["finish_reason"] or last
    expected = llm.chat(messages, max_tokens=40, temperature=0)
    assert (text, last) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": "Mia", "temperature": -1}, 400, None),
        ({"prompt": list(range(600))}, 400, "context_length_exceeded"),
        ({"prompt": "Mia", "model": "other"}, 404, "model_not_found"),
        ({"prompt": "Mia", "logit_bias": {"99999": 1}}, 400, None),
    ],
)
async def test_errors_have_their_status(http: Any, body: Any, status: int, code: Any) -> None:
    answer = await http.post("/v1/completions", json={"model": "mia", "max_tokens": 3} | body)
    assert answer.status_code == status
    assert code is None or answer.json()["error"]["code"] == code


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: mia\r\nConnection: close\r\n"
AUTH = b"Authorization: Bearer secret\r\n"
LONG = b"a" * 60_000_000
LENGTH = b"Content-Length: %d\r\n\r\n" % len(LONG)
CHUNKS = b"".join(b"10000\r\n" + b"a" * 65536 + b"\r\n" for _ in range(900)) + b"0\r\n\r\n"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 60)


def send_raw(url: str, data: bytes) -> bytes:
    """Send bytes to the proxy, all of them, and read the answer to its end."""
    with connect(url) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (AUTH + LENGTH + LONG, 413, b"body: is too long, expected at most 4194304 bytes"),
        (AUTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS, 413, b"at most 4194304 bytes"),
        (LENGTH + LONG, 401, b"error"),
        (AUTH + LENGTH, 413, b"at most 4194304 bytes"),
        (AUTH + b'Content-Length: 9\r\n\r\n{"prompt"', 400, b"expected a JSON object"),
        (AUTH + b"Content-Length: -5\r\n\r\n{}", 400, b"Invalid HTTP request"),
        (AUTH + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, b"Invalid HTTP request"),
    ],
    ids=["long", "chunks", "no token", "no body", "JSON", "length", "chunk"],
)
async def test_refused_bodies_have_an_answer(
    url: str, engines: Any, data: bytes, status: int, text: bytes
) -> None:
    for _ in range(3):
        answer = await asyncio.to_thread(send_raw, url, HEAD + data)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert text in answer
    await until_idle(engines)


async def test_a_body_of_60_mb_is_refused_by_its_length(http: Any) -> None:
    answer = await http.post("/v1/completions", content=LONG)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_clients_that_vanish_within_a_body(url: str, http: Any, engines: Any) -> None:
    for _ in range(20):
        with connect(url) as connection:
            connection.sendall(HEAD + AUTH + b'Content-Length: 5000\r\n\r\n{"prompt": "')
    answer = await http.post("/v1/completions", json={"prompt": "Mia", "max_tokens": 3})
    assert answer.status_code == 200
    await until_idle(engines)


async def test_a_token_is_needed(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/completions", json={"model": "mia", "prompt": "Mia"})
    assert answer.status_code == 401


async def test_a_stream_whose_client_is_reset_aborts(url: str, engines: Any) -> None:
    body = b'{"prompt": "Mia", "max_tokens": 480, "n": 4, "stream": true, "ignore_eos": true}'
    before = (await stats(engines))[0]["num_aborted"]
    with connect(url) as connection:
        connection.sendall(HEAD + AUTH + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await asyncio.to_thread(connection.recv, 100)
        # Closing sends a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def is_aborted() -> bool:
        return (await stats(engines))[0]["num_aborted"] == before + 1

    await until(is_aborted)
    await until_idle(engines)


async def test_a_client_that_hangs_up_aborts(http: Any, engines: Any) -> None:
    body = {"model": "mia", "prompt": "Mia", "max_tokens": 480, "n": 4, "stream": True}
    before = (await stats(engines))[0]["num_aborted"]
    async with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        async for _ in answer.aiter_lines():
            break

    async def is_aborted() -> bool:
        return (await stats(engines))[0]["num_aborted"] == before + 1

    await until(is_aborted)
    await until_idle(engines)


async def test_full_queues_are_said(http: Any, engines: Any) -> None:
    body = {"model": "mia", "prompt": "Mia", "max_tokens": 400, "ignore_eos": True}
    answers = await asyncio.gather(*[http.post("/v1/completions", json=body) for _ in range(40)])
    found = {answer.status_code for answer in answers}
    assert found == {200, 429}
    full = [answer for answer in answers if answer.status_code == 429]
    assert all(float(answer.headers["retry-after"]) > 0 for answer in full)
    await until_idle(engines)


async def test_tokens_health_and_stats(http: Any, llm: LLM, engines: Any) -> None:
    found = (await http.post("/tokenize", json={"prompt": "Mia has a boat"})).json()
    assert found["tokens"] == llm.tokenize("Mia has a boat")
    assert (await http.get("/health")).status_code == 200
    assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["mia"]

    await http.post("/v1/completions", json={"prompt": "Mia", "max_tokens": 3})

    async def has_tokens() -> bool:
        text = (await http.get("/metrics")).text
        found = re.search(r"^asyncllm:generation_tokens_total{.*} (\S+)$", text, re.MULTILINE)
        assert found is not None, text[:2000]
        return float(found[1]) > 0

    await until(has_tokens)


def test_options_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        openai_app(app_options={"page": socket.socket()})
    assert caught.value.param == "page"
