"""Engines as replicas of Ray Serve: streams, a cancelled read, and 1 to 2 to 1 replicas under load.

pip install asyncllm-ray && python examples/ray_scale.py
"""

from __future__ import annotations

import asyncio
import time

import ray
from asyncllm_ray import Client, deployment, run
from ray import serve

PROMPT = "Tell me a story about Mia and a boat."


async def num_replicas(handle) -> int:
    return len(await handle.broadcast("stats").results_async())


async def until_replicas(handle, count: int) -> None:
    began = time.monotonic()
    for _ in range(180):
        if await num_replicas(handle) == count:
            print(f"{count} replicas after {time.monotonic() - began:.0f} s")
            return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"there are not {count} replicas after 90 s")


async def load(client: Client, number: int, stop: asyncio.Event) -> int:
    """Ask one question after another; returns how many were answered."""
    answered = 0
    while not stop.is_set():
        prompt = f"{number}: {PROMPT} " * 8
        completion = await client.generate(prompt, max_tokens=200, ignore_eos=True)
        assert len(completion.token_ids) == 200
        answered += 1
    return answered


async def main(handle) -> None:
    client = Client(handle, retries=1)

    async for delta in client.stream(PROMPT, max_tokens=60, seed=1):
        print(delta.text, end="", flush=True)
    print()

    stream = client.stream(PROMPT, max_tokens=400, ignore_eos=True, on_slow="pause")
    await anext(stream)
    read = asyncio.create_task(stream.result())
    await asyncio.sleep(0.05)
    read.cancel()
    await asyncio.sleep(0.5)
    [found] = await handle.broadcast("stats").results_async()
    assert found["num_running"] == 0
    print("cancelled: nothing runs")

    stop = asyncio.Event()
    readers = [asyncio.create_task(load(client, number, stop)) for number in range(24)]
    await until_replicas(handle, 2)
    await asyncio.sleep(2)
    light = [asyncio.create_task(load(client, 99, asyncio.Event()))]
    stop.set()
    answered = sum(await asyncio.gather(*readers))
    await until_replicas(handle, 1)
    assert not light[0].done()
    light[0].cancel()
    print(f"{answered} answers, {client.stats().lost_replicas} replicas lost")
    client.close()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        scaling = {
            "min_replicas": 1,
            "max_replicas": 2,
            "look_back_period_s": 2.0,
            "metrics_interval_s": 0.5,
            "upscale_delay_s": 1.0,
            "downscale_delay_s": 3.0,
            "policy": {
                "policy_function": "asyncllm_ray.autoscaling:LoadPolicy",
                "policy_kwargs": {"queued_tokens": 300},
            },
        }
        options = {"autoscaling_config": scaling, "ray_actor_options": {"num_cpus": 0.5}}
        app = deployment(num_threads=1, max_num_seqs=4, serve_options=options)
        handle = run(app)
        asyncio.run(main(handle))
    finally:
        serve.shutdown()
        ray.shutdown()
