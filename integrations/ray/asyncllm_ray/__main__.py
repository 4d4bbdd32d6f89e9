"""``python -m asyncllm_ray``: streams from a replica on a local Ray."""

from __future__ import annotations

import argparse
import asyncio
import sys

import ray
from ray import serve

from asyncllm_ray import Client, deployment, run


async def _print_stream(client: Client, prompt: str) -> None:
    async for delta in client.stream(prompt, max_tokens=200, seed=1):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def main() -> None:
    """Start a local Ray, deploy, stream from a replica, and stop Ray."""
    parser = argparse.ArgumentParser(prog="python -m asyncllm_ray", description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Tell me a story about Mia and a boat.")
    parser.add_argument("--model", help="directory or hub id; the default is the packaged model")
    parser.add_argument("--replicas", type=int, default=1, help="number of engines")
    given = parser.parse_args()
    ray.init(num_cpus=given.replicas + 1, include_dashboard=False, log_to_driver=False)
    try:
        app = deployment(
            given.model,
            serve_options={
                "num_replicas": given.replicas,
                "ray_actor_options": {"num_cpus": 0.5},
            },
        )
        client = Client(run(app))
        asyncio.run(_print_stream(client, given.prompt))
        client.close()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
