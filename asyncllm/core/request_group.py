"""RequestGroup: the sequences that one call of ``stream()`` asked for, and what they share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncllm.core.channel import Channel

if TYPE_CHECKING:
    from asyncllm.core.request import Request
    from asyncllm.observer import ObserverNotifier


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One or more sequences with one id, one channel, one deadline and one end.

    A group ends once: when its last member has ended, or whole, when it is aborted, its
    deadline passes or a member fails. A failed member ends the others because the exception
    is the end of the channel, behind which nothing is read. An observer is told of a group by
    its first member.

    Attributes:
        channel: to the reader of all members.
        members: in order of their index. Added before the group is submitted, none once it has
            ended.
        cancelled: set once, by any thread, before the abort itself travels.
        notifier: of the observers; None without any.
    """

    request_id: str
    channel: Channel = field(default_factory=Channel)
    arrived_at: float = 0.0
    deadline: float = math.inf
    members: list[Request] = field(default_factory=list)
    cancelled: bool = False
    notifier: ObserverNotifier | None = None

    @property
    def unfinished(self) -> list[Request]:
        return [member for member in self.members if not member.finished]
