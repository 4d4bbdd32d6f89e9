"""OutputProcessor: detokenises sampled tokens into channels, and ends requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncllm.core.admission import Admission
from asyncllm.core.channel import Channel, Mailbox, StreamEnd, check_gil
from asyncllm.core.parser_memory import ParserMemory
from asyncllm.core.request import Request, RequestGroup, Status
from asyncllm.core.scheduler import Scheduler, TokenEvent
from asyncllm.core.tracebacks import replace_tracebacks_by_note
from asyncllm.errors import EngineDeadError, RequestError, with_cause
from asyncllm.outputs import (
    Completion,
    CompletionOutput,
    Delta,
    FinishReason,
    TokenLogprobs,
    Usage,
    make_last_delta,
    make_token_delta,
)
from asyncllm.sampling_params import SamplingParams
from asyncllm.validation import describe


class Detokenizer(Protocol):
    """Incremental token-to-text conversion; see ``asyncllm.text.detokenizer``."""

    stopped: str | None

    def push(self, token_id: int, *, search_stop_strings: bool = True) -> str: ...

    def finish(self) -> str: ...


@dataclass(slots=True, eq=False)
class DetokenizerState:
    """Detokenisation of one request.

    Attributes:
        decode: converts a whole list of token ids to text.
        detokenizer: None until the prompt is known, because the output's first characters may
            depend on the prompt's last tokens. An output after its group's first has none before
            its first token.
        make_detokenizer: makes a detokenizer for a prompt; set with the prompt, for the first
            member of a group.
    """

    decode: Callable[[Sequence[int]], str]
    detokenizer: Detokenizer | None = None
    make_detokenizer: Callable[[Sequence[int]], Detokenizer] | None = None


class OutputProcessor:
    """Converts token events to deltas, and ends requests. Engine thread only, except ``end_group``
    and ``flush_all_wakeups``: a thread that declares the engine hung calls them too, perhaps at the
    same time.

    Attributes:
        num_finished, num_aborted, num_failed: counts of requests, by how they ended.

    Raises:
        EngineError: where the GIL is off.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        clock: Callable[[], float],
        parser_memory: ParserMemory,
    ) -> None:
        check_gil()
        self.num_finished = 0
        self.num_aborted = 0
        self.num_failed = 0
        self._scheduler = scheduler
        self._admission = admission
        self._clock = clock
        self._parser_memory = parser_memory
        self._channels_to_wake: list[Channel] = []
        self._mailboxes_with_unread: set[Mailbox] = set()

    def deliver(self, event: TokenEvent, now: float) -> None:
        request, token_id, logprobs, error = event
        group = request.group
        if error is not None:
            self.fail(group, as_request_error(group, error))
            return
        if request.first_token_at is None:
            request.first_token_at = now
            notifier = group.notifier  # Another thread may end the group, and drop it.
            if notifier is not None and request.index == 0:
                notifier.notify_first_token()
        channel = group.channel
        try:
            detokenizer = request.output.detokenizer or _make_detokenizer(request)
            text = self._detokenize(request, detokenizer, token_id)
        except BaseException as error:  # A Rust panic in the tokenizer is a BaseException.
            self.fail(group, as_request_error(group, error))
            return
        if request.status is Status.FINISHED:
            last = make_token_delta(token_id, text, logprobs, request.index)
            if group.num_ended + 1 >= len(group.members):
                self.end_group(request, None, last)
                return
            self._end_output(request, last)
        else:
            channel.put(token_id, text, logprobs, request.index)
        if channel.has_reader:
            channel.has_reader = False
            self._channels_to_wake.append(channel)
        elif channel.mailbox is not None:
            self._mailboxes_with_unread.add(channel.mailbox)
        if channel.on_slow != "coalesce" and channel.num_unread >= channel.max_unread:
            self._apply_backpressure(group, channel)

    def _end_output(self, request: Request, last_delta: Delta) -> None:
        """End a request while other members of its group continue; its last delta has the finish
        reason."""
        request.group.num_ended += 1
        self._release_grammar(request)
        _put_last_delta(request, last_delta.text, last_delta.token_ids, last_delta.logprobs)
        self._admission.mark_members_ended((request,))

    def _detokenize(self, request: Request, detokenizer: Detokenizer, token_id: int) -> str:
        """Detokenise a token; returns the new text. As in vLLM, a stop token's own text is left out
        unless ``include_stop_str_in_output`` is set. A stop string ends the request here, even in
        the middle of a token."""
        sampling = request.sampling
        ended_by_token = request.status is Status.FINISHED and request.finish_reason == "stop"
        if ended_by_token and request.structured_output is not None:
            # A grammar may end the request with an ordinary token, whose text belongs to the
            # output.
            ended_by_token = token_id in request.stop_token_ids
        text = ""
        if not ended_by_token or sampling.include_stop_str_in_output:
            reasoning = request.reasoning
            if reasoning is None:
                text = detokenizer.push(token_id)
            else:
                text = detokenizer.push(token_id, search_stop_strings=not reasoning.push(token_id))
        if detokenizer.stopped is not None:
            if request.status is not Status.FINISHED:
                self._scheduler.finish(request, "stop")
            request.finish_reason = "stop"
            request.stop_reason = detokenizer.stopped
        elif request.status is Status.FINISHED:
            text += detokenizer.finish()
        return text

    def _apply_backpressure(self, group: RequestGroup, channel: Channel) -> None:
        """Apply ``on_slow`` to a stream that is not read: abort the group, or pause it."""
        if channel.on_slow == "abort":
            self.abort(group)
            return
        if channel.is_backpressured:
            return
        for request in group.members:
            self._scheduler.pause(request)
            self._parser_memory.add_unread(request)
        channel.is_backpressured = True
        if channel.num_unread < channel.max_unread:
            # The reader caught up before it could see ``is_backpressured``, so it sends no
            # ``on_reader_caught_up``.
            self.resume_group(group)

    def end_group(
        self, request: Request, error: Exception | None, last_delta: Delta | None = None
    ) -> None:
        """End a group's channel. ``request`` is the group's last member, which the scheduler
        finished or which ends with the engine. If several threads call this method, the first one
        decides the end, counts it and notifies the observers. Every thread wakes the reader,
        because another thread may be stuck."""
        group = request.group
        channel = group.channel
        if not channel.ended:
            self._propose_stream_end(request, error, last_delta)
            channel.end()
        # Queue the wake before ``forget_group``. So a thread that fails all live requests either
        # finds this group still registered or wakes its reader.
        self._channels_to_wake.append(channel)
        group.cancelled = True
        self._admission.forget_group(group)
        for member in group.members:
            self._release_grammar(member)
        if not isinstance(error, EngineDeadError):  # Another engine may take over the request.
            group.raw_prompt = None
            if group.param_bytes:
                # All members share it: the constructor validates every field.
                short = SamplingParams(logprobs=request.sampling.logprobs)
                for member in group.members:
                    member.drop_long_params(short)
        # Break the reference cycle of group and members, so that tokens are freed without the
        # garbage collector.
        group.members = []

    def _propose_stream_end(
        self, request: Request, error: Exception | None, last_delta: Delta | None
    ) -> None:
        group, now = request.group, self._clock()
        members = group.members
        if not members:
            return  # Another thread has ended the group.
        usage = make_usage(group, members, now)
        reason: FinishReason = request.finish_reason or "abort"
        text = _remaining_text(request) if reason == "abort" and error is None else ""
        end = error or StreamEnd(
            reason, request.stop_reason, usage, text, last_delta, request.index
        )
        if not group.channel.propose_end(end):
            return
        if error is not None:
            self.num_failed += 1
        elif reason == "abort":
            self.num_aborted += 1
        else:
            self.num_finished += 1
        if group.notifier is not None:
            # Notify the observers before the reader can see the end, so that metrics include every
            # result that was read.
            group.notifier.notify_finish(usage, error)
            group.notifier = None  # It keeps a request alive while a stream keeps the group.

    def flush_wakeups(self) -> None:
        """Wake the readers of new output, with one call per event loop. Abort the streams
        whose event loop has closed."""
        if self._mailboxes_with_unread:
            mailboxes, self._mailboxes_with_unread = self._mailboxes_with_unread, set()
            for mailbox in mailboxes:
                if mailbox.is_closed():
                    self._abort_readers_of(mailbox)
        if not self._channels_to_wake:
            return
        # Only this thread removes entries. An entry that another thread appends is either in the
        # copy or left for ``flush_all_wakeups``.
        channels = self._channels_to_wake.copy()
        del self._channels_to_wake[: len(channels)]
        by_mailbox: dict[Mailbox, list[Channel]] = {}
        for channel in channels:
            mailbox = channel.mailbox
            if mailbox is not None:
                by_mailbox.setdefault(mailbox, []).append(channel)
        for mailbox, channels in by_mailbox.items():
            if not mailbox.notify(channels):
                self._abort_readers_of(mailbox)

    def _abort_readers_of(self, mailbox: Mailbox) -> None:
        """Abort the streams that were read on ``mailbox``'s event loop, which has closed."""
        for request in list(self._scheduler.requests()):
            group = request.group
            if group.channel.mailbox is mailbox:
                self.abort(group)

    def flush_all_wakeups(self) -> None:
        """Wake all readers of a dead engine. Streams whose loop is closed are not aborted: they
        have ended already."""
        for channel in self._channels_to_wake.copy():
            if channel.mailbox is not None:
                channel.mailbox.notify((channel,))

    # --- ends of requests --------------------------------------------------------------

    def abort(self, group: RequestGroup) -> None:
        unfinished = group.unfinished_requests
        if not unfinished:
            return
        # Finish the last member first: the scheduler's queue is slow to remove its first request.
        for request in reversed(unfinished):
            self._scheduler.finish(request, "abort")
        last = unfinished.pop()
        if unfinished:
            for request in unfinished:
                _put_last_delta(request, _remaining_text(request), (), None)
            self._admission.mark_members_ended(unfinished)
        self.end_group(last, None)

    def finish_request(self, request: Request) -> None:
        """End a request whose grammar is complete, without another token."""
        self._scheduler.finish(request, "stop")
        try:
            detokenizer: Detokenizer | None = request.output.detokenizer
            text = "" if detokenizer is None else detokenizer.finish()
        except BaseException as error:
            self.fail(request.group, as_request_error(request.group, error))
            return
        last, group = Delta(text, (), index=request.index), request.group
        if group.num_ended + 1 >= len(group.members):
            self.end_group(request, None, last)
        else:
            self._end_output(request, last)

    def fail(self, group: RequestGroup, error: Exception) -> None:
        """End the whole group with an exception, even if only one member failed."""
        if not group.channel.ended:
            # The application may keep the error, and its frames would keep their variables alive.
            replace_tracebacks_by_note(error)
            for request in reversed(group.members):  # In reverse, for the reason in ``abort``.
                self._scheduler.finish(request, None)
            self.end_group(group.members[-1], error)

    def resume_group(self, group: RequestGroup) -> None:
        """Resume a group under backpressure, once its stream has been read far enough."""
        channel = group.channel
        if channel.is_backpressured:
            channel.is_backpressured = False
            for request in group.members:
                grammar = request.structured_output
                if grammar is not None and grammar.is_held:
                    self._parser_memory.hold(request)  # It also waits for memory.
                else:
                    self._parser_memory.discard_unread(request)
                    self._scheduler.resume(request)

    def _release_grammar(self, request: Request) -> None:
        """Free the grammar of an ended request.

        The application may keep the request's stream or error. A grammar in use takes memory that
        other compilations need, and its parser takes memory too.
        """
        grammar = request.structured_output
        if grammar is not None:
            self._parser_memory.forget(request)
            request.structured_output = None
            grammar.release()


