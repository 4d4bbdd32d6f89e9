"""WorkerThread: runs jobs that are too long for an event loop, one at a time.

TokenizerThreads: a WorkerThread for short texts and one for long texts.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from asyncllm.errors import EngineClosedError, RequestError
from asyncllm.owner_lines import OwnerLines
from asyncllm.runtime.event_loop import wait_for
from asyncllm.text.long_text import LONG_TEXT_CHARACTERS
from asyncllm.validation import describe_error

T = TypeVar("T")


COOLDOWN_TO_JOB_RATIO = 2
"""Pause after a job, as a multiple of the job's duration."""

LARGE_JOB_DELAY_PER_SECOND = 2**20
"""A job of this size is queued as if it had arrived one second later, and other jobs in proportion
to their size. So small jobs overtake a large one that arrived shortly before them."""

MIN_TURN_SECONDS = 0.05
"""An owner's turn goes on with the owner's next job until the jobs of the turn have taken this long
together. So ten short jobs of one owner wait for one long job of another, instead of one each."""

POLL_SECONDS = 0.02
"""Maximum seconds between two checks whether a cooldown is still needed."""


class Cooldown:
    """Pause between the jobs of worker threads. During a job, an engine's steps hardly advance:
    by default Python releases the GIL only every 5 ms, and a step waits for the GIL many times. So
    after a job that took t seconds, no thread with the same Cooldown begins a job for
    COOLDOWN_TO_JOB_RATIO * t seconds, unless the engine has no steps to run. Jobs may overlap.

    Args:
        is_needed: function that tells whether the engine has running requests; called on any
            thread.
    """

    def __init__(self, is_needed: Callable[[], bool]) -> None:
        self._is_needed = is_needed
        self._ends_at = 0.0

    @cached_property
    def short_job_cooldown(self) -> Cooldown:
        """Cooldown for jobs of a few milliseconds: these must not wait for longer jobs."""
        return Cooldown(self._is_needed)

    def wait(self, close_event: threading.Event) -> None:
        """Wait until the cooldown ends or is not needed, or ``close_event`` is set."""
        while (left := self._ends_at - time.perf_counter()) > 0 and self._is_needed():
            if close_event.wait(min(left, POLL_SECONDS)):
                return

    def extend(self, job_began_at: float) -> None:
        """Begin the cooldown after a job. ``job_began_at`` is in ``perf_counter``'s seconds."""
        now = time.perf_counter()
        self._ends_at = max(self._ends_at, now + COOLDOWN_TO_JOB_RATIO * (now - job_began_at))


@dataclass(slots=True, eq=False)
class _Job:
    """A job that waits for its turn.

    Attributes:
        function: the job's work; None once its caller was cancelled.
    """

    owner: str | None
    function: Callable[[], Any] | None
    future: Future[Any] = field(default_factory=Future)


