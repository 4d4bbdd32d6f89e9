"""TokenizerLoad: reads the tokenizer on a thread of its own while weights are packed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class TokenizerLoad(Generic[T]):
    """Reads a tokenizer on a thread while weights are packed. Reading holds the GIL for half a
    second if the vocabulary is large; packing does not need the GIL. The thread starts with the
    first weight, the embedding, whose packing takes longest.

    Args:
        read: reads the tokenizer; called once.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._future: Future[T] = Future()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread unless it has started. Called repeatedly during loading; raises the
        error of ``read`` if it has failed."""
        if self._future.done():
            self._future.result()
        elif self._thread is None:
            thread = threading.Thread(target=self._run, name="asyncllm-tokenizer-load", daemon=True)
            # Without a thread, ``result`` reads the tokenizer after the weights.
            with suppress(RuntimeError, MemoryError):
                thread.start()
                self._thread = thread

    def result(self) -> T:
        """Result or exception of ``read``. Waits for the thread; if no thread was started, calls
        ``read``."""
        if self._thread is not None:
            self._thread.join()
        elif not self._future.done():
            self._run()
        return self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._read())
        except BaseException as error:
            self._future.set_exception(error)
