"""CallbackRun: the handlers of one stream, and how they are called."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from asyncllm.callbacks.messages import CallbackMessage
from asyncllm.runtime.event_loop import wait_for

logger = logging.getLogger("asyncllm.callbacks")


@dataclass(eq=False)
class CallbackRun:
    """The handlers of one run, what they are called with, and how.

    Attributes:
        messages: the conversation; None for a prompt.
        prompt: the prompt, or the conversation as one text.
    """

    handlers: Sequence[Any]
    run_id: uuid.UUID
    parent_run_id: uuid.UUID | None
    tags: list[str]
    metadata: dict[str, Any]
    name: str
    model_name: str
    messages: list[CallbackMessage] | None
    prompt: str
    invocation_params: dict[str, Any]
    _thread: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        # A handler that wants to run inline (a tracer, which others build upon) comes first.
        self.handlers = sorted(self.handlers, key=lambda h: not getattr(h, "run_inline", False))

    @property
    def ids(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "parent_run_id": self.parent_run_id, "tags": self.tags}

    async def start(self) -> None:
        """Calls ``on_chat_model_start``, or ``on_llm_start``, of every handler."""
        model = {
            "lc": 1,
            "type": "not_implemented",
            "id": ["asyncllm", "AsyncLLMEngine"],
            "name": "AsyncLLMEngine",
            "repr": f"AsyncLLMEngine({self.model_name!r})",
        }
        extra = {
            **self.ids,
            "metadata": self.metadata,
            "name": self.name,
            "invocation_params": self.invocation_params,
        }
        chat, llm = (model, [self.messages]), (model, [self.prompt])
        for handler in self.handlers:
            if self.messages is None or not await self._call(
                handler, "on_chat_model_start", "ignore_chat_model", chat, extra
            ):
                await self._call(handler, "on_llm_start", "ignore_llm", llm, extra)

    async def tell(self, event: str, *args: Any, **extra: Any) -> None:
        """Calls ``event`` of every handler, in order."""
        for handler in self.handlers:
            await self._call(handler, event, "ignore_llm", args, {**self.ids, **extra})

    async def tell_quietly(self, event: str, *args: Any, **extra: Any) -> None:
        """``tell`` while an exception is on its way: a handler's own does not replace it."""
        for handler in self.handlers:
            # _call has logged what it raises.
            with contextlib.suppress(Exception):
                await self._call(handler, event, "ignore_llm", args, {**self.ids, **extra})

    async def _call(
        self, handler: Any, event: str, ignore: str, args: tuple[Any, ...], extra: dict[str, Any]
    ) -> bool:
        """False if the handler does not have this event, or says so by
        NotImplementedError."""
        method = getattr(handler, event, None)
        if method is None:
            return False
        if getattr(handler, ignore, False):
            return True
        try:
            if inspect.iscoroutinefunction(method):
                await method(*args, **extra)
            elif getattr(handler, "run_inline", False):
                method(*args, **extra)
            else:
                await self._on_thread(functools.partial(method, *args, **extra))
        except NotImplementedError:
            if event == "on_chat_model_start":
                return False
            _log(handler, event)
        except Exception:
            _log(handler, event)
            if getattr(handler, "raise_error", False):
                raise
        return True

    async def _on_thread(self, call: Any) -> None:
        """A thread of this run's own, and not anyio's: a call that a cancelled task has left
        behind ends before the next one begins, and handlers find what they keep by thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-callbacks")
        context = contextvars.copy_context()
        if (sniffio := sys.modules.get("sniffio")) is not None:
            # anyio.run notes its loop in the context; a handler may run another on this thread.
            context.run(sniffio.current_async_library_cvar.set, None)
        await wait_for(self._thread.submit(context.run, call))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def _log(handler: Any, event: str) -> None:
    logger.warning("%s.%s raised", type(handler).__name__, event, exc_info=True)
