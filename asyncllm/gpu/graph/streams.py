"""Stream: the order of a device's work, synchronous on a CPU, a CUDA stream on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from asyncllm.gpu.launched_step import Event, LaunchedStep

HIGH = -1
"""Of CUDA's priorities; 0 is the default, and any lower number torch's high one."""


class SyncStream:
    """The stream of a CPU: work is done once it is queued. The other streams have its methods.

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

    def takes(self, step: LaunchedStep, before: Iterable[LaunchedStep]) -> bool:
        """Whether a step can begin before it is collected, behind those in flight."""
        return False

    def submit(self, step: LaunchedStep) -> bool:
        """Queues a whole step that has been applied, on a stream that runs steps by itself; False
        where the work of a step is queued piece by piece."""
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Queues a piece of work of a step."""
        work()

    def record(self) -> Event:
        """An event behind everything that was queued."""
        return Done()

    def wait(self, step: LaunchedStep) -> None:
        """Waits for the work of a step that has begun."""

    def synchronize(self) -> None:
        """Waits, without the GIL, for everything that was queued before."""


class Done:
    """The end of work that is done."""

    def synchronize(self) -> None:
        """Waits for nothing."""


class CudaStream(SyncStream):
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

    def takes(self, step: LaunchedStep, before: Iterable[LaunchedStep]) -> bool:
        return not any(step.awaits_tokens_of(one) for one in before)

    def record(self) -> Event:
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
