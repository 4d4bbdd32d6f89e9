"""Stream: the order of a device's work, synchronous on a CPU, a CUDA stream on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

HIGH = -1
"""Of CUDA's priorities; 0 is the default, and any lower number torch's high one."""


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

    def aside(self) -> AbstractContextManager[object]:
        """As ``context``, for work on what is done already: it does not wait for what is queued
        here. The caller waits for it before it lets go of the tensors."""
        return nullcontext()

    def record(self) -> SyncStream:
        """An event behind everything that was queued."""
        return self

    def synchronize(self) -> None:
        """Waits, without the GIL, for everything that was queued before."""


class CudaStream:
    """A CUDA stream beside the host application's own, so that neither waits for the other.

    Of torch's pool of high priority: torch hands out 32 streams per priority in turn, and what the
    application queued on the same one during a capture would become a part of the graph. Hardly
    any application asks for priorities. The small kernels of a decode step also go ahead of the
    application's blocks where both are ready to run.
    """

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH)
        self._aside: torch.cuda.Stream | None = None

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    @contextmanager
    def aside(self) -> Iterator[None]:
        if self._aside is None:
            self._aside = torch.cuda.Stream(self._stream.device, priority=HIGH)
        with torch.cuda.stream(self._aside):
            try:
                yield
            finally:
                self._aside.synchronize()

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
