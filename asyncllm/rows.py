"""RowJob: submits the rows of a batch job, a bounded number at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio.lowlevel

from asyncllm import validation as check
from asyncllm.core.tracebacks import replace_tracebacks_by_note
from asyncllm.errors import EngineError, RequestError, with_cause
from asyncllm.logger import get_logger
from asyncllm.outputs import Completion
from asyncllm.runtime.event_loop import EventLoopBackend, running_backend
from asyncllm.runtime.handle import UncopyableHandle
from asyncllm.runtime.mailbox import ThreadMailbox
from asyncllm.runtime.worker_thread import WorkerThread
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.validation import describe_error

logger = get_logger("asyncllm")

_END_OF_ROWS: Any = object()

Submit = Callable[[Any, SamplingParams | None], Awaitable[TokenStream]]
"""Submits a prompt with its sampling parameters, waiting while the queue is full."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """Result of one row of ``AsyncLLMEngine.map``.

    Attributes:
        row: the caller's row.
        key: the row's key; without a ``key`` function, its index from 0.
        completion: the completion; of an aborted request, the output so far. None if the row failed
            in another way.
        error: why the row failed; None if it did not.
    """

    row: Any
    key: Any
    completion: Completion | None
    error: Exception | None


@dataclass(slots=True, eq=False)
class _Row:
    """A row of a batch job, until its result is read.

    It takes the place of the future or threading.Event by which a mailbox wakes a stream's reader:
    the mailbox calls ``set_result`` or ``set`` when the request has ended.
    """

    row: Any
    key: Any
    on_end: Callable[[_Row], object]
    completion: Completion | None = None
    error: Exception | None = None
    stream: TokenStream | None = None
    has_ended: bool = False

    def done(self) -> bool:
        return self.has_ended

    def set_result(self, _: None = None) -> None:
        """Mark the row as ended, unless it has ended already. A LoopMailbox calls this method."""
        if not self.has_ended:
            self.has_ended = True
            self.on_end(self)

    def set(self) -> None:
        """Same as ``set_result``. A ThreadMailbox wakes waiters by ``set``, like an Event."""
        self.set_result()

    @contextmanager
    def store_read_error(self) -> Iterator[None]:
        """Context manager that stores an exception from reading the stream as the row's error."""
        try:
            yield
        except Exception as error:
            replace_tracebacks_by_note(error)
            self.error = error
        finally:
            # Break a reference cycle: the row refers to the stream, the stream to its channel, and
            # the channel to the row as its waiter.
            self.stream = None


