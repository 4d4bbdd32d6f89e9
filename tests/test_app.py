"""The ASGI application around its endpoints: access, bodies, limits, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import time
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm import InvalidRequestError
from asyncllm.metrics import EngineMetrics
from asyncllm.serving import create_app
from asyncllm.serving.http_protocol import _AnswerSender
from asyncllm.serving.protocol_error import ProtocolError
from asyncllm.serving.request_body import parse_json
from asyncllm.testing import fake_engine
from tests.app_clients import (
    BODY,
    CHAT,
    HEAD,
    RawRequest,
    app_client,
    connected,
    events_of,
    open_to,
    read_to_end,
    served_app,
    url_of,
    user,
)
from tests.fakes import connections_of
from tests.idle import idle, until
from tests.processes import python


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "; /v1/chat/completions is"),
        ("/v1/v1/models", "; /v1/models is"),
        ("/v1/tokenize", "; /tokenize is"),
        ("/v1/embeddings", "; the engine generates text, and has no embeddings"),
        (
            "/v1/messages",
            "; Anthropic's protocol is not spoken: /v1/chat/completions or /v1/respons",
        ),
        ("/docs", "; /openapi.json has all paths"),
        ("/v1", "; /openapi.json has all paths"),
        ("/", "; /openapi.json has all paths"),
    ],
)
async def test_unknown_path_error_lists_paths(path, hint):
    async with app_client(fake_engine("x")) as client:
        error = (await client.post(path, json=BODY)).json()["error"]
    assert error["message"].startswith(f"there is nothing at this path{hint}")


async def test_models_and_paths():
    async with app_client(fake_engine("x"), model_names=["a/b", "c"]) as client:
        models = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/a/b/")).json()
        answers = [
            await client.get("/v1/models/gpt"),
            await client.get("/nothing"),
            await client.get(CHAT),
            await client.put("/health"),
        ]
        named = (await client.post(CHAT, json={**BODY, "model": "c"})).json()
        first = (await client.post(CHAT, json=BODY)).json()
    assert 'expected "a/b" or "c", or none' in answers[0].json()["error"]["message"].replace(
        "'", '"'
    )
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["a/b", "c"]
    assert one == models["data"][0]
    codes = ["model_not_found", "not_found", "method_not_allowed", "method_not_allowed"]
    assert [answer.json()["error"]["code"] for answer in answers] == codes
    assert [answer.status_code for answer in answers] == [404, 404, 405, 405]
    assert answers[2].headers["allow"] == "POST"
    assert (named["model"], first["model"]) == ("c", "a/b")


async def test_health_tells_strangers_the_state_alone():
    secret = RuntimeError("the device at 10.0.0.7 failed")
    engine = fake_engine("x" * 50, fail_at={2: secret})
    transport = httpx.ASGITransport(create_app(engine, token="secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def look():
            paths = ("/health", "/health/ready", "/health/live")
            answers = [await client.get(path) for path in paths]
            assert len({answer.text for answer in answers}) == 1
            return [answer.status_code for answer in answers], answers[0].json()

        new = await look()
        early = await client.post(CHAT, json=BODY, headers={"authorization": "Bearer secret"})
        async with engine:
            running = await look()
            failed = await client.post(CHAT, json=BODY, headers={"authorization": "Bearer secret"})
            dead = await look()
        closed = await look()
    assert new == ([503, 503, 200], {"status": "new", "live": True, "ready": False})
    assert running == ([200, 200, 200], {"status": "running", "live": True, "ready": True})
    assert dead == ([503, 503, 503], {"status": "dead", "live": False, "ready": False})
    assert closed[1]["status"] == "closed"
    assert (early.status_code, early.json()["error"]["code"]) == (503, "server_shutting_down")
    assert failed.status_code == 503
    assert failed.json()["error"]["message"] == "the engine has failed"


async def test_metrics_are_prometheus():
    engine = fake_engine("Hello")
    async with app_client(engine) as client:
        await client.post(CHAT, json=BODY)
        answer = await client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    tokens = families["asyncllm:generation_tokens"].samples
    assert [sample.value for sample in tokens] == [6.0]
    assert answer.headers["content-type"].startswith("text/plain; version=")
    with EngineMetrics(engine, labels={"zone": "a"}) as metrics:
        transport = httpx.ASGITransport(create_app(engine, metrics=metrics))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            assert 'zone="a"' in (await client.get("/metrics")).text


async def test_waiting_scrapes_share_a_rendering_and_leave_loop_time(monkeypatch):
    spans, render = [], EngineMetrics.render

    def slow_render(self):
        began = time.monotonic()
        time.sleep(0.02)
        text = render(self)
        spans.append((began, time.monotonic()))
        return text

    monkeypatch.setattr(EngineMetrics, "render", slow_render)
    async with app_client(fake_engine("Hello")) as client:
        for count in (1, 2):
            await client.post(CHAT, json=BODY)
            answers = await asyncio.gather(*(client.get("/metrics") for _ in range(40)))
            for answer in answers:
                families = text_string_to_metric_families(answer.text)
                (tokens,) = [one for one in families if one.name == "asyncllm:generation_tokens"]
                assert [sample.value for sample in tokens.samples] == [6.0 * count]
    # Of 40 scrapes, some may ask before the first is rendered, and the others while it is.
    assert 2 <= len(spans) <= 4
    for (began, ended), (next_began, _) in itertools.pairwise(spans):
        assert next_began - ended >= 4 * (ended - began) - 0.001


async def test_application_starts_only_a_new_engine():
    async def live(engine):
        """States before the application's start, behind it, and behind its end."""
        incoming, sent = asyncio.Queue(), asyncio.Queue()
        incoming.put_nowait({"type": "lifespan.startup"})
        states = [engine.state]
        running = asyncio.ensure_future(
            create_app(engine)({"type": "lifespan"}, incoming.get, sent.put)
        )
        assert (await sent.get())["type"] == "lifespan.startup.complete"
        states.append(engine.state)
        incoming.put_nowait({"type": "lifespan.shutdown"})
        await running
        return [*states, engine.state]

    assert await live(fake_engine("x")) == ["new", "running", "closed"]
    async with fake_engine("x") as engine:
        assert await live(engine) == ["running"] * 3


