"""Channel: the way of one request's output from the engine thread to whoever reads it.

The engine thread is the only writer and the reading loop the only reader. A deque carries
the deltas; two flags, each written by one side and read by the other after its own write,
make sure that neither a wake-up nor a resumption is lost (Dekker's scheme: under the GIL
writes and reads of attributes are sequentially consistent).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

from asyncllm.outputs import Delta, FinishReason, Usage

OnSlow = Literal["coalesce", "pause", "abort"]


class End(NamedTuple):
    """The last item of a request that ends with a finish reason. ``text`` is what was held
    back until the end."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    text: str = ""


class Mailbox(Protocol):
    """One per event loop: how the engine thread wakes its readers."""

    def notify(self, channels: Iterable[Channel]) -> bool:
        """Wakes the readers of ``channels`` with one call into the loop at most; False if
        the loop is gone. Called on the engine thread; never waits for the loop."""
        ...

    def is_closed(self) -> bool: ...


class Channel:
    """Output of one request.

    Attributes:
        max_unread: tokens that may be unread before ``on_slow`` applies.
        num_written, num_read: tokens; written by the engine thread and by the reader.
        waiting: the reader has found nothing and wants to be woken.
        waiter: that reader, in the terms of its mailbox; touched on its loop's thread only.
        held: the engine has stopped giving the request tokens because of ``max_unread``.
        ended: an End or an exception was written; nothing follows it.
    """

    __slots__ = (
        "ended",
        "held",
        "items",
        "mailbox",
        "max_unread",
        "num_read",
        "num_written",
        "on_slow",
        "waiter",
        "waiting",
    )

    def __init__(self, *, max_unread: int = 256, on_slow: OnSlow = "coalesce") -> None:
        self.items: deque[Delta | End | BaseException] = deque()
        self.max_unread = max_unread
        self.on_slow: OnSlow = on_slow
        self.num_written = 0
        self.num_read = 0
        self.mailbox: Mailbox | None = None
        self.waiter: Any = None
        self.waiting = False
        self.held = False
        self.ended = False

    @property
    def num_unread(self) -> int:
        return self.num_written - self.num_read

    def put(self, delta: Delta) -> None:
        """Engine thread. A delta of one token, which is not the last."""
        if not self.ended:
            self.items.append(delta)
            self.num_written += 1

    def end(self, item: End | BaseException, last: Delta | None = None) -> bool:
        """Engine thread. The last token and the end arrive together: a reader that sees one
        sees both. False if the channel had ended already."""
        if self.ended:
            return False
        self.ended = True
        if last is None:
            self.items.append(item)
        else:
            self.num_written += 1
            self.items.extend((last, item))
        return True
