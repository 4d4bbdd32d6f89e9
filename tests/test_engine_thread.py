"""EngineThread: intervals of the watchdog."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from asyncllm import EngineConfig
from asyncllm.runtime.engine_thread import EngineThread


@pytest.mark.parametrize(
    ("step_timeout", "interval"), [(120.0, 15.0), (0.08, 0.01), (0.1, 0.0125), (0.001, 0.01)]
)
def test_step_is_checked_eight_times_before_timeout(step_timeout, interval):
    thread = EngineThread(EngineConfig(model="m", step_timeout=step_timeout), lambda *_: None)
    assert thread.hang_check_interval == pytest.approx(interval)


@pytest.mark.parametrize(("asked", "expected"), [(None, 60.0), (600.0, 600.0), (2.0, 2.0)])
def test_the_device_says_how_long_a_step_may_take(asked, expected):
    thread = EngineThread(EngineConfig(model="m", step_timeout=asked), lambda *_: None)
    info = SimpleNamespace(step_timeout=60.0)
    thread.loaded_model = SimpleNamespace(executor=SimpleNamespace(info=info))
    assert thread.step_timeout == expected
    assert thread.hang_check_interval == pytest.approx(expected / 8)


def test_watchdog_checks_at_intervals(monkeypatch):
    """On a loop whose time is the test's: every sleep is as long as it says."""
    thread = EngineThread(EngineConfig(model="m", step_timeout=80.0), lambda *_: None)
    looks = []

    async def main():
        loop = asyncio.get_running_loop()
        began = now = 50.0

        def check_for_hung_step():
            looks.append(now - began)
            if len(looks) == 3:
                thread.exited.set_result(None)

        monkeypatch.setattr(thread, "check_for_hung_step", check_for_hung_step)
        monkeypatch.setattr(loop, "time", lambda: now)
        thread.supervise()
        while not thread.exited.done():
            await asyncio.sleep(0)
            handles = [handle.when() for handle in loop._scheduled if not handle.cancelled()]
            # One is for ever: it only says that the loop was closed.
            if soon := [when for when in handles if when < began + 1000.0]:
                now = min(soon)
        await thread.join_watch_task()

    asyncio.run(main())
    assert looks == [10.0, 20.0, 30.0]
