"""Session: the event loop, engine and progress bar around a command's own work."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from asyncllm.cli.arguments import engine_options, sampling_options
from asyncllm.cli.text import format_bytes
from asyncllm.config import EngineConfig
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams

T = TypeVar("T")

_POLL_SECONDS = 0.05


def loop_factory(arguments: argparse.Namespace) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of the event loop; None selects asyncio's default loop.

    Raises:
        InvalidRequestError: for ``--uvloop`` if uvloop is not installed.
    """
    if not arguments.uvloop:
        return None
    try:
        import uvloop
    except ImportError:
        raise InvalidRequestError(
            "--uvloop: uvloop is not installed; pip install 'asyncllm[uvloop]'"
        ) from None
    return uvloop.new_event_loop


def run_async(arguments: argparse.Namespace, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` on a new event loop."""
    with asyncio.Runner(loop_factory=loop_factory(arguments)) as runner:
        return runner.run(main())


def checked_config(arguments: argparse.Namespace) -> EngineConfig:
    """Make the engine's configuration; checks the sampling options too, before a model is loaded.

    Raises:
        InvalidRequestError: for a value out of range.
    """
    SamplingParams(seed=getattr(arguments, "seed", None), **sampling_options(arguments))
    return EngineConfig(model=arguments.model, **engine_options(arguments))


@asynccontextmanager
async def running_engine(engine: AsyncLLMEngine) -> AsyncIterator[AsyncLLMEngine]:
    """Start an engine, and close it at the end. On a terminal, show the progress of loading."""
    if sys.stderr.isatty():
        await _start_with_bar(engine)
    else:
        await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


async def _start_with_bar(engine: AsyncLLMEngine) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    name = model_name(engine)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"loading {name}", total=None)

        async def show_progress() -> None:
            while True:
                done, total = engine.load_progress
                if total:
                    bytes_done = f"{format_bytes(done)} of {format_bytes(total)}"
                    description = {
                        "download": f"downloading {name}, {bytes_done}",
                        "kernels": f"compiling kernels, {done} of {total} steps",
                        "graphs": f"capturing CUDA graphs, {done} of {total}",
                    }.get(engine.load_stage, f"loading {name}, {bytes_done}")
                    progress.update(task, description=description, completed=done, total=total)
                await asyncio.sleep(_POLL_SECONDS)

        progress_task = asyncio.create_task(show_progress())
        try:
            await engine.start()
        finally:
            progress_task.cancel()


def model_name(engine: AsyncLLMEngine) -> str:
    """Short name of the model."""
    config = engine.config
    name = config.model_name
    is_path_or_id = config.model is not None and config.served_model_name is None
    return name.rstrip("/").split("/")[-1] if is_path_or_id else name
