"""asyncllm engines as replicas of Ray Serve, and in jobs of Ray Data."""

from __future__ import annotations

try:
    import ray
    import ray.serve
except ImportError as error:
    raise ImportError(
        "asyncllm_ray needs Ray Serve: pip install 'ray[serve]>=2.60'", name=error.name
    ) from error

if tuple(int(part) for part in ray.__version__.split(".")[:2]) < (2, 60):
    raise ImportError(
        f"asyncllm_ray: Ray is {ray.__version__}; expected 2.60 or later: "
        "pip install -U 'ray[serve]>=2.60'",
        name="ray",
    )

from asyncllm_ray.application import run
from asyncllm_ray.autoscaling import LoadPolicy
from asyncllm_ray.client import Client
from asyncllm_ray.counters import Counters
from asyncllm_ray.generate import Generate, complete
from asyncllm_ray.ingress import openai_app
from asyncllm_ray.replica import deployment

__all__ = [
    "Client",
    "Counters",
    "Generate",
    "LoadPolicy",
    "complete",
    "deployment",
    "openai_app",
    "run",
]
