"""LoadPolicy: how many replicas the waiting prompts and the KV caches need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncllm import validation as check


class LoadPolicy:
    """Policy for Serve's autoscaler, based on the replicas' ``record_autoscaling_stats``.

        autoscaling_config = {
            "min_replicas": 1,
            "max_replicas": 4,
            "policy": {"policy_function": "asyncllm_ray.autoscaling:LoadPolicy"},
        }

    Serve applies its bounds and delays to the result.

    Args:
        queued_tokens: prompt tokens that may wait per replica.
        kv_cache_usage: part of the KV blocks that a replica's requests may hold, 0 to 1.
    """

    def __init__(self, queued_tokens: float = 4096, kv_cache_usage: float = 0.8) -> None:
        self._tokens = check.number("queued_tokens", queued_tokens, 0, 1e12, exclusive_low=True)
        self._usage = check.number("kv_cache_usage", kv_cache_usage, 0, 1, exclusive_low=True)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Number of replicas that the load needs, and the policy's state."""
        found: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        tokens = sum(found.get("queued_tokens", {}).values())
        usage = sum(found.get("kv_cache_usage", {}).values())
        needed = max(math.ceil(tokens / self._tokens), math.ceil(usage / self._usage), 1)
        return needed, {}
