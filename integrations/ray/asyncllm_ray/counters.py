"""Counters of a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What a client has counted since it was made.

    Attributes:
        requests: requests sent.
        retries: attempts after the first.
        pauses: times that a replica had to stop sending because the reader was late.
        lost_replicas: attempts that ended because their replica died.
    """

    requests: int = 0
    retries: int = 0
    pauses: int = 0
    lost_replicas: int = 0
