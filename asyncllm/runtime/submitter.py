"""Submitter: gives requests their place in the queue, and sends them to the engine thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from asyncllm import validation as check
from asyncllm.core.channel import Channel
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.request_grammar import RequestGrammar
from asyncllm.errors import RequestError
from asyncllm.observer import Observer, ObserverNotifier, Observers, Operation, RequestInfo
from asyncllm.runtime.event_loop import wait_for
from asyncllm.runtime.mailbox import MailboxRegistry
from asyncllm.runtime.worker_thread import Cooldown, TokenizerThreads
from asyncllm.stream import TokenStream
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.grammar import Grammar
from asyncllm.tool_calls.message_parser import MessageParser

CallArguments = tuple[Operation, Any]
"""Operation and prompt of a call; converted to a RequestInfo only if there are observers."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RawPrompt:
    """A checked prompt that is not tokenised yet. Only groups, and the thread that tokenises it,
    refer to it, so that it is freed once the prompt is tokenised or the request has ended.

    Attributes:
        value: text or messages; or token ids, if the request's token rules are not made yet.
        prepare: ``prepare(request, max_characters)`` sets the request's prompt, on a worker thread;
            it returns False if the prompt has more characters.
    """

    value: str | Sequence[int] | Sequence[dict[str, Any]]
    prepare: Callable[[Request, int | None], bool]


@dataclass(slots=True, eq=False)
class Submission:
    """A call's request, with checked arguments, ready to be queued.

    Attributes:
        request: first member of its group.
        call: operation and prompt for observers. A retry has the engine's copy of the prompt, so
            that the caller's objects can be freed.
        num_tokens: tokens of the prompt, or an estimate for a RawPrompt.
        num_characters: characters for the worker thread: the prompt's and those of ``bad_words``.
        parser: parser of a conversation's answer; None for a plain prompt.
        text_hashes: hashes of the beginning of a RawPrompt in an EngineGroup.
        observers: observers of this request, beside those of its engine.
        stream: stream to continue with this request after a failed attempt; None makes a stream.
        make_members: makes the group's members after the first; None once that is done.
    """

    request: Request
    call: CallArguments
    num_tokens: int
    parser: MessageParser | None = None
    num_characters: int = 0
    text_hashes: Sequence[bytes] = ()
    observers: tuple[Observer, ...] = ()
    stream: TokenStream | None = None
    make_members: Callable[[], None] | None = field(init=False, default=None)
    notifier: ObserverNotifier | None = field(init=False, default=None)
    _members: list[Request] = field(init=False, default_factory=list)

    def add_members(self) -> None:
        """Make the group's members after the first, if that was not done yet."""
        make_members, self.make_members = self.make_members, None
        if make_members is not None:
            make_members()
        # A copy, because a group drops its members when it ends.
        self._members = self._members or list(self.request.group.members)

    def copy_for_retry(self, stream: TokenStream | None = None) -> Submission:
        """Copy the submission of a request that has no output yet, for another engine. The copy has
        the same id, seeds, arrival and deadline, and the prompt if it was tokenised already."""
        old_group = self.request.group
        # While there is a raw prompt, a worker thread may be setting the members' prompts.
        raw_prompt = old_group.raw_prompt
        channel = Channel(old_group.channel.max_unread, old_group.channel.on_slow)
        group = RequestGroup(
            old_group.request_id,
            channel,
            old_group.arrived_at,
            old_group.deadline,
            num_truncated_tokens=old_group.num_truncated_tokens,
            raw_prompt=raw_prompt,
            num_text_bytes=old_group.num_text_bytes,
            param_bytes=old_group.param_bytes,
        )
        for member in self._members:
            prompt = [] if raw_prompt else member.token_ids[: member.num_prompt_tokens]
            first = group.members[0] if group.members else None
            replace(
                member, group=group, token_ids=prompt, first_member=first, structured_output=None
            )  # The constructor adds the request to the group.
        request = group.members[0]
        prompt = raw_prompt.value if raw_prompt else tuple(request.token_ids)
        call = self.call[0], prompt
        return replace(self, request=request, call=call, observers=(), stream=stream)


class RequestQueue(Protocol):
    """Protocol for submitting requests: the Submitter of an engine, or the queue of an EngineGroup.

    Attributes:
        core, grammar_compiler: step loop and grammar compiler of the engine, or of any engine of
            the group.
    """

    @property
    def core(self) -> EngineCore: ...

    @property
    def grammar_compiler(self) -> GrammarCompiler: ...

    def enqueue(self, submission: Submission) -> TokenStream: ...

    async def enqueue_or_wait(self, submission: Submission) -> TokenStream: ...