def _put_last_delta(
    request: Request,
    text: str,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None,
) -> None:
    """Write the last delta of a finished request, while other members of its group continue."""
    request.group.channel.put_last_delta(
        make_last_delta(
            text, token_ids, request.index, logprobs, request.finish_reason, request.stop_reason
        )
    )


def make_usage(group: RequestGroup, members: Sequence[Request], now: float) -> Usage:
    scheduled = [m.first_scheduled_at for m in members if m.first_scheduled_at is not None]
    first = [m.first_token_at for m in members if m.first_token_at is not None]
    lengths = [member.num_output_tokens for member in members]
    return Usage(
        prompt_tokens=members[0].num_prompt_tokens,
        completion_tokens=sum(lengths),
        cached_tokens=members[0].num_cached_tokens,
        queue_time=min(scheduled, default=now) - group.arrived_at,
        ttft=min(first) - group.arrived_at if first else None,
        total_time=now - group.arrived_at,
        longest_output=max(lengths),
        truncated_prompt_tokens=group.num_truncated_tokens,
    )


def make_partial_completion(group: RequestGroup, now: float) -> Completion | None:
    """Output of a group so far; None if it has no token."""
    members = group.members
    if not any(member.num_output_tokens for member in members):
        return None
    prompt = members[0].token_ids[: members[0].num_prompt_tokens]
    outputs = tuple(map(_make_partial_output, members))
    return Completion(
        group.request_id,
        tuple(prompt),
        outputs,
        make_usage(group, members, now),
        members[0].whole_prompt_logprobs,
    )


