"""AbortWatch: how long the engine takes to give an aborted request's blocks back."""

from __future__ import annotations

import time

from asyncllm import AsyncLLMEngine
from asyncllm.core.request import RequestGroup


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
        began: dict[RequestGroup, float] = {}
        self.times: list[float] = []

        def timed_abort(group: RequestGroup) -> None:
            began.setdefault(group, time.perf_counter())
            abort(group)

        def timed_on_abort(group: RequestGroup) -> None:
            on_abort(group)
            at = began.pop(group, None)
            if at is not None:
                self.times.append(time.perf_counter() - at)

        core.abort = timed_abort
        core.on_abort = timed_on_abort
