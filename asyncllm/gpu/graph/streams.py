"""Stream: the order of a device's work, synchronous on a CPU, a CUDA stream on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from asyncllm.gpu.launched_step import Event, LaunchedStep

HIGH_PRIORITY = -1
"""CUDA stream priority; 0 is the default, and torch takes any lower number for its high one."""


class SyncStream:
    """The stream of a CPU, on which work is done once it is queued; base of other streams.

    Attributes:
        is_async: queueing returns before the work is done, so that a second step can be queued
            behind the first.
    """

    is_async = False

    def context(self) -> AbstractContextManager[object]:
        """Context in which torch's allocations and queued work belong to this stream."""
        return nullcontext()

    def side_context(self) -> AbstractContextManager[object]:
        """Context for work on finished results, which does not wait for this stream's queue.

        On exit it waits for that work, so that the caller may release the tensors.
        """
        return nullcontext()

    def takes(self, step: LaunchedStep, before: Iterable[LaunchedStep]) -> bool:
        """Whether a step can begin before it is collected, behind those in flight."""
        return False

    def submit(self, step: LaunchedStep) -> bool:
        """Queues a whole step that has been applied; False if work is queued piece by piece."""
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Queues a piece of work of a step."""
        work()

    def record(self) -> Event | None:
        """Records an event behind everything queued so far; None if it is done."""
        return None

    def wait(self, step: LaunchedStep) -> None:
        """Waits for the queued work of a step."""

    def synchronize(self) -> None:
        """Waits, without the GIL, for everything queued so far."""


class CudaStream(SyncStream):
    """A CUDA stream beside the application's own, so that neither waits for the other.

    It has high priority, because torch hands out 32 streams per priority in turn, hardly any
    application asks for priorities, and work that the application queued on the same stream during
    a capture would become a part of the graph. The small kernels of a decode step also go ahead of
    the application's where both are ready to run.
    """

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._side_stream: torch.cuda.Stream | None = None

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    @contextmanager
    def side_context(self) -> Iterator[None]:
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self._stream.device, priority=HIGH_PRIORITY)
        with torch.cuda.stream(self._side_stream):
            try:
                yield
            finally:
                self._side_stream.synchronize()

    def takes(self, step: LaunchedStep, before: Iterable[LaunchedStep]) -> bool:
        return not any(step.awaits_tokens_of(one) for one in before)

    def record(self) -> Event | None:
        # torch.Event ignores ``blocking`` and would spin.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, step: LaunchedStep) -> None:
        if step.event is not None:
            step.event.synchronize()

    def synchronize(self) -> None:
        self._stream.synchronize()


Stream = SyncStream