async def test_app_is_mounted_in_application():
    fastapi = pytest.importorskip("fastapi")
    async with fake_engine("Hello") as engine:
        app = fastapi.FastAPI()
        app.mount("/llm", create_app(engine, token="secret"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/llm") as client:
            headers = {"authorization": "Bearer secret"}
            answer = await client.post(CHAT, json=BODY, headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello"
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/nothing", headers=headers)).json()["error"]["code"]
            assert (await client.get(CHAT, headers=headers)).status_code == 405


@pytest.mark.parametrize(
    "options",
    [
        {"token": ""},
        {"token": []},
        {"token": [5]},
        {"origins": "https://app.example"},
        {"origins": [5]},
        {"model_names": "x"},
        {"timeout": -1},
        {"ping_interval": 0},
        {"max_body_size": 0},
        {"body_timeout": float("nan")},
        {"max_frame_rate": 0},
        {"max_stored_responses": -1},
        {"max_stored_size": 2**80},
    ],
)
async def test_invalid_arguments_of_the_application(options):
    (name,) = options
    with pytest.raises(InvalidRequestError) as error:
        create_app(fake_engine("x"), **options)
    assert error.value.param == name


async def test_tokens_and_origins():
    options = {"token": ["one", "two-ü"], "origins": ["https://app.example"]}
    async with app_client(fake_engine("x"), **options) as client:

        async def status(method="GET", path="/v1/models", **headers):
            return (await client.request(method, path, headers=headers)).status_code

        assert await status() == 401
        for wrong in ("Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer one x"):
            assert await status(authorization=wrong) == 401
        for path in (CHAT, "/v1/completions", "/v1/responses", "/tokenize"):
            assert await status("POST", path) == 401
        assert await status(path="/metrics") == 401
        for right in ("Bearer one", "bearer one", "Bearer two-ü".encode()):
            assert await status(authorization=right) == 200
        right = {"authorization": "Bearer one"}
        assert await status(**right, origin="https://evil.example") == 403
        assert await status(**right, origin="https://app.example") == 200
        refused = await client.get("/v1/models")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        twice = [("authorization", "Bearer one"), ("authorization", "Bearer x")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 400
        asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
        preflight = await client.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        asked["origin"] = "https://evil.example"
        assert (await client.options(CHAT, headers=asked)).status_code == 400


async def test_a_page_is_shown_to_all_and_hides_nothing():
    def page(path):
        return ("text/plain", path.encode())

    async with app_client(fake_engine("x"), token="secret", page=page) as client:
        for path, shown in (("/", "/"), ("/a/b.js?c", "/a/b.js"), ("/v1/nothing/", "/v1/nothing")):
            answer = await client.get(path)
            assert (answer.status_code, answer.text) == (200, shown)
        head = await client.head("/a")
        assert (head.status_code, head.headers["content-length"]) == (200, "2")
        for path in ("/v1/models", "/v1/models/x", "/metrics", "/openapi.json", CHAT):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/a")).status_code == 401
        assert (await client.get("/health")).json()["ready"] is True


@pytest.mark.parametrize("origin", ["http://[", "//[", "http://a]b", "http://[::1", "\u00fc"])
async def test_an_odd_origin_is_refused(origin):
    async with app_client(fake_engine("x")) as client:
        answer = await client.get("/v1/models", headers={"origin": origin.encode()})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


async def test_other_origins_are_refused_without_cors_headers():
    async with app_client(fake_engine("x"), local=True) as client:
        other = await client.post(CHAT, json=BODY, headers={"origin": "https://evil.example"})
        same = await client.post(CHAT, json=BODY, headers={"origin": "http://127.0.0.1"})
        named = await client.post(CHAT, json=BODY, headers={"host": "evil.example"})
    assert [other.status_code, same.status_code, named.status_code] == [403, 200, 403]
    assert other.json()["error"]["code"] == "forbidden"
    for answer in (other, same, named):
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_a_line_of_the_log_for_each_request(caplog):
    caplog.set_level(logging.INFO, "asyncllm.serving.access")
    async with app_client(fake_engine("x")) as client:
        answer = await client.post(CHAT, json=BODY)
        await client.get("/v1/models/x%0aforged")
    first, second = (record.getMessage() for record in caplog.records)
    assert f"POST {CHAT} 200 " in first
    assert first.endswith(answer.headers["x-request-id"])
    assert "\n" not in second
    assert "/v1/models/x%0aforged 404" in second


BODIES = [
    (b"", "invalid_json"),
    (b"no json", "invalid_json"),
    (b"[]", "invalid_json"),
    (b"null", "invalid_json"),
    (b'"text"', "invalid_json"),
    (b'{"messages": [', "invalid_json"),
    (b"\xff\xfe{}", "invalid_json"),
    (b'{"messages": "\xff"}', "invalid_json"),
    (b'{"messages": "\\ud800"}', "invalid_json"),
    (b'{"temperature": NaN}', "invalid_json"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "invalid_json"),
    (
        b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": 1e999}}]}',
        "invalid_json",
    ),
    (b'{"messages": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"a":' * 50_000, "invalid_json"),
    (b'{"messages": [' + b"[]," * 200_000 + b"[]]}", "request_too_large"),
    (json.dumps({"messages": user("x"), "y" * 50_000: 1}).encode(), "unknown_parameter"),
    (json.dumps({str(i): i for i in range(100_000)}).encode(), "unknown_parameter"),
]


def test_numbers_beyond_a_float_are_refused_and_large_ones_are_not():
    large = {"a": [1e308, 1e308, {"b": [[-1.7e308], "1e999", 10**400]}], "c": 2.5}
    assert parse_json(json.dumps(large)) == large
    for number in ("1e999", "-1e999", "9" * 400 + ".5"):
        for body in ('{"a": %s}', '{"a": [{"b": [1e308, [%s, -1e308]]}]}', '{"a": [1e999, %s]}'):
            with pytest.raises(ProtocolError, match=r"beyond 1\.8e308") as caught:
                parse_json(body % number)
            assert caught.value.code == "invalid_json"


async def test_invalid_bodies_are_refused():
    engine = fake_engine("x")
    async with app_client(engine) as client:
        for path in (CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
            for body, code in BODIES:
                answer = await client.post(path, content=body)
                assert answer.status_code == (413 if code == "request_too_large" else 400)
                if path == CHAT:
                    assert answer.json()["error"]["code"] == code, body[:50]
                assert len(answer.content) < 1000
        assert engine.stats().num_requests == 0


async def test_bodies_are_bounded():
    async with app_client(fake_engine("x"), max_body_size=1000) as client:
        for content in (b"x" * 1001, b"x" * 100_000):
            answer = await client.post(CHAT, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                413,
                "request_too_large",
            )

        async def parts():
            for _ in range(100):
                yield b"x" * 100

        assert (await client.post(CHAT, content=parts())).status_code == 413
        forged = await client.post(CHAT, content=b"{}", headers={"content-length": "9" * 30})
        assert forged.status_code == 413


async def test_a_full_queue_says_when_to_come_back():
    engine = fake_engine("x" * 500, step_time=0.002, max_num_seqs=1, max_queued_requests=1)
    async with engine:
        app = create_app(engine)
        async with contextlib.AsyncExitStack() as stack:
            requests = []
            for number in range(2):
                requests.append(await stack.enter_async_context(RawRequest(app, BODY)))
                while engine.stats().num_requests <= number or not engine.stats().num_running:
                    await asyncio.sleep(0.001)
            async with RawRequest(app, BODY) as refused:
                error = json.loads(await refused.whole())["error"]
            for request in requests:
                request.disconnect()
        assert (refused.status, error["code"]) == (429, "server_overloaded")
        assert error["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        await idle(engine)


async def test_an_answer_that_takes_too_long():
    engine = fake_engine("x" * 500, step_time=0.01)
    async with app_client(engine, timeout=0.1) as client:
        whole = await client.post(CHAT, json=BODY)
        streamed = await client.post(CHAT, json={**BODY, "stream": True})
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert events_of(streamed.text)[-1]["error"]["code"] == "deadline_exceeded"


async def test_a_failure_of_ours_is_told_without_details(caplog):
    engine = fake_engine("x")
    async with app_client(engine) as client:
        engine._input_processor.make_chat_submission = None
        with caplog.at_level(logging.ERROR, "asyncllm.serving.app"):
            answer = await client.post(CHAT, json=BODY)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")
    assert "TypeError" in caplog.text


async def test_connections_that_dawdle_are_closed():
    limits = {"header_timeout": 0.2, "send_timeout": 0.3}
    async with served_app(fake_engine("x"), limits=limits, body_timeout=0.2) as server:
        silent = await open_to(server)
        header = await open_to(server, "POST / HTTP/1.1\r\nHost: x\r\nX: ")
        body = await open_to(server, HEAD + "100\r\n\r\n{")
        assert await read_to_end(silent[0]) == await read_to_end(header[0]) == b""
        answer = await read_to_end(body[0])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer
        for _, writer in (silent, header, body):
            writer.close()
        async with httpx.AsyncClient(base_url=url_of(server)) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_non_reading_client_is_dropped():
    engine = fake_engine("x" * 19_000, num_blocks=2000, max_model_len=20_000, step_time=0.0005)
    options = {"limits": {"send_timeout": 0.2}, "max_frame_rate": 1e9}
    async with served_app(engine, **options) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(sock.connect, ("127.0.0.1", server.port))
            while not (connections := connections_of(server)):
                await asyncio.sleep(0.001)
            (connection,) = connections
            served = connection.transport.get_extra_info("socket")
            served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            body = json.dumps({**BODY, "stream": True})
            sock.sendall(f"{HEAD}{len(body)}\r\n\r\n{body}".encode())
            await until(lambda: engine.stats().num_requests)
            stats = await idle(engine)
        assert (stats.num_aborted, stats.num_finished) == (1, 0)


async def test_a_half_closed_connection_is_gone():
    engine, body = fake_engine("x" * 3000, step_time=0.002), json.dumps(BODY)
    async with served_app(engine) as server:
        async with connected(server, f"{HEAD}{len(body)}\r\n\r\n{body}") as (_, writer):
            await until(lambda: engine.stats().num_running)
            writer.write_eof()
            stats = await idle(engine)
            assert (stats.num_aborted, stats.num_finished) == (1, 0)


async def test_more_connections_than_there_may_be():
    engine, body = fake_engine("x" * 3000, step_time=0.01), json.dumps({**BODY, "stream": True})
    async with served_app(engine, limits={"max_connections": 2}) as server:
        asked = f"{HEAD}{len(body)}\r\n\r\n{body}"
        held = [await open_to(server, asked) for _ in range(2)]
        for reader, _ in held:
            assert b" 200 " in await reader.readline()
        async with httpx.AsyncClient(base_url=url_of(server)) as client:
            assert (await client.get("/health")).status_code == 503
        extra = [await open_to(server, f"{HEAD}100\r\n\r\n{{") for _ in range(8)]
        for reader, _ in extra:
            async with asyncio.timeout(10):
                assert b" 503 " in await reader.readline()
        for _, writer in held + extra:
            writer.transport.abort()
        async with asyncio.timeout(10), httpx.AsyncClient(base_url=url_of(server)) as client:
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_a_server_that_closes_lets_answers_end():
    engine = fake_engine("x" * 100, step_time=0.002)
    async with engine:
        from asyncllm.serving.http_server import HttpServer

        async with HttpServer(create_app(engine), port=0, drain=10) as server:
            async with httpx.AsyncClient(base_url=url_of(server)) as client:
                asking = asyncio.ensure_future(client.post(CHAT, json=BODY))
                await until(lambda: engine.stats().num_running)
                await server.aclose()
                answer = await asking
    assert answer.json()["choices"][0]["message"]["content"] == "x" * 100


async def test_events_are_sent_at_once():
    """Without Nagle's algorithm, which lets the second wait for the client's ACK of the first."""
    async with served_app(fake_engine("x")) as server:
        request = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        async with connected(server, request) as (reader, _):
            assert (await reader.readline()).split()[1] == b"200"
            (connection,) = connections_of(server)
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("headers", "parts", "expected"),
    [
        ([], [b"ab", b"", b"c"], [b"<head>2\r\nab\r\n", b"1\r\nc\r\n", b"<end>"]),
        ([(b"content-length", b"1")], [b"a"], [b"<head>a", b"<end>"]),
        ([], [], [b"<head><end>"]),
    ],
)
async def test_the_head_is_sent_with_the_first_part(headers, parts, expected):
    sent = []
    scope = {"http_version": "1.1", "method": "GET"}
    cycle = SimpleNamespace(scope=scope, disconnected=False, more_body=False)
    transport = SimpleNamespace(write=sent.append, is_closing=lambda: "asked of the transport")

    async def send(message):  # as uvicorn's
        if message["type"] == "http.response.start":
            cycle.transport.write(b"<head>")
        else:
            cycle.transport.write(message["body"] if message["more_body"] else b"<end>")

    flow = SimpleNamespace(write_paused=False)
    protocol = SimpleNamespace(cycle=cycle, flow=flow, transport=transport, linger=None)
    answer = _AnswerSender(protocol, send)
    await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
    assert sent == []
    for part in parts:
        await answer.send({"type": "http.response.body", "body": part, "more_body": True})
    await answer.send({"type": "http.response.body", "body": b"", "more_body": False})
    assert sent == expected
    assert cycle.transport.is_closing() == "asked of the transport"


def test_importing_the_application_loads_no_torch():
    code = "import sys, asyncllm.serving; print({'torch', 'transformers'} & {*sys.modules})"
    assert python("-c", code, check=True).stdout == "set()\n"
