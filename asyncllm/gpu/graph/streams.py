"""DeviceStream, CudaStream: queues of a device's work, synchronous on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from asyncllm.gpu.launched_step import Event, LaunchedStep

HIGH_PRIORITY = -1
"""Priority of a CUDA stream; 0 is the default, and torch treats any lower number as high."""


class DeviceStream:
    """Stream of a device's work. This base class is the stream of a CPU and does work at once.

    Attributes:
        is_async: whether queueing returns before the work is done, so that a second step can be
            queued behind the first.
    """

    is_async = False

    def context(self) -> AbstractContextManager[object]:
        """Context manager: torch's allocations and queued work in it belong to this stream."""
        return nullcontext()

    def use_side_stream(self) -> AbstractContextManager[object]:
        """Context manager that queues work on a side stream, which does not wait for this stream.

        Use it for work on results of finished steps. The exit waits for that work, so that the
        caller may release the tensors.
        """
        return nullcontext()

    def can_begin_early(self, step: LaunchedStep, earlier_steps: Iterable[LaunchedStep]) -> bool:
        """Whether a step can be launched while the earlier steps in ``earlier_steps`` are still
        running."""
        return False

    def submit(self, step: LaunchedStep, *, is_early: bool) -> None:
        """Queues a whole recorded step; the work of others is queued piece by piece, with ``run``.

        Args:
            is_early: see ``StepRunner.begin``.
        """
        raise NotImplementedError(f"{type(self).__name__} runs no recorded steps")

    def sample(self, step: LaunchedStep, *, is_early: bool) -> bool:
        """Samples a recorded step whose program computes logits alone, once its masks are made.

        Args:
            is_early: whether to queue the sampling behind the program, which may still be running;
                otherwise the program has ended, and the caller waits for the sampling.

        Returns:
            False if this stream cannot sample the step. The caller then samples it with ``run``.

        Raises:
            RuntimeError, MemoryError: the sampling could not be queued.
        """
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Queues one piece of a step's work."""
        work()

    def record_event(self) -> Event | None:
        """Records an event behind all work queued so far; None if that work is done."""
        return None

    def wait(self, step: LaunchedStep) -> None:
        """Waits for the queued work of a step."""

    def synchronize(self) -> None:
        """Waits, without the GIL, for all work queued so far."""

    def give_back(self) -> None:
        """Returns the idle stream to the process, for its next engine. Call it last."""


class CudaStreamPool:
    """The process's CUDA streams that closed engines have given back.

    The next engine takes them again, because cuBLAS allocates a workspace for every stream that it
    runs on, 32 MiB on an H100, and torch keeps it until the process ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[torch.cuda.Stream] = []

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """An idle stream of a device; a new one of high priority if there is none."""
        with self._lock:
            for stream in self._idle:
                if stream.device == device:
                    self._idle.remove(stream)
                    return stream
        return torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def give_back(self, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._idle.append(stream)


CUDA_STREAM_POOL = CudaStreamPool()


class CudaStream(DeviceStream):
    """A CUDA stream beside the application's own, so that neither waits for the other.

    It has high priority for two reasons. torch hands out 32 streams per priority in turn, so an
    application can get the engine's stream, and work that it queued there during a capture would
    become a part of the graph; hardly any application asks for high priority. And the small kernels
    of a decode step run before the application's if both are ready.
    """

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._stream = CUDA_STREAM_POOL.take(device)
        self._side_stream: torch.cuda.Stream | None = None

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    @contextmanager
    def use_side_stream(self) -> Iterator[None]:
        if self._side_stream is None:
            self._side_stream = CUDA_STREAM_POOL.take(self._stream.device)
        with torch.cuda.stream(self._side_stream):
            try:
                yield
            finally:
                self._side_stream.synchronize()

    def can_begin_early(self, step: LaunchedStep, earlier_steps: Iterable[LaunchedStep]) -> bool:
        return not any(step.awaits_tokens_of(one) for one in earlier_steps)

    def record_event(self) -> Event | None:
        # Do not use torch.Event, which ignores ``blocking``: waiting for it would spin.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, step: LaunchedStep) -> None:
        if step.event is not None:
            step.event.synchronize()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def give_back(self) -> None:
        CUDA_STREAM_POOL.give_back(self._stream)
        if self._side_stream is not None:
            CUDA_STREAM_POOL.give_back(self._side_stream)
