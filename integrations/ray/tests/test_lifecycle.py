"""Replicas, controllers and clients that come, go and die."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import ray
from asyncllm_ray import Client, deployment, run
from conftest import ENGINE, REPLICA
from ray import serve
from replicas import replica_of, stats, until, until_idle

from asyncllm import LLM, EngineDeadError, SamplingParams

PROMPT = "Mia has a boat."
ENDLESS: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True}
PAUSED: dict[str, Any] = {"on_slow": "pause", "max_unread": 8, **ENDLESS}

pytestmark = pytest.mark.slow


async def until_replicas(handle: Any, count: int, seconds: float = 40.0) -> None:
    async def are_there() -> bool:
        try:
            return len(await stats(handle)) == count
        except ray.exceptions.RayError:
            return False

    await until(are_there, seconds)


async def test_a_replica_killed_in_mid_stream_ends_it_once(deploy: Any) -> None:
    handle = deploy("killed")
    client = Client(handle, retries=1)
    stream = client.stream(PROMPT, **PAUSED)
    await anext(stream)
    ray.kill(replica_of(stream))
    with pytest.raises(EngineDeadError, match="replica died"):
        await stream
    assert stream._channel.num_read >= 1
    assert (client.stats().retries, client.stats().lost_replicas) == (0, 1)
    with pytest.raises(EngineDeadError):
        await stream
    client.close()


async def test_only_a_request_without_a_token_is_sent_again(deploy: Any, llm: LLM) -> None:
    handle = deploy("retried", max_num_seqs=1)
    client = Client(handle, retries=1)
    began = client.stream(PROMPT, **ENDLESS | {"on_slow": "pause"})
    await anext(began)
    waiting = client.stream(PROMPT, max_tokens=30, temperature=1.3)

    async def is_held() -> bool:
        return replica_of(waiting) is not None

    await until(is_held)
    seed = waiting._core.call.params.seed
    assert seed is not None
    ray.kill(replica_of(began))
    with pytest.raises(EngineDeadError):
        await began
    found = await asyncio.wait_for(waiting.result(), 60)
    params = SamplingParams(max_tokens=30, temperature=1.3, seed=seed)
    assert found.token_ids == llm.generate(PROMPT, params).token_ids
    assert (client.stats().retries, client.stats().lost_replicas) == (1, 2)
    client.close()


async def test_without_retries_a_lost_replica_is_an_error(deploy: Any) -> None:
    handle = deploy("lost", max_num_seqs=1)
    client = Client(handle)
    streams = [client.stream(PROMPT, **PAUSED) for _ in range(2)]
    await anext(streams[0])

    async def is_held() -> bool:
        return replica_of(streams[1]) is not None

    await until(is_held)
    ray.kill(replica_of(streams[0]))
    for stream in streams:
        with pytest.raises(EngineDeadError):
            await stream
    client.close()


async def test_streams_go_on_while_the_controller_restarts(deploy: Any) -> None:
    handle = deploy("controller")
    client = Client(handle, heartbeat=0.5)
    stream = client.stream(PROMPT, max_tokens=300, ignore_eos=True, on_slow="pause", max_unread=8)
    await anext(stream)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    ray.kill(controller, no_restart=False)
    assert len((await asyncio.wait_for(stream.result(), 30)).token_ids) == 300
    other = await asyncio.wait_for(client.generate(PROMPT, max_tokens=5, ignore_eos=True), 30)
    assert len(other.token_ids) == 5
    await until_idle(handle, 30)
    client.close()


CLIENT = """
    import asyncio, sys, ray
    from ray import serve
    from asyncllm_ray import Client

    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    client = Client(serve.get_app_handle("vanishes"))

    async def main():
        options = dict(max_tokens=480, ignore_eos=True, on_slow="pause", max_unread=8)
        streams = [client.stream("Mia has a boat.", **options) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        print("reading", flush=True)
        if sys.argv[2] == "stay":
            await asyncio.sleep(60)
        for stream in streams:
            stream.close()
        await asyncio.sleep(0.5)

    asyncio.run(main())
"""


def start_client(address: str, mode: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(CLIENT)
    command = [sys.executable, "-c", code, address, mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


async def test_a_killed_client_leaves_nothing_and_drivers_come_back(
    cluster: Any, deploy: Any
) -> None:
    handle = deploy("vanishes", lease=2.0)
    address = cluster.address_info["address"]
    process = await asyncio.to_thread(start_client, address, "stay")
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "reading\n"
        assert (await stats(handle))[0]["num_streams"] == 3
    finally:
        process.kill()
        process.wait()
    await until_idle(handle, 15)
    assert (await stats(handle))[0]["num_expired"] == 3
    again = await asyncio.to_thread(start_client, address, "leave")
    assert again.stdout is not None
    assert await asyncio.to_thread(again.stdout.read) == "reading\n"
    assert await asyncio.to_thread(again.wait) == 0
    await until_idle(handle, 15)
    assert (await stats(handle))[0]["num_expired"] == 3


async def test_a_rolling_update_loses_no_request(deploy: Any) -> None:
    handle = deploy("rolled", 2)
    client = Client(handle, retries=1)
    stopped = asyncio.Event()
    done = []

    async def ask() -> None:
        while not stopped.is_set():
            found = await client.generate(PROMPT, max_tokens=40, ignore_eos=True)
            done.append(len(found.token_ids))

    readers = [asyncio.create_task(ask()) for _ in range(3)]
    before = {replica_of_id(one) for one in await stats(handle)}
    given = {"num_replicas": 2, "ray_actor_options": REPLICA}
    app = deployment(**ENGINE, drain=20.0, serve_options=given)
    await asyncio.to_thread(run, app, "rolled")

    async def are_new() -> bool:
        now = {replica_of_id(one) for one in await stats(handle)}
        return len(now) == 2 and not now & before

    await until(are_new, 60)
    stopped.set()
    await asyncio.gather(*readers)
    assert set(done) == {40}
    assert len(done) > 10
    await until_idle(handle, 20)
    client.close()


def replica_of_id(found: dict[str, Any]) -> int:
    return found["pid"]


async def test_scaling_down_drains(deploy: Any) -> None:
    handle = deploy("scaled", 2, drain=20.0)
    client = Client(handle)
    streams = [client.stream(f"{number} boats", **PAUSED) for number in range(6)]
    for stream in streams:
        await anext(stream)
    held = {replica_of(stream)._actor_id for stream in streams}
    assert len(held) == 2
    given = {"num_replicas": 1, "ray_actor_options": REPLICA}
    app = deployment(**ENGINE, drain=20.0, serve_options=given)
    serve.run_many([serve.RunTarget(app, "scaled", None)], wait_for_applications_running=False)
    await until_replicas(handle, 1)
    late = [client.stream(f"{number} late boats", **PAUSED) for number in range(4)]
    for stream in late:
        await anext(stream)
    assert len({replica_of(stream)._actor_id for stream in late}) == 1
    for stream in streams:
        assert len((await stream).token_ids) == 480
    for stream in late:
        stream.close()
    await until_idle(handle, 20)
    client.close()


async def test_200_instant_cancels_leave_nothing(deploy: Any) -> None:
    handle = deploy("cancelled", 2)
    client = Client(handle)
    for number in range(200):
        stream = client.stream(f"{number} {PROMPT}", **ENDLESS)
        if number % 3 == 1:
            await asyncio.sleep(0.003)
        stream.close()
    del stream
    gc.collect()
    await until_idle(handle, 15)
    assert all(one["num_expired"] == 0 for one in await stats(handle))

    async def is_over() -> bool:
        return not client._link._live

    await until(is_over)
    assert client.stats().lost_replicas == 0
    client.close()


async def test_two_deployments_in_one_application(deploy: Any) -> None:
    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Both:
        def __init__(self, *handles: Any) -> None:
            self.clients = [Client(handle) for handle in handles]

        async def ask(self, prompt: str) -> list[int]:
            params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
            found = [await client.generate(prompt, params) for client in self.clients]
            return [len(one.token_ids) for one in found]

    given = {"ray_actor_options": REPLICA}
    apps = [deployment(**ENGINE, name=name, serve_options=given) for name in ("one", "two")]
    handle = await asyncio.to_thread(run, Both.bind(*apps), "both")
    try:
        assert await handle.ask.remote(PROMPT) == [20, 20]
    finally:
        await asyncio.to_thread(serve.delete, "both")
