"""Client: streams of engines that run as replicas of a Serve deployment."""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import ray

from asyncllm import Completion, EngineClosedError, SamplingParams, TokenStream
from asyncllm import validation as check
from asyncllm.core.channel import Channel, OnSlow
from asyncllm.core.request import Request, RequestGroup
from asyncllm.llm import LLMStream
from asyncllm.runtime.mailbox import MailboxRegistry, ThreadMailbox
from asyncllm.runtime.request_options import (
    ChatOptions,
    RequestOptions,
    normalized_request_ids,
    pop_fields,
)
from asyncllm_ray.counters import Counters
from asyncllm_ray.prompts import prompt_hashes
from asyncllm_ray.remote import DeltaCollector, Link, ReceivedText, RemoteRequest
from asyncllm_ray.traces import current_trace
from asyncllm_ray.wire import Call, check_plain

_ANY_LENGTH = 1 << 62


class Client:
    """Client of a Serve deployment, with the streams of an in-process engine.

        client = Client(serve.run(deployment(), name="llm", route_prefix=None))
        async for delta in client.stream("Tell me a story."):
            print(delta, end="", flush=True)

    The replica checks a request, so the first read of the stream raises the errors that
    ``AsyncLLMEngine.stream`` would raise at once. Any thread may call any method.

    Args:
        handle: what ``serve.run`` returns, or ``serve.get_deployment_handle``.
        retries: how often a request without a token may be sent again because its replica died,
            with the same seed.
        heartbeat: seconds between two messages to each replica that holds a stream; less than a
            third of the deployment's ``lease``.

    Raises:
        EngineClosedError: if Ray is not started.
    """

    def __init__(self, handle: Any, *, retries: int = 0, heartbeat: float = 2.0) -> None:
        if not ray.is_initialized():
            raise EngineClosedError(
                "Client(): Ray is not started in this process; expected ray.init() before"
            )
        retries = check.integer("retries", retries, 0, 100)
        heartbeat = check.seconds("heartbeat", heartbeat, exclusive_low=True)
        method = handle.options(method_name="stream", stream=True)
        self._link = Link(method, retries, heartbeat)
        self._mailboxes = MailboxRegistry()
        self._streams: WeakValueDictionary[str, TokenStream] = WeakValueDictionary()
        self._is_closed = False

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        max_unread: int = 256,
        on_slow: OnSlow = "coalesce",
        cache_salt: str | None = None,
        owner: str | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Send a request to a replica at once; returns the stream of its output.

        Arguments are those of ``AsyncLLMEngine.stream``. ``max_unread`` also bounds the tokens that
        a replica sends ahead of the reader while it generates; ``on_slow="abort"`` aborts once
        ``max_unread`` tokens have been unread for 20 ms. ``timeout`` counts from this call on. A
        ``request_id`` is unique among the live requests of this client.

        Raises:
            InvalidRequestError: for an argument that cannot be used, or cannot be sent.
            EngineClosedError: if the client is closed.
        """
        options = RequestOptions(
            request_id, priority, timeout, max_unread, on_slow, cache_salt, owner
        )
        return self._submit(prompt, sampling_params, options, None, sampling)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> TokenStream:
        """Send a conversation to a replica; returns its stream. Arguments are those of
        ``AsyncLLMEngine.chat``; tools and ``response_format`` have to be plain data."""
        request, chat = pop_fields(RequestOptions, options), pop_fields(ChatOptions, options)
        return self._submit(messages, sampling_params, request, chat, options)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """Complete a prompt: ``stream(prompt, sampling_params, **options)``, read to its end."""
        return await self.stream(prompt, sampling_params, **options).result()

    def blocking(self, stream: TokenStream) -> LLMStream:
        """A stream of this client as a plain iterator, for a thread without an event loop."""
        return LLMStream(stream, ThreadMailbox(60.0, _nothing))

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests of this client; unknown ids are ignored."""
        for one in normalized_request_ids(request_id):
            stream = self._streams.get(one)
            if stream is not None:
                stream.abort()

    def stats(self) -> Counters:
        """Counts of this client."""
        return replace(self._link.counters)

    def close(self) -> None:
        """Abort all requests of this client, and send no more. Idempotent; returns at once."""
        self._is_closed = True
        self._link.post(self._link.close)

    def _submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        chat: ChatOptions | None,
        sampling: dict[str, Any],
    ) -> TokenStream:
        if self._is_closed:
            raise EngineClosedError("the client is closed")
        params = _resolve(sampling_params, sampling)
        sent = {name: getattr(options, name) for name in RequestOptions.__slots__}
        if chat is not None:
            names = (*ChatOptions.__slots__, *ChatOptions.__mro__[1].__slots__)
            sent |= {name: getattr(chat, name) for name in names}
        for name, value in {"messages" if chat else "prompt": prompt, **sent}.items():
            check_plain(name, value)
        group_id = options.request_id or f"ray-{uuid.uuid4().hex}"
        sent["request_id"] = group_id
        live = self._streams.get(group_id)
        if live is not None and not live._group.cancelled:
            raise check.value_error("request_id", group_id, "an id that no live request has")
        most, window = options.max_unread, options.max_unread
        if options.on_slow == "pause":
            # Divide ``max_unread`` between tokens that the replica holds and those it sends ahead.
            window = max(1, most // 2)
            sent["max_unread"] = max(1, most - window)
        elif options.on_slow == "abort":
            window = sent["max_unread"] = (
                _ANY_LENGTH  # Only the client knows how late its reader is.
            )
        call = Call("", prompt, params, sent, window, chat is not None, current_trace())
        call.hashes, call.num_tokens = prompt_hashes(prompt, options.cache_salt)
        now = time.monotonic()
        call.deadline = math.inf if options.timeout is None else now + options.timeout
        group = RequestGroup(group_id, Channel(most, options.on_slow), now, call.deadline)
        for _ in range(params.n):
            Request(group, params, max_model_len=_ANY_LENGTH).output = ReceivedText()
        remote: Any = RemoteRequest(self._link, group, call)
        parser: Any = None if chat is None else DeltaCollector()
        of_loop = self._mailboxes.of_running_loop
        stream = TokenStream(group.members[0], remote, of_loop, parser)
        self._streams[group_id] = stream
        self._link.counters.requests += 1
        self._link.submit(remote)
        return stream


def _nothing() -> None:
    """Watchdog that does nothing: the replica watches its own steps."""


def _resolve(given: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    """Sampling parameters with a seed, so that each attempt has the same tokens.

    Raises:
        InvalidRequestError: for values that are invalid, or cannot be sent.
    """
    if given is not None and not isinstance(given, SamplingParams):
        raise check.value_error("sampling_params", given, "SamplingParams or None")
    params = replace(given or SamplingParams(), **sampling)
    if params.logits_processors:
        accepted = "none: callables cannot be sent to a replica"
        raise check.value_error("logits_processors", params.logits_processors, accepted)
    return replace(params, seed=secrets.randbits(63)) if params.seed is None else params
