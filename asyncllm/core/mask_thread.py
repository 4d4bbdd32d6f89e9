"""MaskThread: makes grammar masks ahead of their steps, in turns by owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from asyncllm.owner_lines import OwnerLines
from asyncllm.structured.grammar import MaskSpeed
from asyncllm.thread_priority import lower_thread_priority

MaskResult = tuple[bytes | None, float]
"""A mask, or None if the output is complete, and the CPU seconds that it took."""

MIN_REST_MASK_SECONDS = 0.001
"""Minimum CPU seconds of a mask after which the thread rests."""

REST_TO_MASK_RATIO = 2
"""Rest after a mask, as a multiple of its duration. Masks take processor time, memory bandwidth and
the GIL from the steps, whatever the thread's priority."""

MAX_QUICK_SECONDS = 0.005
"""CPU seconds of quick masks after which a slow mask, or the beginning of an output, has a turn."""

GIL_YIELD_SECONDS = 0.00005
"""Seconds that the thread sleeps before each mask, so that the engine thread can acquire the GIL.
With ``sleep(0)`` this thread often got the GIL back first."""


@dataclass(slots=True, eq=False)
class _MaskJob:
    """Queued mask, or queued beginning of an output.

    Attributes:
        speed: speed of the grammar's masks; None for the beginning of an output.
    """

    owner: str | None
    make_mask: Callable[[], MaskResult]
    speed: MaskSpeed | None
    result: Future[MaskResult] = field(default_factory=Future)


class MaskThread:
    """Thread that makes masks, in turns by owner. It has a low priority on Linux.

    Masks of grammars whose last mask was slow come after others, and wait while the thread rests.
    After MAX_QUICK_SECONDS of others, one of them has a turn. So another mask waits for at most one
    of them, and many quick ones do not hold them up. Outputs begin after the slow masks of their
    owner, and wait in the same way.

    Attributes:
        should_rest: whether to rest after slow masks, because other requests run.
    """

    def __init__(self) -> None:
        self.should_rest = True
        self._quick_lines: OwnerLines[_MaskJob] = OwnerLines()
        self._slow_lines: OwnerLines[_MaskJob] = OwnerLines()
        self._condition = threading.Condition()
        self._executor = ThreadPoolExecutor(1, "asyncllm-masks", lower_thread_priority)
        self._rests_until = 0.0
        self._quick_seconds = 0.0

    def submit(
        self, owner: str | None, make_mask: Callable[[], MaskResult], speed: MaskSpeed | None
    ) -> Future[MaskResult]:
        """Queue a mask, or the beginning of an output if ``speed`` is None.

        Raises:
            RuntimeError: if no thread can be started.
        """
        self._executor.submit(self._make_next_mask)
        job = _MaskJob(owner, make_mask, speed)
        with self._condition:
            self._push(job)
            self._condition.notify()
        return job.result

    def close(self) -> None:
        """Cancel the queued masks, and wait until the current one is made."""
        with self._condition:
            for job in (*self._quick_lines, *self._slow_lines):
                job.result.cancel()
        self._executor.shutdown(cancel_futures=True)

    def _push(self, job: _MaskJob) -> None:
        if job.speed is None:
            self._slow_lines.push(job.owner, job, rank=1)
        else:
            lines = self._slow_lines if job.speed.is_known_slow else self._quick_lines
            lines.push(job.owner, job)

    def _take_next_job(self) -> _MaskJob | None:
        """Remove and return the next job; None if there is none, or if the thread has to rest
        first."""
        slow_job = self._slow_lines.peek()
        if slow_job is not None and time.monotonic() < self._rests_until:
            slow_job = None
        has_slow_turn = slow_job is not None and self._quick_seconds >= MAX_QUICK_SECONDS
        while not has_slow_turn and (job := self._quick_lines.peek()) is not None:
            _remove(self._quick_lines, job)
            if job.speed is None or not job.speed.is_known_slow:
                return job
            self._push(job)  # A mask of the same grammar was slow meanwhile.
        if slow_job is not None:
            _remove(self._slow_lines, slow_job)
            self._quick_seconds = 0.0
        return slow_job

    def _make_next_mask(self) -> None:
        time.sleep(GIL_YIELD_SECONDS)
        with self._condition:
            while (job := self._take_next_job()) is None:
                # A slow job waits until the rest ends, perhaps for 0 seconds. If there is no job,
                # ``submit`` is about to push one and notify.
                rest = max(self._rests_until - time.monotonic(), 0.0)
                self._condition.wait(rest if len(self._slow_lines) else None)
        if not job.result.set_running_or_notify_cancel():
            return
        is_quick = job.speed is not None and not job.speed.is_known_slow
        began = time.thread_time()
        try:
            job.result.set_result(job.make_mask())
        except BaseException as error:  # A grammar backend's native code may panic.
            job.result.set_exception(error)
        seconds = time.thread_time() - began
        if is_quick:
            self._quick_seconds += seconds
        if self.should_rest and seconds > MIN_REST_MASK_SECONDS:
            self._rests_until = time.monotonic() + REST_TO_MASK_RATIO * seconds


def _remove(lines: OwnerLines[_MaskJob], job: _MaskJob) -> None:
    """Remove a job, and move its owner behind the other owners."""
    lines.discard(job.owner, job)
    lines.end_turn(job.owner)
