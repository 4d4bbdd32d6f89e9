"""Shared fixtures and settings."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough", parent=settings.get_profile("default"), max_examples=2000, stateful_step_count=120
)
# The same examples for every mutant, none of them shrunk: that it fails is enough.
settings.register_profile(
    "mutation",
    parent=settings.get_profile("default"),
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """Every asyncio test runs on both loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def no_leftovers():
    """No test leaves a thread of ours behind that it did not find."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        new = set(threading.enumerate()) - before
        left = [t.name for t in new if t.name.startswith("asyncllm")]
        if not left:
            return
        gc.collect()
        time.sleep(0.01)
    pytest.fail(f"threads left: {left}")
