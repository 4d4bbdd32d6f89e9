"""Stream: the order of a device's work, synchronous on a CPU, a CUDA stream on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Waits, without the GIL, until the work before it is done."""


class Stream(Protocol):
    """Runs work in the order in which it was queued.

    Attributes:
        is_async: queueing returns before the work is done, so that a second step can be queued
            behind the first.
    """

    is_async: bool

    def context(self) -> AbstractContextManager[object]:
        """Within it, the tensors that torch allocates and the work that it queues belong to
        this stream."""
        ...

    def record(self) -> Event:
        """An event behind everything that was queued."""
        ...

    def synchronize(self) -> None:
        """Waits for everything that was queued."""


class SyncStream:
    """The stream of a CPU, its own event: work is done once it is queued."""

    is_async = False

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Event:
        return self

    def synchronize(self) -> None:
        pass


class CudaStream:
    """A CUDA stream beside the host application's own, so that neither waits for the other."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        # torch.Event ignores ``blocking`` and would spin.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()
