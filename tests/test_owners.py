"""Fairness between owners of requests, in the engine and behind a server."""

from __future__ import annotations

import asyncio
import hashlib

import anyio
import pytest

from asyncllm import LLM, EngineOverloadedError, RequestError, beam_search
from asyncllm.testing import fake_engine
from tests.app_clients import CHAT, app_client, user
from tests.fakes import entered, fake
from tests.refusals import refused
from tests.websocket_clients import client_of, served


class Owners:
    """Observer that notes the owners of requests as they are submitted and as they end."""

    def __init__(self):
        self.submitted, self.ended = [], []

    def on_submit(self, request, submission):
        self.submitted.append(request.owner)

    def on_finish(self, request, usage, error):
        self.ended.append(request.owner)


async def test_one_owners_crowd_does_not_delay_another():
    rig = fake(max_num_seqs=4, num_blocks=257, record=True)
    async with rig.engine() as engine:
        await engine.pause()
        crowd = [engine.stream([1], max_tokens=8, owner="a") for _ in range(40)]
        late = [engine.stream([2], max_tokens=8, owner="b") for _ in range(3)]
        late.append(engine.stream([3], max_tokens=8))
        await engine.resume()
        for stream in (*crowd, *late):
            await stream.result()
    assert entered(rig) == [1, 2, 3, 1, 2, 1, 2, *[1] * 37]


async def test_queue_filled_by_one_owner_takes_another():
    async with fake(max_num_seqs=1).engine(max_queued_requests=4) as engine:
        await engine.pause()
        crowd = [engine.stream([1], max_tokens=2, owner="a") for _ in range(4)]
        with pytest.raises(EngineOverloadedError):
            engine.stream([1], max_tokens=2, owner="a")
        late = [engine.stream([2], max_tokens=2, owner="b") for _ in range(2)]
        with pytest.raises(EngineOverloadedError):
            engine.stream([2], max_tokens=2, owner="b")
        await engine.resume()
        for stream in (*crowd, *late):
            assert (await stream.result()).finish_reason == "length"


async def test_each_output_counts():
    rig = fake(max_num_seqs=4, num_blocks=257, record=True)
    async with rig.engine() as engine:
        await engine.pause()
        streams = [engine.stream([1], max_tokens=8, n=16, owner="a")]
        streams += [engine.stream([2], max_tokens=8, owner="b") for _ in range(4)]
        await engine.resume()
        for stream in streams:
            await stream.result()
    assert entered(rig)[:8] == [1, 2, 1, 2, 1, 2, 1, 2]


async def test_owners_preempt_no_running_request():
    rig = fake(max_num_seqs=2, step_time=0.001)
    async with rig.engine() as engine:
        first = [engine.stream([1], max_tokens=60, owner="a") for _ in range(2)]
        await anext(first[1])
        other = await engine.generate([2], max_tokens=2, owner="b")
        assert first[0].finish_reason is None
        assert list(other.token_ids) == rig.executor.reference([2], 2)
        for stream in first:
            assert len((await stream.result()).token_ids) == 60
        assert engine.stats().num_preemptions == 0


async def test_every_way_to_ask_takes_an_owner():
    engine, seen = fake_engine("Yes."), Owners()
    engine.add_observer(seen)
    async with engine:
        await engine.generate("x", owner="a")
        await engine.chat(user("x"), owner="b").result()
        await (await engine.submit("x", owner="c")).result()
        await (await engine.submit(user("x"), owner="d")).result()
        llm = LLM(engine=engine)
        await anyio.to_thread.run_sync(lambda: llm.generate(["x", "y"], owner="e"))
        await engine.generate("x")
        with pytest.raises(RequestError, match="no log-probabilities"):
            await beam_search(engine, "x", 1, max_tokens=1, owner="f")
    assert seen.submitted == ["a", "b", "c", "d", "e", "e", None, "f"]


@pytest.mark.parametrize("owner", ["", "x" * 257, 7, "\ud800", b"x"])
async def test_non_text_or_long_owner_is_refused(owner):
    async with fake_engine("x") as engine:
        with refused("owner", r"^owner="):
            engine.stream("x", owner=owner)
        assert (await engine.generate("x", owner="x" * 256)).text == "x"


def digest(token):
    return hashlib.sha256(token.encode()).hexdigest()


def bearer(token):
    return {"authorization": f"Bearer {token}"}


async def test_every_endpoint_asks_for_its_bearer():
    engine, seen = fake_engine("Yes."), Owners()
    engine.add_observer(seen)
    async with app_client(engine, token=["one", "two"]) as client:
        for token in ("one", "two"):
            for path, body in (
                (CHAT, {"messages": user("x")}),
                ("/v1/completions", {"prompt": ["x", "y"]}),
                ("/v1/responses", {"input": "x"}),
            ):
                answer = await client.post(path, json=body, headers=bearer(token))
                assert answer.status_code == 200, answer.text
    assert seen.submitted == [digest("one")] * 4 + [digest("two")] * 4


async def test_websocket_without_bearer_has_no_owner():
    for options, headers, owner in (
        ({"token": "one"}, bearer("one"), digest("one")),
        ({}, bearer("any"), None),
        ({}, {}, None),
    ):
        engine, seen = fake_engine("Yes."), Owners()
        engine.add_observer(seen)
        async with (
            served(engine, **options) as server,
            client_of(server, additional_headers=headers) as client,
        ):
            await client.ask("x")
        assert seen.submitted == [owner]


async def test_two_bearers_take_turns():
    engine, seen = fake_engine("Yes.", max_num_seqs=1), Owners()
    engine.add_observer(seen)
    async with app_client(engine, token=["one", "two"]) as client:
        await engine.pause()

        async def ask(token, count):
            body = {"prompt": ["x"] * count}
            return await client.post("/v1/completions", json=body, headers=bearer(token))

        asked = []
        for token, count in (("one", 12), ("two", 2)):
            asked.append(asyncio.create_task(ask(token, count)))
            while sum(owner == digest(token) for owner in seen.submitted) < count:
                await asyncio.sleep(0.001)
        await engine.resume()
        assert [(await one).status_code for one in asked] == [200, 200]
    turns = [digest("one"), digest("two")] * 2
    assert seen.ended == turns + [digest("one")] * 10
