"""stream_with_callbacks: makes a token stream that calls LangChain-style handlers.

Handlers are LangChain's, or any object with some of their methods:

    class Printer:
        def on_llm_new_token(self, token, **kwargs):
            print(token, end="", flush=True)

    async for delta in stream_with_callbacks(engine, "Tell me a story.", handlers=[Printer()]):
        ...

LangChain need not be installed. A stream makes these calls, in this order:

- ``on_llm_start(serialized, prompts)``; for a conversation ``on_chat_model_start(serialized,
  [messages])``;
- ``on_llm_new_token(token, chunk=…)`` for each delta;
- ``on_llm_end(result)`` or ``on_llm_error(error, response=…)``.

Each call also has the arguments ``run_id``, ``parent_run_id`` and ``tags``; the first also has
``metadata``, ``name`` and ``invocation_params``. If a request has several outputs, each chunk has
its output's ``index`` in ``generation_info``, and ``result.generations[0]`` has one generation per
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import numbers
import sys
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import anyio

from asyncllm.callbacks.messages import (
    CallbackMessage,
    buffer_string,
    make_chunk,
    make_result,
    messages_from_chat,
)
from asyncllm.engine import AsyncLLMEngine
from asyncllm.outputs import Completion, Delta, FinishReason, Usage
from asyncllm.runtime.event_loop import wait_for
from asyncllm.runtime.handle import UncopyableHandle
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.validation import describe

logger = logging.getLogger("asyncllm.callbacks")


def stream_with_callbacks(
    engine: AsyncLLMEngine,
    prompt: str | Sequence[int] | Sequence[dict[str, Any]],
    sampling_params: SamplingParams | None = None,
    *,
    handlers: Iterable[Any] = (),
    run_id: uuid.UUID | None = None,
    parent_run_id: uuid.UUID | None = None,
    tags: Sequence[str] = (),
    metadata: dict[str, Any] | None = None,
    run_name: str | None = None,
    **options: Any,
) -> CallbackStream:
    """Submit a request; return a stream that calls the handlers as the stream is read.

    Args:
        prompt: text or token ids, as for ``AsyncLLMEngine.stream``; or messages, as for
            ``AsyncLLMEngine.chat``.
        sampling_params, options: as for these two methods.
        handlers: objects with any of the methods ``on_llm_start``, ``on_chat_model_start``,
            ``on_llm_new_token``, ``on_llm_end`` and ``on_llm_error``, synchronous or
            asynchronous.
        run_id: id of this run; None for a random one.
        parent_run_id: id of the run that this one is a part of.
        tags, metadata, run_name: values that are passed to the handlers.

    If the engine refuses the request, the first read raises the error, because only then can
    ``on_llm_error`` be called.

    Handlers are called one after the other, and the next delta is read when all have returned. The
    engine does not wait for them: unread deltas are merged. A synchronous method runs on a thread
    of this stream, unless the handler has ``run_inline = True``. An exception in a handler, except
    KeyboardInterrupt, is only logged; if the handler has ``raise_error = True``, the stream raises
    it and ends.
    """
    chat = not isinstance(prompt, str) and len(prompt) > 0
    chat = chat and not isinstance(prompt[0], numbers.Integral)
    stream: TokenStream | None = None
    refusal_error: Exception | None = None
    messages: list[CallbackMessage] = []
    try:
        if chat:
            messages = messages_from_chat(prompt)
            stream = engine.chat(prompt, sampling_params, **options)  # pyright: ignore[reportArgumentType]
        else:
            stream = engine.stream(prompt, sampling_params, **options)  # pyright: ignore[reportArgumentType]
    except Exception as error:
        refusal_error = error
    if isinstance(prompt, str):
        text = prompt
    else:  # A refused prompt may be an object of any type.
        text = " ".join(map(str, prompt)) if stream is not None else describe(prompt)
    invocation_params: dict[str, Any] = {}
    if isinstance(sampling_params, SamplingParams):
        names = sampling_params.__dataclass_fields__
        invocation_params = {name: getattr(sampling_params, name) for name in names}
    run = CallbackRun(
        handlers=tuple(handlers),
        ids={
            "run_id": run_id or uuid.uuid4(),
            "parent_run_id": parent_run_id,
            "tags": list(tags),
        },
        options={
            "metadata": dict(metadata or {}),
            "name": run_name or "AsyncLLMEngine",
            "invocation_params": invocation_params | options,
        },
        model_name=engine.config.model_name,
        messages=messages if chat else None,
        prompt=buffer_string(messages) if chat else text,
    )
    return CallbackStream(stream, refusal_error, run)


class CallbackStream(UncopyableHandle):
    """Token stream that calls handlers as it is read; made by ``stream_with_callbacks``.

    It is read and aborted like a ``TokenStream``. The last call of a run is

    - ``on_llm_end`` with the result, after the last delta;
    - ``on_llm_end`` with the partial result, after ``aclose()`` or the end of ``async with``;
    - ``on_llm_error``, after an exception, cancellation included.

    If the reader drops an unfinished stream, as with ``break``, there is no last call; use
    ``aclose()``.

    Attributes:
        run_id: id of this run, which the handlers get.
    """

    def __init__(
        self, stream: TokenStream | None, refusal_error: Exception | None, run: CallbackRun
    ) -> None:
        self.run_id: uuid.UUID = run.ids["run_id"]
        self._stream = stream
        self._refusal_error = refusal_error
        self._run = run
        self._message_id = None if run.messages is None else f"run-{self.run_id}"
        self._has_started = False
        self._has_ended = False

    @property
    def request_id(self) -> str | None:
        """Id of the request; None if the engine refused it."""
        return self._stream.request_id if self._stream is not None else None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason if self._stream is not None else None

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage if self._stream is not None else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Read the next delta, and call every handler with it.

        Raises:
            StopAsyncIteration: after the last delta, an exception, or ``aclose()``.
            AsyncLLMError: if the request was refused or failed.
        """
        if self._has_ended:
            raise StopAsyncIteration
        try:
            return await self._read_next()
        except GeneratorExit:
            raise  # The task is being destroyed with its event loop, so handlers cannot be called.
        except BaseException as error:
            await self._end_run_with_error(error)
            raise

    async def _read_next(self) -> Delta:
        if not self._has_started:
            self._has_started = True
            await self._run.start()
        if self._refusal_error is not None:
            raise self._refusal_error
        assert self._stream is not None
        delta = await anext(self._stream)
        if delta.text or delta.token_ids:
            chunk = make_chunk(delta, self._stream.num_outputs > 1, self._message_id)
            await self._run.notify("on_llm_new_token", delta.text, chunk=chunk)
        if delta.usage is not None:
            await self._end_run(self._stream)
        return delta

    async def _end_run(self, stream: TokenStream) -> None:
        self._has_ended = True
        try:
            await self._run.notify("on_llm_end", self._make_result(stream.completion()))
        finally:
            self._run.close()

    async def _end_run_with_error(self, error: BaseException) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        completion = getattr(error, "partial", None)
        if self._stream is not None:
            self._stream.close()
            # After an exceeded deadline ``completion()`` returns the output so far; after another
            # failure it raises.
            with contextlib.suppress(Exception):
                completion = self._stream.completion()
        partial = {} if completion is None else {"response": self._make_result(completion)}
        try:
            # If the reader's cancel scope was cancelled, await works only in a shielded scope.
            with anyio.CancelScope(shield=True):
                await self._run.notify("on_llm_error", error, quiet=True, **partial)
        finally:
            self._run.close()

    def _make_result(self, completion: Completion) -> Any:
        return make_result(completion, self._message_id, self._run.model_name)

    def abort(self) -> None:
        """End the request with finish reason "abort"; its output so far can still be read."""
        if self._stream is not None:
            self._stream.abort()

    async def aclose(self) -> None:
        """Abort the request and end the iteration; calls ``on_llm_end`` if the run had started."""
        if self._stream is not None:
            self._stream.close()
        if self._has_ended or not self._has_started or self._stream is None:
            self._has_ended = True
            self._run.close()
            return
        await self._end_run(self._stream)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def result(self) -> Completion:
        """Read the stream to its end; returns the completion."""
        async for _ in self:
            pass
        if self._stream is None:
            assert self._refusal_error is not None
            raise self._refusal_error
        return self._stream.completion()

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None:
            run.close()


