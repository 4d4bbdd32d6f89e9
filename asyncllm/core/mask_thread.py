"""MaskThread: makes grammar masks ahead of their steps, in turns by owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from asyncllm.owner_lines import OwnerLines
from asyncllm.thread_priority import lower_thread_priority

MaskResult = tuple[bytes | None, float]
"""A mask, or None if the output is complete, and the CPU seconds that it took."""

MIN_REST_MASK_SECONDS = 0.001
"""CPU seconds of a mask beyond which the thread rests after it."""

REST_TO_MASK_RATIO = 2
"""Rest after a mask, as a multiple of its duration. Masks take processor time, memory bandwidth and
the GIL from the steps, whatever the thread's priority."""

_GIL_YIELD_SECONDS = 0.00005
"""Seconds that the thread sleeps before each mask, so that the engine thread can acquire the GIL.
With ``sleep(0)`` this thread often got the GIL back first."""


@dataclass(slots=True, eq=False)
class _MaskJob:
    """A mask, or the beginning of an output, that waits for the thread."""

    owner: str | None
    make_mask: Callable[[], MaskResult]
    result: Future[MaskResult] = field(default_factory=Future)


class MaskThread:
    """Thread that makes masks, one of each owner at a time. It has a low priority on Linux.

    Attributes:
        should_rest: whether to rest after slow masks, because other requests run.
    """

    def __init__(self) -> None:
        self.should_rest = True
        self._lines: OwnerLines[_MaskJob] = OwnerLines()
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, "asyncllm-masks", lower_thread_priority)
        self._rests_until = 0.0

    def submit(
        self, owner: str | None, make_mask: Callable[[], MaskResult], rank: int = 0
    ) -> Future[MaskResult]:
        """Queue a mask.

        Args:
            rank: an owner's masks of smaller rank come first.

        Raises:
            RuntimeError: if no thread can be started.
        """
        job = _MaskJob(owner, make_mask)
        with self._lock:
            self._lines.push(owner, job, rank)
        try:
            self._executor.submit(self._make_next_mask)
        except RuntimeError:
            with self._lock:
                self._lines.discard(owner, job)
            raise
        return job.result

    def close(self) -> None:
        """Cancel the masks that were not begun, and wait for the mask being made."""
        with self._lock:
            for job in self._lines:
                job.result.cancel()
        self._executor.shutdown(cancel_futures=True)

    def _make_next_mask(self) -> None:
        time.sleep(max(_GIL_YIELD_SECONDS, self._rests_until - time.monotonic()))
        with self._lock:
            job = self._lines.peek()
            assert job is not None
            self._lines.discard(job.owner, job)
            self._lines.end_turn(job.owner)
        if not job.result.set_running_or_notify_cancel():
            return
        began = time.thread_time()
        try:
            job.result.set_result(job.make_mask())
        except BaseException as error:  # A grammar backend's native code may panic.
            job.result.set_exception(error)
        seconds = time.thread_time() - began
        if self.should_rest and seconds > MIN_REST_MASK_SECONDS:
            self._rests_until = time.monotonic() + REST_TO_MASK_RATIO * seconds
