"""EngineCore: the step loop. Methods run on the engine thread unless their docstring says
otherwise."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncllm.core.admission import Admission
from asyncllm.core.block_hashes import HashedTokens
from asyncllm.core.calls_between_steps import CallsBetweenSteps
from asyncllm.core.deadlines import DeadlineExceededError, Deadlines
from asyncllm.core.executor import Executor, StepOutOfMemoryError
from asyncllm.core.mask_maker import MaskMaker
from asyncllm.core.output_processor import (
    OutputProcessor,
    as_request_error,
    make_partial_completion,
)
from asyncllm.core.parser_memory import ParserMemory
from asyncllm.core.request import OutputGrammar, RequestGroup, Status
from asyncllm.core.scheduled_step import ScheduledStep
from asyncllm.core.scheduler import Scheduler
from asyncllm.core.token_rate import TokenRate
from asyncllm.core.tracebacks import clear_frames
from asyncllm.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    RequestError,
    with_cause,
)
from asyncllm.logger import get_logger
from asyncllm.outputs import EngineStats
from asyncllm.validation import describe_error

CLOSED_MESSAGE = "the engine is closed; expected a started one"
_PAUSED_GRACE_SECONDS = 1.0

logger = get_logger("asyncllm")


class _DeclaredHungError(BaseException):
    """Exception that unwinds the engine thread if a device call returns after the thread was
    declared hung."""


class EngineCore:
    """Step loop: drains commands, schedules, launches, collects and delivers results.

    Args:
        executor: the device; closed when ``run`` returns.
        scheduler: the executor's scheduler.
        admission: the registry of requests, shared with threads that submit.
        clock: function that returns monotonic time in seconds.

    Attributes:
        fatal_error: the exception that killed the engine.
        thread: the engine thread, on which ``check_not_engine_thread`` raises.
        is_hung: whether the engine died because a call of the executor did not return in time.
        close_reason: message of EngineClosedError; CLOSED_MESSAGE after the application's own
            ``aclose``.
        closed: whether the engine has closed; its loop then ends.
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
        parser_memory = ParserMemory()
        self.output_processor = OutputProcessor(scheduler, admission, clock, parser_memory)
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None
        self.inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.fatal_error: BaseException | None = None
        self.is_hung = False
        self.close_reason = CLOSED_MESSAGE
        self._lock = threading.Lock()
        self._executor_call_began_at: float | None = None
        self._calls_between_steps = CallsBetweenSteps(self.inbox, self.shutdown_error)
        self._in_flight: deque[tuple[ScheduledStep, float]] = deque()
        self._deadlines = Deadlines()
        self._is_suspended = False
        self._closing_at: float | None = None
        self._only_paused_since: float | None = None
        self.closed = False
        self._mask_maker = MaskMaker(self.send, scheduler, parser_memory)
        self._sampled_step_number = -1
        self._num_steps = 0
        self._last_step_time = 0.0
        self._last_collected_at = 0.0
        self._token_rate = TokenRate()

    # --- from any thread ---------------------------------------------------------------

    def send(self, function: Callable[..., None], *args: Any) -> None:
        """Ask the engine thread to call ``function(*args)``. ``SimpleQueue.put`` is re-entrant, so
        a destructor may call this in the middle of another ``put``."""
        self.inbox.put(partial(function, *args))

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``function(*args)`` on the engine thread while no step is in flight. Any other thread
        may call it. The future gets the result, or ``shutdown_error`` if the loop ends first."""
        self.check_not_engine_thread()
        return self._calls_between_steps.submit(function, args)

    def check_not_engine_thread(self) -> None:
        """Raise RuntimeError if the caller is the engine thread, which would wait for itself for
        ever."""
        if threading.current_thread() is self.thread:
            raise RuntimeError(
                "the engine thread cannot wait for the engine: in a logits processor, an observer "
                "or a log handler, expected to hand the call to another thread"
            )

    def abort(self, group: RequestGroup) -> None:
        """Abort a group. Any thread may call it, any number of times. The ``cancelled`` flag is set
        before the command is sent: if the command arrives before the group, ``on_add`` sees the
        flag."""
        group.aborted = True
        if not group.cancelled:
            group.cancelled = True
            self.send(self.on_abort, group)

    def abandon(self, group: RequestGroup) -> None:
        """Abort a group from a destructor. Does nothing in a forked child, which has no engine
        thread and may have copied the queue in the middle of an operation."""
        if os.getpid() == self.pid:
            self.abort(group)

    def num_cached_tokens(self, prompt: HashedTokens) -> int:
        """Length in tokens of the prefix that an admission of ``prompt`` would find in the cache
        now. Any thread may call it, at any time; see ``KVCacheManager.num_cached_tokens``."""
        if self.fatal_error is not None:
            return 0
        return self.scheduler.kv.num_cached_tokens(prompt)

    def stats(self) -> EngineStats:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        states, info = scheduler.kv.states, scheduler.info
        num_running, num_paused = len(scheduler.running), len(scheduler.paused)
        num_blocks, num_free = pool.num_usable, pool.num_free
        num_queued_tokens = self.admission.num_queued_tokens
        if self.fatal_error is not None:
            # Report no requests: the scheduler of a dead engine still has those of its last step.
            num_running, num_paused, num_free, num_queued_tokens = 0, 0, num_blocks, 0
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, self.admission.num_live_requests - num_running - num_paused),
            num_paused=num_paused,
            num_queued_tokens=num_queued_tokens,
            is_paused=self._is_suspended,
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
            prompt_tokens_per_second=self._token_rate.tokens_per_second,
        )

    def shutdown_error(self) -> EngineError:
        """Make the error for a request to an engine that has closed or died. Any thread may call
        it."""
        if self.fatal_error is None:
            return EngineClosedError(self.close_reason)
        message = f"the engine died: {describe_error(self.fatal_error)}"
        return with_cause(EngineDeadError(message), self.fatal_error)

    def fail_if_hung(self, timeout: float, cause: Exception) -> bool:
        """Fail every request if one call of the executor has taken ``timeout`` seconds. Any thread
        may call it. Returns True for the one caller that declares the engine hung.

        ``_lock`` guarantees that the engine thread is inside the executor's call. If the call ever
        returns, the engine thread ends without touching a request.
        """
        with self._lock:
            since = self._executor_call_began_at
            if self.is_hung or since is None or self.clock() - since < timeout:
                return False
            self.is_hung = True
            if self.fatal_error is None:
                self.fatal_error = cause
        self._fail_all_requests()
        return True

    # --- the loop ----------------------------------------------------------------------

    def run(self) -> None:
        """Run the loop until the engine closes or a step fails. Never raises."""
        try:
            while not self.closed:
                self.step()
        except _DeclaredHungError:
            pass
        except BaseException as error:
            self.fatal_error = error
            self._fail_all_requests()
            # The engine keeps the error, but the objects in its traceback should be freed now.
            clear_frames(error)
        finally:
            self._calls_between_steps.close()
            self._in_flight.clear()
            self._calls_between_steps.due_calls.clear()
            self._mask_maker.close()
            with contextlib.suppress(_DeclaredHungError):
                self._call_executor(close_executor, self.executor)

    def _call_executor(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call an executor's method, and note the time for ``fail_if_hung``: the call may hang."""
        self._executor_call_began_at = self.clock()
        try:
            return function(*args)
        finally:
            with self._lock:
                self._executor_call_began_at = None
                if self.is_hung:
                    raise _DeclaredHungError

    def step(self) -> None:
        """Run one turn of the loop. With a pipeline of depth 2, step N+1 runs on the device while
        N's results are processed and N+2 is scheduled. Readers are woken last, right before the
        thread waits and gives up the GIL."""
        self._run_commands()
        self._expire_deadlines()
        self._mask_maker.review_parsers()
        if self._closing_at is not None:
            self._close_if_due(self._closing_at)
        if self._calls_between_steps.due_calls and not self._in_flight:
            # An exception in a call ends the engine, as an exception in a step does.
            self._calls_between_steps.run_due_calls()
        launched = not self.closed and self._launch()
        self.output_processor.flush_wakeups()
        if self.closed:
            return
        if self._in_flight and (not launched or self._is_pipeline_full()):
            self._collect()
        elif not launched and (
            self._is_suspended
            or self._mask_maker.num_pending_masks
            or not self.scheduler.has_work()
        ):
            self._wait_for_command()

    def _is_pipeline_full(self) -> bool:
        return len(self._in_flight) >= self.executor.info.pipeline_depth

    def _run_commands(self) -> None:
        try:
            while True:
                self.inbox.get_nowait()()
        except queue.Empty:
            return

    def _wait_for_command(self) -> None:
        """Wait until there is something to do; an idle engine uses no CPU."""
        with contextlib.suppress(queue.Empty):
            self.inbox.get(timeout=self._seconds_to_next_event())()

    def _launch(self) -> bool:
        if self._is_suspended or self._calls_between_steps.due_calls or self._is_pipeline_full():
            return False
        if not self.scheduler.has_work():
            return False
        step = self.scheduler.schedule()
        for request, error in self.scheduler.failed:
            self.output_processor.fail(request.group, error)
        self.scheduler.failed.clear()
        if step is None:
            # The requests that can never run have just failed; the next turn schedules the rest.
            return False
        now = self.clock()
        if step.admitted:
            new = [request for request in step.admitted if request.first_scheduled_at is None]
            for request in new:
                request.first_scheduled_at = now
            self.admission.remove_from_queue(new)
        self._in_flight.append((step, now))
        try:
            self._call_executor(self.executor.launch, step.batch)
        except StepOutOfMemoryError as error:
            self._handle_out_of_memory(error)
        self._send_masks()
        return True

    def _send_masks(self) -> None:
        """Send the masks of a step with grammars once it is the oldest step in flight, because its
        masks depend on the tokens of all earlier steps."""
        step = self._in_flight[0][0] if self._in_flight else None
        if (
            step is None
            or not step.has_grammar_mask
            or step.batch.step == self._sampled_step_number
        ):
            return
        self._sampled_step_number = step.batch.step
        masks, ends, overdue = self._mask_maker.make_masks(step, self._last_step_time)
        for request, error in ends:
            if error is None:
                self.output_processor.finish_request(request)
            else:
                self.on_fail(request.group, error)
        for request in overdue:
            if not request.is_finished:  # It may have ended with its group.
                self.scheduler.preempt(request)
                self._mask_maker.make_mask_ahead(request)
        self._call_executor(self.executor.sample, masks)

    def _collect(self) -> None:
        step, launched_at = self._in_flight[0]
        try:
            result = self._call_executor(self.executor.collect)
        except StepOutOfMemoryError as error:
            self._handle_out_of_memory(error)
            return
        self._in_flight.popleft()
        now = self.clock()
        self._num_steps += 1
        self._last_step_time = now - launched_at
        # With two steps in flight, a step begins when the step before it ends.
        began_at = max(launched_at, self._last_collected_at)
        self._token_rate.add_step(step.batch.num_tokens, now - began_at)
        if not step.admitted and step.batch.num_decodes == len(step.batch):
            self.scheduler.pace.record_decode_step(now - began_at)
        self._last_collected_at = now
        for event in self.scheduler.update(step, result):
            self.output_processor.deliver(event, now)
        if step.has_grammar_mask:
            self._mask_maker.make_masks_ahead(step)
        self.scheduler.budget.record_success()
        self._send_masks()

    def _handle_out_of_memory(self, error: StepOutOfMemoryError) -> None:
        """Roll back every step in flight and shrink the token budget. If even the largest step had
        a single token, the request of that token fails."""
        steps = [step for step, _ in self._in_flight]
        self._in_flight.clear()
        self._call_executor(self.executor.discard)
        self.scheduler.roll_back_steps(steps)
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
            self.output_processor.fail(request.group, with_cause(failure, error))

    # --- commands ----------------------------------------------------------------------

    def on_add(self, group: RequestGroup, grammars: Sequence[OutputGrammar] = ()) -> None:
        """Queue a group whose prompt is ready, unless it was aborted meanwhile.

        Args:
            grammars: one for each member, or empty; unused if the group has ended.
        """
        if all(member.status is not Status.NEW for member in group.members):
            return
        for member, grammar in zip(group.members, grammars, strict=False):
            member.structured_output = grammar
            if grammar.num_masks_ahead:
                member.run_ahead_end = 0
        if group.cancelled:
            self.on_abort(group)
            return
        if group.deadline < math.inf:
            self._deadlines.add(group, self.admission.num_live_requests)
        for request in group.members:
            if request.structured_output is None:
                self.scheduler.add(request)
            else:
                self._mask_maker.begin(request)

    def on_add_deadline(self, group: RequestGroup) -> None:
        """Watch the deadline of a group whose prompt is still being tokenised."""
        if any(member.status is Status.NEW for member in group.members):
            self._deadlines.add(group, self.admission.num_live_requests)

    def on_fail(self, group: RequestGroup, error: BaseException) -> None:
        """Fail a group whose prompt or grammar could not be prepared."""
        self.output_processor.fail(group, as_request_error(group, error))

    def on_abort(self, group: RequestGroup) -> None:
        self.admission.caller_queue.withdraw(group)
        self.output_processor.abort(group)

    def on_reader_caught_up(self, group: RequestGroup) -> None:
        """Resume a group under backpressure whose stream has been read far enough."""
        self.output_processor.resume_group(group)

    def set_suspended(self, is_suspended: bool) -> None:
        """Stop or resume scheduling; other threads use ``call(core.set_suspended, …)``. A closing
        engine is not stopped, because it could not be resumed."""
        self._is_suspended = is_suspended and self._closing_at is None

    def on_close(self, drain: float | None) -> None:
        """End the loop after ``drain`` seconds (0: at once), or, for None, when all requests have
        finished. A suspended engine is resumed, so that its requests can finish. New requests are
        already refused; the groups that wait for a place fail now."""
        self._is_suspended = False
        self.admission.close(self.shutdown_error)
        closing_at = math.inf if drain is None else self.clock() + drain
        if self._closing_at is None or closing_at < self._closing_at:
            self._closing_at = closing_at

    # --- endings -----------------------------------------------------------------------

    def _expire_deadlines(self) -> None:
        if not self._deadlines:
            return
        now = self.clock()
        for group in self._deadlines.expire(now):
            status = group.unfinished_requests[0].status
            where = status.name.lower() if status else "being tokenised"
            error = DeadlineExceededError(
                f"request {group.request_id!r} passed its deadline while {where}, "
                f"{now - group.arrived_at:.3f} s after it was submitted",
                partial=make_partial_completion(group, now),
            )
            self.output_processor.fail(group, error)

    def _close_if_due(self, closing_at: float) -> None:
        now = self.clock()
        live = self.admission.num_live_requests
        only_paused = live > 0 and live == len(self.scheduler.paused)
        if not only_paused:
            self._only_paused_since = None
        elif self._only_paused_since is None:
            self._only_paused_since = now
        paused_since = self._only_paused_since
        is_unread = paused_since is not None and now - paused_since >= _PAUSED_GRACE_SECONDS
        if live == 0 or now >= closing_at or is_unread:
            for group in self.admission.close(self.shutdown_error):
                group.cancelled = True
                self.on_abort(group)
            self.closed = True

    def _seconds_to_next_event(self) -> float | None:
        """Seconds to the next deadline or the end of closing, at most an hour; None if there is
        neither."""
        earliest = self._deadlines.earliest
        if self._closing_at is not None:
            earliest = min(earliest, self._closing_at)
            if self._only_paused_since is not None:
                earliest = min(earliest, self._only_paused_since + _PAUSED_GRACE_SECONDS)
        if earliest == math.inf:
            return None
        return min(max(earliest - self.clock(), 0.0), 3600.0)

    def _fail_all_requests(self) -> None:
        """Fail every live request of a dead engine, and all later calls. Runs on the engine thread,
        or on the thread that declared it hung."""
        self._calls_between_steps.close()
        for group in self.admission.close(self.shutdown_error):
            for request in group.members[-1:]:
                self.output_processor.end_group(request, self.shutdown_error())
        self.output_processor.flush_all_wakeups()


def close_executor(executor: Executor) -> None:
    """Close an executor whose device may have failed. Exceptions are only logged."""
    try:
        executor.close()
    except BaseException:
        logger.warning("the executor could not be closed", exc_info=True)
