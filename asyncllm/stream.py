"""TokenStream: one request as an async iterator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from asyncllm import validation as check
from asyncllm.core.channel import Channel, StreamEnd, merge_unread_tokens
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.request import Request, RequestGroup
from asyncllm.errors import EngineDeadError, RequestError, copy_for_raise
from asyncllm.output_reader import OutputReader
from asyncllm.outputs import (
    Completion,
    CompletionOutput,
    Delta,
    FinishReason,
    TokenLogprobs,
    Usage,
)
from asyncllm.runtime.event_loop import EventLoopBackend
from asyncllm.runtime.handle import UncopyableHandle
from asyncllm.runtime.mailbox import LoopMailbox, ThreadMailbox
from asyncllm.tool_calls.message_parser import MessageParser

_EMPTY_DELTA = Delta("", ())


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class TokenStream(UncopyableHandle):
    """The output of one request, delta by delta.

    Made by ``AsyncLLMEngine.stream``, which has submitted the request. A stream ends in exactly one
    of two ways: with a last delta that has a ``finish_reason``; or with one exception, which comes
    after everything that was generated.

    Each of these aborts the request: ``abort()``, ``aclose()``, the end of ``async with stream``,
    cancelling a pending read, and losing the last reference to the stream. So a ``break`` out of
    ``async for delta in engine.stream(...)`` aborts, and a stream held in a variable runs on and
    can be read again. A stream whose read was cancelled ends with a RequestError that says so.

    One task reads a stream at a time, always on the same event loop; anything else is a
    RuntimeError.

    A request for several outputs (``n``) has one stream: ``index`` says to which output a delta
    belongs, and the last delta of each output has its ``finish_reason``. The stream ends with the
    output that ends last, and ``usage`` comes with it.

    Attributes:
        request_id: the request's id.
        finish_reason: finish reason of the output that ended last; None until the last delta was
            read.
        usage: None until the last delta was read.
    """

    _request: Request | None
    _core: EngineCore
    _get_loop_mailbox: Callable[[], LoopMailbox]
    _parser: MessageParser | None = None
    request_id: str = field(init=False)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    _group: RequestGroup = field(init=False)
    _channel: Channel = field(init=False)
    _backend: EventLoopBackend | None = None
    _is_reading: bool = False
    _is_read_cancelled: bool = False
    _is_done: bool = False
    _error: BaseException | None = None
    _stop_reason: str | int | None = None
    _keeps_output: bool = True
    """Whether deltas are kept after they are read, for ``completion()``."""
    _outputs: list[OutputReader] = field(init=False)
    _num_outputs: int = field(init=False)
    _single_output_texts: list[str] | None = None
    _resubmit: Callable[[TokenStream], bool] | None = None
    """Function that sends the request of a dead engine to another engine of the group; returns
    whether an engine took it. None outside of a group with ``retries``."""

    def __post_init__(self) -> None:
        assert self._request is not None
        self._group = self._request.group
        members = self._group.members
        self._num_outputs = len(members)
        # The readers refer to the members, which a group drops when it ends.
        self._outputs = list(map(OutputReader, members)) if self._keeps_output else []
        if len(self._outputs) == 1:
            self._single_output_texts = self._outputs[0].texts
        self.request_id = self._group.request_id
        self._channel = self._group.channel

    def _switch_request(
        self, request: Request, core: EngineCore, get_loop_mailbox: Callable[[], LoopMailbox]
    ) -> None:
        """Continue this stream with another engine's request, before anything was read."""
        self._request, self._core, self._get_loop_mailbox = request, core, get_loop_mailbox
        self._backend = None
        self.__post_init__()

    def _try_resubmit(self) -> bool:
        """Resubmit the request if its engine died before the first token; returns whether another
        engine took it. What a resubmission needs is freed once there can be none."""
        channel, resubmit = self._channel, self._resubmit
        if channel.stream_end is None and not channel.num_written:
            return False
        is_lost = isinstance(channel.stream_end, EngineDeadError)
        may_resubmit = is_lost and not channel.num_written and not self._group.aborted
        if may_resubmit and resubmit is not None and resubmit(self):
            return True
        self._resubmit = self._group.raw_prompt = None
        return False

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """Token ids of the prompt; None while it is still being tokenised."""
        request = self._request
        if request is None or not request.num_prompt_tokens:
            return None
        return tuple(request.token_ids[: request.num_prompt_tokens])

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Prompt log-probabilities as in ``Completion``; complete when the first delta arrives."""
        return None if self._request is None else self._request.whole_prompt_logprobs

    @property
    def _num_prompt_tokens(self) -> int:
        """Number of prompt tokens; 0 while the prompt is still being tokenised."""
        return self._group.num_prompt_tokens

    def _drop_prompt(self) -> None:
        """Drop the prompt and its log-probabilities, which no code reads afterwards. An ended
        request is then freed, even if the client has not read the output."""
        if self._request is not None:
            self._request.prompt_logprobs = None
            self._request = None

    @property
    def num_outputs(self) -> int:
        """Number of outputs, the ``n`` of the request."""
        return self._num_outputs

    def _drop_read_output(self) -> None:
        """Drop the deltas read so far, and keep no later ones; ``completion`` may not be called
        afterwards. Ended outputs are then freed, even if the client has not read them."""
        self._keeps_output, self._outputs, self._single_output_texts = False, [], None

    @property
    def _has_unread(self) -> bool:
        """Whether there is a delta that the next read returns at once; the end does not count."""
        return bool(self._channel.items)

    def __aiter__(self) -> TokenStream:
        return self

    @overload
    async def __anext__(self) -> Delta: ...

    @overload
    async def __anext__(self, timeout: float) -> Delta | None: ...

    async def __anext__(self, timeout: float | None = None) -> Delta | None:
        """The next delta.

        Args:
            timeout: seconds without a delta after which None is returned; for ``with_heartbeat``.

        Raises:
            StopAsyncIteration: after the last delta, an exception, or ``aclose()``.
            AsyncLLMError: if the request failed, or an earlier read was cancelled.
            RuntimeError: if another task reads this stream, or it was read on another loop.
        """
        if self._is_reading:
            raise RuntimeError(f"stream {self.request_id!r} is being read by another task")
        if self._is_done:
            raise StopAsyncIteration
        channel = self._channel
        items = channel.items
        if not items and channel.stream_end is None:
            # This code is inlined: every reader runs it in every step, so a function call would be
            # noticeable.
            backend = self._backend or self._bind_to_loop()
            waiter = backend.make_waiter()
            if waiter is None:
                raise self._other_loop_error()
            self._is_reading = True
            try:
                while True:
                    channel.waiter = waiter
                    channel.has_reader = True
                    # Check for output after setting the flag: output written before the flag is
                    # found here; output written after it wakes this reader.
                    if items or channel.stream_end is not None:
                        break
                    if timeout is None:
                        await waiter
                    else:
                        await backend.wait_at_most(waiter, timeout)
                    if items or channel.stream_end is not None:
                        break
                    if timeout is not None:
                        return None
                    waiter = backend.make_waiter()
            except BaseException:
                if not self._group.cancelled:
                    self._is_read_cancelled = True
                    self.abort()
                raise
            finally:
                self._is_reading = False
                channel.has_reader = False
                channel.waiter = None
        if self._resubmit is not None and self._try_resubmit():
            return await self.__anext__(timeout)  # pyright: ignore[reportArgumentType]
        return self._pop_delta()

    def with_heartbeat(self, seconds: float) -> StreamWithHeartbeat:
        """Iterate over the deltas, and yield None after every ``seconds`` without one, to keep a
        connection alive. No read is cancelled.

            async for delta in stream.with_heartbeat(15):
                await send(": keep-alive\\n\\n" if delta is None else event(delta))

        Raises:
            InvalidRequestError: unless ``seconds`` is positive and finite.
        """
        return StreamWithHeartbeat(self, check.seconds("seconds", seconds, exclusive_low=True))

    def _bind_to_loop(self) -> EventLoopBackend:
        """Bind this stream to the running loop, at its first wait."""
        self._core.check_not_engine_thread()
        mailbox = self._channel.mailbox
        if mailbox is None:
            self._channel.mailbox = mailbox = self._get_loop_mailbox()
        elif not isinstance(mailbox, LoopMailbox):
            raise self._other_loop_error()
        self._backend = mailbox.backend
        return mailbox.backend

    def _other_loop_error(self) -> RuntimeError:
        return RuntimeError(
            f"stream {self.request_id!r} belongs to the event loop that read it first"
        )

    def read_blocking(self, mailbox: ThreadMailbox) -> Delta | None:
        """``__anext__`` for a thread without an event loop; None at the end. Such a stream belongs
        to no loop, and one thread may read it at a time."""
        if self._is_reading:
            raise RuntimeError(f"stream {self.request_id!r} is being read by another thread")
        if self._is_done:
            return None
        channel = self._channel
        if channel.mailbox is None:
            self._core.check_not_engine_thread()
            channel.mailbox = mailbox
        elif not isinstance(channel.mailbox, ThreadMailbox):
            raise RuntimeError(f"stream {self.request_id!r} belongs to an event loop")
        items = channel.items
        self._is_reading = True
        try:
            while not items and channel.stream_end is None:
                channel.waiter = waiter = threading.Event()
                channel.has_reader = True
                if not items and channel.stream_end is None:
                    mailbox.wait(waiter)
            delta = (
                None if self._resubmit is not None and self._try_resubmit() else self._pop_delta()
            )
        except BaseException:
            self.abort()
            raise
        finally:
            self._is_reading = False
            channel.has_reader = False
            channel.waiter = None
        return self.read_blocking(mailbox) if delta is None else delta

    def _register_end_waiter(self, waiter: Any, mailbox: ThreadMailbox | None) -> bool:
        """Register ``waiter`` to be woken through ``mailbox`` (None: the running loop's) when the
        request has ended, and not at each delta. To be called once, before any read. Returns
        False if the request has ended already; the waiter may be woken even then."""
        self._channel.waiter = waiter
        self._channel.mailbox = self._get_loop_mailbox() if mailbox is None else mailbox
        return self._channel.stream_end is None

    def _pop_delta(self) -> Delta:
        """Take the next unread delta; if it is the last, add the finish reason and usage. There
        must be an unread delta or an unread end."""
        channel = self._channel
        # Read the end before ``items``: once the end is set, ``items`` is complete.
        final = channel.stream_end
        items = channel.items
        delta = items.popleft() if items else _EMPTY_DELTA
        if not isinstance(delta, Delta):
            delta = merge_unread_tokens(delta)
        if final is not None and not items:
            delta = self._merge_end(delta, final)
        if self._parser is not None:
            delta = self._parser.push(delta)
            if self.finish_reason is not None:
                self.finish_reason = delta.finish_reason
        if self._keeps_output:
            texts = self._single_output_texts
            if texts is None:
                self._outputs[delta.index].add(delta)
            else:
                # ``OutputReader.add`` inlined, for a request with a single output.
                texts.append(delta.text)
                if delta.logprobs is not None:
                    self._outputs[0].logprobs += delta.logprobs
        channel.num_read += len(delta.token_ids)
        if channel.is_backpressured and channel.num_unread <= channel.max_unread // 2:
            # Resume a request that backpressure paused.
            self._core.send(self._core.on_reader_caught_up, self._group)
        return delta

    def _merge_end(self, delta: Delta, end: StreamEnd | BaseException) -> Delta:
        """Merge the stream's end into ``delta``, or raise the end if it is an exception.

        The end waits for the next read if ``delta`` belongs to another output, if the merged delta
        would have more than ``max_merged`` tokens, or if it is an exception and ``delta`` is not
        empty.
        """
        if isinstance(end, StreamEnd) and delta is not _EMPTY_DELTA and delta.index != end.output:
            return delta
        if isinstance(end, StreamEnd) and end.finish_reason == "abort" and self._is_read_cancelled:
            if self._error is None:
                delta = replace(delta, text=delta.text + end.text, index=end.output)
                self._error = RequestError(
                    f"request {self.request_id!r} was aborted because a read of its stream was "
                    "cancelled, as asyncio.wait_for does when its time is up; to go on after a "
                    "silence, read stream.with_heartbeat(seconds), or keep the read in a task and "
                    "use asyncio.wait"
                )
            end = self._error
        if not isinstance(end, StreamEnd):
            if delta.text or delta.token_ids:
                return delta
            if self._parser is not None and self._parser.mark_interrupted():
                return delta
            self._is_done = True
            self._error = end
            raise copy_for_raise(end)
        last = end.last_delta or _EMPTY_DELTA
        if len(delta.token_ids) + len(last.token_ids) > self._channel.max_merged:
            return delta
        self._is_done = True
        self.finish_reason = end.finish_reason
        self.usage = end.usage
        self._stop_reason = end.stop_reason
        # A delta that another process parsed has its reasoning and tool calls already.
        return replace(
            delta,
            text=delta.text + last.text + end.text,
            token_ids=delta.token_ids + last.token_ids,
            index=end.output,
            logprobs=((delta.logprobs or ()) + (last.logprobs or ())) or None,
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            usage=end.usage,
        )

    def abort(self) -> None:
        """End the request with finish reason ``abort``. Any thread may call it, any number of
        times. The output so far can still be read. The request's blocks are free before the next
        step."""
        self._core.abort(self._group)

    def close(self) -> None:
        """Abort the request and end the iteration. Idempotent; returns at once."""
        self.abort()
        self._is_done = True

    async def aclose(self) -> None:
        """``close``, under the name that ``contextlib.aclosing`` and others expect."""
        self.close()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, Any, Completion]:
        """``await stream`` is ``await stream.result()``."""
        return self.result().__await__()

    async def result(self) -> Completion:
        """Read the stream to its end; returns the completion, which includes deltas read before.

        Raises:
            AsyncLLMError: if the request failed; raised at every call.
        """
        async for _ in self:
            pass
        return self.completion()

    def completion(self) -> Completion:
        """The output read so far, as a Completion.

        Raises:
            AsyncLLMError: if the request failed.
        """
        if self._error is not None:
            raise copy_for_raise(self._error)
        prompt = tuple(self.prompt_token_ids or ())
        outputs = self._make_outputs()
        if self._parser is not None:
            outputs = tuple([self._parser.add_reasoning_and_calls(output) for output in outputs])
        return Completion(self.request_id, prompt, outputs, self.usage, self.prompt_logprobs)

    def _make_outputs(self) -> tuple[CompletionOutput, ...]:
        if self._single_output_texts is not None:
            only = self._outputs[0]
            only.num_read, only.finish_reason = self._channel.num_read, self.finish_reason
            only.stop_reason = self._stop_reason
        return tuple([reader.output() for reader in self._outputs])

    def __del__(self) -> None:
        # A stream whose __init__ raised has no group.
        group = getattr(self, "_group", None)
        if group is not None and not group.cancelled:
            self._core.abandon(group)

    def __repr__(self) -> str:
        state = self.finish_reason or ("closed" if self._is_done else "open")
        return f"<TokenStream {self.request_id!r} {state}>"


class StreamWithHeartbeat:
    """Iterator made by ``TokenStream.with_heartbeat``. The request is aborted once neither the
    iterator nor the stream is referenced."""

    __slots__ = ("_seconds", "_stream")

    def __init__(self, stream: TokenStream, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds

    def __aiter__(self) -> StreamWithHeartbeat:
        return self

    async def __anext__(self) -> Delta | None:
        return await self._stream.__anext__(self._seconds)
