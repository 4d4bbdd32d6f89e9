"""OpenAI's protocol in front of two engines, through Serve's proxy."""

from __future__ import annotations

import asyncio
import json
import re
import socket
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


async def test_a_token_is_needed(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/completions", json={"model": "mia", "prompt": "Mia"})
    assert answer.status_code == 401


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
