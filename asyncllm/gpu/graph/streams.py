"""Where a step's work is queued: at once on a CPU, on a stream of its own on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Ticket(Protocol):
    """Work that was queued."""

    def synchronize(self) -> None:
        """Waits until it is done, without the GIL."""
        ...


class Stream(Protocol):
    """Runs work in the order in which it was queued.

    Attributes:
        is_async: ``submit`` returns before the work is done, so that a second step can be
            queued behind it.
    """

    is_async: bool

    def context(self) -> AbstractContextManager[object]:
        """Within it, what torch allocates and runs belongs to this stream."""
        ...

    def submit(self, work: Callable[[], None]) -> Ticket: ...

    def synchronize(self) -> None:
        """Waits for everything that was queued."""
        ...


class _Done:
    def synchronize(self) -> None:
        pass


class SyncStream:
    """A CPU: work is done when it is queued."""

    is_async = False

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def submit(self, work: Callable[[], None]) -> Ticket:
        work()
        return _Done()

    def synchronize(self) -> None:
        pass


class CudaStream:
    """A stream beside the host's own, so that neither waits for the other."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def submit(self, work: Callable[[], None]) -> Ticket:
        with torch.cuda.stream(self._stream):
            work()
            # torch.Event ignores ``blocking`` and would spin.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()
