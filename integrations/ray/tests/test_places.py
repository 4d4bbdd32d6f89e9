"""Places among Serve's requests, deadlines, and replicas that hang."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asyncllm_ray import Client
from asyncllm_ray.wire import Call
from conftest import run_app
from ray import serve
from ray.serve.handle import DeploymentResponseGenerator
from replicas import replica_of, stats, until, until_idle

from asyncllm import DeadlineExceededError, SamplingParams, TokenStream

PROMPT = "Mia has a boat."
ENDLESS: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True}
PAUSED: dict[str, Any] = {"on_slow": "pause", "max_unread": 8, **ENDLESS}
NUM_PLACES = 3


@pytest.fixture(scope="module", name="small")
def make_small(cluster: Any) -> Iterator[Any]:
    """Handle of one replica with three places, and three in Serve's queue. No lease ends here.

    Serve counts a call of ``stats`` too, so that it waits while all places are taken.
    """
    limits = {"max_ongoing_requests": NUM_PLACES, "max_queued_requests": NUM_PLACES}
    yield run_app("small", serve_options=limits, lease=120.0)
    serve.delete("small")


@pytest.fixture(name="client")
def make_client(small: Any) -> Iterator[Client]:
    client = Client(small, heartbeat=0.3)
    yield client
    client.close()


@contextlib.asynccontextmanager
async def full_replica(client: Client, small: Any) -> AsyncIterator[None]:
    """All places of the replica taken, by paused streams."""
    held = [client.stream(PROMPT, **PAUSED) for _ in range(NUM_PLACES)]
    for stream in held:
        await asyncio.wait_for(anext(stream), 60)
    yield
    for stream in held:
        stream.close()
    await until_idle(small)


async def queue(client: Client, **options: Any) -> list[TokenStream]:
    """Streams that fill Serve's queue."""
    streams = [client.stream(PROMPT, **options) for _ in range(NUM_PLACES)]
    await asyncio.sleep(0.3)
    assert [stream._channel.stream_end for stream in streams] == [None] * NUM_PLACES
    assert [replica_of(stream) for stream in streams] == [None] * NUM_PLACES
    return streams


@pytest.mark.parametrize(
    ("on_slow", "max_unread"), [("coalesce", 4), ("pause", 160), ("abort", 160)]
)
async def test_an_ended_stream_without_a_reader_holds_no_place(
    client: Client, small: Any, on_slow: Any, max_unread: int
) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True, seed=3)
    streams = []

    async def is_answered() -> bool:
        return replica_of(streams[-1]) is not None

    for _ in range(2 * NUM_PLACES):
        streams.append(client.stream(PROMPT, params, on_slow=on_slow, max_unread=max_unread))
        await until(is_answered)
    await until_idle(small)
    other = await client.generate(PROMPT, params)
    for stream in streams:
        deltas = [delta async for delta in stream]
        assert max(len(delta.token_ids) for delta in deltas) <= max_unread
        assert (await stream).token_ids == other.token_ids


async def test_a_timeout_counts_in_serves_queue(client: Client, small: Any) -> None:
    async with full_replica(client, small):
        for _ in range(2):  # The second time there is room only if the first has left the queue.
            began = time.monotonic()
            for stream in await queue(client, timeout=0.8, max_tokens=4):
                with pytest.raises(DeadlineExceededError, match="waiting for a replica") as caught:
                    await asyncio.wait_for(stream.result(), 10)
                assert caught.value.partial is None
            assert 0.7 < time.monotonic() - began < 20


async def test_an_abort_leaves_serves_queue(client: Client, small: Any) -> None:
    async with full_replica(client, small):
        for _ in range(3):
            for stream in await queue(client, max_tokens=4):
                stream.abort()
                completion = await asyncio.wait_for(stream.result(), 10)
                assert completion.finish_reason == "abort"
                assert completion.token_ids == ()
        last = await queue(client, max_tokens=4, ignore_eos=True)
    assert [(await stream).finish_reason for stream in last] == ["length"] * NUM_PLACES


async def test_calls_aborted_on_their_way_leave_nothing(client: Client, small: Any) -> None:
    for number in range(60):
        streams = [client.stream(PROMPT, **PAUSED) for _ in range(NUM_PLACES - 1)]
        await asyncio.sleep(0.0005 * (number % 20))
        for stream in streams:
            stream.close()
        await asyncio.sleep(0.002)
    await until_idle(small)
    assert len((await client.generate(PROMPT, max_tokens=5, ignore_eos=True)).token_ids) == 5