# --- calls of handlers -------------------------------------------------------------------------


@dataclass(eq=False)
class CallbackRun:
    """The handlers of one run, and the arguments of their calls.

    Attributes:
        ids: arguments of every call: ``run_id``, ``parent_run_id`` and ``tags``.
        options: further arguments of the first call: ``metadata``, ``name`` and
            ``invocation_params``.
        messages: the conversation; None if the request has a prompt instead.
        prompt: the prompt, or the conversation as one text.
    """

    handlers: Sequence[Any]
    ids: dict[str, Any]
    options: dict[str, Any]
    model_name: str
    messages: list[CallbackMessage] | None
    prompt: str
    _thread: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        # Handlers that run inline are tracers, whose state other handlers read. Call them first.
        self.handlers = sorted(self.handlers, key=lambda h: not _get_attribute(h, "run_inline"))

    async def start(self) -> None:
        """Call ``on_chat_model_start`` or ``on_llm_start`` of every handler."""
        model = {
            "lc": 1,
            "type": "not_implemented",
            "id": ["asyncllm", "AsyncLLMEngine"],
            "name": "AsyncLLMEngine",
            "repr": f"AsyncLLMEngine({self.model_name!r})",
        }
        extra = self.ids | self.options
        chat, llm = (model, [self.messages]), (model, [self.prompt])
        for handler in self.handlers:
            if self.messages is None or not await self._call_handler(
                handler, "on_chat_model_start", "ignore_chat_model", chat, extra
            ):
                await self._call_handler(handler, "on_llm_start", "ignore_llm", llm, extra)

    async def notify(self, event: str, *args: Any, quiet: bool = False, **extra: Any) -> None:
        """Call the method ``event`` of every handler, in order.

        Args:
            quiet: only log exceptions of handlers, so that they do not replace one that is already
                being raised.
        """
        for handler in self.handlers:
            await self._call_handler(handler, event, "ignore_llm", args, self.ids | extra, quiet)

    async def _call_handler(
        self,
        handler: Any,
        event: str,
        ignore_attribute: str,
        args: tuple[Any, ...],
        extra: dict[str, Any],
        quiet: bool = False,
    ) -> bool:
        """Call the method ``event`` of a handler.

        Args:
            ignore_attribute: name of the attribute by which a handler declines the event.

        Returns:
            False if the handler lacks the method, or if ``on_chat_model_start`` raises
            NotImplementedError.
        """
        method = _get_attribute(handler, event)
        if method is None:
            return False
        if _get_attribute(handler, ignore_attribute):
            return True
        try:
            if inspect.iscoroutinefunction(method):
                await method(*args, **extra)
            elif _get_attribute(handler, "run_inline"):
                method(*args, **extra)
            else:
                await self._call_on_thread(functools.partial(method, *args, **extra))
        except NotImplementedError:
            if event == "on_chat_model_start":
                return False
            _log_exception(handler, event)
        except BaseException as error:
            if _cancels_reading(error):
                raise
            _log_exception(handler, event)
            if _get_attribute(handler, "raise_error") and not quiet:
                # A handler's StopAsyncIteration would end the reader's ``async for`` as if the
                # stream were complete.
                if isinstance(error, StopAsyncIteration):
                    name = type(handler).__name__
                    raise RuntimeError(f"{name}.{event} raised StopAsyncIteration") from error
                raise
        return True

    async def _call_on_thread(self, call: Any) -> None:
        """Run a call on the run's own thread.

        anyio's threads do not fit: when a task is cancelled, its call continues on a thread while
        the next call begins. On a single thread, calls run one after the other, and handlers may
        use thread-local data.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-callbacks")
        context = contextvars.copy_context()
        if (sniffio := sys.modules.get("sniffio")) is not None:
            # The copied context names the async library of this task, but a handler may run an
            # event loop of another library on the run's thread.
            context.run(sniffio.current_async_library_cvar.set, None)
        await wait_for(self._thread.submit(context.run, call))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def _get_attribute(handler: Any, name: str) -> Any:
    """Attribute of a handler; None if it is missing, or if ``__getattr__`` raises."""
    try:
        return getattr(handler, name, None)
    except Exception:
        _log_exception(handler, f"__getattr__({name!r})")
        return None


def _cancels_reading(error: BaseException) -> bool:
    """Whether an exception ends the task that reads the stream, and is not a handler's failure."""
    if isinstance(error, GeneratorExit):
        # If the handler raised it, the traceback goes on into a frame of the handler.
        assert error.__traceback__ is not None
        return error.__traceback__.tb_next is None
    if isinstance(error, asyncio.CancelledError):
        # On trio, where CancelledError is an ordinary exception, current_task() raises.
        with contextlib.suppress(RuntimeError):
            task = asyncio.current_task()
            return task is None or task.cancelling() > 0
    elif isinstance(error, anyio.get_cancelled_exc_class()):
        return True  # The exception is trio's Cancelled, which only trio can create.
    return isinstance(error, KeyboardInterrupt)


def _log_exception(handler: Any, event: str) -> None:
    logger.warning("%s.%s raised", type(handler).__name__, event, exc_info=True)
