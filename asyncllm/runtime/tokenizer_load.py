"""TokenizerLoad: the tokenizer, read on a thread of its own while weights are packed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

Read = TypeVar("Read")


class TokenizerLoad(Generic[Read]):
    """Reading a tokenizer holds the GIL for half a second where its vocabulary is large; packing
    weights does not need it. So it begins with the first of them, the embedding, whose packing
    takes longest.

    Args:
        read: called once.
    """

    def __init__(self, read: Callable[[], Read]) -> None:
        self._read = read
        self._found: Future[Read] = Future()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread, unless it was started or the tokenizer is read already; called as
        loading goes on, which ends there if ``read`` has failed."""
        if self._found.done():
            self._found.result()
        elif self._thread is None:
            thread = threading.Thread(target=self._run, name="asyncllm-tokenizer-load", daemon=True)
            # Where the system has no thread to give, the tokenizer is read behind the weights.
            with suppress(RuntimeError, MemoryError):
                thread.start()
                self._thread = thread

    def result(self) -> Read:
        """What ``read`` returns or raises. Without a thread it is read here; with one, the thread
        has ended."""
        if self._thread is not None:
            self._thread.join()
        elif not self._found.done():
            self._run()
        return self._found.result()

    def _run(self) -> None:
        try:
            self._found.set_result(self._read())
        except BaseException as error:
            self._found.set_exception(error)
