"""Stream: the order of a device's work, synchronous on a CPU, a CUDA stream on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class SyncStream:
    """The stream of a CPU, its own event: work is done once it is queued. ``CudaStream`` has the
    same methods.

    Attributes:
        is_async: queueing returns before the work is done, so that a second step can be queued
            behind the first.
    """

    is_async = False

    def context(self) -> AbstractContextManager[object]:
        """Within it, the tensors that torch allocates and the work that it queues belong to
        this stream."""
        return nullcontext()

    def record(self) -> SyncStream:
        """An event behind everything that was queued."""
        return self

    def synchronize(self) -> None:
        """Waits, without the GIL, for everything that was queued before."""


class CudaStream:
    """A CUDA stream beside the host application's own, so that neither waits for the other."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> torch.cuda.Event:
        # torch.Event ignores ``blocking`` and would spin.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()


Stream = SyncStream | CudaStream
Event = SyncStream | torch.cuda.Event
"""A point in a stream's work, whose ``synchronize`` waits until the work before it is done."""
