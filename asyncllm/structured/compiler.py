"""GrammarCompiler: compiles and caches an engine's grammars on its own threads."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from asyncllm import validation as check
from asyncllm.errors import InvalidRequestError, RequestError
from asyncllm.owner_lines import OwnerLines
from asyncllm.structured.backends import GrammarBackends
from asyncllm.structured.grammar import Grammar, GrammarError, GrammarMemoryBound
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.thread_priority import lower_thread_priority

MAX_COMPILE_THREADS = 2
"""Maximum number of concurrent compilations, not counting overdue ones."""

MAX_EXTRA_COMPILE_THREADS = 1
"""Maximum number of threads beyond MAX_COMPILE_THREADS. Each replaces a thread whose compilation is
overdue, because a compilation cannot be stopped. If all threads have overdue compilations, no new
one begins."""

COOLDOWN_TO_COMPILE_RATIO = 2
"""Pause of a thread after a compilation, as a multiple of the compilation's duration. Compilations
take processor time from the engine's steps, so many in a row would delay the steps."""

MAX_COOLDOWN_SECONDS = 1.0
"""Maximum pause of a thread after a compilation."""

MAX_CACHED_GRAMMARS = 128

MAX_REMEMBERED_REFUSALS = 32
"""Maximum number of remembered refusals. Each holds the text of its grammar, up to 512 KiB."""

SLOW_REFUSAL_SECONDS = 0.02
"""Minimum duration of a compilation whose refusal is remembered. A quick one is made again: a
backend that would accept the grammar may be installed meanwhile."""

MAX_GRAMMAR_BYTES = 192 * 2**20
"""Maximum estimated memory in bytes of the grammars that are cached or in use. No compilation
begins while the grammars in use take more."""

MAX_SHARED_AUTOMATON_BYTES = 4 * 2**20
"""Minimum estimated bytes of a lexer automaton that no further request may share.

A further request for the grammar compiles it again. All outputs that share an automaton fail when
it reaches MAX_LEXER_STATES.
"""

SLOW_GROWTH_BYTES_PER_TOKEN = 1024
"""Average bytes per accepted token that an automaton may gain and still be shared, at any size.

Usual grammars gained up to 600 bytes a token in their first outputs, and some 100 after 50,000
tokens; an expression made to grow gained 12 KiB a token.
"""

MAX_UNSWEPT_BYTES = 32 * 2**20
"""Memory in bytes of the compile queue beyond which abandoned requests are removed from it. Until
then they are removed at their turn. The texts of waiting requests count in the engine's queue."""

BYTES_PER_QUEUED_REQUEST = 8192
"""Estimated memory of a queued request without the text of its grammar."""

_MEMORY_CHECK_SECONDS = 0.02
"""Seconds between a thread's checks whether memory allows a compilation."""

DoneCallback = Callable[[Grammar | None, Exception | None], None]
"""Callback that gets the grammar or an error; called once, on a thread of the compiler, or by
``submit`` with a remembered refusal."""

IsWanted = Callable[[], bool]
"""Function that tells whether a request still waits for its grammar."""


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    """A request's place in the queue."""

    job: _CompileJob
    owner: str | None


@dataclass(slots=True, eq=False)
class _CompileJob:
    """Compilation of one grammar.

    Attributes:
        waiting_requests: callbacks of the requests that wait for the grammar; None once the job
            is finished or dropped.
        has_begun: whether a thread has taken the job. Its requests are then queued no longer.
        timer: timer that makes the compilation overdue; None before the compilation begins.
    """

    spec: StructuredOutputs
    waiting_requests: dict[_QueuedRequest, tuple[DoneCallback, IsWanted]] | None = field(
        default_factory=dict
    )
    has_begun: bool = False
    timer: threading.Timer | None = None


