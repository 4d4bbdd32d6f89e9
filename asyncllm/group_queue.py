"""GroupQueue: chooses which engine of an EngineGroup gets each request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from asyncllm import validation as check
from asyncllm.core.caller_queue import CallerQueue
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.request import Request, RequestGroup
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import AsyncLLMError, EngineError, EngineOverloadedError
from asyncllm.observer import RequestInfo
from asyncllm.outputs import Usage
from asyncllm.routing import (
    TEXT_PIECE_CHARACTERS,
    Candidate,
    PrefixIndex,
    Route,
    Router,
    SentPrompt,
    text_hashes,
)
from asyncllm.runtime.event_loop import running_backend, wait_for
from asyncllm.runtime.submitter import Submission, Submitter
from asyncllm.runtime.worker_thread import Cooldown
from asyncllm.stream import TokenStream
from asyncllm.structured.compiler import GrammarCompiler

_MAX_TEXT_HASHES_PER_ENGINE = 4096
"""Maximum number of prompt-text hashes kept per engine; together they cover 8 MiB of text."""

_MAX_HASHED_CHARACTERS = 1 << 16
"""Maximum number of characters to hash at the start of a prompt that is not tokenised yet."""

_TOKENS_PER_TEXT_PIECE = TEXT_PIECE_CHARACTERS // 4
"""Estimated number of tokens of each piece of a text that ``text_hashes`` hashes."""


class GroupQueue:
    """Chooses an engine of an EngineGroup for each request, and submits the request there.

    Attributes:
        engines: engines by number. Changes replace the dict, so readers need no lock.
        retryable_streams: streams whose requests may be sent again, by request id.
        primary_submitter: submitter of the engine that represents the group; None until an engine
            has started.
        caller_queue: callers that wait for a place in the queue of any engine.
    """

    def __init__(self, retries: int) -> None:
        self.engines: Mapping[int, AsyncLLMEngine] = {}
        self.primary_submitter: Submitter | None = None
        self.caller_queue = CallerQueue(self._has_text_room)
        self._retries = retries
        self._router = Router()
        self._text_index = PrefixIndex(_MAX_TEXT_HASHES_PER_ENGINE)
        self.retryable_streams: WeakValueDictionary[str, TokenStream] = WeakValueDictionary()

    @property
    def core(self) -> EngineCore:
        assert self.primary_submitter is not None
        return self.primary_submitter.core

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        assert self.primary_submitter is not None
        return self.primary_submitter.grammar_compiler

    def running_engines(self) -> list[AsyncLLMEngine]:
        return [engine for engine in self.engines.values() if engine.state == "running"]

    def engine_cores(self) -> dict[int, EngineCore]:
        """Step loops of all engines by number, including engines that are closing."""
        submitters = {number: engine._submitter for number, engine in self.engines.items()}
        return {number: one.core for number, one in submitters.items() if one is not None}

    def has_running_requests(self) -> bool:
        return any(core.scheduler.running for core in self.engine_cores().values())

    def _has_text_room(self, group: RequestGroup) -> bool:
        """Whether any running engine has room for a group's texts; true if no engine runs."""
        submitters = [engine._submitter for engine in self.running_engines()]
        texts = [one.core.admission.waiting_texts for one in submitters if one is not None]
        return not texts or any(one.has_room(group) for one in texts)

    def claim_engine(self, engine: AsyncLLMEngine, number: int) -> None:
        """Assign an engine to this group, and number it.

        Raises:
            InvalidRequestError: if another group has the engine.
        """
        if self.is_in_other_group(engine):
            raise check.value_error("engine", engine, "an engine that is in no other group")
        engine._group, engine._observers.engine = self, number

    def is_in_other_group(self, engine: AsyncLLMEngine) -> bool:
        """Whether an engine belongs to another group."""
        return engine._group is not None and engine._group is not self

    def release_engines(self, *engines: AsyncLLMEngine) -> None:
        """Detach engines, so that other groups may claim them. Takes no lock, because a destructor
        calls this method."""
        for engine in engines:
            if engine._group is self:
                engine._group = engine._observers.engine = None
                if engine._submitter is not None:
                    admission = engine._submitter.core.admission
                    admission.caller_queues = (admission.caller_queue,)
                else:
                    engine._cooldown = Cooldown(engine._has_running_requests)

    def add_engine(self, engine: AsyncLLMEngine, number: int) -> None:
        """Add an engine; later requests may go to it."""
        self.claim_engine(engine, number)
        self.engines = {**self.engines, number: engine}
        self.admit_waiting_requests(engine)

    def admit_waiting_requests(self, engine: AsyncLLMEngine) -> None:
        """Give waiting requests places in an engine's queue, if the engine has started."""
        if engine._submitter is not None:
            admission = engine._submitter.core.admission
            admission.caller_queues = (admission.caller_queue, self.caller_queue)
            self.caller_queue.advance()

    def drop_engine(self, number: int) -> None:
        """Forget an engine that has closed."""
        self.release_engines(self.engines[number])
        self.engines = {key: engine for key, engine in self.engines.items() if key != number}
        self._router.forget(number)
        self._text_index.forget(number)

    def enqueue(self, submission: Submission) -> TokenStream:
        """Queue a request at the engine that is expected to answer first, and return its stream.

        Raises:
            EngineOverloadedError: if the queues of all engines are full.
            EngineDeadError, EngineClosedError: if no engine runs.
        """
        _hash_text(submission)
        self._add_members_if_room(submission)
        return self._enqueue(submission, self._retries)

    def _add_members_if_room(self, submission: Submission) -> None:
        """Make a request's members if an engine has room for them, without the lock of the caller
        queue, because engine threads take that lock."""
        group, num_tokens = submission.request.group, submission.num_tokens
        admissions = [core.admission for core in self.engine_cores().values()]
        for admission in admissions:
            admission.check_id(group.request_id)
        if any(admission.retry_after(group, num_tokens) == 0.0 for admission in admissions):
            submission.add_members()

    def _enqueue(self, submission: Submission, retries: int) -> TokenStream:
        with self.caller_queue.lock:
            submitter, stream = self._place_request(submission)
        submitter.start(submission)
        return self._enable_retries(stream, submission, retries)

    async def enqueue_or_wait(self, submission: Submission) -> TokenStream:
        """Queue a request; if all queues are full, wait until an engine has a place for it."""
        submission.add_members()
        _hash_text(submission)
        group, is_gone = submission.request.group, running_backend().is_closed
        with self.caller_queue.lock:
            placement = self.caller_queue.push(group, partial(self._try_place, submission), is_gone)
        self.caller_queue.advance()
        if not placement.done():
            try:
                for core in self.engine_cores().values():
                    core.check_not_engine_thread()
                await wait_for(placement)
            except BaseException:
                for engine in self.running_engines()[:1]:
                    if engine._submitter is not None and os.getpid() == self.core.pid:
                        engine._submitter.core.send(self._cancel_waiting, submission, placement)
                raise
            group.restart_timeout(self.core.clock())
        submitter, stream = placement.result()
        submitter.start(submission)
        return self._enable_retries(stream, submission, self._retries)

    def _cancel_waiting(self, submission: Submission, placement: Future[Any]) -> None:
        """Remove a cancelled request from the waiting line, or from the engine that it was placed
        at. Runs on an engine thread, because a destructor may have cancelled the call, and
        destructors must take no lock."""
        self.caller_queue.withdraw(submission.request.group)
        for observer in submission.observers:
            observer.withdraw_request()  # pyright: ignore[reportAttributeAccessIssue]
        placement.add_done_callback(_abort_placed_request)

    def _try_place(self, submission: Submission) -> tuple[Submitter, TokenStream] | None:
        """Place a request of the waiting line; returns None if all queues are full."""
        try:
            return self._place_request(submission, 1)
        except EngineOverloadedError:
            return None

    def _place_request(
        self, submission: Submission, num_caller_queues_ahead: int | None = None
    ) -> tuple[Submitter, TokenStream]:
        """Give a request its place in an engine's queue, and make its stream. The caller holds the
        lock of the caller queue, so that two requests cannot take one id.

        Args:
            num_caller_queues_ahead: as for ``Admission.reserve``.
        """
        while True:
            submitter, observer = self._choose_engine(submission, num_caller_queues_ahead)
            try:
                return submitter, submitter.reserve_place(submission, num_caller_queues_ahead)
            except BaseException as error:
                if observer is not None:
                    observer.withdraw_request()
                # After the choice, the engine may have died or given its last place to another
                # request: choose again.
                is_full = observer is not None and isinstance(error, EngineOverloadedError)
                if not is_full and not isinstance(error, EngineError):
                    raise

    def _choose_engine(
        self, submission: Submission, num_caller_queues_ahead: int | None
    ) -> tuple[Submitter, _RoutingObserver | None]:
        """Choose an engine for a request.

        Returns:
            The engine's submitter, and an observer that reports the request's outcome to the
            router. The observer is None if only one engine runs and the prompt is tokenised. A text
            always has one: its hashes are recorded for engines that start later.
        """
        request, submission.observers = submission.request, ()
        cores = self.engine_cores().values()
        for core in cores:
            core.admission.check_id(request.request_id)
        submitters = {
            number: engine._submitter
            for number, engine in self.engines.items()
            if engine.state == "running" and engine._submitter is not None
        }
        if not submitters:
            dead = [core for core in cores if core.fatal_error is not None]
            raise (dead[0] if dead else self.core).shutdown_error()
        if len(submitters) == 1 and request.token_ids:
            (only,) = submitters.values()
            return only, None
        hashes = () if request.token_ids else submission.text_hashes
        num_text_pieces = self._text_index.find(hashes, self.core.clock()) if hashes else {}
        candidates = []
        for number, submitter in submitters.items():
            core, cached = submitter.core, num_text_pieces.get(number, 0) * _TOKENS_PER_TEXT_PIECE
            if request.group.num_members > core.admission.max_queued_requests:
                continue
            if request.token_ids:
                cached = core.num_cached_tokens(request)
            num_tokens = submission.num_tokens
            wait = core.admission.retry_after(request.group, num_tokens, num_caller_queues_ahead)
            kv = core.scheduler.kv
            uncached = max(num_tokens - cached, 1)
            num_blocks, num_free = kv.max_blocks_for(uncached), kv.pool.num_free
            missing = (
                0 if num_blocks <= num_free else uncached * (num_blocks - num_free) // num_blocks
            )
            stats = core.stats()
            candidates.append(Candidate(number, stats, cached, wait, missing_tokens=missing))
        if not candidates:
            largest = max(one.core.admission.max_queued_requests for one in submitters.values())
            accepted = f"at most max_queued_requests={largest}"
            raise check.value_error("n", request.group.num_members, accepted)
        route = self._router.choose(candidates, submission.num_tokens)
        number: Any = route.key
        sent_text = self._text_index.add(number, hashes, self.core.clock()) if hashes else None
        observer = _RoutingObserver(self._router, route, self._text_index, sent_text)
        submission.observers = (observer,)
        return submitters[number], observer

    def _enable_retries(
        self, stream: TokenStream, submission: Submission, retries: int
    ) -> TokenStream:
        """Have the request sent again if its engine dies before the first token."""
        # Only the reader keeps the stream: if the reader drops it, the request is aborted.
        submission.stream = None
        submission.call = submission.call[0], None
        stream._resubmit = partial(self._resubmit, submission, retries - 1) if retries else None
        if retries:
            self.retryable_streams[stream.request_id] = stream
        return stream

    def _resubmit(self, submission: Submission, retries: int, stream: TokenStream) -> bool:
        try:
            self._enqueue(submission.copy_for_retry(stream), retries)
        except AsyncLLMError:
            return False
        return True


