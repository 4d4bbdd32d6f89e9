"""Waits for a condition or for an idle engine, and a hold on the thread of long texts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import anyio

from asyncllm import AsyncLLMEngine, EngineStats
from asyncllm.runtime.event_loop import wait_for
from tests.fakes import core_of
from tests.integrity import check_scheduler


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds, on any event loop; TimeoutError after so many seconds."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.001)


def blocking_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """``until`` without an event loop, or with one that stands still meanwhile."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came about"
        time.sleep(0.0005)


async def idle(engine: AsyncLLMEngine) -> EngineStats:
    """Returns when the engine holds nothing any more."""

    def holds_nothing() -> bool:
        stats = engine.stats()
        return stats.num_running == stats.num_waiting == stats.num_paused == 0

    await until(holds_nothing)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return stats


async def all_free(engine: AsyncLLMEngine) -> None:
    """Waits until nothing runs; then every block is free and the books balance."""

    def is_free() -> bool:
        stats = engine.stats()
        return stats.num_free_blocks == stats.num_blocks and not stats.num_waiting

    await until(is_free, 5.0)
    core = core_of(engine)
    await wait_for(core.call(check_scheduler, core.scheduler))
    assert core.admission.num_live_requests == 0
    assert len(core.admission.queued_requests) == 0


@contextlib.contextmanager
def held_up(engine: AsyncLLMEngine) -> Iterator[None]:
    """Hold up the thread of long texts inside the block."""
    go, processor = threading.Event(), engine._require_input_processor()
    processor.submitter._tokenizer_threads.long_thread.submit(go.wait, -1)
    try:
        yield
    finally:
        go.set()
