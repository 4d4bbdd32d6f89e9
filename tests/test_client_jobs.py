"""Jobs of clients: in the lines of their owners, and never begun for clients that have gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from types import SimpleNamespace

import pytest

from asyncllm.errors import ContextLengthExceededError
from asyncllm.serving import create_app, response_turn
from asyncllm.serving.client import ClientGoneError, call_while_connected
from asyncllm.testing import fake_engine
from tests.app_clients import CHAT, RawRequest, user
from tests.idle import held_up, until
from tests.test_worker_thread import blocked
from tests.websocket_clients import ENDS, client_of, served

PADDING = b" " * 5000
"""Makes a body long enough for the thread of long JSON."""

SMALL = PADDING + json.dumps({"messages": user("1"), "max_tokens": 1}).encode()


def num_free(app):
    return app._server_context.small_body_budget._num_free_bytes


def functions_of(thread):
    """What the waiting jobs would call; None for a job of a caller that is gone."""
    return [job.function for job in thread._jobs]


def json_worker(app):
    return app._server_context.json_worker


def text_thread(app):
    return app.engine._require_input_processor().prompts.tokenizer_threads.long_thread


JOBS = pytest.mark.parametrize(
    ("path", "body", "thread_of"),
    [
        (CHAT, SMALL, json_worker),
        ("/v1/responses", PADDING + b'{"input": "1"}', json_worker),
        ("/v1/completions", {"prompt": ["1"] * 64, "max_tokens": 1}, json_worker),
        ("/v1/completions", {"prompt": "1", "n": 64, "max_tokens": 1}, json_worker),
        ("/tokenize", {"prompt": "1 " * 5000}, text_thread),
        ("/detokenize", {"tokens": [65] * 5000}, text_thread),
    ],
)


@JOBS
async def test_a_job_waits_in_the_line_of_its_clients_token(path, body, thread_of):
    async with fake_engine("x", max_model_len=20_000, num_blocks=2000) as engine:
        app = create_app(engine, token=["a", "b"])
        thread = thread_of(app)
        go = blocked(thread)
        async with contextlib.AsyncExitStack() as stack:
            for number, token in enumerate(["a", "a", "b"]):
                request = RawRequest(app, body, path)
                request._scope["headers"].append((b"authorization", b"Bearer " + token.encode()))
                await stack.enter_async_context(request)
                await until(lambda number=number: len(thread._jobs) == number + 1)
            first, second, other = (job.owner for job in thread._jobs)
            go()
        assert first == second != other
        assert None not in (first, other)


async def test_a_text_waits_in_the_line_of_its_owner():
    async with fake_engine("x", max_model_len=9000, num_blocks=2000) as engine:
        thread = engine._submitter._tokenizer_threads.long_thread
        with held_up(engine):
            await until(lambda: not thread._jobs)
            streams = [engine.stream("a" * 5000, owner=owner) for owner in ("a", None, "a")]
            assert [job.owner for job in thread._jobs] == ["a", "a", None]
            for stream in streams:
                stream.abort()


@JOBS
async def test_a_job_whose_client_has_gone_does_not_begin(path, body, thread_of):
    async with fake_engine("x", max_model_len=20_000, num_blocks=2000) as engine:
        app = create_app(engine)
        num_free_before, thread = num_free(app), thread_of(app)
        go = blocked(thread)
        try:
            async with RawRequest(app, body, path) as request:
                await until(lambda: len(thread._jobs) == 1)
                request.disconnect()
                await request.whole()
            assert request.status is None
            assert functions_of(thread) == [None]
            assert num_free(app) == num_free_before
        finally:
            go()
        await until(lambda: thread._thread is None)
        assert engine.stats().num_requests == 0


async def test_a_continuation_whose_client_has_gone_is_not_submitted(monkeypatch):
    monkeypatch.setattr(response_turn, "CONVERT_PARSE_SPEED_RATIO", 1)
    async with fake_engine("x") as engine:
        app = create_app(engine)
        messages = [{"role": "user", "content": "1"}] * 40
        async with RawRequest(app, {"input": messages}, "/v1/responses") as request:
            previous = json.loads(await request.whole())["id"]
        thread, num_requests = json_worker(app), engine.stats().num_requests
        go = blocked(thread)
        body = {"input": "2", "previous_response_id": previous}
        try:
            async with RawRequest(app, body, "/v1/responses") as request:
                await until(lambda: len(thread._jobs) == 1)
                request.disconnect()
            assert functions_of(thread) == [None]
        finally:
            go()
        await until(lambda: thread._thread is None)
        assert engine.stats().num_requests == num_requests


CALL = {"type": "function_call", "call_id": "a", "name": "f"}


@pytest.mark.parametrize("is_socket", [False, True])
@pytest.mark.parametrize("num_calls", [1, 150])
async def test_a_history_counts_by_its_calls_arguments(num_calls, is_socket):
    """They are parsed anew for each response, which is as long as parsing a body of their length.
    The history is submitted in the line of its owner."""
    arguments = json.dumps({"a": [[[[]]]] * (600 // num_calls)})
    items = [*user("1"), *[CALL | {"arguments": arguments}] * num_calls]
    assert len(json.dumps(items)) > 4096 > num_calls * 730 // 32
    async with served(fake_engine("x"), token=["a", "b"]) as server:
        app, token = server._server.config.app, "Bearer a"
        thread = json_worker(app)
        async with client_of(server, additional_headers={"Authorization": token}) as client:
            first = await client.ask(items, truncate_prompt_tokens=8)
            fields = {"previous_response_id": first["id"], "truncate_prompt_tokens": 8}
            await until(lambda: thread._thread is None)
            go = blocked(thread)
            async with contextlib.AsyncExitStack() as stack:
                if is_socket:
                    await client.create("2", **fields)
                else:
                    request = RawRequest(app, {"input": "2", **fields}, "/v1/responses")
                    request._scope["headers"].append((b"authorization", token.encode()))
                    await stack.enter_async_context(request)
                stack.callback(go)
                await until(lambda: len(thread._jobs) == 1)
                assert next(iter(thread._jobs)).owner is not None
            if is_socket:
                last = (await client.until(*ENDS))[-1]["response"]
            else:
                last = json.loads(request.text)
            assert last["previous_response_id"] == first["id"]


async def test_the_message_of_a_lost_connection_is_not_read():
    engine = fake_engine("x")
    async with served(engine) as server:
        app = server._server.config.app
        thread = json_worker(app)
        go = blocked(thread)
        try:
            async with client_of(server) as client:
                await client.create(" " * 5000)
                await until(lambda: len(thread._jobs) == 1)
                client.connection.transport.abort()
                await until(lambda: functions_of(thread) == [None])
        finally:
            go()
        await until(lambda: thread._thread is None)
        assert engine.stats().num_requests == 0


async def test_a_call_for_a_client_that_has_gone_is_not_made():
    calls = []

    async def call():
        calls.append(1)

    async def wait_for_disconnect():
        pass

    client = SimpleNamespace(owner="", wait_for_disconnect=wait_for_disconnect)
    with pytest.raises(ClientGoneError):
        await call_while_connected(client, call)
    assert not calls


async def test_a_body_is_claimed_until_its_own_prompt_is_tokenised_or_its_client_gone():
    long = json.dumps({"messages": user("1 " * 2500), "max_tokens": 1}).encode()
    async with fake_engine("x", max_model_len=20_000, num_blocks=2000) as engine:
        app = create_app(engine)
        num_free_before = num_free(app)
        with held_up(engine):
            async with RawRequest(app, long) as gone, RawRequest(app, long) as stays:
                await until(lambda: engine.stats().num_requests == 2)
                # A body without a long text does not wait for the texts of others.
                async with RawRequest(app, SMALL) as small:
                    await small.whole()
                await until(lambda: num_free(app) == num_free_before - 2 * len(long))
                gone.disconnect()
                await gone.whole()
                await until(lambda: num_free(app) == num_free_before - len(long))
                await asyncio.sleep(0.05)
                assert num_free(app) == num_free_before - len(long)
                text_thread = engine._submitter._tokenizer_threads.long_thread
                assert len(text_thread._jobs) == 2
                stays.disconnect()
        await until(lambda: num_free(app) == num_free_before)


async def test_a_refused_prompt_is_freed_while_its_error_is_kept():
    async with fake_engine("x", max_model_len=4200) as engine:
        stream = engine.stream("a" * 5000)
        freed = weakref.ref(stream._group.raw_prompt)
        with pytest.raises(ContextLengthExceededError) as refused:
            await stream.result()
        await until(lambda: freed() is None)
        assert "has 5000 tokens" in str(refused.value)
