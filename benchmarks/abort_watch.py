"""AbortWatch: how long the engine takes to give an aborted request's blocks back."""

from __future__ import annotations

import time
from typing import Any

from asyncllm import AsyncLLMEngine


class AbortWatch:
    """Times aborts of one engine, from the call on any thread to the moment at which the
    engine thread has freed the blocks. No reader takes part.

    Attributes:
        times: seconds, one for each request that was aborted.
    """

    def __init__(self, engine: AsyncLLMEngine) -> None:
        assert engine._thread is not None
        core = engine._thread.core
        abort, on_abort = core.abort, core.on_abort
        began: dict[Any, float] = {}
        self.times: list[float] = []

        def timed_abort(request: Any) -> None:
            began.setdefault(request, time.perf_counter())
            abort(request)

        def timed_on_abort(request: Any) -> None:
            on_abort(request)
            at = began.pop(request, None)
            if at is not None:
                self.times.append(time.perf_counter() - at)

        core.abort = timed_abort  # type: ignore[method-assign]
        core.on_abort = timed_on_abort  # type: ignore[method-assign]
