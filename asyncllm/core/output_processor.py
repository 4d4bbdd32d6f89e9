"""OutputProcessor: sampled tokens to deltas in a request's channel, and every request's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncllm.core.admission import Admission
from asyncllm.core.channel import Channel, End, Mailbox, check_gil
from asyncllm.core.request import Request, Status
from asyncllm.core.scheduler import Scheduler, TokenEvent
from asyncllm.errors import AsyncLLMError, RequestError
from asyncllm.outputs import (
    Completion,
    CompletionOutput,
    Delta,
    FinishReason,
    Usage,
    make_token_delta,
)
from asyncllm.validation import describe


class Detokenizer(Protocol):
    """Turns tokens into text that may be handed out; see ``core.detokenizer``."""

    stopped: str | None

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Output:
    """What a Request carries as ``output``: where its tokens become text, and where the text
    goes.

    Attributes:
        channel: to the reader.
        decode: token ids to text, whole.
        detokenizer: None until the prompt is known; an output's text may depend on its end.
    """

    __slots__ = ("channel", "decode", "detokenizer")

    def __init__(
        self,
        channel: Channel,
        decode: Callable[[Sequence[int]], str],
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self.channel = channel
        self.decode = decode
        self.detokenizer = detokenizer


class OutputProcessor:
    """What becomes of results. On the engine thread; ``close`` and ``flush_all_wakeups`` on those
    that watch it as well, which it may come back to meet.

    Attributes:
        num_finished, num_aborted, num_failed: requests that ended in that way.

    Raises:
        EngineError: where the GIL is off.
    """

    def __init__(
        self, scheduler: Scheduler, admission: Admission, clock: Callable[[], float]
    ) -> None:
        check_gil()
        self.num_finished = 0
        self.num_aborted = 0
        self.num_failed = 0
        self._scheduler = scheduler
        self._admission = admission
        self._clock = clock
        self._to_wake: list[Channel] = []
        self._unread_in: set[Mailbox] = set()

    def deliver(self, event: TokenEvent, now: float) -> None:
        request, token_id, logprobs, error = event
        if error is not None:
            self.close(request, _as_request_error(request, error))
            return
        if request.first_token_at is None:
            request.first_token_at = now
            if request.notifier is not None:
                request.notifier.first_token()
        channel: Channel = request.output.channel
        try:
            text = self._detokenize(request, request.output.detokenizer, token_id)
        except BaseException as error:  # a panic of the tokenizer's Rust is no Exception
            self.fail(request, _as_request_error(request, error))
            return
        if request.status is Status.FINISHED:
            last = make_token_delta(token_id, text, logprobs)
            self.close(request, None, last)
        else:
            channel.put(token_id, text, logprobs)
            if channel.has_reader:
                channel.has_reader = False
                self._to_wake.append(channel)
            elif channel.mailbox is not None:
                self._unread_in.add(channel.mailbox)
            if channel.on_slow != "coalesce" and channel.num_unread >= channel.max_unread:
                self._apply_backpressure(request, channel)

    def _detokenize(self, request: Request, detokenizer: Detokenizer, token_id: int) -> str:
        """The new text. A stop token's own text is left out, as in vLLM, unless asked for;
        a stop string ends the request here, in the middle of a token if need be."""
        sampling = request.sampling
        by_token = request.status is Status.FINISHED and request.finish_reason == "stop"
        text = ""
        if not by_token or sampling.include_stop_str_in_output:
            text = detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            if request.status is not Status.FINISHED:
                self._scheduler.finish(request, "stop")
            request.finish_reason = "stop"
            request.stop_reason = detokenizer.stopped
        elif request.status is Status.FINISHED:
            text += detokenizer.finish()
        return text

    def _apply_backpressure(self, request: Request, channel: Channel) -> None:
        """Nobody reads: the request is aborted, or gets no more tokens until it is read."""
        if channel.on_slow == "abort":
            request.cancelled = True
            self.abort(request)
            return
        if channel.is_backpressured:
            return
        self._scheduler.pause(request)
        channel.is_backpressured = True
        if channel.num_unread < channel.max_unread:
            # Read in the moment between the test and the flag: the reader saw no flag.
            self.release(request)

    def close(self, request: Request, error: Exception | None, last: Delta | None = None) -> None:
        """Ends the channel of a request that the scheduler has finished, or that ends with the
        engine. Of several threads that do so, the first says how, counts it and reports it;
        each has the reader woken, for the others may be stuck."""
        channel: Channel = request.output.channel
        if not channel.ended:
            self._end(request, error, last)
            channel.end()
        # Before the request is forgotten, so that whoever looks for those that live wakes it.
        self._to_wake.append(channel)
        request.cancelled = True
        self._admission.forget(request)

    def _end(self, request: Request, error: Exception | None, last: Delta | None) -> None:
        now = self._clock()
        usage = make_usage(request, now)
        reason: FinishReason = request.finish_reason or "abort"
        text = _remaining_text(request) if reason == "abort" and error is None else ""
        final = error or End(reason, request.stop_reason, usage, text, last)
        if not request.output.channel.offer_end(final):
            return
        request.finished_at = now
        if error is not None:
            self.num_failed += 1
        elif reason == "abort":
            self.num_aborted += 1
        else:
            self.num_finished += 1
        if request.notifier is not None:
            # Before the reader can see the end: who has read a result finds it in the metrics.
            request.notifier.finished(usage, error)

    def flush_wakeups(self) -> None:
        """Wakes the readers of what was delivered, one call for each of their loops. A loop
        with no reader to wake is asked whether it is still there."""
        if self._unread_in:
            mailboxes, self._unread_in = self._unread_in, set()
            for mailbox in mailboxes:
                if mailbox.is_closed():
                    self._abort_readers_of(mailbox)
        if not self._to_wake:
            return
        # Emptied by this thread alone and never replaced: what another appends is either in the
        # copy, or is left for ``flush_all_wakeups``.
        channels = self._to_wake.copy()
        del self._to_wake[: len(channels)]
        by_mailbox: dict[Mailbox, list[Channel]] = {}
        for channel in channels:
            mailbox = channel.mailbox
            if mailbox is not None:
                by_mailbox.setdefault(mailbox, []).append(channel)
        for mailbox, woken in by_mailbox.items():
            if not mailbox.notify(woken):
                self._abort_readers_of(mailbox)

    def _abort_readers_of(self, mailbox: Mailbox) -> None:
        """The loop was closed: nobody will ever read its streams."""
        for request in list(self._scheduler.requests()):
            if request.output.channel.mailbox is mailbox:
                request.cancelled = True
                self.abort(request)

    def flush_all_wakeups(self) -> None:
        """``flush_wakeups`` for an engine that is dead: a loop that is gone matters no more."""
        for channel in self._to_wake.copy():
            if channel.mailbox is not None:
                channel.mailbox.notify((channel,))

    # --- ends --------------------------------------------------------------------------

    def abort(self, request: Request) -> None:
        if request.status is not Status.FINISHED:
            self._scheduler.finish(request, "abort")
            self.close(request, None)

    def fail(self, request: Request, error: Exception) -> None:
        if request.status is not Status.FINISHED:
            self._scheduler.finish(request, None)
            self.close(request, error)

    def release(self, request: Request) -> None:
        """A held request was read down far enough."""
        channel: Channel = request.output.channel
        if channel.is_backpressured:
            channel.is_backpressured = False
            self._scheduler.resume(request)


def make_usage(request: Request, now: float) -> Usage:
    scheduled, first = request.first_scheduled_at, request.first_token_at
    return Usage(
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=request.num_output_tokens,
        cached_tokens=request.num_cached_tokens,
        queue_time=(now if scheduled is None else scheduled) - request.arrived_at,
        ttft=None if first is None else first - request.arrived_at,
        total_time=now - request.arrived_at,
    )


def make_partial(request: Request, now: float) -> Completion | None:
    """What a request had generated so far; None if that is nothing."""
    if not request.num_output_tokens:
        return None
    prompt = request.token_ids[: request.num_prompt_tokens]
    token_ids = request.output_token_ids
    try:
        text = request.output.decode(token_ids)
    except BaseException:
        text = ""  # it has ended, whether that can be decoded or not
    output = CompletionOutput(0, text, tuple(token_ids), None)
    return Completion(request.request_id, tuple(prompt), (output,), make_usage(request, now))


def _as_request_error(request: Request, error: BaseException) -> Exception:
    if isinstance(error, AsyncLLMError):
        return error
    wrapped = RequestError(f"request {request.request_id!r} failed: {describe(error)}")
    wrapped.__cause__ = error
    return wrapped


def _remaining_text(request: Request) -> str:
    """What was held back of an aborted request's text. It is aborted whether that can be
    decoded or not."""
    output: Output = request.output
    try:
        return "" if output.detokenizer is None else output.detokenizer.finish()
    except BaseException:
        return ""