@dataclass(eq=False)
class RowJob:
    """Batch job of ``map``: how a row becomes a request, and the rows under way.

    Attributes:
        wake: function called when a row has ended; set by the reader.
        row_limit: maximum number of rows under way. A row is under way from when it is drawn until
            its result is read.
        is_running: function that returns whether the engine accepts requests; if it does not, the
            engine's error ends the job.
        error: exception that ended the job, until it is raised.

    Raises:
        InvalidRequestError: for an argument of ``AsyncLLMEngine.map`` that cannot be used.
    """

    rows: Any
    prompt: Callable[[Any], Any] | None = None
    sampling_params: SamplingParams | Callable[[Any], SamplingParams | None] | None = None
    key: Callable[[Any], Any] | None = None
    done: Container[Any] = ()
    ordered: bool = True
    max_under_way: int | None = None
    progress: Callable[[int, int], object] | None = None
    wake: Callable[[], object] = field(init=False)
    row_limit: int = field(init=False)
    is_running: Callable[[], bool] = field(init=False)
    error: BaseException | None = field(init=False, default=None)
    is_exhausted: bool = field(init=False, default=False)
    _iterator: Any = field(init=False, default=None)
    _under_way: dict[_Row, None] = field(init=False, default_factory=dict)
    _ended_rows: deque[_Row] = field(init=False, default_factory=deque)
    _num_drawn: int = field(init=False, default=0)
    _num_done: int = field(init=False, default=0)
    _num_failed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for name in ("prompt", "key", "progress"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise check.value_error(name, getattr(self, name), "a function, or None")
        if not isinstance(self.done, Container) or isinstance(self.done, str):
            raise check.value_error("done", self.done, "a container of keys, such as a set")
        self.ordered = check.boolean("ordered", self.ordered)
        is_text = isinstance(self.rows, (str, bytes, Mapping))
        if is_text or not isinstance(self.rows, Iterable | AsyncIterable):
            raise check.value_error("rows", self.rows, "an iterable of rows, or an async iterable")

    def bind_to_engine(self, max_rows: int, is_running: Callable[[], bool]) -> None:
        """Set the maximum number of rows under way, and the function ``is_running``."""
        max_under_way = check.integer(
            "max_under_way", self.max_under_way, 1, max_rows, optional=True
        )
        self.row_limit, self.is_running = max_under_way or max_rows, is_running

    @property
    def has_room(self) -> bool:
        return not self.is_exhausted and len(self._under_way) < self.row_limit

    def is_over(self) -> bool:
        """Whether the last result has been read. Raises the error that ended the job, if any."""
        if not self.is_exhausted or self._under_way:
            return False
        error, self.error = self.error, None
        if error is not None:
            raise error
        return True

    def end_input(self, error: BaseException | None = None) -> None:
        """Draw no more rows. ``error`` is raised after the results of the rows under way."""
        self.is_exhausted, self.error = True, error

    def iterator(self) -> Any:
        """Iterator or async iterator of ``rows``; made at the first call."""
        if self._iterator is None:
            is_async = isinstance(self.rows, AsyncIterable)
            self._iterator = aiter(self.rows) if is_async else iter(self.rows)
        return self._iterator

    def pop_iterator(self) -> Any:
        """Remove and return the iterator, to be closed; None if absent."""
        iterator, self._iterator = self._iterator, None
        return iterator

    @contextmanager
    def end_on_iterable_error(self) -> Iterator[None]:
        """Context manager for drawing a row: an exception of the caller's iterable ends the job."""
        try:
            yield
        except Exception as error:
            self._iterator = None  # A generator that raised needs no closing.
            failure = check.argument_error("rows", f"the iterable raised {describe_error(error)}")
            self.end_input(with_cause(failure, error))

    def make_request(self, row: Any) -> tuple[_Row, Any, SamplingParams | None] | None:
        """Make a row's request: the row, its prompt and its sampling parameters. Returns None if an
        earlier run has done the row, if ``key``, ``prompt`` or ``sampling_params`` raises for it,
        and after the last row."""
        if row is _END_OF_ROWS:
            self._iterator = None
            if not self.is_exhausted:
                self.end_input()
            return None
        new_row = _Row(row, self._num_drawn, self._on_end)
        self._num_drawn += 1
        try:
            if self.key is not None:
                new_row.key = None  # The key stays None if ``key`` raises.
                new_row.key = self.key(row)
            if new_row.key in self.done:
                self._num_done += 1
                return None
            prompt = row if self.prompt is None else self.prompt(row)
            params = self.sampling_params
            params = params(row) if callable(params) else params
        except Exception as error:
            self.fail_row(new_row, error)
            return None
        return new_row, prompt, params

    def fail_row(self, row: _Row, error: Exception) -> None:
        """End a row that was not submitted. Raises ``error`` if the engine has ended."""
        if isinstance(error, EngineError) and not self.is_running():
            raise error
        replace_tracebacks_by_note(error)
        row.error = error
        self._under_way[row] = None
        row.set_result()

    @contextmanager
    def store_submit_error(self, row: _Row) -> Iterator[None]:
        """Context manager that stores an exception from submitting as the row's error."""
        try:
            yield
        except Exception as error:
            self.fail_row(row, error)

    def add_submitted(
        self, row: _Row, stream: TokenStream, mailbox: ThreadMailbox | None = None
    ) -> None:
        """Register a submitted row; its end wakes the reader of the results."""
        row.stream = stream
        self._under_way[row] = None
        if not stream._register_end_waiter(row, mailbox):
            row.set_result()

    def _on_end(self, row: _Row) -> None:
        self._ended_rows.append(row)
        self.wake()

    def pop_ended(self) -> _Row | None:
        """Remove the next row that has ended; None if there is none."""
        if self.ordered:
            row = next(iter(self._under_way), None)
            if row is None or not row.has_ended:
                return None
            del self._under_way[row]
            return row
        while self._ended_rows:
            row = self._ended_rows.popleft()
            # The engine thread and the submitting thread may both have reported the row's end.
            if self._under_way.pop(row, row) is None:
                return row
        return None

    def make_result(self, row: _Row) -> RowResult:
        """Make the result of an ended row, and report the progress. Raises the row's EngineError if
        the engine has ended."""
        completion, error = row.completion, row.error
        if isinstance(error, EngineError) and not self.is_running():
            raise error
        if completion is not None and completion.finish_reason == "abort":
            error = RequestError("the row's request was aborted; its completion is what it had")
        self._num_done += 1
        self._num_failed += error is not None
        if self.progress is not None:
            try:
                self.progress(self._num_done, self._num_failed)
            except Exception as failure:
                logger.error("progress of map() raised %s", describe_error(failure))
        return RowResult(row.row, row.key, completion, error)

    def close(self) -> None:
        """Abort the rows under way, and draw no more. Takes no lock, so that a destructor may call
        this method."""
        self.end_input()
        under_way, self._under_way = self._under_way, {}
        self._ended_rows.clear()
        for row in under_way:
            row.on_end = bool  # The engine may keep the row alive, but must not keep the job.
            row.row = None
            if row.stream is not None:
                row.stream.close()


@contextmanager
def _log_closing_error() -> Iterator[None]:
    """Context manager that logs an exception from closing a generator."""
    try:
        yield
    except Exception as error:
        logger.error("closing the rows of map() raised %s", describe_error(error))


def _close_generator(iterator: Any) -> None:
    if isinstance(iterator, Generator):
        with _log_closing_error():
            iterator.close()


async def _close_async_generator(iterator: AsyncGenerator[Any, Any]) -> None:
    with _log_closing_error():
        await iterator.aclose()


class RowStream(UncopyableHandle):
    """Results of the rows of ``AsyncLLMEngine.map``, as an async iterator of RowResult.

    The first read begins to draw rows. ``aclose`` aborts the rows under way, and then closes
    ``rows`` if that is a generator. So do the end of ``async with`` and the loss of the last
    reference, for example by a ``break`` out of ``async for``. A cancelled read loses nothing. One
    task reads at a time, always on the same event loop.
    """

    def __init__(self, job: RowJob, submit: Submit) -> None:
        self._job = job
        self._feeder = _RowFeeder(job, submit)
        job.wake = self._feeder.wake

    def __aiter__(self) -> RowStream:
        return self

    async def __anext__(self) -> RowResult:
        """The next result.

        Raises:
            StopAsyncIteration: after the last one.
            InvalidRequestError: if ``rows`` raised, after the results of the rows before that.
            EngineDeadError, EngineClosedError: if the engine died or was closed.
            RuntimeError: if another task reads, or the last read was on another loop.
        """
        job, feeder = self._job, self._feeder
        while True:
            feeder.start()
            row = job.pop_ended()
            if row is not None:
                try:
                    return await _read_row(job, row)
                except EngineError:
                    feeder.close()
                    raise
            if job.is_over():
                raise StopAsyncIteration
            await feeder.wait()

    async def aclose(self) -> None:
        """Abort the rows under way, and end the iteration. Idempotent; returns at once."""
        self._feeder.close()

    async def __aenter__(self) -> RowStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_feeder"):
            self._feeder.close()


async def _read_row(job: RowJob, row: _Row) -> RowResult:
    """Read an ended row's stream; all its deltas are there already."""
    if row.stream is not None:
        with row.store_read_error():
            row.completion = await row.stream.result()
    return job.make_result(row)


class _RowFeeder:
    """Background task that draws and submits rows while there is room. It holds no
    reference to the RowStream, so that a dropped RowStream is collected."""

    def __init__(self, job: RowJob, submit: Submit) -> None:
        self._job = job
        self._submit = submit
        self._worker = WorkerThread("asyncllm-rows")
        self._backend: EventLoopBackend | None = None
        self._cancel: Callable[[], Any] | None = None
        self._closing_task: Callable[[], Any] | None = None
        self._waiter: Any = None

    def start(self) -> None:
        """Start the task, unless it runs or there is no room for a row."""
        self._backend = self._backend or running_backend()
        if self._backend.make_waiter() is None:
            raise RuntimeError("map() belongs to the event loop that read its first result")
        if self._cancel is None and self._job.has_room:
            self._cancel = self._backend.spawn(self._run())

    async def wait(self) -> None:
        """Wait until a row, or the feeder's own task, has ended."""
        if self._waiter is not None:
            raise RuntimeError("the results of map() are being read by another task")
        assert self._backend is not None
        self._waiter = self._backend.make_waiter()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        self._job.close()
        if self._cancel is None:
            self._close_iterator()
        elif self._backend is not None:
            with suppress(RuntimeError):  # A closed loop never resumes the task.
                self._backend.post(self._cancel)

    def _close_iterator(self) -> None:
        """Close the caller's generator: a plain generator on the thread that draws from it, an
        async generator on the event loop."""
        iterator, backend = self._job.pop_iterator(), self._backend
        if isinstance(iterator, Generator):
            # If no thread can be started, garbage collection closes the generator.
            with suppress(RequestError):
                self._worker.submit(partial(_close_generator, iterator))
        elif isinstance(iterator, AsyncGenerator) and backend is not None:

            def close() -> None:
                # Not ``_cancel``, because a second ``close`` would cancel this task.
                self._closing_task = backend.spawn(_close_async_generator(iterator))

            with suppress(RuntimeError):  # A closed loop has closed its generators.
                backend.post(close)

    async def _run(self) -> None:
        job = self._job
        try:
            while job.has_room:
                row = _END_OF_ROWS
                with job.end_on_iterable_error():
                    row = await self._next_row()
                if (request := job.make_request(row)) is not None:
                    await self._submit_row(*request)
                # Let the loop run: tokenising a full queue of rows takes a tenth of a second.
                await anyio.lowlevel.checkpoint()
        except BaseException as error:
            if not job.is_exhausted:
                job.end_input(error)
        finally:
            self._cancel = None
            if job.is_exhausted:
                self._close_iterator()
            self.wake()

    async def _next_row(self) -> Any:
        """Next row, or ``_END_OF_ROWS``. A list or a tuple is read directly; another iterator may
        block, so a thread draws from it."""
        rows, iterator = self._job.rows, self._job.iterator()
        if isinstance(rows, AsyncIterable):
            return await anext(iterator, _END_OF_ROWS)
        if isinstance(rows, list | tuple):
            return next(iterator, _END_OF_ROWS)
        return await self._worker.call(partial(next, iterator, _END_OF_ROWS))

    async def _submit_row(self, row: _Row, prompt: Any, params: SamplingParams | None) -> None:
        with self._job.store_submit_error(row):
            stream = await self._submit(prompt, params)
            # If the job was closed meanwhile, the stream is dropped, which aborts the request.
            if not self._job.is_exhausted:
                self._job.add_submitted(row, stream)


def blocking_results(
    job: RowJob,
    submit: Callable[[Any, SamplingParams | None], TokenStream],
    mailbox: ThreadMailbox,
) -> Generator[RowResult]:
    """Results of ``LLM.map``. Draws rows and waits in the calling thread; between two results it
    draws at least one row, unless there is no room."""
    event = threading.Event()
    job.wake = event.set
    try:
        while True:
            event.clear()
            if job.has_room:
                _submit_next_row(job, submit, mailbox)
            row = job.pop_ended()
            if row is not None:
                yield _read_row_blocking(job, row, mailbox)
            elif job.is_over():
                return
            elif not job.has_room:
                mailbox.wait(event)
    finally:
        job.close()
        _close_generator(job.pop_iterator())


def _submit_next_row(
    job: RowJob,
    submit: Callable[[Any, SamplingParams | None], TokenStream],
    mailbox: ThreadMailbox,
) -> None:
    row = _END_OF_ROWS
    with job.end_on_iterable_error():
        row = next(job.iterator(), _END_OF_ROWS)
    if (request := job.make_request(row)) is not None:
        accepted, *arguments = request
        with job.store_submit_error(accepted):
            job.add_submitted(accepted, submit(*arguments), mailbox)


def _read_row_blocking(job: RowJob, row: _Row, mailbox: ThreadMailbox) -> RowResult:
    """Read an ended row's stream, in a thread without an event loop."""
    if row.stream is not None:
        with row.store_read_error():
            while row.stream.read_blocking(mailbox) is not None:
                pass
            row.completion = row.stream.completion()
    return job.make_result(row)
