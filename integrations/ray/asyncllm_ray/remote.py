"""Requests at replicas, with the interface that a TokenStream needs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from asyncllm import (
    AsyncLLMError,
    CompletionOutput,
    Delta,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    ToolCall,
)
from asyncllm.core.channel import StreamEnd
from asyncllm.core.deadlines import DeadlineExceededError
from asyncllm.core.output_processor import make_partial_completion, make_usage
from asyncllm.core.request import RequestGroup
from asyncllm.validation import describe_error
from asyncllm_ray.counters import Counters
from asyncllm_ray.metrics import ClientMetrics
from asyncllm_ray.replica import control
from asyncllm_ray.wire import Batch, Call, Heard

_GRACE = 0.25
"""Seconds for a replica to send its last words for a stream that is aborted or late."""
_LOST_CANCEL_SECONDS = 10.0
"""Seconds to wait for the first item of a cancelled call whose cancel Ray may have lost. After them
the replica's lease ends it."""
_PATIENCE = 0.02
"""Seconds for a reader to take what has arrived, before ``on_slow="abort"`` applies."""


class Link:
    """Thread with an event loop that talks to the replicas of one deployment.

    Args:
        handle: handle of the replicas' streaming method.
        retries: how often a request without a token may be sent again.
        heartbeat: seconds between two messages to each replica that holds a stream.
    """

    def __init__(self, handle: Any, retries: int, heartbeat: float) -> None:
        self.loop = asyncio.new_event_loop()
        self.counters = Counters()
        self._metrics = ClientMetrics()
        self.pid = os.getpid()
        self._handle = handle
        self._retries = retries
        self._heartbeat = heartbeat
        self._live: set[RemoteRequest] = set()
        self._news: dict[Any, dict[str, Heard]] = {}
        self._names = itertools.count()
        self._prefix = uuid.uuid4().hex
        self._is_beating = False
        self.thread = threading.Thread(
            target=_run_loop, args=(self.loop,), name="asyncllm-ray", daemon=True
        )
        self.thread.start()
        weakref.finalize(self, _stop, self.loop)

    def submit(self, remote: RemoteRequest) -> None:
        """Send a request; any thread may call it."""
        self.post(self._start, remote)

    def post(self, run: Callable[..., None], *args: Any) -> None:
        """Run a function on the thread, unless its loop is closed. Any thread may call it, also a
        destructor."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(run, *args)

    def _start(self, remote: RemoteRequest) -> None:
        self._live.add(remote)
        remote.task = self.loop.create_task(self._run(remote))
        if remote.call.deadline < math.inf:
            remote.set_timer(remote.call.deadline - time.monotonic(), remote.expire)
        if not self._is_beating:
            self._is_beating = True
            self.loop.call_later(self._heartbeat, self._beat)

    async def _run(self, remote: RemoteRequest) -> None:
        """Send a request, retry it if allowed, then end its stream."""
        retries, error = self._retries, None
        try:
            while not remote.group.cancelled:
                error = await self._attempt(remote)
                is_lost = isinstance(error, EngineDeadError) and not remote.group.cancelled
                self.counters.lost_replicas += is_lost
                if not (is_lost and retries and not remote.channel.num_written):
                    break
                retries -= 1
                self.counters.retries += 1
        except Exception as failure:
            error = EngineDeadError(f"the client failed: {describe_error(failure)}")
            error.__cause__ = failure
        finally:
            self._live.discard(remote)
            remote.end(error)
            remote.set_timer(None, remote.give_up)

    async def _attempt(self, remote: RemoteRequest) -> Exception | None:
        """Send a request to one replica, and read its answer; returns why it failed."""
        call = remote.call
        call.key = f"{self._prefix}-{next(self._names)}"
        remote.replica = None
        try:
            remote.response = self._handle.remote(call)
            async for batch in remote.response:
                remote.take(batch)
                if batch.error is not None:
                    return batch.error
        except Exception as error:
            return None if remote.last is not None else translate(error)
        finally:
            if call.placed is not None:
                call.placed.end(None if remote.last is None else remote.last.usage)
                call.placed = None
        return None if remote.last is not None else EngineDeadError("the replica ended the stream")

    def tell(self, remote: RemoteRequest, is_aborted: bool = False) -> None:
        """Tell a replica a request's state, batched per event loop iteration."""
        replica = remote.replica
        if replica is None or remote not in self._live:
            return
        if not self._news:
            self.loop.call_soon(self._send_news)
        news = self._news.setdefault(replica, {})
        key = remote.call.key
        is_aborted = is_aborted or (key in news and news[key].is_aborted)
        news[key] = Heard(key, remote.num_read, is_aborted)

    def _send_news(self) -> None:
        told, self._news = self._news, {}
        for replica, news in told.items():
            replica.__ray_call__.remote(control, list(news.values()))

    def _beat(self) -> None:
        self._is_beating = bool(self._live)
        self._metrics.update(replace(self.counters))
        for remote in self._live:
            self.tell(remote)
        if self._is_beating:
            self.loop.call_later(self._heartbeat, self._beat)

    def close(self) -> None:
        """Abort all requests."""
        for remote in list(self._live):
            remote.abort(remote.group)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)


