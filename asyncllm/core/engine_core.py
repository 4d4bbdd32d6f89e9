"""EngineCore: the step loop. Everything in here runs on the engine thread, but for the
methods that say otherwise."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncllm.core.admission import Admission
from asyncllm.core.deadlines import DeadlineExceededError, Deadlines
from asyncllm.core.executor import Executor, StepOutOfMemoryError
from asyncllm.core.idle_calls import IdleCalls
from asyncllm.core.output_processor import OutputProcessor, as_request_error, make_partial
from asyncllm.core.request import RequestGroup, Status
from asyncllm.core.scheduled_step import ScheduledStep
from asyncllm.core.scheduler import Scheduler
from asyncllm.core.structured_output import make_masks
from asyncllm.core.tracebacks import clear_frames
from asyncllm.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    RequestError,
)
from asyncllm.logger import get_logger
from asyncllm.outputs import EngineStats
from asyncllm.validation import explain

CLOSED = "the engine is closed; expected a started one"
_PAUSED_GRACE = 1.0

logger = get_logger("asyncllm")


class _DeclaredHung(BaseException):
    """Unwinds the engine thread when it returns from a call in which it was declared hung."""


class EngineCore:
    """Drains commands, schedules, launches, collects, and passes results on.

    Args:
        executor: the device; closed when ``run`` returns.
        scheduler: made for that executor.
        admission: shared with the submitting side.
        clock: seconds, monotonic.

    Attributes:
        fatal_error: what killed the engine.
        thread: the engine thread, on which ``check_waiting`` raises.
        hung: it died because a call of the executor did not return in time.
        close_reason: what closed it; CLOSED is the application's own ``aclose``.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        admission: Admission,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.admission = admission
        self.clock = clock
        self.output_processor = OutputProcessor(scheduler, admission, clock)
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None
        self.inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.fatal_error: BaseException | None = None
        self.hung = False
        self.close_reason = CLOSED
        self._lock = threading.Lock()
        self._on_device_since: float | None = None
        self._calls = IdleCalls(self.inbox)
        self._in_flight: deque[tuple[ScheduledStep, float]] = deque()
        self._deadlines = Deadlines()
        self._suspended = False
        self._closing_at: float | None = None
        self._only_paused_since: float | None = None
        self._closed = False
        self._masked_step = -1
        self._num_steps = 0
        self._last_step_time = 0.0

    # --- from any thread ---------------------------------------------------------------

    def send(self, run: Callable[..., None], *args: Any) -> None:
        """Asks the engine thread to call ``run(*args)``. ``SimpleQueue.put`` is re-entrant,
        so a destructor may come here from within any other call of it."""
        self.inbox.put(partial(run, *args))

    def call(self, run: Callable[..., Any], *args: Any) -> Future[Any]:
        """Asks for ``run(*args)`` with no step in flight; any thread but the engine's. The
        future gets what it returns. It is completed in every case: if the loop ends first, with
        ``ending``."""
        self.check_waiting()
        return self._calls.submit(run, args, self.ending)

    def check_waiting(self) -> None:
        """Raises RuntimeError on the engine thread, which would wait for itself for ever."""
        if threading.current_thread() is self.thread:
            raise RuntimeError(
                "the engine thread cannot wait for the engine: in a logits processor, an observer "
                "or a log handler, expected to hand the call to another thread"
            )

    def abort(self, group: RequestGroup) -> None:
        """Any thread, any number of times. The flag is set before the command travels, so
        that an abort is seen even if it overtakes the group's own arrival."""
        if not group.cancelled:
            group.cancelled = True
            self.send(self.on_abort, group)

    def abandon(self, group: RequestGroup) -> None:
        """``abort`` for destructors: in a forked child, where no engine thread lives and the
        queue may have been copied in mid-operation, it does nothing."""
        if os.getpid() == self.pid:
            self.abort(group)

    def stats(self) -> EngineStats:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        states, info = scheduler.kv.states, scheduler.info
        num_running, num_paused = len(scheduler.running), len(scheduler.paused)
        num_blocks, num_free = pool.num_usable, pool.num_free
        if self.fatal_error is not None:
            # What the scheduler still holds is what the last step left it with.
            num_running, num_paused, num_free = 0, 0, num_blocks
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, self.admission.num_live - num_running - num_paused),
            num_paused=num_paused,
            num_blocks=num_blocks,
            num_free_blocks=num_free,
            kv_cache_usage=1.0 - num_free / num_blocks,
            prefix_cache_queries=scheduler.kv.num_queried_tokens,
            prefix_cache_hits=scheduler.kv.num_hit_tokens,
            num_state_snapshots=info.num_state_snapshots,
            num_cached_states=states.pool.num_cached if states is not None else 0,
            state_snapshot_bytes=info.num_state_snapshots * info.state_bytes,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=scheduler.num_generated_tokens,
            num_steps=self._num_steps,
            num_requests=self.admission.num_requests,
            num_rejected=self.admission.num_rejected,
            num_finished=self.output_processor.num_finished,
            num_aborted=self.output_processor.num_aborted,
            num_failed=self.output_processor.num_failed,
            last_step_time=self._last_step_time,
        )

    def ending(self) -> EngineError:
        """Why this engine takes nothing more; any thread, once it does not."""
        if self.fatal_error is None:
            return EngineClosedError(self.close_reason)
        error = EngineDeadError(f"the engine died: {explain(self.fatal_error)}")
        error.__cause__ = self.fatal_error
        return error

    def fail_hung(self, timeout: float, cause: Exception) -> bool:
        """Fails everything if the engine thread has been in one call of the executor for
        ``timeout`` seconds; any thread. True for the one caller that found out.

        The verdict falls in such a call only and under a lock, so the thread is not in the
        middle of anything else; should it ever come back, it touches nothing.
        """
        with self._lock:
            since = self._on_device_since
            if self.hung or since is None or self.clock() - since < timeout:
                return False
            self.hung = True
            if self.fatal_error is None:
                self.fatal_error = cause
        self._fail_all()
        return True

    # --- the loop ----------------------------------------------------------------------

    def run(self) -> None:
        """Runs until it is told to close or a step fails. Never raises."""
        try:
            while not self._closed:
                self.step()
        except _DeclaredHung:
            pass
        except BaseException as error:
            self.fatal_error = error
            self._fail_all()
            # The error lives as long as the engine; what its frames refer to need not.
            clear_frames(error)
        finally:
            self._calls.close(self.ending)
            self._in_flight.clear()
            self._calls.due.clear()
            with contextlib.suppress(_DeclaredHung):
                self._on_device(close_executor, self.executor)

    def _on_device(self, run: Callable[..., Any], *args: Any) -> Any:
        """A call into the executor, which may never return; see ``fail_hung``."""
        self._on_device_since = self.clock()
        try:
            return run(*args)
        finally:
            with self._lock:
                self._on_device_since = None
                if self.hung:
                    raise _DeclaredHung

    def step(self) -> None:
        """One turn. With a pipeline of depth 2, step N+1 is on the device while N's results
        are taken in and N+2 is scheduled; results are announced last, right before the
        thread waits again and gives up the GIL."""
        self._drain()
        self._expire_deadlines()
        if self._closing_at is not None:
            self._check_closing(self._closing_at)
        if self._calls.due and not self._in_flight:
            # What a call raises ends the engine, as a step does that fails.
            self._calls.run_due()
        launched = not self._closed and self._launch()
        self.output_processor.flush_wakeups()
        if self._closed:
            return
        if self._in_flight and (not launched or self._pipeline_full()):
            self._collect()
        elif not launched and (self._suspended or not self.scheduler.has_work()):
            self._wait_for_command()

    def _pipeline_full(self) -> bool:
        return len(self._in_flight) >= self.executor.info.pipeline_depth

    def _drain(self) -> None:
        try:
            while True:
                self.inbox.get_nowait()()
        except queue.Empty:
            return

    def _wait_for_command(self) -> None:
        """Blocks until there is something to do; an idle engine uses no CPU."""
        timeout = self._time_to_next_event()
        if timeout is not None and timeout <= 0:
            return
        try:
            command = self.inbox.get(timeout=timeout)
        except queue.Empty:
            return
        command()

    def _launch(self) -> bool:
        if self._suspended or self._calls.due or self._pipeline_full():
            return False
        if not self.scheduler.has_work():
            return False
        step = self.scheduler.schedule()
        for request, error in self.scheduler.failed:
            self.output_processor.fail(request.group, error)
        self.scheduler.failed.clear()
        if step is None:
            # Requests that could not run were failed; the next turn sees what is left.
            return False
        now = self.clock()
        for request in step.admitted:
            if request.first_scheduled_at is None:
                request.first_scheduled_at = now
                self.admission.leave_queue(request)
        self._in_flight.append((step, now))
        try:
            self._on_device(self.executor.launch, step.batch)
        except StepOutOfMemoryError as error:
            self._retry_smaller(error)
        self._send_masks()
        return True

    def _send_masks(self) -> None:
        """Queues the second half of a step with grammars, whose forward pass has begun: once it is
        the oldest in flight, all tokens that its masks depend on are known."""
        step = self._in_flight[0][0] if self._in_flight else None
        if step is None or not step.is_masked or step.batch.step == self._masked_step:
            return
        self._masked_step = step.batch.step
        masks, ends = make_masks(step)
        for request, error in ends:
            if error is None:
                self.output_processor.complete(request)
            else:
                group = request.group
                self.output_processor.fail(group, as_request_error(group, error))
        self._on_device(self.executor.sample, masks)

    def _collect(self) -> None:
        step, launched_at = self._in_flight[0]
        try:
            result = self._on_device(self.executor.collect)
        except StepOutOfMemoryError as error:
            self._retry_smaller(error)
            return
        self._in_flight.popleft()
        now = self.clock()
        self._num_steps += 1
        self._last_step_time = now - launched_at
        for event in self.scheduler.update(step, result):
            self.output_processor.deliver(event, now)
        self.scheduler.budget.recover()
        self._send_masks()

    def _retry_smaller(self, error: StepOutOfMemoryError) -> None:
        """Rolls back every step in flight and shrinks the token budget. A step of a single token
        cannot be made smaller: its request fails."""
        steps = [step for step, _ in self._in_flight]
        self._in_flight.clear()
        self._on_device(self.executor.discard)
        self.scheduler.rollback(steps)
        too_big = self.scheduler.budget.shrink(steps)
        logger.warning(
            "a step ran out of device memory; steps have at most %d tokens for a while",
            self.scheduler.budget.tokens,
        )
        for request in too_big:
            failure = RequestError(
                f"request {request.request_id!r}: the device has too little memory for a "
                "step of this request alone"
            )
            failure.__cause__ = error
            self.output_processor.fail(request.group, failure)

    # --- commands ----------------------------------------------------------------------

    def on_add(self, group: RequestGroup) -> None:
        """Queues a group, which has its prompt and may have been aborted meanwhile."""
        if all(member.status is not Status.NEW for member in group.members):
            return
        if group.cancelled:
            self.on_abort(group)
            return
        if group.deadline < math.inf:
            self._deadlines.add(group, self.admission.num_live)
        for request in group.members:
            self.scheduler.add(request)

    def on_watch_deadline(self, group: RequestGroup) -> None:
        """Watches the deadline of a group whose prompt is still being tokenised."""
        if any(member.status is Status.NEW for member in group.members):
            self._deadlines.add(group, self.admission.num_live)

    def on_fail(self, group: RequestGroup, error: BaseException) -> None:
        """Fails a group whose prompt or grammar could not be prepared."""
        self.output_processor.fail(group, as_request_error(group, error))

    def on_abort(self, group: RequestGroup) -> None:
        self.output_processor.abort(group)

    def on_drained(self, group: RequestGroup) -> None:
        """Resumes a group under backpressure whose stream has been read down far enough."""
        self.output_processor.release(group)

    def suspend(self, suspended: bool) -> None:
        """Stops or resumes scheduling; run through ``call``. A closing engine is not stopped: it
        could not be resumed."""
        self._suspended = suspended and self._closing_at is None

    def on_close(self, drain: float | None) -> None:
        """Ends the loop: at once, after ``drain`` seconds, or when all have finished, for which
        a suspended engine goes on. The application is refused new requests already."""
        self._suspended = False
        closing_at = math.inf if drain is None else self.clock() + drain
        if self._closing_at is None or closing_at < self._closing_at:
            self._closing_at = closing_at

    # --- endings -----------------------------------------------------------------------

    def _expire_deadlines(self) -> None:
        if not self._deadlines:
            return
        now = self.clock()
        for group in self._deadlines.expire(now):
            status = group.unfinished[0].status
            where = status.name.lower() if status else "being tokenised"
            error = DeadlineExceededError(
                f"request {group.request_id!r} passed its deadline while {where}, "
                f"{now - group.arrived_at:.3f} s after it was submitted",
                partial=make_partial(group, now),
            )
            self.output_processor.fail(group, error)

    def _check_closing(self, closing_at: float) -> None:
        now = self.clock()
        live = self.admission.num_live
        only_paused = live > 0 and live == len(self.scheduler.paused)
        if not only_paused:
            self._only_paused_since = None
        elif self._only_paused_since is None:
            self._only_paused_since = now
        since = self._only_paused_since
        unread = since is not None and now - since >= _PAUSED_GRACE
        if live == 0 or now >= closing_at or unread:
            for group in self.admission.close(self.ending):
                group.cancelled = True
                self.on_abort(group)
            self._closed = True

    def _time_to_next_event(self) -> float | None:
        """Seconds, an hour at most; None for no deadline and no closing."""
        soonest = self._deadlines.soonest
        if self._closing_at is not None:
            soonest = min(soonest, self._closing_at)
            if self._only_paused_since is not None:
                soonest = min(soonest, self._only_paused_since + _PAUSED_GRACE)
        return None if soonest == math.inf else min(soonest - self.clock(), 3600.0)

    def _fail_all(self) -> None:
        """Fails every live request of a dead engine, in any state, and all later calls. On the
        engine thread, or on the one that declared it hung."""
        self._calls.close(self.ending)
        for group in self.admission.close(self.ending):
            for request in group.members[-1:]:
                self.output_processor.close(request, self.ending())
        self.output_processor.flush_all_wakeups()


def close_executor(executor: Executor) -> None:
    """Closes a device that may have failed, and may fail again; that is only logged."""
    try:
        executor.close()
    except BaseException:
        logger.warning("the executor could not be closed", exc_info=True)
