"""Shared fixtures and settings."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import zlib

import pytest
import uvloop

# Before torch is imported: two workers share the cores, and a second thread of torch's would spin
# beside the tests of the other one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tests.hypothesis_settings  # noqa: F401  (loads the profile)


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """Every asyncio test runs on both loops, but for those of the model alone, which name one."""
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


@pytest.fixture(scope="module")
def quick_collections():
    """What earlier tests have imported is left out of a module's many collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread():
    """Ops of the test's own thread, which another test's runner may have given more."""
    from asyncllm.gpu.threads import set_thread_count

    set_thread_count(1)


@pytest.fixture
def small_bandwidth_probe(monkeypatch):
    """Reports read 1 MiB where 256 MiB would take a quarter of a second."""
    from asyncllm.gpu import execution_report

    monkeypatch.setattr(execution_report, "BANDWIDTH_PROBE_BYTES", 2**20)


@pytest.fixture
def own_code(tmp_path_factory, monkeypatch):
    """transformers keeps the code of checkpoints in a folder of this test, and imports it anew: it
    is one package, found where the first test of a process had it."""
    from transformers import dynamic_module_utils

    folder = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


UVLOOP_FILES = ("test_app.py", "test_stream.py")
"""Files whose tests run on uvloop every time; those of others are slow there."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """The longest test comes first: at the end it would keep one worker busy alone."""
    items.sort(key=lambda item: "test_kernels_in_the_interpreter" not in item.nodeid)
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        on_uvloop = params.get("_asyncio_loop_factory") is uvloop.new_event_loop
        if on_uvloop and item.path.name not in UVLOOP_FILES:
            item.add_marker(pytest.mark.slow)
    share = int(os.environ.get("SLOW_SHARE", "1"))
    left_out = {item for item in items if item.get_closest_marker("slow") and crc(item) % share}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def crc(item: pytest.Item) -> int:
    """A number that the test has in every run and on every machine."""
    return zlib.crc32(item.nodeid.encode())


def pytest_collection_finish(session):
    """What was imported until here is left out of the many collections to come."""
    gc.collect()
    gc.freeze()