def _make_partial_output(request: Request) -> CompletionOutput:
    token_ids = request.output_token_ids
    try:
        text = request.output.decode(token_ids)
    except BaseException:
        text = ""  # End the request even if its tokens cannot be decoded.
    return CompletionOutput(request.index, text, tuple(token_ids), None)


def as_request_error(group: RequestGroup, error: BaseException) -> Exception:
    """Convert an exception in the request's own code to a RequestError for the reader. Raised as it
    is, the exception might look like an error of the engine, or like the reader's own cancellation.
    """
    # ``isinstance`` may run the exception's own ``__class__``, which may raise.
    if issubclass(type(error), RequestError):
        return error  # pyright: ignore[reportReturnType]  # narrows by isinstance only
    message = f"request {group.request_id!r} failed: {describe(error)}"
    return with_cause(RequestError(message), error)


def _make_detokenizer(request: Request) -> Detokenizer:
    """Make the detokenizer of an output that is not the first of its group."""
    assert request.first_member is not None
    prompt = request.token_ids[: request.num_prompt_tokens]
    detokenizer = request.first_member.output.make_detokenizer(prompt)
    request.output.detokenizer = detokenizer
    return detokenizer


def _remaining_text(request: Request) -> str:
    """Text that the detokenizer still holds back for an aborted request; empty if it cannot be
    decoded."""
    output: DetokenizerState = request.output
    try:
        return "" if output.detokenizer is None else output.detokenizer.finish()
    except BaseException:
        return ""