@dataclass(slots=True, eq=False)
class _RoutingObserver:
    """Observer of one request; updates the router's counts and the index of texts."""

    router: Router
    route: Route
    text_index: PrefixIndex
    sent_text: SentPrompt | None

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """Do nothing: the request was counted when it was routed."""

    def on_first_token(self, request: Request) -> None:
        self.router.settle(self.route, request.num_cached_tokens)

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        if usage.ttft is None:
            self.withdraw_request()
        elif self.sent_text is not None:
            num_pieces = len(self.sent_text.hashes) * usage.cached_tokens / usage.prompt_tokens
            self.text_index.correct(self.sent_text, round(num_pieces))

    def withdraw_request(self) -> None:
        """Count the request as not sent: it was refused, or ended without a token."""
        self.router.settle(self.route)
        if self.sent_text is not None:
            self.text_index.withdraw(self.sent_text)


def _abort_placed_request(placement: Future[Any]) -> None:
    if placement.exception() is None and placement.result() is not None:
        placement.result()[1].abort()


def _hash_text(submission: Submission) -> None:
    """Hash the beginning of a prompt that is not tokenised yet, once for all tries to place it."""
    request = submission.request
    if request.group.raw_prompt is not None:
        beginning = _text_beginning(request.group.raw_prompt.value)
        submission.text_hashes = text_hashes(beginning, request.cache_salt)


def _text_beginning(prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> str:
    """Beginning of a text, or of the roles and texts of messages; empty for token ids."""
    if isinstance(prompt, str):
        return prompt[:_MAX_HASHED_CHARACTERS]
    text = ""
    for message in prompt:
        if isinstance(message, int):
            break
        for part in (message["role"], message.get("content", "")):
            text += part[:_MAX_HASHED_CHARACTERS] + "\0"
        if len(text) >= _MAX_HASHED_CHARACTERS:
            break
    return text
