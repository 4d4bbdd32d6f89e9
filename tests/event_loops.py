"""Event loops that an engine runs on."""

from __future__ import annotations

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import uvloop

BACKENDS = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"loop_factory": uvloop.new_event_loop}),
    "trio": ("trio", {}),
}


@pytest.fixture(params=BACKENDS)
def run(request):
    """Runs a coroutine function to its end on one of the backends."""
    backend, options = BACKENDS[request.param]

    def run(main):
        return anyio.run(main, backend=backend, backend_options=options)

    return run
