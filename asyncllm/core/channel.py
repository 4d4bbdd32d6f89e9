"""Channel: a lock-free queue of one request's output, from the engine thread to its reader.

It has no lock because every token passes through it. Two threads share a channel, the engine
thread and the reader's, and a third may end it. Why that is correct:

**One writer, one reader.** Only the engine thread adds to ``items``, and only the reader removes
items, from the left. So the last item, if any, is the one that the engine thread added last, and
``items[-1] = pending`` is a compare-and-swap: it replaces that item, or raises IndexError because
the reader has taken it. An item stays in the deque while a token is merged into it, so the reader
cannot overtake the merge. A ``PendingDelta`` shares growing lists with its predecessor, and each
``PendingDelta`` stores how many entries count: entries appended before a failed swap lie beyond the
count of the item that the reader took. So a token costs O(1).

**One end.** The engine thread ends channels, and so does a thread that declares it hung. Each
appends its end to a list, and the first entry of the list counts. Each then makes the first entry
readable, so that a stream ends even if the first thread is stuck in an observer. The end is in
``stream_end``, beside the deque, where no late token can replace it. The reader looks at
``stream_end`` before it looks at ``items``, so ``items`` then has everything that was written
before the end. A token that a late engine thread writes after the end is dropped, or is read before
the end if the reader has not reached it yet.

**No lost wake** (Dekker's algorithm, with ``has_reader`` and ``items``). A reader that finds no
item sets ``has_reader`` and looks at ``items`` again; the engine thread adds an item and then looks
at ``has_reader``. Whichever thread looks last sees what the other one wrote. The engine thread
clears the flag when it queues the channel for a wake, so a channel is queued once for each wake,
plus once for its end. Meanwhile the reader may have begun another wait, whose flag is then cleared:
the wake ends that wait, and a woken reader sets the flag anew before it looks. ``is_backpressured``
and ``num_read`` are a second such pair: the engine thread sets the flag and reads the count again;
the reader increases the count and then reads the flag.

All of this needs the GIL: single operations on a deque, a list or an attribute are atomic and
every thread sees them in one order. A free-threaded build (3.13t, 3.14t) promises atomic operations
but no such order, so a wake might be lost. It is not supported: an engine refuses to start while
the GIL is off (``check_gil``).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from asyncllm.errors import EngineError
from asyncllm.outputs import Delta, FinishReason, TokenLogprobs, Usage, make_token_delta

OnSlow = Literal["coalesce", "pause", "abort"]


class StreamEnd(NamedTuple):
    """End of a request with a finish reason; a failed request ends with an exception instead.

    Attributes:
        text: output text that the detokenizer held back until the end.
        last_delta: the delta of the token that ended the request, read together with this end; None
            if no token did.
        output: index of the output that ended last.
    """

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    text: str = ""
    last_delta: Delta | None = None
    output: int = 0


PendingDelta = tuple[int, list[str], list[int], list[TokenLogprobs], int]
"""Unread tokens that are read as one Delta: ``(count, texts, token ids, log-probabilities,
index)``. Only the first ``count`` entries of the lists belong to it; ``index`` is that of the
request in its group, and either every token has log-probabilities or none has. A plain tuple,
because one is made with every token, and a NamedTuple takes seven times as long."""


def merge_unread_tokens(pending_delta: PendingDelta) -> Delta:
    """Merge unread tokens into one Delta."""
    size, texts, token_ids, logprobs, index = pending_delta
    return Delta(
        "".join(texts[:size]), tuple(token_ids[:size]), index, tuple(logprobs[:size]) or None
    )


class Mailbox(Protocol):
    """Wakes the readers of one event loop from the engine thread."""

    def notify(self, channels: Iterable[Channel]) -> bool:
        """Wake the readers of ``channels`` with at most one call into the loop; returns False if
        the loop is closed. Any thread may call it; it never waits for the loop."""
        ...

    def is_closed(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Channel:
    """Output of one request group. Consecutive unread tokens of one sequence merge into one delta.

    Attributes:
        max_unread: maximum number of unread tokens before ``on_slow`` applies.
        max_merged: maximum number of tokens that are merged into one delta.
        items: unread output in order, without the end.
        stream_end: the end, once there is one: a StreamEnd, or the exception that the reader gets.
        num_written, num_read: counts of tokens, kept by the engine thread and by the reader.
        has_reader: whether a reader waits and no wake-up has been sent to it yet.
        waiter: the mailbox's object for the reader that waits; touched on its loop's thread only.
        is_backpressured: whether the group is paused because ``max_unread`` tokens are unread.
    """

    max_unread: int = 256
    on_slow: OnSlow = "coalesce"
    items: deque[Delta | PendingDelta] = field(default_factory=deque)
    stream_end: StreamEnd | BaseException | None = None
    num_written: int = 0
    num_read: int = 0
    mailbox: Mailbox | None = None
    waiter: Any = None
    has_reader: bool = False
    is_backpressured: bool = False
    max_merged: int = field(init=False)
    _proposed_ends: list[tuple[StreamEnd | BaseException]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.max_merged = self.max_unread if self.on_slow == "coalesce" else 1

    @property
    def num_unread(self) -> int:
        return self.num_written - self.num_read

    @property
    def ended(self) -> bool:
        return self.stream_end is not None

    def put(self, token_id: int, text: str, logprobs: TokenLogprobs | None, index: int = 0) -> None:
        """Write a token that is not its request's last one. After the channel's end the token is
        dropped. Engine thread only."""
        if self.stream_end is not None:
            return
        items = self.items
        if not items or self.max_merged == 1 or not self._merge(token_id, text, logprobs, index):
            items.append(make_token_delta(token_id, text, logprobs, index))
        self.num_written += 1

    def put_last_delta(self, delta: Delta) -> None:
        """Write the last delta of an output while other outputs of its group continue. Engine
        thread only."""
        if self.stream_end is None:
            self.items.append(delta)
            self.num_written += len(delta.token_ids)

    def _merge(self, token_id: int, text: str, logprobs: TokenLogprobs | None, index: int) -> bool:
        """Merge a token into the last unread item. Returns False if that item is full, belongs to
        another request, or has just been read."""
        items = self.items
        try:
            last = items[-1]
            if isinstance(last, Delta):
                if len(last.token_ids) == self.max_merged or last.finish_reason is not None:
                    return False
                last = (1, [last.text], [*last.token_ids], [*(last.logprobs or ())], last.index)
            size, texts, token_ids, all_logprobs, last_index = last
            if last_index != index:
                return False
            texts.append(text)
            token_ids.append(token_id)
            if logprobs is not None:
                all_logprobs.append(logprobs)
            size += 1
            pending = (size, texts, token_ids, all_logprobs, index)
            items[-1] = pending if size < self.max_merged else merge_unread_tokens(pending)
        except IndexError:
            return False
        return True

    def propose_end(self, end: StreamEnd | BaseException) -> bool:
        """Propose an end for the channel. Any thread may call it. Returns True for the first
        proposal; only the first proposal counts, and ``Channel.end`` makes it readable."""
        proposal = (end,)
        self._proposed_ends.append(proposal)
        if self._proposed_ends[0] is not proposal:
            return False
        if isinstance(end, StreamEnd) and end.last_delta is not None:
            self.num_written += 1
        return True

    def end(self) -> None:
        """Show the reader the end that was proposed first. Any thread may call it after
        ``propose_end``. No token is written or read after the end."""
        (self.stream_end,) = self._proposed_ends[0]


def check_gil() -> None:
    """Raise EngineError if this free-threaded Python runs without the GIL."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise EngineError(
            "the GIL is off in this free-threaded Python, which is not supported: expected a "
            "Python with the GIL (PYTHON_GIL=1 or -X gil=1 turns it on)"
        )