class GrammarCompiler:
    """Compiler of an engine's grammars; it caches the most recently used ones.

    At most ``MAX_CACHED_GRAMMARS`` grammars are cached. ``MAX_GRAMMAR_BYTES`` bounds the memory of
    all grammars that are cached or in use. While those in use take more, an owner gets another one
    if its own take less than its share. The newest ``MAX_REMEMBERED_REFUSALS`` refusals of
    backends are remembered, unless they were quick.

    At most ``MAX_COMPILE_THREADS`` grammars are compiled at a time, and requests for the same
    grammar share a compilation. Compilations begin in turns by owner of the requests: the next is
    of the owner whose compilations occupy the fewest threads, the rests after them included. A
    shared compilation begins at the first of its requests' turns. A compilation that takes longer
    than ``timeout`` is overdue: its waiting requests fail. It cannot be interrupted, so it
    continues on its thread, and the result is cached. Up to ``MAX_EXTRA_COMPILE_THREADS`` threads
    replace threads with overdue compilations. A queued compilation without waiting requests is
    dropped. The threads have a low priority on Linux, and rest after each compilation. After the
    end of the engine, results are dropped. The interpreter's exit waits up to ``timeout`` for
    compilations that have begun.

    Args:
        backends: the grammar backends.
        timeout: seconds from the beginning of a compilation until it is overdue.
    """

    def __init__(self, backends: GrammarBackends, timeout: float) -> None:
        self.backends = backends
        self._timeout = timeout
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._refusals: OrderedDict[StructuredOutputs, InvalidRequestError] = OrderedDict()
        # Memory of each grammar, with the owner for whom it was compiled.
        self._memories: WeakKeyDictionary[GrammarMemoryBound, str | None] = WeakKeyDictionary()
        self._jobs: dict[StructuredOutputs, _CompileJob] = {}
        self._queue: OwnerLines[_QueuedRequest] = OwnerLines()
        self._num_queued_bytes = 0
        self._num_swept_bytes = 0
        self._threads: set[threading.Thread] = set()
        self._num_overdue_jobs = 0
        self._is_closed = False
        self._close_event = threading.Event()
        self._creator_pid = os.getpid()

    def find_cached(self, spec: StructuredOutputs) -> Grammar | None:
        """Look up a cached grammar; None if it is not cached. Any thread may call it."""
        with self._lock:
            grammar = self._cache.get(spec)
            if grammar is not None:
                if grammar.memory.is_exhausted:
                    del self._cache[spec]
                    return None
                self._cache.move_to_end(spec)
            return grammar

    def submit(
        self,
        spec: StructuredOutputs,
        done_callback: DoneCallback,
        is_wanted: IsWanted,
        owner: str | None = None,
    ) -> None:
        """Compile a grammar on a thread, then call back. Any thread may call this method.

        Args:
            done_callback: callback for the grammar or an error.
            is_wanted: function that tells whether the request still waits. If no request waits when
                the compilation would begin, the compiler drops the job and calls no callback.
            owner: name of the user that the request is for.

        Raises:
            RequestError: if too many overdue compilations still run, or no thread can be started.
        """
        with self._lock:
            refusal = self._refusals.get(spec)
        if refusal is not None:
            done_callback(None, copy(refusal))
            return
        with self._lock:
            if self._is_closed:
                return  # The engine has ended, and so has the request.
            job = self._jobs.get(spec)
            if job is None:
                if len(self._threads) - self._num_overdue_jobs < MAX_COMPILE_THREADS:
                    self._start_thread()
                job = self._jobs[spec] = _CompileJob(spec)
                self._num_queued_bytes += sys.getsizeof(spec.text)
            assert job.waiting_requests is not None
            request = _QueuedRequest(job, owner)
            job.waiting_requests[request] = done_callback, is_wanted
            if not job.has_begun:
                self._queue.push(owner, request)
                self._num_queued_bytes += BYTES_PER_QUEUED_REQUEST
                self._sweep_queue()

    def close(self) -> list[threading.Thread]:
        """Cancel the compilations that have not begun; returns the threads that still run."""
        with self._lock:
            self._is_closed = True
            self._close_event.set()
            for job in list(self._jobs.values()):
                if job.timer is not None:
                    job.timer.cancel()
                if not job.has_begun:
                    self._drop_job(job)
            self._jobs.clear()
            self._cache.clear()
            self._refusals.clear()
            return list(self._threads)

    def _start_thread(self) -> None:
        """Start a thread for a job. If no more threads are allowed, or none can be started, a
        running thread takes the job. RequestError is raised if all threads have overdue jobs.

        The caller holds the lock until it has queued the job.
        """
        if len(self._threads) >= MAX_COMPILE_THREADS + MAX_EXTRA_COMPILE_THREADS:
            if len(self._threads) > self._num_overdue_jobs:
                return
            raise RequestError(
                f"structured_outputs: {self._num_overdue_jobs} grammars that took longer than "
                f"grammar_timeout={self._timeout:g} s are still being compiled; expected fewer to "
                "begin another"
            )
        thread = threading.Thread(target=self._run_jobs, name="asyncllm-grammar", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if len(self._threads) > self._num_overdue_jobs:
                return  # A thread that is not busy with an overdue job will take this one.
            raise RequestError(
                "structured_outputs: a grammar needs a thread to be compiled on, and none can be "
                f"started ({check.describe_error(error)})"
            ) from error
        if not self._threads:
            atexit.register(self._at_exit)
        self._threads.add(thread)

    def _at_exit(self) -> None:
        """Wait for the compilations that have begun.

        A library that returns from a compilation while the interpreter ends may abort the process,
        which changes its exit status.
        """
        if os.getpid() == self._creator_pid:  # A forked child has no threads of its parent.
            deadline = time.monotonic() + self._timeout
            for thread in self.close():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run_jobs(self) -> None:
        lower_thread_priority()
        has_turn, owner = False, None
        while True:
            with self._lock:
                if has_turn:
                    self._queue.end(owner)
                is_surplus = len(self._threads) - self._num_overdue_jobs > MAX_COMPILE_THREADS
                owner, job = (None, None) if is_surplus else self._begin_next_job()
                if job is None and (is_surplus or not len(self._queue)):
                    self._threads.discard(threading.current_thread())
                    if not self._threads:
                        atexit.unregister(self._at_exit)
                    return
                has_turn = job is not None
            if job is None:
                self._close_event.wait(_MEMORY_CHECK_SECONDS)
                continue
            start = time.perf_counter()
            grammar, error = self._compile_job(job)
            duration = time.perf_counter() - start
            self._finish_job(job, grammar, error, owner)
            del job, grammar, error
            self._close_event.wait(min(COOLDOWN_TO_COMPILE_RATIO * duration, MAX_COOLDOWN_SECONDS))

    def _sweep_queue(self) -> None:
        """Remove abandoned requests, if the queue has doubled its memory since the last time. The
        caller holds the lock."""
        if self._num_queued_bytes > max(MAX_UNSWEPT_BYTES, 2 * self._num_swept_bytes):
            for request in list(self._queue):
                self._drop_if_unwanted(request)
            self._num_swept_bytes = self._num_queued_bytes

    def _find_next_request(self) -> _QueuedRequest | None:
        """Find the next request that still waits, and drop those before it. The caller holds the
        lock."""
        while (request := self._queue.peek()) is not None and self._drop_if_unwanted(request):
            pass
        return request

    def _drop_if_unwanted(self, request: _QueuedRequest) -> bool:
        """Drop a queued request that does not wait any more, and its job if no other request waits;
        returns whether it was dropped. The caller holds the lock."""
        job = request.job
        waiting = job.waiting_requests
        assert waiting is not None
        _, is_wanted = waiting[request]
        if is_wanted():
            return False
        if len(waiting) == 1:
            self._drop_job(job)
        else:
            self._dequeue(request)
            del waiting[request]
        return True

    def _begin_next_job(self) -> tuple[str | None, _CompileJob | None]:
        """Begin the next job whose owner has memory for it; returns the owner and the job, or None
        without one. The caller holds the lock."""
        for _ in range(self._queue.num_owners):
            request = self._find_next_request()
            if request is None:
                break
            if self._has_memory_for(request.owner):
                return request.owner, self._begin_job(request)
            self._queue.end_turn(request.owner)
        return None, None

    def _begin_job(self, request: _QueuedRequest) -> _CompileJob:
        """Take a request's job from the queue, and begin a turn of the request's owner. The caller
        holds the lock, and ends the turn after the compilation."""
        job = request.job
        self._queue.begin(request.owner, request)
        self._dequeue_job(job)
        job.has_begun = True
        return job

    def _dequeue_job(self, job: _CompileJob) -> None:
        """Remove a job and its requests from the queue. The caller holds the lock."""
        self._num_queued_bytes -= sys.getsizeof(job.spec.text)
        for request in job.waiting_requests or ():
            self._dequeue(request)

    def _dequeue(self, request: _QueuedRequest) -> None:
        self._num_queued_bytes -= BYTES_PER_QUEUED_REQUEST
        self._num_swept_bytes = min(self._num_swept_bytes, self._num_queued_bytes)
        self._queue.discard(request.owner, request)

    def _has_memory_for(self, owner: str | None) -> bool:
        """Drop cached grammars until all grammars take at most MAX_GRAMMAR_BYTES. If the grammars
        in use alone take more, an owner has memory while its own take less than its share, so that
        the grammars of one owner keep no other out. The caller holds the lock."""
        self._evict_cached_grammars()
        if self._num_grammar_bytes() <= MAX_GRAMMAR_BYTES:
            return True
        owners = {*self._memories.values(), owner}
        own_bytes = sum(one.num_bytes for one, its in self._memories.items() if its == owner)
        return own_bytes * len(owners) < MAX_GRAMMAR_BYTES

    def _on_growth(self, spec: StructuredOutputs) -> None:
        """Drop a cached grammar whose automaton grows fast, and others beyond the bound."""
        with self._lock:
            grammar = self._cache.get(spec)
            if grammar is not None and _grows_fast(grammar.memory):
                del self._cache[spec]
            self._evict_cached_grammars()

    def _evict_cached_grammars(self) -> None:
        while self._cache and self._num_grammar_bytes() > MAX_GRAMMAR_BYTES:
            self._cache.popitem(last=False)

    def _num_grammar_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._memories)

    def _compile_job(self, job: _CompileJob) -> tuple[Grammar | None, Exception | None]:
        start = time.perf_counter()
        try:
            self.backends.prepare()
            return self.backends.compile(job.spec, partial(self._start_timer, job)), None
        except GrammarError as error:
            refusal = _refusal_error(job.spec, str(error))
            if time.perf_counter() - start >= SLOW_REFUSAL_SECONDS:
                self._remember_refusal(job.spec, refusal)
            return None, refusal
        except Exception as error:
            refused = _refusal_error(job.spec, check.describe_error(error))
            refused.__cause__ = error
            return None, refused
        except BaseException as error:  # A panic in a backend's Rust code is no Exception.
            return None, _refusal_error(job.spec, check.describe(error))

    def _remember_refusal(self, spec: StructuredOutputs, refusal: InvalidRequestError) -> None:
        with self._lock:
            if not self._is_closed:
                self._refusals[spec] = refusal
                if len(self._refusals) > MAX_REMEMBERED_REFUSALS:
                    self._refusals.popitem(last=False)

    def _start_timer(self, job: _CompileJob) -> None:
        timer = threading.Timer(self._timeout, self._expire_job, (job,))
        timer.name, timer.daemon = "asyncllm-grammar-timer", True
        with self._lock:
            if job.timer is not None:
                job.timer.cancel()
            if not self._is_closed:
                job.timer = timer
                timer.start()

    def _expire_job(self, job: _CompileJob) -> None:
        with self._lock:
            if job.waiting_requests is None or self._is_closed:
                return
            reason = f"was not compiled within grammar_timeout={self._timeout:g} s"
            refused: list[tuple[_CompileJob, Exception]] = [(job, _refusal_error(job.spec, reason))]
            self._num_overdue_jobs += 1
            if self._queue:
                try:
                    self._start_thread()
                except RequestError as error:
                    jobs = self._jobs.values()
                    refused += [(queued, error) for queued in jobs if not queued.has_begun]
            failures = [(self._drop_job(failed_job), error) for failed_job, error in refused]
        for waiting, error in failures:
            for done_callback, _ in waiting.values():
                done_callback(None, copy(error))

    def _drop_job(self, job: _CompileJob) -> dict[_QueuedRequest, tuple[DoneCallback, IsWanted]]:
        """Remove a failed or unwanted job; returns its requests. The caller holds the lock."""
        if not job.has_begun:
            self._dequeue_job(job)
        waiting, job.waiting_requests = job.waiting_requests, None
        self._jobs.pop(job.spec, None)
        return waiting or {}

    def _finish_job(
        self,
        job: _CompileJob,
        grammar: Grammar | None,
        error: Exception | None,
        owner: str | None,
    ) -> None:
        with self._lock:
            if job.timer is not None:
                job.timer.cancel()
            waiting, job.waiting_requests = job.waiting_requests, None
            if waiting is None:
                self._num_overdue_jobs -= 1
            elif self._is_closed:
                waiting = None  # The engine has ended, and so have these requests.
            else:
                self._jobs.pop(job.spec, None)
            if grammar is not None and not self._is_closed:
                grammar.memory.on_growth = partial(self._on_growth, job.spec)
                self._memories[grammar.memory] = owner
                self._cache[job.spec] = grammar
                self._cache.move_to_end(job.spec)
                self._evict_cached_grammars()
                if len(self._cache) > MAX_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
        for done_callback, _ in (waiting or {}).values():
            done_callback(grammar, copy(error))  # Each request raises its own copy of the error.


def _grows_fast(memory: GrammarMemoryBound) -> bool:
    """Whether an automaton is large, and has gained many bytes per accepted token."""
    slow_growth = memory.num_accepted_tokens * SLOW_GROWTH_BYTES_PER_TOKEN
    return memory.automaton_bytes > max(MAX_SHARED_AUTOMATON_BYTES, slow_growth)


def _refusal_error(spec: StructuredOutputs, reason: str) -> InvalidRequestError:
    what = spec.param
    if what == "structured_outputs":
        what += f".{spec.kind}={check.describe(spec.text)}"
    return InvalidRequestError(f"{what}: {reason}", param=spec.param)
