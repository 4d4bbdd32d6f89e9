"""CallbackRun: calls the handlers of one stream, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import anyio

from asyncllm.callbacks.messages import CallbackMessage
from asyncllm.runtime.event_loop import wait_for

logger = logging.getLogger("asyncllm.callbacks")


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
        ignore: str,
        args: tuple[Any, ...],
        extra: dict[str, Any],
        quiet: bool = False,
    ) -> bool:
        """Call the method ``event`` of a handler.

        Args:
            ignore: name of the attribute by which a handler declines the event.

        Returns:
            False if the handler lacks the method, or if ``on_chat_model_start`` raises
            NotImplementedError.
        """
        method = _get_attribute(handler, event)
        if method is None:
            return False
        if _get_attribute(handler, ignore):
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
        the next begins. On a single thread, calls run one after the other, and handlers may use
        thread-local data.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-callbacks")
        context = contextvars.copy_context()
        if (sniffio := sys.modules.get("sniffio")) is not None:
            # The copied context says which async library runs here. A handler may run an event
            # loop of another library on this thread.
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
    """Whether an exception cancels the reading task, rather than coming from the handler itself."""
    if isinstance(error, GeneratorExit):
        # If the exception was thrown into this task, its traceback has no frame of the handler.
        assert error.__traceback__ is not None
        return error.__traceback__.tb_next is None
    if isinstance(error, asyncio.CancelledError):
        with contextlib.suppress(RuntimeError):  # on trio, CancelledError is an ordinary exception
            task = asyncio.current_task()
            return task is None or task.cancelling() > 0
    elif isinstance(error, anyio.get_cancelled_exc_class()):
        return True  # this is trio's Cancelled, which only trio can create
    return isinstance(error, KeyboardInterrupt)


def _log_exception(handler: Any, event: str) -> None:
    logger.warning("%s.%s raised", type(handler).__name__, event, exc_info=True)