class WorkerThread:
    """Runs jobs on a daemon thread that lives only while there are jobs.

    It runs one job at a time, so that many jobs take no more memory and no more cores than one. The
    owners of the jobs take turns, of one long job or of short ones that take MIN_TURN_SECONDS
    together, so that many jobs of one owner delay another as one does. An owner's jobs of equal
    size go in order of arrival. A smaller job overtakes only larger ones of its owner that arrived
    shortly before it, so no job starves.

    Args:
        name: the thread's name.
        cooldown: pauses between jobs; None makes none.
    """

    def __init__(self, name: str, cooldown: Cooldown | None = None) -> None:
        self._name = name
        self._cooldown = cooldown
        self._lock = threading.Lock()
        self._jobs: OwnerLines[_Job] = OwnerLines()
        self._turn_owner: str | None = None
        self._turn_seconds = 0.0
        self._thread: threading.Thread | None = None
        self._close_event = threading.Event()

    def submit(
        self, job: Callable[[], T], job_size: int = 0, owner: str | None = None
    ) -> Future[T]:
        """Queue a job. Any thread may call this method.

        Args:
            job_size: amount of work, in bytes or characters.
            owner: name of the user that the job is for.

        Raises:
            RequestError: if no thread can be started; a later job may succeed.
        """
        return self._enqueue(_Job(owner, job), job_size).future

    def _enqueue(self, job: _Job, job_size: int) -> _Job:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    raise RequestError(
                        "a long text needs a thread, and none can be started "
                        f"({describe_error(error)})"
                    ) from error
                self._thread = thread
            rank = time.monotonic() + job_size / LARGE_JOB_DELAY_PER_SECOND
            self._jobs.push(job.owner, job, rank)
        return job

    async def call(self, job: Callable[[], T], job_size: int = 0, owner: str | None = None) -> T:
        """Run a job on the thread, and return its result. The job runs in the caller's context, so
        that it belongs to the caller's trace. If the caller is cancelled, a job that has not begun
        never begins, and what it refers to is freed.

        Raises:
            RequestError: as ``submit``.
            EngineClosedError: if ``close`` dropped the job.
        """
        in_context = partial(contextvars.copy_context().run, job)
        queued = self._enqueue(_Job(owner, in_context), job_size)
        try:
            return await wait_for(queued.future)
        except CancelledError:
            raise EngineClosedError("the engine was closed before a long text's turn") from None
        finally:
            # The job keeps its place in the line: a lock must not be taken here, because a garbage
            # collection may run this on the worker thread, which holds it.
            if queued.future.cancel():
                queued.function = None
            del queued  # Break the cycle of future, exception and traceback, as in ``wait_for``.

    def close(self) -> threading.Thread | None:
        """Drop jobs that have not begun; returns the thread if one is running."""
        self._close_event.set()
        with self._lock:
            dropped, self._jobs = self._jobs, OwnerLines()
            thread = self._thread
        for job in dropped:
            job.future.cancel()
        return thread

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next job, and keep no reference to it. Returns False if there is none."""
        if self._cooldown is not None:
            self._cooldown.wait(self._close_event)
        with self._lock:
            job = self._begin_next()
            if job is None:
                self._thread = None
                return False
        function, future = job.function, job.future
        job.function = None
        assert function is not None
        began = time.perf_counter()
        try:
            try:
                result = function()
            finally:
                self._extend_turn(job, time.perf_counter() - began)
                if self._cooldown is not None:
                    self._cooldown.extend(began)
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)
        del function, future, job  # Break the cycle of future, exception and traceback.
        return True

    def _begin_next(self) -> _Job | None:
        """Take the next job from its owner's line, and drop cancelled ones before it, which take no
        turn. The caller holds the lock."""
        while (job := self._jobs.peek()) is not None:
            # An owner whose line goes on stays first, until ``_extend_turn`` ends its turn.
            self._jobs.discard(job.owner, job)
            if job.future.set_running_or_notify_cancel():
                return job
        return None

    def _extend_turn(self, job: _Job, duration: float) -> None:
        """Count a job in the turn of its owner, and end the turn if it was long enough."""
        with self._lock:
            if job.owner != self._turn_owner:
                self._turn_owner, self._turn_seconds = job.owner, 0.0
            self._turn_seconds += duration
            if self._turn_seconds >= MIN_TURN_SECONDS:
                self._turn_seconds = 0.0
                self._jobs.end_turn(job.owner)


class TokenizerThreads:
    """Two worker threads for texts, so that a short text never waits for a long one.

    Attributes:
        long_thread: thread of the texts from LONG_TEXT_CHARACTERS on, and of conversations that
            turn out to take long.
    """

    def __init__(self, name: str, cooldown: Cooldown) -> None:
        self.long_thread = WorkerThread(name, cooldown)
        self._short_thread = WorkerThread(f"{name}-short", cooldown.short_job_cooldown)

    def submit(
        self, job: Callable[[int | None], bool], num_characters: int, owner: str | None = None
    ) -> None:
        """Queue a job behind the other jobs of its owner. Raises the errors of
        ``WorkerThread.submit``.

        Args:
            job: function, called with the maximum number of characters, or None for no maximum. It
                returns False if its text is longer; then the thread of long texts calls it again.
            owner: as for ``WorkerThread.submit``.
        """

        def try_job() -> None:
            if not job(LONG_TEXT_CHARACTERS - 1):
                self.long_thread.submit(partial(job, None), owner=owner)

        if num_characters < LONG_TEXT_CHARACTERS:
            self._short_thread.submit(try_job, owner=owner)
        else:
            self.long_thread.submit(partial(job, None), owner=owner)

    async def call(
        self,
        job: Callable[[int | None], T | None],
        num_characters: int,
        owner: str | None = None,
    ) -> T | None:
        """Run a job on the same threads as ``submit``, and return its result. Short texts overtake
        long ones that arrived shortly before. A job returns None if its text is longer than the
        maximum."""
        result = None
        if num_characters < LONG_TEXT_CHARACTERS:
            result = await self._short_thread.call(
                partial(job, LONG_TEXT_CHARACTERS - 1), num_characters, owner
            )
        if result is None:
            result = await self.long_thread.call(partial(job, None), num_characters, owner)
        return result

    def close(self) -> list[threading.Thread]:
        """Drop jobs that have not begun; returns the threads that still run."""
        threads = (self.long_thread.close(), self._short_thread.close())
        return [thread for thread in threads if thread is not None]
