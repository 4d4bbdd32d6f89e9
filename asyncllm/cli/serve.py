"""``asyncllm serve``: OpenAI's protocol over HTTP and WebSockets."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio

from asyncllm import validation as check
from asyncllm.cli.session import checked_config, run_async, running_engine
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import EngineError, InvalidRequestError

_GIL_SWITCH_SECONDS = 0.0005
"""Python's switch interval in ``asyncllm serve``. The engine thread acquires the GIL several times
in a step. With Python's default of 5 ms, each time takes up to 5 ms while another thread runs
Python code, such as parsing a large body."""

_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 5.0
"""Seconds for sending the remaining data once the engine is idle."""


def run(arguments: argparse.Namespace) -> int:
    """Serve the model over HTTP until a signal ends it; returns the exit code."""
    _log_to_stderr(arguments.log_level)
    run_async(arguments, lambda: _main(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    # Import the server first, so that a missing extra or a wrong argument is reported before a
    # model is loaded.
    from asyncllm.serving import create_app
    from asyncllm.serving.http_server import ConnectionLimits, HttpServer
    from asyncllm.serving.loopback import is_loopback

    tokens = _read_access_tokens(arguments)
    drain = check.seconds("drain", arguments.drain)
    limits = ConnectionLimits(
        max_connections=arguments.max_connections, max_message_size=arguments.max_body_size
    )
    host = arguments.host
    options = {
        "token": tokens,
        "origins": arguments.origin,
        "local": is_loopback(host),
        "timeout": arguments.timeout,
        "max_body_size": arguments.max_body_size,
        "ignore_unsupported": arguments.ignore_unsupported,
    }
    config = checked_config(arguments)
    engine = AsyncLLMEngine(
        config=config,
        served_model_name=arguments.served_model_name,
        scheduling_policy=arguments.scheduling_policy,
    )
    app = create_app(engine, **options)
    try:
        server = HttpServer(app, host, arguments.port, limits=limits, drain=_DRAIN_SECONDS)
        server.bind()
    except OSError as error:
        accepted = "an address and a port of this machine that are free"
        raise InvalidRequestError(
            f"--host {host} --port {arguments.port}: {error}; expected {accepted}", param="port"
        ) from error
    if tokens is None and not is_loopback(host):
        print(
            f"asyncllm: listening on {host} WITHOUT A TOKEN: all who reach this address use the "
            "model. Pass --token or --token-file, or bind to 127.0.0.1.",
            file=sys.stderr,
            flush=True,
        )
    sys.setswitchinterval(_GIL_SWITCH_SECONDS)
    async with running_engine(engine), server:
        with anyio.CancelScope() as until_signal:
            _install_signal_handlers(until_signal.cancel)
            print(f"{app.model_names[0]}: {server.url}/v1", flush=True)
            # EngineDeadError ends the command, so that a supervisor restarts it.
            await engine.wait_closed()
        app.drain()
        with anyio.move_on_after(drain) as until_second_signal:
            _install_signal_handlers(until_second_signal.cancel, server.close_at_once)
            await _wait_until_idle(engine)


def _install_signal_handlers(*callbacks: Callable[[], None]) -> None:
    """Install handlers of SIGINT and SIGTERM that call ``callbacks``, in place of earlier handlers.
    The handlers stay until the loop is closed, so that a signal does not interrupt closing."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            signal_number, lambda: [callback() for callback in callbacks]
        )


async def _wait_until_idle(engine: AsyncLLMEngine) -> None:
    """Wait until the engine has no request, or does not run."""
    with suppress(EngineError):
        while engine.state == "running":
            stats = engine.stats()
            if stats.num_running == stats.num_waiting == stats.num_paused == 0:
                return
            await anyio.sleep(_POLL_SECONDS)


def _read_access_tokens(arguments: argparse.Namespace) -> list[str] | None:
    """Bearer tokens from a file and the command line. Prefer the file: other users of the machine
    can read command lines."""
    tokens: list[str] = list(arguments.token or ())
    if arguments.token_file is not None:
        try:
            lines = Path(arguments.token_file).read_text(encoding="utf-8").splitlines()
            file_tokens = [line.strip() for line in lines if line.strip()]
            if not file_tokens:
                raise ValueError("is empty, expected a token a line")
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"--token-file {arguments.token_file}: {error}", param="token_file"
            ) from error
        tokens += file_tokens
    return tokens or None


def _log_to_stderr(level: str) -> None:
    """Log asyncllm's records from ``level`` on, and uvicorn's only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    minimum = getattr(logging, level.upper())
    for name, logged_from in (("asyncllm", minimum), ("uvicorn", max(minimum, logging.WARNING))):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logged_from)
