"""PrefixRouter: Serve's request router over ``asyncllm.routing``."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from asyncllm_ray.placement import Placement
from asyncllm_ray.wire import Call


class PrefixRouter(RequestRouter):
    """Sends a call to the replica with the least expected time to the first token.

    Serve runs one router in each process that has a handle. If the chosen replica is full, Serve
    takes another.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Create the record of sent calls; Serve calls this method once."""
        self._placement = Placement()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: the chosen one, then the others that accept requests."""
        open_ones = [one for one in candidate_replicas if _accepts(one)]
        call = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(call, Call):
            return [open_ones]
        key = self._placement.choose(call, {one.replica_id: one.routing_stats for one in open_ones})
        first = [one for one in open_ones if one.replica_id == key]
        others = [one for one in open_ones if one.replica_id != key]
        return [rank for rank in (first, others) if rank]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Forget the choice if Serve has taken another replica."""
        call = pending_request.args[0] if pending_request.args else None
        if isinstance(call, Call) and call.placed and call.placed.key != replica_id:
            call.placed.end(None)
            call.placed = None


def _accepts(replica: RunningReplica) -> bool:
    return (replica.routing_stats or {}).get("accepts", True)
