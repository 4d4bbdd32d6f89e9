"""``asyncllm demo``: several streams at once."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncllm.cli.arguments import sampling_options
from asyncllm.cli.prompts import Prompt, prompts
from asyncllm.cli.session import checked_config, open_engine, run_async
from asyncllm.cli.text import format_seconds, one_line
from asyncllm.cli.tracks import Show, Track, follow_all
from asyncllm.engine import AsyncLLMEngine
from asyncllm.stream import TokenStream


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    return run_async(arguments, lambda: _main(arguments))


async def _main(arguments: argparse.Namespace) -> int:
    config = checked_config(arguments)
    async with open_engine(AsyncLLMEngine(config=config)) as engine:
        display = _choose_display()
        show = _submit(engine, arguments)
        await display(show)
    return 1 if any(track.error for track in show.tracks) else 0


def _choose_display() -> Callable[[Show], Any]:
    if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from asyncllm.cli.demo_view import watch

        return watch
    return _print_when_done


def _submit(engine: AsyncLLMEngine, arguments: argparse.Namespace) -> Show:
    """Submit every prompt. Streams run whether or not they are read."""
    seed = arguments.seed
    chosen = prompts(arguments.streams, random.Random(0 if seed is None else seed))
    given = sampling_options(arguments)
    show = Show(engine, [], time.perf_counter())
    for number, prompt in enumerate(chosen):
        sampling = dict(given) if prompt.long else {"temperature": 0.0, **given}
        if seed is not None:
            sampling["seed"] = (seed + number) % 2**64
        began_at = time.perf_counter()
        show.tracks.append(
            Track(number + 1, prompt, _start_stream(engine, prompt, sampling), began_at)
        )
    return show


def _start_stream(engine: AsyncLLMEngine, prompt: Prompt, sampling: dict[str, Any]) -> TokenStream:
    if not engine.tokenizer.chat_template.sources:
        return engine.stream(prompt.question, **sampling)
    variables = {"tools": list(prompt.tools)} if prompt.tools else None
    return engine.chat(list(prompt.messages), chat_template_kwargs=variables, **sampling)


async def _print_when_done(show: Show) -> None:
    """Print each answer as a whole when it ends, for pipes and files."""
    print(f"{show.num_streams_text} at once on {show.title}", flush=True)
    unprinted = list(show.tracks)

    def refresh() -> None:
        for track in [track for track in unprinted if track.done]:
            unprinted.remove(track)
            print(f"\n{_format_answer(track)}", flush=True)

    await follow_all(show, refresh)
    refresh()
    print(f"\n{show.totals_text()}", flush=True)


def _format_answer(track: Track) -> str:
    answer = track.text.strip().replace("\n", "\n    ")
    lines = [f"[{track.number}] {track.prompt.kind}: {one_line(track.prompt.title, 100)}"]
    if answer:
        lines.append(f"    {answer}")
    if track.error is not None:
        lines.append(f"    failed: {one_line(track.error, 200)}")
    lines.append(
        f"    ({track.num_tokens} tokens, first after {format_seconds(track.ttft)}, "
        f"{track.speed}, {track.finish_reason or 'failed'})"
    )
    return "\n".join(lines)
