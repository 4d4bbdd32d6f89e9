"""Submitter: gives requests their place in the queue, and sends them to the engine thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

from asyncllm import validation as check
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.structured_output import StructuredOutput
from asyncllm.errors import InvalidRequestError, RequestError
from asyncllm.observer import ObserverNotifier, Observers, Operation, RequestInfo
from asyncllm.runtime.event_loop import wait_for
from asyncllm.runtime.mailbox import MailboxRegistry
from asyncllm.runtime.worker_thread import Rest, WorkerThread
from asyncllm.stream import TokenStream
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.grammar import Grammar
from asyncllm.tool_calls.message_parser import MessageParser

CallArguments = tuple[Operation, Any]
"""Operation and prompt of a call; converted to a RequestInfo only if there are observers."""


@dataclass(slots=True, eq=False)
class Submission:
    """A checked call, to be queued.

    Attributes:
        request: first member of its group.
        num_tokens: tokens of the prompt, or an estimate if ``make_prompt`` makes it.
        parser: parser of a conversation's answer; None for a plain prompt.
        make_prompt: function that sets the request's prompt, called on a worker thread; None if the
            prompt is already set.
    """

    request: Request
    call: CallArguments
    num_tokens: int
    parser: MessageParser | None = None
    make_prompt: Callable[[], None] | None = None


@dataclass(eq=False, repr=False)
class Submitter:
    """Submits requests to one running engine.

    A request takes its place in the queue at once. Long prompts are tokenised and grammars compiled
    on other threads, so that they delay no other request.
    """

    core: EngineCore
    grammars: GrammarCompiler
    mailboxes: MailboxRegistry
    observers: Observers
    rest: InitVar[Rest]
    _worker: WorkerThread = field(init=False)

    def __post_init__(self, rest: Rest) -> None:
        self._worker = WorkerThread("asyncllm-text", rest)

    def enqueue(self, submission: Submission) -> TokenStream:
        """Queue a request, and return its stream. It goes to the engine thread once its prompt and
        its grammar are ready.

        Raises:
            EngineOverloadedError: if the queue is full.
        """
        notifier = self._make_notifier(submission)
        self.core.admission.reserve(submission.request.group, submission.num_tokens)
        stream = self._make_stream(submission)
        self._start_request(submission, notifier)
        return stream

    async def enqueue_or_wait(self, submission: Submission) -> TokenStream:
        """Queue a request once the queue has a place; its timeout begins then."""
        core, group = self.core, submission.request.group
        notifier = self._make_notifier(submission)
        is_gone = self.mailboxes.of_running_loop().is_closed
        reserved = core.admission.reserve_or_wait(group, submission.num_tokens, is_gone)
        stream = self._make_stream(submission)
        if reserved is not None:
            try:
                core.check_waiting()
                await wait_for(reserved)
            except BaseException:
                core.abandon(group)
                raise
            group.restart(core.clock())
        self._start_request(submission, notifier)
        return stream

    def close(self) -> list[threading.Thread]:
        """Drop texts that wait to be tokenised and grammars that wait to be compiled; returns the
        threads that still work."""
        worker = self._worker.close()
        return self.grammars.close() + ([] if worker is None else [worker])

    def _make_notifier(self, submission: Submission) -> ObserverNotifier | None:
        observers = self.observers.all
        if not observers:
            return None
        notifier = ObserverNotifier(submission.request, observers)
        submission.request.group.notifier = notifier
        return notifier

    def _make_stream(self, submission: Submission) -> TokenStream:
        mailbox_of_loop = self.mailboxes.of_running_loop
        return TokenStream(submission.request, self.core, mailbox_of_loop, submission.parser)

    def _start_request(self, submission: Submission, notifier: ObserverNotifier | None) -> None:
        """Begin a request that has a place in the queue and a stream. If Ctrl-C interrupts an
        observer, the stream is dropped, which aborts the request."""
        if notifier is not None:
            notifier.submitted(RequestInfo(*submission.call))
        if submission.make_prompt is None:
            self._send(submission.request)
        else:
            self._make_prompt_elsewhere(submission.request, submission.make_prompt)

    def _make_prompt_elsewhere(self, request: Request, make_prompt: Callable[[], None]) -> None:
        """Send a request once a thread has made its prompt."""
        core, group = self.core, request.group
        if group.deadline < math.inf:
            core.send(core.on_watch_deadline, group)

        def make_and_send() -> None:
            if group.cancelled:
                return
            try:
                make_prompt()
                core.admission.correct_estimate(group, request.num_prompt_tokens)
                self._send(request)
            except BaseException as error:
                # A Rust panic in the tokenizer is a BaseException.
                if not issubclass(type(error), Exception):
                    error = InvalidRequestError(f"prompt: {check.describe(error)}", param="prompt")
                core.send(core.on_fail, group, error)

        try:
            self._worker.submit(make_and_send)
        except RequestError as error:
            core.send(core.on_fail, group, error)

    def _send(self, request: Request) -> None:
        """Send the group to the engine thread once its grammar is compiled; other requests do not
        wait for that."""
        core, group, spec = self.core, request.group, request.sampling.structured_outputs
        if spec is None:
            core.send(core.on_add, group)
            return
        grammar = self.grammars.find(spec)
        if grammar is not None:
            self._send_with_grammar(group, grammar, None)
            return
        if group.deadline < math.inf:
            core.send(core.on_watch_deadline, group)
        try:
            self.grammars.submit(spec, partial(self._send_with_grammar, group))
        except RequestError as error:
            core.send(core.on_fail, group, error)

    def _send_with_grammar(
        self, group: RequestGroup, grammar: Grammar | None, error: Exception | None
    ) -> None:
        core = self.core
        if grammar is None:
            core.send(core.on_fail, group, error)
            return
        try:
            for member in group.members:
                member.structured_output = StructuredOutput(grammar.new_matcher(), grammar.special)
        except BaseException as failure:  # A grammar backend's native code may panic.
            core.send(core.on_fail, group, failure)
            return
        core.send(core.on_add, group)
