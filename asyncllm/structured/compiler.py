"""GrammarCompiler: compiles and caches an engine's grammars on its own threads."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError, RequestError
from asyncllm.structured.backends import Backends
from asyncllm.structured.grammar import Grammar, GrammarError
from asyncllm.structured.spec import StructuredOutputs

MAX_THREADS = 2
"""Maximum number of concurrent compilations, not counting overdue ones."""

MAX_OVERDUE = 4
"""Maximum number of overdue compilations. While so many run, no other begins: each occupies a
thread, which cannot be stopped."""

REST_FACTOR = 2
MAX_REST = 1.0
"""Pause of a thread after a compilation, as a multiple of its duration, and its maximum in seconds.
Each compilation takes processor time from the steps, so many in a row would hold them up."""

CACHE_SIZE = 128

DoneCallback = Callable[[Grammar | None, Exception | None], None]
"""Callback that gets the grammar or an error; called once, on a thread of the compiler."""


@dataclass(slots=True, eq=False)
class _Job:
    """Compilation of one grammar.

    Attributes:
        callbacks: callbacks of the requests that wait for the grammar; None once they were called.
        timer: timer that makes the compilation overdue; None before it begins.
    """

    spec: StructuredOutputs
    callbacks: list[DoneCallback] | None = field(default_factory=list)
    timer: threading.Timer | None = None


class GrammarCompiler:
    """Compiler of an engine's grammars; it caches the ``CACHE_SIZE`` most recently used ones.

    At most ``MAX_THREADS`` grammars are compiled at a time, and requests for the same one share its
    compilation. A compilation that takes longer than ``timeout`` is overdue: the requests that wait
    for it fail. It cannot be interrupted, so it continues on its thread, another thread takes its
    place, and the result is cached. A thread rests after each compilation. A result after the end
    of the engine is dropped.

    Args:
        backends: the grammar backends.
        timeout: seconds from the beginning of a compilation until it is overdue.
    """

    def __init__(self, backends: Backends, timeout: float) -> None:
        self._backends = backends
        self._timeout = timeout
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._jobs: dict[StructuredOutputs, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_overdue = 0
        self._closed = False
        self._rest_ends = threading.Event()

    def check_installed(self) -> None:
        """Raise InvalidRequestError, which names the extra to install, if there is no backend."""
        self._backends.check_installed()

    def find(self, spec: StructuredOutputs) -> Grammar | None:
        """Look up a cached grammar; None if it is not cached. Any thread may call it."""
        with self._lock:
            grammar = self._cache.get(spec)
            if grammar is not None:
                self._cache.move_to_end(spec)
            return grammar

    def submit(self, spec: StructuredOutputs, done: DoneCallback) -> None:
        """Compile a grammar on a thread, then call ``done``. Any thread may call this method.

        Raises:
            RequestError: if too many overdue compilations still run, or no thread can be started.
        """
        with self._lock:
            if self._closed:
                return  # The engine has ended, and so has the request.
            if self._num_overdue >= MAX_OVERDUE:
                raise RequestError(
                    f"structured_outputs: {self._num_overdue} grammars that took longer than "
                    f"grammar_timeout={self._timeout:g} s are still being compiled; expected "
                    "fewer to begin another"
                )
            job = self._jobs.get(spec)
            if job is None:
                if len(self._threads) - self._num_overdue < MAX_THREADS:
                    self._start_thread()
                job = self._jobs[spec] = _Job(spec)
                self._queue.append(job)
            assert job.callbacks is not None
            job.callbacks.append(done)

    def close(self) -> list[threading.Thread]:
        """Cancel the compilations that have not begun; returns the threads that still run."""
        with self._lock:
            self._closed = True
            self._rest_ends.set()
            self._queue.clear()
            for job in self._jobs.values():
                if job.timer is not None:
                    job.timer.cancel()
            self._jobs.clear()
            self._cache.clear()
            return list(self._threads)

    def _start_thread(self) -> None:
        """Start a thread. The caller holds the lock until it has queued a job for the thread."""
        thread = threading.Thread(target=self._run_jobs, name="asyncllm-grammar", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if len(self._threads) > self._num_overdue:
                return  # A thread that is not overdue takes the job.
            raise RequestError(
                "structured_outputs: a grammar needs a thread to be compiled on, and none can be "
                f"started ({check.explain(error)})"
            ) from error
        self._threads.add(thread)

    def _run_jobs(self) -> None:
        while True:
            with self._lock:
                if not self._queue or len(self._threads) - self._num_overdue > MAX_THREADS:
                    self._threads.discard(threading.current_thread())
                    return
                job = self._queue.popleft()
            began = time.perf_counter()
            grammar, error = self._compile_job(job)
            took = time.perf_counter() - began
            self._finish_job(job, grammar, error)
            del job, grammar, error
            self._rest_ends.wait(min(REST_FACTOR * took, MAX_REST))

    def _compile_job(self, job: _Job) -> tuple[Grammar | None, Exception | None]:
        try:
            self._backends.prepare()
            return self._backends.compile(job.spec, partial(self._start_timer, job)), None
        except GrammarError as error:
            return None, _refusal_error(job.spec, str(error))
        except Exception as error:
            refused = _refusal_error(job.spec, check.explain(error))
            refused.__cause__ = error
            return None, refused
        except BaseException as error:  # A backend's native code may panic (Rust).
            return None, _refusal_error(job.spec, check.describe(error))

    def _start_timer(self, job: _Job) -> None:
        timer = threading.Timer(self._timeout, self._expire_job, (job,))
        timer.name, timer.daemon = "asyncllm-grammar-timer", True
        with self._lock:
            if job.timer is not None:
                job.timer.cancel()
            if not self._closed:
                job.timer = timer
                timer.start()

    def _expire_job(self, job: _Job) -> None:
        with self._lock:
            if job.callbacks is None or self._closed:
                return
            late = f"was not compiled within grammar_timeout={self._timeout:g} s"
            refused: list[tuple[_Job, Exception]] = [(job, _refusal_error(job.spec, late))]
            self._num_overdue += 1
            if self._queue:
                try:
                    self._start_thread()
                except RequestError as error:
                    refused += [(queued, error) for queued in self._queue]
                    self._queue.clear()
            told = [(self._drop_job(one), error) for one, error in refused]
        for callbacks, error in told:
            for done in callbacks:
                done(None, copy(error))

    def _drop_job(self, job: _Job) -> list[DoneCallback]:
        """Remove a failed job; returns the callbacks that wait for it. The caller holds the
        lock."""
        callbacks, job.callbacks = job.callbacks, None
        self._jobs.pop(job.spec, None)
        return callbacks or []

    def _finish_job(self, job: _Job, grammar: Grammar | None, error: Exception | None) -> None:
        with self._lock:
            if job.timer is not None:
                job.timer.cancel()
            callbacks, job.callbacks = job.callbacks, None
            if callbacks is None:
                self._num_overdue -= 1
            elif self._closed:
                callbacks = None  # The engine has ended, and so have these requests.
            else:
                self._jobs.pop(job.spec, None)
            if grammar is not None and not self._closed:
                self._cache[job.spec] = grammar
                self._cache.move_to_end(job.spec)
                if len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)
        for done in callbacks or ():
            done(grammar, copy(error))  # Each request raises its own copy of the error.


def _refusal_error(spec: StructuredOutputs, reason: str) -> InvalidRequestError:
    what = spec.param
    if what == "structured_outputs":
        what += f".{spec.kind}={check.describe(spec.text)}"
    return InvalidRequestError(f"{what}: {reason}", param=spec.param)
