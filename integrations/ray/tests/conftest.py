"""A Ray on this machine for all tests, and deployments of the packaged model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from asyncllm_ray import Client, deployment, run
from ray import serve

from asyncllm import LLM

ENGINE: dict[str, Any] = {"num_threads": 1, "num_blocks": 256, "max_num_seqs": 8}
REPLICA = {"num_cpus": 0.25}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's default of 15 lets any other busy process starve replicas beyond the tests' limits.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    # Actors import the tests' functions.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    context = ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    yield context
    serve.shutdown()
    ray.shutdown()


Deploy = Callable[..., Any]


@pytest.fixture(name="deploy")
def make_deploy(cluster: Any) -> Iterator[Deploy]:
    """Deploys the packaged model under a name; returns the handle. The test's end deletes it."""
    names: list[str] = []

    def deploy(
        name: str, num_replicas: int = 1, *, serve_options: Any = None, **options: Any
    ) -> Any:
        names.append(name)
        return run_app(name, num_replicas, serve_options, **options)

    yield deploy
    for name in set(names):
        serve.delete(name)


def run_app(name: str, num_replicas: int = 1, serve_options: Any = None, **options: Any) -> Any:
    given = {"num_replicas": num_replicas, "ray_actor_options": REPLICA} | (serve_options or {})
    app = deployment(**(ENGINE | options), serve_options=given)
    return run(app, name)


@pytest.fixture(scope="session")
def handle(cluster: Any) -> Any:
    """One replica, which most tests share. Its lease is short."""
    return run_app("shared", lease=2.0, max_queued_requests=8)


@pytest.fixture
def client(handle: Any) -> Iterator[Client]:
    client = Client(handle, heartbeat=0.3)
    yield client
    client.close()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=256) as llm:
        yield llm