@dataclass(eq=False, repr=False)
class Submitter:
    """Submits requests to one running engine.

    A request takes its place in the queue at once. Long prompts are tokenised and grammars compiled
    on other threads, so that they delay no other request.
    """

    core: EngineCore
    grammar_compiler: GrammarCompiler
    mailboxes: MailboxRegistry
    observers: Observers
    cooldown: InitVar[Cooldown]
    _tokenizer_threads: TokenizerThreads = field(init=False)

    def __post_init__(self, cooldown: Cooldown) -> None:
        self._tokenizer_threads = TokenizerThreads("asyncllm-text", cooldown)

    def enqueue(self, submission: Submission) -> TokenStream:
        """Queue a request, and return its stream. The request goes to the engine thread once its
        prompt and grammar are ready.

        Raises:
            EngineOverloadedError: if the queue is full.
        """
        stream = self.reserve_place(submission)
        self.start(submission)
        return stream

    def reserve_place(
        self, submission: Submission, num_caller_queues_ahead: int | None = None
    ) -> TokenStream:
        """First half of ``enqueue``: give a request its place in the queue, and make its stream.

        Args:
            num_caller_queues_ahead: as for ``Admission.reserve``.
        """
        self._set_notifier(submission)
        group, num_tokens = submission.request.group, submission.num_tokens
        if submission.make_members is not None:
            # Refuse a request for many outputs before these are made, which takes milliseconds.
            self.core.admission.check(group, num_tokens, num_caller_queues_ahead)
        submission.add_members()
        self.core.admission.reserve(group, num_tokens, num_caller_queues_ahead)
        return self._make_stream(submission)

    async def enqueue_or_wait(self, submission: Submission) -> TokenStream:
        """Queue a request once the queue has a place; its timeout begins then."""
        submission.add_members()
        core, group = self.core, submission.request.group
        self._set_notifier(submission)
        is_gone = self.mailboxes.of_running_loop().is_closed
        reserved = core.admission.reserve_or_wait(group, submission.num_tokens, is_gone)
        stream = self._make_stream(submission)
        if reserved is not None:
            try:
                core.check_not_engine_thread()
                await wait_for(reserved)
            except BaseException:
                core.abandon(group)
                raise
            group.restart_timeout(core.clock())
        self.start(submission)
        return stream

    def close(self) -> list[threading.Thread]:
        """Drop texts that wait to be tokenised and grammars that wait to be compiled; returns the
        threads that still work."""
        return self.grammar_compiler.close() + self._tokenizer_threads.close()

    def _set_notifier(self, submission: Submission) -> None:
        request, observers = submission.request, (*submission.observers, *self.observers.registered)
        request.group.engine = self.observers.engine
        submission.notifier = ObserverNotifier(request, observers) if observers else None
        request.group.notifier = submission.notifier

    def _make_stream(self, submission: Submission) -> TokenStream:
        request, mailbox_of_loop = submission.request, self.mailboxes.of_running_loop
        if submission.stream is None:
            return TokenStream(request, self.core, mailbox_of_loop, submission.parser)
        submission.stream._switch_request(request, self.core, mailbox_of_loop)
        return submission.stream

    def start(self, submission: Submission) -> None:
        """Second half of ``enqueue``: begin a request that has a place in the queue and a stream.
        If Ctrl-C interrupts an Observer's ``on_submit``, the dropped stream aborts the request."""
        if submission.notifier is not None:
            submission.notifier.notify_submit(RequestInfo(*submission.call))
        core, request, group = self.core, submission.request, submission.request.group
        if request.token_ids:
            self._send_when_grammar_ready(request)
            return
        if group.deadline < math.inf:
            core.send(core.on_add_deadline, group)

        def prepare_and_send(max_characters: int | None) -> bool:
            # Only the group holds the text, so that one that ends earlier holds none until its
            # turn.
            raw_prompt = group.raw_prompt
            if group.cancelled or raw_prompt is None:
                return True
            try:
                if not raw_prompt.prepare(request, max_characters):
                    return False
                group.raw_prompt = None
                core.admission.correct_estimate(group, request.num_prompt_tokens)
                self._send_when_grammar_ready(request)
            except BaseException as error:
                # A Rust panic in the tokenizer is a BaseException.
                if not issubclass(type(error), Exception):
                    error = check.argument_error("prompt", check.describe(error))
                core.send(core.on_fail, group, error)
            return True

        try:
            self._tokenizer_threads.submit(
                prepare_and_send, submission.num_characters, request.owner
            )
        except RequestError as error:
            core.send(core.on_fail, group, error)

    def _send_when_grammar_ready(self, request: Request) -> None:
        """Send the group to the engine thread once its grammar is compiled, without delaying other
        requests."""
        core, group, spec = self.core, request.group, request.sampling.structured_outputs
        if spec is None:
            core.send(core.on_add, group)
            return
        grammar = self.grammar_compiler.find_cached(spec)
        if grammar is not None:
            self._send_with_grammar(group, grammar, None)
            return
        if group.deadline < math.inf:
            core.send(core.on_add_deadline, group)
        try:
            done = partial(self._send_with_grammar, group)
            self.grammar_compiler.submit(spec, done, lambda: not group.cancelled, request.owner)
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
            # The engine thread gives the grammars to the members: the group may end at any time,
            # and a grammar that a member gets afterwards would never be released.
            grammars = [RequestGrammar.begin(grammar) for _ in group.members]
        except BaseException as failure:  # A grammar backend's native code may panic.
            core.send(core.on_fail, group, failure)
            return
        core.send(core.on_add, group, grammars)