@dataclass(eq=False)
class RemoteRequest:
    """Request at a replica, with the EngineCore methods that a TokenStream calls.

    Attributes:
        link: the thread that talks to replicas.
        group: the request; its channel carries the output to the reader.
        call: the attempt under way.
        replica: handle of the replica's actor; None before the answer's first item.
        response: Serve's response to the attempt; None before the first one.
        last: the request's last delta, which has the usage; None until it arrives.
    """

    link: Link
    group: RequestGroup
    call: Call
    replica: Any = None
    response: Any = None
    task: Any = None
    last: Delta | None = None
    _num_told: int = 0
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.channel = self.group.channel
        self._step = max(1, self.call.window // 2)
        self.channel.is_backpressured = True  # Makes each read call ``on_reader_caught_up``.

    @property
    def num_read(self) -> int:
        return self.channel.num_read

    # --- methods for TokenStreams ------------------------------------------------------

    def check_not_engine_thread(self) -> None:
        """Refuse the link's own thread, which would wait for itself for ever."""
        if threading.current_thread() is self.link.thread:
            raise RuntimeError("the client's own thread cannot wait for a stream")

    def send(self, run: Callable[..., None], *args: Any) -> None:
        run(*args)

    def on_reader_caught_up(self, _: RequestGroup) -> None:
        """Give the replica credit, if the reader has read enough since the last time."""
        channel = self.channel
        if channel.num_read - self._num_told >= self._step:
            self._num_told = channel.num_read
            self.link.post(self.link.tell, self)

    def abort(self, group: RequestGroup) -> None:
        """Abort the request. Any thread may call it, any number of times."""
        group.aborted = True
        if not group.cancelled:
            group.cancelled = True
            self.link.post(self._abort)

    def abandon(self, group: RequestGroup) -> None:
        """Abort the request from a destructor."""
        if os.getpid() == self.link.pid:
            self.abort(group)

    # --- on the link's thread ----------------------------------------------------------

    def _abort(self) -> None:
        self.call.is_aborted = True
        self.link.tell(self, is_aborted=True)
        self.expire()

    def expire(self) -> None:
        """End the stream by its replica's word if one has the request, else at once."""
        if self.replica is None:
            self.give_up()
        else:
            self.set_timer(_GRACE, self.give_up)

    def set_timer(self, seconds: float | None, run: Callable[[], None]) -> None:
        """Run a function after ``seconds``, in place of the one that was to run; None: neither."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.link.loop.call_later(seconds, run)

    def give_up(self) -> None:
        """End the stream with what has arrived, and leave Serve's queue or the replica."""
        self.call.is_aborted = True
        self.link.tell(self, is_aborted=True)
        self.end(None if self.group.cancelled else self._exceeded())
        if self.response is not None:
            # In Serve's queue this gives up the place; a replica closes the generator.
            with contextlib.suppress(Exception):  # Those of the response, which may have failed.
                self.response.cancel()
            if self.replica is None and not self.task.done():
                # Ray may lose the cancel of a call on its way: then its first item names the
                # replica, which is told.
                self.set_timer(_LOST_CANCEL_SECONDS, self.task.cancel)
            else:
                self.task.cancel()

    def _exceeded(self) -> DeadlineExceededError:
        now = time.monotonic()
        where = "waiting for a replica" if self.replica is None else "its replica did not answer"
        return DeadlineExceededError(
            f"request {self.group.request_id!r} passed its deadline while {where}, "
            f"{now - self.group.arrived_at:.3f} s after it was submitted",
            partial=make_partial_completion(self.group, now),
        )

    def _abort_late_reader(self, num_written: int) -> None:
        channel = self.channel
        if num_written - channel.num_read >= channel.max_unread and not channel.ended:
            self.abort(self.group)

    def take(self, batch: Batch) -> None:
        """Hand an item of the answer to the reader."""
        channel, members = self.channel, self.group.members
        if batch.replica is not None:
            self.replica = batch.replica
            if self.call.is_aborted:
                self.link.tell(self, is_aborted=True)
        if channel.ended:
            return
        if batch.prompt_token_ids:
            for member in members:
                member.set_prompt(list(batch.prompt_token_ids))
            if batch.prompt_logprobs:
                members[0].prompt_logprobs = list(batch.prompt_logprobs)
        if not batch.deltas:
            return
        if self.call.placed is not None:
            self.call.placed.answered()
        for delta in batch.deltas:
            member = members[delta.index]
            member.token_ids.extend(delta.token_ids)
            member.output.texts.append(delta.text)
            if delta.usage is not None:
                self.last = delta
                delta = replace(delta, finish_reason=None, stop_reason=None, usage=None)
                if delta == Delta("", (), delta.index):
                    break
            channel.items.append(delta)
            channel.num_written += len(delta.token_ids)
        if self.last is not None:
            return
        self.link.counters.pauses += channel.num_written - self._num_told >= self.call.window
        if channel.on_slow == "abort" and channel.num_unread >= channel.max_unread:
            late = self._abort_late_reader
            self.link.loop.call_later(_PATIENCE, late, channel.num_written)
        self._wake()

    def end(self, error: Exception | None) -> None:
        """End the stream: by the last delta, by the error, or as aborted."""
        channel = self.channel
        if self.last is not None:
            last = self.last
            assert last.finish_reason is not None
            assert last.usage is not None
            end: Any = StreamEnd(
                last.finish_reason, last.stop_reason, last.usage, output=last.index
            )
        elif self.group.cancelled:
            usage = make_usage(self.group, self.group.members, time.monotonic())
            end = StreamEnd("abort", None, usage)
        else:
            end = error or EngineClosedError("the client's thread was stopped")
        self.group.cancelled = True
        if channel.propose_end(end):
            channel.end()
        self._wake()

    def _wake(self) -> None:
        channel = self.channel
        if channel.has_reader and channel.mailbox is not None:
            channel.has_reader = False
            channel.mailbox.notify((channel,))


def translate(error: Exception) -> Exception:
    """Convert an exception of Ray to one of asyncllm."""
    cause: Any = getattr(error, "cause", None)
    if isinstance(error, AsyncLLMError):
        return error
    if isinstance(error, RayTaskError) and isinstance(cause, AsyncLLMError):
        return cause
    if isinstance(error, BackPressureError):
        found: AsyncLLMError = EngineOverloadedError(
            str(error), retry_after=error.retry_after_s or 1.0
        )
    elif isinstance(error, RayActorError):
        found = EngineDeadError(f"the replica died: {error}")
    elif isinstance(error, DeploymentUnavailableError):
        remedy = "it was deleted, or its last update failed: deploy it again with run(…)"
        found = EngineClosedError(f"{error.message.removesuffix('.')}; {remedy}")
    else:
        found = RequestError(f"the replica could not be asked: {describe_error(error)}")
    found.__cause__ = error
    return found


class ReceivedText:
    """Text of one output as far as it has arrived, in place of a detokenizer's."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def decode(self, _: list[int]) -> str:
        """The text of all tokens that have arrived."""
        return "".join(self.texts)


@dataclass(eq=False)
class DeltaCollector:
    """Collects the reasoning and the tool calls of a conversation, which replicas have parsed."""

    _reasoning: dict[int, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[int, list[Any]]] = field(default_factory=dict)

    def push(self, delta: Delta) -> Delta:
        if delta.reasoning:
            self._reasoning.setdefault(delta.index, []).append(delta.reasoning)
        for one in delta.tool_calls:
            calls = self._calls.setdefault(delta.index, {})
            call = calls.setdefault(one.index, [one.id, one.name, "", False])
            call[2] += one.arguments
            call[3] = call[3] or one.done
        return delta

    def mark_interrupted(self) -> bool:
        """Whether text is held back: never, because replicas send all of it."""
        return False

    def add_reasoning_and_calls(self, output: CompletionOutput) -> CompletionOutput:
        calls = self._calls.get(output.index, {}).values()
        return replace(
            output,
            reasoning="".join(self._reasoning.get(output.index, ())),
            tool_calls=tuple([ToolCall(id, name, text) for id, name, text, done in calls if done]),
        )
