"""EngineThread: the daemon thread of the step loop, and the task that watches it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from concurrent.futures import Future, InvalidStateError
from functools import partial

from asyncllm.checkpoint.progress import LoadStage
from asyncllm.config import EngineConfig
from asyncllm.core.admission import Admission
from asyncllm.core.engine_core import CLOSED_MESSAGE, EngineCore, close_executor
from asyncllm.core.scheduler import Scheduler
from asyncllm.errors import AsyncLLMError, EngineClosedError, EngineError, with_cause
from asyncllm.logger import get_logger
from asyncllm.runtime.event_loop import post_when_done, running_backend, running_loop
from asyncllm.runtime.loading import (
    LoadedModel,
    Loader,
    check_logits_processors,
    make_grammar_compiler,
)
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.validation import describe_error

_EXIT_JOIN_SECONDS = 2.0
_NEVER_SECONDS = 1e9
"""Timeout in seconds (31 years) of a timer that is not meant to fire."""

logger = get_logger("asyncllm")


class _StartAborted(BaseException):
    """Exception that ends the loading of a model whose start was cancelled."""


class EngineThread:
    """Thread that loads a model and runs its step loop.

    Attributes:
        ready: future, done when the model is loaded, or failed with the error of loading it.
        exited: future, done when the thread has released everything, or is stuck.
        progress: (done, total) in units of ``stage``: bytes of weights, steps that compile kernels,
            or CUDA graphs.
        stage: the unit of ``progress``.
        closing: whether ``close`` was called.
        pid: process in which the thread runs.
        loaded_model, core, grammar_compiler: model, step loop and grammar compiler; set once
            ``ready`` is done.
    """

    def __init__(self, config: EngineConfig, loader: Loader) -> None:
        self.ready: Future[None] = Future()
        self.exited: Future[None] = Future()
        self.progress = (0, 0)
        self.stage: LoadStage = "weights"
        self.loaded_model: LoadedModel
        self.core: EngineCore
        self.grammar_compiler: GrammarCompiler
        self._config = config
        self._loader = loader
        self.closing = False
        self._is_start_aborted = False
        self.pid = os.getpid()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name="asyncllm-engine", daemon=True)

    # --- on the engine thread ----------------------------------------------------------

    def _main(self) -> None:
        try:
            self._load()
        except BaseException as error:
            self._exit()
            self.ready.set_exception(_as_start_error(error))
            return
        self.ready.set_result(None)
        if self._is_start_aborted:
            self.close(0.0)
        try:
            self.core.run()
            self._log_end()
        finally:
            self._exit()

    def _load(self) -> None:
        began = time.monotonic()
        self.loaded_model = self._loader(self._config, self._on_progress)
        executor = self.loaded_model.executor
        try:
            check_logits_processors(self._config, executor)
            config, clock = self._config, time.monotonic
            scheduler = Scheduler(
                executor.info,
                policy=config.scheduling_policy,
                enable_prefix_caching=config.enable_prefix_caching is not False,
                in_process=getattr(executor, "in_process", None),
            )
            admission = Admission(config.max_queued_requests, config.max_queued_tokens, clock)
            self.core = EngineCore(executor, scheduler, admission)
            self.core.thread = self._thread
            self.grammar_compiler = make_grammar_compiler(self._config, self.loaded_model)
            atexit.register(self._at_exit)
            self._log_start(time.monotonic() - began)
        except BaseException:
            close_executor(executor)
            raise

    def _log_start(self, seconds: float) -> None:
        info = self.loaded_model.executor.info
        logger.info(
            "engine started in %.2f s: model %s, %d KV blocks of %d tokens, max_model_len=%d, "
            "max_num_seqs=%d, max_num_batched_tokens=%d, %d steps in flight at most",
            seconds,
            self._config.model_name,
            info.num_blocks - 1,
            info.block_size,
            info.max_model_len,
            info.max_num_seqs,
            info.max_num_batched_tokens,
            info.pipeline_depth,
        )

    def _log_end(self) -> None:
        # ``check_for_hung_step`` has logged a step that hung.
        if self.core.fatal_error is not None and not self.core.is_hung:
            logger.error("the engine died", exc_info=self.core.fatal_error)
        stats = self.core.stats()
        logger.info(
            "engine ended: %d requests finished, %d aborted, %d failed, %d refused",
            stats.num_finished,
            stats.num_aborted,
            stats.num_failed,
            stats.num_rejected,
        )

    def _exit(self) -> None:
        """Complete ``exited``, unless it is complete already. Called when the thread has finished
        or is stuck."""
        atexit.unregister(self._at_exit)
        with contextlib.suppress(InvalidStateError):
            self.exited.set_result(None)

    def _on_progress(self, done: int, total: int, stage: LoadStage = "weights") -> None:
        self.progress, self.stage = (done, total), stage
        if self._is_start_aborted:
            raise _StartAborted

    # --- from other threads ------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; raise EngineError if the system cannot start one."""
        if sys.is_finalizing():
            # At interpreter exit no other thread runs, so Thread.start would wait for ever.
            raise EngineError("the engine could not start: the interpreter is exiting")
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            raise _as_start_error(error) from error

    def abort_start(self) -> None:
        """End the thread of a start that failed or was cancelled."""
        self._is_start_aborted = True
        if self.ready.done() and self.ready.exception() is None:
            self.close(0.0)

    def close(self, drain: float | None, reason: str = CLOSED_MESSAGE) -> None:
        """Refuse requests from now on, and end the step loop after ``drain`` seconds. Takes no
        lock, so that a destructor may call this method at any time. Only the ``reason`` of the
        first call counts; ``error`` reports it."""
        if not self.closing:
            self.closing, self.core.close_reason = True, reason
        self.core.send(self.core.on_close, drain)

    @property
    def error(self) -> EngineError | None:
        """Error for calls to an engine that has ended; None after the application's own
        ``aclose``."""
        if self.is_forked_child():
            return self.forked_error()
        if self.core.fatal_error is None and self.core.close_reason == CLOSED_MESSAGE:
            return None
        return self.core.shutdown_error()

    @property
    def thread_to_join(self) -> threading.Thread | None:
        """Thread to join once ``exited`` is done; None if the thread is stuck."""
        return None if self.core.is_hung else self._thread

    def wait_exited(self) -> None:
        """Wait for ``exited`` without an event loop, and meanwhile notice a step that hangs."""
        while not self.exited.done():
            with contextlib.suppress(TimeoutError):
                self.exited.result(self.hang_check_interval)
            self.check_for_hung_step()

    def is_forked_child(self) -> bool:
        """Whether this process was forked from the one that runs the thread. A forked child has no
        engine thread."""
        return os.getpid() != self.pid

    def check_not_forked(self) -> None:
        """Raise EngineClosedError in a forked child, which has no engine thread."""
        if self.is_forked_child():
            raise self.forked_error()

    def forked_error(self) -> EngineClosedError:
        return EngineClosedError(
            f"the engine belongs to process {self.pid}, this is process {os.getpid()}: "
            "after a fork, expected an engine that the child makes for itself"
        )

    def _at_exit(self) -> None:
        if not self.is_forked_child():
            self.close(0.0, "the interpreter is exiting")
            self._thread.join(_EXIT_JOIN_SECONDS)

    # --- on the event loop that started the thread -------------------------------------

    def supervise(self) -> None:
        """Start the background task on the running event loop. The task ends with the thread,
        closes the engine when the event loop ends, and notices a step that hangs."""
        loop = running_loop()
        if isinstance(loop, asyncio.AbstractEventLoop):
            # Keep a reference to the task: the loop has only weak references to tasks.
            self._task = loop.create_task(_watch_thread(self), name="asyncllm-engine")
            # A closed loop never ends its tasks but drops its timers, so a timer's finalizer
            # detects the loop's end.
            timer = loop.call_later(_NEVER_SECONDS, bool)
            finalizer = weakref.finalize(timer, self.close_after_loop_end)
            finalizer.atexit = False
            del timer
            self._task.add_done_callback(
                lambda _: (alive := finalizer.detach()) and alive[0].cancel()
            )
        else:
            from trio.lowlevel import spawn_system_task

            spawn_system_task(_watch_thread, self, name="asyncllm-engine")

    def close_after_loop_end(self) -> None:
        """Close an engine whose event loop has ended. Takes no lock, because this method may run
        wherever an event loop is closed."""
        if not self.is_forked_child() and not self.exited.done():
            self.close(
                0.0,
                "the event loop that the engine was started on has ended, or cancelled the "
                "engine's task; expected `await engine.aclose()` before that",
            )

    @property
    def step_timeout(self) -> float:
        """Seconds after which a step counts as hung. Valid once ``ready`` is done, because the
        default is the device's."""
        timeout = self._config.step_timeout
        return self.loaded_model.executor.info.step_timeout if timeout is None else timeout

    @property
    def hang_check_interval(self) -> float:
        """Seconds between two checks of the step under way."""
        return max(self.step_timeout / 8, 0.01)

    async def join_watch_task(self) -> None:
        """Wait for the task that watches the thread, if the task belongs to the running loop. Once
        the thread has exited, the task ends within a turn of the loop."""
        task = self._task
        if task is not None and not task.done() and task.get_loop() is running_loop():
            await asyncio.wait({task})

    def check_for_hung_step(self) -> None:
        """Declare the engine dead if the device has not answered for ``step_timeout``."""
        timeout = self.step_timeout
        error = EngineError(
            f"a step has taken longer than step_timeout={timeout:g} s; the stuck thread is "
            f"{self._thread.name!r} (ident {self._thread.ident})"
        )
        if self.core.fail_if_hung(timeout, error):
            self._exit()
            logger.error("the engine died: %s", error)


async def _watch_thread(thread: EngineThread) -> None:
    """Background task of ``supervise``. It refers to the thread and not to the engine, so that an
    engine without other references is collected."""
    backend = running_backend()
    exited = backend.make_waiter()
    post_when_done(thread.exited, partial(exited.set_result, None))
    try:
        while not thread.exited.done():
            await backend.wait_at_most(exited, thread.hang_check_interval)
            thread.check_for_hung_step()
    finally:
        thread.close_after_loop_end()


def _as_start_error(error: BaseException) -> AsyncLLMError:
    # ``isinstance`` may run the exception's own ``__class__``, which may raise.
    if issubclass(type(error), AsyncLLMError):
        return error  # pyright: ignore[reportReturnType]  # narrows by isinstance only
    return with_cause(EngineError(f"the engine could not start: {describe_error(error)}"), error)
