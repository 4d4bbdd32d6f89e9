"""Placement: which replica gets a prompt, by ``asyncllm.routing``."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from asyncllm.outputs import EngineStats, Usage
from asyncllm.routing import Candidate, PrefixIndex, Route, Router, SentPrompt
from asyncllm_ray.wire import Call

_MAX_AGE = 600.0
_STATS = tuple(one.name for one in fields(EngineStats))


class Placement:
    """Chooses replicas for the calls of one process.

    The replicas' prefix caches cannot be queried, so an index records the prompts sent to each.
    """

    def __init__(self) -> None:
        self._router = Router()
        self._index = PrefixIndex(1, _MAX_AGE)
        self._keys: set[Hashable] = set()

    def choose(self, call: Call, replicas: Mapping[Hashable, Mapping[str, Any]]) -> Hashable | None:
        """Choose a replica for a call, and count the call as sent to it; None if all are draining.

        Args:
            replicas: what each replica's ``record_routing_stats`` returned last; empty for a
                replica that was not asked yet.
        """
        if call.placed is not None:
            call.placed.end(None)
        for gone in self._keys - replicas.keys():
            self._router.forget(gone)
            self._index.forget(gone)
        self._keys = set(replicas)
        found = self._index.find(call.hashes, time.monotonic())
        tokens = call.num_tokens / max(len(call.hashes), 1)
        candidates = []
        for key, known in replicas.items():
            stats = EngineStats(**{name: known[name] for name in _STATS if name in known})
            self._index.max_blocks = max(self._index.max_blocks, stats.num_blocks)
            cached = min(int(found.get(key, 0) * tokens), call.num_tokens)
            candidates.append(Candidate(key, stats, cached, 0.0, known.get("accepts", True)))
        candidates = [one for one in candidates if one.alive]
        if not candidates:
            call.placed = None
            return None
        route = self._router.choose(candidates, max(call.num_tokens, 1))
        sent = self._index.add(route.key, call.hashes, time.monotonic()) if call.hashes else None
        call.placed = Placed(self._router, self._index, route, sent, call.num_tokens)
        return route.key


@dataclass(slots=True, eq=False)
class Placed:
    """Record of a call that was sent to a replica."""

    _router: Router
    _index: PrefixIndex
    _route: Route
    _sent: SentPrompt | None
    _num_tokens: int

    @property
    def key(self) -> Hashable:
        """Key of the chosen replica."""
        return self._route.key

    def answered(self) -> None:
        """Stop counting the call as waiting: it has its first token."""
        self._router.settle(self._route)

    def end(self, usage: Usage | None) -> None:
        """Correct the index by ``usage``, or forget a call without a token."""
        had_token = usage is not None and usage.ttft is not None
        cached = usage.cached_tokens if usage is not None and had_token else None
        self._router.settle(self._route, cached)
        if self._sent is None:
            return
        if usage is None or cached is None:
            self._index.withdraw(self._sent)
        else:
            share = cached / max(usage.prompt_tokens, 1)
            self._index.correct(self._sent, round(share * len(self._sent.hashes)))
        self._sent = None
