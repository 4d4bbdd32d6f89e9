"""``asyncllm serve``: OpenAI's protocol over HTTP and WebSockets."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import anyio

from asyncllm import validation as check
from asyncllm.cli.session import checked_config, open_engine, run_async
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import EngineError, InvalidRequestError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.05
_CLOSING_SECONDS = 5.0
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

    tokens = _read_tokens(arguments)
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
        server = HttpServer(app, host, arguments.port, limits=limits, drain=_CLOSING_SECONDS)
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
    async with open_engine(engine), server:
        signalled = _watch_signals()
        print(f"{app.model_names[0]}: {server.url}/v1", flush=True)
        await _wait_for_signal_or_death(signalled, engine)
        signalled.clear()
        app.drain()
        await _wait_until_idle(engine, drain, signalled)
        if signalled.is_set():
            server.close_at_once()


async def _wait_for_signal_or_death(signalled: asyncio.Event, engine: AsyncLLMEngine) -> None:
    """Wait for a signal. EngineDeadError ends the command, so that a supervisor restarts it."""
    waits = [asyncio.ensure_future(signalled.wait()), asyncio.ensure_future(engine.wait_closed())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if waits[1].done():
            waits[1].result()
    finally:
        for wait in waits:
            wait.cancel()


async def _wait_until_idle(
    engine: AsyncLLMEngine, seconds: float, signalled: asyncio.Event
) -> None:
    """Wait until no request is left, ``seconds`` have passed, or another signal arrives."""
    with anyio.move_on_after(seconds):
        while not signalled.is_set() and engine.state == "running":
            try:
                stats = engine.stats()
            except EngineError:
                return
            if stats.num_running == stats.num_waiting == stats.num_paused == 0:
                return
            await anyio.sleep(_POLL_SECONDS)


def _watch_signals() -> asyncio.Event:
    """Event set by SIGINT and SIGTERM. The handlers stay until the loop is closed, so that a signal
    does not interrupt closing."""
    signalled = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    return signalled


def _read_tokens(arguments: argparse.Namespace) -> list[str] | None:
    """Bearer tokens from a file and the command line. Prefer the file: other users of the machine
    can read command lines."""
    tokens: list[str] = list(arguments.token or ())
    if arguments.token_file is not None:
        try:
            text = Path(arguments.token_file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"--token-file {arguments.token_file}: {error}", param="token_file"
            ) from error
        found = [line.strip() for line in text.splitlines() if line.strip()]
        if not found:
            raise InvalidRequestError(
                f"--token-file {arguments.token_file}: is empty, expected a token a line",
                param="token_file",
            )
        tokens += found
    return tokens or None


def _log_to_stderr(level: str) -> None:
    """Log from ``level`` on; other libraries' records, such as uvicorn's, only from warnings on."""
    number = getattr(logging, level.upper())
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=max(number, logging.WARNING)
    )
    logging.getLogger("asyncllm").setLevel(number)