async def test_an_abort_reaches_the_replica_if_ray_loses_its_cancel(
    client: Client, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeploymentResponseGenerator, "cancel", lambda response: None)
    for number in range(10):
        streams = [client.stream(PROMPT, **PAUSED) for _ in range(NUM_PLACES - 1)]
        await asyncio.sleep(0.001 * number)
        for stream in streams:
            stream.close()
        await until_idle(small)


async def test_a_replica_that_hangs_holds_no_reader_up(client: Client, small: Any) -> None:
    aborted = client.stream(PROMPT, **PAUSED)
    late = client.stream(PROMPT, timeout=1.2, **PAUSED)
    first = await anext(aborted), await anext(late)
    found = (await stats(small))[0]
    os.kill(found["pid"], signal.SIGSTOP)
    began = time.monotonic()
    try:
        unanswered = client.stream(PROMPT, timeout=0.4)
        aborted.abort()
        completion = await asyncio.wait_for(aborted.result(), 10)
        assert completion.finish_reason == "abort"
        assert completion.token_ids[: len(first[0].token_ids)] == first[0].token_ids
        assert completion.usage is not None
        assert completion.usage.completion_tokens == len(completion.token_ids)
        with pytest.raises(DeadlineExceededError) as caught:
            await asyncio.wait_for(unanswered.result(), 10)
        assert caught.value.partial is None
        with pytest.raises(DeadlineExceededError, match="did not answer") as caught:
            await asyncio.wait_for(late.result(), 10)
        partial = caught.value.partial
        assert partial is not None
        assert partial.text.startswith(first[1].text)
        assert partial.token_ids[: len(first[1].token_ids)] == first[1].token_ids
        assert time.monotonic() - began < 20
    finally:
        os.kill(found["pid"], signal.SIGCONT)
    await until_idle(small)
    assert len((await client.generate(PROMPT, max_tokens=5, ignore_eos=True)).token_ids) == 5


async def test_a_replica_that_answers_tells_what_it_has(client: Client, small: Any) -> None:
    stream = client.stream(PROMPT, timeout=0.5, **PAUSED)
    await anext(stream)
    with pytest.raises(DeadlineExceededError, match="while paused") as caught:
        await asyncio.sleep(0.8)
        await stream
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == tuple(
        stream._request.token_ids[stream._request.num_prompt_tokens :]
    )


async def test_two_clients_may_use_one_id(client: Client, small: Any) -> None:
    other = Client(small)
    streams = [one.stream(PROMPT, request_id="mine", **PAUSED) for one in (client, other)]
    for stream in streams:
        await anext(stream)
    assert (await stats(small))[0]["num_streams"] == 2
    completions = [await stream for stream in streams]
    assert [one.request_id for one in completions] == ["mine", "mine"]
    assert [len(one.token_ids) for one in completions] == [480, 480]
    other.close()


@pytest.mark.parametrize("max_unread", [1, 8])
async def test_on_slow_abort_spares_a_prompt_reader(client: Client, max_unread: int) -> None:
    completion = await client.generate(PROMPT, on_slow="abort", max_unread=max_unread, **ENDLESS)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 480


async def test_on_slow_abort_ends_a_late_reader(client: Client, small: Any) -> None:
    before = (await stats(small))[0]["num_aborted"]
    stream = client.stream(PROMPT, n=8, on_slow="abort", max_unread=8, **ENDLESS)
    await anext(stream)

    async def is_aborted() -> bool:
        found = (await stats(small))[0]
        return found["num_aborted"] > before and found["num_free_blocks"] == found["num_blocks"]

    await until(is_aborted)
    completion = await stream
    assert completion.finish_reason == "abort"
    assert completion.usage is not None
    assert 8 <= completion.usage.completion_tokens < 8 * 480


def test_a_call_is_sent_with_the_rest_of_its_timeout() -> None:
    call = Call("", PROMPT, SamplingParams(), {"timeout": 10.0}, 8, False)
    assert pickle.loads(pickle.dumps(call)).options["timeout"] == 10.0
    call.deadline = time.monotonic() + 4.0
    sent = pickle.loads(pickle.dumps(call))
    assert 3.5 < sent.options["timeout"] <= 4.0
    assert sent.deadline == math.inf
    call.deadline = time.monotonic() - 1.0
    assert pickle.loads(pickle.dumps(call)).options["timeout"] > 0
    assert call.options == {"timeout": 10.0}
