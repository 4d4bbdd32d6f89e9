"""RequestGroup: the sequences that one call of ``stream()`` asked for, and what they share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncllm.core.channel import Channel
    from asyncllm.core.request import Request
    from asyncllm.observer import ObserverNotifier


class RequestGroup:
    """One or more sequences with one id, one channel, one deadline and one end.

    A group ends once: when its last member has ended, or whole, when it is aborted, its
    deadline passes or a member fails. A failed member ends the others because the exception
    is the end of the channel, behind which nothing is read. An observer is told of a group by
    its first member.

    Attributes:
        channel: to the reader of all members; None where no reader is (tests of the core).
        members: in order of their index. Added before the group is submitted.
        cancelled: set once, by any thread, before the abort itself travels.
        notifier: of the observers; None without any.
    """

    __slots__ = (
        "arrived_at",
        "cancelled",
        "channel",
        "deadline",
        "members",
        "notifier",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        channel: Channel | None = None,
        *,
        arrived_at: float = 0.0,
        deadline: float = math.inf,
    ) -> None:
        self.request_id = request_id
        self.channel = channel
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.members: list[Request] = []
        self.cancelled = False
        self.notifier: ObserverNotifier | None = None

    @property
    def unfinished(self) -> list[Request]:
        return [member for member in self.members if not member.finished]
